"""The log-odds that a part is defective, by hand: they sum what contradicts, and never saturate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from forge_station.checks import CERTAIN, MarksRead, defect_log_odds, violation_log_odds
from forge_station.contract import spec
from forge_station.contract.spec import Product, Reading
from forge_station.contract.verdict import PartReading

M8, M10, BOLT = "hex_nut M8", "hex_nut M10", "hex_bolt M8x30"


def score(
    product: Product,
    marks: Mapping[str, Mapping[str, float]],
    seen: Mapping[str, Mapping[str, float]] | None = None,
) -> float:
    """`marks`: mark -> part -> probability; `seen`: the same before the size was weighed in."""
    best = {mark: max(odds, key=lambda part: odds[part]) for mark, odds in marks.items()}
    parts = tuple(
        PartReading(mark, *part.split(" "), marks[mark][part]) for mark, part in best.items()
    )
    trunk: Any = None
    judgement = spec.evaluate(product, {p.mark: Reading(p.part, p.probability) for p in parts})
    return violation_log_odds(MarksRead(parts, trunk, seen or marks, marks), judgement)


def batch(count: int) -> Product:
    return Product("B", "batch", ("workpiece",), {M8: count})


def test_one_mark_is_the_odds_of_any_other_part():
    assert score(batch(1), {"A": {M8: 0.9, BOLT: 0.06, M10: 0.04}}) == pytest.approx(
        math.log(1 / 9)
    )


def test_marks_multiply():
    marks = {"A": {M8: 0.9, BOLT: 0.1}, "B": {M8: 0.8, M10: 0.2}}
    assert score(batch(2), marks) == pytest.approx(math.log(0.28 / 0.72))


def test_a_wrong_reading_counts_against_the_part_that_should_be_there():
    marks = {"A": {M10: 0.99, M8: 0.01}, "B": {M8: 1.0}}
    assert score(batch(2), marks) == pytest.approx(math.log(99))


@pytest.mark.parametrize("rest", [1e-17, 1e-60, 1e-250])
def test_it_does_not_saturate_where_a_probability_rounds_to_one(rest):
    assert score(batch(1), {"A": {M8: 1.0, BOLT: rest}}) == pytest.approx(math.log(rest))
    assert score(batch(1), {"A": {BOLT: 1.0, M8: rest}}) == pytest.approx(-math.log(rest))


def test_the_size_counts_within_a_workpiece_only():
    """The gauge may tell M8 from M10; that it is no bolt is the picture's word alone."""
    seen = {"A": {M8: 0.5, M10: 0.4, BOLT: 0.1}}
    weighed = {"A": {M8: 0.89, M10: 0.01, BOLT: 0.0}}
    assert score(batch(1), weighed, seen) == pytest.approx(math.log((0.01 + 0.1) / 0.89))


def test_a_swap_in_a_kit_is_the_odds_of_the_wrong_part():
    kit = Product("K", "assembly", ("assembly",), {M8: 1, BOLT: 1})
    marks = {"A": {M10: 0.7, M8: 0.3}, "B": {BOLT: 1.0}}
    assert score(kit, marks) == pytest.approx(math.log(7 / 3))


@pytest.mark.parametrize(
    ("product", "marks"),
    [
        (batch(3), {"A": {M8: 1.0}, "B": {M8: 1.0}}),
        (Product("K", "assembly", ("assembly",), {M8: 1, BOLT: 1}), {"A": {M8: 1.0}}),
        (Product("K", "assembly", ("assembly",), {M8: 2}), {mark: {M8: 1.0} for mark in "ABC"}),
        (Product("M", "batch", ("workpiece",)), {"A": {M8: 1.0}, "B": {BOLT: 1.0}}),
        (batch(1), {"A": {BOLT: 1.0, M8: 0.0}}),
    ],
)
def test_what_counting_tells_is_certain(product, marks):
    assert score(product, marks) == CERTAIN


def test_a_surface_by_hand():
    assert defect_log_odds({"normal": 0.9, "crack": 0.06, "dent": 0.04}) == pytest.approx(
        math.log(1 / 9)
    )
    assert defect_log_odds({"normal": 1.0, "crack": 1e-60}) == pytest.approx(math.log(1e-60))
    assert defect_log_odds({"normal": 1e-60, "crack": 1.0}) == pytest.approx(-math.log(1e-60))
    assert defect_log_odds({"normal": 1.0, "crack": 0.0}) == -CERTAIN
    assert defect_log_odds({"normal": 0.0, "crack": 1.0}) == CERTAIN
