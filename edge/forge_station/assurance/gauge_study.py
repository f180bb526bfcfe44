"""Gauge repeatability and reproducibility, bias and linearity of a measured size.

By analysis of variance and by average and range, as in the AIAG's manual (MSA, 4th edition,
chapter III B): parts x appraisers x trials, every part removed and fed again for each trial.
Standard deviations throughout, in the unit of the values. Pure computation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forge_station.assurance import distributions
from forge_station.assurance.error import AssuranceError

POOL_ABOVE = 0.25
"""p of the interaction above which it is pooled with the repeatability."""
GRR_LIMITS = (10.0, 30.0)
"""%GRR up to which a gauge is acceptable, and up to which it may be for the purpose."""
NDC_LEAST = 5


@dataclass(frozen=True)
class Study:
    """`values` [parts, appraisers, trials]. `reference` [parts] or None: the true values."""

    parts: tuple[str, ...]
    appraisers: tuple[str, ...]
    values: NDArray[np.float64]
    reference: NDArray[np.float64] | None = None
    unit: str = "mm"

    def __post_init__(self) -> None:
        p, o, r = self.values.shape
        if p < 2 or r < 2:
            raise AssuranceError(
                "a gauge study needs parts and trials",
                expected="2 parts and 2 trials or more; 10 parts, 3 appraisers, 3 trials is usual",
                got=f"{p} parts, {o} appraisers, {r} trials",
            )


@dataclass(frozen=True)
class Source:
    """One line of the table of variance: degrees of freedom, sum of squares, F, p."""

    name: str
    freedom: int
    squares: float
    f: float | None = None
    p: float | None = None

    @property
    def mean_square(self) -> float:
        return self.squares / self.freedom if self.freedom else math.nan


@dataclass(frozen=True)
class Grr:
    """Components as standard deviations."""

    method: str
    repeatability: float
    """EV: the same part, the same appraiser."""
    reproducibility: float
    """AV: between appraisers."""
    interaction: float
    """INT: appraisers that differ by part; 0 where pooled, and by average and range."""
    part: float
    """PV: between parts."""
    table: tuple[Source, ...] = ()
    pooled: bool = False

    @property
    def grr(self) -> float:
        return math.sqrt(self.repeatability**2 + self.reproducibility**2 + self.interaction**2)

    @property
    def total(self) -> float:
        return math.hypot(self.grr, self.part)

    @property
    def percent(self) -> float:
        """%GRR of the total variation; 100 where nothing varies, as then nothing is told apart."""
        return 100.0 * self.grr / self.total if self.total > 0 else 100.0

    @property
    def categories(self) -> int:
        """ndc: how many groups of parts the gauge tells apart."""
        return int(1.41 * self.part / self.grr) if self.grr > 0 else 10**6

    def percent_of(self, tolerance: float) -> float:
        """%Tol: six standard deviations of the gauge in shares of the tolerance (its width)."""
        return 600.0 * self.grr / tolerance

    @property
    def decision(self) -> str:
        """AIAG's words on %GRR and ndc."""
        if self.percent > GRR_LIMITS[1]:
            return "unacceptable"
        if self.percent > GRR_LIMITS[0] or self.categories < NDC_LEAST:
            return "marginal"
        return "acceptable"


def by_variance(study: Study) -> Grr:
    """The analysis of variance with two crossed factors; with one appraiser, of one factor."""
    values = study.values
    p, o, r = values.shape
    mean = values.mean()
    squares_part = o * r * float(((values.mean((1, 2)) - mean) ** 2).sum())
    squares_appraiser = p * r * float(((values.mean((0, 2)) - mean) ** 2).sum())
    cells = r * float(((values.mean(2) - mean) ** 2).sum())
    squares_both = max(0.0, cells - squares_part - squares_appraiser)
    squares_error = float(((values - values.mean(2, keepdims=True)) ** 2).sum())
    both = Source("part x appraiser", (p - 1) * (o - 1), squares_both)
    error = Source("repeatability", p * o * (r - 1), squares_error)
    pooled = o == 1
    if o > 1:
        both = _tested(both, error)
        pooled = both.p is not None and both.p > POOL_ABOVE
    against = both
    if pooled:
        error = Source("repeatability", both.freedom + error.freedom, both.squares + error.squares)
        against = error
    part = _tested(Source("part", p - 1, squares_part), against)
    table = [part, Source("total", p * o * r - 1, float(((values - mean) ** 2).sum()))]
    if o > 1:
        appraiser = _tested(Source("appraiser", o - 1, squares_appraiser), against)
        table[1:1] = [appraiser, both]
    table[-1:-1] = [error]
    within = error.mean_square
    crossed = against.mean_square
    reproducibility = max(0.0, table[1].mean_square - crossed) / (p * r) if o > 1 else 0.0
    return Grr(
        "analysis of variance",
        repeatability=math.sqrt(within),
        reproducibility=math.sqrt(reproducibility),
        interaction=0.0 if pooled else math.sqrt(max(0.0, crossed - within) / r),
        part=math.sqrt(max(0.0, part.mean_square - crossed) / (o * r)),
        table=tuple(table),
        pooled=pooled and o > 1,
    )


