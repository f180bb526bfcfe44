"""What consumers say they have stored, and what follows from it: when to send, what to send again.

It knows numbers, not rows and no connection. A receipt is trusted to say where its own consumer
stands and nothing else; who may write it is a matter of the broker's access rules.

A consumer that is silent for three heartbeats counts as away: at level 2 nothing is sent to it,
because a broker that restarts would lose it. What it misses is sent again at once, the second time
after 2 s, then 4 ... 30 s: without that wait a slow consumer would be flooded (99,138 duplicates
for 4,806 messages in a run without it).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, groupby, islice
from typing import Any

from forge_station.contract.error import ContractError
from forge_station.mes import schema

log = logging.getLogger(__name__)

MISSED_HEARTBEATS = 3
STALL_S = (2.0, 30.0)
BATCH_ROWS = 2_000
"""Most rows of a stream sent again at once, and most on their way without a receipt."""
MOST_CONSUMERS = 16
BODY_BYTES = 65_536


@dataclass(frozen=True)
class Position:
    """How far a consumer has one stream of the station's epoch."""

    upto: int
    top: int
    missing: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Heard:
    """A consumer as the station knows it. `age_s`: since its last receipt; None: it was retained
    at the broker, nothing was heard of the consumer itself."""

    id: str
    alive: bool
    age_s: float | None
    positions: Mapping[str, Position]


@dataclass(frozen=True)
class Wanted:
    """What a consumer should get: its missing numbers, or the word where to begin."""

    consumer: str
    stream: str
    ranges: tuple[tuple[int, int], ...] = ()
    begin: int | None = None


@dataclass
class _Lag:
    """What was done about one stream of one consumer."""

    served: set[int] = field(default_factory=set)
    again_at: float = 0.0
    delay_s: float = STALL_S[0]
    behind_since: float | None = None
    upto: int = -1


@dataclass
class _Consumer:
    positions: Mapping[str, Position]
    heartbeat_s: float = 1.0
    heard_at: float | None = None
    lags: dict[str, _Lag] = field(default_factory=dict)


