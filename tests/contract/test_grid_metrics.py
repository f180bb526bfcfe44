"""IoU, Dice, pooled F1 and rank correlation against values computed by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_station.contract.grid import EMPTY, DefectGrid
from forge_station.contract.grid_metrics import dice, grid_figures, iou, rank_correlation

A, B, C, D = (0, 0), (0, 1), (5, 5), (15, 15)
AB, ABC, CD = DefectGrid.of([A, B]), DefectGrid.of([A, B, C]), DefectGrid.of([C, D])


@pytest.mark.parametrize(
    ("predicted", "truth", "expected"),
    [
        (None, AB, 0),
        (None, EMPTY, 0),
        (EMPTY, EMPTY, 1),
        (EMPTY, AB, 0),
        (AB, EMPTY, 0),
        (AB, AB, 1),
        (AB, ABC, 2 / 3),
        (ABC, CD, 1 / 4),
        (AB, CD, 0),
    ],
)
def test_iou(predicted, truth, expected):
    assert iou(predicted, truth) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("predicted", "truth", "beta", "expected"),
    [
        (None, EMPTY, 1, 0),
        (EMPTY, EMPTY, 1, 1),
        (EMPTY, AB, 1, 0),
        (AB, EMPTY, 1, 0),
        (AB, CD, 1, 0),
        (AB, ABC, 1, 4 / 5),  # TP 2, FN 1, FP 0: 2*2 / (2*2 + 1)
        (ABC, AB, 1, 4 / 5),
        (AB, ABC, 2, 10 / 14),  # 5*2 / (5*2 + 4*1 + 0)
        (ABC, AB, 2, 10 / 11),  # 5*2 / (5*2 + 0 + 1)
        # truth A major, B, C: hit A (2) and miss B, C (1 each): 2*2 / (2*2 + 2)
        (DefectGrid.of([A]), DefectGrid.of([B, C], [A]), 1, 4 / 6),
        # miss the major A (2), hit B, C: 2*2 / (2*2 + 2)
        (DefectGrid.of([B, C]), DefectGrid.of([B, C], [A]), 1, 4 / 6),
        # a major mark of the prediction counts for nothing
        (DefectGrid.of([], [A]), DefectGrid.of([A, B]), 1, 2 / 3),
    ],
)
def test_dice(predicted, truth, beta, expected):
    assert dice(predicted, truth, beta=beta) == pytest.approx(expected)


def test_without_extra_weight_dice_is_plain():
    truth = DefectGrid.of([B], [A])
    assert dice(DefectGrid.of([A]), truth, major_weight=1) == pytest.approx(2 / 3)


def test_figures_by_hand():
    figures = grid_figures(
        [
            (AB, ABC),  # tp 2 fn 1, IoU 2/3
            (CD, DefectGrid.of([C])),  # tp 1 fp 1, IoU 1/2
            (None, AB),  # fn 2, IoU 0
            (EMPTY, CD),  # fn 2, IoU 0: vanished
            (EMPTY, EMPTY),  # IoU 1, not in the headline
            (AB, EMPTY),  # fp 2: a clean alarm
        ]
    )
    assert figures.images == 6 and figures.non_empty == 4
    assert figures.iou == pytest.approx((2 / 3 + 1 / 2) / 4)
    assert figures.iou_all == pytest.approx((2 / 3 + 1 / 2 + 1) / 6)
    assert figures.precision == pytest.approx(3 / 6)
    assert figures.recall == pytest.approx(3 / 8)
    assert figures.f1 == pytest.approx(6 / (6 + 3 + 5))
    assert figures.clean_alarm_rate == pytest.approx(1 / 2)
    assert figures.vanish_rate == pytest.approx(2 / 4)
    assert figures.parse_rate == pytest.approx(5 / 6)


def test_unreadable_text_on_a_clean_image_is_an_alarm():
    figures = grid_figures([(None, EMPTY)])
    assert figures.clean_alarm_rate == 1 and figures.iou is None and figures.f1 == 1


def test_nothing_to_measure_is_none_not_zero():
    figures = grid_figures([])
    assert figures.iou is None and figures.clean_alarm_rate is None and figures.parse_rate is None


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 2, 3], [10, 20, 30], 1),
        ([1, 2, 3], [3, 2, 1], -1),
        ([1, 1, 2, 3], [1, 2, 3, 4], 0.9486832980505138),  # scipy.stats.spearmanr
        ([5, 5, 5, 7, 7], [1, 2, 3, 4, 5], 0.8660254037844386),
        ([4, 4], [1, 2], None),
        ([1], [1], None),
        ([], [], None),
    ],
)
def test_rank_correlation_averages_ties(first, second, expected):
    found = rank_correlation(first, second)
    assert found == (None if expected is None else pytest.approx(expected))


def test_rank_correlation_of_unequal_lengths_is_refused():
    with pytest.raises(ValueError, match="equally many"):
        rank_correlation([1, 2], [1])


cells = st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15)), max_size=40)
grids = st.builds(DefectGrid.of, cells, cells)


@given(grids, grids)
def test_measures_stay_in_range_and_agree_on_perfection(predicted, truth):
    assert 0 <= iou(predicted, truth) <= 1 and 0 <= dice(predicted, truth) <= 1
    assert (iou(predicted, truth) == 1) == (predicted.indices() == truth.indices())
    assert (dice(predicted, truth) == 1) == (predicted.indices() == truth.indices())
