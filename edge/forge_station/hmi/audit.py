"""Who did what on the page: an append-only file in which every line holds the digest of the last.

A line that was changed, taken out or put in breaks the chain at that place. Cutting off the end is
seen only by whoever noted the digest of the last line: export it with the shift report.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forge_station.errors import StationError
from forge_station.mes.stamp import utc_now

NONE = "0" * 64
_STEP_BYTES = 1 << 16


class AuditError(StationError):
    """An audit file cannot be written, or its chain is broken."""


class Audit:
    """Several processes may append. Without the file it is begun; it is never shortened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(
        self,
        action: str,
        *,
        who: str,
        role: str,
        panel: str,
        before: object = None,
        after: object = None,
        reason: str = "",
    ) -> Mapping[str, Any]:
        """Append one line, on disk when this returns. Raises AuditError: then nothing is done."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                last = self._last(file.fileno())
                line: dict[str, Any] = {
                    "n": last.get("n", 0) + 1,
                    "ts": utc_now(),
                    "who": who,
                    "role": role,
                    "panel": panel,
                    "action": action,
                    "before": before,
                    "after": after,
                    "reason": reason,
                    "prev": last.get("sha256", NONE),
                }
                line["sha256"] = _digest(line)
                file.write(f"{json.dumps(line, ensure_ascii=False)}\n".encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise AuditError(
                "the audit cannot be written, so nothing is done",
                which=self.path,
                got=error.strerror or error,
                action="make room on the disk, or give the page's user the right to write there",
            ) from error
        return line

    def lines(self) -> Iterator[Mapping[str, Any]]:
        """All lines, each held against the chain. Raises AuditError at the first that breaks it."""
        prev, number = NONE, 0
        try:
            with self.path.open(encoding="utf-8") as file:
                for number, text in enumerate(file, 1):
                    line = _parsed(text, self.path, number)
                    good = line.get("n") == number and line.get("prev") == prev
                    if not good or line.get("sha256") != _digest(line):
                        raise self._broken(number)
                    prev = line["sha256"]
                    yield line
        except FileNotFoundError:
            return
        except (OSError, UnicodeDecodeError) as error:
            raise AuditError("the audit cannot be read", which=self.path, got=error) from error

    def _broken(self, number: object) -> AuditError:
        return AuditError(
            "the audit was changed",
            which=f"{self.path}, line {number}",
            expected="the digest of the line before, and of itself",
            got="another",
            action="compare it with the last export; keep the file as it is",
        )

    def _last(self, handle: int) -> dict[str, Any]:
        """The last whole line; {} of an empty file. Half a line is what a power cut left."""
        begin = os.fstat(handle).st_size
        tail = b""
        while begin > 0 and tail.count(b"\n") < 2:
            step = min(_STEP_BYTES, begin)
            begin -= step
            tail = os.pread(handle, step, begin) + tail
        keep = tail.rfind(b"\n") + 1
        if keep < len(tail):
            os.ftruncate(handle, begin + keep)
        lines = tail[:keep].splitlines()
        if not lines:
            return {}
        last = _parsed(lines[-1].decode(errors="replace"), self.path, 0)
        if not isinstance(last.get("n"), int) or not isinstance(last.get("sha256"), str):
            raise self._broken(last.get("n"))
        return last


def _parsed(text: str, path: Path, number: int) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        line = None
    if not isinstance(line, dict):
        raise AuditError(
            "the audit was changed",
            which=f"{path}, line {number or 'last'}",
            expected="a JSON object",
            got=text[:60],
            action="compare it with the last export; keep the file as it is",
        )
    return line


def _digest(line: Mapping[str, Any]) -> str:
    facts = {key: value for key, value in line.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


__all__ = ["Audit", "AuditError"]
