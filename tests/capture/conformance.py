"""What every camera driver must do: one suite, run against each.

For a driver of your own, derive a class and give it the settings of a camera that is there:

    from tests.capture.conformance import CameraConformance

    class TestMyCamera(CameraConformance):
        @pytest.fixture
        def settings(self):
            return CameraSettings("my_driver", "192.168.7.20", open_timeout_s=5)

and run pytest on it; the driver must be installed with its entry point. It needs no more than this
file, numpy, pytest and forge-station. `pulse` is for cameras with a hardware trigger: override it
with what makes one pulse on the line, otherwise that test is skipped. The suite takes the camera's
light as it is; it does not judge the image.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace

import numpy as np
import pytest

from forge_station.capture.base import Frame
from forge_station.capture.camera import Camera, CameraSettings, TriggerMode, open_camera
from forge_station.errors import (
    CameraLostError,
    CameraNotFoundError,
    CameraSettingsError,
    CameraTimeoutError,
    CaptureError,
)


class CameraConformance:
    """Derive it, name it Test..., and override `settings`."""

    frame_s: float = 5.0
    """Longest time that a frame may take to come."""
    slack_s: float = 2.0
    """How much longer than its timeout a call may take: SDKs round up."""
    numbered: bool = True
    """Frame numbers are the device's: a lost frame leaves a gap, and none is repeated."""
    absent: str | None = "no-such-device"
    """An address where there is no device; None where the driver takes any."""

    @pytest.fixture
    def settings(self) -> CameraSettings:
        raise NotImplementedError("override the fixture `settings`")

    @pytest.fixture
    def pulse(self) -> Callable[[], None] | None:
        """Makes one pulse on the line `settings.line`."""
        return None

    def open(self, settings: CameraSettings) -> Camera:
        """How the camera is opened; the suite also runs against what wraps a driver."""
        return open_camera(settings)

    @pytest.fixture
    def camera(self, settings: CameraSettings) -> Iterator[Camera]:
        with closing(self.open(settings)) as camera:
            yield camera

    def grab(self, camera: Camera) -> Frame:
        return camera.grab(self.frame_s)

    def need(self, camera: Camera, trigger: TriggerMode) -> None:
        if trigger not in camera.describe().triggers:
            pytest.skip(f"the camera has no {trigger} trigger")

    def start(self, camera: Camera, count: int | None = None) -> None:
        """Arm so that frames come: free running, else by software."""
        if "free" in camera.describe().triggers:
            camera.arm("free", count)
            return
        self.need(camera, "software")
        camera.arm("software", count)

    def next(self, camera: Camera) -> Frame:
        """One more frame of a camera armed by `start`."""
        if "free" not in camera.describe().triggers:
            camera.trigger()
        return self.grab(camera)

    def test_it_keeps_the_protocol_and_says_what_it_is(
        self, camera: Camera, settings: CameraSettings
    ) -> None:
        assert isinstance(camera, Camera)
        info = camera.describe()
        assert info.driver == settings.driver and info.driver_version
        assert info.width > 0 and info.height > 0
        assert info.triggers and set(info.triggers) <= {"free", "software", "hardware"}
        assert info.clock in ("ptp", "device", "host", "replay")

    def test_frames_are_whole_typed_and_stamped(self, camera: Camera) -> None:
        info = camera.describe()
        self.start(camera)
        before_mono, before_utc = time.monotonic_ns(), time.time_ns()
        frame = self.next(camera)
        assert frame.image.dtype in (np.uint8, np.uint16)
        assert frame.image.shape[:2] == (info.height, info.width)
        assert frame.image.ndim == 2 or frame.image.shape[2:] == (3,)
        assert frame.complete
        assert frame.pixel_format and frame.source
        # A camera may have had the frame waiting for a moment; the clock must be the host's.
        assert abs(frame.t_monotonic_ns - before_mono) < (self.frame_s + self.slack_s) * 1e9
        if info.clock != "replay":  # recorded images keep the time of their day
            assert abs(frame.t_utc_ns - before_utc) < (self.frame_s + self.slack_s) * 1e9

    def test_an_image_belongs_to_the_caller(self, camera: Camera) -> None:
        self.start(camera)
        first = self.next(camera)
        kept = first.image.copy()
        for _ in range(5):
            self.next(camera)
        assert np.array_equal(first.image, kept), "a later frame was written over it"

    def test_numbers_and_arrival_times_rise(self, camera: Camera) -> None:
        self.start(camera)
        frames = [self.next(camera) for _ in range(5)]
        numbers = [frame.sequence for frame in frames]
        assert numbers == sorted(set(numbers))
        if self.numbered:
            assert numbers[-1] - numbers[0] >= 4
        times = [frame.t_monotonic_ns for frame in frames]
        assert times == sorted(times)

    def test_a_burst_has_as_many_frames_as_asked_for(self, camera: Camera) -> None:
        self.start(camera, 3)
        for _ in range(3):
            self.next(camera)
        with pytest.raises(CameraTimeoutError):
            camera.grab(0.3)

    def test_software_trigger_one_frame_each_and_none_without(self, camera: Camera) -> None:
        self.need(camera, "software")
        camera.arm("software")
        with pytest.raises(CameraTimeoutError):
            camera.grab(0.3)
        for _ in range(3):
            asked = time.monotonic_ns()
            camera.trigger()
            assert self.grab(camera).t_monotonic_ns >= asked
        with pytest.raises(CameraTimeoutError):
            camera.grab(0.3)

    def test_hardware_trigger_waits_without_error_and_answers_each_pulse(
        self, camera: Camera, pulse: Callable[[], None] | None
    ) -> None:
        self.need(camera, "hardware")
        camera.arm("hardware")
        for _ in range(3):  # an idle line is no fault
            with pytest.raises(CameraTimeoutError):
                camera.grab(0.2)
        if pulse is None:
            pytest.skip("no pulse to give")
        numbers = []
        for _ in range(3):
            pulse()
            numbers.append(self.grab(camera).sequence)
        if self.numbered:
            assert np.diff(numbers).tolist() == [1, 1]
        with pytest.raises(CameraTimeoutError):
            camera.grab(0.2)

    def test_grab_returns_in_time_when_nothing_comes(self, camera: Camera) -> None:
        waiting = [t for t in camera.describe().triggers if t != "free"]
        if not waiting:
            pytest.skip("a camera that only runs free always has a frame")
        camera.arm(waiting[0])
        begin = time.monotonic()
        with pytest.raises(CameraTimeoutError):
            camera.grab(0.2)
        assert 0.15 < time.monotonic() - begin < 0.2 + self.slack_s

    def test_arming_throws_frames_of_before_away(self, camera: Camera) -> None:
        self.start(camera)
        self.next(camera)
        time.sleep(0.5)  # frames pile up in the driver
        camera.disarm()
        armed = time.monotonic_ns()
        self.start(camera)
        assert self.next(camera).t_monotonic_ns >= armed

    def test_it_can_be_armed_again_and_disarmed_twice(self, camera: Camera) -> None:
        for _ in range(3):
            self.start(camera)
            self.next(camera)
            camera.disarm()
            camera.disarm()

    def test_a_grab_or_trigger_of_an_unarmed_camera_is_refused(self, camera: Camera) -> None:
        with pytest.raises(CaptureError):
            camera.grab(0.1)
        with pytest.raises(CaptureError):
            camera.trigger()

    def test_an_unknown_trigger_is_refused_and_harms_nothing(self, camera: Camera) -> None:
        with pytest.raises(CameraSettingsError):
            camera.arm("telepathy")  # type: ignore[arg-type]
        self.start(camera)
        self.next(camera)

    def test_health_counts_the_frames(self, camera: Camera) -> None:
        before = camera.health().frames
        self.start(camera)
        for _ in range(3):
            self.next(camera)
        health = camera.health()
        assert health.frames >= before + 3
        assert health.incomplete >= 0 and health.dropped >= 0

    def test_a_closed_camera_is_lost_and_may_be_closed_again(
        self, settings: CameraSettings
    ) -> None:
        camera = self.open(settings)
        self.start(camera)
        self.next(camera)
        camera.close()
        camera.close()
        with pytest.raises(CameraLostError):
            self.start(camera)
        with closing(self.open(settings)) as again:  # and the device is free for the next
            self.start(again)
            self.next(again)

    def test_no_device_is_not_found_in_time(self, settings: CameraSettings) -> None:
        if self.absent is None:
            pytest.skip("the driver takes any address")
        begin = time.monotonic()
        with pytest.raises(CameraNotFoundError):
            self.open(replace(settings, address=self.absent)).close()
        assert time.monotonic() - begin < settings.open_timeout_s + self.slack_s

    def test_an_unknown_option_is_refused_by_name(self, settings: CameraSettings) -> None:
        options = {**settings.options, "NoSuchOption": 1}
        with pytest.raises(CameraSettingsError, match="NoSuchOption"):
            self.open(replace(settings, options=options)).close()

    def test_errors_close_what_was_opened(self, settings: CameraSettings) -> None:
        """A refused setting must not leave the device locked for the next try."""
        options = {**settings.options, "NoSuchOption": 1}
        with suppress(CaptureError):
            self.open(replace(settings, options=options)).close()
        with closing(self.open(settings)) as camera:
            self.start(camera)
            self.next(camera)
