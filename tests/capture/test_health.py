"""Plane residual of a head: known noise on a known plane."""

from __future__ import annotations

import numpy as np
import pytest

from forge_station.capture.base import Scan, ScanQuality
from forge_station.capture.health import plane_residual
from forge_station.errors import ScanError


def board(noise: float, stray: float, count: int = 100) -> Scan:
    rng = np.random.default_rng(1)
    x, y = np.meshgrid(np.linspace(-50, 50, count), np.linspace(-50, 50, count))
    points = np.stack([x, y, 400 + 0.2 * x - 0.3 * y + rng.normal(0, noise, x.shape)], -1)
    points[rng.random(x.shape) < stray] = (0.0, 0.0, 200.0)
    points[0] = np.nan
    return Scan(
        points.astype(np.float32),
        np.zeros(x.shape, np.uint8),
        np.ones(x.shape, np.float32),
        ScanQuality(1.0),
        0.25,
        "camera",
    )


def test_residual_is_the_noise_across_the_plane_despite_strays() -> None:
    plane = plane_residual(board(noise=0.1, stray=0.2), tolerance_mm=0.5)
    across = 0.1 / np.sqrt(1 + 0.2**2 + 0.3**2)
    assert plane.std_mm == pytest.approx(across, rel=0.05)
    assert plane.robust_mm == pytest.approx(across, rel=0.05)
    assert plane.share == pytest.approx(0.8, abs=0.02)
    assert plane.distance_mm == pytest.approx(400, abs=1)


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ScanError, match="expected 1000, got 380"):
        plane_residual(board(noise=0.1, stray=0.0, count=20), tolerance_mm=0.5)
