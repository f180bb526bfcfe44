"""Probability of detection over defect size: the smallest defect that a station may promise.

Hit/miss analysis (MIL-HDBK-1823A, ASTM E2862): logit POD(a) = b0 + b1 ln a, fitted by maximum
likelihood. a90 is the size at which POD is 90 %; a90/95 the upper end of its one-sided 95 %
interval by the likelihood ratio, which holds better than a Wald interval for sets of this size.
Refuses what hit/miss data cannot tell. Sizes in mm or in camera pixels, as given.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.stats import chi2

from training.calibration.error import CalibrationError
from training.evaluation.rows import Row

Array = NDArray[np.float64]
Unit = Literal["mm", "px"]
Hit = Literal["stopped", "failed"]
ALL = "all"
LEAST = 60
"""Sized flaws below which no curve is fitted (MIL-HDBK-1823A asks for 60 in a hit/miss trial)."""
_LOGIT_90 = math.log(9.0)
_ONE_SIDED_95 = float(chi2.ppf(0.90, 1))
_FARTHEST = math.log(1e4)


@dataclass(frozen=True)
class Curve:
    """POD(a) = 1 / (1 + exp(-(b0 + b1 ln a))) of one class; `a90_95` None: no finite bound."""

    flaws: int
    hits: int
    b0: float
    b1: float
    a90: float
    a90_95: float | None
    least: float
    largest: float

    def pod(self, size: Array) -> Array:
        return 1.0 / (1.0 + np.exp(-(self.b0 + self.b1 * np.log(size))))


@dataclass(frozen=True)
class Refused:
    """Why no curve is stated for a class."""

    flaws: int
    hits: int
    reason: str


def flaws(rows: Sequence[Row], unit: Unit, hit: Hit) -> dict[str, tuple[Array, NDArray[np.bool_]]]:
    """Defect class -> (sizes [n], found [n]), and `all`. ERROR rows and rows without size are out.

    `stopped`: the part did not pass, so it does not escape; `failed`: it was called FAIL.
    """
    named: dict[str, list[tuple[float, bool]]] = {}
    for row in rows:
        size = row.defect_size_mm if unit == "mm" else row.defect_size_px
        if row.task != "surface" or row.outcome == "ERROR" or not size:
            continue
        if row.defect_true in (None, "normal"):
            continue
        found = row.outcome != "PASS" if hit == "stopped" else row.outcome == "FAIL"
        named.setdefault(str(row.defect_true), []).append((size, found))
    if not named:
        raise CalibrationError(
            "no sized defects",
            expected=f"surface rows with a defect and defect_size_{unit}",
            got=f"{len(rows)} rows",
            action="evaluate cases whose truth has defect_size_mm (training.cases writes it)",
        )
    named[ALL] = [item for own in named.values() for item in own]
    return {
        name: (np.array([a for a, _ in own], float), np.array([hit for _, hit in own], bool))
        for name, own in named.items()
    }


def curves(data: Mapping[str, tuple[Array, NDArray[np.bool_]]]) -> dict[str, Curve | Refused]:
    """The curve of each class, or why there is none."""
    found: dict[str, Curve | Refused] = {}
    for name, (sizes, hits) in data.items():
        try:
            found[name] = fit(sizes, hits)
        except CalibrationError as error:
            found[name] = Refused(len(sizes), int(hits.sum()), str(error))
    return found


def fit(sizes: Array, hits: NDArray[np.bool_]) -> Curve:
    """Maximum likelihood, with the bound by the likelihood ratio. Raises CalibrationError."""
    from statsmodels.discrete.discrete_model import Logit  # takes seconds, and pandas with it

    _refuse(sizes, hits)
    x, y = np.log(sizes), hits.astype(float)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # separation is excluded above; convergence is checked
        result = Logit(y, np.column_stack([np.ones_like(x), x])).fit(disp=0, maxiter=200)
    b0, b1 = (float(value) for value in result.params)
    if not result.mle_retvals["converged"] or b1 <= 0:
        raise CalibrationError("larger defects are not found more often", got=f"slope {b1:.3g}")
    a90 = (_LOGIT_90 - b0) / b1
    bound = _bound(x, y, float(result.llf), a90)
    return Curve(
        len(x), int(y.sum()), b0, b1, math.exp(a90), None if bound is None else math.exp(bound),
        float(sizes.min()), float(sizes.max()),
    )  # fmt: skip


def _refuse(sizes: Array, hits: NDArray[np.bool_]) -> None:
    count = len(sizes)
    if count < LEAST:
        raise CalibrationError(
            "too few sized flaws", expected=f"{LEAST} or more", got=f"{count}",
            action="measure more, with sizes that spread around the smallest one found",
        )  # fmt: skip
    if hits.all() or not hits.any():
        raise CalibrationError(
            f"{'every' if hits.all() else 'no'} flaw was found, so nothing tells where it ends",
            got=f"{count} flaws of {sizes.min():.3g} to {sizes.max():.3g}",
            action=f"add {'smaller' if hits.all() else 'larger'} ones",
        )
    if sizes[hits].min() > sizes[~hits].max():
        raise CalibrationError(
            "found and missed flaws separate by size: the likelihood has no maximum",
            got=f"missed up to {sizes[~hits].max():.3g}, found from {sizes[hits].min():.3g}",
            action="add flaws of sizes between the two",
        )


def _bound(x: Array, y: Array, best: float, a90: float) -> float | None:
    """ln of the largest size that, as a90, the likelihood ratio does not refuse; None: no end.

    With a90 held at a, the line is b1 (x - a) + logit 0.9, and only its slope is free.
    """

    def excess(a: float) -> float:
        return 2.0 * (best - _constrained(x, y, a)) - _ONE_SIDED_95

    step, high = 0.05, a90 + 0.05
    while excess(high) < 0:
        step *= 1.5
        high += step
        if high - a90 > _FARTHEST:
            return None
    return _root(excess, high - step, high)


def _constrained(x: Array, y: Array, a: float) -> float:
    """Largest log-likelihood of the lines through (a, logit 0.9)."""

    def loss(slope: float) -> float:
        line = _LOGIT_90 + slope * (x - a)
        return float(np.logaddexp(0.0, np.where(y > 0.5, -line, line)).sum())

    return -float(minimize_scalar(loss, bounds=(0.0, 200.0), method="bounded").fun)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return high
