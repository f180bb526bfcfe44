"""What lies close together is told apart, what belongs together is not: synthetic clouds."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from forge_station.capture.base import Cloud
from forge_station.geometry import gauge, quality, scene

PIXEL = 0.2
POSES = 4
DENSITY = 3 / PIXEL**2
"""Points a mm2, as four poses see a level surface."""
TRAY = (80.0, 60.0)
Points = NDArray[np.float64]


def seen(rng: np.random.Generator, *clouds: Points) -> Cloud:
    points = np.concatenate(clouds)
    points = points + rng.normal(0.0, 0.15 * PIXEL, points.shape)
    return Cloud(points.astype(np.float32), None, camera_pixel_mm=PIXEL, poses=POSES, frame="tray")


def level(rng: np.random.Generator, length: float, width: float, z: float) -> Points:
    """A rectangle in the middle of the tray."""
    size = (length / 2, width / 2)
    xy = rng.uniform(np.negative(size), size, (int(length * width * DENSITY), 2))
    return np.column_stack([xy, np.full(len(xy), z)])


def moved(points: Points, x: float, y: float) -> Points:
    return np.asarray(points + np.array([x, y, 0.0]))


def disc(rng: np.random.Generator, x: float, radius: float = 8.0, height: float = 2.4) -> Points:
    top = level(rng, 2 * radius, 2 * radius, height)
    top = top[np.hypot(top[:, 0], top[:, 1]) < radius]
    around = rng.uniform((0, 0), (2 * np.pi, height), (int(2 * np.pi * radius * height * 15), 2))
    side = np.column_stack(
        [radius * np.cos(around.T[0]), radius * np.sin(around.T[0]), around.T[1]]
    )
    return moved(np.concatenate([top, side]), x, 0.0)


def tray_around(rng: np.random.Generator, centres: list[float], radius: float = 8.0) -> Points:
    """A tray that discs hide; in the shadow right beside them a tenth of it is seen."""
    tray = level(rng, *TRAY, 0.0)
    away = np.min([np.hypot(tray[:, 0] - x, tray[:, 1]) for x in centres], axis=0) - radius
    return tray[(away > 1.0) | ((away > 0.0) & (rng.random(len(tray)) < 0.1))]


@pytest.mark.parametrize("gap_px", [3.0, 4.0, 5.0])
@pytest.mark.parametrize("count", [2, 3])
def test_discs_with_a_narrow_dark_gap_are_counted_and_measured(count: int, gap_px: float) -> None:
    rng = np.random.default_rng(int(10 * gap_px) + count)
    step = 16.0 + gap_px * PIXEL
    centres = [k * step - step for k in range(count)]
    discs = [disc(rng, x) for x in centres]
    cloud = seen(rng, tray_around(rng, centres), *discs)
    found = scene.separate(cloud)
    assert len(found.parts) == count
    assert quality.gate(cloud, found) == ()
    for part in found.parts:
        size = gauge.measure(part)
        assert (size.length_mm, size.width_mm) == pytest.approx((16, 16), abs=2 * PIXEL)


def test_discs_in_touch_stay_one_and_are_reported() -> None:
    rng = np.random.default_rng(1)
    cloud = seen(rng, tray_around(rng, [-8.0, 8.0]), disc(rng, -7.95), disc(rng, 7.95))
    found = scene.separate(cloud)
    assert [part.has_waist for part in found.parts] == [True]
    assert [problem.code for problem in quality.gate(cloud, found)] == ["TOUCHING_PARTS"]


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_a_part_whose_narrow_middle_is_seen_thinly_is_one(share: float) -> None:
    rng = np.random.default_rng(2)
    bar = level(rng, 20, 2, 2.4)
    whole = np.concatenate([bar, disc(rng, -9.0, 5.0), disc(rng, 9.0, 5.0)])
    whole = whole[(np.abs(whole[:, 0]) > 3) | (rng.random(len(whole)) < share)]
    tray = level(rng, *TRAY, 0.0)
    hidden = np.min([np.hypot(tray[:, 0] - x, tray[:, 1]) for x in (-9, 9)], axis=0) < 5.0
    hidden |= (np.abs(tray[:, 0]) < 10) & (np.abs(tray[:, 1]) < 1)
    found = scene.separate(seen(rng, tray[~hidden], whole))
    assert [part.has_waist for part in found.parts] == [True]


def test_a_shadow_across_a_shank_leaves_one_bolt_though_its_outline_has_a_waist() -> None:
    """Under a head the thread is dark, and only the middle of the shadow is bridged."""
    rng = np.random.default_rng(3)
    head, shank = moved(level(rng, 8, 13, 5.0), -10, 0), moved(level(rng, 16, 8, 4.0), 3.4, 0)
    tray = level(rng, *TRAY, 0.0)
    hidden = (np.abs(tray[:, 0] + 10) < 4) & (np.abs(tray[:, 1]) < 6.5)
    hidden |= (np.abs(tray[:, 0] - 3.4) < 8) & (np.abs(tray[:, 1]) < 4)
    hidden |= (np.abs(tray[:, 0] + 5) < 2) & (np.abs(tray[:, 1]) < 1.0)
    found = scene.separate(seen(rng, tray[~hidden], head, shank))
    assert [part.has_waist for part in found.parts] == [True]


def test_the_tray_seen_higher_by_a_pose_that_is_off_is_no_part() -> None:
    rng = np.random.default_rng(4)
    twice = level(rng, 12, 8, 1.3 * PIXEL)
    twice = moved(twice[rng.random(len(twice)) < 0.4], 30, 20)
    cloud = seen(rng, level(rng, *TRAY, 0.0), disc(rng, 0.0), twice)
    found = scene.separate(cloud)
    assert len(found.parts) == 1
    assert quality.gate(cloud, found) == ()


def test_a_sheet_as_low_that_hides_the_tray_is_a_part() -> None:
    rng = np.random.default_rng(5)
    tray = level(rng, *TRAY, 0.0)
    hidden = (np.abs(tray[:, 0] - 30) < 6) & (np.abs(tray[:, 1] - 20) < 4)
    sheet = moved(level(rng, 12, 8, 1.3 * PIXEL), 30, 20)
    found = scene.separate(seen(rng, tray[~hidden], disc(rng, 0.0), sheet))
    assert len(found.parts) == 2
