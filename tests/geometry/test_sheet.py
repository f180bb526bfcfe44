"""The two pictures of the model: letters apart from parts, one scale, shuffled columns."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from forge_station.contract.views import AXES, LARGE_LAYOUT, MARKS, NANO_LAYOUT, VIEWS, Layout
from forge_station.geometry import render, sheet

Points = NDArray[np.float64]


def block(size: tuple[float, float, float], step: float | None = None) -> Points:
    """Top and sides of a box on z = 0 in its part frame, dense enough for every layout."""
    step = step or max(size) / 250
    lines = [np.arange(step / 2, side, step) for side in size]
    faces = []
    for axis in range(3):
        one, two = (i for i in range(3) if i != axis)
        u, v = np.meshgrid(lines[one], lines[two])
        for level in (0.0, size[axis]) if axis < 2 else (size[2],):
            face = np.empty((u.size, 3))
            face[:, one], face[:, two], face[:, axis] = u.ravel(), v.ravel(), level
            faces.append(face)
    points = np.concatenate(faces)
    points[:, :2] -= np.array(size[:2]) / 2
    return points


SIX = [
    block(size)
    for size in ((30, 13, 7), (14, 13, 6), (20, 20, 20), (9, 2, 2), (5, 5, 15), (24, 24, 1))
]


def cell_of(image: NDArray[np.uint8], row: int, column: int, layout: Layout) -> NDArray[np.uint8]:
    top, left = row * layout.cell, column * layout.cell
    return image[top : top + layout.cell, left : left + layout.cell]


def letter_of(mark: str, layout: Layout) -> NDArray[np.uint8]:
    """The strip of a cell that holds the letter alone."""
    blank = np.zeros((layout.cell, layout.cell, 3), np.uint8)
    sheet.draw_letter(blank, mark, 0, 0, layout)
    assert not blank[layout.strip :].any(), "a letter leaves its strip"
    return blank[: layout.strip]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ([0], "2 parts need as many distinct columns"),
        ([1, 1], "distinct"),
        ([0, 6], "fit"),
        ([-1, 0], "fit"),
    ],
)
def test_columns_that_do_not_fit_are_refused(columns, words):
    with pytest.raises(ValueError, match=words):
        sheet.marks_sheet(SIX[:2], columns, NANO_LAYOUT)


def test_no_part_and_too_many_parts_are_refused():
    with pytest.raises(ValueError, match=r"1\.\.6 parts fit, got 0"):
        sheet.marks_sheet([], [], NANO_LAYOUT)
    with pytest.raises(ValueError, match=r"1\.\.6 parts fit, got 7"):
        sheet.marks_sheet([*SIX, SIX[0]], list(range(7)), NANO_LAYOUT)


@pytest.mark.parametrize("layout", [NANO_LAYOUT, LARGE_LAYOUT])
def test_letters_never_sit_on_a_part(layout):
    columns = [3, 0, 5, 1, 4, 2]
    drawn = sheet.marks_sheet(SIX, columns, layout)
    for index, column in enumerate(columns):
        expected = letter_of(MARKS[index], layout)
        for row in range(3):
            cell = cell_of(drawn.image, row, column, layout)
            assert np.array_equal(cell[: layout.strip], expected)
            assert cell[layout.strip :].any()


@pytest.mark.parametrize("layout", [NANO_LAYOUT, LARGE_LAYOUT])
def test_every_cell_holds_its_own_part_only(layout):
    """Drawn alone at the same scale, a part gives exactly the pixels it has on the sheet."""
    columns = [3, 0, 5, 1, 4, 2]
    drawn = sheet.marks_sheet(SIX, columns, layout)
    assert drawn.column_of == dict(zip(MARKS, columns, strict=True))
    for index, points in enumerate(SIX):
        box = sheet.robust_box(points)
        for row, view in enumerate(VIEWS):
            size = (layout.cell - layout.strip, layout.cell)
            alone = render.view_depth(points, view, drawn.mm_per_px, size, box.centre)
            axes = AXES[view]
            expected = render.channels(alone, axes.sign * box.centre[axes.towards])
            cell = cell_of(drawn.image, row, columns[index], layout)
            assert np.array_equal(cell[layout.strip :], expected)


def test_empty_columns_are_black():
    drawn = sheet.marks_sheet(SIX[:2], [4, 1], NANO_LAYOUT)
    for column in (0, 2, 3, 5):
        assert not drawn.image[:, column * 56 : (column + 1) * 56].any()


@pytest.mark.parametrize("layout", [NANO_LAYOUT, LARGE_LAYOUT])
def test_no_part_is_cut_by_its_cell(layout):
    """The part is as large as its box says: nothing of it lies outside its field."""
    for points in SIX:
        drawn = sheet.marks_sheet([points], [0], layout)
        for row in range(3):
            field = cell_of(drawn.image, row, 0, layout)[layout.strip :, :, 0] > 0
            assert not field[:, [0, -1]].any()
            box, axes = sheet.robust_box(points), AXES[VIEWS[row]]
            for axis, across in ((axes.up, field.any(1)), (axes.right, field.any(0))):
                assert box.extent(axis) / drawn.mm_per_px <= across.sum()


def test_all_cells_share_one_scale():
    """A cube of 20 mm spans the same pixels in three views, beside a longer part too."""
    drawn = sheet.marks_sheet([block((20, 20, 20)), block((40, 10, 10))], [2, 0], NANO_LAYOUT)
    expected = 20 / drawn.mm_per_px
    for row in range(3):
        field = cell_of(drawn.image, row, 2, NANO_LAYOUT)[NANO_LAYOUT.strip :, :, 0] > 0
        spans = [int(field.any(axis).sum()) for axis in (0, 1)]
        assert spans[0] == spans[1]
        assert abs(spans[0] - expected) <= 1
    long = cell_of(drawn.image, 0, 0, NANO_LAYOUT)[NANO_LAYOUT.strip :, :, 0] > 0
    assert abs(int(long.any(0).sum()) - 2 * expected) <= 2


def test_scale_takes_few_values_and_is_never_finer_than_needed():
    """One of 20 steps a decade, so that scale carries size information without noise."""
    for length in (3.0, 17.2, 17.3, 44.0, 161.0):
        drawn = sheet.marks_sheet([block((length, 2, 2))], [0], NANO_LAYOUT)
        steps = 20 * np.log10(drawn.mm_per_px)
        assert abs(steps - round(steps)) < 1e-6
        assert 1.0 <= drawn.mm_per_px / (0.994 * length / 52) < 1.14


def test_the_same_clouds_give_the_same_bytes():
    for make in (
        lambda: sheet.marks_sheet(SIX, [3, 0, 5, 1, 4, 2], NANO_LAYOUT).image,
        lambda: sheet.surface_picture(SIX[0], NANO_LAYOUT)[0].image,
    ):
        assert np.array_equal(make(), make())


def test_flying_points_do_not_shrink_a_part():
    rng = np.random.default_rng(0)
    points = SIX[0]
    flying = rng.uniform((-60, -60, 0), (60, 60, 60), (len(points) // 1000, 3))
    plain = sheet.marks_sheet([points], [0], NANO_LAYOUT)
    dirty = sheet.marks_sheet([np.concatenate([points, flying])], [0], NANO_LAYOUT)
    assert dirty.mm_per_px == plain.mm_per_px


def test_the_box_of_a_part_stands_on_the_tray():
    """The underside is never seen: the lowest seen point is above it."""
    box = sheet.robust_box(block((20, 10, 6)) + np.array([0.0, 0.0, 3.0]))
    assert box.low[2] == 0.0
    assert box.high[2] == pytest.approx(9.0, abs=0.1)
    assert box.extent(0) == pytest.approx(20.0, rel=0.01)


@pytest.mark.parametrize("layout", [NANO_LAYOUT, LARGE_LAYOUT])
def test_surface_picture_fills_its_field_at_one_scale(layout):
    points = block((30, 20, 10))
    drawn, views = sheet.surface_picture(points, layout)
    assert drawn.image.shape == (*layout.surface_size, 3)
    assert list(views) == list(VIEWS)
    spans = {}
    for index, view in enumerate(VIEWS):
        panel = drawn.image[:, index * layout.panel : (index + 1) * layout.panel, 0] > 0
        spans[view] = panel.any(0).sum() * drawn.mm_per_px, panel.any(1).sum() * drawn.mm_per_px
        assert np.array_equal(panel, views[view].filled)
    two_px = 2 * drawn.mm_per_px
    assert spans["front"] == pytest.approx((30, 10), abs=two_px)
    assert spans["side"] == pytest.approx((20, 10), abs=two_px)
    assert spans["top"] == pytest.approx((30, 20), abs=two_px)
    assert 30 / drawn.mm_per_px > 0.9 * layout.panel


def test_a_point_of_the_surface_picture_can_be_placed_in_mm():
    """A notch at a known place appears at the pixel that centre and scale name."""
    points = block((30, 20, 10))
    notch = (np.abs(points[:, 0] - 9) < 2) & (np.abs(points[:, 1] + 4) < 2) & (points[:, 2] > 9.9)
    drawn, views = sheet.surface_picture(points[~notch], NANO_LAYOUT)
    half = NANO_LAYOUT.panel / 2
    column = int((9 - drawn.centre_mm[0]) / drawn.mm_per_px + half)
    row = int((drawn.centre_mm[1] + 4) / drawn.mm_per_px + half)
    assert not views["top"].filled[row, column]
    assert views["top"].filled[row, 2 * int(half) - column]


def test_letters_differ_in_many_pixels():
    letters = {mark: letter_of(mark, NANO_LAYOUT)[..., 0] > 0 for mark in MARKS}
    for one in MARKS:
        for other in MARKS:
            if one < other:
                assert (letters[one] != letters[other]).sum() >= 3, (one, other)
