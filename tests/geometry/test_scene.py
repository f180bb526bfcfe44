"""Separation, tray plane and part frame on synthetic clouds (no scanner in the loop)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from forge_station.capture.base import Cloud
from forge_station.geometry import cells, gauge, scene
from forge_station.geometry.pose import PartCloud, align, solid

PIXEL = 0.2
Points = NDArray[np.float64]


def cloud_of(points: NDArray[np.floating], frame: str = "tray") -> Cloud:
    return Cloud(points.astype(np.float32), None, camera_pixel_mm=PIXEL, poses=3, frame=frame)


def rotation_z(angle: float) -> Points:
    cos, sin = np.cos(angle), np.sin(angle)
    return np.array([[cos, -sin, 0.0], [sin, cos, 0.0], [0.0, 0.0, 1.0]])


def tray(rng: np.random.Generator, width: float = 120.0, depth: float = 90.0) -> Points:
    count = int(3 * width * depth / PIXEL**2 / 3)
    xy = rng.uniform((-width / 2, -depth / 2), (width / 2, depth / 2), (count, 2))
    return np.column_stack([xy, np.zeros(count)])


def block(
    rng: np.random.Generator,
    length: float,
    width: float,
    height: float,
    centre: tuple[float, float],
) -> Points:
    """Top and the four sides of a box, about three points per camera pixel."""
    density = 3 / PIXEL**2
    top = rng.uniform((-0.5, -0.5, 1.0), (0.5, 0.5, 1.0), (int(length * width * density), 3))
    sides = []
    for axis, across in ((0, width), (1, length)):
        count = int(across * height * density)
        for sign in (-0.5, 0.5):
            side = rng.uniform((-0.5, -0.5, 0.0), (0.5, 0.5, 1.0), (count, 3))
            side[:, axis] = sign
            sides.append(side)
    points = np.concatenate([top, *sides]) * (length, width, height)
    points[:, :2] += centre
    return points


def noisy(rng: np.random.Generator, *clouds: Points) -> NDArray[np.float32]:
    points = np.concatenate(clouds)
    return (points + rng.normal(0.0, 0.15 * PIXEL, points.shape)).astype(np.float32)


def codes(result: scene.Scene) -> set[str]:
    return {problem.code for problem in result.problems}


@pytest.mark.parametrize(
    ("points", "code"),
    [
        (np.zeros((0, 3)), "NO_DATA"),
        (np.full((5000, 3), np.nan), "NO_DATA"),
        (np.full((5000, 3), np.inf), "NO_DATA"),
        (np.zeros((99, 3)), "NO_DATA"),
        (np.zeros((5000, 3)), "EMPTY_SCENE"),
    ],
)
def test_bad_clouds_give_a_problem_not_an_exception(points: Points, code: str) -> None:
    result = scene.separate(cloud_of(points.astype(np.float32)))
    assert result.parts == ()
    assert code in codes(result)
    assert all(problem.level == "ERROR" for problem in result.problems)


def test_empty_tray_is_an_empty_scene() -> None:
    rng = np.random.default_rng(0)
    result = scene.separate(cloud_of(noisy(rng, tray(rng))))
    assert codes(result) == {"EMPTY_SCENE"}
    assert result.tray_share > 0.95


def test_parts_are_counted_ordered_and_measured_in_their_own_frame() -> None:
    rng = np.random.default_rng(1)
    turned = block(rng, 20, 8, 6, (0, 0)) @ rotation_z(0.7).T + (25, 3, 0)
    cloud = noisy(rng, tray(rng), turned, block(rng, 12, 10, 4, (-30, -5)))
    result = scene.separate(cloud_of(cloud))
    assert result.problems == ()
    assert [round(float(p.tray_from_part[0, 3])) for p in result.parts] == [-30, 25]
    for part, (length, width, height) in zip(result.parts, [(12, 10, 4), (20, 8, 6)], strict=True):
        size = gauge.measure(part)
        assert size.length_mm == pytest.approx(length, abs=0.3)
        assert size.width_mm == pytest.approx(width, abs=0.3)
        assert size.height_mm == pytest.approx(height, abs=0.15)


def test_tray_from_part_puts_the_points_back() -> None:
    rng = np.random.default_rng(2)
    original = (block(rng, 20, 8, 6, (0, 0)) @ rotation_z(2.2).T + (7, -11, 0)).astype(np.float32)
    part = align(original, PIXEL)
    back = part.points @ part.tray_from_part[:3, :3].T + part.tray_from_part[:3, 3]
    assert len(back) == len(original)
    np.testing.assert_allclose(back, original, atol=1e-4)
    corners = part.footprint - part.tray_from_part[:2, 3]
    assert np.abs(np.linalg.norm(corners, axis=1) - np.hypot(10, 4)).max() < 0.3


def test_frame_does_not_depend_on_how_the_part_was_turned() -> None:
    rng = np.random.default_rng(3)
    bolt = np.concatenate([block(rng, 6, 13, 11, (-13, 0)), block(rng, 20, 8, 9, (0, 0))])
    for angle in np.linspace(0, 2 * np.pi, 9):
        part = align(bolt @ rotation_z(float(angle)).T, PIXEL)
        high = part.points[:, 2] > 10.5
        assert part.points[high, 0].max() < 0, f"head must lie at -x, turned by {angle:.2f} rad"


def test_a_narrow_gap_in_which_the_tray_is_seen_stays_a_gap() -> None:
    rng = np.random.default_rng(4)
    gap = 8 * PIXEL
    base = tray(rng)
    left, right = block(rng, 15, 15, 5, (-7.5, 0)), block(rng, 15, 15, 5, (7.5 + gap, 0))
    result = scene.separate(cloud_of(noisy(rng, base, left, right)))
    assert len(result.parts) == 2


def test_a_shadow_across_a_part_does_not_split_it() -> None:
    rng = np.random.default_rng(5)
    part = block(rng, 30, 10, 6, (0, 0))
    base = tray(rng)
    strip = 3 * PIXEL
    part = part[np.abs(part[:, 0]) > strip / 2]
    base = base[(np.abs(base[:, 0]) > 15) | (np.abs(base[:, 1]) > 5)]
    result = scene.separate(cloud_of(noisy(rng, base, part)))
    assert len(result.parts) == 1


def test_flying_points_are_neither_parts_nor_size() -> None:
    rng = np.random.default_rng(6)
    flying = rng.uniform((-60, -45, 0.5), (60, 45, 20), (400, 3))
    cloud = noisy(rng, tray(rng), block(rng, 20, 10, 6, (0, 0)), flying)
    result = scene.separate(cloud_of(cloud))
    assert len(result.parts) == 1
    size = gauge.measure(result.parts[0])
    assert size.length_mm == pytest.approx(20, abs=0.3)
    assert size.height_mm == pytest.approx(6, abs=0.2)


def test_two_touching_discs_have_a_waist_and_one_bolt_has_none() -> None:
    rng = np.random.default_rng(7)

    def disc(x: float) -> Points:
        cloud = block(rng, 16, 16, 4, (0, 0))
        return cloud[np.hypot(cloud[:, 0], cloud[:, 1]) < 8] + (x, 0, 0)

    touching = scene.separate(cloud_of(noisy(rng, tray(rng), disc(-7.9), disc(7.9))))
    assert [part.has_waist for part in touching.parts] == [True]
    bolt = np.concatenate([block(rng, 6, 13, 11, (-13, 0)), block(rng, 20, 8, 9, (0, 0))])
    alone = scene.separate(cloud_of(noisy(rng, tray(rng), bolt)))
    assert [part.has_waist for part in alone.parts] == [False]


def test_a_part_cut_by_the_field_of_view_is_reported_and_one_inside_is_not() -> None:
    rng = np.random.default_rng(8)
    cloud = noisy(rng, tray(rng), block(rng, 20, 10, 6, (-55, 0)), block(rng, 20, 10, 6, (20, 0)))
    result = scene.separate(cloud_of(cloud[np.abs(cloud[:, 0]) < 60]))
    assert [part.touches_border for part in result.parts] == [True, False]
    assert "PART_OUT_OF_FIELD" in codes(result)


def test_more_parts_than_marks_is_an_error_that_names_both() -> None:
    rng = np.random.default_rng(9)
    blocks = [block(rng, 8, 8, 5, (x, 0)) for x in (-30, -15, 0, 15)]
    result = scene.separate(cloud_of(noisy(rng, tray(rng), *blocks)), max_marks=3)
    (problem,) = [p for p in result.problems if p.code == "TOO_MANY_PARTS"]
    assert problem.level == "ERROR"
    assert "4" in problem.text and "3" in problem.text


def test_a_shifted_and_tilted_tray_is_levelled_and_reported() -> None:
    rng = np.random.default_rng(10)
    cloud = noisy(rng, tray(rng), block(rng, 20, 10, 6, (10, 0)))
    small = cloud.copy()
    small[:, 2] += 0.3 + 0.002 * small[:, 0]
    result = scene.separate(cloud_of(small))
    assert codes(result) == set()
    assert gauge.measure(result.parts[0]).height_mm == pytest.approx(6, abs=0.15)
    large = cloud.copy()
    large[:, 2] += 0.8
    assert codes(scene.separate(cloud_of(large))) == {"CALIBRATION_MISMATCH"}


def test_unknown_frame_is_found_from_the_tray_plane() -> None:
    rng = np.random.default_rng(11)
    cloud = noisy(rng, tray(rng), block(rng, 20, 10, 6, (10, 0)), block(rng, 12, 9, 4, (-20, 5)))
    axes = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    axes[:, 0] *= np.linalg.det(axes)
    moved = (cloud @ axes.T + (100, -50, 400)).astype(np.float32)
    result = scene.separate(cloud_of(moved, "unknown"))
    assert result.problems == ()
    heights = sorted(gauge.measure(part).height_mm for part in result.parts)
    assert heights == pytest.approx([4, 6], abs=0.15)


def test_a_bare_part_has_no_tray_and_is_rested_by_its_smallest_extent() -> None:
    rng = np.random.default_rng(12)
    part = block(rng, 30, 20, 5, (0, 0))
    bottom = rng.uniform((-15, -10, 0), (15, 10, 0), (15000, 3))
    part = np.concatenate([part, bottom])
    axes = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    axes[:, 0] *= np.linalg.det(axes)
    cloud = cloud_of(part @ axes.T + 7, "unknown")
    assert "NO_TRAY" in codes(scene.separate(cloud))
    size = gauge.measure(scene.single(cloud.points))
    assert (size.length_mm, size.width_mm) == pytest.approx((30, 20), abs=0.3)
    assert size.height_mm == pytest.approx(5, abs=0.15)


def test_single_refuses_an_empty_cloud_with_the_count() -> None:
    with pytest.raises(ValueError, match="at least 10 finite points, got 0"):
        scene.single(np.full((20, 3), np.nan))


def test_same_cloud_gives_the_same_bytes() -> None:
    rng = np.random.default_rng(13)
    cloud = cloud_of(noisy(rng, tray(rng), block(rng, 20, 10, 6, (10, 0))))

    def run() -> PartCloud:
        return scene.separate(cloud).parts[0]

    first, second = run(), run()
    assert first.points.tobytes() == second.points.tobytes()
    assert first.tray_from_part.tobytes() == second.tray_from_part.tobytes()


def test_thin_clouds_keep_their_points() -> None:
    rng = np.random.default_rng(14)
    few = rng.uniform(0, 10, (300, 3)).astype(np.float32)
    assert solid(few, 0.05).sum() >= 150
    with pytest.raises(ValueError, match="at least one point"):
        align(np.zeros((0, 3), np.float32), PIXEL)


def test_a_hole_in_the_seen_tray_is_reported_because_a_black_part_may_lie_there() -> None:
    rng = np.random.default_rng(15)
    base = tray(rng)
    base = base[np.hypot(base[:, 0] - 20, base[:, 1]) > 6]
    result = scene.separate(cloud_of(noisy(rng, base, block(rng, 20, 10, 6, (-20, 0)))))
    assert codes(result) == {"UNSEEN_AREA"}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seen_tray", [0, 1])
def test_a_hole_around_which_no_tray_was_seen_is_no_area_of_the_tray(seen_tray: int) -> None:
    labels = np.zeros((80, 80), np.int32)
    seen = np.ones((80, 80), np.bool_)
    seen[30:50, 30:50] = False
    flat = np.zeros((80, 80), np.int64)
    flat[5, 5] = seen_tray  # far from the hole
    none = np.zeros_like(flat)
    grid = cells.Grid(np.zeros(1, np.int32), none, none, flat, seen, 0.4, (0.0, 0.0))
    assert cells.unseen_areas(labels, grid) == []
    around = replace(grid, flat=seen.astype(np.int64))
    assert cells.unseen_areas(labels, around) == [pytest.approx(400 * 0.4**2)]


@pytest.mark.parametrize("factor", [1000, 1e30])
def test_points_over_more_than_any_camera_sees_are_refused_at_once(factor: float) -> None:
    rng = np.random.default_rng(18)
    cloud = noisy(rng, tray(rng), block(rng, 20, 10, 6, (-20, 0)))
    result = scene.separate(cloud_of(cloud * np.float32(factor)))
    assert result.parts == ()
    (problem,) = result.problems
    assert (problem.code, problem.level) == ("CALIBRATION_MISMATCH", "ERROR")
    assert "check the unit" in problem.text


def test_share_of_the_outline_that_was_not_seen_is_measured() -> None:
    rng = np.random.default_rng(16)
    part = block(rng, 20, 20, 6, (0, 0))
    base = tray(rng)
    base = base[np.abs(base[:, :2]).max(axis=1) > 10]
    part = part[np.abs(part[:, :2]).max(axis=1) > 5]
    (hollow,) = scene.separate(cloud_of(noisy(rng, base, part))).parts
    assert hollow.unseen_share == pytest.approx(0.25, abs=0.06)


def test_noise_of_the_tray_under_an_overhang_is_not_the_foot_of_the_part() -> None:
    rng = np.random.default_rng(17)
    table_top = block(rng, 20, 20, 8, (0, 0))
    table_top = table_top[table_top[:, 2] > 6]
    leg = block(rng, 6, 6, 8, (0, 0))
    cloud = noisy(rng, tray(rng), table_top, leg)
    near = np.abs(cloud[:, 2]) < 1
    cloud[near, 2] += rng.normal(0, 0.3 * PIXEL, int(near.sum())).astype(np.float32)
    (part,) = scene.separate(cloud_of(cloud)).parts
    low = part.points[part.points[:, 2] < 1]
    outside = np.abs(low[:, :2]).max(axis=1) > 4
    assert len(low) > 100
    assert outside.mean() < 0.02
