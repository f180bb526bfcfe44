"""Parts to review: rows without files for the queue, and real cases for the page."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import cache
from pathlib import Path
from typing import Any

from forge_station.capture.fusion import Fusion
from forge_station.checks import Thresholds
from forge_station.config import EvidenceConfig
from forge_station.evidence.case import Case, Decider
from forge_station.evidence.files import name_of
from forge_station.evidence.folder import Bundle, Folder
from forge_station.evidence.index import Row
from forge_station.evidence.retention import drawn
from forge_station.hmi.review.queue import Queue
from forge_station.hmi.review.settings import ReviewSettings
from forge_station.pipeline import Gates, Job
from tests.hmi.stage import verdict
from tests.station.test_evidence import inspection
from tests.station.test_station import LINE

NOON = datetime(2026, 11, 30, 12, 0, tzinfo=timezone.utc)


def row(number: int, outcome: str = "FAIL", serial: str = "", share: float = 1.0) -> Row:
    """A part that was judged an hour before noon or earlier."""
    result_id = f"01a22c2f-3f83-7e64-9cc4-{number:012x}"
    time = (NOON - timedelta(hours=1, seconds=number)).strftime("%Y-%m-%dT%H:%M:%S.000Z")
    serial = serial or f"SN-{number:05d}"
    return Row(
        result_id, f"n{number}", serial, "NUT", outcome, time, 1, 0, (f"n{number}.case.npz",),
        "b" * 64, "", "", audit=drawn(result_id, share),
    )  # fmt: skip


class Bench:
    """Evidence without files, a clock that stands, and the queue over both."""

    def __init__(self, folder: Path, *rows: Row, **settings: Any) -> None:
        self.folder, self.rows, self.now = folder, list(rows), NOON
        self.kept: dict[str, str] = {}
        self.masters: dict[str, Any] = settings.pop("masters", {})
        self.pass_share: float = settings.pop("pass_share", 1.0)
        base: dict[str, Any] = {"audit_share": 1.0, "second_share": 0.0, "gold_share": 0.0}
        self.settings = ReviewSettings(**{**base, **settings})
        self.queue = self.opened()

    def opened(self) -> Queue:
        return Queue(
            self.folder, self, self.settings, pass_share=self.pass_share, masters=self.masters,
            now=lambda: self.now,
        )  # fmt: skip

    def again(self) -> Queue:
        """As after a restart."""
        self.queue.close()
        self.queue = self.opened()
        return self.queue

    def since(self, time: str) -> list[Row]:
        return sorted((r for r in self.rows if r.time >= time), key=lambda r: r.time)

    def there(self, result_id: str) -> bool:
        return any(r.result_id == result_id for r in self.rows)

    def keep(self, result_id: str, mark: str) -> None:
        self.kept[result_id] = mark


@cache
def case() -> bytes:
    """A block on the tray, as a station keeps it."""
    found = inspection()
    decider = Decider(
        "b" * 64, "m", "1", "CPU", 1, Thresholds(), 1.0, "rows", Fusion(), Gates(), None, "", ""
    )
    job = Job(found.verdict.result_id, "SN-1", LINE.products[0])
    return Case.of(job, found, decider).to_bytes()


def store(folder: Path, outcome: str, number: int, **changed: Any) -> dict[str, Any]:
    """A part of the stage, with its points, in a folder of evidence; its verdict."""
    long_ago = datetime.now(timezone.utc) - timedelta(hours=1) + timedelta(seconds=number)
    time = long_ago.strftime("%Y-%m-%dT%H:%M:%S.000Z")
    said = {**verdict(outcome, number), "begin_time": time, "end_time": time, **changed}
    said["product"] = changed.get("product", "BOLT-M10x50")
    with Folder(folder, EvidenceConfig(folder, min_free_gb=0.0, pass_share=1.0)) as kept:
        kept.add(Bundle(said, {f"{name_of(said)}.case.npz": case()}))
    return said


__all__ = ["NOON", "Bench", "case", "replace", "row", "store"]
