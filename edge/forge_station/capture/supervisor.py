"""A camera in a process of its own, watched from outside and brought back whenever it fails.

`SupervisedCamera` keeps the protocol of a camera driver, so that what uses one need not know. What
it adds: the states of `capture.lifecycle`, told to `on_change` as they come, and counters. A fault
shows once to who uses it: every call raises CameraLostError until it is armed again.

No discovery is ever run beside a live device: the address of the settings is opened, in a process
that has nothing else.
"""

from __future__ import annotations

import logging
import mmap
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from forge_station.capture.base import Frame
from forge_station.capture.camera import CameraHealth, CameraInfo, CameraSettings, TriggerMode
from forge_station.capture.lifecycle import Lifecycle, Patience, State
from forge_station.capture.worker import (
    SLOTS,
    Arm,
    Beat,
    Done,
    Free,
    Lost,
    Opened,
    Order,
    Start,
    Taken,
    unpacked,
)
from forge_station.errors import (
    CameraLostError,
    CameraSettingsError,
    CameraTimeoutError,
    StationError,
)

log = logging.getLogger(__name__)

EQUAL_IMAGES = 5
"""So many equal images in a row of a live camera: it is frozen. Noise makes two differ."""
_TICK_S = 0.05
_REAP_S = 5.0
_RUN = "import sys; from forge_station.capture.worker import main; main(sys.argv[1:])"


@dataclass(frozen=True)
class Counters:
    """Since the supervisor began, over all handles.

    frames handed on; incomplete among them; dropped: newer ones took their place (free running), or
    lost by the device as its driver counts them; starts of a process; reconnects: opened again
    after a fault; stalls: no frame or no sign of life in time; frozen: one image repeated.
    """

    frames: int = 0
    incomplete: int = 0
    dropped: int = 0
    starts: int = 0
    reconnects: int = 0
    stalls: int = 0
    frozen: int = 0


@dataclass(frozen=True)
class Change:
    """A new state of a device. fault: why it is not STREAMING. t_utc_ns: when."""

    camera: str
    state: State
    before: State
    fault: StationError | None
    counters: Counters
    t_utc_ns: int

    @property
    def lost(self) -> bool:
        """Whether parts must be ERROR now."""
        return self.fault is not None


@dataclass
class _Handle:
    """One process and what is left of it: replaced as a whole, never repaired."""

    process: subprocess.Popen[bytes]
    connection: Connection
    memory: int
    ring: mmap.mmap | None = None
    slot_bytes: int = 0
    dropped: int = 0
    """By the device and in the process, as of the last beat."""

    def close(self) -> None:
        """Kill and reap. Raises subprocess.TimeoutExpired for one stuck in the kernel."""
        self.process.kill()
        self.connection.close()
        if self.memory >= 0:
            os.close(self.memory)
            self.memory = -1
        self.process.wait(_REAP_S)


@dataclass
class _Inbox:
    """Frames of the armed burst that were not taken yet."""

    frames: deque[tuple[_Handle, Taken]] = field(default_factory=deque)
    newest_only: bool = False
    burst: int = 0


