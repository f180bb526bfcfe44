"""Driver `sim`: a camera that looks at a simulated tray under a simulated projector.

It sees what a head at its place would see, with shadows, blur and noise (`forge_station.sim`), so
that scanner, calibration file and station can be tried before there is hardware. address: the file
of the projector driver `sim`, which says what is projected; empty: a burst runs through the
patterns by itself, one image a frame, and free running shows full light. Options:

    calibration        file of the head whose camera this is (default: a head 385 mm above the tray)
    part, count        what lies on the tray, an id of the catalogue (default hex_nut M8, 3 pieces);
                       empty: nothing
    seed               same seed: same tray, same noise
    full_exposure_us   exposure time at which a white part is just not saturated (default 20000)

Needs the extra `demo`. The first opening on a machine compiles the simulator for up to a minute:
give it `open_timeout_s: 120`. The part stays where it is for as long as the camera is open.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forge_station import version
from forge_station.capture import calibration_io
from forge_station.capture.base import Frame, white_and_black
from forge_station.capture.camera import CameraHealth, CameraInfo, CameraSettings, TriggerMode
from forge_station.capture.cameras.common import Arming, Option, options_of, refuse, wait_until
from forge_station.contract.catalogue import by_id
from forge_station.errors import (
    CameraLostError,
    CameraNotFoundError,
    CameraSettingsError,
    StationError,
)

_DEFAULTS: dict[str, Option] = {
    "calibration": "", "part": "hex_nut M8", "count": 3, "seed": 1, "full_exposure_us": 20000.0,
}  # fmt: skip
_FPS = 25.0
_MOST_PARTS = 6


class SimCamera:
    """See the module. Triggers: free and software; frames come after their exposure time."""

    def __init__(self, settings: CameraSettings) -> None:
        self._options = options_of(settings, _DEFAULTS)
        refuse(settings, "gain", "pixel_format")
        self._settings = settings
        self._name = f"sim:{settings.address}"
        self._shown = Path(settings.address) if settings.address else None
        self._arming = Arming(self._name, ("free", "software"))
        self._rng = np.random.default_rng(self._options["seed"])
        self._exposure_us = settings.exposure_us or self._options["full_exposure_us"]
        self._views: dict[float, NDArray[np.uint8]] = {}
        self._number = self._of_burst = 0
        self._asked = self._due_at = time.monotonic()
        self._build()

    def _build(self) -> None:
        try:
            from forge_station.sim import fasteners, rest_pose, scanner, trays
        except ModuleNotFoundError as missing:
            raise CameraNotFoundError(
                f"the simulated camera needs {missing.name}",
                action="install the extra: pip install forge-station[demo]",
            ) from missing
        option = self._options
        if option["count"] > _MOST_PARTS:
            raise CameraSettingsError(
                "parts on the simulated tray", expected=f"{_MOST_PARTS} at most",
                got=option["count"],
            )  # fmt: skip
        try:
            self._pose = (
                calibration_io.load(Path(option["calibration"]))
                if option["calibration"]
                else scanner.rig(1.0, "overhead")[0]
            )
            count = option["count"] if option["part"] else 0
            meshes = [
                rest_pose.rest(fasteners.build(by_id(option["part"]), self._rng), self._rng)
                for _ in range(count)
            ]
            self._meshes = trays.place(meshes, self._rng) if meshes else []
            self._view()
        except CameraLostError:
            raise
        except StationError as error:
            raise CameraSettingsError(
                "the scene cannot be simulated", which=self._name, got=error
            ) from error

    def describe(self) -> CameraInfo:
        width, height = self._pose.camera.image_size
        return CameraInfo(
            "sim", version(), "forge-station", "simulated camera", str(self._options["seed"]),
            self._settings.address, width, height, self._arming.triggers,
        )  # fmt: skip

    def arm(
        self, trigger: TriggerMode, count: int | None = None, *, exposure_us: float | None = None
    ) -> None:
        self._arming.arm(trigger, count)
        self._exposure_us = exposure_us or self._exposure_us
        self._view()  # a new exposure is simulated here: arming may take longer than a frame
        self._of_burst = 0
        self._due_at = time.monotonic()

    def trigger(self) -> None:
        self._arming.trigger()
        self._asked = time.monotonic()

    def grab(self, timeout_s: float) -> Frame:
        self._arming.refuse_unarmed()
        deadline = time.monotonic() + timeout_s
        software = self._arming.mode == "software"
        ready = self._asked + self._exposure_us / 1e6 if software else self._due_at
        if not (self._arming.due and wait_until(ready, deadline)):
            wait_until(deadline, deadline)
            raise self._arming.late(timeout_s)
        step = max(1 / (self._settings.fps or _FPS), self._exposure_us / 1e6)
        self._due_at = max(self._due_at + step, time.monotonic() - step)
        image = self._look()
        self._arming.taken()
        self._number += 1
        self._of_burst += 1
        return Frame(
            image=image,
            sequence=self._number,
            t_monotonic_ns=time.monotonic_ns(),
            t_utc_ns=time.time_ns(),
            exposure_us=self._exposure_us,
            source=self._name,
        )

    def disarm(self) -> None:
        self._arming.disarm()

    def health(self) -> CameraHealth:
        self._arming.refuse_closed()
        return CameraHealth(frames=self._number)

    def close(self) -> None:
        self._arming.close()

    def _look(self) -> NDArray[np.uint8]:
        """The image under what is projected now, with a noise of its own."""
        images = self._view()
        white, black = white_and_black(self._pose.pattern)
        if self._shown is not None:
            index = self._projected(black)
        else:
            index = self._of_burst if self._arming.left is not None else white
        image = images[index % len(images)]
        noise = np.roll(self._noise, int(self._rng.integers(self._noise.size)))
        lit = (image > 0) & (image < 255)  # clipped pixels stay clipped
        return np.asarray(image + noise.reshape(image.shape) * lit, np.uint8)

    def _projected(self, dark: int) -> int:
        """The number that the simulated projector wrote; `dark` where it shows nothing."""
        assert self._shown is not None
        try:
            index = int(self._shown.read_text(encoding="ascii"))
        except FileNotFoundError:
            return dark
        except (OSError, ValueError) as error:
            raise CameraLostError(
                "the file of the simulated projector is not readable",
                which=self._shown, got=error,
            ) from error  # fmt: skip
        return dark if index < 0 else index

    def _view(self) -> NDArray[np.uint8]:
        """All patterns at the present exposure, uint8 [N, H, W]; simulated once an exposure."""
        from forge_station.sim import scanner

        relative = self._exposure_us / self._options["full_exposure_us"]
        if relative not in self._views:
            rng = np.random.default_rng(self._options["seed"])
            stack = scanner.simulate(
                self._meshes, self._pose, rng, exposures=(relative,), registration=(0.0, 0.0)
            )
            self._views[relative] = stack.images[0]
            self._noise = rng.integers(0, 2, stack.images[0, 0].size, np.uint8)
        return self._views[relative]


def open_sim(settings: CameraSettings) -> SimCamera:
    """Entry point of the driver `sim`."""
    return SimCamera(settings)
