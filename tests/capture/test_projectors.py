"""Projector drivers: what is shown is what was prepared, and every mistake is named."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from forge_station.capture import patterns
from forge_station.capture.calibration import PatternSpec
from forge_station.capture.projector import (
    Projector,
    ProjectorSettings,
    drivers,
    open_projector,
)
from forge_station.capture.projectors.sim import NOTHING, SimProjector
from forge_station.capture.projectors.stored import StoredProjector
from forge_station.errors import (
    ProjectorLostError,
    ProjectorNotFoundError,
    ProjectorSettingsError,
)

IMAGES = patterns.images(PatternSpec(column_bits=2, steps=3), (32, 24))
STORED = {"stepping": "camera", "width": 32, "height": 24, "patterns": 7}
SDL = pytest.mark.skipif(
    importlib.util.find_spec("pygame") is None, reason="the window needs the extra projector"
)


def stored(**options: str | int | float | bool) -> StoredProjector:
    return StoredProjector(ProjectorSettings("stored", options={**STORED, **options}))


def test_simulated_projector_tells_in_its_file_what_is_up(tmp_path: Path) -> None:
    file = tmp_path / "shown"
    projector = SimProjector(ProjectorSettings("sim", address=str(file)))
    assert isinstance(projector, Projector)
    assert file.read_text() == str(NOTHING)
    projector.prepare(IMAGES)
    projector.show(4)
    assert (projector.shown, file.read_text()) == (4, "4")
    projector.close()
    projector.close()
    assert file.read_text() == str(NOTHING)
    with pytest.raises(ProjectorLostError, match="closed"):
        projector.show(0)


@pytest.mark.parametrize(
    ("images", "text"),
    [
        (IMAGES.astype(np.float32), "float32"),
        (IMAGES[0], r"got uint8 \[24, 32\]"),
        (IMAGES[:0], r"\[0, 24, 32\]"),
        (IMAGES[:, :, :-1], "expected 32x24, got 31x24"),
        (IMAGES[:-1], "expected 7, got 6"),
    ],
)
def test_images_that_are_not_the_devices_are_refused(images: NDArray[np.uint8], text: str) -> None:
    with pytest.raises(ProjectorSettingsError, match=text):
        stored().prepare(images)


def test_showing_without_images_or_beyond_them_is_refused() -> None:
    projector = SimProjector(ProjectorSettings("sim"))
    with pytest.raises(ProjectorSettingsError, match=r"prepare\(\) first"):
        projector.show(0)
    projector.prepare(IMAGES)
    for index in (-1, 7):
        with pytest.raises(ProjectorSettingsError, match="expected 0 to 6"):
            projector.show(index)


def test_stored_patterns_are_started_once_and_told_apart_by_their_digest(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = tmp_path / "tool.py"
    script.write_text(f"import sys; open({str(log)!r}, 'a').write(sys.argv[1] + '\\n')")
    tool = f"{sys.executable} {script}"
    projector = stored(
        start=f"{tool} start", stop=f"{tool} stop", sha256=patterns.digest(IMAGES), frame_us=16667
    )
    info = projector.describe()
    assert (info.stepping, info.size, info.frame_s) == (
        "camera",
        (32, 24),
        pytest.approx(1 / 60, rel=1e-4),
    )
    projector.prepare(IMAGES)
    projector.show(0)
    with pytest.raises(ProjectorSettingsError, match="begins at its first image"):
        projector.show(1)
    projector.close()
    projector.close()
    assert log.read_text().split() == ["start", "stop"]
    with pytest.raises(ProjectorSettingsError, match="other patterns stored"):
        stored(sha256=patterns.digest(IMAGES)).prepare(IMAGES[::-1])


@pytest.mark.parametrize(
    ("command", "error", "text"),
    [
        (
            f"{sys.executable} -c 'import sys; sys.exit(\"no device\")'",
            ProjectorLostError,
            "no device",
        ),
        (f"{sys.executable} -c 'import time; time.sleep(30)'", ProjectorLostError, "within 0.3 s"),
        ("/nowhere/tool", ProjectorNotFoundError, "No such file"),
    ],
)
def test_a_command_that_fails_is_named_in_time(
    command: str, error: type[Exception], text: str
) -> None:
    projector = stored(start=command, timeout_s=0.3)
    projector.prepare(IMAGES)
    begin = time.monotonic()
    with pytest.raises(error, match=text):
        projector.show(0)
    assert time.monotonic() - begin < 10


def test_wrong_options_of_stored_patterns_come_in_one_message() -> None:
    options = {"stepping": "host", "width": 0, "height": "many", "colour": 1}
    with pytest.raises(ProjectorSettingsError) as error:
        StoredProjector(ProjectorSettings("stored", options=options))
    for part in (
        "colour: unknown",
        "patterns: missing",
        "width: 0",
        "height: 'many'",
        "'host' is not",
    ):
        assert part in str(error.value)


def test_settle_times_out_of_range_are_refused() -> None:
    with pytest.raises(ProjectorSettingsError, match="settle_s 0 to 5"):
        ProjectorSettings("window", settle_s=60.0)


@pytest.mark.skipif(not drivers(), reason="the package is not installed, only on the path")
def test_drivers_are_found_by_name_and_an_unknown_one_lists_them() -> None:
    assert {"sim", "stored", "window"} <= set(drivers())
    assert isinstance(open_projector(ProjectorSettings("sim")), SimProjector)
    with pytest.raises(ProjectorNotFoundError, match="sim, stored, window"):
        open_projector(ProjectorSettings("laser"))


def in_process(body: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """SDL keeps one window a process, and its driver is picked once."""
    head = (
        "import numpy as np, pygame, sys\n"
        "from forge_station.capture.projector import ProjectorSettings\n"
        "from forge_station.capture.projectors.window import open_window\n"
        "def noise(info):\n"
        "    shape = (3, info.size[1], info.size[0])\n"
        "    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    env = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run(
        [sys.executable, "-c", head + body], capture_output=True, text=True, env=env, timeout=60
    )


@SDL
def test_window_draws_pixel_for_pixel_and_waits_until_it_is_settled() -> None:
    done = in_process(
        "import time\n"
        "window = open_window(ProjectorSettings('window', settle_frames=3, settle_s=0.2))\n"
        "info = window.describe()\n"
        "images = noise(info)\n"
        "window.prepare(images)\n"
        "for k in (2, 0):\n"
        "    begin = time.monotonic(); window.show(k)\n"
        "    assert time.monotonic() - begin >= 0.2 + 3 * info.frame_s\n"
        "    drawn = pygame.surfarray.array3d(pygame.display.get_surface())\n"
        "    assert (drawn == images[k].T[..., None]).all()\n"
        "window.close(); window.close()\n"
        "try: window.show(0)\n"
        "except Exception as error: print(type(error).__name__)\n",
        SDL_VIDEODRIVER="dummy",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "ProjectorLostError"


@SDL
def test_window_refuses_a_missing_monitor_scaled_patterns_and_its_own_end() -> None:
    done = in_process(
        "def attempt(do):\n"
        "    try: do(); print('accepted')\n"
        "    except Exception as error: print(type(error).__name__, error)\n"
        "attempt(lambda: open_window(ProjectorSettings('window', address='7')))\n"
        "attempt(lambda: open_window(ProjectorSettings('window', address='HDMI-1')))\n"
        "window = open_window(ProjectorSettings('window'))\n"
        "images = noise(window.describe())\n"
        "attempt(lambda: window.prepare(images[:, ::2, ::2]))\n"
        "window.prepare(images)\n"
        "pygame.event.post(pygame.event.Event(pygame.QUIT))\n"
        "attempt(lambda: window.show(0))\n",
        SDL_VIDEODRIVER="dummy",
    )
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("Projector")] == [
        "ProjectorNotFoundError", "ProjectorSettingsError",
        "ProjectorSettingsError", "ProjectorLostError",
    ], done.stderr  # fmt: skip
    assert "accepted" not in done.stdout


CLOSED_IN_A_SCAN = """
from dataclasses import replace
from forge_station.capture import patterns
from forge_station.capture.base import Trigger
from forge_station.capture.calibration import Optics
from forge_station.capture.head import Head
from tests.capture.test_head import Eye, calibration