class SupervisedCamera:
    """A camera driver's device in a watched process. Opening begins at once, in the background.

    name: of the camera in messages; on_change is called in the supervisor's thread and must only
    note or queue. equal_images 0: no look for frozen images. clock: seconds, monotonic, of the
    watch; tests set their own.
    """

    def __init__(
        self,
        settings: CameraSettings,
        *,
        name: str = "",
        patience: Patience | None = None,
        on_change: Callable[[Change], None] | None = None,
        equal_images: int = EQUAL_IMAGES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.name = name or f"{settings.driver}:{settings.address}"
        self._patience = (patience or Patience()).for_device(settings)
        self._on_change, self._equal_images, self._clock = on_change, equal_images, clock
        self._life = Lifecycle(self.name, self._patience, random.Random())
        self._counters = Counters()
        self._health = CameraHealth()
        self._handle: _Handle | None = None
        self._info: CameraInfo | None = None
        self._inbox = _Inbox()
        self._broken: StationError | None = None
        self._answer: Done | None = None
        self._asked = False
        self._told, self._logged = State.CLOSED, ""
        self._stuck: list[subprocess.Popen[bytes]] = []
        self._changed = threading.Condition()
        self._orders = threading.Lock()  # one order at a time
        self._wake, self._wake_end = os.pipe()
        self._bursts = 0
        self._leaving = self._closing = False
        self._life.begin(clock())
        self._thread = threading.Thread(target=self._run, name=f"camera {self.name}", daemon=True)
        self._thread.start()

    # -- for who watches

    @property
    def state(self) -> State:
        return self._life.state

    @property
    def fault(self) -> StationError | None:
        """Why it is not STREAMING."""
        return self._life.fault

    @property
    def counters(self) -> Counters:
        with self._changed:
            return self._counted()

    @property
    def pid(self) -> int | None:
        """Of the process that has the device now."""
        handle = self._handle
        return None if handle is None else handle.process.pid

    def wait_open(self, timeout_s: float, *, patient: bool = False) -> CameraInfo:
        """What was opened. patient: wait through failed tries, in the hope of a next one.

        Raises the device's error, or CameraTimeoutError when it is not known yet.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closing
                    or self._life.state is State.STREAMING
                    or not (patient or self._life.fault is None)
                ),
                timeout_s,
            )
            return self._opened()

    # -- the protocol of a camera

    def describe(self) -> CameraInfo:
        with self._changed:
            self._refuse_closed()
            if self._info is None:
                return self._opened()
            return self._info

    def arm(
        self, trigger: TriggerMode, count: int | None = None, *, exposure_us: float | None = None
    ) -> None:
        with self._orders:
            endless = count is None
            with self._changed:
                self._opened()
                self._broken = None
                self._bursts += 1
                self._empty(_Inbox(newest_only=trigger == "free" and endless, burst=self._bursts))
            try:
                self._order(Arm(trigger, count, exposure_us, self._bursts))
            except StationError:
                self._inbox.burst = 0
                raise
            with self._changed:
                self._life.armed(self._clock(), trigger, endless=endless, exposure_us=exposure_us)

    def trigger(self) -> None:
        with self._orders:
            with self._changed:
                self._life.triggered(self._clock())
            self._order(Order("trigger"))

    def grab(self, timeout_s: float) -> Frame:
        with self._changed:
            if not self._inbox.burst and self._broken is None:
                self._refuse_closed()
                raise CameraSettingsError(
                    "frame asked of a camera that is not armed",
                    which=self.name,
                    action="arm it first",
                )
            self._changed.wait_for(self._frame_or_fault, timeout_s)
            self._refuse_broken()
            if not self._inbox.frames:
                raise CameraTimeoutError(
                    "no frame", which=self.name, expected=f"one within {timeout_s:g} s"
                )
            handle, taken = self._inbox.frames.popleft()
        frame = self._read(handle, taken)
        with self._changed:
            self._release(handle, taken)
            self._counters = replace(
                self._counters,
                frames=self._counters.frames + 1,
                incomplete=self._counters.incomplete + (not frame.complete),
            )
        return frame

    def disarm(self) -> None:
        with self._orders:
            with self._changed:
                if self._life.state is not State.STREAMING or self._broken is not None:
                    return
                self._empty(_Inbox())
                self._life.armed(self._clock(), None, endless=False, exposure_us=None)
            try:
                self._order(Order("disarm"))
            except CameraLostError as error:
                log.warning("camera %s: lost while it was disarmed: %s", self.name, error)

    def health(self) -> CameraHealth:
        """Counters over all handles, and what the device last said of itself."""
        with self._changed:
            self._refuse_closed()
            found = self._counted()
            details: dict[str, str | int | float] = dict(self._health.details)
            details |= {
                "state": self._life.state.value,
                "starts": found.starts,
                "reconnects": found.reconnects,
                "stalls": found.stalls,
                "frozen": found.frozen,
            }
            return CameraHealth(
                found.frames, found.incomplete, found.dropped, self._health.temperature, details
            )

    def close(self) -> None:
        """Release the device, kill what does not end, and stop watching; may be called twice."""
        with self._orders:
            if self._closing:
                return
            self._leaving = True  # the end of the process is no fault any more
            if self._life.state is State.STREAMING:
                try:
                    self._order(Order("close"))
                except StationError as error:
                    log.warning("camera %s: not closed in order: %s", self.name, error)
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            os.write(self._wake_end, b"x")
        self._thread.join(_REAP_S + 2)
        os.close(self._wake)
        os.close(self._wake_end)

    # -- the supervisor's thread

    def _run(self) -> None:
        while not self._closing:
            handle = self._handle
            sources: list[Any] = [self._wake]
            if handle is not None:
                sources.append(handle.connection)
            ready = wait(sources, _TICK_S)
            with self._changed:
                if handle is not None and handle.connection in ready:
                    self._receive(handle)
                action = self._life.tick(self._clock())
            if action == "kill":
                self._tell()  # the fault first: ending a process may take its time
                self._kill()
            elif action == "start":
                self._begin()
            self._tell()
        self._kill()
        with self._changed:
            self._life.closed()
            self._changed.notify_all()
        self._tell()

    def _begin(self) -> None:
        """A new process with a new handle. It is started by the thread that outlives it."""
        ours, theirs = socket.socketpair()
        memory = os.memfd_create("forge-station-frames", os.MFD_CLOEXEC)
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _RUN, str(theirs.fileno()), str(memory)],
                pass_fds=(theirs.fileno(), memory),
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                    "PYTHONSAFEPATH": "1",
                },
            )
        except OSError as error:
            ours.close()
            os.close(memory)
            with self._changed:
                self._life.started(self._clock())
                self._life.failed(self._clock(), CameraLostError("no new process", got=error))
            return
        finally:
            theirs.close()
        handle = _Handle(process, Connection(ours.detach()), memory)
        with self._changed:
            self._handle = handle
            self._life.started(self._clock())
            self._counters = replace(self._counters, starts=self._counters.starts + 1)
        self._send(handle, Start(self.settings, self._equal_images))

    def _receive(self, handle: _Handle) -> None:
        """All messages that wait."""
        now = self._clock()
        try:
            while handle.connection.poll(0):
                self._take(handle, handle.connection.recv(), now)
        except (EOFError, OSError):
            if self._life.state in (State.OPENING, State.STREAMING):
                code = handle.process.poll()
                self._fail(
                    CameraLostError(
                        "the camera's process ended",
                        which=self.name,
                        got="unknown" if code is None else f"exit status {code}",
                        action="it is started anew; the log has what its library printed",
                    )
                )

    def _take(self, handle: _Handle, message: object, now: float) -> None:
        self._life.heard(now)
        if isinstance(message, Taken):
            self._life.frame(now)
            self._put(handle, message)
        elif isinstance(message, Beat):
            handle.dropped = message.health.dropped + message.missed
            self._health = message.health
        elif isinstance(message, Done):
            self._life.answered(now)
            self._answer = message
        elif isinstance(message, Opened):
            handle.slot_bytes = message.slot_bytes
            handle.ring = mmap.mmap(handle.memory, SLOTS * message.slot_bytes)
            self._info = message.info
            again = self._life.fault is not None
            self._life.opened(now)
            self._counters = replace(
                self._counters, reconnects=self._counters.reconnects + int(again)
            )
        elif isinstance(message, Lost):
            self._counters = replace(
                self._counters, frozen=self._counters.frozen + int(message.frozen)
            )
            self._fail(unpacked(message.error))
        self._changed.notify_all()

    def _put(self, handle: _Handle, taken: Taken) -> None:
        """Into the inbox, or back to the ring: of an earlier burst, or older than the newest."""
        if taken.burst != self._inbox.burst:
            self._release(handle, taken)
            return
        while self._inbox.newest_only and self._inbox.frames:
            self._release(*self._inbox.frames.popleft())
            self._counters = replace(self._counters, dropped=self._counters.dropped + 1)
        self._inbox.frames.append((handle, taken))

    def _fail(self, fault: StationError) -> None:
        if not self._leaving:
            self._life.failed(self._clock(), fault)
            self._changed.notify_all()

    def _kill(self) -> None:
        with self._changed:
            handle, self._handle = self._handle, None
            self._counters = self._counted(handle)
            self._inbox.frames.clear()
            self._broken = self._life.fault
            self._answer = None
            self._changed.notify_all()
        if handle is not None:
            try:
                handle.close()
            except subprocess.TimeoutExpired:
                log.error("camera %s: process %s cannot be killed", self.name, handle.process.pid)
                self._stuck.append(handle.process)
        self._stuck = [process for process in self._stuck if process.poll() is None]
        with self._changed:
            if not self._closing:
                self._life.ended(self._clock())

    def _tell(self) -> None:
        """Each new state once, in order; holds no lock."""
        state = self._life.state
        if state is self._told:
            return
        before, self._told = self._told, state
        fault, now = self._life.fault, time.time_ns()
        if state is State.STALLED and str(fault) != self._logged:
            self._logged = str(fault)
            log.warning("camera %s: %s", self.name, fault)
        change = Change(self.name, state, before, fault, self.counters, now)
        log.info("camera %s: %s -> %s", self.name, before.value, state.value)
        if self._on_change is not None:
            try:
                self._on_change(change)
            except Exception:  # whoever listens must not end the watch
                log.exception("camera %s: on_change failed", self.name)

    # -- shared by both

    def _order(self, message: Arm | Order) -> None:
        """Send and wait for the answer, in bounded time. Raises the driver's error."""
        with self._changed:
            self._refuse_broken()
            handle = self._handle
            if handle is None or self._life.state is not State.STREAMING:
                raise self._not_there()
            self._answer = None
            self._life.ordered(self._clock())
            self._send(handle, message)
            answer = self._wait_for_answer(handle)
            if answer is None:
                self._refuse_broken()
                raise self._not_there()
            if answer.error is not None:
                raise unpacked(answer.error)

    def _wait_for_answer(self, handle: _Handle) -> Done | None:
        self._changed.wait_for(
            lambda: self._answer is not None or self._handle is not handle,
            2 * self._patience.order_s + self._patience.stall_s,  # the watch is quicker
        )
        return self._answer

    def _send(self, handle: _Handle, message: object) -> None:
        with suppress(OSError):  # its end is seen where messages are received
            handle.connection.send(message)

    def _read(self, handle: _Handle, taken: Taken) -> Frame:
        """The one copy of a frame, out of the ring."""
        assert handle.ring is not None
        dtype = np.dtype(taken.dtype)
        count = int(np.prod(taken.shape))
        start = taken.slot * handle.slot_bytes
        image = np.frombuffer(handle.ring, dtype, count, start).reshape(taken.shape).copy()
        return Frame(image=image, **taken.frame)

    def _release(self, handle: _Handle, taken: Taken) -> None:
        if handle is self._handle:
            self._send(handle, Free(taken.slot))

    def _empty(self, inbox: _Inbox) -> None:
        for handle, taken in self._inbox.frames:
            self._release(handle, taken)
        self._inbox = inbox

    def _counted(self, handle: _Handle | None = None) -> Counters:
        """With the losses that only the process or the device knows of, of `handle` or the live."""
        handle = handle or self._handle
        extra = 0 if handle is None else handle.dropped
        dropped = self._counters.dropped + extra
        return replace(self._counters, dropped=dropped, stalls=self._life.stalls)

    def _frame_or_fault(self) -> bool:
        return bool(self._inbox.frames) or self._broken is not None or self._closing

    def _opened(self) -> CameraInfo:
        self._refuse_closed()
        if self._info is None or self._life.state is not State.STREAMING:
            raise self._not_there()
        return self._info

    def _not_there(self) -> StationError:
        return self._life.fault or CameraTimeoutError(
            "the camera is not open yet", which=self.name, got=self._life.state.value
        )

    def _refuse_broken(self) -> None:
        self._refuse_closed()
        if self._broken is not None:
            raise CameraLostError(
                "the camera was lost",
                which=self.name,
                got=self._broken,
                action="arm it again when it is back",
            )

    def _refuse_closed(self) -> None:
        if self._closing:
            raise CameraLostError("the camera is closed", which=self.name, action="open it anew")
