"""Gauge R&R against the AIAG's printed example, bias and linearity against scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from forge_station.assurance import gauge_study
from forge_station.assurance.error import AssuranceError
from forge_station.assurance.gauge_study import Study

# AIAG, MSA 4th edition: 10 parts, appraisers A, B, C, three trials each; deviations.
AIAG = """
 0.29 -0.56 1.34 0.47 -0.80  0.02 0.59 -0.31 2.26 -1.36
 0.41 -0.68 1.17 0.50 -0.92 -0.11 0.75 -0.20 1.99 -1.25
 0.64 -0.58 1.27 0.64 -0.84 -0.21 0.66 -0.17 2.01 -1.31
 0.08 -0.47 1.19 0.01 -0.56 -0.20 0.47 -0.63 1.80 -1.68
 0.25 -1.22 0.94 1.03 -1.20  0.22 0.55  0.08 2.12 -1.62
 0.07 -0.68 1.34 0.20 -1.28  0.06 0.83 -0.34 2.19 -1.50
 0.04 -1.38 0.88 0.14 -1.46 -0.29 0.02 -0.46 1.77 -1.49
-0.11 -1.13 1.09 0.20 -1.07 -0.67 0.01 -0.56 1.45 -1.77
-0.15 -0.96 0.67 0.11 -1.45 -0.49 0.21 -0.49 1.87 -2.16
"""


def aiag() -> Study:
    rows = np.array([line.split() for line in AIAG.strip().splitlines()], float)
    values = rows.reshape(3, 3, 10).transpose(2, 0, 1)
    return Study(tuple(f"{i + 1:02}" for i in range(10)), ("A", "B", "C"), values)


def test_the_analysis_of_variance_is_that_of_the_aiags_example():
    found = gauge_study.by_variance(aiag())
    interaction = next(item for item in found.table if item.name == "part x appraiser")
    assert interaction.f == pytest.approx(0.434, abs=5e-4)
    assert interaction.p == pytest.approx(0.974, abs=5e-4)
    assert found.pooled and found.interaction == 0.0
    assert found.repeatability == pytest.approx(0.19993, abs=5e-6)
    assert found.reproducibility == pytest.approx(0.22684, abs=5e-6)
    assert found.grr == pytest.approx(0.30237, abs=5e-6)
    assert found.part == pytest.approx(1.04233, abs=5e-6)
    assert found.total == pytest.approx(1.08530, abs=5e-6)
    assert round(found.percent, 2) == 27.86
    assert found.categories == 4
    assert found.decision == "marginal"


def test_average_and_range_is_that_of_the_aiags_example():
    """Printed: EV 0.20188, AV 0.22963, GRR 0.30575, PV 1.10456, TV 1.14610, 26.68 %, ndc 5."""
    found = gauge_study.by_range(aiag())
    assert found.repeatability == pytest.approx(0.20188, rel=5e-4)
    assert found.reproducibility == pytest.approx(0.22963, rel=5e-4)
    assert found.grr == pytest.approx(0.30575, rel=5e-4)
    assert found.part == pytest.approx(1.10456, rel=5e-4)
    assert found.percent == pytest.approx(26.68, abs=0.02)
    assert found.categories == 5


def test_the_tolerance_has_its_own_percentage():
    found = gauge_study.by_variance(aiag())
    assert found.percent_of(6.0) == pytest.approx(100 * found.grr)


def test_components_that_were_put_in_come_out():
    """400 parts of deviation 1, ten operators of 0.3, interaction 0.2, repeatability 0.1."""
    rng = np.random.default_rng(1)
    values = (
        rng.normal(0, 1.0, (400, 1, 1))
        + rng.normal(0, 0.3, (1, 10, 1))
        + rng.normal(0, 0.2, (400, 10, 1))
        + rng.normal(0, 0.1, (400, 10, 3))
    )
    study = Study(tuple(map(str, range(400))), tuple("abcdefghij"), values)
    found = gauge_study.by_variance(study)
    assert not found.pooled
    assert found.repeatability == pytest.approx(0.1, rel=0.02)
    assert found.interaction == pytest.approx(0.2, rel=0.03)
    assert found.part == pytest.approx(float(values.mean((1, 2)).std(ddof=1)), rel=0.02)
    spread = float(values.mean((0, 2)).std(ddof=1))
    assert found.reproducibility == pytest.approx(spread, rel=0.05)


def test_one_appraiser_has_no_reproducibility():
    study = aiag()
    alone = Study(study.parts, ("A",), study.values[:, :1])
    for found in (gauge_study.by_variance(alone), gauge_study.by_range(alone)):
        assert found.reproducibility == 0.0 and found.repeatability > 0.0
    one_way = stats.f_oneway(*alone.values[:, 0])
    part = gauge_study.by_variance(alone).table[0]
    assert (part.f, part.p) == pytest.approx((one_way.statistic, one_way.pvalue))


def test_a_trial_that_stands_out_is_named():
    study = aiag()
    values = study.values.copy()
    values[3, 1, 2] += 5.0
    found = gauge_study.out_of_control(Study(study.parts, study.appraisers, values))
    assert found == [("04", "B")]


def test_bias_and_linearity_are_those_of_scipy():
    rng = np.random.default_rng(2)
    reference = np.array([2.0, 4.0, 6.0, 8.0, 10.0])
    values = reference[:, None, None] * 0.99 + 0.05 + rng.normal(0, 0.02, (5, 1, 12))
    study = Study(tuple("abcde"), ("s",), values, reference)
    found = gauge_study.bias(study)
    assert found is not None and found.line is not None
    x = np.repeat(reference, 12)
    y = (values - reference[:, None, None]).ravel()
    line = stats.linregress(x, y)
    assert found.line.slope == pytest.approx(line.slope)
    assert found.line.intercept == pytest.approx(line.intercept)
    assert found.line.slope_p == pytest.approx(line.pvalue, rel=1e-6, abs=1e-12)
    assert found.line.r_squared == pytest.approx(line.rvalue**2)
    means = y.reshape(5, 12).mean(1)
    test = stats.ttest_1samp(means, 0.0)
    assert found.p == pytest.approx(test.pvalue)
    assert found.interval == pytest.approx(tuple(test.confidence_interval(0.95)))


def test_two_trials_are_the_least():
    with pytest.raises(AssuranceError, match="got 10 parts, 3 appraisers, 1 trials"):
        Study(aiag().parts, ("A", "B", "C"), aiag().values[:, :, :1])
