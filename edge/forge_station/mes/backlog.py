"""Which row of the outbox goes next on this connection: urgency, order, streams that must wait.

It knows rows and answers, not the connection. Each stream is a lane of its own: a stream that
nobody subscribes to waits without holding up the others. Made anew for each connection: every
lane then starts from its oldest unconfirmed row.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from forge_station.mes.outbox import Row

FETCH_ROWS = 256


class Rows(Protocol):
    """What is needed of the outbox."""

    @property
    def rewinds(self) -> int: ...
    def streams(self) -> tuple[str, ...]: ...
    def last_number(self, stream: str) -> int: ...
    def fetch(self, stream: str, after: int, limit: int) -> list[Row]: ...


@dataclass
class _Lane:
    cursor: int = 0
    rows: deque[Row] = field(default_factory=deque)
    in_flight: int = 0
    rewind: bool = False
    """Start again from the oldest unconfirmed row, once nothing is on its way."""
    retry_at: float = 0.0
    delay_s: float = 0.0
    probing: bool = False
    """Nobody took the last row: ask with a single one."""


class Backlog:
    """The unconfirmed rows in sending order. `now` is of `time.monotonic`.

    `urgency` are the streams, most urgent first. `wait_s` is the first and the longest wait of a
    stream that nobody takes; of every wait a random share of up to one half is left out.
    """

    def __init__(self, rows: Rows, urgency: Sequence[str], wait_s: tuple[float, float]) -> None:
        self._rows = rows
        self._urgency = tuple(urgency)
        self._wait_s = wait_s
        self._lanes: dict[str, _Lane] = {}
        self._rewinds = rows.rewinds

    def next(self, now: float) -> Row | None:
        """Take the next row to send; None when there is none, or all that is left must wait."""
        if self._rewinds != self._rows.rewinds:
            self._rewinds = self._rows.rewinds
            for lane in self._lanes.values():
                lane.rewind = True
        for stream in sorted(self._rows.streams(), key=self._rank):
            lane = self._lanes.setdefault(stream, _Lane())
            row = self._next_of(stream, lane, now)
            if row is not None:
                lane.in_flight += 1
                return row
        return None

    def confirmed(self, row: Row) -> None:
        """Somebody took the row: its stream flows."""
        lane = self._lanes[row.stream]
        lane.in_flight -= 1
        lane.probing, lane.delay_s = False, 0.0

    def gone(self, row: Row) -> None:
        """The row will never be sent (a dead letter), which says nothing about its stream."""
        self._lanes[row.stream].in_flight -= 1

    def held(self, row: Row, now: float) -> bool:
        """Nobody took the row: its stream waits. True when it had been flowing until then."""
        lane = self._lanes[row.stream]
        lane.in_flight -= 1
        if lane.rewind:
            return False
        flowed = not lane.delay_s
        first_s, longest_s = self._wait_s
        lane.delay_s = min(longest_s, max(first_s, lane.delay_s * 2))
        lane.retry_at = now + random.uniform(lane.delay_s / 2, lane.delay_s)
        lane.rewind = lane.probing = True
        return flowed

    def waiting(self) -> tuple[str, ...]:
        """Streams whose rows nobody took."""
        return tuple(name for name, lane in self._lanes.items() if lane.delay_s)

    def wait_s(self, now: float) -> float | None:
        """Until the first waiting stream may ask again; None when none waits."""
        due = [lane.retry_at - now for lane in self._lanes.values() if lane.retry_at > now]
        return min(due) if due else None

    def _next_of(self, stream: str, lane: _Lane, now: float) -> Row | None:
        if now < lane.retry_at:
            return None
        if lane.rewind:
            if lane.in_flight:
                return None
            lane.rewind, lane.cursor = False, 0
            lane.rows.clear()
        if lane.probing and lane.in_flight:
            return None
        if not lane.rows:
            last = self._rows.last_number(stream)
            if lane.cursor >= last:
                return None
            lane.rows.extend(self._rows.fetch(stream, lane.cursor, FETCH_ROWS))
            if not lane.rows:
                lane.cursor = last
                return None
            lane.cursor = lane.rows[-1].stream_seq
        return lane.rows.popleft()

    def _rank(self, stream: str) -> int:
        return self._urgency.index(stream) if stream in self._urgency else len(self._urgency)
