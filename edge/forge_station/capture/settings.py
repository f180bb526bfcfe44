"""How one scan head is put together: its camera, projector, calibration and exposures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from forge_station.capture.camera import CameraSettings
from forge_station.capture.projector import ProjectorSettings
from forge_station.contract.error import ContractError, Fault
from forge_station.contract.record import Limit, check

Microseconds = Annotated[float, Limit(1.0, 10e6)]
Wait = Annotated[float, Limit(0.0, 60.0)]


@dataclass(frozen=True)
class HeadSettings:
    """One head pose of the station file."""

    name: str
    """Of the pose, in messages and recordings."""
    camera: CameraSettings
    projector: ProjectorSettings
    calibration: Path
    """Made by `forge-station calibrate` for exactly this camera, projector and place."""
    exposures_us: tuple[Microseconds, ...] = (20000.0,)
    """One burst each, merged per pixel: a second, shorter one saves shiny metal."""
    frame_timeout_s: Wait = 1.0
    """A frame may take so long after its exposure."""
    recover_s: Wait = 3.0
    """How long a part waits for a camera that is being opened anew."""

    def __post_init__(self) -> None:
        check(self)
        exposures = self.exposures_us
        fine = exposures and all(1.0 <= x <= 10e6 for x in exposures)
        if not fine or list(exposures) != sorted(set(exposures), reverse=True):
            allowed = "1 us to 10 s, the longest first, each once"
            fault = Fault("exposures_us", ", ".join(f"{x:g}" for x in exposures) or "none", allowed)
            raise ContractError("settings of a head", faults=[fault])
