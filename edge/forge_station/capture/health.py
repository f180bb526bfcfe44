"""How well a head measures: the residual of a plane that it looked at.

Does not decide; the numbers go to a person.

Used after mounting or calibrating a head, on a scan of a flat board or the empty tray.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forge_station.capture.base import Scan
from forge_station.errors import ScanError


@dataclass(frozen=True)
class PlaneResidual:
    """The dominant plane of a scan.

    points: how many lie on it, share: of all valid points; distance_mm: of their centroid from the
    frame's origin; std_mm, robust_mm: standard deviation and 1.4826 x median absolute deviation
    across the plane.
    """

    points: int
    share: float
    distance_mm: float
    std_mm: float
    robust_mm: float

    def __str__(self) -> str:
        per_mille = 1e3 * self.std_mm / self.distance_mm if self.distance_mm else 0.0
        return (
            f"plane of {self.points} points ({100 * self.share:.0f} %) at {self.distance_mm:.0f} "
            "mm: "
            f"residual std {self.std_mm:.3g} mm ({per_mille:.2g} per mille of the distance), "
            f"robust {self.robust_mm:.3g} mm"
        )


def plane_residual(scan: Scan, tolerance_mm: float, trials: int = 200) -> PlaneResidual:
    """Residual of the plane that holds most points.

    RANSAC on 5000 points (fixed seed), then a total least squares fit to all points within 2 x
    tolerance, twice.
    Raises ScanError where fewer than 1000 points are valid.
    """
    points = scan.points.reshape(-1, 3)
    points = points[np.isfinite(points).all(axis=1)].astype(np.float64)
    if len(points) < 1000:
        raise ScanError("too few valid points for a plane", expected="1000", got=len(points))
    rng = np.random.default_rng(0)
    sample = points[rng.choice(len(points), min(5000, len(points)), replace=False)]
    best, normal, centre = -1, np.array([0.0, 0.0, 1.0]), sample[0]
    for a, b, c in sample[rng.integers(0, len(sample), (trials, 3))]:
        candidate = np.cross(b - a, c - a)
        length = float(np.linalg.norm(candidate))
        if length < 1e-9:
            continue
        count = int((np.abs((sample - a) @ candidate) < tolerance_mm * length).sum())
        if count > best:
            best, normal, centre = count, candidate / length, a
    on_plane = points
    for _ in range(2):
        on_plane = points[np.abs((points - centre) @ normal) < 2 * tolerance_mm]
        centre = on_plane.mean(axis=0)
        normal = _flattest_direction(on_plane - centre)
    residual = (on_plane - centre) @ normal
    return PlaneResidual(
        points=len(on_plane),
        share=len(on_plane) / len(points),
        distance_mm=float(np.linalg.norm(centre)),
        std_mm=float(residual.std()),
        robust_mm=float(1.4826 * np.median(np.abs(residual - np.median(residual)))),
    )


def _flattest_direction(centred: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.linalg.eigh(centred.T @ centred)[1][:, 0], np.float64)
