"""Temperatures and limits: recovered from known distributions, refused where parts are too few."""

from __future__ import annotations

import numpy as np
import pytest

from forge_station.checks import CERTAIN
from forge_station.contract import binomial
from tests.training.calibration.sets import row, rows
from training.calibration import limits, parts, temperature
from training.calibration.error import CalibrationError
from training.calibration.limits import Target

ONE = {"surface": 1.0}


@pytest.mark.parametrize("heat", [0.5, 1.0, 2.0])
def test_the_temperature_is_recovered_within_five_percent(heat):
    given = rows(2500, 2500, gap=4.0)
    scaled = [
        row(r.id, "surface", r.log_odds["surface"] * heat, r.expected == "FAIL") for r in given
    ]
    fit = temperature.fit(parts.gather(scaled, None).parts, "surface")
    assert fit.temperature == pytest.approx(heat, rel=0.05)
    assert fit.parts == 5000 and not fit.note
    assert fit.nll_after <= fit.nll_before


def test_no_temperature_where_nothing_tells_it():
    apart = [row(f"g{n}", "surface", -5.0, False) for n in range(30)]
    apart += [row(f"b{n}", "surface", 5.0, True) for n in range(30)]
    fit = temperature.fit(parts.gather(apart, None).parts, "surface")
    assert (fit.temperature, bool(fit.note)) == (1.0, True)
    few = temperature.fit(parts.gather(rows(19, 100), None).parts, "surface")
    assert few.temperature == 1.0 and "fewer than 20" in few.note
    counted = [row(f"c{n}", "surface", CERTAIN, True) for n in range(50)]
    told = temperature.fit(parts.gather([*rows(200, 200), *counted], None).parts, "surface")
    assert told.parts == 400, "what is certain by count tells nothing of probabilities"


def test_nll_by_hand():
    found = temperature.nll(np.array([0.0, 2.0]), np.array([True, False]), 2.0)
    assert found == pytest.approx((np.log(2) + np.log(1 + np.e)) / 2)


def test_the_limit_is_the_order_statistic_and_ties_do_not_pass():
    values = [-5.0, -4.0, -4.0, -3.0, -2.0, *np.linspace(-1, -0.5, 768)]
    given = [row(f"b{n}", "surface", float(v), True) for n, v in enumerate(values)]
    given += [row(f"g{n}", "surface", -6.0 + 0.01 * n, False) for n in range(600)]
    target = Target(0.01, 0.95, 0.02)
    delta = binomial.look_delta(0.05, 1)
    rank = binomial.rank(773, 0.01, delta)
    found = limits.choose(parts.gather(given, None), target, 1, ONE)
    assert rank == 3 and found.limit_pass == -4.0
    (claim,) = found.claims
    assert (claim.escapes, claim.rank, claim.defective) == (1, 3, 773), "ties are UNSURE"
    assert claim.upper == pytest.approx(binomial.upper(2, 773, delta)) and claim.upper <= 0.01
    assert found.overkill.count == 0 and found.unsure.count == 400
    assert found.limit_fail == pytest.approx(-6.0 + 0.01 * (600 - binomial.rank(600, 0.02, 0.05)))


def test_a_temperature_of_one_check_changes_no_decision():
    found = parts.gather(rows(300, 700), None)
    target = Target(0.01, 0.95, 0.02)
    limit = {t: limits.choose(found, target, 1, {"surface": t}).limit_pass for t in (0.5, 1.0, 3.0)}
    passed = {
        t: {part.id for part in found.parts if part.reach({"surface": t}) < limit[t]} for t in limit
    }
    assert passed[0.5] == passed[1.0] == passed[3.0] and passed[1.0]


def test_what_the_checks_stop_need_not_be_stopped_by_the_limit():
    given = [row(f"b{n}", "surface", 5.0, True) for n in range(400)]
    given += [row(f"g{n}", "surface", -1.0, False) for n in range(100)]
    found = limits.choose(parts.gather(given, None), Target(0.01, 0.95, 0.02), 1, ONE)
    assert found.limit_pass == CERTAIN and found.claims[0].escapes == 0
    assert found.unsure.count == 0
    assert found.limit_fail is None, "100 good parts tell nothing of 2 %"


@pytest.mark.parametrize(("bad", "ok"), [(347, False), (348, True)])
def test_a_claim_that_the_parts_cannot_carry_is_refused_with_the_number_that_could(bad, ok):
    found = parts.gather(rows(10, bad), None)
    if ok:
        assert limits.require(found, Target(0.01, 0.95, 0.02), 1) == {("surface",): 1}
        return
    with pytest.raises(CalibrationError) as caught:
        limits.require(found, Target(0.01, 0.95, 0.02), 1)
    text = str(caught.value)
    for words in ("expected 348 distinct defective parts", "surface: 347", "carry escape <= 0.01"):
        assert words in text


def test_each_check_carries_the_claim_unless_the_mix_is_claimed():
    found = parts.gather([*rows(10, 300), *rows(10, 300, "workpiece")], None)
    with pytest.raises(CalibrationError, match="417 distinct defective parts of each check"):
        limits.require(found, Target(0.01, 0.95, 0.02), 1)
    together = Target(0.01, 0.95, 0.02, together=True)
    assert limits.require(found, together, 1) == {("surface", "workpiece"): 2}
    each = limits.choose(found, Target(0.02, 0.95, 0.02), 1, ONE)
    assert each.limit_pass == min(claim.limit for claim in each.claims)
    assert sum(claim.delta for claim in each.claims) == pytest.approx(binomial.look_delta(0.05, 1))


def test_a_set_without_defective_parts_is_refused():
    with pytest.raises(CalibrationError, match="surface: 0"):
        limits.require(parts.gather(rows(500, 0), None), Target(0.01, 0.95, 0.02), 1)


def test_the_curve_counts_strictly_below_each_limit():
    given = [row(f"b{n}", "surface", v, True) for n, v in enumerate((-3.0, -1.0, 2.0))]
    given += [row(f"g{n}", "surface", v, False) for n, v in enumerate((-4.0, -1.0))]
    values, escaped, held = limits.curve(parts.gather(given, None), ONE)
    assert values == [-4.0, -3.0, -1.0, CERTAIN]
    assert escaped == [0.0, 0.0, pytest.approx(1 / 3), pytest.approx(2 / 3)]
    assert held == [1.0, 0.5, 0.5, 0.0]


def test_the_strictest_rule_is_kept():
    given = [*rows(1, 1), *rows(1, 1, seed=1, rules={"min_reading_probability": 0.8})]
    assert limits.strictest_rules(parts.gather(given, None)) == {"min_reading_probability": 0.8}
