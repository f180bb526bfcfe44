"""A camera in its own process: the driver suite through it, and every way it can fail.

FORGE_STATION_CYCLES=500 makes the unplug test long (15 minutes, and longer on a busy machine).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import cv2
import numpy as np
import pytest

from forge_station.capture.camera import Camera, CameraSettings
from forge_station.capture.lifecycle import Patience, State
from forge_station.capture.supervisor import Change, SupervisedCamera
from forge_station.errors import CameraLostError, CameraNotFoundError, CameraTimeoutError
from tests.capture.conformance import CameraConformance

# The promises are 2 s to tell and 10 s to be back. A test must not fail because the machine that
# runs it is busy, so it waits longer, and prints what it measured.
CYCLES = int(os.environ.get("FORGE_STATION_CYCLES", "10"))
LONG = CYCLES > 50
WAIT_S = 600.0 if LONG else 60.0
QUICK = Patience(backoff_s=(0.05, 0.2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(3)
    for k in range(8):
        cv2.imwrite(str(place / f"{k:02d}.png"), rng.integers(0, 256, (24, 32), np.uint8))
    return place


class Watched:
    """A supervised replay camera and the changes it told."""

    def __init__(self, folder: Path, patience: Patience = QUICK, **options: str | int | bool):
        self.changes: list[tuple[float, Change]] = []
        self.camera = SupervisedCamera(
            CameraSettings("replay", str(folder), fps=100, options=options),
            name="front",
            patience=patience,
            on_change=lambda change: self.changes.append((time.monotonic(), change)),
        )

    def until(self, seen: Callable[[], bool]) -> float:
        """Wait until it is so; returns when."""
        deadline = time.monotonic() + WAIT_S
        while not seen():
            assert time.monotonic() < deadline, [change for _, change in self.changes]
            time.sleep(0.005)
        return time.monotonic()

    def states(self) -> list[str]:
        return [change.state.value for _, change in self.changes]

    def close(self) -> None:
        self.camera.close()


@pytest.fixture
def watch(folder: Path) -> Iterator[Callable[..., Watched]]:
    opened: list[Watched] = []

    def start(**options: str | int | bool) -> Watched:
        opened.append(Watched(folder, **options))
        return opened[-1]

    yield start
    for item in opened:
        item.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def supervised(settings: CameraSettings) -> SupervisedCamera:
    """Open, or closed again with the device's error."""
    camera = SupervisedCamera(settings)
    try:
        camera.wait_open(WAIT_S)
    except BaseException:
        camera.close()
        raise
    return camera


def settings_of(folder: Path, line: Path) -> CameraSettings:
    options = {"pulse_file": str(line)}
    return CameraSettings("replay", str(folder), fps=100, open_timeout_s=30, options=options)


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pulses of the simulated trigger line."""
    return tmp_path_factory.mktemp("line") / "pulses"


@pytest.fixture(scope="module")
def shared(folder: Path, line: Path) -> Iterator[Camera]:
    """One process for most of the suite: starting one is what takes the time."""
    with closing(supervised(settings_of(folder, line))) as camera:
        yield camera


class TestSupervisedReplay(CameraConformance):
    """A supervised camera is a camera."""

    frame_s = WAIT_S
    slack_s = WAIT_S

    def open(self, settings: CameraSettings) -> Camera:
        return supervised(settings)

    @pytest.fixture
    def settings(self, folder: Path, line: Path) -> CameraSettings:
        return settings_of(folder, line)

    @pytest.fixture
    def camera(self, shared: Camera) -> Iterator[Camera]:
        yield shared
        shared.disarm()

    @pytest.fixture
    def pulse(self, line: Path) -> Callable[[], None]:
        def give() -> None:
            with line.open("ab") as file:
                file.write(b".")

        return give


def test_free_running_hands_out_the_newest_and_counts_the_rest(
    watch: Callable[..., Watched],
) -> None:
    camera = watch().camera
    camera.wait_open(WAIT_S)
    camera.arm("free")
    first = camera.grab(WAIT_S).sequence
    time.sleep(0.5)
    later = camera.grab(WAIT_S)
    assert later.sequence > first + 3, "what came in between was skipped"
    assert time.monotonic_ns() - later.t_monotonic_ns < WAIT_S * 1e9
    assert camera.counters.dropped >= later.sequence - first - 1


def test_a_burst_waits_for_a_slow_reader_and_loses_nothing(watch: Callable[..., Watched]) -> None:
    camera = watch().camera
    camera.wait_open(WAIT_S)
    camera.arm("free", 100)  # more than the ring has slots
    time.sleep(0.3)
    numbers = [camera.grab(WAIT_S).sequence for _ in range(100)]
    assert numbers == list(range(numbers[0], numbers[0] + 100))
    assert camera.counters.dropped == 0


def test_a_hanging_library_is_killed_from_outside(watch: Callable[..., Watched]) -> None:
    watched = watch(stall_after=3)
    camera = watched.camera
    camera.wait_open(WAIT_S)
    stuck = camera.pid
    assert stuck is not None
    camera.arm("free")
    for _ in range(2):
        camera.grab(WAIT_S)
    watched.until(lambda: "STALLED" in watched.states())
    with pytest.raises(CameraLostError, match="Arm it again"):
        camera.grab(WAIT_S)
    camera.wait_open(WAIT_S, patient=True)
    assert not alive(stuck) and camera.pid != stuck
    camera.arm("free")
    assert camera.grab(WAIT_S).image.shape == (24, 32)
    assert watched.states()[:5] == ["OPENING", "STREAMING", "STALLED", "BACKOFF", "OPENING"]
    assert (camera.counters.stalls, camera.counters.reconnects) == (1, 1)
    fault = next(change.fault for _, change in watched.changes if change.lost and change.fault)
    assert "hangs" in str(fault) or "no frames" in str(fault)


def test_a_frozen_live_image_is_a_fault_and_a_still_recording_is_none(
    watch: Callable[..., Watched],
) -> None:
    frozen = watch(freeze_after=4, live=True)
    still = watch(freeze_after=4)
    for watched in (frozen, still):
        watched.camera.wait_open(WAIT_S)
        watched.camera.arm("free")
    frozen.until(lambda: frozen.camera.counters.frozen == 1)
    frozen.until(lambda: "STALLED" in frozen.states())
    assert any("repeats one image" in str(change.fault) for _, change in frozen.changes)
    frames = still.camera.counters.frames
    for _ in range(10):
        still.camera.grab(WAIT_S)
    assert still.camera.counters.frames == frames + 10 and still.camera.state is State.STREAMING


def test_a_process_that_dies_is_replaced(watch: Callable[..., Watched]) -> None:
    watched = watch()
    camera = watched.camera
    camera.wait_open(WAIT_S)
    camera.arm("hardware")
    assert camera.pid is not None
    os.kill(camera.pid, signal.SIGKILL)
    watched.until(lambda: "STALLED" in watched.states())
    with pytest.raises(CameraLostError, match="process ended"):
        camera.grab(WAIT_S)
    camera.wait_open(WAIT_S, patient=True)
    camera.arm("software")
    camera.trigger()
    camera.grab(WAIT_S)


def test_an_absent_camera_is_told_with_its_reason_and_found_when_it_comes(
    watch: Callable[..., Watched], tmp_path: Path
) -> None:
    plug = tmp_path / "unplugged"
    plug.touch()
    watched = watch(unplug_file=str(plug))
    camera = watched.camera
    with pytest.raises(CameraNotFoundError, match="unplugged"):
        camera.wait_open(WAIT_S)
    with pytest.raises(CameraNotFoundError, match="unplugged"):
        camera.arm("free")
    plug.unlink()
    camera.wait_open(WAIT_S, patient=True)


def test_no_process_is_left_when_the_station_is_killed(folder: Path) -> None:
    code = """
