"""Counts of a shift, from the parts that went through: outcomes, reasons, times, rates."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise
from statistics import median
from typing import Any

OUTCOMES = ("PASS", "FAIL", "UNSURE", "ERROR")
RECENT = 20
"""Parts of which takt and cycle time are the medians."""
LONGEST_TAKT_S = 600.0
"""A longer gap between two parts is a pause, not a takt."""
BUCKET, BUCKETS = 10, 24
"""Parts in one point of the strip of rates, and its points."""
MOST_REASONS = 6


def begin_of(now: datetime, shifts: Sequence[str]) -> datetime:
    """When the shift began that `now` (local, aware) lies in."""
    for back in (0, 1):
        day = now - timedelta(days=back)
        for text in reversed(shifts):
            hour, minute = map(int, text.split(":"))
            begin = day.replace(hour=hour, minute=minute, second=0, microsecond=0)
            if begin <= now:
                return begin
    raise ValueError("no shift begins")


@dataclass
class Shift:
    """One shift; `add` each part in order."""

    begin: datetime
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    _begins: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT + 1))
    _spent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _buckets: deque[Counter[str]] = field(default_factory=lambda: deque(maxlen=BUCKETS))

    def add(self, part: Mapping[str, Any]) -> None:
        """A line of the board. What began before the shift is not counted."""
        began = moment(part["begin"] or part["end"])
        if began is None or began < self.begin.timestamp():
            return
        self.counts[part["outcome"]] += 1
        if part["reasons"]:
            self.reasons[part["reasons"][0]["code"]] += 1
        self._begins.append(began)
        self._spent.append(part["ms"] / 1000)
        if not self._buckets or self._buckets[-1].total() >= BUCKET:
            self._buckets.append(Counter())
        self._buckets[-1][part["outcome"]] += 1

    def facts(self) -> dict[str, Any]:
        """For the page. `takt_s` and `cycle_s` are None until there are parts to tell them from."""
        begins = list(self._begins)
        gaps = [b - a for a, b in pairwise(begins)]
        gaps = [gap for gap in gaps if 0 < gap <= LONGEST_TAKT_S]
        return {
            "begin": self.begin.isoformat(),
            "total": self.counts.total(),
            "counts": {name: self.counts[name] for name in OUTCOMES},
            "reasons": self.reasons.most_common(MOST_REASONS),
            "takt_s": round(median(gaps), 2) if gaps else None,
            "cycle_s": round(median(self._spent), 2) if self._spent else None,
            "rates": [
                [round(bucket[name] / bucket.total(), 3) for name in ("FAIL", "UNSURE")]
                for bucket in self._buckets
            ],
        }


def moment(text: str) -> float | None:
    """RFC 3339 -> seconds; None for what is no time."""
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None


__all__ = ["OUTCOMES", "Shift", "begin_of", "moment"]
