"""How one scan head is put together: its camera, projector, calibration and exposures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forge_station.capture.camera import CameraSettings
from forge_station.capture.projector import ProjectorSettings
from forge_station.contract.error import ContractError, Fault


@dataclass(frozen=True)
class HeadSettings:
    """One head pose of the station file."""

    name: str
    """Of the pose, in messages and recordings."""
    camera: CameraSettings
    projector: ProjectorSettings
    calibration: Path
    """Made by `forge-station calibrate` for exactly this camera, projector and place."""
    exposures_us: tuple[float, ...] = (20000.0,)
    """One burst each, merged per pixel: a second, shorter one saves shiny metal."""
    frame_timeout_s: float = 1.0
    """A frame may take so long after its exposure."""
    recover_s: float = 3.0
    """How long a part waits for a camera that is being opened anew."""

    def __post_init__(self) -> None:
        faults = []
        exposures = self.exposures_us
        if not exposures or any(not 0 < x <= 10e6 for x in exposures):
            faults.append(Fault("exposures_us", f"{exposures}", "numbers above 0, 10 s at most"))
        elif list(exposures) != sorted(set(exposures), reverse=True):
            faults.append(Fault("exposures_us", f"{exposures}", "longest first, each once"))
        if not self.name:
            faults.append(Fault("name", "empty", "a name"))
        for name in ("frame_timeout_s", "recover_s"):
            if not 0 <= getattr(self, name) <= 60:
                faults.append(Fault(name, f"{getattr(self, name)}", "0 to 60"))
        if faults:
            raise ContractError("settings of a head", faults=faults)
