"""The demo's line and its summary; the whole demo runs in other tests."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba", reason="the simulator needs the extra demo")

from forge_station import bench, demo
from forge_station import line as lines
from forge_station.capture.base import Trigger
from forge_station.config import EvidenceConfig, SimScanner, StationConfig
from forge_station.contract.spec import LineSpec, Product
from forge_station.contract.verdict import CheckResult, Outcome, Reason, ScanSummary, decide
from forge_station.errors import ConfigError
from forge_station.mes.topics import MqttConfig
from forge_station.sim import trays
from forge_station.station import Done

NUT = Product("NUT", "single", ("workpiece",), {"hex_nut M8": 1})
WASHER = Product("WASHER", "single", ("workpiece",), {"flat_washer M8": 1})


def config(tmp_path: Path, **changes: object) -> StationConfig:
    found = StationConfig(
        line=LineSpec("l1", (NUT, WASHER)),
        bundle=tmp_path / "bundle",
        scanner=SimScanner("sim", seed=3),
        outbox=tmp_path / "outbox.sqlite",
        evidence=EvidenceConfig(tmp_path / "evidence"),
        mqtt=MqttConfig(line="l1", station="s1"),
        broker="none",
    )
    return replace(found, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("run", [demo.run, bench.run])
def test_no_parts_are_refused_before_anything_is_opened(run, tmp_path):
    with pytest.raises(ConfigError, match="1 or more"):
        run(config(tmp_path), 0, io.StringIO())


def test_triggers_count_on_and_products_come_in_turn(tmp_path):
    line = lines.open_line(config(tmp_path))
    found = list(line.triggers(3, first=8))
    assert [trigger.serial for trigger in found] == ["s1-000008", "s1-000009", "s1-000010"]
    assert [trigger.part_number for trigger in found] == ["WASHER", "NUT", "WASHER"]


def test_the_same_number_gives_the_same_tray_whatever_came_before(tmp_path):
    one, other = lines.open_line(config(tmp_path)), lines.open_line(config(tmp_path))
    *_, last = one.triggers(4)
    (same,) = other.triggers(1, first=4)
    assert last == same
    assert one.trays[last.serial].parts == other.trays[same.serial].parts
    assert one.trays[last.serial].fault == other.trays[same.serial].fault


def test_a_long_run_keeps_the_truth_and_drops_the_shapes(tmp_path):
    line = lines.open_line(config(tmp_path))
    running = line.triggers(2)
    first = next(running)
    assert line.trays[first.serial].meshes
    next(running)
    assert line.trays[first.serial].meshes == ()
    assert line.trays[first.serial].parts


def test_the_scanner_is_made_once_a_product_and_sees_the_tray(tmp_path):
    line = lines.open_line(config(tmp_path))
    running = line.triggers(3)
    first = next(running)
    scanner = line.scanner_of(first)
    stacks = scanner.capture(first)
    assert len(stacks) == len(scanner.calibrations) == 4
    assert stacks[0].images[:, 0].max() > 100
    assert line.scanner_of(next(running)) is not scanner
    assert line.scanner_of(next(running)) is scanner


def done(serial: str, outcome: Outcome, total: float) -> Done:
    reasons = () if outcome is Outcome.PASS else (Reason("WRONG_MODEL", "text"),)
    verdict = decide(
        required=("workpiece",),
        checks=[CheckResult("scan", Outcome.PASS), CheckResult("workpiece", outcome, reasons)],
        scan=ScanSummary(points=1),
        result_id=f"r-{serial}",
        serial=serial,
        product="NUT",
        timings_ms={"read": total / 2, "total": total},
    )
    return Done(Trigger(serial, "NUT"), verdict)


def tray(fault: str) -> trays.Tray:
    return trays.Tray("NUT", ("hex_nut M8",), fault, ())


RUN = [
    done("1", Outcome.PASS, 10.0),
    done("2", Outcome.FAIL, 20.0),
    done("3", Outcome.PASS, 30.0),
    done("4", Outcome.FAIL, 40.0),
    done("5", Outcome.UNSURE, 50.0),
    done("6", Outcome.UNSURE, 60.0),
]
TRUTH = {serial: tray("right" if serial in "126" else "dent") for serial in "123456"}


def test_overkill_is_a_good_part_failed_and_an_escape_a_bad_one_passed():
    found = demo.summary(RUN, TRUTH, published=6, acked=4)
    assert (found["overkill"], found["escapes"]) == (1, 1)
    assert found["outcomes"] == {"PASS": 2, "FAIL": 2, "UNSURE": 2, "ERROR": 0}
    assert (found["parts"], found["published"], found["acked"]) == (6, 6, 4)
    assert found["latency_ms"]["p50"] == 30.0
    assert found["latency_ms"]["stages"]["read"]["p95"] == 30.0


def test_the_table_counts_outcomes_against_the_truth():
    lines = demo.table(RUN, TRUTH).splitlines()
    assert lines[1].split() == ["truth", "PASS", "FAIL", "UNSURE", "ERROR"]
    assert lines[2].split() == ["right", "1", "1", "1", "-"]
    assert lines[3].split() == ["dent", "1", "1", "1", "-"]
    assert "overkill 1   escapes 1" in lines
    assert "truth" not in demo.table(RUN, {}), "recorded parts have none"


def test_a_line_names_every_reason_once_and_the_truth():
    part = RUN[1]
    text = demo.line_of(part, "right")
    assert "2  NUT            FAIL   WRONG_MODEL  [truth: right]" in text
    assert "20 ms: read 10" in text
    assert "truth" not in demo.line_of(part, None)
    assert np.count_nonzero([c == "\n" for c in text]) == 1
