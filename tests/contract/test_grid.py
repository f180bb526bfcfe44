"""The defect grid: construction, masks and boxes in paper and station mode, cell boxes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from forge_station.contract import lanczos
from forge_station.contract.error import ContractError
from forge_station.contract.grid import (
    EMPTY,
    DefectGrid,
    cell_box_mm,
    cell_box_px,
    coverage,
    from_boxes,
    from_boxes_paper,
    from_mask,
    from_mask_paper,
    from_response_paper,
)


def square(size: int, top: int, left: int, height: int, width: int) -> np.ndarray:
    mask = np.zeros((size, size), np.uint8)
    mask[top : top + height, left : left + width] = 1
    return mask


@pytest.mark.parametrize(
    "cells",
    [
        np.zeros((15, 16), bool),
        np.zeros((16, 16), np.uint8),
        np.zeros((16, 16, 1), bool),
        np.zeros(256, bool),
    ],
)
def test_anything_but_bool_16_by_16_is_refused(cells):
    with pytest.raises(ContractError, match="not a defect grid"):
        DefectGrid(cells)


@pytest.mark.parametrize("cell", [(-1, 0), (0, 16), (16, 0), (99, 99)])
def test_a_cell_outside_is_refused_not_wrapped(cell):
    with pytest.raises(ContractError, match="cell outside the grid"):
        DefectGrid.of([cell])


def test_a_major_cell_that_is_not_defective_is_refused():
    major = np.zeros((16, 16), bool)
    major[3, 3] = True
    with pytest.raises(ContractError, match="major"):
        DefectGrid(np.zeros((16, 16), bool), major)


def test_a_grid_is_a_value():
    source = np.zeros((16, 16), bool)
    grid = DefectGrid(source)
    source[0, 0] = True
    assert grid == EMPTY and hash(grid) == hash(EMPTY)
    with pytest.raises(ValueError, match="read-only"):
        grid.cells[0, 0] = True
    assert DefectGrid.of([(1, 2)]) != DefectGrid.of([(1, 2)], [(1, 2)])
    assert DefectGrid.of([(1, 2)]) | DefectGrid.of([], [(3, 4)]) == DefectGrid.of(
        [(1, 2)], [(3, 4)]
    )


def test_indices_and_columns_are_row_major_and_ascending():
    grid = DefectGrid.of([(4, 9), (4, 7), (2, 15)])
    assert grid.indices() == ((2, 15), (4, 7), (4, 9))
    assert grid.columns(4) == (7, 9) and grid.columns(0) == () and grid.count == 3


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.zeros((4, 4, 3)), "not a mask"),
        (np.zeros((0, 4)), "not a mask"),
        (np.full((4, 4), np.nan), "NaN"),
        (np.full((4, 4), np.inf), "NaN or infinity"),
        (np.full((4, 4), 256.0), "out of range"),
        (np.full((4, 4), -0.1), "out of range"),
    ],
)
@pytest.mark.parametrize("convert", [from_mask, from_mask_paper, coverage])
def test_a_malformed_mask_is_refused(convert, mask, message):
    with pytest.raises(ContractError, match=message):
        convert(mask)


class TestLanczos:
    """Figures that papers.md quotes for VIEScore2's mask -> grid, and Pillow itself."""

    @pytest.mark.parametrize(
        "shape",
        [(512, 512), (300, 512), (1000, 1000), (37, 100), (17, 20), (16, 99), (16, 16), (8, 9)],
    )
    def test_equals_pillow_to_the_bit(self, shape):
        rng = np.random.default_rng(7)
        grey = rng.integers(0, 256, shape, dtype=np.uint8)
        binary = ((rng.random(shape) > 0.8) * 255).astype(np.uint8)
        for image in (grey, binary):
            expected = np.asarray(Image.fromarray(image).resize((16, 16), Image.Resampling.LANCZOS))
            np.testing.assert_array_equal(lanczos.resize(image, (16, 16)), expected)

    def test_other_target_sizes_equal_pillow_too(self):
        image = np.random.default_rng(1).integers(0, 256, (60, 90), dtype=np.uint8)
        expected = np.asarray(Image.fromarray(image).resize((31, 44), Image.Resampling.LANCZOS))
        np.testing.assert_array_equal(lanczos.resize(image, (44, 31)), expected)

    @pytest.mark.parametrize(
        ("mask", "value", "share"),
        [
            (square(512, 160, 224, 32, 32), 0.745, 1.00),  # one fully covered cell
            (square(512, 160, 224, 24, 24), 0.455, 0.5625),  # 24 px square in a 32 px cell
            (square(512, 250, 0, 12, 512), 0.227, 0.1875),  # 12 px line over a cell border
        ],
    )
    def test_shrinks_small_areas_as_measured(self, mask, value, share):
        small = lanczos.resize(mask * 255, (16, 16)) / 255
        assert small.max() == pytest.approx(value, abs=0.002)
        assert coverage(mask).max() == pytest.approx(share)


