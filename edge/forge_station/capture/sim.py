"""Simulated scanners: parts that were laid out virtually (the demo), and a calibration board.

They know the driver protocol, not which parts there are: the caller supplies what lies on the tray
for a trigger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from forge_station.capture.base import PatternStack, Trigger
from forge_station.capture.board import Board
from forge_station.capture.calibration import Calibration, Optics
from forge_station.errors import CaptureError

try:
    from forge_station.sim import board as board_poses
    from forge_station.sim import scanner
except ModuleNotFoundError as missing:
    raise CaptureError(
        f"the simulated scanner needs {missing.name}",
        action="install the extra: pip install forge-station[demo]",
    ) from missing

Tray = Callable[[Trigger], Sequence[scanner.MeshLike]]


class SimulatedScanner:
    """Driver of a head that is simulated.

    `tray(trigger)` gives the meshes on the tray (tray frame, mm), `rig` the head poses (see
    sim.scanner.rig).
    `seed` makes noise and registration errors repeatable: the n-th capture of two equal drivers is
    identical.
    """

    def __init__(
        self,
        tray: Tray,
        rig: Sequence[Calibration],
        *,
        seed: int = 0,
        exposures: tuple[float, ...] = (1.0, 0.35),
        registration: tuple[float, float] | None = None,
        surface: scanner.Surface | None = None,
    ) -> None:
        if not rig:
            raise CaptureError("simulated scanner: the rig has no head pose")
        self._tray, self._rig = tray, tuple(rig)
        self._rng = np.random.default_rng(seed)
        self._exposures, self._registration = exposures, registration
        self._surface = surface or scanner.Surface()
        self._calibrations = {pose.digest: pose for pose in self._rig}
        self._closed = False

    @property
    def calibrations(self) -> Mapping[str, Calibration]:
        """By digest, one per head pose."""
        return self._calibrations

    def capture(self, trigger: Trigger) -> list[PatternStack]:
        """One stack per head pose, about 30 ms each at 640x480 once the loops are compiled."""
        if self._closed:
            raise CaptureError("simulated scanner: it is closed")
        meshes = list(self._tray(trigger))
        return [
            scanner.simulate(
                meshes,
                pose,
                self._rng,
                exposures=self._exposures,
                registration=self._registration,
                surfaces=self._surface,
            )
            for pose in self._rig
        ]

    def close(self) -> None:
        """Nothing to release; later captures are refused."""
        self._closed = True


class SimulatedBoard:
    """A head that was never calibrated, and a board that is held elsewhere at each capture.

    `head` is what it truly is; its stacks name a nominal calibration instead (a design focal
    length, no distortion), as those of a new head do. `poses`: 16 at most, then CaptureError.
    """

    def __init__(self, head: Calibration, board: Board, poses: int, *, seed: int = 0) -> None:
        self._head, self._board = head, board
        self._poses = list(board_poses.poses(poses, head))
        self._rng = np.random.default_rng(seed)
        self._taken, self._closed = 0, False
        self.nominal = replace(
            head,
            name="nominal",
            camera=_undistorted(head.camera),
            projector=_undistorted(head.projector),
            tray_from_camera=None,
            notes={"source": "nominal values, not calibrated"},
        )

    @property
    def calibrations(self) -> Mapping[str, Calibration]:
        """The nominal one."""
        return {self.nominal.digest: self.nominal}

    def capture(self, trigger: Trigger) -> list[PatternStack]:
        """The board in its next pose, one stack."""
        if self._closed:
            raise CaptureError("simulated board: the scanner is closed")
        if self._taken >= len(self._poses):
            raise CaptureError(
                "simulated board: no pose is left", expected=f"{len(self._poses)} captures"
            )
        pose = self._poses[self._taken]
        self._taken += 1
        stack = board_poses.simulate(self._board, self._head, pose, self._rng)
        name = f"pose{self._taken:02d}"
        return [replace(stack, name=name, calibration_digest=self.nominal.digest)]

    def close(self) -> None:
        """Nothing to release; later captures are refused."""
        self._closed = True


def _undistorted(optics: Optics) -> Optics:
    return replace(optics, distortion=np.zeros(5))
