"""Exact bounds against scipy, the published table, and 20,000 simulated stations."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import beta, binom

from forge_station.contract import binomial
from forge_station.contract.error import ContractError

# Defective parts needed at 95 % with k of them passed.
TABLE = {
    0.10: [29],
    0.05: [59, 93, 124, 153, 181, 208],
    0.02: [149, 236, 313, 386, 456, 523],
    0.01: [299, 473, 628, 773, 913, 1049],
    0.005: [598, 947, 1258, 1549, 1829, 2100],
    0.001: [2995, 4742, 6294, 7752, 9151, 10511],
}


@pytest.mark.parametrize("rate", TABLE)
def test_the_table_of_parts_that_are_needed(rate):
    found = [binomial.needed(rate, 0.05, k) for k in range(len(TABLE[rate]))]
    assert found == TABLE[rate]
    for k, n in enumerate(found):
        assert binomial.upper(k, n, 0.05) <= rate < binomial.upper(k, n - 1, 0.05)


def test_bounds_and_distribution_agree_with_scipy():
    for n in (1, 7, 100, 773, 5000):
        for k in sorted({0, n // 50, n // 3, n - 1}):
            for delta in (0.5, 0.05, 1e-4):
                exact = beta.ppf(1 - delta, k + 1, n - k)
                assert binomial.upper(k, n, delta) == pytest.approx(exact, abs=1e-9), (k, n)
            for p in (1e-6, 0.01, 0.4, 0.999):
                assert binomial.cdf(k, n, p) == pytest.approx(binom.cdf(k, n, p), abs=1e-9)


def test_the_ends():
    assert binomial.upper(5, 5, 0.05) == binomial.upper(0, 0, 0.05) == 1.0
    assert binomial.cdf(-1, 10, 0.5) == 0.0
    assert (binomial.cdf(3, 10, 0.0), binomial.cdf(3, 10, 1.0), binomial.cdf(10, 10, 0.5)) == (
        1,
        0,
        1,
    )
    assert binomial.upper(0, 299, 0.05) == pytest.approx(1 - 0.05 ** (1 / 299), abs=1e-12)
    for wrong in ((0.0, 0.05), (1.0, 0.05), (0.01, 0.0)):
        with pytest.raises(ContractError, match="between 0 and 1"):
            binomial.needed(*wrong)


def test_298_parts_carry_no_claim_of_one_percent_and_299_do():
    assert binomial.rank(298, 0.01, 0.05) == 0
    assert binomial.rank(299, 0.01, 0.05) == 1
    assert [binomial.rank(n, 0.01, 0.05) for n in (472, 473, 772, 773)] == [1, 2, 3, 4]


def test_looks_share_the_risk():
    needed = [binomial.needed(0.01, binomial.look_delta(0.05, look)) for look in (1, 2, 3, 4)]
    assert needed == [348, 486, 567, 624]
    assert sum(binomial.look_delta(0.05, look) for look in range(1, 10_000)) < 0.05


@pytest.mark.parametrize("parts", [299, 473, 773])
@pytest.mark.parametrize("stopped", [0.0, 0.97])
def test_of_20000_stations_no_more_than_the_risk_let_too_much_through(parts, stopped):
    """Scores are uniform, so that a limit is its own escape rate. `stopped`: share of defective
    parts that a check stops whatever they score; they count as unlimited."""
    stations, rate, delta = 20_000, 0.01, 0.05
    rank = binomial.rank(parts, rate, delta)
    rng = np.random.default_rng(parts)
    violations = 0
    for _ in range(10):
        scores = rng.random((stations // 10, parts), np.float32)
        if stopped:
            scores[rng.random(scores.shape, np.float32) < stopped] = np.inf
        limit = np.partition(scores, rank - 1, axis=1)[:, rank - 1]
        passed = np.minimum(limit, 1.0) * (1.0 - stopped)
        violations += int((passed > rate).sum())
    error = np.sqrt(delta * (1 - delta) / stations)
    assert violations / stations <= delta + 3 * error
