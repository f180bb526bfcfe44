"""The files of a bundle folder, verified before anything is loaded. It knows no graph."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from forge_station.contract import manifest as contract_manifest
from forge_station.contract.error import ContractError
from forge_station.contract.manifest import MANIFEST_NAME, Manifest
from forge_station.errors import BundleError

_CHUNK = 1 << 22


@dataclass(frozen=True)
class BundleFiles:
    """A bundle folder whose listed files have the digests of its manifest."""

    folder: Path
    manifest: Manifest

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
    path = folder / MANIFEST_NAME
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BundleError(
            "bundle has no readable manifest",
            which=path,
            got=error.strerror,
            action="give the folder that `python -m export.bundle` wrote",
        ) from error
    try:
        return contract_manifest.parse(content, which=str(path))
    except ContractError as error:
        raise BundleError(str(error)) from error


def verify_folder(folder: Path) -> BundleFiles:
    """Read the manifest and check size and sha256 of every listed file. Raises BundleError."""
    manifest = read_manifest(folder)
    for name in sorted(manifest.files):
        path = folder / name
        try:
            size, digest = path.stat().st_size, _sha256(path)
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
    return BundleFiles(folder, manifest)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
