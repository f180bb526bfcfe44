"""How full the outbox is, and when it will be: the figures of health messages and alarms.

It reads nothing itself; `outbox` gives it numbers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

MEMORY_S = 600.0
"""The growth is measured over at most this time."""
SAMPLE_S = 5.0
SHORTEST_S = 30.0
"""A growth seen for less time says nothing."""


@dataclass(frozen=True)
class Counts:
    """Rows to deliver, rows delivered and still kept, rows refused, rows given up for room since
    the start; size, fill and age of the backlog."""

    pending: int
    acked: int
    dead: int
    dropped: int
    bytes: int
    """Of the database file with its write-ahead log."""
    fill_pct: float
    """Share of the quota that undelivered rows take, estimated from their number; delivered ones
    make room by themselves."""
    oldest_pending_utc: str | None
    full: bool
    """The last message found no room."""
    disk_low: bool
    """The disk has less free than the floor: the file must not grow."""


class Growth:
    """Follows the fill and tells when it will reach 100 %."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, float]] = deque()

    def eta_full_s(self, fill_pct: float) -> float | None:
        """Seconds until the outbox is full if it goes on as in the last ten minutes; None when it
        does not grow, or is not known yet. Call it about every ten seconds."""
        now = self._clock()
        if not self._samples or now - self._samples[-1][0] >= SAMPLE_S:
            self._samples.append((now, fill_pct))
        while now - self._samples[0][0] > MEMORY_S:
            self._samples.popleft()
        since, before = self._samples[0]
        grown = fill_pct - before
        if now - since < SHORTEST_S or grown <= 0:
            return None
        return (100.0 - fill_pct) * (now - since) / grown
