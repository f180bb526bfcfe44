"""The process that has one camera for itself: it grabs, and hands frames on in shared memory.

Started by `capture.supervisor`, which may kill it at any moment: an SDK that hangs, crashes or
leaks takes no more with it than this process. Frames go through a ring of slots in an anonymous
file (memfd: no name, so nothing is left behind whatever dies); messages go through a socket pair
and are small. The process ends by itself

    when the other end of the socket is gone: it closes the device first, so that a camera is not
    left locked by a station that was killed;
    when one call of the SDK takes longer than any may (`DEAD_MAN_S`): a timer in C that needs no
    interpreter, so that even then no orphan stays.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from forge_station import errors
from forge_station.capture.base import Frame
from forge_station.capture.camera import (
    Camera,
    CameraHealth,
    CameraInfo,
    CameraSettings,
    TriggerMode,
    open_camera,
)
from forge_station.errors import CameraLostError, CameraTimeoutError, StationError

SLOTS = 64
"""Frames that may wait. Only touched ones take memory, and low numbers are used first."""
GRAB_S = 0.1
"""How long one wait for a frame may be; commands are answered in between."""
BEAT_S = 0.5
"""How often the process says that it is alive, and asks the device how it is."""
DEAD_MAN_S = 10.0
_PIXEL_BYTES = 6  # RGB16: room for every pixel format, so that a change of it needs no new memory


@dataclass(frozen=True)
class Start:
    """The first message to the process. equal_images: so many in a row are a frozen camera."""

    settings: CameraSettings
    equal_images: int


@dataclass(frozen=True)
class Arm:
    trigger: TriggerMode
    count: int | None
    exposure_us: float | None
    burst: int
    """Comes back with each frame, so that frames of an earlier one are known."""


@dataclass(frozen=True)
class Order:
    """trigger, disarm or close."""

    name: str


@dataclass(frozen=True)
class Free:
    """The slot was read and may be used again."""

    slot: int


@dataclass(frozen=True)
class Opened:
    """slot_bytes: size of one slot of the ring."""

    info: CameraInfo
    slot_bytes: int


@dataclass(frozen=True)
class Taken:
    """A frame lies in the slot. `frame` is without its image."""

    slot: int
    shape: tuple[int, ...]
    dtype: str
    frame: dict[str, Any]
    burst: int


@dataclass(frozen=True)
class Beat:
    health: CameraHealth
    missed: int


@dataclass(frozen=True)
class Done:
    """Answer to Arm and Order."""

    error: tuple[str, str] | None = None


@dataclass(frozen=True)
class Lost:
    """The last message: the device, or the way to it, is gone."""

    error: tuple[str, str]
    frozen: bool = False


def packed(error: StationError) -> tuple[str, str]:
    """An error as text: what a vendor's library put into it need not be known elsewhere."""
    known = (kind.__name__ for kind in type(error).__mro__ if kind.__name__ in errors.__all__)
    return next(known), str(error)


def unpacked(error: tuple[str, str]) -> StationError:
    """The error with its class and its whole message."""
    name, text = error
    kind: type[StationError] = getattr(errors, name)
    return kind(text)