def opened(): return open_window(ProjectorSettings("window", settle_frames=0))

class Screen(Eye):
    triggers = 0
    def trigger(self):  # what it delivers is marked with the pattern that is on the screen
        screen = pygame.surfarray.array3d(pygame.display.get_surface())[..., 0].T
        (self.shown,) = np.flatnonzero((shown == screen).all(axis=(1, 2)))
        super().trigger()
        self.triggers += 1
        if self.triggers == 5:
            pygame.event.post(pygame.event.Event(pygame.QUIT))

light = opened()
size = light.describe().size
known = calibration(spec=patterns.spec_for("phase", size, period_px=256, steps=3))
known = replace(known, projector=Optics(size, known.projector.matrix))
shown = patterns.images(known.pattern, size)
eye = Screen()
head = Head("front", eye, light, known, (200.0,), reopen=opened, now_ns=lambda: eye.now_ns)
stack = head.scan(Trigger("1"))
assert (stack.images[0, :, 0, 2] == np.arange(len(shown))).all()
assert head.projector is not light
print("whole after", eye.triggers - len(shown), "more")
head.close()
"""


@SDL
def test_a_window_that_is_closed_in_the_middle_of_a_scan_costs_no_part() -> None:
    done = in_process(CLOSED_IN_A_SCAN, SDL_VIDEODRIVER="dummy")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "whole after 5 more"


@SDL
def test_window_without_a_screen_says_what_to_set() -> None:
    done = in_process(
        "open_window(ProjectorSettings('window'))",
        SDL_VIDEODRIVER="x11", DISPLAY="", WAYLAND_DISPLAY="",
    )  # fmt: skip
    assert "ProjectorNotFoundError: no screen can be opened" in done.stderr
    assert "Set DISPLAY" in done.stderr


@pytest.fixture
def x_server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A virtual X server of its own; its frame buffer is a file."""
    program = shutil.which("Xvfb")
    if program is None:
        pytest.skip("no Xvfb here: what reaches a real screen is not looked at")
    read, write = os.pipe()
    server = subprocess.Popen(
        [program, "-displayfd", str(write), "-screen", "0", "320x200x24", "-nolisten", "tcp",
         "-fbdir", str(tmp_path)],
        pass_fds=(write,), stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(write)
    try:
        with os.fdopen(read) as told:
            number = told.readline().strip()
        assert number, "Xvfb did not start"
        yield f":{number}", tmp_path / "Xvfb_screen0"
    finally:
        server.terminate()
        server.wait(timeout=10)


@SDL
def test_what_reaches_an_x_screen_is_the_pattern_itself(x_server: tuple[str, Path]) -> None:
    display, buffer = x_server
    done = in_process(
        "window = open_window(ProjectorSettings('window', settle_s=0.1))\n"
        "images = noise(window.describe())\n"
        "window.prepare(images); window.show(1)\n"
        f"data = open({str(buffer)!r}, 'rb').read()\n"
        "head = np.frombuffer(data, '>u4', 25)\n"
        "size, width, height, line, colours = (int(head[k]) for k in (0, 4, 5, 12, 19))\n"
        "start = size + 12 * colours\n"
        "screen = np.frombuffer(data, np.uint8, line * height, start).reshape(height, -1, 4)\n"
        "assert (width, height) == window.describe().size == (320, 200)\n"
        "print(float((screen[:, :width, :3] == images[1][..., None]).mean()))\n"
        "window.close()\n",
        SDL_VIDEODRIVER="x11",
        DISPLAY=display,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) == 1.0
