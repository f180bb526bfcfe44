"""Attribute agreement against golden figures, hand counts and statsmodels."""

from __future__ import annotations

import numpy as np
import pytest

from forge_station.assurance import agreement
from forge_station.assurance.agreement import Decision, Study, analyse, band, worst_band
from forge_station.assurance.error import AssuranceError

P, F, U = "PASS", "FAIL", "UNSURE"


def study(
    rows: list[tuple[Decision, tuple[Decision, ...]]],
    second: list[tuple[Decision, ...]] | None = None,
) -> Study:
    """Parts as (reference, decisions of the appraiser `a`); `second`: those of `b`."""
    parts = tuple(f"p{i:02}" for i in range(len(rows)))
    decisions = {"a": {part: own for part, (_, own) in zip(parts, rows, strict=True)}}
    if second is not None:
        decisions["b"] = dict(zip(parts, second, strict=True))
    truth = {part: reference for part, (reference, _) in zip(parts, rows, strict=True)}
    return Study(parts, len(rows[0][1]), decisions, truth)


def test_effectiveness_counts_every_trial_where_a_majority_would_hide_half_the_parts():
    """60 parts: 29 right three times, 26 right twice of three, 5 wrong.

    What some programs print as agreement with the reference is 91.7 %, the effectiveness 48.3 %.
    """
    rows = [(P, (P, P, P))] * 15 + [(F, (F, F, F))] * 14
    rows += [(P, (P, F, P))] * 13 + [(F, (F, F, P))] * 13
    rows += [(P, (F, F, P))] * 3 + [(F, (P, P, P))] * 2
    (own,) = analyse(study(rows)).appraisers
    assert own.effectiveness is not None and own.majority_right is not None
    assert own.effectiveness.share == pytest.approx(0.4833, abs=5e-5)
    assert own.majority_right.share == pytest.approx(0.9167, abs=5e-5)
    assert (own.within.count, own.within.of) == (31, 60)
    assert own.effectiveness.interval == pytest.approx((0.3523, 0.6161), abs=1e-4)
    assert worst_band(own) == "unacceptable"


def test_miss_and_false_alarm_have_their_own_denominators():
    rows = [(F, (P, F, F)), (F, (F, F, F)), (P, (F, U, P)), (P, (P, P, P)), (P, (U, U, U))]
    (own,) = analyse(study(rows)).appraisers
    assert own.miss == agreement.Rate(1, 6)
    assert own.missed_parts == agreement.Rate(1, 2)
    assert own.false_alarm == agreement.Rate(1, 9)
    assert own.unsure == agreement.Rate(4, 15)


def test_unsure_is_wrong_in_one_effectiveness_and_routed_in_the_other():
    rows = [(F, (U, F, F)), (P, (U, U, U)), (P, (P, P, P)), (P, (U, F, P))]
    (own,) = analyse(study(rows)).appraisers
    assert own.effectiveness == agreement.Rate(1, 4)
    assert own.effectiveness_routed == agreement.Rate(3, 4)


def test_cohens_kappa_is_that_of_a_table_computed_by_hand():
    """2x2: 20 both PASS, 5 and 10 apart, 15 both FAIL. Po .7, Pe .5, kappa .4."""
    left = [P] * 25 + [F] * 25
    right = [P] * 20 + [F] * 5 + [P] * 10 + [F] * 15
    rows = [(P, (item,)) for item in left]
    found = analyse(study(rows, [(item,) for item in right])).pairs["a", "b"]
    assert found.value == pytest.approx(0.4)
    assert found.agreement == pytest.approx(0.7)
    assert found.prevalence_adjusted == pytest.approx(0.4)


def test_kappa_and_its_interval_are_those_of_statsmodels():
    """Asymptotic there, jackknife here: single trials of 200 independent parts, so both apply."""
    rater = pytest.importorskip("statsmodels.stats.inter_rater")
    rng = np.random.default_rng(3)
    truth = rng.choice(3, 200, p=[0.5, 0.3, 0.2])
    noisy = [np.where(rng.random(200) < 0.8, truth, rng.choice(3, 200)) for _ in range(2)]
    table = np.zeros((3, 3))
    np.add.at(table, tuple(noisy), 1)
    expected = rater.cohens_kappa(table)
    names = agreement.DECISIONS
    rows = [(P, (names[i],)) for i in noisy[0]]
    found = analyse(study(rows, [(names[i],) for i in noisy[1]]))
    pair = found.pairs["a", "b"]
    assert pair.value == pytest.approx(expected.kappa)
    assert pair.interval is not None
    assert pair.interval == pytest.approx((expected.kappa_low, expected.kappa_upp), abs=0.01)
    counts = np.stack([(noisy[0] == k) * 1 + (noisy[1] == k) for k in range(3)], 1)
    assert found.between_kappa is not None
    assert found.between_kappa.value == pytest.approx(rater.fleiss_kappa(counts))


def test_three_perfect_appraisers_have_kappa_1_and_one_answer_for_all_has_none():
    perfect = analyse(study([(P, (P, P)), (F, (F, F)), (P, (P, P)), (F, (F, F))]))
    kappa = perfect.appraisers[0].reference_kappa
    assert kappa is not None and kappa.value == 1.0 and kappa.interval == (1.0, 1.0)
    assert worst_band(perfect.appraisers[0]) == "acceptable"
    same = analyse(study([(P, (P, P)), (P, (P, P)), (P, (P, P))]))
    assert same.appraisers[0].reference_kappa == agreement.Kappa(None, None, 1.0)


@pytest.mark.parametrize(
    ("value", "limits", "expected"),
    [
        (0.90, agreement.EFFECTIVENESS, "acceptable"),
        (0.80, agreement.EFFECTIVENESS, "marginal"),
        (0.7999, agreement.EFFECTIVENESS, "unacceptable"),
        (0.02, agreement.MISS, "acceptable"),
        (0.05, agreement.MISS, "marginal"),
        (0.0501, agreement.MISS, "unacceptable"),
        (0.10, agreement.FALSE_ALARM, "marginal"),
        (0.74, agreement.KAPPA, "marginal"),
        (None, agreement.KAPPA, None),
    ],
)
def test_the_limits_are_the_aiags(value, limits, expected):
    assert band(value, limits) == expected


def test_without_a_reference_there_is_agreement_but_no_effectiveness():
    found = analyse(Study(("p", "q"), 2, {"a": {"p": (P, P), "q": (F, P)}}, {}))
    assert found.appraisers[0].within == agreement.Rate(1, 2)
    assert found.appraisers[0].effectiveness is None and found.all_right is None


def test_a_missing_trial_is_named():
    with pytest.raises(AssuranceError, match=r"appraiser a, part q.*got 1 trials"):
        Study(("p", "q"), 2, {"a": {"p": (P, P), "q": (F,)}}, {})


def test_half_a_reference_is_refused():
    with pytest.raises(AssuranceError, match="part q"):
        Study(("p", "q"), 1, {"a": {"p": (P,), "q": (F,)}}, {"p": P})
