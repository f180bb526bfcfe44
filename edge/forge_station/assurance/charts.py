"""Control charts and their run lengths: CUSUM, EWMA, and the CUSUM of a rate.

A run length (ARL) is the mean number of points to an alarm: many while nothing has changed (ARL0),
few after a shift (ARL1). Computed as absorption times of Markov chains (Brook and Evans, 1972), so
a limit is chosen in days between false alarms and not by habit. Pure computation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]


@dataclass(frozen=True)
class Cusum:
    """Two-sided CUSUM of standardised means: half the shift to find `k`, limit `h`, in sigma."""

    k: float = 0.5
    h: float = 7.3

    def step(self, high: float, low: float, z: float) -> tuple[float, float]:
        """The sums upwards and downwards, both from 0, after a point."""
        return max(0.0, high + z - self.k), max(0.0, low - z - self.k)

    def run_length(self, shift: float = 0.0, states: int = 300) -> float:
        """ARL when the mean has moved by `shift` sigma; both sides together."""
        return 1.0 / sum(1.0 / self._one_side(sign * shift, states) for sign in (1.0, -1.0))

    def _one_side(self, shift: float, states: int) -> float:
        width = 2.0 * self.h / (2 * states - 1)  # state 0 is half a cell: sums are often exactly 0
        centre = np.arange(states) * width
        below = _normal(centre[None, :] + width / 2 - centre[:, None] + self.k - shift)
        chain = np.diff(below, axis=1, prepend=0.0)
        return _absorption(chain, 0)


@dataclass(frozen=True)
class Ewma:
    """EWMA of standardised means: weight of the newest point, limit in its own sigmas."""

    weight: float = 0.1
    limit: float = 3.55

    @property
    def bound(self) -> float:
        """The limit in sigmas of the points."""
        return self.limit * math.sqrt(self.weight / (2.0 - self.weight))

    def step(self, value: float, z: float) -> float:
        """The average, from 0, after a point."""
        return value + self.weight * (z - value)

    def run_length(self, shift: float = 0.0, states: int = 301) -> float:
        """ARL when the mean has moved by `shift` sigma."""
        width = 2.0 * self.bound / states
        centre = (np.arange(states) - states // 2) * width
        edges = centre[None, :] + width / 2 - (1.0 - self.weight) * centre[:, None]
        upper = _normal(edges / self.weight - shift)
        lower = _normal((edges - width) / self.weight - shift)
        return _absorption(upper - lower, states // 2)


@dataclass(frozen=True)
class RateCusum:
    """CUSUM of yes-or-no events: from the rate `usual` to `risen`, limit `h` of the log-ratio."""

    usual: float
    risen: float
    h: float = 7.0

    @property
    def up(self) -> float:
        return math.log(self.risen / self.usual)

    @property
    def down(self) -> float:
        return math.log((1.0 - self.risen) / (1.0 - self.usual))

    def step(self, value: float, event: bool) -> float:
        """The sum, from 0, after a part."""
        return max(0.0, value + (self.up if event else self.down))

    def run_length(self, rate: float, cells: int = 6) -> float:
        """Mean number of parts to an alarm at the true `rate`; a step down is `cells` cells wide.

        The steps are put on a lattice, upward steps rounded.
        """
        width = -self.down / cells
        rise = round(self.up / width)
        states = math.ceil(self.h / width)  # an alarm from `h` on
        chain = np.zeros((states, states))
        index = np.arange(states)
        chain[index, np.maximum(index - cells, 0)] += 1.0 - rate
        inside = index[index + rise < states]
        chain[inside, inside + rise] += rate
        return _absorption(chain, 0)


def false_alarms_per_day(
    signals: int, parts_per_day: float, subgroup: int, cusum: Cusum, ewma: Ewma
) -> float:
    """Expected alarms of `signals` pairs of charts while nothing has changed."""
    each = 1.0 / cusum.run_length() + 1.0 / ewma.run_length()
    return signals * each * parts_per_day / subgroup


def _absorption(chain: Float, start: int) -> float:
    """Mean number of steps to leave the states of `chain` [n, n]."""
    steps = np.linalg.solve(np.eye(len(chain)) - chain, np.ones(len(chain)))
    return float(steps[start])


_NODES = np.linspace(-9.0, 9.0, 18_001)
_CDF = np.array([0.5 * math.erfc(-x / math.sqrt(2.0)) for x in _NODES])


def _normal(x: Float) -> Float:
    """The normal distribution function, by a table with steps of 0.001 (error below 1e-7)."""
    return np.asarray(np.interp(x, _NODES, _CDF))
