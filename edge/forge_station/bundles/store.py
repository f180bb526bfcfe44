"""The bundles of a station side by side, and which of them is active.

    store.json               line, highest release that ever ran, versions that proved themselves
    versions/<name>-<version>-r<release>-<digest>/   bundle folders, never changed
    active -> versions/...   replaced by rename: there is always exactly one, or none at first
    incoming/, jobs/         half transfers; deployments in progress (`jobs.py`)

A bundle comes in verified and flushed, or not at all, and is verified again before it is made
active. It knows no model, no broker and no running station.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from forge_station.bundles import archive
from forge_station.bundles.trust import Trust
from forge_station.contract.manifest import Manifest
from forge_station.contract.seal import SignedAllowance
from forge_station.errors import BundleError
from forge_station.mes import state_file
from forge_station.vlm.bundle_files import read_manifest, verify_folder

SCHEMA = "forge-station.store/1.0"
STATE, ACTIVE, VERSIONS, INCOMING, JOBS = "store.json", "active", "versions", "incoming", "jobs"
KEEP = 3
_PLAIN = re.compile(r"[^A-Za-z0-9._+-]")


@dataclass(frozen=True)
class Version:
    """A bundle in the store. `good`: it was active and proved itself, or a person made it so."""

    name: str
    folder: Path
    manifest: Manifest
    good: bool = False

    @property
    def text(self) -> str:
        """For people."""
        found = self.manifest
        return f"{found.name} {found.version}, release {found.release_counter}"


def is_store(path: Path) -> bool:
    """Whether a station file names a store there, and not a bundle folder."""
    return (path / STATE).is_file()


def in_use(path: Path) -> Path:
    """The bundle folder that a station opens: of a store the active one. Raises BundleError."""
    if not is_store(path):
        return path
    active = BundleStore(path).active
    if active is None:
        raise BundleError(
            "no bundle is active in the store",
            which=path,
            action="run `forge-station bundle install`, then `bundle activate`",
        )
    return active.folder


def version_name(manifest: Manifest) -> str:
    """The folder of a bundle in a store; says everything, so that no two share one."""
    shown = _PLAIN.sub("_", manifest.version)[:40]
    return f"{manifest.name}-{shown}-r{manifest.release_counter}-{manifest.sha256[:12]}"


class BundleStore:
    """One store. Several processes may use it: what changes it takes the store's lock."""

    def __init__(self, root: Path) -> None:
        """Open a store that exists. Raises BundleError."""
        self.root = root.absolute()
        if not is_store(self.root):
            raise BundleError(
                "not a bundle store",
                which=root,
                expected=f"a folder with {STATE}",
                action="`forge-station bundle install` makes one where there is nothing yet",
            )

    @classmethod
    def create(cls, root: Path, line: str) -> BundleStore:
        """Open the store, made anew where there is nothing. `line`: of its station."""
        if not is_store(root):
            if root.exists() and any(root.iterdir()):
                raise BundleError(
                    "the folder holds something else",
                    which=root,
                    expected="a bundle store, an empty folder or none",
                    action="name another folder for the store",
                )
            for name in (VERSIONS, INCOMING, JOBS):
                (root / name).mkdir(parents=True, exist_ok=True)
            state_file.write(
                root / STATE, {"schema": SCHEMA, "line": line, "highest": {}, "good": []}
            )
        return cls(root)

    @property
    def line(self) -> str:
        """Product line of the station."""
        return str(self._state()["line"])

    @property
    def active(self) -> Version | None:
        """The version that a station opens; None before the first activation."""
        try:
            target = Path(os.readlink(self.root / ACTIVE))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BundleError(
                "the store's pointer cannot be read", which=self.root / ACTIVE, got=error.strerror
            ) from error
        return self.version(target.name)

    def version(self, name: str) -> Version:
        """By name. Raises BundleError."""
        folder = self.root / VERSIONS / name
        if "/" in name or not folder.is_dir():
            known = ", ".join(path.name for path in self._folders()) or "none"
            raise BundleError("no such bundle in the store", which=name, expected=known)
        return Version(name, folder, read_manifest(folder), name in self._state()["good"])

    def versions(self) -> list[Version]:
        """Newest first, by when they came in."""
        return [self.version(path.name) for path in self._folders()]

    def install(
        self,
        source: Path,
        trust: Trust,
        *,
        allowance: SignedAllowance | None = None,
        downgrade_to: int | None = None,
        progress: archive.Progress = lambda _done, _all: None,
    ) -> Version:
        """Verify a bundle (folder or file) and put it beside the others; the active one stays.

        `allowance` lets in a release that is older than one that has run here; `downgrade_to` is
        the same said by a caller that has verified it. Raises BundleError. A bundle that is there
        already is verified and returned.
        """
        with self._alone():
            draft = self.root / INCOMING / f"{os.getpid()}.install"
            try:
                found = archive.take(source, draft, trust, progress)
                self.require_fit(found.manifest, trust, allowance, downgrade_to)
                name = version_name(found.manifest)
                folder = self.root / VERSIONS / name
                if folder.exists():
                    verify_folder(folder, trust)
                else:
                    draft.rename(folder)
                    _flush(folder.parent)
                return self.version(name)
            finally:
                shutil.rmtree(draft, ignore_errors=True)

    def require_fit(
        self,
        manifest: Manifest,
        trust: Trust,
        allowance: SignedAllowance | None = None,
        downgrade_to: int | None = None,
    ) -> None:
        """Raise BundleError for a bundle of another line, or older than one that has run here."""
        state = self._state()
        if manifest.line not in ("", state["line"]):
            raise BundleError(
                "the bundle is for another product line",
                which=f"{manifest.name} {manifest.version}",
                expected=state["line"],
                got=manifest.line,
            )
        now = datetime.now(timezone.utc)
        allowed = trust.allows(allowance, manifest, now) or downgrade_to == manifest.release_counter
        highest = state["highest"].get(manifest.name)
        if allowed or highest is None:
            return
        counter = manifest.release_counter
        if counter < highest["counter"]:
            raise BundleError(
                "an older release than one that has run here",
                which=f"{manifest.name} {manifest.version}",
                expected=f"release {highest['counter']} or later",
                got=counter,
                action="go back to a bundle of this store with `bundle rollback`, or have the "
                "downgrade signed: forge-station bundle allow",
            )
        if counter == highest["counter"] and manifest.sha256 != highest["sha256"]:
            raise BundleError(
                "another bundle has run here under this release number",
                which=f"{manifest.name} {manifest.version}, release {counter}",
                expected=f"sha256 {highest['sha256'][:16]}...",
                got=f"{manifest.sha256[:16]}...",
                action="release it under a higher number (export.bundle --release)",
            )

    def activate(self, name: str, trust: Trust, *, good: bool = False) -> Version:
        """Verify a version and make it the active one, in one step that cannot be half done.

        `good`: a person vouches for it, it is a target of rollback from now on. Its release is the
        highest that ran, unless one was higher. Raises BundleError; then nothing has changed.
        """
        with self._alone():
            return self._activate(name, trust, good=good)

    def commit(self, name: str) -> None:
        """The version has proved itself: rollback may come back to it."""
        with self._alone():
            state = self._state()
            others = [item for item in state["good"] if item != name]
            self._write({**state, "good": [*others, name]})

    def rollback(self, trust: Trust) -> Version:
        """Go back to the last version that proved itself, and forget that the active one did.

        Always allowed, whatever its release. Versions that are damaged are passed over. Raises
        BundleError when none is left; then nothing has changed.
        """
        with self._alone():
            state, active = self._state(), self.active
            left = [item for item in state["good"] if active is None or item != active.name]
            for name in reversed(left):
                try:
                    found = self._activate(name, trust, good=False)
                except BundleError:
                    continue
                self._write({**self._state(), "good": left})
                return found
            raise BundleError(
                "nothing to go back to",
                which=self.root,
                expected="an earlier bundle that proved itself here and is still whole",
                got=", ".join(left) or "none",
            )

    def prune(self, keep: int = KEEP) -> list[str]:
        """Remove the oldest versions beyond `keep`; never the active one nor its fallback."""
        with self._alone():
            state, active = self._state(), self.active
            held = {active.name} if active is not None else set()
            held |= set([item for item in state["good"] if item not in held][-1:])
            names = [path.name for path in self._folders()]
            kept = [name for name in names if name in held]
            kept += [name for name in names if name not in held][: max(0, keep - len(kept))]
            removed = [name for name in names if name not in kept]
            if removed:
                good = [item for item in state["good"] if item not in removed]
                self._write({**state, "good": good})
            for name in removed:
                shutil.rmtree(self.root / VERSIONS / name)
            return removed

    def _activate(self, name: str, trust: Trust, *, good: bool) -> Version:
        found = self.version(name)
        verify_folder(found.folder, trust)
        state, manifest = self._state(), found.manifest
        highest = dict(state["highest"])
        known = highest.get(manifest.name, {"counter": -1})
        if manifest.release_counter > known["counter"]:
            highest[manifest.name] = {
                "counter": manifest.release_counter,
                "sha256": manifest.sha256,
            }
        listed = [item for item in state["good"] if item != name or not good]
        self._write({**state, "highest": highest, "good": [*listed, *([name] if good else [])]})
        beside = self.root / f".{ACTIVE}.new"
        beside.unlink(missing_ok=True)
        beside.symlink_to(Path(VERSIONS) / name)
        beside.replace(self.root / ACTIVE)
        _flush(self.root)
        return self.version(name)

    def _folders(self) -> list[Path]:
        folders = [path for path in (self.root / VERSIONS).iterdir() if path.is_dir()]
        return sorted(folders, key=lambda path: (path.stat().st_ctime_ns, path.name), reverse=True)

    def _state(self) -> dict[str, Any]:
        found = state_file.read(self.root / STATE)
        try:
            if found["schema"] != SCHEMA:
                raise KeyError("schema")
            return {key: found[key] for key in ("schema", "line", "highest", "good")}
        except KeyError as error:
            raise BundleError(
                "the store's record cannot be read",
                which=self.root / STATE,
                expected=SCHEMA,
                got=f"no {error}",
                action="restore it from a backup; without it a downgrade cannot be told",
            ) from error

    def _write(self, state: dict[str, Any]) -> None:
        try:
            state_file.write(self.root / STATE, state)
        except OSError as error:
            raise BundleError(
                "the store cannot be written", which=self.root, got=error.strerror
            ) from error

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One change at a time; the lock goes with its process, however that ends."""
        try:
            with (self.root / "lock").open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise BundleError(
                "the store cannot be written", which=error.filename or self.root, got=error.strerror
            ) from error


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
