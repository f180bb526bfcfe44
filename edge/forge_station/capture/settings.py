"""How one scan head is put together: its camera, projector, calibration, exposures.

Or a 3D head, which has all of that inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from forge_station.capture.camera import CameraSettings
from forge_station.capture.projector import ProjectorSettings
from forge_station.contract.error import ContractError, Fault
from forge_station.contract.record import Limit, check

Microseconds = Annotated[float, Limit(1.0, 10e6)]
Wait = Annotated[float, Limit(0.0, 60.0)]
Row = tuple[float, float, float, float]
Pose = tuple[Row, Row, Row, Row]
"""4 x 4, mm."""

_STRAIGHT = 1e-3


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


@dataclass(frozen=True)
class DepthHeadSettings:
    """One 3D head of the station file."""

    name: str
    """Of the head, in messages."""
    camera: CameraSettings
    """driver: gentl3d, or another whose frames are scans."""
    tray_from_camera: Pose | None = None
    """Where the head is: 4 x 4 matrix, mm. None: the tray is looked for in each scan (one head)."""
    timeout_s: Annotated[float, Limit(0.1, 120.0)] = 10.0
    """A scan may take so long, from trigger to arrival."""
    recover_s: Wait = 3.0
    """How long a part waits for a head that is being opened anew."""

    def __post_init__(self) -> None:
        check(self)
        if self.tray_from_camera is not None and not _rigid(np.array(self.tray_from_camera)):
            allowed = "a rotation and a translation (mm): rows r r r x, r r r y, r r r z, 0 0 0 1"
            fault = Fault("tray_from_camera", f"{self.tray_from_camera}", allowed)
            raise ContractError("settings of a 3D head", faults=[fault])


def _rigid(pose: NDArray[np.float64]) -> bool:
    turn = pose[:3, :3]
    return (
        bool(np.isfinite(pose).all())
        and bool(np.abs(turn @ turn.T - np.eye(3)).max() < _STRAIGHT)
        and float(np.linalg.det(turn)) > 0
        and pose[3].tolist() == [0, 0, 0, 1]
    )
