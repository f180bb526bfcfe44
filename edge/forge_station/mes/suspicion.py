"""Finds the message that makes the broker end the connection, so that it cannot do so for ever.

It knows rows by number only. Brokers answer a message larger than they like by closing, and after
each reconnect the same message comes again: one poisoned row would stop the line's data.

Two connections in a row that ended at once after a send and confirmed nothing raise suspicion:
rows then go one at a time. The row that is alone on its way at three such ends is the one.
"""

from __future__ import annotations

from collections.abc import Mapping

AT_ONCE_S = 5.0
TRIES = 3
CAREFUL_ROWS = 20
"""So many confirmed rows end the suspicion: the rows of one full window."""


class Suspicion:
    """Told of every confirmation and every end of a connection."""

    def __init__(self) -> None:
        self._fruitless = 0
        self._careful = 0
        self._alone: dict[int, int] = {}

    @property
    def active(self) -> bool:
        """Whether rows must go one at a time."""
        return self._careful > 0

    def confirmed(self, seq: int) -> None:
        """The broker has answered this row, so it is innocent."""
        self._fruitless = 0
        self._careful = max(0, self._careful - 1)
        self._alone.pop(seq, None)

    def ended(self, ages_s: Mapping[int, float], *, fruitful: bool) -> int | None:
        """A connection ended with these rows on their way (seq -> seconds since they were sent).

        `fruitful`: it had confirmed something. Returns the seq found guilty, None if none was.
        """
        if not ages_s or min(ages_s.values()) > AT_ONCE_S:
            self._fruitless = 0
            return None
        if self.active and len(ages_s) == 1:
            self._careful = CAREFUL_ROWS
            (seq,) = ages_s
            self._alone[seq] = self._alone.get(seq, 0) + 1
            if self._alone[seq] >= TRIES:
                del self._alone[seq]
                return seq
        elif fruitful:
            self._fruitless = 0
        else:
            self._fruitless += 1
            if self._fruitless >= 2:
                self._careful = CAREFUL_ROWS
        return None
