"""Simple sources of triggers: a clock, the camera's input line, a queue for commands.

Each offers to the gate from a thread of its own; a refusal was counted and told by the gate.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from forge_station.capture.base import Trigger
from forge_station.capture.camera import Camera
from forge_station.errors import CameraTimeoutError, CaptureError
from forge_station.triggers.gate import Answer, Gate, TriggerRefusedError

log = logging.getLogger(__name__)

PULSE_WAIT_S = 0.5
FAULT_WAIT_S = 1.0


class Serials:
    """`<station>-000001`, ...: serials for parts that come without one (`Gate.number`).

    Every accepted part ends in a verdict, so a start that counts on from the number of verdicts
    gives none twice.
    """

    def __init__(self, station: str, first: int = 1) -> None:
        self._station, self._next = station, first
        self._lock = threading.Lock()

    def start(self, first: int) -> None:
        """Count on from here."""
        with self._lock:
            self._next = first

    def next(self) -> str:
        with self._lock:
            number, self._next = self._next, self._next + 1
        return f"{self._station}-{number:06d}"


class Source(Protocol):
    """What offers triggers between `start` and `close`. Raises StationError when it cannot."""

    def start(self) -> None: ...
    def close(self) -> None: ...


class QueueTrigger:
    """Triggers from inside this process: the handler of the command `capture` calls `put`."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def start(self) -> None: ...

    def close(self) -> None: ...

    def put(self, trigger: Trigger, answer: Answer | None = None) -> Trigger:
        """Offer a part; returns at once the trigger with its serial.

        Raises TriggerRefusedError when it is not taken. `answer` gets the verdict later, in the
        thread of the loop: it must not block.
        """
        return self._gate.offer(trigger, answer)


class Thread(ABC):
    """A source that is one thread: `step` is called again and again until `close`."""

    name = "trigger"

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; may be called twice."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def __enter__(self) -> Thread:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @abstractmethod
    def step(self) -> None:
        """Wait for at most a moment, and offer what came."""

    def offer(self, trigger: Trigger) -> None:
        try:
            self._gate.offer(trigger)
        except TriggerRefusedError as error:
            log.debug("%s", error)  # the gate has counted and told it

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.step()
            except Exception:  # a source that has ended would leave a station that hears nothing
                log.exception("%s: a trigger could not be taken", self.name)
                self._stop.wait(FAULT_WAIT_S)


class TimerTrigger(Thread):
    """A trigger every `period_s`, the first after one period. Beats that fall into a part in work
    are overruns; a clock that was held up does not catch up.

    `wait(seconds)` waits and returns True when the source was closed.
    """

    name = "timer"

    def __init__(
        self,
        gate: Gate,
        part_number: str,
        period_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        super().__init__(gate)
        self._part_number = part_number
        self._period_s, self._clock = period_s, clock
        self._wait = wait or self._stop.wait
        self._due = clock() + period_s

    def step(self) -> None:
        if self._wait(max(0.0, self._due - self._clock())):
            return
        self.offer(Trigger("", self._part_number, time.time_ns()))
        self._due += self._period_s
        if self._due < self._clock():
            self._due = self._clock() + self._period_s


class CameraTrigger(Thread):
    """A pulse on the camera's input line (a light barrier) starts a part: its frame is the trigger.

    The camera waits armed between parts and is left alone while one is in work, so that the head
    can use it for the scan. A pulse in that time makes a frame too many in the scan, which the head
    refuses: the part is an ERROR, never two parts in one. An idle line is no error.
    """

    name = "camera line"

    def __init__(self, gate: Gate, part_number: str, camera: Camera) -> None:
        super().__init__(gate)
        self._part_number, self._camera = part_number, camera

    def step(self) -> None:
        try:
            at_ns = self._pulse()
        except CaptureError as error:
            log.warning("camera line: %s", error)
            self._stop.wait(1.0)
            return
        if at_ns is None:
            return
        done = threading.Event()
        trigger = Trigger("", self._part_number, at_ns)
        try:
            self._gate.offer(trigger, lambda verdict: done.set())
        except TriggerRefusedError:
            return
        while not done.wait(PULSE_WAIT_S) and not self._stop.is_set():
            pass

    def _pulse(self) -> int | None:
        """UTC in ns of the next pulse's frame; None when the source was closed."""
        try:
            self._camera.arm("hardware", 1)
            while not self._stop.is_set():
                try:
                    return self._camera.grab(PULSE_WAIT_S).t_utc_ns
                except CameraTimeoutError:
                    continue
            return None
        finally:
            self._camera.disarm()
