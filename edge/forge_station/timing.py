"""How long the stages of one part took, and percentiles over many parts. Knows no stage names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


class Stopwatch:
    """Wall-clock milliseconds per stage; a stage that runs twice adds up."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = clock()
        self._stages_ms: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the block as `name`, also when it raises."""
        begin = self._clock()
        try:
            yield
        finally:
            elapsed_ms = (self._clock() - begin) * 1000
            self._stages_ms[name] = self._stages_ms.get(name, 0.0) + elapsed_ms

    @property
    def total_ms(self) -> float:
        """Since the stopwatch was made."""
        return (self._clock() - self._start) * 1000

    def timings_ms(self) -> dict[str, float]:
        """Stage -> milliseconds in the order they ended first, then `total`; in 0.01 ms steps."""
        return {
            **{name: round(value, 2) for name, value in self._stages_ms.items()},
            "total": round(self.total_ms, 2),
        }


@dataclass(frozen=True)
class Latency:
    """Milliseconds over `count` parts; percentiles by nearest rank, so each is a measured value."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float


def latency(values_ms: Iterable[float]) -> Latency | None:
    """None of no values."""
    ordered = sorted(values_ms)
    if not ordered:
        return None
    return Latency(
        count=len(ordered),
        mean=round(sum(ordered) / len(ordered), 2),
        p50=percentile(ordered, 50),
        p95=percentile(ordered, 95),
        p99=percentile(ordered, 99),
        max=ordered[-1],
    )


def by_stage(parts: Sequence[Mapping[str, float]]) -> dict[str, Latency]:
    """Stage -> latency over all parts that had the stage, in order of first appearance."""
    stages = dict.fromkeys(stage for timings in parts for stage in timings)
    found = {stage: latency(item[stage] for item in parts if stage in item) for stage in stages}
    return {stage: figures for stage, figures in found.items() if figures is not None}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Nearest rank: the smallest value that `percent` of the ascending values do not exceed."""
    if not ordered:
        raise ValueError("percentile of no values")
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(1, int(rank)) - 1]