class Worker:
    """One open camera and the loop that serves it."""

    def __init__(self, connection: Connection, memory: int, start: Start) -> None:
        self._connection, self._memory, self._start = connection, memory, start
        self._camera: Camera | None = None
        self._ring: mmap.mmap
        self._slot_bytes = 0
        self._free = set(range(SLOTS))
        self._mode: TriggerMode | None = None
        self._left: int | None = None
        self._pending = 0
        self._burst = 0
        self._missed = 0
        self._beat_at = 0.0
        self._equal, self._digest = 0, -1

    def run(self) -> None:
        """Until the device is lost, `close` is ordered, or nobody listens any more."""
        limit_s = self._start.settings.open_timeout_s + DEAD_MAN_S
        faulthandler.dump_traceback_later(limit_s, exit=True)
        try:
            self._connection.send(Beat(CameraHealth(), 0))
            self._serve(self._open())
        except (EOFError, ConnectionError):
            pass  # the station is gone
        except StationError as error:
            self._tell_lost(error)
        except Exception as error:  # noqa: BLE001  a vendor's library raises what it likes
            self._tell_lost(CameraLostError("the camera driver failed", got=repr(error)))
        finally:  # told first: closing a lost device may take seconds
            faulthandler.dump_traceback_later(DEAD_MAN_S, exit=True)
            if self._camera is not None:
                self._camera.close()
            faulthandler.cancel_dump_traceback_later()

    def _open(self) -> Camera:
        camera = self._camera = open_camera(self._start.settings)
        info = camera.describe()
        if info.clock == "replay":
            self._start = Start(self._start.settings, equal_images=0)
        page = mmap.PAGESIZE
        self._slot_bytes = -(-info.width * info.height * _PIXEL_BYTES // page) * page
        os.ftruncate(self._memory, SLOTS * self._slot_bytes)
        self._ring = mmap.mmap(self._memory, SLOTS * self._slot_bytes)
        self._connection.send(Opened(info, self._slot_bytes))
        return camera

    def _serve(self, camera: Camera) -> None:
        closing = False
        while not closing:
            due = self._due()
            pause = 0.0 if due else max(0.0, self._beat_at - time.monotonic())
            if self._connection.poll(pause):
                message = self._connection.recv()
                if isinstance(message, Free):
                    self._free.add(message.slot)
                else:
                    closing = self._obey(camera, message)
            elif due:
                self._grab(camera)
            if not closing:
                self._mark(camera)

    def _due(self) -> bool:
        """A frame may come, and there is room for it; a free-running one is taken in any case."""
        if self._mode is None or self._left == 0:
            return False
        if self._mode == "software" and not self._pending:
            return False
        return bool(self._free) or self._newest_only

    @property
    def _newest_only(self) -> bool:
        return self._mode == "free" and self._left is None

    def _obey(self, camera: Camera, message: Arm | Order) -> bool:
        """Do it and answer. True at the end."""
        try:
            if isinstance(message, Arm):
                camera.arm(message.trigger, message.count, exposure_us=message.exposure_us)
                self._mode, self._left, self._pending = message.trigger, message.count, 0
                self._burst = message.burst
                self._equal = 0
            elif message.name == "trigger":
                camera.trigger()
                self._pending += 1
            elif message.name == "disarm":
                self._mode = None
                camera.disarm()
            elif message.name == "close":
                camera.close()
        except CameraLostError:
            raise
        except StationError as error:
            self._connection.send(Done(packed(error)))
            return False
        self._connection.send(Done())
        return isinstance(message, Order) and message.name == "close"

    def _grab(self, camera: Camera) -> None:
        try:
            frame = camera.grab(GRAB_S)
        except CameraTimeoutError:
            return
        self._pending = max(0, self._pending - 1)
        self._left = None if self._left is None else self._left - 1
        if self._frozen(frame):
            raise _FrozenError(
                "the camera repeats one image",
                which=frame.source,
                got=f"{self._equal} equal images in a row",
            )
        if not self._free:
            self._missed += 1
            return
        image = np.ascontiguousarray(frame.image)
        if image.nbytes > self._slot_bytes:
            raise CameraLostError(
                "the images became larger", which=frame.source, got=f"{image.shape}"
            )
        slot = min(self._free)
        self._free.remove(slot)
        start = slot * self._slot_bytes
        np.frombuffer(self._ring, image.dtype, image.size, start)[:] = image.ravel()
        about = {f.name: getattr(frame, f.name) for f in fields(frame) if f.name != "image"}
        taken = Taken(slot, image.shape, image.dtype.str, about, self._burst)
        self._connection.send(taken)

    def _frozen(self, frame: Frame) -> bool:
        """Noise makes two live images differ; one grey level alone (dark, clipped) says nothing."""
        limit = self._start.equal_images
        if limit < 2 or frame.image.min() == frame.image.max():
            return False
        digest = zlib.crc32(np.ascontiguousarray(frame.image).data)
        self._equal = self._equal + 1 if digest == self._digest else 1
        self._digest = digest
        return self._equal >= limit

    def _mark(self, camera: Camera) -> None:
        """Now and then: tell that the loop runs, and wind up the dead man's timer."""
        now = time.monotonic()
        if now >= self._beat_at:
            self._beat_at = now + BEAT_S
            faulthandler.dump_traceback_later(DEAD_MAN_S, exit=True)
            self._connection.send(Beat(camera.health(), self._missed))

    def _tell_lost(self, error: StationError) -> None:
        with suppress(OSError):  # nobody may be there to be told
            self._connection.send(Lost(packed(error), isinstance(error, _FrozenError)))


class _FrozenError(CameraLostError):
    pass


def main(arguments: list[str]) -> None:
    """arguments: file descriptors of the socket and of the memory, from the supervisor."""
    os.dup2(2, 1)  # what an SDK prints must not get into the output of the station
    for ignored in (signal.SIGINT, signal.SIGTERM):  # for the station, which then closes us
        signal.signal(ignored, signal.SIG_IGN)
    with Connection(int(arguments[0])) as connection:
        start = connection.recv()
        Worker(connection, int(arguments[1]), start).run()
