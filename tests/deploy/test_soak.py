"""The soak run: what counts as growth, which limits break, and a short run from end to end."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the plot of the soak run")

from deploy import soak
from deploy.soak import Found, Sample

HOUR = 3600.0


def samples(count: int = 240, seconds: float = HOUR, **changes) -> list[Sample]:
    """One part a second, everything flat; a change is a function of the hour."""
    flat = {"rss_mb": 500.0, "own_mb": 400.0, "descriptors": 40, "threads": 12, "outbox_mb": 7.0}
    found = []
    for at in np.linspace(0.0, seconds, count):
        values = {
            name: changes[name](at / HOUR) if name in changes else flat[name] for name in flat
        }
        found.append(Sample(seconds=at, parts=int(at * 1.05), evidence_mb=20.0, **values))
    return found


def found(parts: int = 3780, **changes) -> Found:
    result = Found(received=parts)
    result.outcomes["PASS"] = parts
    for name, value in changes.items():
        setattr(result, name, value)
    return result


def test_a_line_has_its_slope_and_no_doubt():
    seconds = np.linspace(0, HOUR, 200)
    got = soak.slope(seconds, 400.0 + 4.0 * seconds / HOUR)
    assert got.pct_per_h == pytest.approx(100 * 4 / 402, rel=1e-3)
    assert got.half < 1e-6


def test_noise_without_a_trend_is_told_as_such():
    rng = np.random.default_rng(1)
    seconds = np.linspace(0, HOUR, 400)
    inside = 0
    for _ in range(200):
        got = soak.slope(seconds, rng.normal(400.0, 3.0, len(seconds)))
        inside += abs(got.pct_per_h) <= got.half
    assert 180 <= inside <= 199, "a 95 % interval covers nothing about once in twenty"


def test_too_few_samples_have_no_slope():
    assert math.isinf(soak.slope([0.0, 1.0], [1.0, 2.0]).half)


def test_a_flat_run_keeps_all_limits():
    assert soak.faults(samples(), found(), 1.0, 600.0) == []


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"own_mb": lambda h: 400.0 + 2.0 * h}, "memory grows"),
        ({"descriptors": lambda h: 40 + round(6 * h)}, "descriptors grow"),
        ({"threads": lambda h: 12 + round(6 * h)}, "threads grow"),
        ({"outbox_mb": lambda h: 40.0 * h}, "the outbox took"),
    ],
)
def test_what_grows_is_named(changes, word):
    (told,) = soak.faults(samples(**changes), found(), 1.0, 600.0)
    assert word in told


def test_pages_of_files_that_come_and_go_are_no_growth():
    read_again = samples(rss_mb=lambda h: 450.0 + 40.0 * h)
    assert soak.faults(read_again, found(), 1.0, 600.0) == []
    figures = soak.figures(read_again, found(), 600.0, [])
    assert figures["own_pct_per_h"] == 0.0 and figures["rss_pct_per_h"] > 5


def test_growth_while_it_warms_up_is_none():
    risen = samples(own_mb=lambda h: 400.0 if h > 1 / 6 else 300.0 + 600 * h)
    assert soak.faults(risen, found(), 1.0, 600.0) == []


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"received": 3779}, "3779 reached the MES"),
        ({"missing": 1}, "1 missing"),
        ({"unreadable": 1}, "1 unreadable"),
    ],
)
def test_a_verdict_that_the_mes_has_not_is_named(changes, word):
    (told,) = soak.faults(samples(), found(**changes), 1.0, 600.0)
    assert word in told


def test_slow_and_failing_runs_are_named():
    broken = found()
    broken.outcomes.update({"PASS": -3, "ERROR": 3})
    broken.failed = 2
    told = soak.faults(samples(), broken, 2.0, 600.0)
    assert ["parts a second" in line for line in told] == [True, False]
    assert "2 parts ended in ERROR" in told[1]


def test_wrong_usage_is_one_line(capsys):
    assert soak.main(["--minutes", "0"]) == 64
    assert "expected numbers above 0" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_short_run_from_end_to_end(tmp_path, mosquitto, capsys):
    pytest.importorskip("numba", reason="the simulator needs the extra demo")
    soak.main(["--minutes", "0.3", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "soak.json").read_text())
    assert capsys.readouterr().out.splitlines()[-1] == json.dumps(result)
    # How fast this machine is, and what grows in 20 seconds, is not for a test to say.
    ignored = ("parts a second", "grow")
    assert not [line for line in result["faults"] if not any(word in line for word in ignored)]
    assert result["parts"] == result["received"] > 0
    assert (
        result["last"]["rss_mb"] > result["last"]["own_mb"] > 50
        and result["last"]["descriptors"] > 10
    )
    rows = (tmp_path / "samples.csv").read_text().splitlines()
    assert rows[0].startswith("seconds,parts,rss_mb") and len(rows) > 2
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")
