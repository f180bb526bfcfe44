"""Limits from labelled parts alone: the ranks, to the part, and what they are expected to do."""

from __future__ import annotations

import math

import numpy as np
import pytest

from forge_station.checks import Thresholds
from tests.training.calibration import sets
from training.calibration import crossed
from training.calibration.error import CalibrationError
from training.evaluation.rows import Row

LIMITS = Thresholds(defect_fail=0.7, defect_unsure=0.5)
GOOD = tuple(round(0.01 * step, 2) for step in range(1, 11))
BAD = (0.9, 0.3, 0.2, 0.8, 0.4)


def parts(good=GOOD, bad=BAD, **changes) -> list[Row]:
    """Rows of these defect probabilities, judged with LIMITS; parts are b0, b1 .. and g0, g1 .."""
    return [
        sets.row(
            f"{kind}{number}", "surface", math.log(p / (1 - p)), kind == "b",
            outcome="FAIL" if p >= LIMITS.defect_fail else "PASS", **changes,
        )
        for kind, own in (("g", good), ("b", bad))
        for number, p in enumerate(own)
    ]  # fmt: skip


def chosen(rows: list[Row], passed=(), overkill: float = 0.02) -> crossed.Crossed:
    return crossed.choose(rows, LIMITS, passed=passed, overkill=overkill)


@pytest.mark.parametrize(
    ("passed", "unsure", "allowed"),
    [
        ((), 0.2, 0),  # the bundle in use let none through: none may lie below
        (("b1",), 0.2, 0),
        (("b1", "b4"), 0.3, 1),
        (("b0", "b1", "b2"), 0.4, 2),
        (("g1", "g2", "g3", "elsewhere"), 0.2, 0),  # good parts, and parts without a score
    ],
)
def test_one_defective_part_fewer_than_passed_before_may_lie_below_the_limit(
    passed, unsure, allowed
):
    found = chosen(parts(), passed)
    assert found.thresholds["defect_unsure"] == pytest.approx(unsure, abs=0.0011)
    assert found.allowed == allowed == found.chosen_on.escape.count
    assert found.escape == (allowed + 1) / 6


def test_the_limit_of_a_pass_is_never_above_the_recipe_s():
    found = chosen(parts(bad=(0.9, 0.8, 0.7, 0.6, 0.95)), ("b0", "b1", "b2"))
    assert found.thresholds["defect_unsure"] == LIMITS.defect_unsure


def test_no_more_good_parts_fail_than_asked_and_the_limit_of_a_fail_is_the_lowest_that_does_so():
    good = tuple(0.5 + 0.001 * step for step in range(100))
    found = chosen(parts(good=good), overkill=0.02)
    assert found.chosen_on.overkill.count == 2 and found.overkill == 3 / 101
    assert found.thresholds["defect_fail"] == pytest.approx(0.598, abs=0.0011)
    assert found.thresholds["defect_fail"] < LIMITS.defect_fail


def test_nothing_lies_between_the_limits_where_good_parts_score_low():
    assert chosen(parts()).thresholds == {"defect_fail": 0.2, "defect_unsure": 0.2}


def test_a_defective_part_that_another_check_stops_does_not_escape():
    rows = parts(bad=(0.9, 0.4, 0.8, 0.45))
    rows += [sets.row("b9", "surface", -5.0, True, outcome="UNSURE", reasons=("READING_UNSURE",))]
    found = chosen(rows)
    assert found.thresholds["defect_unsure"] == pytest.approx(0.4, abs=0.0011)
    assert found.chosen_on.escape.count == 0 and found.chosen_on.escape.of == 5


def test_parts_that_the_station_picked_choose_no_limit_of_a_pass():
    picked = [sets.row(f"h{n}", "surface", -5.0, True, provenance="harvested") for n in range(10)]
    own = parts(provenance="manual")
    assert chosen(own + picked, ("h0", "h1", "h2")) == chosen(own)
    with pytest.raises(CalibrationError, match="station stopped them"):
        chosen([row for row in own if row.expected == "PASS"] + picked)


@pytest.mark.parametrize(
    ("good", "bad", "got"),
    [((), (), "0 good, 0"), (GOOD, (), "10 good, 0"), (GOOD[:4], BAD, "4 good, 5"),
     (GOOD, BAD[:4], "10 good, 4")],
)  # fmt: skip
def test_too_few_parts_choose_nothing(good, bad, got):
    with pytest.raises(CalibrationError, match=got):
        chosen(parts(good, bad))


def test_new_parts_of_the_same_kind_escape_as_often_as_expected():
    """600 lines: 15 labelled defective parts choose, one more is judged."""
    rng = np.random.default_rng(5)
    escaped = []
    for _ in range(600):
        bad, new = rng.beta(5, 3, 15).tolist(), rng.beta(5, 3)
        found = chosen(parts(GOOD[:5], bad), ("b0", "b1", "b2"))
        escaped.append(new < found.thresholds["defect_unsure"])
    assert found.escape == 3 / 16
    assert np.mean(escaped) <= 3 / 16 + 3 * math.sqrt(3 / 16 * 13 / 16 / 600)


def test_what_is_told_names_the_parts_that_chose_and_proves_nothing():
    told = crossed.facts(chosen(parts(), ("b1", "b4")))
    assert told["expected"] == {"escape_at_most": 2 / 6, "overkill": 1 / 11}
    assert told["parts_that_chose"]["escape"]["count"] == 1
    assert told["defective_passed_before"] == 2 and told["defective_allowed_below"] == 1
    assert told["certificate"].startswith("none")
