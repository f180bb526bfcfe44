"""Driver `replay`: a folder of images in place of a camera, with faults where they are asked for.

address: a folder (see `capture.session`). Options:

    mode               once: end after the last image. loop: start again. realtime: in the rhythm of
                       the recording, then again from the start. (default loop)
    live               the images pass for those of a real sensor: the supervisor takes equal ones
                       in a row for a frozen camera (default false)
    pulse_file         the hardware trigger: each byte of this file is a pulse on the line
    unplug_file        while this file exists the device is unplugged
    drop_every         every n-th frame is lost on the way; its number is missing
    incomplete_every   every n-th frame arrives with its lower half missing
    delay_every, delay_s   every n-th frame comes so much later
    freeze_after       after so many frames the image stays the same
    stall_after        after so many frames the call that waits for the next one never returns
    disconnect_after   after so many frames the device is gone

Frames count from opening; 0 switches a fault off. Free-running frames come at `fps` (default 25).
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forge_station import version
from forge_station.capture import session
from forge_station.capture.base import Clock, Frame
from forge_station.capture.camera import CameraHealth, CameraInfo, CameraSettings, TriggerMode
from forge_station.capture.cameras.common import Arming, Option, options_of, refuse, wait_until
from forge_station.errors import (
    CameraLostError,
    CameraNotFoundError,
    CameraSettingsError,
    InputError,
)

MODES = ("once", "loop", "realtime")
_DEFAULTS: dict[str, Option] = {
    "mode": "loop", "live": False, "pulse_file": "", "unplug_file": "", "drop_every": 0,
    "incomplete_every": 0, "delay_every": 0, "delay_s": 0.5, "freeze_after": 0, "stall_after": 0,
    "disconnect_after": 0,
}  # fmt: skip
_FPS = 25.0
_LOOK_S = 0.005  # how often the simulated line and plug are looked at


class ReplayCamera:
    """See the module. Software and hardware triggers hand out the next image, whatever its time."""

    def __init__(self, settings: CameraSettings) -> None:
        self._options = options_of(settings, _DEFAULTS)
        refuse(settings, "gain", "pixel_format")
        if self._options["mode"] not in MODES:
            raise CameraSettingsError(
                "no such mode of the replay driver",
                expected=", ".join(MODES),
                got=self._options["mode"],
            )
        if settings.fps is not None and not settings.fps > 0:
            raise CameraSettingsError("frame rate", expected="above 0", got=settings.fps)
        self._address = settings.address
        self._name = f"replay:{settings.address}"
        self._arming = Arming(self._name, ("free", "software", "hardware"))
        self._unplug = _path(self._options["unplug_file"])
        self._pulses = _path(self._options["pulse_file"])
        if self._unplugged():
            raise CameraNotFoundError("no camera (unplugged)", which=self._name)
        try:
            self._entries = session.read(Path(settings.address))
            self._image = session.load(self._entries[0])
        except InputError as error:
            raise CameraNotFoundError("nothing to replay", which=self._name, got=error) from error
        self._fps = settings.fps or _FPS
        self._exposure_us = settings.exposure_us
        self._made = 0  # frames that the device made, lost ones included
        self._frames = self._incomplete = self._dropped = 0
        self._due_at = time.monotonic()
        self._held, self._held_until = 0, 0.0
        self._pulses_seen = 0

    def describe(self) -> CameraInfo:
        height, width = self._image.shape[:2]
        clock: Clock = "host" if self._options["live"] else "replay"
        return CameraInfo(
            "replay", version(), "forge-station", "recorded images", "", self._address,
            width, height, self._arming.triggers, clock,
        )  # fmt: skip

    def arm(
        self, trigger: TriggerMode, count: int | None = None, *, exposure_us: float | None = None
    ) -> None:
        self._refuse_unplugged()
        self._arming.arm(trigger, count)
        self._exposure_us = exposure_us or self._exposure_us
        self._due_at = time.monotonic()
        self._pulses_seen = self._pulses_given()

    def trigger(self) -> None:
        self._refuse_unplugged()
        self._arming.trigger()

    def grab(self, timeout_s: float) -> Frame:
        self._arming.refuse_unarmed()
        deadline = time.monotonic() + timeout_s
        while True:
            self._refuse_unplugged()
            if self._ready(deadline):
                frame = self._next()
                if frame is not None:
                    return frame
            elif time.monotonic() >= deadline:
                raise self._arming.late(timeout_s)
            else:
                time.sleep(min(_LOOK_S, max(0.0, deadline - time.monotonic())))

    def disarm(self) -> None:
        self._arming.disarm()

    def health(self) -> CameraHealth:
        self._arming.refuse_closed()
        self._refuse_unplugged()
        return CameraHealth(self._frames, self._incomplete, self._dropped)

    def close(self) -> None:
        self._arming.close()

    def _ready(self, deadline: float) -> bool:
        """Whether a frame is there now. Sleeps up to a look at the plug, not beyond `deadline`."""
        if self._arming.left == 0:
            return False
        if self._arming.mode == "hardware":
            if self._pulses_given() <= self._pulses_seen:
                return False
        elif not self._arming.due:
            return False
        elif self._arming.mode == "free":
            look = deadline if self._unplug is None else time.monotonic() + _LOOK_S
            if not wait_until(self._due_at, min(look, deadline)):
                return False
        number = self._made + 1
        if _hit(self._options["delay_every"], number) and self._held != number:
            self._held, self._held_until = number, time.monotonic() + self._options["delay_s"]
        return self._held != number or wait_until(self._held_until, deadline)

    def _next(self) -> Frame | None:
        """The next frame; None when it was lost on the way."""
        self._made += 1
        self._pulses_seen += self._arming.mode == "hardware"
        number, option = self._made, self._options
        loop, index = divmod(number - 1, len(self._entries))
        if loop and option["mode"] == "once":
            raise CameraLostError(
                "the recording is over", which=self._name, got=f"all {len(self._entries)} images"
            )
        if 0 < option["disconnect_after"] < number:
            raise CameraLostError("the camera is gone (injected)", which=self._name)
        while 0 < option["stall_after"] < number:
            time.sleep(3600)
        entry = self._entries[index]
        self._pace(index)
        if _hit(option["drop_every"], number):
            self._dropped += 1
            return None
        if not 0 < option["freeze_after"] < number:
            self._load(entry)
        span = self._entries[-1].sequence - self._entries[0].sequence + 1
        image, complete = self._image, entry.complete
        if _hit(option["incomplete_every"], number):
            image, complete = image.copy(), False
            image[len(image) // 2 :] = 0
        self._incomplete += not complete
        self._frames += 1
        self._arming.taken()
        return Frame(
            image=image,
            sequence=entry.sequence + loop * span,
            complete=complete,
            t_monotonic_ns=time.monotonic_ns(),
            t_utc_ns=entry.t_utc_ns or time.time_ns(),
            t_device_ns=entry.t_device_ns,
            clock="host" if option["live"] else "replay",
            exposure_us=self._exposure_us or entry.exposure_us,
            gain=entry.gain,
            pixel_format=entry.pixel_format or _pixel_format(image),
            source=self._name,
        )

    def _load(self, entry: session.Entry) -> None:
        try:
            image = session.load(entry)
        except InputError as error:
            raise CameraLostError("the replay cannot go on", which=self._name, got=error) from error
        self._image = image

    def _pace(self, index: int) -> None:
        """When the next free-running frame is due: `fps`, or as far apart as recorded."""
        step = 1 / self._fps
        if self._options["mode"] == "realtime" and index + 1 < len(self._entries):
            apart = self._entries[index + 1].t_monotonic_ns - self._entries[index].t_monotonic_ns
            step = apart / 1e9 if apart > 0 else step
        self._due_at = max(self._due_at + step, time.monotonic() - step)

    def _pulses_given(self) -> int:
        try:
            return 0 if self._pulses is None else self._pulses.stat().st_size
        except FileNotFoundError:
            return 0

    def _unplugged(self) -> bool:
        return self._unplug is not None and os.path.exists(self._unplug)

    def _refuse_unplugged(self) -> None:
        if self._unplugged():
            raise CameraLostError("the camera is gone (unplugged)", which=self._name)


def open_replay(settings: CameraSettings) -> ReplayCamera:
    """Entry point of the driver `replay`."""
    return ReplayCamera(settings)


def _hit(every: int, number: int) -> bool:
    return every > 0 and number % every == 0


def _path(name: str) -> Path | None:
    return Path(name) if name else None


def _pixel_format(image: NDArray[np.uint8] | NDArray[np.uint16]) -> str:
    depth = image.dtype.itemsize * 8
    return f"Mono{depth}" if image.ndim == 2 else f"RGB{depth}"
