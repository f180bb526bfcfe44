"""An evidence folder: files and index together, within a quota.

Files first, then the row: a crash between them leaves files that `reconcile` finds by their verdict
and takes in. Deleting begins with the verdict and ends with the row, so that a crash leaves a row
without its verdict, whose other files `reconcile` deletes. Only files of a part that the index
knows are ever deleted; what else lies in the folder is left alone. One object, one thread; several
processes may use one folder.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from forge_station.capture import replay
from forge_station.capture.replay import Recording
from forge_station.config import EvidenceConfig
from forge_station.contract.verdict import SCHEMA, Outcome
from forge_station.errors import StationError
from forge_station.evidence.files import json_bytes, name_of, write_whole
from forge_station.evidence.index import Index, Query, Row, Totals
from forge_station.evidence.retention import LABELS, Room, drawn

log = logging.getLogger(__name__)

INDEX = "index.sqlite"
_LOCK = ".index.lock"
_BATCH = 32
_STALE_S = 600.0
_STACK_SHARE = 0.6
"""PNG size of pattern images over their raw size, at most about so much."""
_KINDS = re.compile(
    r"(?P<stem>.+?)\.(?P<kind>verdict\.json|input\.json|mark\.json|case\.npz|stack|sheet\.png"
    r"|surface-[A-Z](?:-closer)?\.png|png)"
)
_DRAFT = re.compile(r"\..+\.(\d+)\.part")
T = TypeVar("T")


class EvidenceError(StationError):
    """Evidence cannot be kept or read: no room, a disk that refuses, no such part."""

    code: ClassVar[str] = "EVIDENCE_NOT_STORED"


@dataclass(frozen=True)
class Bundle:
    """What is to be kept of one part: contents of its files, and its pattern images or None."""

    verdict: Mapping[str, Any]
    """`Verdict.to_dict()`."""
    files: Mapping[str, bytes]
    """Name -> content, beside the verdict."""
    stack: Recording | None = None


class Folder:
    """Opened when it is first used. `settings` None: for reading alone, nothing is thinned."""

    def __init__(self, path: Path, settings: EvidenceConfig | None = None) -> None:
        self.path = path
        self._settings = settings
        self._room = Room.of(settings) if settings else None
        self._index: Index | None = None
        self._inode = 0

    @classmethod
    def of(cls, settings: EvidenceConfig) -> Folder:
        return cls(settings.folder, settings)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._index is not None:
            self._index.close()
            self._index = None

    # Keeping

    def add(self, kept: Bundle) -> Row:
        """Write the files of a part, whole or not at all, then its row. Makes room before.

        Raises EvidenceError when there is no room that may be made, or the disk refuses.
        """
        name = name_of(kept.verdict)
        files = {f"{name}.verdict.json": json_bytes(kept.verdict), **kept.files}
        need = sum(map(len, files.values()))
        if kept.stack is not None:
            raw = sum(stack.images.nbytes for stack in kept.stack.stacks)
            need += int(_STACK_SHARE * raw)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.make_room(need)
            try:
                return self._add(kept, name, files)
            except (OSError, EvidenceError) as error:
                if not _is_full(error):
                    raise
                self._free(need)  # others fill the disk, or blocks and index take more than thought
                return self._add(kept, name, files)
        except OSError as error:
            raise EvidenceError(
                "evidence not written", which=self.path / name, got=error.strerror or error
            ) from error

    def _add(self, kept: Bundle, name: str, files: Mapping[str, bytes]) -> Row:
        written, stack_bytes = self._write(name, files, kept.stack)
        size = sum(map(len, files.values())) + stack_bytes
        row = self._row(kept.verdict, name, tuple(written), size, stack_bytes)
        try:
            self._do(lambda index: index.put(row))
        except EvidenceError:
            _remove_all(self.path, written)
            raise
        return row

    def make_room(self, need: int = 0) -> None:
        """Delete by policy until `need` more bytes fit. Raises EvidenceError when that is not
        enough: what is left is marked for review, or held."""
        if self._room is None:
            return
        while (short := self._room.short(self.path, self._do(Index.used), need)) > 0:
            if not self._free(short):
                raise EvidenceError(
                    "no room for evidence",
                    which=self.path,
                    expected=f"{short} bytes more",
                    got="nothing that may be deleted: the rest is marked review or held",
                    action="take marks away (forge-station evidence --mark none), or raise the "
                    "quota",
                )

    def expire(self) -> None:
        """Delete what is older than `keep_days`."""
        days = self._settings.keep_days if self._settings else 0.0
        if days:
            before = _utc(_now() - timedelta(days=days))
            while rows := self._do(lambda index: index.first_to_go(_BATCH, before)):
                for row in rows:
                    self.delete(row)

    def delete(self, row: Row) -> bool:
        """All files of a part, the verdict first, then its row. False: another was quicker."""
        for name in row.files:
            _remove(self.path / name)
        return self._do(lambda index: index.remove(row))

    def mark(self, row: Row, label: str) -> Row:
        """Say what people want of a part's evidence; stands in a file beside it, too."""
        if label not in LABELS:
            raise EvidenceError("no such mark", expected=", ".join(LABELS), got=label)
        name = f"{row.name}.mark.json"
        files = tuple(file for file in row.files if file != name)
        try:
            if label == "none":
                (self.path / name).unlink(missing_ok=True)
            else:
                said = {"result_id": row.result_id, "label": label, "time": _utc(_now())}
                write_whole(self.path / name, json_bytes(said))
                files += (name,)
        except OSError as error:
            raise EvidenceError("mark not written", which=name, got=error.strerror) from error
        self._do(lambda index: index.mark(row, label, files))
        return replace(row, label=label, files=files)

    # Asking

    def find(self, query: Query) -> list[Row]:
        return self._do(lambda index: index.find(query))

    def get(self, result_id: str) -> Row:
        """By result id, its end, or the name of the files. Raises EvidenceError."""
        found = self._do(lambda index: index.get(result_id))
        if len(found) != 1:
            raise EvidenceError(
                "no part of that id" if not found else "more than one part of that id",
                which=self.path,
                expected="a result id, its end, or the name of the files",
                got=result_id if not found else ", ".join(row.result_id for row in found[:5]),
                action="list them: forge-station evidence",
            )
        return found[0]

    def one(self, result_id: str) -> Row | None:
        """By its whole result id; None when there is no evidence of it."""
        return self._do(lambda index: index.one(result_id))

    def reasons(self) -> list[str]:
        """Codes that occur, in alphabetic order."""
        return self._do(lambda index: index.reasons())

    def totals(self) -> Totals:
        return self._do(Index.totals)

    # Making good

    def reconcile(self) -> tuple[int, int]:
        """Take in files that their row does not tell, take out rows without files; how many."""
        listed = self._listed()
        known = self._do(Index.names)
        adopted = lost = 0
        for name, files in listed.items():
            if name in known and sorted(files) == sorted(known[name].files):
                continue
            row = self._read(name, files)
            if row is not None:
                self._do(partial(_put, row))
                adopted += 1
        for name, row in known.items():
            if name not in listed and not (self.path / row.files[0]).exists():
                lost += self.delete(row)
        if adopted or lost:
            log.warning("evidence: %d parts found again, %d gone", adopted, lost)
        return adopted, lost

    def rebuild(self, told: Callable[[int], None] = lambda count: None) -> tuple[int, int]:
        """Make the index anew from the files; parts, and verdict files that are of no part.

        A damaged index is moved aside. `told` hears how many are read.
        """
        if not self._do(Index.sound):
            self._quarantine("it is damaged")
        listed = self._listed()

        def rows() -> Iterator[Row]:
            for number, (name, files) in enumerate(listed.items()):
                if number % 1000 == 999:
                    told(number + 1)
                row = self._read(name, files)
                if row is not None:
                    yield row

        count = self._do(lambda index: index.renew(rows()))
        return count, len(listed) - count

    # Files

    def _write(
        self, name: str, files: Mapping[str, bytes], stack: Recording | None
    ) -> tuple[list[str], int]:
        written: list[str] = []
        try:
            for file, content in files.items():
                write_whole(self.path / file, content)
                written.append(file)
            size = 0
            if stack is not None:
                size = self._write_stack(name, stack)
                written.append(f"{name}.stack/")
            return written, size
        except BaseException:
            _remove_all(self.path, written)
            raise

    def _write_stack(self, name: str, stack: Recording) -> int:
        """The pattern images, in the format of `capture.replay`; their size on disk."""
        draft = self.path / f".{name}.stack.{os.getpid()}.part"
        try:
            replay.write(draft, stack.stacks, stack.calibrations)
            size = _size(draft)
            _remove(self.path / f"{name}.stack")
            draft.rename(self.path / f"{name}.stack")
        except BaseException:
            _remove(draft)
            raise
        return size

    def _free(self, need: int) -> int:
        """Delete by policy until about `need` bytes are gone; how many are. Counts each part."""
        freed = 0
        for row in self._do(lambda index: index.first_to_go(_BATCH)):
            if row.rank > 0:
                break
            self.delete(row)
            freed += row.bytes
            if freed >= need:
                return freed
        if freed:
            return freed
        for row in self._do(lambda index: index.first_stacks_to_go(_BATCH)):
            self._drop_stack(row)
            freed += row.stack_bytes
            if freed >= need:
                return freed
        if freed:
            return freed
        for row in self._do(lambda index: index.first_to_go(_BATCH)):
            self.delete(row)
            freed += row.bytes
            if freed >= need:
                break
        return freed

    def _drop_stack(self, row: Row) -> None:
        name = f"{row.name}.stack/"
        _remove(self.path / name)
        files = tuple(file for file in row.files if file != name)
        self._do(lambda index: index.without_stack(row, files))

    def _listed(self) -> dict[str, list[str]]:
        """Name of a part -> its files, the verdict first. Removes drafts of dead writers."""
        groups: dict[str, list[str]] = {}
        try:
            entries = sorted(os.scandir(self.path), key=lambda entry: entry.name)
        except FileNotFoundError:
            return {}
        for entry in entries:
            found = _KINDS.fullmatch(entry.name)
            if found is not None and entry.is_symlink() is False:
                folder = entry.is_dir()
                if folder == (found["kind"] == "stack"):
                    file = f"{entry.name}/" if folder else entry.name
                    groups.setdefault(found["stem"], []).append(file)
            elif _DRAFT.fullmatch(entry.name) and time.time() - entry.stat().st_mtime > _STALE_S:
                _remove(Path(entry.path))
        return {
            name: sorted(files, key=lambda file: not file.endswith(".verdict.json"))
            for name, files in groups.items()
            if f"{name}.verdict.json" in files
        }

    def _read(self, name: str, files: list[str]) -> Row | None:
        """The row of a part's files; None when its verdict file is none of a part of this name."""
        try:
            verdict = json.loads((self.path / files[0]).read_bytes())
            if (
                verdict["schema"].rsplit(".", 1)[0] != SCHEMA.rsplit(".", 1)[0]
                or Outcome(verdict["outcome"]) is None
                or name_of(verdict) != name
            ):
                return None
            sizes = {file: _size(self.path / file) for file in files}
            stack = sum(size for file, size in sizes.items() if file.endswith("/"))
            row = self._row(verdict, name, tuple(files), sum(sizes.values()), stack)
            mark = self.path / f"{name}.mark.json"
            label = json.loads(mark.read_bytes())["label"] if mark.name in files else "none"
            return replace(row, label=label if label in LABELS else "held")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def _row(
        self,
        verdict: Mapping[str, Any],
        name: str,
        files: tuple[str, ...],
        size: int,
        stack_bytes: int,
    ) -> Row:
        share = self._settings.pass_share if self._settings else EvidenceConfig.pass_share
        result_id = str(verdict["result_id"])
        return Row(
            result_id,
            name,
            str(verdict["serial"]),
            str(verdict["product"]),
            str(verdict["outcome"]),
            str(verdict.get("end_time") or verdict.get("begin_time") or _utc(_now())),
            size,
            stack_bytes,
            files,
            str((verdict.get("model") or {}).get("sha256", "")),
            str((verdict.get("certification") or {}).get("certificate", "")),
            str((verdict.get("scan") or {}).get("calibration") or ""),
            audit=drawn(result_id, share),
            reasons=tuple(sorted({str(item["code"]) for item in verdict.get("reasons") or ()})),
        )

    # The index

    def _do(self, action: Callable[[Index], T]) -> T:
        """Act on the index; a damaged one is moved aside and made anew, once.

        Raises EvidenceError.
        """
        try:
            try:
                return action(self._opened())
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError as error:
                self._quarantine(str(error))
                self._opened()
                self.reconcile()
                return action(self._opened())
        except (sqlite3.Error, OSError) as error:
            self.close()
            raise EvidenceError(
                "the index of the evidence cannot be used", which=self.path / INDEX, got=error
            ) from error

    def _opened(self) -> Index:
        """The index; opened anew when another process has moved the file aside."""
        path = self.path / INDEX
        if self._index is not None:
            try:
                if path.stat().st_ino == self._inode:
                    return self._index
            except FileNotFoundError:
                pass
            self.close()
        if not self.path.is_dir():
            raise FileNotFoundError(errno.ENOENT, "no such folder", str(self.path))
        self._index = Index(path)
        self._inode = path.stat().st_ino
        return self._index

    def _quarantine(self, why: str) -> None:
        """Move a damaged index aside, unless another process has done so."""
        self.close()
        path = self.path / INDEX
        with _locked(self.path / _LOCK):
            if path.exists() and not _is_sound(path):
                aside = f"{INDEX}.damaged-{_now():%Y%m%dT%H%M%S}"
                path.replace(self.path / aside)
                for suffix in ("-wal", "-shm"):
                    path.with_name(INDEX + suffix).unlink(missing_ok=True)
                log.error("evidence: the index is moved to %s and made anew: %s", aside, why)


def _is_sound(path: Path) -> bool:
    try:
        index = Index(path)
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError:
        return False
    try:
        return index.sound()
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError:
        return False
    finally:
        index.close()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_full(error: BaseException) -> bool:
    """Whether the disk, or what this user may take of it, is used up."""
    cause = error.__cause__ if isinstance(error, EvidenceError) else error
    if isinstance(cause, sqlite3.OperationalError):
        return "full" in str(cause)
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


def _put(row: Row, index: Index) -> None:
    index.put(row)


def _remove_all(folder: Path, names: Sequence[str]) -> None:
    """The last first, so that the verdict, which says that there is a part, goes last."""
    for name in reversed(names):
        _remove(folder / name)


def _remove(path: Path) -> None:
    """A file or a folder; nothing when it is not there. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(item.stat().st_size for item in path.rglob("*") if item.is_file())
    return path.stat().st_size


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _utc(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


__all__ = ["Bundle", "EvidenceError", "Folder"]
