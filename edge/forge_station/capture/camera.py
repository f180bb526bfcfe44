"""What a camera driver is, and how the station finds one.

A driver is a callable `(CameraSettings) -> Camera`, registered as an entry point in the group
`forge_station.cameras`; the drivers of this package are registered the same way, so that one of a
third party is worth as much. A driver knows one device and nothing of supervision: it may block in
its SDK, because it runs in a process of its own (`capture.supervisor`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Annotated, Literal, Protocol, runtime_checkable

from forge_station.capture.base import Frame
from forge_station.capture.drivers import Registry
from forge_station.contract.record import Limit
from forge_station.errors import CameraNotFoundError

REGISTRY = Registry("forge_station.cameras", "camera", CameraNotFoundError)

TriggerMode = Literal["free", "software", "hardware"]
"""free: as fast as set; software: one frame a `trigger()`; hardware: one a pulse on `line`."""


@dataclass(frozen=True)
class CameraSettings:
    """How to open and set one device. None leaves what the device has.

    address: of the driver, e.g. 192.168.7.20, /dev/video0, rtsp://..., a serial number, a folder.
    exposure_us, gain (dB), pixel_format (PFNC name, e.g. Mono8), fps: of the device. line: input
    of the hardware trigger by its SFNC name. open_timeout_s bounds opening. options: of the driver
    alone (SFNC features by name, fault injection of the replay driver, ...).
    """

    driver: str
    address: str = ""
    exposure_us: Annotated[float, Limit(1.0, 10e6)] | None = None
    gain: float | None = None
    pixel_format: str | None = None
    fps: Annotated[float, Limit(1e-3, 1e5)] | None = None
    line: str = "Line1"
    open_timeout_s: Annotated[float, Limit(0.1, 600.0)] = 5.0
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)


@dataclass(frozen=True)
class CameraInfo:
    """What was opened. `triggers`: the modes that the device can do; `clock`: of `t_device_ns`.

    clock "replay" says that the images are no live ones: equal images in a row are no fault then.
    """

    driver: str
    driver_version: str
    vendor: str
    model: str
    serial: str
    address: str
    width: int
    height: int
    triggers: tuple[TriggerMode, ...] = ("free",)
    clock: str = "host"


@dataclass(frozen=True)
class CameraHealth:
    """Counted since opening. temperature in degrees Celsius, where the device tells it."""

    frames: int = 0
    incomplete: int = 0
    dropped: int = 0
    temperature: float | None = None
    details: Mapping[str, str | int | float] = field(default_factory=dict)


@runtime_checkable
class Camera(Protocol):
    """An open device. Calls come from one thread; each is bounded in time.

    All raise CameraLostError once the device is gone, CameraSettingsError for what it refuses.
    """

    def describe(self) -> CameraInfo: ...

    def arm(
        self, trigger: TriggerMode, count: int | None = None, *, exposure_us: float | None = None
    ) -> None:
        """Start streaming: `count` frames, or until `disarm`. Frames of before are thrown away.

        exposure_us: from now on; None leaves it as it is.
        """
        ...

    def trigger(self) -> None:
        """Ask for one frame, armed with "software"."""
        ...

    def grab(self, timeout_s: float) -> Frame:
        """The oldest frame not yet taken. An incomplete one is returned with `complete` False.

        Raises CameraTimeoutError when none comes in time.
        """
        ...

    def disarm(self) -> None:
        """Stop streaming; may be called twice."""
        ...

    def health(self) -> CameraHealth: ...

    def close(self) -> None:
        """Release the device; may be called twice, and after it was lost."""
        ...


Opener = Callable[[CameraSettings], Camera]


def drivers() -> dict[str, metadata.EntryPoint]:
    """Installed drivers by name; nothing is imported."""
    return REGISTRY.installed()


def open_camera(settings: CameraSettings) -> Camera:
    """Open the device in this process. Raises CameraNotFoundError and the driver's errors."""
    opener: Opener = REGISTRY.find(settings.driver).load()
    return opener(settings)
