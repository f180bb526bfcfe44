"""Every reward against values computed by hand, and the edge cases of the published recipe."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_station.contract.grid import DefectGrid
from forge_station.contract.grid_metrics import dice as contract_dice
from training import rewards
from training.rewards import PUBLISHED, Recipe, RewardError, parse, read_target


def cells(*filled: int, count: int = 8) -> np.ndarray:
    out = np.zeros(count, bool)
    out[list(filled)] = True
    return out


@pytest.mark.parametrize(
    ("predicted", "truth", "major", "beta", "expected"),
    [
        ((), (), (), 1, 1.0),  # both empty
        ((0,), (), (), 1, 0.0),  # a clean part with an alarm
        ((), (0,), (), 1, 0.0),  # nothing found
        ((3, 4), (0, 1), (), 1, 0.0),  # TP = 0, not 0 / 0
        ((0, 1), (0, 1), (), 1, 1.0),
        ((0, 1, 2), (0, 1), (), 1, 4 / 5),  # TP 2, FP 1
        ((0,), (0, 1), (), 1, 2 / 3),  # TP 1, FN 1
        ((0,), (0, 1), (0,), 1, 4 / 5),  # the hit weighs 2, the miss 1
        ((0,), (0, 1), (1,), 1, 2 / 4),  # the miss weighs 2
        ((0, 1, 2), (0, 1), (0, 1), 1, 8 / 9),  # a false cell weighs 1 always
        ((0,), (0, 1), (), 2, 5 / 9),  # b = 2: (5 * 1) / (5 * 1 + 4 * 1 + 0)
        ((0, 1, 2), (0, 1), (), 2, 10 / 11),
        ((0,), (0, 1), (), 0.5, 1.25 / 1.5),
    ],
)
def test_cell_dice(predicted, truth, major, beta, expected):
    recipe = Recipe(beta=beta, clean_cells=None)
    value = rewards.cell_dice(cells(*predicted), cells(*truth), recipe, cells(*major))
    assert value == pytest.approx(expected)


BITS = st.binary(min_size=32, max_size=32).map(
    lambda data: np.unpackbits(np.frombuffer(data, np.uint8)).astype(bool)
)


@given(BITS, BITS, BITS, st.floats(0.25, 4))
def test_on_one_grid_it_is_the_contracts_dice(predicted, truth, major, beta):
    major = major & truth
    found, there, worst = (m.reshape(16, 16) for m in (predicted, truth, major))
    expected = contract_dice(DefectGrid(found), DefectGrid(there, worst), beta=beta)
    value = rewards.cell_dice(predicted, truth, Recipe(beta=beta, clean_cells=None), major)
    assert value == pytest.approx(expected)


def test_many_rows_at_once_and_a_broadcast_truth():
    predicted = np.stack([cells(0), cells(0, 1), cells(), cells(5)])
    value = rewards.cell_dice(predicted, cells(0, 1))
    np.testing.assert_allclose(value, [2 / 3, 1, 0, 0])


@pytest.mark.parametrize(
    ("false", "k", "cost", "expected"),
    [
        (0, 4, 0.5, 1.0),
        (1, None, 0.0, 0.0),
        (1, 4, 0.0, 0.75),
        (3, 4, 0.0, 0.25),
        (4, 4, 0.0, 0.0),
        (7, 4, 0.0, 0.0),  # never below 0 by itself
        (1, 4, 0.5, 0.25),
        (7, 4, 0.5, -0.5),
        (1, None, 0.5, -0.5),
    ],
)
def test_false_alarms_on_clean_parts(false, k, cost, expected):
    recipe = Recipe(clean_cells=k, alarm_cost=cost)
    assert rewards.cell_dice(cells(*range(false)), cells(), recipe) == pytest.approx(expected)


def test_the_penalty_of_clean_parts_leaves_defective_ones_alone():
    harsh = Recipe(clean_cells=4, alarm_cost=1.0)
    assert rewards.cell_dice(cells(5), cells(0), harsh) == 0
    assert rewards.cell_dice(cells(0, 5), cells(0), harsh) == pytest.approx(2 / 3)


STATION = "class: dent\nscore: 4/10\nfront r5: 5,6\nside: none\ntop r1: 1\ntop r2: 1,2"


def test_a_perfect_answer_earns_everything():
    wanted = read_target(STATION)
    parts = rewards.rewards(STATION, wanted)
    assert parts == {"dice": 1.0, "score": 1.0, "format": 1.0, "choice": 1.0, "reading": None}
    assert rewards.total(parts) == pytest.approx(1.0 + 0.3 + 0.1 + 1.0)


def test_views_are_side_by_side_and_not_merged():
    answer = parse("class: cut\nscore: 6/10\nfront r5: 5\nside r5: 6\ntop: none")
    wanted = read_target(STATION)  # TP 1, FN 4, FP 1; merged into one picture it would be TP 2
    assert rewards.r_dice(answer, wanted) == pytest.approx(2 / (2 + 4 + 1))
    assert rewards.r_score(answer, wanted) == pytest.approx(0.8)
    assert rewards.r_choice(answer, wanted) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "class: dent\nscore: 4/10",  # no grid
        "front r5: 5,6\nside: none",  # a view is missing
        "front r5: 5,6\nside: none\ntop: none\nrear: none",  # a view nobody asked for
        "front r5: 5-6\nside: none\ntop: none",
        "front r5: 5,6\nside: none\ntop r1: 17",
        "front r5: 5,6\nfront: none\nside: none\ntop: none",
        "front r5: 5,6\nside: none\ntop: none\nand so on",
        "r5: 5,6",  # without the view's name
        "none of the cells is defective",  # a hole of the published parser
    ],
)
def test_an_unreadable_grid_earns_neither_dice_nor_format(text):
    wanted = read_target(STATION)
    assert rewards.r_dice(parse(text), wanted) == 0.0
    assert rewards.r_format(parse(text), wanted) == 0.0


def test_channels_are_merged_before_they_are_compared():
    wanted = read_target("artifact:\nr5: 8!,9\nmisalign:\nnone")
    swapped = parse("artifact:\nnone\nmisalign:\nr5: 8,9")
    assert rewards.r_dice(swapped, wanted) == 1.0
    half = parse("artifact:\nr5: 8\nmisalign:\nr6: 1")  # TP 2, FN 1, FP 1
    assert rewards.r_dice(half, wanted) == pytest.approx(4 / (4 + 1 + 1))


def test_published_holes_are_not_rewarded():
    wanted = read_target("r5: 8,9\nr6: 8")
    assert rewards.r_dice(parse("5: 8,9\n6: 8"), wanted) == 0.0
    assert rewards.r_dice(parse("r5: 8-9\nr6: 8"), wanted) == 0.0
    assert rewards.r_dice(parse("ratio 3:4"), wanted) == 0.0
    clean = read_target("none")
    assert rewards.r_dice(parse("none"), clean) == 1.0
    assert rewards.r_dice(parse("at 12:30 none"), clean) == 0.0


def test_two_axes_are_averaged_and_a_missing_one_is_0():
    wanted = read_target("pq: 4/10\nsc: 7/10")
    assert rewards.r_score(parse("pq: 5/10\nsc: 10/10"), wanted) == pytest.approx((0.9 + 0.7) / 2)
    assert rewards.r_score(parse("pq: 4/10"), wanted) == pytest.approx(0.5)
    assert rewards.r_score(parse("score: 4/10"), wanted) == 0.0
    assert rewards.r_format(parse("pq: 4/10"), wanted) == 0.0
    assert rewards.r_format(parse("pq: 0/10\nsc: 0/10"), wanted) == 1.0


@pytest.mark.parametrize("text", ["score: 11/10", "score: 4", "score: 4/10\nscore: 5/10", "4/10"])
def test_a_score_that_cannot_be_read_is_missing(text):
    assert rewards.r_score(parse(text), read_target("score: 4/10")) == 0.0


def test_a_malformed_score_does_not_cost_the_grid():
    wanted = read_target("score: 4/10\nr1: 1")
    answer = parse("score: many\nr1: 1")
    assert (rewards.r_dice(answer, wanted), rewards.r_score(answer, wanted)) == (1.0, 0.0)
    assert rewards.r_format(answer, wanted) == 1.0  # as published: a grid target asks for the grid


def test_what_is_not_labelled_is_not_clean():
    """`none` where only a score is known earns no Dice: a constant would reward an empty grid."""
    wanted = read_target("score: 4/10")
    empty, full = (rewards.rewards(f"score: 4/10\n{grid}", wanted) for grid in ("none", "r1: 1"))
    assert empty == full
    assert empty["dice"] is None and empty["choice"] is None and empty["reading"] is None
    assert rewards.total(empty) == pytest.approx(0.3 + 0.1)


def test_letters_missing_parts_and_verdicts_are_choices():
    wanted = read_target("A: right\nB: wrong\nanswer: B\nmissing: none")
    assert wanted.readings == {}
    answer = parse("A: right\nB: right\nanswer: B\nmissing: pin 4x20")
    assert rewards.r_choice(answer, wanted) == pytest.approx(2 / 4)
    assert rewards.r_format(answer, wanted) == 1.0
    assert rewards.r_format(parse("answer: B"), wanted) == 0.0


def test_a_letter_said_twice_differently_is_no_answer():
    wanted = read_target("answer: B")
    assert rewards.r_choice(parse("answer: A\nanswer: B"), wanted) == 0.0
    assert rewards.r_choice(parse("answer: B\nanswer: B"), wanted) == 1.0


def test_readings_are_half_workpiece_half_model_number():
    wanted = read_target("A: hex_bolt M8x30\nB: flat_washer M6")
    assert wanted.readings["A:"] == ("hex_bolt", "M8x30")

    def of(text: str) -> float | None:
        return rewards.r_reading(parse(text), wanted)

    assert of("A: hex_bolt M8x30\nB: flat_washer M6") == 1.0
    assert of("A: hex_bolt M8x35\nB: flat_washer M6") == 0.75  # workpiece right, number wrong
    assert of("A: pin M8x30\nB: flat_washer M8") == 0.5  # each half on its own
    assert of("A: hex_bolt M8x30") == 0.5  # a mark is missing
    assert of("A: hex_bolt M8x30\nB: flat_washer M6\nC: pin 4x20") == pytest.approx(2 / 3)
    assert of("") == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "artifact:\nr5: 8-9\nmisalign:\nnone",  # a header whose grid does not parse
        "artifact:\nr5: 8",  # a channel is missing
        "front r5: 5,\nside: none",
        "score: 11/10",
        "answer: A\nanswer: B",
        "class: dent\nlooks fine",
    ],
)
def test_a_target_that_cannot_be_read_is_refused(text):
    with pytest.raises(RewardError, match="target cannot be read"):
        read_target(text)


def test_settings_are_checked():
    for wrong in ({"dice": -1.0}, {"beta": 0.0}, {"clean_cells": 0.0}, {"alarm_cost": np.nan}):
        with pytest.raises(RewardError):
            Recipe(**wrong)
    assert list(Recipe().weights.values()) == [1.0, 0.3, 0.1, 1.0, 1.0]
    assert tuple(Recipe().weights) == rewards.COMPONENTS
    assert PUBLISHED.clean_cells is None


def test_functions_for_trl():
    recipe = Recipe(clean_cells=4, choice=0.5)
    functions, weights = rewards.trl_rewards(recipe)
    assert weights == [1.0, 0.3, 0.1, 0.5, 1.0]
    assert [function.__name__ for function in functions][:2] == ["dice_reward", "score_reward"]
    completions = [
        "r1: 1",
        [{"role": "assistant", "content": "score: 6/10\nr1: 1,2"}],
        "score: 4/10",
    ]
    columns = {"target": ["none", "score: 4/10\nr1: 1", "score: 4/10"], "prompts": ["", "", ""]}
    found = [function(completions=completions, **columns) for function in functions]
    assert found[0] == [0.75, pytest.approx(2 / 3), None]
    assert found[1] == [None, pytest.approx(0.8), 1.0]
    assert found[2] == [1.0, 1.0, 1.0]
    assert found[3] == found[4] == [None, None, None]
    with pytest.raises(RewardError):
        functions[0](completions=["none"], target=["r1: x"])
