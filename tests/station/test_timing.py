"""Stage timing and percentiles."""

from __future__ import annotations

import pytest

from forge_station.timing import Stopwatch, by_stage, latency, percentile


class Clock:
    """A clock that the test moves by hand, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_stage_that_runs_twice_adds_up_and_total_is_wall_clock():
    clock = Clock()
    watch = Stopwatch(clock)
    for _ in range(2):
        with watch.stage("decode"):
            clock.now += 0.010
    clock.now += 0.005
    with watch.stage("model"):
        clock.now += 0.1
    assert watch.timings_ms() == {"decode": 20.0, "model": 100.0, "total": 125.0}


def test_a_stage_that_fails_is_timed_and_the_error_goes_on():
    clock = Clock()
    watch = Stopwatch(clock)

    def fail() -> None:
        with watch.stage("decode"):
            clock.now += 0.25
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert watch.timings_ms()["decode"] == 250.0


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([7.0], 50, 7.0),
        ([7.0], 99, 7.0),
        ([1.0, 2.0], 50, 1.0),
        ([1.0, 2.0], 51, 2.0),
        ([float(n) for n in range(1, 101)], 50, 50.0),
        ([float(n) for n in range(1, 101)], 95, 95.0),
        ([float(n) for n in range(1, 101)], 99, 99.0),
        ([float(n) for n in range(1, 12)], 95, 11.0),
    ],
)
def test_percentiles_are_measured_values(values, percent, expected):
    assert percentile(values, percent) == expected


def test_percentile_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_latency_sorts_and_counts():
    figures = latency([30.0, 10.0, 20.0])
    assert figures is not None
    assert (figures.count, figures.mean, figures.p50, figures.max) == (3, 20.0, 20.0, 30.0)
    assert latency([]) is None


def test_stages_that_only_some_parts_had_are_over_those_parts():
    figures = by_stage([{"decode": 1.0, "total": 2.0}, {"total": 4.0}])
    assert list(figures) == ["decode", "total"]
    assert figures["decode"].count == 1 and figures["total"].count == 2
