"""Views of a cloud: axes, scale, holes, noise of the far side, and equal bytes on every run."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from forge_station.contract.views import AXES, VIEWS
from forge_station.geometry import render
from forge_station.geometry.render import View

Points = NDArray[np.float64]
CENTRE = (0.0, 0.0, 0.0)


def plate(step: float, half: float, height: float = 0.0) -> Points:
    """A square in the xy plane, points every `step` mm, that covers +-half."""
    line = np.arange(-half + step / 2, half, step)
    x, y = np.meshgrid(line, line)
    return np.column_stack([x.ravel(), y.ravel(), np.full(x.size, height)])


def box_surface(size: tuple[float, float, float], step: float) -> Points:
    """All six faces of a box that stands on z = 0, centred in x and y."""
    lines = [np.arange(step / 2, side, step) for side in size]
    faces = []
    for axis in range(3):
        one, two = (i for i in range(3) if i != axis)
        u, v = np.meshgrid(lines[one], lines[two])
        for level in (0.0, size[axis]):
            face = np.empty((u.size, 3))
            face[:, one], face[:, two], face[:, axis] = u.ravel(), v.ravel(), level
            faces.append(face)
    points = np.concatenate(faces)
    points[:, :2] -= np.array(size[:2]) / 2
    return points


def pixel_of(point: tuple[float, float, float], view: str) -> tuple[int, int]:
    """(row, column) of the only filled pixel of a view of one point, 1 mm a pixel, 21 x 21."""
    found = render.view_depth(np.array([point]), view, 1.0, (21, 21), CENTRE)
    ((row, column),) = np.argwhere(found.filled)
    return int(row), int(column)


def test_no_points_give_an_empty_view_and_black_channels():
    found = render.view_depth(np.zeros((0, 3)), "top", 1.0, (16, 16), CENTRE)
    assert not found.filled.any()
    assert not render.channels(found, 0.0).any()


def test_points_outside_the_image_are_left_out():
    found = render.view_depth(np.array([[50.0, 0, 0], [0, -50, 0]]), "top", 1.0, (21, 21), CENTRE)
    assert not found.filled.any()


@pytest.mark.parametrize(
    ("move", "front", "side", "top"),
    [  # (rows down, columns right) in each view
        ((5.0, 0.0, 0.0), (0, 5), (0, 0), (0, 5)),
        ((0.0, 5.0, 0.0), (0, 0), (0, 5), (-5, 0)),
        ((0.0, 0.0, 5.0), (-5, 0), (-5, 0), (0, 0)),
    ],
)
def test_a_moved_point_appears_where_the_axes_say(move, front, side, top):
    for view, expected in (("front", front), ("side", side), ("top", top)):
        row0, column0 = pixel_of(CENTRE, view)
        row, column = pixel_of(move, view)
        assert (row - row0, column - column0) == expected, view


@pytest.mark.parametrize(
    ("view", "near", "far"),
    [("front", (0, -3, 0), (0, 3, 0)), ("side", (3, 0, 0), (-3, 0, 0)), ("top", (0, 0, 3), CENTRE)],
)
def test_the_nearer_of_two_points_is_seen(view, near, far):
    found = render.view_depth(np.array([far, near], float), view, 1.0, (21, 21), CENTRE)
    axes = AXES[view]
    assert found.depth[found.filled].tolist() == [axes.sign * near[axes.towards]]


def test_a_pixel_holds_the_mean_of_its_front_points_only():
    points = np.array([[0.1, 0.1, 10.0], [0.2, 0.2, 9.0], [0.3, 0.3, 2.0]])
    found = render.view_depth(points, "top", 1.0, (9, 9), CENTRE)
    assert found.depth[found.filled].tolist() == [9.5]


def test_a_cube_of_20_mm_spans_the_same_pixels_in_all_views():
    points = box_surface((20.0, 20.0, 20.0), 0.4)
    for view in VIEWS:
        found = render.view_depth(points, view, 0.5, (60, 60), (0.0, 0.0, 10.0))
        rows, columns = found.filled.any(1).nonzero()[0], found.filled.any(0).nonzero()[0]
        assert (rows[0], rows[-1], columns[0], columns[-1]) == (10, 50, 10, 50), view
        assert found.filled.sum() >= 41 * 41 - 4, "both ends of 40 pixels; a corner may be empty"


def test_two_renderings_are_equal_to_the_byte():
    rng = np.random.default_rng(5)
    points = rng.normal(0, 6, (5000, 3)).astype(np.float32)
    for view in VIEWS:
        first, again = (
            render.channels(render.view_depth(points, view, 0.5, (64, 64), CENTRE), 0.0)
            for _ in range(2)
        )
        assert np.array_equal(first, again)


def test_a_round_hole_stays_a_hole():
    points = plate(0.25, 10.0)
    points = points[np.hypot(points[:, 0], points[:, 1]) > 3.0]
    found = render.view_depth(points, "top", 0.5, (60, 60), CENTRE)
    v, u = np.mgrid[-14.75:15:0.5, -14.75:15:0.5]
    assert not found.filled[np.hypot(u, v) < 2.0].any()
    assert found.filled[(np.hypot(u, v) > 4.0) & (np.maximum(abs(u), abs(v)) < 9.5)].all()


def test_pinholes_are_filled_with_the_depth_around_them():
    points = plate(0.5, 10.0, height=4.0)
    rng = np.random.default_rng(2)
    column, row = np.floor(points[:, 0] / 0.5), np.floor(points[:, 1] / 0.5)
    dropped = (column % 4 == 0) & (row % 3 == 0)  # single pixels, an eighth of all
    dropped |= rng.random(len(points)) < 0.1
    found = render.view_depth(points[~dropped], "top", 0.5, (60, 60), CENTRE)
    assert found.filled[11:49, 11:49].all()
    assert np.allclose(found.depth[found.filled], 4.0)


def test_a_straight_edge_does_not_grow():
    found = render.view_depth(plate(0.25, 10.0), "top", 0.5, (60, 60), CENTRE)
    rows, columns = np.nonzero(found.filled)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (10, 49, 10, 49)


def test_the_far_side_that_shines_through_is_dropped():
    """A thin top over a dense floor: floor pixels among the top must not be drawn."""
    rng = np.random.default_rng(3)
    floor = plate(0.25, 10.0, height=0.0)
    top = plate(0.5, 6.0, height=20.0)
    top = top[rng.random(len(top)) > 0.25]
    found = render.view_depth(np.concatenate([floor, top]), "top", 0.5, (60, 60), CENTRE)
    inside = found.depth[23:37, 23:37]
    assert np.isfinite(inside).all()
    assert inside.min() > 19.5
    assert np.nanmax(found.depth[11:16, 11:49]) < 1.0


def test_a_floor_beside_a_wall_is_kept():
    """Only pixels that are mostly surrounded by something nearer are dropped."""
    points = np.concatenate([plate(0.25, 10.0, 0.0), plate(0.25, 6.0, 20.0)])
    found = render.view_depth(points, "top", 0.5, (60, 60), CENTRE)
    assert found.filled[10:50, 10:50].mean() > 0.98


def test_mean_of_a_value_counts_seen_points_only():
    points = np.array([[0.2, 0.2, 5.0], [0.3, 0.3, 5.0], [0.2, 0.2, 0.0]])
    found = render.view_mean(points, np.array([1.0, 0.0, 1.0]), "top", 1.0, (9, 9), CENTRE)
    assert found[np.isfinite(found)].tolist() == [0.5]


def view_of(depth: NDArray[np.floating]) -> View:
    return View(depth.astype(np.float32), 1.0)


def test_background_is_black_and_surface_never_is():
    depth = np.full((40, 40), np.nan)
    depth[10:30, 10:30] = np.linspace(-200, 200, 20)
    view = view_of(depth)
    for image in (render.shade(view), render.relief(view), render.height(view, 0.0)):
        assert not image[~view.filled].any()
        assert image[view.filled].min() > 0


def test_light_comes_from_the_upper_left():
    """A dome: its upper left is brighter than its lower right, its top nearly as flat ground."""
    v, u = np.mgrid[-30:31, -30:31]
    dome = 0.02 * (900.0 - u * u - v * v)
    shaded = render.shade(view_of(dome)).astype(int)
    assert shaded[15, 15] > shaded[45, 45] + 10
    flat = render.shade(view_of(np.zeros((61, 61)))).astype(int)
    assert abs(shaded[30, 30] - flat[30, 30]) <= 2


def test_relief_shows_a_dent_that_shading_hides():
    v, u = np.mgrid[-112:112, -112:112]
    view = view_of(-0.8 * np.exp(-(u * u + v * v) / 200.0))
    raised, shaded = render.relief(view).astype(int), render.shade(view).astype(int)
    assert 128 - raised[112, 112] >= 5
    assert raised[5, 5] == 128
    assert abs(shaded[112, 112] - shaded[5, 5]) <= 2


def test_height_is_128_at_the_centre_and_one_level_is_a_two_hundredth_of_the_side():
    depth = np.array([[0.0, 5.0], [-5.0, np.nan]])
    found = render.height(View(depth.astype(np.float32), 5.0), 0.0)
    assert found.tolist() == [[128, 228], [28, 0]]


def test_channels_do_not_change_with_the_unit():
    """Metric in, scale out: a part ten times as large at ten times the scale looks the same."""
    points = box_surface((20.0, 14.0, 8.0), 0.25)
    small = render.view_depth(points, "front", 0.5, (48, 48), (0.0, 0.0, 4.0))
    large = render.view_depth(10 * points, "front", 5.0, (48, 48), (0.0, 0.0, 40.0))
    difference = render.channels(small, 0.0).astype(int) - render.channels(large, 0.0)
    assert np.abs(difference).max() <= 1
