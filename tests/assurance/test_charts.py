"""Run lengths within 3 % of the published ones, and the charts themselves behave so."""

from __future__ import annotations

import numpy as np
import pytest

from forge_station.assurance.charts import Cusum, Ewma, RateCusum, false_alarms_per_day


@pytest.mark.parametrize(
    ("h", "usual", "shifted"), [(4.0, 168, 8.38), (5.0, 465, 10.4), (7.0, 3483, 14.4)]
)
def test_cusum_has_the_published_run_lengths(h, usual, shifted):
    chart = Cusum(0.5, h)
    assert chart.run_length() == pytest.approx(usual, rel=0.03)
    assert chart.run_length(1.0) == pytest.approx(shifted, rel=0.03)


def test_ewma_has_the_published_run_lengths():
    """Lucas and Saccucci (1990): weight 0.1, limit 2.814."""
    chart = Ewma(0.1, 2.814)
    assert chart.run_length() == pytest.approx(500, rel=0.03)
    assert chart.run_length(1.0) == pytest.approx(10.3, rel=0.03)


def test_the_limits_in_use_leave_thousands_of_subgroups_between_false_alarms():
    assert Cusum().run_length() == pytest.approx(4704, rel=0.03)
    assert Cusum().run_length(1.0) == pytest.approx(15.0, rel=0.03)
    assert Ewma().run_length() == pytest.approx(4871, rel=0.03)
    assert Ewma().run_length(1.0) == pytest.approx(15.0, rel=0.03)


@pytest.mark.parametrize(("h", "usual", "risen"), [(4.5, 13_500, 297), (5.5, 37_400, 372)])
def test_the_cusum_of_a_rate_finds_a_tripled_one_and_rarely_anything_else(h, usual, risen):
    chart = RateCusum(0.01, 0.03, h)
    assert chart.run_length(0.01) == pytest.approx(usual, rel=0.03)
    assert chart.run_length(0.03) == pytest.approx(risen, rel=0.03)


def test_the_charts_alarm_when_their_chains_say_so():
    """400 runs of each chart, point by point, after a shift by one sigma."""
    rng = np.random.default_rng(7)
    cusum, ewma, lengths = Cusum(), Ewma(), []
    for _ in range(400):
        high = low = value = 0.0
        ends: dict[str, int] = {}
        n = 0
        while len(ends) < 2:
            n += 1
            z = rng.normal(1.0)
            high, low = cusum.step(high, low, z)
            value = ewma.step(value, z)
            if max(high, low) > cusum.h:
                ends.setdefault("cusum", n)
            if abs(value) > ewma.bound:
                ends.setdefault("ewma", n)
        lengths.append((ends["cusum"], ends["ewma"]))
    found = np.array(lengths, float)
    error = found.std(0) / np.sqrt(len(found))
    expected = np.array([cusum.run_length(1.0), ewma.run_length(1.0)])
    assert (np.abs(found.mean(0) - expected) < 3.5 * error).all()


def test_the_signals_in_use_make_less_than_one_false_alarm_in_two_days():
    """Five signals, a part every 10 s around the clock, subgroups of 50."""
    assert false_alarms_per_day(5, 8640, 50, Cusum(), Ewma()) < 0.5
