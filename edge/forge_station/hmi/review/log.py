"""An append-only file of JSON lines that loses no row that was confirmed and keeps no half row.

A row is confirmed when it is on the disk (fsync). What a crash left half written at the end was
never confirmed, and is cut off when the file is opened. One writer at a time; others may append
whole lines between two of ours, and are read.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from forge_station.errors import StationError

log = logging.getLogger(__name__)


class ReviewError(StationError):
    """A label cannot be kept, an answer does not belong to a look, a log is damaged."""

    code: ClassVar[str] = "REVIEW_FAILED"


class Log:
    """Rows of a file, read once and then as they are added. One object, one thread at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0
        self._lines = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new = not path.exists()
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o640)
            if new:
                _sync_folder(path.parent)
            with _locked(self._file):
                self._mend()
        except OSError as error:
            raise ReviewError("cannot be opened", which=path, got=error.strerror) from error

    def close(self) -> None:
        os.close(self._file)

    def news(self) -> Iterator[dict[str, Any]]:
        """Rows that were added since the last call, the first time all. A row at which the caller
        raises is given again: nothing behind it is taken for known.

        Raises ReviewError for a line that is no JSON object.
        """
        with _locked(self._file, fcntl.LOCK_SH):
            size = os.fstat(self._file).st_size
            found = os.pread(self._file, size - self._at, self._at) if size > self._at else b""
        whole = found[: found.rfind(b"\n") + 1]
        for line in whole.split(b"\n")[:-1]:
            if line.strip():
                row = _parsed(line)
                if row is None:
                    raise self.not_a_row("a JSON object")
                yield row
            self._lines += 1
            self._at += len(line) + 1

    def not_a_row(self, expected: str, got: object = None) -> ReviewError:
        """The error of the row that `news` gives, or fails at."""
        return ReviewError(
            "not a row", which=f"{self.path}, line {self._lines + 1}", expected=expected, got=got,
            action="stop the page, take the line out or mend it, and start the page again",
        )  # fmt: skip

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Add rows and flush them to the disk. `news` gives them, too.

        Raises ReviewError when the disk does not take them; then none of them is in the file.
        """
        text = "".join(f"{json.dumps(row, ensure_ascii=False, allow_nan=False)}\n" for row in rows)
        content = text.encode()
        with _locked(self._file):
            self._mend()
            size = os.fstat(self._file).st_size
            try:
                written = os.write(self._file, content)
                if written != len(content):
                    raise OSError(28, "no room for the whole row")
                os.fsync(self._file)
            except OSError as error:
                os.ftruncate(self._file, size)
                raise ReviewError("not saved", which=self.path, got=error.strerror) from error

    def _mend(self) -> None:
        """Cut off a half row at the end; a whole one without its line break gets it."""
        size = os.fstat(self._file).st_size
        if size == 0 or os.pread(self._file, 1, size - 1) == b"\n":
            return
        begin = size
        tail = b""
        while begin > 0 and b"\n" not in tail:
            step = min(4096, begin)
            begin -= step
            tail = os.pread(self._file, step, begin) + tail
        last = tail[tail.rfind(b"\n") + 1 :]
        if _parsed(last) is not None:
            os.write(self._file, b"\n")
        else:
            log.warning("%s: a half row at the end is cut off: %r", self.path, last[:200])
            os.ftruncate(self._file, size - len(last))
        os.fsync(self._file)


class _locked:
    def __init__(self, file: int, kind: int = fcntl.LOCK_EX) -> None:
        self._file, self._kind = file, kind

    def __enter__(self) -> None:
        fcntl.flock(self._file, self._kind)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


__all__ = ["Log", "ReviewError"]
