"""The drift watch on verdicts: what it learns, when it alarms, and how level 3 begins and ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from forge_station.assurance import drift
from forge_station.assurance.drift import CUSUM, DriftConfig, Order, Watch
from forge_station.contract import record
from forge_station.contract.error import ContractError
from forge_station.contract.verdict import (
    Certification,
    CheckResult,
    ModelUsed,
    Outcome,
    Reason,
    ScanSummary,
    Verdict,
    decide,
)

SMALL = DriftConfig(phase1_parts=1000, subgroup=10, signals=("score", "valid_share"))
MODEL = ModelUsed("m", "1", 1, "a" * 64, "fp32", "CPU")


def verdict(
    score: float = -6.0,
    share: float = 0.9,
    outcome: Outcome = Outcome.PASS,
    serial: str = "1",
    model: ModelUsed = MODEL,
    mode: str = "certified",
) -> Verdict:
    reasons = () if outcome is Outcome.PASS else (Reason("SURFACE_DENT", "a dent"),)
    checks = [CheckResult("scan", Outcome.PASS), CheckResult("surface", outcome, reasons)]
    if mode == "advisory" and outcome is Outcome.PASS:
        doubt = Reason("NO_CERTIFICATE", "advisory")
        checks.append(CheckResult("certificate", Outcome.UNSURE, (doubt,)))
    return decide(
        required=("surface",),
        checks=checks,
        scan=ScanSummary(points=1, quality={"valid_share": share, "blur_px": None}),
        result_id="r",
        serial=serial,
        product="NUT",
        model=model,
        certification=Certification(mode, "", score),  # type: ignore[arg-type]
    )


@dataclass
class Line:
    """A watch with a clock of its own and parts as they come."""

    path: Path
    config: DriftConfig = SMALL
    watch: Watch = field(init=False)
    ticks: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(5)
        self.restart()

    def restart(self) -> None:
        self.watch = Watch(self.config, self.path, self.clock)

    def clock(self) -> str:
        self.ticks += 1
        return f"2026-11-30T00:{self.ticks // 60:02}:{self.ticks % 60:02}.000Z"

    def parts(self, count: int, shift: float = 0.0, **changes: object) -> Iterator[int]:
        """Levels after each of `count` parts; `shift` in sigmas of the subgroup means."""
        sigma = 1.0 / np.sqrt(self.config.subgroup)
        for _ in range(count):
            score = -6.0 + self.rng.normal() + shift * sigma
            share = 0.9 + 0.05 * self.rng.normal()
            yield self.watch.part(verdict(score, share, **changes))  # type: ignore[arg-type]

    def order(self, action: str = "release") -> Order:
        found = Order(action, "anna", "lens cleaned", self.clock())  # type: ignore[arg-type]
        drift.order_path(self.path).write_text(json.dumps(record.write(found)))
        return found


@pytest.fixture
def line(tmp_path: Path) -> Line:
    found = Line(tmp_path / "outbox.drift.json")
    assert set(found.parts(SMALL.phase1_parts)) == {0}
    return found


def test_it_learns_what_is_usual_for_the_product(line):
    stream = line.watch.state.streams["NUT"]["score"]
    assert stream.centre == pytest.approx(-6.0, abs=0.15)
    assert stream.spread == pytest.approx(1 / np.sqrt(10), rel=0.25)
    assert line.watch.state.rates["NUT"]["FAIL"].usual == pytest.approx(1 / 1002)


def test_a_smudge_reaches_level_2_in_about_8_subgroups_and_then_withholds_pass(line):
    """Shift of the score by -1.5 sigma; both charts of one signal."""
    state, first, third = line.watch.state, [], []
    for _ in range(40):
        line.watch.state = state
        levels: list[int] = []
        while 3 not in levels:
            levels += line.parts(10, shift=-1.5)
        first.append(1 + next(i for i, level in enumerate(levels) if level >= 2) // 10)
        third.append(len(levels) // 10)
    assert 7.0 <= np.mean(first) <= 10.0
    assert np.percentile(first, 95) <= 20
    assert np.mean(third) < 25
    assert all(a < b for a, b in zip(first, third, strict=True))


def test_thirty_days_without_drift_withhold_nothing_and_rarely_alarm(tmp_path):
    """172 subgroups a day of one signal; the chart's own state is stepped, parts left out."""
    line = Line(tmp_path / "d.json", replace(SMALL, signals=("score",)))
    list(line.parts(1000))
    stream = replace(line.watch.state.streams["NUT"]["score"], centre=0.0, spread=1.0)
    alarms, beyond = 0, False
    for z in np.random.default_rng(11).normal(size=30 * 172):
        stream = replace(stream, total=9 * z, count=9)
        stream = line.watch._point("score", stream, float(z))
        alarms += any(stream.beyond) and not beyond
        beyond = any(stream.beyond)
        assert max(stream.high, stream.low) < drift.WITHHOLD * CUSUM.h
    assert alarms <= 3  # expected 2.2 of two charts; five signals may have 15


def withheld(line: Line) -> None:
    while line.watch.level < 3:
        next(line.parts(1, shift=-3.0))


