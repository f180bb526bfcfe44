"""Depth maps from one view: their points stand in rows, which must not upset what is measured."""

from __future__ import annotations

import numpy as np
import pytest

from forge_station.capture.base import Cloud
from forge_station.geometry import gauge, pose, scene


def height_map(turn_deg: float, pixel_mm: float, offset: float = 0.0) -> np.ndarray:
    """Points [N, 3] of a tray with a block of 16 x 6 x 5 mm, on an exact grid in x and y."""
    side = np.arange(-20, 20, pixel_mm) + offset * pixel_mm
    x, y = np.meshgrid(side, side)
    cos, sin = np.cos(np.deg2rad(turn_deg)), np.sin(np.deg2rad(turn_deg))
    z = np.random.default_rng(1).normal(0, 0.01, x.shape)
    z[(np.abs(cos * x + sin * y) < 8) & (np.abs(cos * y - sin * x) < 3)] += 5.0
    return np.stack([x, y, z], -1).reshape(-1, 3).astype(np.float32)


@pytest.mark.parametrize("turn_deg", [0.0, 0.1, 0.7, 20.0, 45.0, 90.0])
@pytest.mark.parametrize(("pixel_mm", "stated_mm"), [(0.25, 0.25), (0.1, 0.1), (0.25, 0.21)])
def test_a_block_on_an_exact_grid_is_measured(turn_deg, pixel_mm, stated_mm):
    for offset in (0.0, 0.3, 0.6):
        points = height_map(turn_deg, pixel_mm, offset)
        (part,) = scene.separate(Cloud(points, None, stated_mm)).parts
        size = gauge.measure(part)
        assert size.length_mm == pytest.approx(16, abs=2 * pixel_mm)
        assert size.width_mm == pytest.approx(6, abs=2 * pixel_mm)
        assert size.height_mm == pytest.approx(5, abs=0.05)


def test_a_scan_from_free_poses_is_no_depth_map():
    rng = np.random.default_rng(0)
    held = np.bincount((rng.random(20_000) * 60).astype(int), minlength=60).astype(float)
    assert not pose._in_rows(held)
    held[[3, 9]] = 0
    held[:3] = [1, 0, 2]
    assert not pose._in_rows(held)
    comb = np.zeros(60)
    comb[::4] = 40
    assert pose._in_rows(comb)
