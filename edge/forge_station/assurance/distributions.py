"""Tails of t, F and the range of normal samples, so that a station needs no scipy.

The incomplete beta function by its continued fraction (Lentz's method, Numerical Recipes 6.4).
Tests hold everything against scipy.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from forge_station.contract import binomial

_TINY = 1e-300


def beta_cdf(x: float, a: float, b: float) -> float:
    """P(X <= x) of the distribution Beta(a, b)."""
    if x <= 0.0:
        return 0.0
    if x >= 1.0:
        return 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(log_front + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1.0) / (a + b + 2.0):
        return front * _fraction(x, a, b) / a
    return 1.0 - front * _fraction(1.0 - x, b, a) / b


def _fraction(x: float, a: float, b: float) -> float:
    c, d = 1.0, 1.0 / _not_zero(1.0 - (a + b) * x / (a + 1.0))
    value = d
    for m in range(1, 1000):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1.0) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1.0)),
        ):
            d = 1.0 / _not_zero(1.0 + numerator * d)
            c = _not_zero(1.0 + numerator / c)
            value *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return value


def _not_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


def f_tail(f: float, numerator: float, denominator: float) -> float:
    """P(F > f) with the degrees of freedom of numerator and denominator."""
    if f <= 0.0:
        return 1.0
    return beta_cdf(denominator / (denominator + numerator * f), denominator / 2, numerator / 2)


def t_two_sided(t: float, freedom: float) -> float:
    """P(|T| > |t|) with `freedom` degrees of freedom."""
    return f_tail(t * t, 1.0, freedom)


def t_quantile(probability: float, freedom: float) -> float:
    """t with P(|T| > t) = 1 - `probability`: half the width of a two-sided interval."""
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        inside = 1.0 - t_two_sided(middle, freedom) < probability
        low, high = (middle, high) if inside else (low, middle)
    return high


def interval(k: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Exact two-sided interval (Clopper and Pearson) of a rate, `k` events in `n` trials.

    (0, 1) of no trials.
    """
    if n == 0:
        return 0.0, 1.0
    risk = (1.0 - confidence) / 2
    return lower(k, n, risk), 1.0 - lower(n - k, n, risk)


def lower(k: int, n: int, risk: float) -> float:
    """The rate that is reached, with confidence 1 - `risk`, after `k` events in `n` trials.

    The counterpart of `binomial.upper`, by whichever tail has fewer terms.
    """
    if k <= 0:
        return 0.0
    if k > n - k:
        return 1.0 - binomial.upper(n - k, n, risk)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        below = 1.0 - binomial.cdf(k - 1, n, middle) < risk
        low, high = (middle, high) if below else (low, middle)
    return low


@lru_cache(maxsize=64)
def mean_range(n: int) -> float:
    """d2: mean range of `n` standard normal values."""
    x, cdf = _grid()
    return float(np.trapezoid(1.0 - cdf**n - (1.0 - cdf) ** n, x))


@lru_cache(maxsize=64)
def root_mean_square_range(n: int) -> float:
    """d2* of one sample: root of the mean squared range of `n` standard normal values.

    AIAG's constants for few subgroups: K2 and K3 of the average and range method are 1 / d2*.
    """
    x, cdf = _grid()
    low, high = cdf[:, None], cdf[None, :]
    inside = 1.0 - high**n - (1.0 - low) ** n + np.abs(high - low) ** n
    area = np.triu(inside) - 0.5 * np.diag(np.diag(inside))
    step = float(x[1] - x[0])
    return math.sqrt(2.0 * float(area.sum()) * step * step)


@lru_cache(maxsize=1)
def _grid() -> tuple[np.ndarray, np.ndarray]:
    x = np.linspace(-8.0, 8.0, 1601)
    return x, np.array([0.5 * math.erfc(-value / math.sqrt(2.0)) for value in x])
