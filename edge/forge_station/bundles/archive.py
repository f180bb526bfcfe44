"""A bundle as one file: an uncompressed tar whose first members say what the others must be.

    manifest.json, signatures.json, certificate.json (the last two where they exist), then the
    files of the manifest in the order of their names

Tar, because every tool reads it and it can be checked while it arrives: signatures first, then
each file against its digest. A zip has its list at the end, and may have a second one. Not
compressed: weights do not get smaller, and a decompressor is one more thing to attack. The same
bundle gives the same bytes: no times, no owners.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from forge_station.bundles.trust import Trust
from forge_station.contract import manifest as contract_manifest
from forge_station.contract.certificate import CERTIFICATE_NAME
from forge_station.contract.error import ContractError
from forge_station.contract.manifest import MANIFEST_NAME, Manifest
from forge_station.contract.seal import SEAL_NAME
from forge_station.errors import BundleError
from forge_station.vlm.bundle_files import BundleFiles, verify_folder

SUFFIX = ".fsb"
MAX_BYTES = 64 << 30
"""Of all files of one bundle."""
_MAX_NOTE_BYTES = 4 << 20
_NOTES = (MANIFEST_NAME, SEAL_NAME, CERTIFICATE_NAME)
_CHUNK = 1 << 20

Progress = Callable[[int, int], object]
"""(bytes done, bytes in all)"""


def _silent(_done: int, _all: int) -> None: ...


def pack(folder: Path, out: Path, progress: Progress = _silent) -> BundleFiles:
    """Write the folder's bundle as one file, whole or not at all. Raises BundleError."""
    found = verify_folder(folder)
    names = [name for name in _NOTES if (folder / name).is_file()]
    names += sorted(found.manifest.files)
    total = sum((folder / name).stat().st_size for name in names)
    draft = out.with_name(f".{out.name}.{os.getpid()}.part")
    done = 0
    try:
        with draft.open("xb") as file, tarfile.open(fileobj=file, mode="w", format=_FORMAT) as tar:
            for name in names:
                header = tarfile.TarInfo(name)
                header.size = (folder / name).stat().st_size
                header.mode = 0o644
                with (folder / name).open("rb") as source:
                    tar.addfile(header, source)
                done += header.size
                progress(done, total)
        _flush(draft)
        draft.replace(out)
    except OSError as error:
        raise BundleError(
            "the bundle file cannot be written", which=out, got=error.strerror
        ) from error
    finally:
        draft.unlink(missing_ok=True)
    return found


_FORMAT = tarfile.USTAR_FORMAT


def take(source: Path, folder: Path, trust: Trust, progress: Progress = _silent) -> BundleFiles:
    """Bring a bundle, a folder or one file, into the new `folder`, and verify what lies there.

    Only what the manifest lists comes along, its signatures are checked before any of it is
    written, and everything is flushed to disk. Raises BundleError; then `folder` is gone again.
    """
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    try:
        if source.is_dir():
            _take_folder(source, folder, trust, progress)
        else:
            _take_file(source, folder, trust, progress)
        found = verify_folder(folder, trust)
        for path in (folder, *(p for p in folder.rglob("*") if p.is_dir())):
            _flush(path)
        _flush(folder.parent)
        return found
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise BundleError(
            "the bundle cannot be taken over", which=error.filename or source, got=error.strerror
        ) from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _take_folder(source: Path, folder: Path, trust: Trust, progress: Progress) -> None:
    manifest = verify_folder(source, trust).manifest
    _require_room(manifest, folder)
    notes = [name for name in _NOTES if (source / name).is_file()]
    total, done = sum(entry.size for entry in manifest.files.values()), 0
    for name in (*notes, *sorted(manifest.files)):
        with (source / name).open("rb") as file:
            done += _copy(file, folder / name, (source / name).stat().st_size)
        progress(min(done, total), total)


