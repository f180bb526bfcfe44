"""What the station writes down for whoever looks on from another process: the operator's page.

    <outbox>.board/parts-2026-11-30.jsonl   one line a part, in order; the file of the day (UTC)
    <outbox>.board/status.json              how the station is; replaced at least every five seconds

A thread of its own writes; whoever hands over never waits for the disk. Readers take no lock that
the station waits for, which is why they do not open the outbox: a reader that hangs in the middle
of a read would keep its log from being written back. What does not come to the disk is tried again;
the numbers of the lines show what is missing. What is no text in a serial is written as `?`.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

from forge_station.evidence.files import name_of
from forge_station.mes.stamp import utc_now

log = logging.getLogger(__name__)

STATUS = "status.json"
STATUS_S = 5.0
"""So often the status is replaced though nothing has changed: who reads sees that it lives."""
KEEP_DAYS = 8
MOST_WAITING = 1000
MOST_REASONS = 8
SHOWN_REASON = ("code", "text", "mark", "score")


class Board:
    """A context manager; `part` and `status` may be called from any thread, and return at once."""

    def __init__(self, outbox: Path, boot_id: str) -> None:
        self.folder = folder_of(outbox)
        self._boot_id = boot_id
        self._lines: deque[str] = deque(maxlen=MOST_WAITING)
        self._number = 0
        self._status: Mapping[str, Any] | None = None
        self._written: Mapping[str, Any] | None = None
        self._changed = threading.Condition()
        self._ending = False
        self._fault: str | None = None
        self._day = ""
        self._thread = threading.Thread(target=self._run, name="board", daemon=True)

    def __enter__(self) -> Board:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._thread.join(STATUS_S)

    def part(self, verdict: Mapping[str, Any]) -> None:
        """One part went through. `verdict` is `Verdict.to_dict()`."""
        with self._changed:
            self._number += 1
            line = {"boot": self._boot_id, "n": self._number, **shown(verdict)}
            self._lines.append(json.dumps(line, ensure_ascii=False, separators=(",", ":")))
            self._changed.notify_all()

    def status(self, facts: Mapping[str, Any]) -> None:
        """How the station is now. Written when it has changed, or the last one is old."""
        with self._changed:
            self._status = facts
            self._changed.notify_all()

    # The one thread

    def _run(self) -> None:
        written_at = -STATUS_S
        while True:
            with self._changed:
                if not self._ending and not self._lines and self._status == self._written:
                    self._changed.wait(STATUS_S)
                ending, status = self._ending, self._status
            try:
                self._write_parts()
                now = time.monotonic()
                due = status != self._written or now - written_at >= STATUS_S or ending
                if status is not None and due:
                    self._write_status(status, ending)
                    written_at, self._written = now, status
                self._say(None)
            except OSError as error:
                self._say(error.strerror or str(error))
                with self._changed:
                    if not ending:
                        self._changed.wait(1.0)
            if ending:
                return

    def _write_parts(self) -> None:
        if not self._lines:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        day = f"{datetime.now(timezone.utc):%Y-%m-%d}"
        if day != self._day:
            self._delete_old()
        with (self.folder / f"parts-{day}.jsonl").open("ab+") as file:
            size = file.seek(0, os.SEEK_END)
            if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                file.write(b"\n")  # half a line: of a process that was killed, of a full disk
            while self._lines:
                file.write(f"{self._lines[0]}\n".encode(errors="replace"))
                file.flush()
                self._lines.popleft()
        self._day = day

    def _write_status(self, status: Mapping[str, Any], ended: bool) -> None:
        """Without a flush to the disk: after a power cut an old one is as good as none."""
        self.folder.mkdir(parents=True, exist_ok=True)
        facts = {"time": utc_now(), "boot": self._boot_id, "ended": ended, "n": self._number}
        beside = self.folder / f".{STATUS}.new"
        text = json.dumps({**facts, **status}, ensure_ascii=False)
        beside.write_text(text, encoding="utf-8", errors="replace")
        beside.replace(self.folder / STATUS)

    def _delete_old(self) -> None:
        first = f"parts-{datetime.now(timezone.utc) - timedelta(days=KEEP_DAYS):%Y-%m-%d}.jsonl"
        for path in self.folder.glob("parts-*.jsonl"):
            if path.name < first:
                path.unlink(missing_ok=True)

    def _say(self, fault: str | None) -> None:
        if fault != self._fault:
            if fault is not None:
                log.error("what the page shows cannot be written to %s: %s", self.folder, fault)
            self._fault = fault


def folder_of(outbox: Path) -> Path:
    """Of a station, by the path of its outbox."""
    return outbox.with_name(f"{outbox.name}.board")


def shown(verdict: Mapping[str, Any]) -> dict[str, Any]:
    """What of `Verdict.to_dict()` is shown beside the line. `name` is that of its evidence."""
    certified = verdict.get("certification") or {}
    model = verdict.get("model") or {}
    return {
        "id": verdict["result_id"],
        "name": name_of(verdict),
        "serial": verdict["serial"],
        "product": verdict["product"],
        "outcome": verdict["outcome"],
        "reasons": [
            {key: item[key] for key in SHOWN_REASON if item.get(key) is not None}
            for item in verdict["reasons"][:MOST_REASONS]
        ],
        "checks": {item["check"]: item["outcome"] for item in verdict["checks"]},
        "mode": certified.get("mode"),
        "score": certified.get("score"),
        "limit_pass": certified.get("limit_pass"),
        "limit_fail": certified.get("limit_fail"),
        "grids": [
            {"mark": item["mark"], "view": item["view"], "cells": item["cells"]}
            for item in verdict.get("grids", ())
            if item["cells"]
        ],
        "parts": [
            {
                "mark": item["mark"],
                "part": f"{item['workpiece']} {item['model_number']}".strip(),
                "outcome": item.get("outcome", "PASS"),
            }
            for item in verdict.get("parts", ())
        ],
        "bundle": {key: model[key] for key in ("name", "version", "sha256") if key in model},
        "begin": verdict.get("begin_time", ""),
        "end": verdict.get("end_time", ""),
        "ms": round(verdict.get("timings_ms", {}).get("total", 0.0), 1),
        "simulated": verdict.get("simulated", False),
    }


__all__ = ["Board", "folder_of", "shown"]
