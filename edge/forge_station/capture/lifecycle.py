"""The states of one supervised device, from what is heard of its process. No clock, no process.

    CLOSED -> OPENING -> STREAMING -> STALLED -> BACKOFF -> OPENING ...

STREAMING: the device is open and its process answers, whether frames are due or not. STALLED: for
a moment, while a process that hangs or gives no frames is ended. BACKOFF: waits before the next
try, 1, 2, 4, 5 ... seconds with jitter. Every try is a new process with a new handle.

Times are seconds of one monotonic clock, given by the caller, so that hours can be tested in no
time. An armed hardware trigger waits as long as it likes: an idle line is no fault.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from forge_station.capture.camera import CameraSettings, TriggerMode
from forge_station.errors import CameraLostError, CameraTimeoutError, StationError


class State(str, Enum):
    CLOSED = "CLOSED"
    OPENING = "OPENING"
    STREAMING = "STREAMING"
    STALLED = "STALLED"
    BACKOFF = "BACKOFF"


Action = Literal["none", "start", "kill"]


@dataclass(frozen=True)
class Patience:
    """How long to wait for what, seconds.

    stall_s: for a sign of life, and for a frame that is due (or two frame periods, if longer).
    start_s: for the process to come up, on a busy machine. open_s: then for the device to open;
    None: its `open_timeout_s` and 3 s. order_s: for arming, triggering, disarming. backoff_s: first
    and longest pause before a new try; 5 s and a slow start still keep "back within 10 s of its
    return". steady_s: after so long without a fault pauses begin small again.
    """

    stall_s: float = 1.5
    start_s: float = 30.0
    open_s: float | None = None
    order_s: float = 5.0
    backoff_s: tuple[float, float] = (1.0, 5.0)
    steady_s: float = 10.0

    def for_device(self, settings: CameraSettings) -> Patience:
        """With what the settings say of frame rate and opening."""
        periods = 2 / settings.fps if settings.fps else 0.0
        exposure = 2e-6 * (settings.exposure_us or 0.0)
        return replace(
            self,
            stall_s=max(self.stall_s, periods, exposure + 0.5),
            open_s=self.open_s or settings.open_timeout_s + 3.0,
        )


class Lifecycle:
    """State machine of one device; called from one thread."""

    def __init__(self, name: str, patience: Patience, rng: random.Random) -> None:
        self.state = State.CLOSED
        self.fault: StationError | None = None
        """Why it is not STREAMING; None while it is, and before the first fault."""
        self._name, self._patience, self._rng = name, patience, rng
        self._heard = self._ticked = self._opened_at = 0.0
        self._up = False
        self._order_since: float | None = None
        self._due_since: float | None = None
        self._mode: TriggerMode | None = None
        self._due_s = patience.stall_s
        self.stalls = 0
        """Frames or signs of life that did not come in time."""
        self._tries = 0
        self._retry_at = 0.0

    def begin(self, now: float) -> None:
        """The device is wanted: the next `tick` says "start"."""
        self.state, self._retry_at, self._ticked = State.BACKOFF, now, now

    def started(self, now: float) -> None:
        """Its process runs."""
        self.state, self._heard, self._up = State.OPENING, now, False
        self._mode = self._order_since = self._due_since = None

    def opened(self, now: float) -> None:
        self.state, self.fault, self._heard, self._opened_at = State.STREAMING, None, now, now

    def heard(self, now: float) -> None:
        """Any message: the process is up, its loop runs."""
        self._heard, self._up = now, True

    def ordered(self, now: float) -> None:
        """An order was sent that the SDK may take its time for."""
        self._order_since = now

    def answered(self, now: float) -> None:
        self._order_since, self._heard = None, now

    def armed(
        self, now: float, mode: TriggerMode | None, *, endless: bool, exposure_us: float | None
    ) -> None:
        """None: disarmed. A free burst of counted frames is watched by who asked for it."""
        self._mode = mode
        self._due_since = now if mode == "free" and endless else None
        self._due_s = max(self._patience.stall_s, 2e-6 * (exposure_us or 0.0) + 0.5)

    def triggered(self, now: float) -> None:
        """By software: a frame is due."""
        if self._mode == "software" and self._due_since is None:
            self._due_since = now

    def frame(self, now: float) -> None:
        self._heard = now
        if self._due_since is not None:
            self._due_since = now if self._mode == "free" else None

    def failed(self, now: float, fault: StationError) -> None:
        """The device or its process said so, or ended."""
        if self.state in (State.OPENING, State.STREAMING):
            self._stall(now, fault)

    def ended(self, now: float) -> None:
        """The process is gone: wait before the next try."""
        first, longest = self._patience.backoff_s
        pause = min(longest, first * 2.0 ** min(self._tries, 30))
        self._tries += 1
        self.state = State.BACKOFF
        self._retry_at = now + pause * self._rng.uniform(0.75, 1.0)

    def closed(self) -> None:
        self.state, self.fault = State.CLOSED, None

    def tick(self, now: float) -> Action:
        """What is to be done now; called several times a second."""
        late, self._ticked = now - self._ticked, now
        if late > self._patience.stall_s / 2:
            self._forgive(now)
        if self.state is State.BACKOFF:
            return "start" if now >= self._retry_at else "none"
        if self.state is State.STREAMING and now - self._opened_at > self._patience.steady_s:
            self._tries = 0
        why = self._overdue(now)
        if why is not None:
            self.stalls += self.state is State.STREAMING
            self._stall(now, why)
        return "kill" if self.state is State.STALLED else "none"

    def _forgive(self, now: float) -> None:
        """Who watches was asleep itself (a loaded machine, a suspended one): nobody is late yet."""
        self._heard = now
        if self._due_since is not None:
            self._due_since = now
        if self._order_since is not None:
            self._order_since = now

    def _overdue(self, now: float) -> StationError | None:
        patience = self._patience
        if self.state is State.OPENING:
            limit = patience.open_s or 10.0 if self._up else patience.start_s
            if now - self._heard > limit:
                what = "the camera does not open" if self._up else "its process does not start"
                return CameraTimeoutError(what, which=self._name, expected=f"within {limit:g} s")
        if self.state is not State.STREAMING:
            return None
        silent_s, limit = now - self._heard, patience.stall_s
        if self._order_since is not None:
            silent_s, limit = now - self._order_since, max(limit, patience.order_s)
        if silent_s > limit:
            return CameraLostError(
                "the camera's library hangs",
                which=self._name,
                expected=f"a sign of life within {limit:g} s",
                action="it is opened anew in a new process",
            )
        if self._due_since is not None and now - self._due_since > self._due_s:
            return CameraLostError(
                "the camera gives no frames",
                which=self._name,
                expected=f"one within {self._due_s:g} s",
                action="it is opened anew; check cable, power and bandwidth",
            )
        return None

    def _stall(self, now: float, fault: StationError) -> None:
        self.state, self.fault, self._heard = State.STALLED, fault, now
        self._due_since = self._order_since = self._mode = None
