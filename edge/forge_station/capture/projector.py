"""What a projector driver is, and how the station finds one.

A driver is a callable `(ProjectorSettings) -> Projector`, registered as an entry point in the group
`forge_station.projectors`. Who makes the next image appear is its `stepping`, and decides the
camera's trigger mode:

    stepping    next image by                         the head does, for N images
    host        show(k), image by image               arm("software"), N x (show(k), trigger, grab)
    camera      each exposure of the camera           show(0), arm("free", N), N x grab
    projector   its own clock, its trigger-out line   arm("hardware", N), show(0), N x grab

Wiring, exposure times and figures: docs/SCANNING.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Literal, Protocol, cast, get_args, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from forge_station.capture.drivers import Registry
from forge_station.errors import (
    ProjectorLostError,
    ProjectorNotFoundError,
    ProjectorSettingsError,
)

REGISTRY = Registry("forge_station.projectors", "projector", ProjectorNotFoundError)

Stepping = Literal["host", "camera", "projector"]


@dataclass(frozen=True)
class ProjectorSettings:
    """How to open one projector.

    address: of the driver; window: number of the monitor, from 0. settle_frames: refreshes of the
    projector from the order to a stable image, its own delay included; settle_s is added to that
    (colour wheels, LEDs that ramp up). options: of the driver alone.
    """

    driver: str
    address: str = ""
    settle_frames: int = 2
    settle_s: float = 0.0
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (0 <= self.settle_frames <= 120 and 0 <= self.settle_s <= 5):
            raise ProjectorSettingsError(
                "settle time of the projector out of range",
                which=self.driver,
                expected="settle_frames 0 to 120, settle_s 0 to 5",
                got=f"{self.settle_frames}, {self.settle_s:g}",
            )


@dataclass(frozen=True)
class ProjectorInfo:
    """What was opened. size: (width, height) of its mirrors or pixels; None: the driver cannot ask.

    frame_s: how long one image of its clock is up; an exposure must be a multiple of it, else
    images differ in brightness. None: any exposure will do.
    """

    driver: str
    model: str
    size: tuple[int, int] | None
    stepping: Stepping = "host"
    frame_s: float | None = None


@runtime_checkable
class Projector(Protocol):
    """An open projector. Calls come from one thread; each is bounded in time.

    All raise ProjectorLostError once the device is gone or closed.
    """

    def describe(self) -> ProjectorInfo: ...

    def prepare(self, images: NDArray[np.uint8]) -> None:
        """Take the images of a sequence, uint8 [N, height, width]; kept until the next call.

        Raises ProjectorSettingsError where their size or number is not the device's: a pattern that
        is scaled on its way is another pattern.
        """
        ...

    def show(self, index: int) -> None:
        """Return once image `index` is up and stable.

        With stepping "camera" or "projector" only 0 is meant: begin the stored sequence.
        """
        ...

    def close(self) -> None:
        """Dark, and released; may be called twice."""
        ...


Opener = Callable[[ProjectorSettings], Projector]


def drivers() -> dict[str, metadata.EntryPoint]:
    """Installed drivers by name; nothing is imported."""
    return REGISTRY.installed()


def open_projector(settings: ProjectorSettings) -> Projector:
    """Open the device. Raises ProjectorNotFoundError and the driver's errors."""
    opener: Opener = REGISTRY.find(settings.driver).load()
    return opener(settings)


def stepping_of(settings: ProjectorSettings, default: Stepping) -> Stepping:
    """The option `stepping` of a driver that leaves the choice. Raises ProjectorSettingsError."""
    asked = settings.options.get("stepping", default)
    for known in get_args(Stepping):
        if asked == known:
            return cast(Stepping, known)
    raise ProjectorSettingsError(
        "no such stepping of a projector",
        which=settings.driver,
        expected=", ".join(get_args(Stepping)),
        got=asked,
    )


class Prepared:
    """The prepared images of a driver, checked: what every driver shares."""

    def __init__(self, name: str, size: tuple[int, int] | None) -> None:
        self._name, self._size = name, size
        self._images: NDArray[np.uint8] | None = None
        self.closed = False

    def take(self, images: NDArray[np.uint8], count: int | None = None) -> NDArray[np.uint8]:
        """Check and keep; `count`: how many the device has, None: any number."""
        self._refuse_closed()
        size = self._size
        if images.dtype != np.uint8 or images.ndim != 3 or 0 in images.shape:
            raise ProjectorSettingsError(
                "images for the projector",
                which=self._name,
                expected="uint8 [N, height, width]",
                got=f"{images.dtype} {list(images.shape)}",
            )
        if size is not None and images.shape[2:0:-1] != size:
            raise ProjectorSettingsError(
                "the patterns have another size than the projector",
                which=self._name,
                expected=f"{size[0]}x{size[1]}",
                got=f"{images.shape[2]}x{images.shape[1]}",
                action="set the monitor to the projector's native resolution, and calibrate with "
                "that: scaled patterns cannot be decoded",
            )
        if count is not None and len(images) != count:
            raise ProjectorSettingsError(
                "another number of patterns than the device has stored",
                which=self._name,
                expected=count,
                got=len(images),
                action="store the patterns of the calibration on the device",
            )
        self._images = images
        return images

    def image(self, index: int) -> NDArray[np.uint8]:
        """Image `index`, uint8 [height, width]."""
        self._refuse_closed()
        if self._images is None or not 0 <= index < len(self._images):
            raise ProjectorSettingsError(
                "no such image in the sequence",
                which=self._name,
                expected="prepare() first"
                if self._images is None
                else f"0 to {len(self._images) - 1}",
                got=index,
            )
        return np.asarray(self._images[index])

    def close(self) -> None:
        """Forget the images; later calls are refused."""
        self.closed, self._images = True, None

    def _refuse_closed(self) -> None:
        if self.closed:
            raise ProjectorLostError("the projector is closed", which=self._name)
