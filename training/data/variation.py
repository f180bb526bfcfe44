"""Domain randomisation: what differs from scene to scene, and within which range.

One dataclass names every range. The defaults are wider than what was measured on decoded scans, so
that a model trained on them meets nothing new at a station; `CLEAN` switches all of it off. The
shape of parts (dimensions within their tolerance band, chamfers, threads) is `sim.make`'s; resting
pose and yaw are always random, they are the task.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from forge_station.capture.calibration import Calibration
from forge_station.sim import scanner
from forge_station.sim.surrogate import Noise

Range = tuple[float, float]


@dataclass(frozen=True)
class Light:
    """How parts shine and what the camera makes of it; the default is the simulator's."""

    surface: scanner.Surface = field(default_factory=scanner.Surface)
    sensor: scanner.Sensor = field(default_factory=scanner.Sensor)
    exposures: tuple[float, ...] = (1.0, 0.35)
    registration_px: float | None = None
    """Shift of each pose, one sigma; None: the simulator's."""

    def registration(self, calibration: Calibration) -> tuple[float, float] | None:
        """(mm, degrees) for `scanner.simulate`."""
        if self.registration_px is None:
            return None
        return self.registration_px * (calibration.camera_pixel_mm or 0.0), 0.03


SIMULATED = Light()


@dataclass(frozen=True)
class Variation:
    """Ranges (low, high), drawn evenly, and shares (0..1) of scenes. Lengths in camera pixels."""

    made: bool = True
    """Parts as they are made (tolerances, chamfers, threads), not as the standard draws them."""
    gap: Range = (0.15, 0.8)
    """Between parts, of the tallest part's height."""
    wide_gap: Range = (0.8, 1.5)
    wide_gap_share: float = 0.2
    """Trays laid out with `wide_gap`."""
    field_of_view: Range = (0.95, 1.3)
    """Of the smallest field that shows all parts: parts are larger or smaller in the image."""
    closed_cracks: float = 0.0
    """Share of cracks without depth: a dark line, which only the white image shows."""
    three_poses_share: float = 0.2
    """Scans from overhead, front and side in place of four azimuths."""
    lost_pose_share: float = 0.1
    """Scans of which one pose is missing."""
    coarse_share: float = 0.75
    """Surrogate sheets scanned with half the camera's resolution: thinned points."""
    depth: Range = (0.08, 0.2)
    """Surrogate: depth noise at normal incidence (measured: 0.125)."""
    grazing_keep: Range = (0.7, 0.95)
    """Surrogate: share of grazing points kept (0.9)."""
    flying: Range = (0.0, 0.12)
    """Surrogate: share of points at depth jumps that fly (0.06)."""
    edge_drop: Range = (0.0, 0.3)
    """Surrogate: share of points at depth jumps that are lost (0.15)."""
    registration: Range = (0.0, 0.32)
    """Shift of each pose against the others, one sigma (0.16)."""
    blind_share: float = 0.1
    """Surrogate: poses that lose a round patch, by glare, oil or something in the way."""
    blind_radius: Range = (6.0, 40.0)
    """Radius of that patch."""
    albedo: Range = (0.35, 0.75)
    """Decoded: diffuse share of the part's surface (0.55: zinc-plated steel)."""
    specular: Range = (0.2, 1.0)
    """Decoded: strength of the highlight (0.6)."""
    shininess: Range = (20.0, 80.0)
    """Decoded: exponent of the highlight (40)."""
    light: Range = (0.6, 1.2)
    """Decoded: brightness of the projector, which is the exposure time (1)."""
    ambient: Range = (0.02, 0.12)
    """Decoded: light that is always there (0.06)."""

    def noise(self, rng: np.random.Generator) -> Noise:
        """Decode errors of one surrogate scan."""
        return Noise(
            depth=_even(self.depth, rng),
            grazing_keep=_even(self.grazing_keep, rng),
            flying=_even(self.flying, rng),
            edge_drop=_even(self.edge_drop, rng),
            registration=_even(self.registration, rng),
            blind_share=self.blind_share,
            blind_radius=self.blind_radius,
        )

    def lit(self, rng: np.random.Generator) -> Light:
        """Surface and exposure of one decoded scan."""
        sensor = SIMULATED.sensor
        return Light(
            surface=scanner.Surface(
                _even(self.albedo, rng), _even(self.specular, rng), _even(self.shininess, rng)
            ),
            sensor=replace(
                sensor,
                electrons=sensor.electrons * _even(self.light, rng),
                ambient=_even(self.ambient, rng),
            ),
            registration_px=_even(self.registration, rng),
        )


def _even(limits: Range, rng: np.random.Generator) -> float:
    return float(rng.uniform(*limits))


USUAL = Variation()
_NOISE, _SURFACE = Noise(), SIMULATED.surface
CLEAN = Variation(
    made=False,
    gap=(0.5, 0.5),
    wide_gap_share=0.0,
    field_of_view=(1.0, 1.0),
    three_poses_share=0.0,
    lost_pose_share=0.0,
    coarse_share=0.0,
    depth=(_NOISE.depth, _NOISE.depth),
    grazing_keep=(_NOISE.grazing_keep, _NOISE.grazing_keep),
    flying=(_NOISE.flying, _NOISE.flying),
    edge_drop=(_NOISE.edge_drop, _NOISE.edge_drop),
    registration=(_NOISE.registration, _NOISE.registration),
    blind_share=0.0,
    albedo=(_SURFACE.albedo, _SURFACE.albedo),
    specular=(_SURFACE.specular, _SURFACE.specular),
    shininess=(_SURFACE.shininess, _SURFACE.shininess),
    light=(1.0, 1.0),
    ambient=(SIMULATED.sensor.ambient, SIMULATED.sensor.ambient),
)
"""Nothing randomised but what lies on the tray and how: the scanner as it was measured."""
