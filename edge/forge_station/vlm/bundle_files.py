"""The files of a bundle folder, verified before anything is loaded. It knows no graph."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from forge_station.bundles import formats
from forge_station.bundles.trust import Trust
from forge_station.contract import manifest as contract_manifest
from forge_station.contract.error import ContractError
from forge_station.contract.manifest import MANIFEST_NAME, Manifest
from forge_station.contract.seal import SEAL_NAME
from forge_station.errors import BundleError

_CHUNK = 1 << 18
"""Stays in the processor's cache between the copy from the file and the hash."""
_MAX_MANIFEST_BYTES = 4 << 20


@dataclass(frozen=True)
class BundleFiles:
    """A bundle folder whose listed files have the digests of its manifest."""

    folder: Path
    manifest: Manifest
    signed_by: tuple[str, ...] = ()
    """Ids of the trusted keys that signed; empty where nobody asked."""

    def path(self, name: str) -> Path:
        """Path of a listed file; BundleError when the manifest does not list it."""
        if name not in self.manifest.files:
            raise BundleError(
                "bundle has no such file",
                which=f"{self.folder.name}: {name}",
                expected=", ".join(sorted(self.manifest.files)),
                action="export the bundle again",
            )
        return self.folder / name


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a bundle folder. Raises BundleError."""
    return _parsed(_manifest_bytes(folder), folder / MANIFEST_NAME)


def verify_folder(folder: Path, trust: Trust | None = None) -> BundleFiles:
    """Read the manifest and check size and sha256 of every listed file. Raises BundleError.

    With `trust` also who signed, before anything else is looked at, and that each file is what its
    name says and harmless. That is what a station asks; a build machine looks at digests alone.
    """
    content = _manifest_bytes(folder)
    signed_by: tuple[str, ...] = ()
    if trust is not None:
        signed_by = trust.check(content, seal_bytes(folder), folder)
    manifest = _parsed(content, folder / MANIFEST_NAME)
    for name in sorted(manifest.files):
        path = folder / name
        try:
            _require_plain(folder, path)
            size = path.stat().st_size
            listed = manifest.files[name].size
            # A file of the wrong size needs no digest to be refused.
            digest = _sha256(path) if size == listed else ""
            contract_manifest.verify_digest(manifest, name, size, digest)
        except OSError as error:
            raise BundleError(
                "bundle file cannot be read",
                which=path,
                got=error.strerror,
                action="the bundle is incomplete; copy it again",
            ) from error
        except ContractError as error:
            raise BundleError(
                error.what,
                which=path,
                expected=error.expected,
                got=error.got,
                action=error.action,
            ) from error
        if trust is not None:
            formats.check(path, name, manifest.files)
    return BundleFiles(folder, manifest, signed_by)


def seal_bytes(folder: Path) -> bytes | None:
    """Content of the bundle's seal, None without one. Raises BundleError."""
    try:
        return _read_small(folder / SEAL_NAME)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BundleError(
            "the seal cannot be read", which=folder / SEAL_NAME, got=error.strerror
        ) from error


def _manifest_bytes(folder: Path) -> bytes:
    path = folder / MANIFEST_NAME
    try:
        return _read_small(path)
    except OSError as error:
        raise BundleError(
            "bundle has no readable manifest",
            which=path,
            got=error.strerror,
            action="give the folder that `python -m export.bundle` wrote",
        ) from error


def _parsed(content: bytes, path: Path) -> Manifest:
    try:
        return contract_manifest.parse(content, which=str(path))
    except ContractError as error:
        raise BundleError(str(error)) from error


def _read_small(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(_MAX_MANIFEST_BYTES + 1)
    if len(content) > _MAX_MANIFEST_BYTES:
        raise BundleError(
            "file too large", which=path, expected=f"at most {_MAX_MANIFEST_BYTES} bytes"
        )
    return content


def _require_plain(folder: Path, path: Path) -> None:
    """Neither the file nor a folder on the way to it is a link, a device or a pipe."""
    parents = [parent for parent in path.parents if parent.is_relative_to(folder)][:-1]
    for place, plain in ((path, stat.S_ISREG), *((parent, stat.S_ISDIR) for parent in parents)):
        if not plain(os.lstat(place).st_mode):
            raise BundleError(
                "a bundle holds plain files and folders only",
                which=place,
                got="a link or a device",
                action="copy the bundle with its links followed",
            )


def _sha256(path: Path) -> str:
    """Through one buffer, as `hashlib.file_digest` (Python 3.11) does: a new one for each chunk
    would be new pages each time. Two threads hash no faster on one core."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
