"""Exact binomial bounds, one-sided: what a count of seen events proves about their true rate.

Clopper and Pearson (1934) by `lgamma` and bisection, so that a station needs no scipy. Tests hold
it against scipy. Knows no parts and no scores.
"""

from __future__ import annotations

import math

from forge_station.contract.error import ContractError

_LARGEST = 10**9


def cdf(k: int, n: int, p: float) -> float:
    """P(at most `k` events in `n` independent trials of probability `p`)."""
    if k < 0:
        return 0.0
    if k >= n or p <= 0.0:
        return 1.0
    if p >= 1.0:
        return 0.0
    log_p, log_q, whole = math.log(p), math.log1p(-p), math.lgamma(n + 1)
    terms = (
        whole - math.lgamma(i + 1) - math.lgamma(n - i + 1) + i * log_p + (n - i) * log_q
        for i in range(k + 1)
    )
    return min(1.0, math.fsum(math.exp(term) for term in terms))


def upper(k: int, n: int, delta: float) -> float:
    """The rate that is not exceeded, with confidence 1 - `delta`, after `k` events in `n` trials.

    The largest p with cdf(k; n, p) >= delta; 1 when every trial was an event or there was none.
    """
    if k >= n:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if cdf(k, n, middle) >= delta else (low, middle)
    return high


def rank(n: int, rate: float, delta: float) -> int:
    """Which order statistic of `n` scores bounds `rate` with confidence 1 - `delta`; 0: none does.

    The largest r with cdf(r - 1; n, rate) <= delta. A limit at the r-th smallest score of `n`
    independent parts (strictly below it, ties outside) takes in at most `rate` of all such parts:
    F(s(r)) has the distribution Beta(r, n - r + 1). Choosing and certifying on the same parts is
    sound, since the rule is fixed before the scores are seen.
    """
    r = 0
    while r < n and cdf(r, n, rate) <= delta:
        r += 1
    return r


def needed(rate: float, delta: float, events: int = 0) -> int:
    """Trials with at most `events` events that prove `rate` with confidence 1 - `delta`."""
    if not (0.0 < rate < 1.0 and 0.0 < delta < 1.0):
        raise ContractError(
            "a rate and a risk lie between 0 and 1", expected="0 < x < 1", got=f"{rate}, {delta}"
        )
    low, high = events, events + 1
    while cdf(events, high, rate) > delta:
        low, high = high, 2 * high
        if high > _LARGEST:
            raise ContractError("no set of parts is large enough", got=f"rate {rate:g}")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cdf(events, middle, rate) > delta else (low, middle)
    return high


def look_delta(delta: float, look: int) -> float:
    """The share of the risk `delta` that the look number `look` (from 1) at a set may spend.

    delta * 6 / (pi^2 look^2): over all looks it sums to `delta`, so that any number of bundles
    tried on one set of parts together keeps the confidence that each of them claims.
    """
    return delta * 6.0 / (math.pi**2 * look**2)
