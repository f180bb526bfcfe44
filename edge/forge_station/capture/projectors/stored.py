"""A projector with the patterns in its own memory, stepped by wire (DLP controllers).

Nothing goes over a bus between two images, so that a scan runs at the speed of camera and mirrors.
The patterns are stored once with the vendor's tool (`forge-station patterns` writes them and tells
their digest). One of two wires keeps camera and projector together, by option `stepping`:

    camera       camera output (ExposureActive) -> projector trigger in; each exposure, one image
    projector    projector trigger out -> camera input (Line1); each image, one exposure

A sequence that lost a pulse is noticed when it is decoded (white and black are not where they
belong). `start` and `stop` are commands of the vendor's tool, where the device needs one to begin.
"""

from __future__ import annotations

import shlex
import subprocess
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from forge_station.capture.patterns import digest
from forge_station.capture.projector import (
    Prepared,
    ProjectorInfo,
    ProjectorSettings,
    Stepping,
)
from forge_station.errors import (
    ProjectorLostError,
    ProjectorNotFoundError,
    ProjectorSettingsError,
)

_KEYS = {
    "stepping": str,
    "width": int,
    "height": int,
    "patterns": int,
    "sha256": str,
    "frame_us": int,
    "start": str,
    "stop": str,
    "timeout_s": float,
}
_TIMEOUT_S = 3.0


class StoredProjector:
    """Options: `stepping`, `width`, `height`, `patterns` (how many are stored) are needed.

    `sha256` of the stored patterns: prepare refuses others. `frame_us`: time of one image on the
    device. `start`, `stop`: commands, run without a shell; they must end within `timeout_s`
    (default 3).
    """

    def __init__(self, settings: ProjectorSettings) -> None:
        options = _checked(settings)
        self._name = f"stored patterns{' of ' if settings.address else ''}{settings.address}"
        self._size = (int(options["width"]), int(options["height"]))
        self._stepping: Stepping = "camera" if options["stepping"] == "camera" else "projector"
        self._count = int(options["patterns"])
        self._digest = str(options.get("sha256", ""))
        self._frame_s = float(options["frame_us"]) * 1e-6 if "frame_us" in options else None
        self._start = shlex.split(str(options.get("start", "")))
        self._stop = shlex.split(str(options.get("stop", "")))
        self._timeout_s = float(options.get("timeout_s", _TIMEOUT_S))
        self._prepared = Prepared(self._name, self._size)

    def describe(self) -> ProjectorInfo:
        return ProjectorInfo("stored", self._name, self._size, self._stepping, self._frame_s)

    def prepare(self, images: NDArray[np.uint8]) -> None:
        """Check that the device has these images; nothing is sent."""
        self._prepared.take(images, self._count)
        if self._digest and digest(images) != self._digest:
            raise ProjectorSettingsError(
                "the device has other patterns stored than the calibration was made with",
                which=self._name,
                expected=f"sha256 {self._digest[:12]}",
                got=digest(images)[:12],
                action="store the patterns that `forge-station patterns` writes for it",
            )

    def show(self, index: int) -> None:
        """0: begin the sequence, by the command `start` where there is one."""
        self._prepared.image(index)
        if index != 0:
            raise ProjectorSettingsError(
                "a stored sequence begins at its first image",
                which=self._name,
                expected=0,
                got=index,
            )
        self._run(self._start)

    def close(self) -> None:
        """Raises ProjectorLostError where the command `stop` fails; the driver is closed then."""
        if not self._prepared.closed:
            self._prepared.close()
            self._run(self._stop)

    def _run(self, command: list[str]) -> None:
        if not command:
            return
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=self._timeout_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ProjectorLostError(
                "the projector's command did not end",
                which=shlex.join(command),
                expected=f"within {self._timeout_s:g} s",
                action="check its cable and power",
            ) from error
        except OSError as error:
            raise ProjectorNotFoundError(
                "the projector's command cannot be run",
                which=shlex.join(command),
                got=error.strerror,
            ) from error
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise ProjectorLostError(
                "the projector's command failed",
                which=shlex.join(command),
                got=f"exit status {done.returncode}{': ' if said else ''}{' '.join(said[-1:])}",
            )


def open_stored(settings: ProjectorSettings) -> StoredProjector:
    """Entry point of the driver `stored`. Raises ProjectorSettingsError."""
    return StoredProjector(settings)


def _checked(settings: ProjectorSettings) -> dict[str, str | int | float | bool]:
    """The options, or one error with everything that is wrong."""
    options = dict(settings.options)
    problems = [f"{key}: unknown" for key in options if key not in _KEYS]
    for key in ("stepping", "width", "height", "patterns"):
        if key not in options:
            problems.append(f"{key}: missing")
    for key, kind in _KEYS.items():
        value = options.get(key)
        if value is None:
            continue
        if kind is str and not isinstance(value, str):
            problems.append(f"{key}: {value!r} is no text")
        number = not isinstance(value, bool) and isinstance(value, (int, float))
        if kind is not str and not (number and value > 0):  # type: ignore[operator]
            problems.append(f"{key}: {value!r} is not above 0")
    steps = [name for name in get_args(Stepping) if name != "host"]
    if "stepping" in options and options["stepping"] not in steps:
        problems.append(f"stepping: {options['stepping']!r} is not {' or '.join(steps)}")
    if problems:
        raise ProjectorSettingsError(
            "options of the stored patterns",
            which=settings.address or "projector",
            got="; ".join(problems),
            action="stepping, width, height and patterns are needed; see docs/SCANNING.md",
        )
    return options
