"""A scan head of camera, projector and calibration: one trigger in, pattern stacks out.

Every frame of a stack must be proved to belong to this trigger, this pattern and this part: whole,
numbered without gap or repeat, taken after it was asked for, not the image before once more, and
full light brighter than no light. A burst that fails is taken again, once, from the first image;
then the part is an error. There is never a stack with a hole in it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime, timezone

import numpy as np

from forge_station.capture import calibration_io, camera, patterns, projector
from forge_station.capture.base import Frame, PatternStack, Trigger, assemble, white_and_black
from forge_station.capture.calibration import Calibration
from forge_station.capture.camera import Camera
from forge_station.capture.drivers import closed_on_error
from forge_station.capture.projector import Projector, open_projector
from forge_station.capture.settings import HeadSettings
from forge_station.capture.supervisor import Change, SupervisedCamera
from forge_station.errors import (
    CalibrationError,
    CameraSettingsError,
    CameraTimeoutError,
    CaptureError,
    FrameIncompleteError,
    ProjectorLostError,
    ProjectorSettingsError,
)

log = logging.getLogger(__name__)

TRIGGER_AGE_S = 5.0
_HOPELESS = (CameraSettingsError, ProjectorSettingsError, CalibrationError)
_EXPOSURE_SHARE = 0.1  # a device rounds to its own steps
_RHYTHM_SHARE = 0.2
_LATENCY_NS = 100e6  # from a software trigger to the exposure, at its most uneven
_QUIET_S = 0.02
_CONTRAST = 2.0  # grey levels in the mean: less cannot be decoded anyway


class Head:
    """One pose: a camera and a projector that are calibrated together.

    camera: a supervised one, or a driver's (tests, tools). exposures_us: longest first. reopen:
    opens the projector anew after it was lost. now_ns: the clock of Frame.t_monotonic_ns.
    """

    def __init__(
        self,
        name: str,
        camera: Camera,
        projector: Projector,
        calibration: Calibration,
        exposures_us: Sequence[float],
        *,
        frame_timeout_s: float = 1.0,
        recover_s: float = 3.0,
        reopen: Callable[[], Projector] | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._now_ns = now_ns
        self.name, self.camera, self.projector = name, camera, projector
        self.calibration, self.exposures_us = calibration, tuple(exposures_us)
        self._frame_timeout_s, self._recover_s = frame_timeout_s, recover_s
        self._white, self._black = white_and_black(calibration.pattern)
        self._reopen = reopen
        self._images = patterns.images(calibration.pattern, calibration.projector.image_size)
        projector.prepare(self._images)
        self._stepping = projector.describe().stepping

    def scan(self, trigger: Trigger) -> PatternStack:
        """All exposures of the part that lies there now. Raises CaptureError after two tries."""
        try:
            return self._take(trigger)
        except _HOPELESS:
            raise
        except CaptureError as error:
            log.warning("head %s, part %s, taken again: %s", self.name, trigger.serial, error)
            if isinstance(error, ProjectorLostError) and self._reopen is not None:
                self.projector.close()
                self.projector = self._reopen()
                self.projector.prepare(self._images)
        return self._take(trigger)

    def dark(self) -> None:
        """No light, so that another head can scan. One that steps by itself is dark at its end."""
        if self._stepping == "host":
            self.projector.show(self._black)

    def close(self) -> None:
        """Projector dark, camera released; may be called twice."""
        self.projector.close()
        self.camera.close()

    def _take(self, trigger: Trigger) -> PatternStack:
        if isinstance(self.camera, SupervisedCamera):
            self.camera.wait_open(self._recover_s, patient=True)
        stacks, numbers, began_ns = [], [], 0
        for exposure_us in self.exposures_us:
            frames = self._burst(exposure_us)
            stack = assemble(frames, (1.0,), self.calibration, self.name)
            self._refuse_wrong_order(frames)
            stacks.append(stack)
            numbers.append(f"{frames[0].sequence}-{frames[-1].sequence}")
            began_ns = began_ns or frames[0].t_utc_ns
        began = datetime.fromtimestamp(began_ns / 1e9, timezone.utc)
        return replace(
            stacks[0],
            images=np.concatenate([stack.images for stack in stacks]),
            exposures=tuple(x / self.exposures_us[0] for x in self.exposures_us),
            meta={
                **stacks[0].meta,
                "serial": trigger.serial,
                "part_number": trigger.part_number,
                "frames": ",".join(numbers),
                "t_utc": began.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            },
        )

    def _burst(self, exposure_us: float) -> list[Frame]:
        """The images of one exposure, each proved to be the answer to its own trigger."""
        count = self.calibration.pattern.image_count
        live = self.camera.describe().clock != "replay"
        wait_s = exposure_us / 1e6 + self._frame_timeout_s
        frames: list[Frame] = []
        try:
            if self._stepping == "host":
                self.camera.arm("software", count, exposure_us=exposure_us)
            elif self._stepping == "camera":
                self.projector.show(0)
                self.camera.arm("free", count, exposure_us=exposure_us)
            else:  # one more than there may be: a pulse too many is seen
                self.camera.arm("hardware", count + 1, exposure_us=exposure_us)
            asked = [self._now_ns()]
            if self._stepping == "projector":
                self._refuse_more(0.0)
                self.projector.show(0)
            for index in range(count):
                if self._stepping == "host":
                    self.projector.show(index)
                    if index == 0:
                        self._refuse_more(0.0)
                    asked.append(self._now_ns())
                    self.camera.trigger()
                frame = self.camera.grab(wait_s)
                self._refuse_foreign(frame, frames, asked[-1], exposure_us if live else 0.0)
                frames.append(frame)
            self._refuse_more(_QUIET_S)
            if live:
                self._refuse_untimely(frames, asked[1:])
        finally:
            self.camera.disarm()
        return frames

    def _refuse_foreign(
        self, frame: Frame, before: Sequence[Frame], asked_ns: int, exposure_us: float
    ) -> None:
        """A frame that is not whole, or cannot be the answer to a trigger at `asked_ns`."""
        where = f"head {self.name}, image {len(before)}"
        if not frame.complete:
            raise FrameIncompleteError(
                "frame arrived with parts missing",
                which=where,
                action="check the cable, and packet size and bandwidth of the network",
            )
        early_ns = (
            asked_ns + round(1e3 * exposure_us * (1 - _EXPOSURE_SHARE)) - frame.t_monotonic_ns
        )
        if early_ns > 0:
            raise CaptureError(
                "frame is older than its trigger",
                which=where,
                expected="the exposure to come after it",
                got=f"arrived {early_ns / 1e6:.1f} ms too early",
            )
        if before and frame.sequence != before[-1].sequence + 1:
            raise CaptureError(
                "frame lost or repeated",
                which=where,
                expected=f"number {before[-1].sequence + 1}",
                got=frame.sequence,
            )
        if before and _equal(frame, before[-1]):
            raise CaptureError("the image before came once more", which=where)
        told = frame.exposure_us
        if exposure_us and told and abs(told - exposure_us) > _EXPOSURE_SHARE * exposure_us:
            raise CameraSettingsError(
                "the camera exposes otherwise than asked",
                which=where,
                expected=f"{exposure_us:g} us",
                got=f"{told:g} us",
                action="name exposure times that the camera can do",
            )

    def _refuse_more(self, wait_s: float) -> None:
        """A frame that nobody asked for: every image of the burst may be one too early."""
        try:
            extra = self.camera.grab(wait_s)
        except CameraTimeoutError:
            return
        raise CaptureError(
            "a frame too many",
            which=f"head {self.name}, number {extra.sequence}",
            action="look for pulses on the trigger line that are not the projector's",
        )

    def _refuse_untimely(self, frames: Sequence[Frame], asked: Sequence[int]) -> None:
        """By the device's own clock: frames are as far apart as their triggers.

        Sees what numbers cannot: a foreign or late frame in the place of one that got lost. The
        projector's triggers are even; those of the host are at `asked`.
        """
        times = [frame.t_device_ns for frame in frames if frame.t_device_ns]
        if self._stepping == "camera" or len(times) != len(frames):
            return  # every exposure counts there; or the device tells no time
        gaps = np.diff(times)
        if self._stepping == "host":
            expected, allowed = np.diff(asked), _LATENCY_NS
        else:
            expected = np.full(gaps.shape, np.median(gaps))
            allowed = _RHYTHM_SHARE * float(expected[0])
        worst = int(np.argmax(np.abs(gaps - expected)))
        if abs(gaps[worst] - expected[worst]) > allowed:
            raise CaptureError(
                "a frame of the burst was taken at another time than asked for",
                which=f"head {self.name}, image {worst} or {worst + 1}",
                expected=f"{expected[worst] / 1e6:.1f} ms between them",
                got=f"{gaps[worst] / 1e6:.1f} ms",
                action="look for foreign pulses on the trigger line, and for triggers during an "
                "exposure, which cameras leave out",
            )

    def _refuse_wrong_order(self, frames: Sequence[Frame]) -> None:
        """Full light is brighter than none, unless frames are shifted or the projector is dark."""
        white, black = (
            float(np.mean(frames[k].image[::4, ::4])) for k in (self._white, self._black)
        )
        if white - black < _CONTRAST:
            raise CaptureError(
                "the image under full light is not brighter than the one without light",
                which=f"head {self.name}",
                expected=f"image {self._white} at least {_CONTRAST:g} above image {self._black}",
                got=f"mean {white:.1f} and {black:.1f} of 255",
                action="check that the projector shines, and the order of trigger and pattern",
            )


class HeadScanner:
    """One or several heads on one tray; a part is scanned by one after the other.

    trigger_age_s: an older trigger is refused, because the part may have moved on.
    """

    def __init__(
        self,
        heads: Sequence[Head],
        *,
        trigger_age_s: float = TRIGGER_AGE_S,
        utc_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        if not heads:
            raise CaptureError("a scanner without heads", expected="at least one")
        self.heads = tuple(heads)
        self._trigger_age_s, self._utc_ns = trigger_age_s, utc_ns
        self._calibrations = {head.calibration.digest: head.calibration for head in self.heads}

    @property
    def calibrations(self) -> Mapping[str, Calibration]:
        """By digest, one per head."""
        return self._calibrations

    def capture(self, trigger: Trigger) -> list[PatternStack]:
        """One stack a head. Raises CaptureError: no stack is better than a wrong one."""
        refuse_stale(trigger, self._trigger_age_s, self._utc_ns)
        if len(self.heads) == 1:
            return [self.heads[0].scan(trigger)]
        stacks = []
        for head in self.heads:
            try:
                stacks.append(head.scan(trigger))
            finally:
                head.dark()
        return stacks

    def close(self) -> None:
        """Release all devices; may be called twice."""
        for head in self.heads:
            head.close()


def refuse_stale(trigger: Trigger, limit_s: float, utc_ns: Callable[[], int]) -> None:
    """Raise CaptureError for a trigger that is older than `limit_s`, or from the future."""
    if not trigger.t_utc_ns:
        return
    age_s = (utc_ns() - trigger.t_utc_ns) / 1e9
    if abs(age_s) > limit_s:
        raise CaptureError(
            "the trigger is stale: another part may be there by now",
            which=f"part {trigger.serial}",
            expected=f"{limit_s:g} s old at most",
            got=f"{age_s:.1f} s",
            action="slow the line down; if it is not behind, the clocks of station and trigger "
            "differ",
        )


def open_heads(
    settings: Sequence[HeadSettings],
    *,
    trigger_age_s: float = TRIGGER_AGE_S,
    on_change: Callable[[Change], None] | None = None,
) -> HeadScanner:
    """Open the heads of a station. A camera that is not there yet is waited for in the background.

    on_change tells each camera's state, in the thread that watches it. Raises StationError for
    what waiting cannot mend: a missing driver, a wrong calibration file, an absent projector.
    """
    heads: list[Head] = []
    with ExitStack() as opened:
        for item in settings:
            heads.append(_open_head(item, on_change))
            opened.enter_context(closed_on_error(heads[-1]))
        return HeadScanner(heads, trigger_age_s=trigger_age_s)


def _open_head(item: HeadSettings, on_change: Callable[[Change], None] | None) -> Head:
    calibration = calibration_io.load(item.calibration)
    camera.REGISTRY.find(item.camera.driver, f"head {item.name}: ")
    projector.REGISTRY.find(item.projector.driver, f"head {item.name}: ")
    light = open_projector(item.projector)
    with closed_on_error(light):
        eye = SupervisedCamera(item.camera, name=item.name, on_change=on_change)
    with closed_on_error(light, eye):
        return Head(
            item.name,
            eye,
            light,
            calibration,
            item.exposures_us,
            frame_timeout_s=item.frame_timeout_s,
            recover_s=item.recover_s,
            reopen=lambda: open_projector(item.projector),
        )


def _equal(frame: Frame, other: Frame) -> bool:
    """Whether two images are the same; a sample first, because they nearly never are."""
    a, b = frame.image, other.image
    return np.array_equal(a[::16, ::16], b[::16, ::16]) and np.array_equal(a, b)