def test_level_3_objects_until_a_person_releases_and_outlives_a_restart(line):
    withheld(line)
    said = line.watch.objection
    assert said is not None and "NUT: score went down" in said
    line.restart()
    assert line.watch.objection == said
    list(line.parts(500))  # the shift is over, the latch stays
    assert line.watch.level == 3
    order = line.order()
    assert line.watch.obey() == order
    assert line.watch.objection is None and line.watch.level == 0
    line.restart()
    assert line.watch.objection is None
    assert line.watch.state.orders == (order,)
    assert line.watch.state.streams["NUT"]["score"].centre is not None  # Phase I is kept
    assert line.watch.obey() is None


def test_a_release_waits_for_the_golden_parts(tmp_path):
    line = Line(tmp_path / "d.json", replace(SMALL, golden={"G1": "PASS", "G2": "FAIL"}))
    line.watch.part(verdict(serial="G1"))
    line.watch.part(verdict(serial="G1", outcome=Outcome.FAIL))
    assert line.watch.level == 3
    assert "golden part G1 must be PASS, the checks say FAIL" in str(line.watch.objection)
    order = line.order()
    assert line.watch.obey() is None
    line.watch.part(verdict(serial="G1"))
    assert line.watch.refusal(order) is not None and "G2" in str(line.watch.refusal(order))
    line.watch.part(verdict(serial="G2", outcome=Outcome.FAIL))
    assert line.watch.obey() == order and line.watch.level == 0


def test_a_golden_part_that_passes_with_another_score_is_a_miss(tmp_path):
    line = Line(tmp_path / "d.json", replace(SMALL, golden={"G1": "PASS"}))
    for score in (-6.0, -6.2, -5.8, -6.1, -5.9):
        assert line.watch.part(verdict(score, serial="G1")) == 0
    assert line.watch.part(verdict(-6.3, serial="G1")) == 0
    assert line.watch.part(verdict(-4.0, serial="G1")) == 3


def test_a_golden_part_of_an_advisory_station_is_judged_by_the_checks(tmp_path):
    line = Line(tmp_path / "d.json", replace(SMALL, golden={"G1": "PASS"}))
    assert line.watch.part(verdict(serial="G1", mode="advisory")) == 0


def test_golden_parts_and_errors_do_not_enter_the_charts(tmp_path):
    line = Line(tmp_path / "d.json", replace(SMALL, golden={"G1": "PASS"}))
    line.watch.part(verdict(serial="G1"))
    line.watch.part(verdict(outcome=Outcome.ERROR))
    assert line.watch.state.streams == {} and line.watch.state.rates == {}


def test_fail_that_comes_ten_times_as_often_is_found(line):
    rng = np.random.default_rng(1)
    parts = 0
    while line.watch.level < 3:
        outcome = Outcome.FAIL if rng.random() < 0.03 else Outcome.PASS
        line.watch.part(verdict(-6.0, 0.9, outcome))
        parts += 1
    assert parts < 600
    assert "FAIL more often" in line.watch.text


def test_a_lost_certificate_is_no_rise_of_unsure(line):
    assert max(line.parts(300, mode="advisory")) <= 1
    assert line.watch.state.rates["NUT"]["UNSURE"].sum == 0.0


def test_another_bundle_has_its_scores_learnt_anew_and_ends_no_objection(line):
    withheld(line)
    list(line.parts(1, model=replace(MODEL, sha256="b" * 64)))
    streams = line.watch.state.streams["NUT"]
    assert streams["score"].centre is None and streams["valid_share"].centre is not None
    assert line.watch.level == 3


def test_relearn_begins_phase_1_anew(line):
    line.order("relearn")
    assert line.watch.obey() is not None
    assert line.watch.state.streams == {}


@pytest.mark.parametrize("content", ["{", "[]", '{"latch": 3}', '{"unknown": 1}'])
def test_a_state_that_cannot_be_read_withholds_pass(tmp_path, content):
    path = tmp_path / "d.json"
    path.write_text(content)
    watch = Watch(SMALL, path)
    assert watch.level == 3 and "lost" in str(watch.objection)


def test_correlated_subgroups_are_told():
    rng = np.random.default_rng(2)
    means = [0.0]
    for step in rng.normal(size=200):
        means.append(0.6 * means[-1] + float(step))
    stream = drift.learnt("score", tuple(means))
    assert stream.correlation > drift.CORRELATED
    independent = drift.learnt("score", tuple(rng.normal(size=100).tolist()))
    assert abs(independent.correlation) < drift.CORRELATED


def test_one_disturbed_subgroup_does_not_widen_the_limits():
    rng = np.random.default_rng(3)
    clean = rng.normal(size=100)
    stream = drift.learnt("score", (*clean.tolist(), 40.0))
    assert stream.centre == pytest.approx(clean.mean(), abs=0.1)
    assert stream.spread == pytest.approx(clean.std(ddof=1), rel=0.1)


def test_a_figure_that_never_moves_gives_no_alarm(tmp_path):
    line = Line(tmp_path / "d.json", replace(SMALL, signals=("saturated_share",)))
    base = verdict()
    for n in range(1200):
        share = 0.0 if n < 1000 else 0.0005
        scan = ScanSummary(points=1, quality={"saturated_share": share})
        assert line.watch.part(replace(base, scan=scan)) == 0


def test_too_short_a_phase_1_is_refused():
    with pytest.raises(ContractError, match="25 subgroups or more, 1250"):
        DriftConfig(phase1_parts=1000)
