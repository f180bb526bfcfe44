"""The states of a supervised device on a simulated clock: hours of a line in no time."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from forge_station.capture.camera import CameraSettings
from forge_station.capture.lifecycle import Action, Lifecycle, Patience, State
from forge_station.errors import CameraLostError, CameraNotFoundError, CameraTimeoutError

STEP = 0.1


class Device:
    """A lifecycle and the clock it lives by."""

    def __init__(self, settings: CameraSettings | None = None) -> None:
        patience = Patience().for_device(settings or CameraSettings("replay"))
        self.life = Lifecycle("cam", patience, random.Random(1))
        self.now = 1000.0
        self.life.begin(self.now)

    def open(self) -> Device:
        assert self.life.tick(self.now) == "start"
        self.life.started(self.now)
        self.life.opened(self.now)
        return self

    def run(
        self, seconds: float, each: Callable[[float], None] | None = None, step: float = STEP
    ) -> Action:
        """Ticks until something is to be done, at most so long."""
        end = self.now + seconds
        while self.now < end:
            self.now += step
            if each is not None:
                each(self.now)
            action = self.life.tick(self.now)
            if action != "none":
                return action
        return "none"

    def arm(self, mode: str | None, exposure_us: float | None = None) -> None:
        self.life.armed(self.now, mode, endless=True, exposure_us=exposure_us)  # type: ignore[arg-type]


@pytest.mark.parametrize("gap_s", [1, 60, 3600, 8 * 3600])
def test_an_idle_line_is_no_fault_however_long(gap_s: float) -> None:
    device = Device().open()
    device.arm("hardware")
    for _ in range(2):
        assert device.run(gap_s, device.life.heard, step=0.5) == "none"
        device.life.frame(device.now)
        assert device.life.state is State.STREAMING and device.life.fault is None


def test_a_watch_that_slept_itself_blames_nobody() -> None:
    device = Device().open()
    device.arm("free")
    device.now += 8 * 3600  # the machine was suspended; no tick, no message
    assert device.life.tick(device.now) == "none"
    assert device.run(1.0) == "none"
    assert device.run(1.0) == "kill", "but then the time runs again"


def test_silence_of_the_process_is_a_stall_within_two_seconds() -> None:
    device = Device().open()
    began = device.now
    assert device.run(10) == "kill"
    assert device.now - began < 2.0
    assert device.life.state is State.STALLED and isinstance(device.life.fault, CameraLostError)
    assert "hangs" in str(device.life.fault) and device.life.stalls == 1


@pytest.mark.parametrize(
    ("fps", "limit_s"), [(None, 2.0), (30.0, 2.0), (0.5, 4.2)], ids=["none", "fast", "slow"]
)
def test_free_running_frames_that_stop_are_a_stall(fps: float | None, limit_s: float) -> None:
    device = Device(CameraSettings("replay", fps=fps)).open()
    device.arm("free")
    assert device.run(limit_s / 2, device.life.frame) == "none"
    began = device.now
    assert device.run(30, device.life.heard) == "kill"
    assert limit_s - 0.6 < device.now - began <= limit_s
    assert "no frames" in str(device.life.fault)


def test_a_software_trigger_without_answer_is_a_stall_and_none_without_trigger() -> None:
    device = Device().open()
    device.arm("software")
    assert device.run(600, device.life.heard) == "none"
    device.life.triggered(device.now)
    device.life.frame(device.now)
    assert device.run(600, device.life.heard) == "none"
    device.life.triggered(device.now)
    assert device.run(2, device.life.heard) == "kill"


def test_a_long_exposure_is_waited_for() -> None:
    device = Device().open()
    device.arm("software", exposure_us=3e6)
    device.life.triggered(device.now)
    assert device.run(6, device.life.heard) == "none"
    assert device.run(1, device.life.heard) == "kill"


def test_an_order_may_take_longer_than_a_sign_of_life() -> None:
    device = Device().open()
    device.life.ordered(device.now)
    assert device.run(4.5) == "none"
    device.life.answered(device.now)
    assert device.run(1.4) == "none"
    device.life.ordered(device.now)
    assert device.run(5.5) == "kill"


def test_opening_takes_as_long_as_the_settings_say() -> None:
    device = Device(CameraSettings("aravis", open_timeout_s=20))
    assert device.life.tick(device.now) == "start"
    device.life.started(device.now)
    assert device.run(29) == "none", "a busy machine starts processes slowly"
    device.life.heard(device.now)
    assert device.run(22) == "none"
    assert device.run(2) == "kill" and isinstance(device.life.fault, CameraTimeoutError)
    assert "does not open" in str(device.life.fault)
    device.life.ended(device.now)
    assert device.run(2) == "start"
    device.life.started(device.now)
    assert device.run(31) == "kill" and "does not start" in str(device.life.fault)


def test_pauses_grow_with_jitter_up_to_the_longest_and_begin_small_after_a_good_time() -> None:
    device = Device()
    pauses = []

    def fail() -> None:
        device.life.started(device.now)
        device.life.failed(device.now, CameraNotFoundError("absent"))
        assert device.life.tick(device.now) == "kill"
        device.life.ended(device.now)
        assert device.life.state is State.BACKOFF

    assert device.life.tick(device.now) == "start"
    for _ in range(40):
        fail()
        began = device.now
        assert device.run(60) == "start"
        pauses.append(device.now - began)
    for pause, nominal in zip(pauses, [1, 2, 4, 5, 5, 5], strict=False):
        assert 0.75 * nominal - STEP <= pause <= nominal + STEP
    assert max(pauses) <= 5 + STEP and len({round(pause, 2) for pause in pauses[4:]}) > 5
    device.life.started(device.now)
    device.life.opened(device.now)
    device.run(11, device.life.heard)
    fail_began = device.now
    device.life.failed(device.now, CameraLostError("gone"))
    assert device.life.tick(device.now) == "kill"
    device.life.ended(device.now)
    assert device.run(60) == "start" and device.now - fail_began <= 1 + STEP
