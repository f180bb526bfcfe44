"""The scanner of the demo: parts that were laid out virtually, seen by a simulated head.

Knows the driver protocol, not which parts there are: the caller supplies what lies on the tray for
a trigger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from forge_station.capture.base import PatternStack, Trigger
from forge_station.capture.calibration import Calibration
from forge_station.errors import CaptureError

try:
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
