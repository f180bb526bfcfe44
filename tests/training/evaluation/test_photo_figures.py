"""Figures of photo lines against values worked out by hand."""

from __future__ import annotations

import pytest

from training.evaluation.photo_figures import (
    PlacesAnswer,
    SurfaceAnswer,
    places_figures,
    surface_figures,
)


def answer(name, truth, normal, crack, dent, cells=(), true=()):
    odds = {"normal": normal, "crack": crack, "dent": dent}
    return SurfaceAnswer(name, name[0], truth, odds, frozenset(cells), frozenset(true))


ANSWERS = [
    answer("a1", "normal", 0.8, 0.1, 0.1),
    answer("a2", "normal", 0.3, 0.6, 0.1, cells=[(0, 0)]),
    answer("b1", "crack", 0.2, 0.7, 0.1, cells=[(1, 1), (1, 2)], true=[(1, 1)]),
    answer("b2", "dent", 0.6, 0.3, 0.1, cells=[], true=[(2, 2)]),
    answer("c1", "dent", 0.1, 0.2, 0.7, cells=[(3, 3)], true=[(3, 3)]),
]


def test_figures_by_hand():
    figures = surface_figures(ANSWERS)
    value = {name: item["value"] for name, item in figures.items() if isinstance(item, dict)}
    # P(defect): normal .2 .7; defective .8 .4 .9: 5 of 6 pairs in order.
    assert value["auroc"] == pytest.approx(5 / 6, abs=1e-4)
    assert value["class_accuracy"] == pytest.approx(3 / 5)
    assert value["defect_class_accuracy"] == pytest.approx(2 / 3, abs=1e-4)
    assert value["f1_normal"] == pytest.approx(2 / 4)
    assert value["f1_crack"] == pytest.approx(2 / 3, abs=1e-4)
    assert value["f1_dent"] == pytest.approx(2 / 3, abs=1e-4)
    assert value["grid_iou"] == pytest.approx((1 / 2 + 0 + 1) / 3)
    assert value["grid_f1"] == pytest.approx(2 * 2 / (4 + 3), abs=1e-4)
    assert value["clean_alarms"] == pytest.approx(1 / 2)
    assert value["defects_found"] == pytest.approx(2 / 3, abs=1e-4)
    assert value["grid_clean_alarms"] == pytest.approx(1 / 2)
    assert figures["grid_iou"]["n"] == 3
    assert figures["groups"] == 3
    assert all(figures[name]["low"] <= value[name] <= figures[name]["high"] for name in value)


def test_ties_count_half():
    same = [answer(f"{n}1", truth, 0.5, 0.3, 0.2) for n, truth in enumerate(("normal", "crack"))]
    assert surface_figures(same)["auroc"]["value"] == 0.5


def test_the_interval_resamples_whole_groups():
    """Ten copies of one picture carry no more than one picture."""
    one = [answer(f"{i}", "normal", 0.9 if i % 2 else 0.1, 0.05, 0.05) for i in range(6)]
    copies = [answer(f"{i}{n}", *a) for n in range(10) for i, a in enumerate(
        [("normal", 0.9 if i % 2 else 0.1, 0.05, 0.05) for i in range(6)])]  # fmt: skip
    few, many = surface_figures(one)["clean_alarms"], surface_figures(copies)["clean_alarms"]
    assert (few["low"], few["high"]) == (many["low"], many["high"])
    assert many["n"] == 60


def test_places_by_hand():
    truth = {"A": "screw", "B": "none"}
    full = {"A": "screw", "B": "screw"}
    answers = [
        PlacesAnswer("1", truth, truth),
        PlacesAnswer("2", {"A": "none", "B": "screw"}, truth),
        PlacesAnswer("3", full, truth),
        PlacesAnswer("4", full, full),
    ]
    figures = places_figures(answers)
    assert figures["exact_set"]["value"] == 0.5
    assert figures["place"]["value"] == pytest.approx(5 / 8)
    assert figures["missing_part_decision"]["value"] == 0.75, "wrong only where none is read"
    assert figures["exact_set"]["n"] == 4