class Receipts:
    """The consumers of one station. `now` is of `time.monotonic`.

    `record`: the consumer whose receipts decide what is delivered (level 2); None: level 1.
    """

    def __init__(self, epoch: str, record: str | None) -> None:
        self.record = record
        self.followed = False
        self._epoch = epoch
        self._consumers: dict[str, _Consumer] = {}
        self._first: dict[str, int] = {}
        self._sent: dict[str, int] = {}

    def ended(self, now: float) -> None:
        """The connection has ended. `followed`: somebody was there who will say what it misses."""
        self.followed = any(self.alive(name, now) for name in self._consumers)

    def connected(self) -> None:
        """A new connection: who is there has yet to be heard, and nothing was sent on it."""
        self._first.clear()
        self._sent.clear()
        for consumer in self._consumers.values():
            consumer.heard_at = None

    def sent(self, stream: str, number: int) -> None:
        """The broker has taken this number on this connection."""
        self._first.setdefault(stream, number)
        self._sent[stream] = max(number, self._sent.get(stream, 0))

    def heard(
        self, consumer: str, body: bytes, *, retained: bool, now: float
    ) -> Mapping[str, Position] | None:
        """Take a receipt; its positions, None for one that cannot be read."""
        try:
            if len(body) > BODY_BYTES:
                raise ValueError(f"{len(body)} bytes")
            content = json.loads(body)
            schema.require(content)
            if content["schema"] != "receipt/1.0" or content["consumer"] != consumer:
                raise ValueError(f"{content['schema']} of {content['consumer']}")
        except (
            ValueError, TypeError, KeyError, AttributeError, RecursionError, ContractError
        ) as error:  # fmt: skip
            log.warning("receipt of %s is not understood: %s", consumer[:40], error)
            return None
        known = self._consumers.get(consumer)
        if known is None:
            if len(self._consumers) >= MOST_CONSUMERS and consumer != self.record:
                log.warning("receipt of %s is ignored: too many consumers", consumer)
                return None
            known = self._consumers[consumer] = _Consumer({})
        known.positions = _positions(content, self._epoch)
        known.heartbeat_s = float(content.get("heartbeatS", 1.0))
        if not retained:
            known.heard_at = now
        return known.positions

    def alive(self, consumer: str, now: float) -> bool:
        """Whether something was heard of it in the last three heartbeats of this connection."""
        known = self._consumers.get(consumer)
        if known is None or known.heard_at is None:
            return False
        return now - known.heard_at < MISSED_HEARTBEATS * known.heartbeat_s

    def may_send(self, now: float) -> bool:
        """At level 2: the consumer is there and keeps up. At level 1: always."""
        if self.record is None:
            return True
        if not self.alive(self.record, now):
            return False
        positions = self._consumers[self.record].positions
        for stream, number in self._sent.items():
            stored = positions[stream].upto if stream in positions else 0
            if number - max(stored, self._first[stream] - 1) >= BATCH_ROWS:
                return False
        return True

    def consumers(self, now: float) -> tuple[Heard, ...]:
        """Everybody who ever sent a receipt, for the health message."""
        return tuple(
            Heard(
                name,
                self.alive(name, now),
                None if item.heard_at is None else round(now - item.heard_at, 1),
                dict(item.positions),
            )
            for name, item in self._consumers.items()
        )

    def wanted(
        self,
        consumer: str,
        streams: Iterable[str],
        confirmed_upto: Callable[[str], int],
        now: float,
    ) -> list[Wanted]:
        """What to send again now, after a receipt of the consumer."""
        known = self._consumers[consumer]
        found = []
        for stream in streams:
            lag = known.lags.setdefault(stream, _Lag())
            sent = max(confirmed_upto(stream), self._sent.get(stream, 0))
            position = known.positions.get(stream)
            if position is not None:
                numbers = _numbers(position, lag, sent, now)
                if numbers:
                    found.append(Wanted(consumer, stream, _ranges(numbers)))
            elif now >= lag.again_at:
                lag.again_at = now + STALL_S[0]
                found.append(Wanted(consumer, stream, begin=confirmed_upto(stream) + 1))
        return found


def _numbers(position: Position, lag: _Lag, sent: int, now: float) -> list[int]:
    """The numbers to send again: holes at once, what lies behind them once nothing moves."""
    if position.upto > lag.upto:
        lag.upto, lag.delay_s = position.upto, STALL_S[0]
    if lag.served and position.upto >= max(lag.served):
        lag.served.clear()  # all arrived: the next batch may go
    elif lag.served and now >= lag.again_at:
        lag.served.clear()
        lag.delay_s = min(STALL_S[1], 2 * lag.delay_s)
    top = max(position.top, position.upto)
    if top >= sent:
        lag.behind_since = None
    elif lag.behind_since is None:
        lag.behind_since = now
    ranges = [range(first, min(last, sent) + 1) for first, last in position.missing]
    if lag.behind_since is not None and now - lag.behind_since >= lag.delay_s:
        ranges.append(range(top + 1, sent + 1))
    left = max(0, BATCH_ROWS - len(lag.served))
    candidates = chain.from_iterable(ranges)
    numbers = list(islice((item for item in candidates if item not in lag.served), left))
    if numbers:
        lag.served.update(numbers)
        lag.again_at = now + lag.delay_s
    return numbers


def _ranges(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    found = []
    for _, group in groupby(enumerate(numbers), key=lambda item: item[1] - item[0]):
        members = [number for _, number in group]
        found.append((members[0], members[-1]))
    return tuple(found)


def _positions(content: Mapping[str, Any], epoch: str) -> dict[str, Position]:
    return {
        item["stream"]: Position(
            item["upto"],
            item["top"],
            tuple((first, last) for first, last in item.get("missing", ()) if first <= last),
        )
        for item in content["positions"]
        if item["epoch"] == epoch
    }