def _take_file(source: Path, folder: Path, trust: Trust, progress: Progress) -> None:
    with _members(source) as members:
        notes: dict[str, bytes] = {}
        for member, file in members:
            if member.name not in _NOTES or member.name in notes:
                break
            if member.size > _MAX_NOTE_BYTES:
                raise _refused(source, member.name, f"{member.size} bytes")
            notes[member.name] = _whole(file, member.size)
        else:
            member, file = tarfile.TarInfo(), io.BytesIO()
        if MANIFEST_NAME not in notes or next(iter(notes)) != MANIFEST_NAME:
            raise BundleError(
                "not a bundle file",
                which=source,
                expected=f"a tar whose first member is {MANIFEST_NAME}",
                got=next(iter(notes), member.name or "nothing"),
                action="make it: forge-station bundle pack",
            )
        trust.check(notes[MANIFEST_NAME], notes.get(SEAL_NAME), source)
        try:
            manifest = contract_manifest.parse(notes[MANIFEST_NAME], str(source))
        except ContractError as error:
            raise BundleError(str(error)) from error
        _require_room(manifest, folder)
        for name, content in notes.items():
            _copy(io.BytesIO(content), folder / name, len(content))
        left = dict(manifest.files)
        total, done = sum(entry.size for entry in left.values()), 0
        while member.name:
            entry = left.pop(member.name, None)
            if entry is None or entry.size != member.size:
                listed = f"{entry.size} bytes" if entry else "a file that the manifest lists, once"
                raise _refused(source, member.name, f"{member.size} bytes", listed)
            done += _copy(file, folder / member.name, member.size, entry.sha256)
            progress(done, total)
            member, file = next(members, (tarfile.TarInfo(), io.BytesIO()))
        if left:
            raise BundleError(
                "the bundle file is incomplete",
                which=source,
                expected=", ".join(sorted(left)[:5]),
                got="the end of the file",
                action="copy it again",
            )


@contextmanager
def _members(source: Path) -> Iterator[Iterator[tuple[tarfile.TarInfo, IO[bytes]]]]:
    """The members in order, each a plain file. Raises BundleError for anything else."""
    try:
        with source.open("rb") as raw, tarfile.open(fileobj=raw, mode="r|") as tar:
            yield _plain(tar, source)
    except tarfile.TarError as error:
        raise BundleError(
            "the bundle file is damaged", which=source, got=error, action="copy it again"
        ) from error


def _plain(tar: tarfile.TarFile, source: Path) -> Iterator[tuple[tarfile.TarInfo, IO[bytes]]]:
    for member in tar:
        if not member.isreg() or member.issparse():
            raise _refused(source, member.name, "a link, a folder or a device")
        file = tar.extractfile(member)
        assert file is not None  # of a regular file
        yield member, file


def _refused(source: Path, name: str, got: str, expected: str = "a plain file") -> BundleError:
    return BundleError(
        "the bundle file has a member that does not belong there",
        which=f"{source.name}: {name[:200]!r}",
        expected=expected,
        got=got,
        action="make it anew: forge-station bundle pack",
    )


def _require_room(manifest: Manifest, folder: Path) -> None:
    total = sum(entry.size for entry in manifest.files.values())
    free = shutil.disk_usage(folder).free
    if total > MAX_BYTES or total * 1.02 > free:
        raise BundleError(
            "no room for the bundle",
            which=folder.parent,
            expected=f"{total / 1e6:.0f} MB, and at most {MAX_BYTES / 1e6:.0f} MB",
            got=f"{free / 1e6:.0f} MB free",
        )


def _whole(file: IO[bytes], size: int) -> bytes:
    content = file.read(size)
    if len(content) != size:
        raise tarfile.ReadError("it ends too early")
    return content


def _copy(file: IO[bytes], path: Path, size: int, sha256: str | None = None) -> int:
    """Write exactly `size` bytes to a new file and flush them. Raises BundleError, OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    digest, left = hashlib.sha256(), size
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    with os.fdopen(handle, "wb") as target:
        while left:
            chunk = file.read(min(_CHUNK, left))
            if not chunk:
                raise tarfile.ReadError(f"{path.name} ends too early")
            digest.update(chunk)
            target.write(chunk)
            left -= len(chunk)
        target.flush()
        os.fsync(target.fileno())
    if sha256 is not None and digest.hexdigest() != sha256:
        raise BundleError(
            "bundle file was changed",
            which=path.name,
            expected=f"sha256 {sha256[:16]}...",
            got=f"{digest.hexdigest()[:16]}...",
            action="the bundle is edited or damaged; copy it again",
        )
    return size


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
