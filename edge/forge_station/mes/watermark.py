"""How far a consumer has a station's streams: numbers without holes, holes, and what lies beyond.

It knows no MQTT and does not know what is in a message. `consumer` keeps it on disk and makes
receipts of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Range = tuple[int, int]
"""First and last number."""
MISSING_RANGES = 64
"""Most holes named in one receipt; the others follow when these are filled."""
EPOCHS = 3
"""Of each stream the last so many epochs are remembered."""


class Position:
    """One stream in one epoch. `upto` None: it is not known where to begin."""

    def __init__(self, upto: int | None = None, beyond: Iterable[Sequence[int]] = ()) -> None:
        self.upto = upto
        self._beyond: list[Range] = sorted((int(a), int(b)) for a, b in beyond)
        self._absorb()

    @property
    def top(self) -> int:
        """The highest number taken; 0 for none."""
        return self._beyond[-1][1] if self._beyond else self.upto or 0

    @property
    def beyond(self) -> tuple[Range, ...]:
        """What was taken above `upto`."""
        return tuple(self._beyond)

    def has(self, number: int) -> bool:
        """Whether the number was taken (or said to be gone)."""
        if self.upto is not None and number <= self.upto:
            return True
        return any(first <= number <= last for first, last in reversed(self._beyond))

    def lacking(self, first: int, last: int) -> int:
        """How many numbers from `first` to `last` were not taken."""
        first = first if self.upto is None else max(first, self.upto + 1)
        taken = sum(max(0, min(last, b) - max(first, a) + 1) for a, b in self._beyond)
        return max(0, last - first + 1) - taken

    def take(self, first: int, last: int | None = None) -> None:
        """Note a number, or all from `first` to `last`."""
        last = first if last is None else last
        if not self._beyond and self.upto is not None and first <= self.upto + 1:
            self.upto = max(self.upto, last)  # what comes in order, which is nearly everything
            return
        before = [item for item in self._beyond if item[1] < first - 1]
        after = [item for item in self._beyond if item[0] > last + 1]
        touching = self._beyond[len(before) : len(self._beyond) - len(after)]
        merged = (
            min([first, *(item[0] for item in touching)]),
            max([last, *(item[1] for item in touching)]),
        )
        self._beyond = [*before, merged, *after]
        self._absorb()

    def begin(self, number: int) -> None:
        """Where to begin, if that is not known yet: not behind what was taken already.

        A consumer that ended before it was told has taken numbers; what came between them and
        `number` went to others, and is missing here.
        """
        if self.upto is None:
            self.upto = min([number, *(first for first, _ in self._beyond)]) - 1
            self._absorb()

    def missing(self, limit: int = MISSING_RANGES) -> tuple[Range, ...]:
        """The holes below `top`, lowest first; none as long as it is not known where to begin."""
        if self.upto is None:
            return ()
        holes, following = [], self.upto + 1
        for first, last in self._beyond[:limit]:
            holes.append((following, first - 1))
            following = last + 1
        return tuple(holes)

    def _absorb(self) -> None:
        while self.upto is not None and self._beyond and self._beyond[0][0] <= self.upto + 1:
            self.upto = max(self.upto, self._beyond.pop(0)[1])


class Watermark:
    """The positions of one consumer at one station."""

    def __init__(self) -> None:
        self._streams: dict[str, dict[str, Position]] = {}

    def position(self, stream: str, epoch: str) -> Position:
        """Of the stream in the epoch; a new one when it was never heard of."""
        epochs = self._streams.setdefault(stream, {})
        if epoch not in epochs:
            epochs[epoch] = Position()
            while len(epochs) > EPOCHS:
                del epochs[next(iter(epochs))]
        return epochs[epoch]

    def newest(self) -> dict[tuple[str, str], Position]:
        """(stream, epoch) -> position, of the newest epoch of each stream."""
        return {
            (stream, next(reversed(epochs))): epochs[next(reversed(epochs))]
            for stream, epochs in self._streams.items()
            if epochs
        }

    def receipt(self) -> list[dict[str, Any]]:
        """The `positions` of a receipt: of the newest epoch of each stream, where known."""
        found = []
        for (stream, epoch), position in self.newest().items():
            if position.upto is None:
                continue
            entry: dict[str, Any] = {
                "stream": stream,
                "epoch": epoch,
                "upto": position.upto,
                "top": position.top,
            }
            if position.missing():
                entry["missing"] = [list(item) for item in position.missing()]
            found.append(entry)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a file."""
        return {
            stream: {
                epoch: {"upto": item.upto, "beyond": [list(pair) for pair in item.beyond]}
                for epoch, item in epochs.items()
            }
            for stream, epochs in self._streams.items()
        }

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Watermark:
        """From `to_dict`. Raises ValueError, TypeError or KeyError for other data."""
        found = cls()
        for stream, epochs in facts.items():
            found._streams[stream] = {
                epoch: Position(None if item["upto"] is None else int(item["upto"]), item["beyond"])
                for epoch, item in epochs.items()
            }
        return found
