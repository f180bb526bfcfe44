"""A figure as what each case adds to it: one definition for its value, interval and comparison.

Pure functions of rows; no files, no model. An interval is 95 %. Of a share of cases it is
Wilson's; of a share of marks or cells, of a mean and of a ranking it is a bootstrap over whole
cases (2000 resamples, 500 for rankings, fixed seed), since the parts of one tray are not
independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from training.evaluation.rows import Row

RESAMPLES, RANKING_RESAMPLES = 2000, 500
_Z = 1.959964
Array = NDArray[np.float64]
Items = Sequence[tuple[float, ...]]
"""What a case adds: pairs (part, whole), or the values that a ranking needs."""


@dataclass(frozen=True)
class Measure:
    """One figure. `of(row)`: what a case adds, None where the figure is not about it.

    `share`, `pooled` and `mean` are sums of parts over sums of wholes; `ranking` is `function` of
    all items [n, k] together.
    """

    name: str
    of: Callable[[Row], Items | None]
    kind: Literal["share", "pooled", "mean", "ranking"] = "share"
    function: Callable[[Array], float | None] | None = None
    of_cases: bool = True
    """Whether n counts cases; else it counts what `whole` counts (marks, cells)."""
    lower_is_better: bool = False
    weakest: Callable[[Array], int] | None = None
    """Of a ranking within 0..1: how many items it rests on at least. Its interval is not narrower
    than Wilson's of so many, since a bootstrap of a perfect ranking is a point."""
    nothing: float | None = None
    """The value where all wholes are 0, if any: with no cell true and none found F1 is 1."""

    def figure(self, rows: Sequence[Row]) -> dict[str, Any]:
        """{"value", "interval", "n"}; value None where there is nothing to measure."""
        items = [found for row in rows if (found := self.of(row)) is not None]
        if self.kind == "ranking":
            return _ranking(items, self.function, self.weakest)
        parts = [sum(item[0] for item in case) for case in items]
        wholes = [sum(item[1] for item in case) for case in items]
        if self.kind == "pooled" and items and not sum(wholes):
            return _figure(self.nothing, (0.0, 1.0), len(items))
        if self.kind == "pooled":
            return pooled(parts, wholes, len(items) if self.of_cases else None)
        if self.kind == "mean":
            return mean([part / whole for part, whole in zip(parts, wholes, strict=True)])
        return share([part > 0 for part in parts])


def share_of(name: str, of: Callable[[Row], bool | None], *, lower: bool = False) -> Measure:
    """A share of cases; `of` is None where the case does not count."""

    def items(row: Row) -> Items | None:
        found = of(row)
        return None if found is None else [(float(found), 1.0)]

    return Measure(name, items, lower_is_better=lower)


def pooled_of(
    name: str,
    of: Callable[[Row], tuple[float, float] | None],
    *,
    of_cases: bool = False,
    nothing: float | None = None,
) -> Measure:
    """Sum of parts over sum of wholes; `of` gives both of one case."""

    def items(row: Row) -> Items | None:
        found = of(row)
        return None if found is None else [found]

    return Measure(name, items, "pooled", of_cases=of_cases, nothing=nothing)


def mean_of(name: str, of: Callable[[Row], float | None]) -> Measure:
    """A mean over cases."""

    def items(row: Row) -> Items | None:
        found = of(row)
        return None if found is None else [(found, 1.0)]

    return Measure(name, items, "mean")


def ranking_of(
    name: str,
    of: Callable[[Row], Items | None],
    function: Callable[[Array], float | None],
    *,
    lower: bool = False,
    weakest: Callable[[Array], int] | None = None,
) -> Measure:
    """A figure of all values together, such as a rank correlation."""
    return Measure(name, of, "ranking", function, lower_is_better=lower, weakest=weakest)


def wilson(right: float, count: float) -> tuple[float, float]:
    """95 % interval of a share; (0, 1) of nothing."""
    if count == 0:
        return 0.0, 1.0
    share, z2 = right / count, _Z * _Z
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = _Z * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2)) / (1 + z2 / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def share(values: Sequence[bool]) -> dict[str, Any]:
    """A share of cases with Wilson's interval."""
    right = sum(values)
    if not values:
        return _figure(None, (0.0, 1.0), 0)
    return _figure(right / len(values), wilson(right, len(values)), len(values))


def pooled(
    parts: Sequence[float], wholes: Sequence[float], count: int | None = None
) -> dict[str, Any]:
    """Sum of `parts` over sum of `wholes`, one of each a case. Bootstrap over cases.

    The interval is at least as wide as Wilson's on the pooled counts, so that it does not shrink
    to a point where everything is right.
    """
    whole = sum(wholes)
    if not whole:
        return _figure(None, (0.0, 1.0), 0)
    ratios = ratio_resampled(np.array(parts, float), np.array(wholes, float), drawn(len(parts)))
    low, high = np.nanpercentile(ratios, (2.5, 97.5))
    narrow = wilson(sum(parts), whole)
    interval = (min(float(low), narrow[0]), max(float(high), narrow[1]))
    return _figure(sum(parts) / whole, interval, round(whole) if count is None else count)


def ratio_resampled(parts: Array, wholes: Array, drawn: NDArray[np.int64]) -> Array:
    """Sum of parts over sum of wholes of every resample; NaN where the whole is 0."""
    sums = wholes[drawn].sum(axis=1)
    return np.divide(
        parts[drawn].sum(axis=1), sums, out=np.full(len(drawn), np.nan), where=sums > 0
    )


def mean(values: Sequence[float]) -> dict[str, Any]:
    """Mean over cases with a bootstrap interval."""
    if not values:
        return _figure(None, (0.0, 1.0), 0)
    array = np.array(values, float)
    if len(array) == 1:  # one case says nothing about its spread
        return _figure(float(array[0]), (0.0, 1.0), 1)
    low, high = np.percentile(array[drawn(len(array))].mean(axis=1), (2.5, 97.5))
    return _figure(float(array.mean()), (float(low), float(high)), len(values))


def _ranking(
    items: Sequence[Items],
    function: Callable[[Array], float | None] | None,
    weakest: Callable[[Array], int] | None,
) -> dict[str, Any]:
    cases = [np.array(case, float) for case in items if len(case)]
    assert function is not None
    value = function(np.concatenate(cases)) if cases else None
    if value is None:
        return _figure(None, (0.0, 1.0), len(cases))
    tried = drawn(len(cases), RANKING_RESAMPLES)
    found = [function(np.concatenate([cases[i] for i in chosen])) for chosen in tried]
    known = [item for item in found if item is not None]
    low, high = (float(x) for x in np.percentile(known, (2.5, 97.5)))
    if weakest is not None:
        count = weakest(np.concatenate(cases))
        least, most = wilson(value * count, count)
        low, high = min(low, least), max(high, most)
    return _figure(value, (low, high), len(cases))


@lru_cache(maxsize=64)
def drawn(count: int, resamples: int = RESAMPLES) -> NDArray[np.int64]:
    """Indices [resamples, count] of cases drawn with replacement; the same on every call."""
    return np.random.default_rng(0).integers(0, count, (resamples, count))


def _figure(value: float | None, interval: tuple[float, float], count: int) -> dict[str, Any]:
    if value is None:
        return {"value": None, "interval": None, "n": count}
    low, high = (round(x, 4) for x in interval)
    return {"value": round(value, 4), "interval": [low, high], "n": count}