class TestPaperMode:
    def test_a_covered_cell_stays_and_a_half_covered_one_vanishes(self):
        assert from_mask_paper(square(512, 160, 224, 32, 32)) == DefectGrid.of([(5, 7)])
        assert from_mask_paper(square(512, 160, 224, 24, 24)) == EMPTY

    def test_the_threshold_is_strict_and_lower_for_heatmaps(self):
        flat = np.full((32, 32), 0.5)  # uint8 127: 127 / 255 < 0.5
        assert from_mask_paper(flat) == EMPTY
        assert from_mask_paper(flat, kind="heatmap").count == 256

    def test_zero_one_masks_are_not_divided_by_255(self):
        assert from_mask_paper(square(64, 0, 0, 64, 64)).count == 256
        assert from_mask_paper(square(64, 0, 0, 64, 64) * 255).count == 256

    def test_a_lone_full_cell_is_never_major_by_lanczos_but_is_by_area(self):
        response = square(512, 160, 224, 32, 32).astype(float)
        assert from_response_paper(response) == DefectGrid.of([(5, 7)])
        assert from_response_paper(response, major="area") == DefectGrid.of([], [(5, 7)])

    def test_major_cells_need_a_strong_response(self):
        response = square(512, 64, 64, 256, 256) * 0.8
        assert from_response_paper(response).count == 64
        assert not from_response_paper(response).major.any()
        assert from_response_paper(square(512, 64, 64, 256, 256) * 1.0).major.sum() >= 36

    @pytest.mark.parametrize(
        "boxes",
        [[(120, 130, 300, 200)], [(0, 0, 1000, 1000)], [(3.7, 900.2, 70, 99)], [], [(5, 5, 9, 9)]],
    )
    def test_boxes_equal_pillows_drawing(self, boxes):
        image = Image.new("L", (1000, 1000))
        for x, y, width, height in boxes:
            ImageDraw.Draw(image).rectangle([x, y, x + width, y + height], fill=255)
        expected = np.asarray(image.resize((16, 16), Image.Resampling.LANCZOS)) > 127
        np.testing.assert_array_equal(from_boxes_paper(boxes).cells, expected)


class TestStationMode:
    def test_coverage_is_exact_for_sizes_that_16_does_not_divide(self):
        mask = np.zeros((10, 10))
        mask[:5] = 1
        shares = coverage(mask)
        assert shares[:8] == pytest.approx(np.ones((8, 16)))
        assert shares[8:] == pytest.approx(np.zeros((8, 16)))
        assert shares.mean() == pytest.approx(mask.mean())

    @given(st.integers(1, 70), st.integers(1, 70), st.integers(0, 2**32 - 1))
    def test_coverage_keeps_the_total(self, height, width, seed):
        mask = np.random.default_rng(seed).random((height, width)) > 0.6
        assert coverage(mask).mean() == pytest.approx(mask.mean())

    def test_more_than_a_tenth_marks_a_cell(self):
        assert from_mask(square(160, 0, 0, 2, 5)) == DefectGrid.of([(0, 0)])  # exactly 10 %: best
        two = square(160, 0, 0, 10, 10) | square(160, 40, 40, 2, 5)
        assert from_mask(two) == DefectGrid.of([(0, 0)])
        two = square(160, 0, 0, 10, 10) | square(160, 40, 40, 2, 6)
        assert from_mask(two) == DefectGrid.of([(0, 0), (4, 4)])

    def test_a_thin_crack_never_vanishes(self):
        crack = np.zeros((512, 512), bool)
        crack[100, 100:103] = True
        assert from_mask_paper(crack) == EMPTY
        assert from_mask(crack) == DefectGrid.of([(3, 3)])
        assert from_mask(crack, min_cells=4) == DefectGrid.of([(3, 3)]), "cells without any defect"

    def test_an_empty_mask_stays_empty(self):
        assert from_mask(np.zeros((40, 30), bool)) == EMPTY

    @given(st.integers(0, 2**32 - 1))
    def test_no_non_empty_mask_gives_an_empty_grid(self, seed):
        rng = np.random.default_rng(seed)
        mask = rng.random((rng.integers(1, 60), rng.integers(1, 60))) > rng.random()
        assert from_mask(mask).count > 0 or not mask.any()

    def test_boxes_mark_what_they_cover_and_at_least_one_cell(self):
        assert from_boxes([(32, 0, 64, 32)], (512, 512)) == DefectGrid.of([(0, 1)])
        assert from_boxes([(100, 100, 101, 101)], (512, 512)) == DefectGrid.of([(3, 3)])
        assert from_boxes([], (512, 512)) == EMPTY
        with pytest.raises(ContractError, match="empty box"):
            from_boxes([(10, 10, 10, 20)], (512, 512))


class TestBoxesOfCells:
    def test_pixels(self):
        assert cell_box_px(0, 0, (160, 320)) == (0, 0, 20, 10)
        assert cell_box_px(15, 15, (160, 320)) == (300, 150, 320, 160)

    def test_millimetres_count_down_from_the_top_left_corner(self):
        assert cell_box_mm(0, 0, (-8.0, 20.0), 2.0) == (-8.0, 18.0, -6.0, 20.0)
        assert cell_box_mm(15, 1, (-8.0, 20.0), 2.0) == (-6.0, -12.0, -4.0, -10.0)

    def test_a_cell_outside_is_refused(self):
        with pytest.raises(ContractError, match="cell outside"):
            cell_box_px(16, 0, (160, 320))
        with pytest.raises(ContractError, match="cell outside"):
            cell_box_mm(0, -1, (0.0, 0.0), 1.0)
