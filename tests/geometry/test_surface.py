"""The first and the closer look at a surface."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from forge_station.contract.catalogue import by_id
from forge_station.contract.views import NANO_LAYOUT, VIEWS
from forge_station.geometry import surface
from forge_station.geometry.reference import Reference
from forge_station.sim import fasteners, references, rest_pose

SIDE = NANO_LAYOUT.panel


@pytest.fixture(scope="module")
def points() -> np.ndarray:
    mesh = fasteners.build(by_id("hex_nut M10"))
    low = min(rest_pose.rest_poses(mesh), key=lambda p: mesh.transformed(p.rotation).extents()[2])
    return references.clean_scan(rest_pose.settle(mesh.transformed(low.rotation)))


@pytest.fixture(scope="module")
def known() -> Reference:
    return references.cad_reference(fasteners.build(by_id("hex_nut M10")))


def test_the_difference_is_the_third_channel(points: np.ndarray, known: Reference) -> None:
    plain = surface.look(points, NANO_LAYOUT, height=True).picture.image
    compared = surface.look(points, NANO_LAYOUT, known).picture.image
    assert np.array_equal(compared[..., :2], plain[..., :2])
    assert abs(float(np.median(compared[..., 2][plain[..., 0] > 0])) - 128) < 4
    assert plain[..., 2].any()
    blank = surface.look(points, NANO_LAYOUT)
    assert blank.fit is None and not blank.picture.image[..., 2].any()
    again = surface.look(points, NANO_LAYOUT, known).picture.image
    assert np.array_equal(again, compared)


@pytest.mark.parametrize("window", [(0, 0), (4, 4), (8, 3)])
def test_a_closer_look_is_the_window_at_twice_the_scale(
    points: np.ndarray, known: Reference, window: surface.Window
) -> None:
    """Outline and difference of the window, shrunk again, are those of the first look."""
    first = surface.look(points, NANO_LAYOUT, known)
    closer, views = first.closer(dict.fromkeys(VIEWS, window))
    assert closer.mm_per_px == first.picture.mm_per_px / 2
    top, left = (at * SIDE // 16 for at in window)
    for index, name in enumerate(VIEWS):
        panel = first.picture.image[:, index * SIDE : (index + 1) * SIDE]
        part = panel[top : top + SIDE // 2, left : left + SIDE // 2]
        shrunk = cv2.resize(
            closer.image[:, index * SIDE : (index + 1) * SIDE],
            (SIDE // 2, SIDE // 2),
            interpolation=cv2.INTER_AREA,
        )
        filled = views[name].filled.reshape(SIDE // 2, 2, SIDE // 2, 2).mean((1, 3))
        assert np.mean((part[..., 0] > 0) != (filled > 0.5)) < 0.04
        inside = (part[..., 2] > 40) & (part[..., 2] < 250) & (filled == 1)
        # twice the grey levels: the same distance is two of the smaller pixels
        off = shrunk[..., 2][inside].astype(float) - 128 - 2 * (part[..., 2][inside] - 128.0)
        if inside.sum() > 100:
            assert abs(float(np.median(off))) < 6


def test_the_window_is_laid_over_what_is_suspicious() -> None:
    cells = np.zeros((3, 16, 16))
    cells[0, 2, 13] = 0.9
    cells[1, 9:11, 4:6] = 0.5
    found = surface.suspicious(cells)
    assert found["front"] == (0, 8)  # the window cannot leave the view
    row, column = found["side"]
    assert row <= 9 and row + 8 >= 11 and column <= 4 and column + 8 >= 6
    assert abs(row - 5) <= 1 and abs(column - 0) <= 1
    assert found["top"] == (4, 4)
