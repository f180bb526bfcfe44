"""One part at a time: every source offers its triggers here, the loop takes them.

A trigger that comes while the station cannot take it is refused, counted and told, and its source
gets the reason; it is never kept for later, but for a queue of the length the station file names.
An accepted one is answered exactly once. It knows neither sources nor the loop.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import ClassVar

from forge_station.capture.base import Trigger
from forge_station.contract.verdict import Verdict
from forge_station.errors import StationError

log = logging.getLogger(__name__)


class Refusal(IntEnum):
    """Why a trigger is not taken, by the number that a PLC reads. Numbers never change."""

    NONE = 0
    BUSY = 1
    NOT_READY = 2
    NOT_ENABLED = 3
    NO_HEARTBEAT = 4
    TORN_REQUEST = 5
    REPEATED_COUNTER = 6
    BAD_TEXT = 7
    REQUEST_CHANGED = 8
    TRIGGER_ON = 9


class TriggerRefusedError(StationError):
    """A trigger that the station does not take now; nothing was captured."""

    code: ClassVar[str] = "TRIGGER_REFUSED"

    def __init__(self, refusal: Refusal, text: str, serial: str) -> None:
        self.refusal = refusal
        super().__init__("the trigger is refused", which=serial or "no serial", got=text)


Answer = Callable[[Verdict | None], None]
"""Called once with the verdict of an accepted part; None: the station gave the part up."""


@dataclass(frozen=True)
class Counts:
    """Since the start. `refused`: how often for which reason."""

    accepted: int
    answered: int
    refused: Mapping[Refusal, int]


@dataclass
class _Part:
    trigger: Trigger
    answer: Answer | None


class Gate:
    """Made shut; `open` when the station is ready. Any thread may call any method.

    `queue`: parts that may wait beside the one in work. `number` gives the serial of a part that
    comes without one; a refused part takes no number. `on_refused` is told of every refusal, in
    the thread of its source; it must not block.
    """

    def __init__(
        self,
        queue: int = 0,
        on_refused: Callable[[Trigger, Refusal, str], None] | None = None,
        number: Callable[[], str] = str,
    ) -> None:
        self._number = number
        self._places = 1 + queue
        self._on_refused = on_refused
        self._changed = threading.Condition()
        self._waiting: deque[_Part] = deque()
        self._in_work: _Part | None = None
        self._shut: str | None = "the station starts"
        self._ended = False
        self._accepted = self._answered = 0
        self._refused: Counter[Refusal] = Counter()

    def open(self) -> None:
        """Take triggers from now on."""
        with self._changed:
            self._shut = None

    def shut(self, why: str) -> None:
        """Refuse every further trigger; those accepted are still inspected."""
        with self._changed:
            self._shut = why

    def end(self, why: str) -> None:
        """As `shut`, for good: `take` raises EOFError once nothing is left."""
        with self._changed:
            self._shut, self._ended = why, True
            self._changed.notify_all()

    def objection(self) -> tuple[Refusal, str] | None:
        """Why a trigger offered now would be refused; None: it would not."""
        with self._changed:
            if self._shut is not None:
                return Refusal.NOT_READY, self._shut
            if len(self._waiting) + (self._in_work is not None) >= self._places:
                part = self._in_work or self._waiting[0]
                return Refusal.BUSY, f"part {part.trigger.serial} is in work"
        return None

    def offer(self, trigger: Trigger, answer: Answer | None = None) -> Trigger:
        """Hand in a part; the trigger with its serial. Raises TriggerRefusedError, and then
        `answer` is never called."""
        with self._changed:
            found = self.objection()
            if found is None:
                self._accepted += 1
                trigger = replace(trigger, serial=trigger.serial or self._number())
                self._waiting.append(_Part(trigger, answer))
                self._changed.notify_all()
                return trigger
        self.refuse(trigger, *found)
        raise TriggerRefusedError(*found, trigger.serial)

    def refuse(self, trigger: Trigger, refusal: Refusal, text: str) -> None:
        """Count and tell a trigger that a source itself does not take."""
        with self._changed:
            self._refused[refusal] += 1
        log.warning("trigger %s refused: %s", trigger.serial or "without serial", text)
        if self._on_refused is not None:
            self._on_refused(trigger, refusal, text)

    def take(self, timeout_s: float) -> Trigger | None:
        """The next part, which then is in work; None when none came in time.

        Raises EOFError after `end`, when none is left.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._waiting:
                if self._ended:
                    raise EOFError
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return None
                self._changed.wait(left_s)
            self._in_work = self._waiting.popleft()
            return self._in_work.trigger

    def finish(self, verdict: Verdict | None) -> None:
        """The part in work is done: answer its source. Nothing happens when it was given up."""
        with self._changed:
            part, self._in_work = self._in_work, None
            self._answered += part is not None
        if part is not None:
            _answer(part, verdict)

    def give_up(self) -> list[Trigger]:
        """Answer every accepted part with None, and return them, the one in work first."""
        with self._changed:
            parts = [*([self._in_work] if self._in_work else []), *self._waiting]
            self._in_work = None
            self._waiting.clear()
            self._answered += len(parts)
        for part in parts:
            _answer(part, None)
        return [part.trigger for part in parts]

    def counts(self) -> Counts:
        with self._changed:
            return Counts(self._accepted, self._answered, dict(self._refused))


def _answer(part: _Part, verdict: Verdict | None) -> None:
    if part.answer is None:
        return
    try:
        part.answer(verdict)
    except OSError as error:  # whoever asked is gone; the verdict is stored all the same
        log.warning("part %s: its source could not be answered: %s", part.trigger.serial, error)
