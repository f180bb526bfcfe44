"""Explanation by rule: regions, positions, coverage words, and what must not be claimed."""

from __future__ import annotations

import numpy as np
import pytest

from forge_station.contract.explanation import describe, explain, explain_views, level, regions
from forge_station.contract.grid import EMPTY, DefectGrid
from forge_station.contract.grid_text import Answer


def block(top: int, left: int, height: int, width: int, major: int = 0) -> DefectGrid:
    """A filled rectangle, 0-based; its first `major` cells are major."""
    found = [(r, c) for r in range(top, top + height) for c in range(left, left + width)]
    return DefectGrid.of(found, found[:major])


def test_cells_that_touch_by_a_corner_are_two_regions():
    assert [region.cells for region in regions(DefectGrid.of([(2, 2), (3, 3)]))] == [1, 1]
    assert [region.cells for region in regions(DefectGrid.of([(2, 2), (2, 3), (3, 3)]))] == [3]


def test_regions_do_not_wrap_around_the_border():
    assert len(regions(DefectGrid.of([(4, 15), (5, 0)]))) == 2
    assert len(regions(DefectGrid.of([(0, 3), (15, 3)]))) == 2


def test_largest_first_and_equal_sizes_in_order_of_discovery():
    found = regions(DefectGrid.of([(0, 9), (4, 4), (4, 5), (9, 0)]))
    assert [(region.top, region.left) for region in found] == [(4, 4), (0, 9), (9, 0)]


def test_a_region_may_wind_around_a_hole():
    ring = block(3, 3, 5, 5).cells & ~block(4, 4, 3, 3).cells
    assert [region.cells for region in regions(DefectGrid(ring))] == [16]


@pytest.mark.parametrize(
    ("cell", "name"),
    [
        ((0, 0), "top left"),
        ((0, 7), "top centre"),
        ((0, 15), "top right"),
        ((7, 0), "middle left"),
        ((7, 7), "centre"),
        ((8, 15), "middle right"),
        ((15, 0), "bottom left"),
        ((15, 8), "bottom centre"),
        ((15, 15), "bottom right"),
        ((4, 7), "top centre"),  # 4/15 < 1/3
        ((5, 7), "centre"),  # 5/15 is not below 1/3
        ((10, 7), "centre"),  # 10/15 is not above 2/3
        ((11, 7), "bottom centre"),
    ],
)
def test_position_is_that_of_the_box_centre(cell, name):
    assert regions(DefectGrid.of([cell]))[0].position == name


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((12, 16), "the whole image"),  # 192 cells
        ((12, 15), "a large region at"),  # 180
        ((7, 13), "a large region at"),  # 91
        ((6, 14), "localized at centre"),  # 84 is not large
    ],
)
def test_size_words(shape, text):
    top, left = (16 - shape[0]) // 2, (16 - shape[1]) // 2
    assert text in describe(block(top, left, *shape))


def test_exactly_85_cells_are_large():
    cells = np.zeros((16, 16), bool)
    cells[2:7, 0:16] = True
    cells[7, 0:5] = True
    assert cells.sum() == 85
    assert "large region" in describe(DefectGrid(cells))
    cells[7, 4] = False
    assert "large region" not in describe(DefectGrid(cells))


@pytest.mark.parametrize(
    ("major", "word"), [(0, "localized"), (1, "substantial"), (2, "substantial"), (3, "extensive")]
)
def test_coverage_word_is_the_share_of_major_cells(major, word):
    assert describe(block(4, 7, 2, 2, major)).startswith(word)


def test_at_most_three_regions_are_described():
    cells = [(0, 0), (0, 2), (0, 4), (0, 6), (0, 8)]
    text = describe(DefectGrid.of(cells))
    assert text.count("localized") == 3 and text.endswith("plus 2 smaller regions")
    assert describe(DefectGrid.of(cells[:4])).endswith("plus 1 smaller region")
    assert "plus" not in describe(DefectGrid.of(cells[:3]))


def test_the_anchor_is_one_based():
    assert describe(block(4, 7, 2, 3)) == "localized at top centre (rows 5-6, columns 8-10)"


@pytest.mark.parametrize(
    ("score", "word"), [(10, "high"), (8, "high"), (7.9, "moderate"), (5, "moderate"), (4.9, "low")]
)
def test_levels(score, word):
    assert level(score) == word


class TestChannels:
    def test_each_score_is_linked_to_its_own_channel(self):
        answer = Answer(
            {"pq": 4, "sc": 9}, None, {"artifact": block(4, 7, 2, 3), "misalign": EMPTY}
        )
        assert explain(answer) == (
            "Surface condition 4/10 (low), driven by a surface defect: "
            "localized at top centre (rows 5-6, columns 8-10). "
            "Conformity 9/10 (high); no mismatch is marked."
        )

    def test_a_high_score_with_cells_is_said_to_contradict(self):
        answer = Answer({"pq": 8}, None, {"artifact": block(0, 0, 1, 1), "misalign": EMPTY})
        assert "8/10 (high), the grid nevertheless flags a surface defect" in explain(answer)

    def test_without_scores_the_grid_speaks_alone(self):
        answer = Answer({}, None, {"artifact": block(0, 0, 1, 1), "misalign": EMPTY})
        assert explain(answer).startswith("The grid marks a surface defect: localized at top left")


class TestFlatGrid:
    """The published rule claims "no misalignment" for a channel that was never asked for."""

    @pytest.mark.parametrize("sc", [8, 9, 10])
    @pytest.mark.parametrize("grid", [EMPTY, block(3, 3, 2, 2)])
    def test_says_nothing_of_channels_not_asked_for(self, sc, grid):
        text = explain(Answer({"pq": 3, "sc": sc}, grid)).lower()
        assert "no mismatch" not in text and "misalign" not in text and "surface defect" not in text
        assert f"conformity {sc}/10 (high)" in text

    def test_is_linked_to_the_lowest_score(self):
        text = explain(Answer({"pq": 3, "sc": 9}, block(3, 3, 2, 2)))
        assert "driven by a defect: localized" in text

    def test_empty_grid_and_no_score(self):
        assert explain(Answer({}, EMPTY)) == "No defect is marked."

    def test_unreadable_grid_is_not_called_clean(self):
        assert explain(Answer({"score": 4}, None)) == "Overall 4/10 (low)."
        assert explain(Answer({}, None)) == ""


def test_views_name_each_view_with_cells():
    text = explain_views(
        4, {"front": block(4, 7, 2, 3), "side": EMPTY, "top": block(0, 0, 1, 1)}, "surface"
    )
    assert text == (
        "surface 4/10 (low), driven by a defect: "
        "front: localized at top centre (rows 5-6, columns 8-10) | "
        "top: localized at top left (rows 1-1, columns 1-1)."
    )


def test_views_without_cells_name_what_was_looked_at():
    text = explain_views(9, {"front": EMPTY, "top": EMPTY}, "surface")
    assert text == "surface 9/10 (high); no cell is marked in front, top."
    assert explain_views(9, {}, "surface") == "surface 9/10 (high); no cell is marked in any view."
