"""Tails against scipy, constants against the AIAG's printed tables."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from forge_station.assurance import distributions


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 1), st.floats(0.3, 400), st.floats(0.3, 400))
def test_the_incomplete_beta_function_is_that_of_scipy(x, a, b):
    assert distributions.beta_cdf(x, a, b) == pytest.approx(stats.beta.cdf(x, a, b), abs=1e-10)


@pytest.mark.parametrize(("f", "a", "b"), [(0.434, 18, 60), (3.1, 2, 78), (250.0, 9, 78)])
def test_the_tail_of_f_is_that_of_scipy(f, a, b):
    assert distributions.f_tail(f, a, b) == pytest.approx(stats.f.sf(f, a, b), rel=1e-9)


@pytest.mark.parametrize("freedom", [1, 4, 9, 88])
def test_t_is_that_of_scipy(freedom):
    assert distributions.t_quantile(0.95, freedom) == pytest.approx(stats.t.ppf(0.975, freedom))
    assert distributions.t_two_sided(-2.1, freedom) == pytest.approx(2 * stats.t.sf(2.1, freedom))


@pytest.mark.parametrize(
    ("k", "n"), [(0, 20), (1, 1), (3, 60), (29, 60), (31, 60), (1990, 2000), (60, 60)]
)
def test_the_exact_interval_is_that_of_scipy(k, n):
    found = stats.binomtest(k, n).proportion_ci(0.95, "exact")
    assert distributions.interval(k, n) == pytest.approx((found.low, found.high), abs=1e-9)


def test_of_nothing_nothing_is_known():
    assert distributions.interval(0, 0) == (0.0, 1.0)


def test_the_constants_of_average_and_range_are_those_printed_by_the_aiag():
    d2 = {2: 1.12838, 3: 1.69257, 5: 2.32593, 10: 3.07751}
    d2_star = {2: 1.41421, 3: 1.91155, 4: 2.23887, 5: 2.48124, 10: 3.17905, 20: 3.80537}
    for n, value in d2.items():
        assert distributions.mean_range(n) == pytest.approx(value, abs=1e-4)
    for n, value in d2_star.items():
        assert distributions.root_mean_square_range(n) == pytest.approx(value, abs=5e-4)