def _tested(source: Source, against: Source) -> Source:
    """With F and p against the mean square of another source."""
    if not against.freedom or against.mean_square <= 0.0:
        return source
    f = source.mean_square / against.mean_square
    return Source(
        source.name, source.freedom, source.squares, f,
        distributions.f_tail(f, source.freedom, against.freedom),
    )  # fmt: skip


def by_range(study: Study) -> Grr:
    """The average and range method, with the AIAG's constants (K1 = 1/d2, K2 = K3 = 1/d2*)."""
    values = study.values
    p, o, r = values.shape
    mean_range = float((values.max(2) - values.min(2)).mean())
    repeatability = mean_range / distributions.mean_range(r)
    reproducibility = 0.0
    if o > 1:
        means = values.mean((0, 2))
        spread = float(means.max() - means.min()) / distributions.root_mean_square_range(o)
        reproducibility = math.sqrt(max(0.0, spread**2 - repeatability**2 / (p * r)))
    parts = values.mean((1, 2))
    part = float(parts.max() - parts.min()) / distributions.root_mean_square_range(p)
    return Grr("average and range", repeatability, reproducibility, 0.0, part)


def out_of_control(study: Study) -> list[tuple[str, str]]:
    """(part, appraiser) whose range of trials is above the limit of the range chart."""
    ranges = study.values.max(2) - study.values.min(2)
    found = np.argwhere(ranges > range_limit(study)).tolist()
    return [(study.parts[i], study.appraisers[j]) for i, j in found]


def range_limit(study: Study) -> float:
    """Upper limit of the range chart: a trial outside was not taken as the others."""
    ranges = study.values.max(2) - study.values.min(2)
    return float(ranges.mean()) * _upper_range_factor(study.values.shape[2])


def _upper_range_factor(n: int) -> float:
    """D4: upper limit of a range chart in mean ranges, 1 + 3 d3 / d2."""
    d2, square = distributions.mean_range(n), distributions.root_mean_square_range(n) ** 2
    return 1.0 + 3.0 * math.sqrt(max(0.0, square - d2 * d2)) / d2


@dataclass(frozen=True)
class Line:
    """Deviation from the reference along the size: `slope` and `intercept` with p against 0."""

    slope: float
    intercept: float
    slope_p: float
    intercept_p: float
    r_squared: float


@dataclass(frozen=True)
class Bias:
    """Mean deviation from the reference, its 95 % interval, and linearity with 3 sizes or more.

    The readings of one part share what is wrong with its reference, so the interval is computed
    from the parts' means, not from the single readings.
    """

    mean: float
    interval: tuple[float, float]
    p: float
    by_part: tuple[float, ...]
    line: Line | None

    @property
    def significant(self) -> bool:
        return not self.interval[0] <= 0.0 <= self.interval[1]


def bias(study: Study) -> Bias | None:
    """None where no reference is given."""
    if study.reference is None:
        return None
    deviations = study.values.mean((1, 2)) - study.reference
    n = len(deviations)
    mean = float(deviations.mean())
    error = float(deviations.std(ddof=1)) / math.sqrt(n)
    half = distributions.t_quantile(0.95, n - 1) * error
    p = distributions.t_two_sided(mean / error, n - 1) if error > 0 else float(mean == 0.0)
    return Bias(mean, (mean - half, mean + half), p, tuple(deviations.tolist()), _line(study))


def _line(study: Study) -> Line | None:
    """Regression of all single deviations on the reference (AIAG's linearity)."""
    assert study.reference is not None
    if len(np.unique(study.reference)) < 3:
        return None
    x = np.repeat(study.reference, study.values[0].size)
    y = (study.values - study.reference[:, None, None]).reshape(-1)
    n = len(x)
    centred = x - x.mean()
    sxx = float(centred @ centred)
    slope = float(centred @ y) / sxx
    intercept = float(y.mean() - slope * x.mean())
    residual = float(((y - intercept - slope * x) ** 2).sum())
    total = float(((y - y.mean()) ** 2).sum())
    s = math.sqrt(residual / (n - 2))
    if s == 0.0:
        return Line(slope, intercept, float(slope == 0), float(intercept == 0), 1.0)
    error = s / math.sqrt(sxx)
    error_0 = s * math.sqrt(1.0 / n + float(x.mean()) ** 2 / sxx)
    return Line(
        slope,
        intercept,
        distributions.t_two_sided(slope / error, n - 2),
        distributions.t_two_sided(intercept / error_0, n - 2),
        1.0 - residual / total if total > 0 else 1.0,
    )