import sys, time
from forge_station.capture.camera import CameraSettings
from forge_station.capture.supervisor import SupervisedCamera
camera = SupervisedCamera(CameraSettings("replay", sys.argv[1], fps=100, open_timeout_s=50))
camera.wait_open(50)
camera.arm("free")
print(camera.pid, flush=True)
time.sleep(600)
"""
    station = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert station.stdout is not None
    with station.stdout:
        worker = int(station.stdout.readline())
        assert alive(worker)
        station.kill()
        station.wait()
    deadline = time.monotonic() + WAIT_S
    while alive(worker):
        assert time.monotonic() < deadline, "orphan"
        time.sleep(0.02)


def test_unplugged_and_plugged_in_again_and_again(folder: Path, tmp_path: Path) -> None:
    """FORGE_STATION_CYCLES times. The times and the memory go to the test's output (-s)."""
    plug = tmp_path / "unplugged"
    patience = Patience(steady_s=0.1) if LONG else QUICK
    told: list[float] = []
    back: list[float] = []
    memory: list[int] = []
    pids: set[int] = set()
    descriptors = 0
    with closing(Watched(folder, patience, unplug_file=str(plug))) as watched:
        camera = watched.camera
        camera.wait_open(WAIT_S, patient=True)
        for cycle in range(CYCLES):
            camera.arm("free" if cycle % 2 else "hardware")
            assert camera.pid is not None
            pids.add(camera.pid)
            time.sleep(0.2)  # longer than steady_s: a camera that was well
            watched.changes.clear()
            plug.touch()
            began = time.monotonic()
            watched.until(lambda: any(change.lost for _, change in watched.changes))
            when, change = next(item for item in watched.changes if item[1].lost)
            told.append(when - began)
            assert change.camera == "front" and isinstance(change.fault, CameraLostError)
            with pytest.raises(CameraLostError):
                camera.grab(WAIT_S)
            plug.unlink()
            began = time.monotonic()
            camera.wait_open(WAIT_S, patient=True)
            camera.arm("free")
            camera.grab(WAIT_S)
            back.append(time.monotonic() - began)
            memory.append(_resident_kb())
            if cycle % 10 == 9:
                print(f"{cycle + 1} cycles: {_figures(told, back, memory)}", flush=True)
            if cycle == 2:
                descriptors = len(os.listdir("/proc/self/fd"))
        assert abs(len(os.listdir("/proc/self/fd")) - descriptors) <= 2
        assert camera.counters.reconnects == CYCLES
    assert len(pids) == CYCLES, "each time a new process"
    assert not any(alive(pid) for pid in pids)
    settled = memory[len(memory) // 10]
    assert memory[-1] / settled - 1 < (0.01 if LONG else 0.10)


def _figures(told: list[float], back: list[float], memory: list[int]) -> str:
    late = sum(seconds > 10 for seconds in back)
    return (
        f"told p50 {np.median(told):.2f} s max {max(told):.2f} s; back p50 {np.median(back):.2f} s "
        f"p95 {np.percentile(back, 95):.2f} s max {max(back):.2f} s, {late} above 10 s; memory "
        f"{memory[len(memory) // 10]} -> {memory[-1]} kB"
    )


def test_waiting_for_a_camera_is_bounded(watch: Callable[..., Watched]) -> None:
    camera = watch().camera
    begin = time.monotonic()
    with pytest.raises((CameraTimeoutError, CameraLostError)):
        camera.wait_open(0.001)
    assert time.monotonic() - begin < WAIT_S


def _resident_kb() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("Rss")).split()[1])
