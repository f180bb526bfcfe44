"""The bench: sums of stages, repeats compared, and one short run to the broker's confirmation."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest

from forge_station import bench, scan_bench
from forge_station.bench import Kept, Measured
from forge_station.capture.base import Trigger
from forge_station.config import load_station
from forge_station.contract.verdict import GATE, CheckResult, Outcome, ScanSummary, decide
from forge_station.mes import broker


def test_orchestration_is_what_is_left_of_the_total():
    timings = {"capture": 500.0, "decode": 50.0, "scene": 20.0, "gate": 1.0, "gauge": 2.0,
               "views": 10.0, "read": 7.0, "judge": 3.0, "surface": 5.0, "deliver": 4.0,
               "total": 605.0}  # fmt: skip
    found = bench._with_sums(timings)
    assert "capture" not in found
    assert found["total"] == 105.0
    assert found["model"] == 15.0
    assert found["orchestration"] == 10.0  # gate, gauge, deliver and 3 ms that no stage names


def test_scans_come_in_turn_as_new_parts():
    scans = [(Trigger(name, f"P{name}"), [name], {name: None}) for name in "ab"]
    kept = Kept(scans)  # type: ignore[arg-type]
    seen = []
    for trigger in kept.triggers(5):
        seen.append((trigger.part_number, kept.capture(trigger), list(kept.calibrations)))
    assert [part for part, _, _ in seen] == ["Pa", "Pb", "Pa", "Pb", "Pa"]
    assert all(stacks == keys == [part[1:]] for part, stacks, keys in seen)


def verdict(serial: str, score: float, ms: float):
    check = CheckResult("surface", Outcome.PASS, score=score)
    gate = CheckResult(GATE, Outcome.PASS)
    return decide(
        required=("surface",), checks=[gate, check], scan=ScanSummary(points=1), result_id=serial,
        serial=serial, product="P", timings_ms={"total": ms},
    )  # fmt: skip


def test_a_repeat_differs_by_what_it_says_not_by_its_name_and_time():
    found = Measured()
    for scan, serial, score in ((0, "a", 9.0), (1, "b", 5.0), (0, "c", 9.0), (1, "d", 5.1)):
        found.compare(scan, verdict(serial, score, 1.0 + score))
    assert (found.repeats, found.different) == (2, 1)


def test_views_of_many_points_give_the_same_bits():
    found = bench.time_views(1, points=20_000, repeats=3)
    assert found["identical"] and found["points"] == 20_000
    assert 0 < found["min_ms"] <= found["p50_ms"]


def test_a_view_that_is_drawn_otherwise_is_noticed(monkeypatch):
    rng, real = np.random.default_rng(0), bench.render.view_depth

    def noisy(points, *rest):
        return real(points + rng.normal(0, 0.2, points.shape).astype(np.float32), *rest)

    monkeypatch.setattr(bench.render, "view_depth", noisy)
    assert not bench.time_views(1, points=5_000, repeats=2)["identical"]


@pytest.mark.slow
def test_a_short_run_ends_with_its_figures(repository, monkeypatch):
    pytest.importorskip("numba", reason="the simulator needs the extra demo")
    pytest.importorskip("iotcore", reason="the embedded broker needs the extra demo")
    monkeypatch.setattr(broker, "START_TIMEOUT_S", 60.0)  # a loaded machine
    config = load_station(repository / "station_config/demo/station.yaml")
    config = replace(config, scanner=replace(config.scanner, poses="overhead"))
    out = io.StringIO()
    assert bench.run(config, 2, out, scans=1) == 0
    result = json.loads(out.getvalue().splitlines()[-1])
    assert (result["parts"], result["scans"], result["repeats"]) == (2, 1, 1)
    assert (result["repeats_different"], result["unconfirmed"]) == (0, 0)
    stages = result["stages_ms"]
    assert {"decode", "scene", "deliver", "orchestration", "puback", "total"} <= set(stages)
    assert stages["puback"]["n"] == 2
    assert stages["puback"]["p50"] >= stages["deliver"]["p50"] * 0.5
    assert stages["orchestration"]["max"] < stages["total"]["max"]


def test_scan_bench_times_every_stage_and_states_its_ratios():
    pytest.importorskip("numba", reason="scans are simulated with the extra demo")
    out = io.StringIO()
    assert scan_bench.run(out, repeats=1, size=(160, 120)) == 0
    *table, last = out.getvalue().splitlines()
    figures = json.loads(last)
    stages = figures["stages_ms"]
    assert {"points", "decode", "fuse", "scene", "gate"} <= set(stages)
    assert (figures["patterns"], figures["poses"], figures["exposures"]) == (17, 4, 2)
    total = sum(stages[name] for name in ("decode", "fuse", "scene", "gate"))
    assert figures["parts_ms"] == pytest.approx(total, abs=0.3)
    assert figures["parts_of_target"] == pytest.approx(figures["parts_ms"] / 1500, abs=0.006)
    assert figures["points_of_target"] == pytest.approx(figures["points_ms"] / 150, abs=0.006)
    assert any("of the target 1500 ms" in line for line in table)
