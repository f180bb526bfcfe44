"""What a consumer has to do with ids and numbers: drop repeats, notice what is missing.

It knows no MQTT; `listen` uses it, and so can any consumer written in Python.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

REMEMBERED_IDS = 100_000
MISSING_LIMIT = 10_000


@dataclass(frozen=True)
class Observation:
    """What one event says about the flow of its stream."""

    duplicate: bool = False
    missing: tuple[int, ...] = ()
    """`streamSeq` numbers that should have come before it and have not."""
    filled: bool = False
    """It is one that was missing."""
    new_epoch: bool = False
    """The station's outbox was begun anew; numbers start again."""


class Tracker:
    """Follows every (source, stream); the first message seen is where following begins."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, None] = OrderedDict()
        self._streams: dict[tuple[str, str], _Stream] = {}

    def observe(self, message: Mapping[str, Any]) -> Observation:
        """Take note of one event message (with its delivery fields)."""
        if message["id"] in self._ids:
            self._ids.move_to_end(message["id"])
            return Observation(duplicate=True)
        self._ids[message["id"]] = None
        if len(self._ids) > REMEMBERED_IDS:
            self._ids.popitem(last=False)
        key = (message["source"], message["stream"])
        number = int(message["streamSeq"])
        known = self._streams.get(key)
        if known is None or known.epoch != message["epoch"]:
            self._streams[key] = _Stream(message["epoch"], number, {})
            return Observation(new_epoch=known is not None)
        if number <= known.highest:
            return Observation(filled=known.missing.pop(number, False))
        missing = tuple(range(known.highest + 1, number))[-MISSING_LIMIT:]
        known.missing.update(dict.fromkeys(missing, True))
        while len(known.missing) > MISSING_LIMIT:
            del known.missing[next(iter(known.missing))]
        known.highest = number
        return Observation(missing=missing)

    def missing(self) -> dict[tuple[str, str], tuple[int, ...]]:
        """(source, stream) -> numbers still missing; streams without any are left out."""
        return {
            key: tuple(sorted(stream.missing))
            for key, stream in self._streams.items()
            if stream.missing
        }


@dataclass
class _Stream:
    epoch: str
    highest: int
    missing: dict[int, bool]
