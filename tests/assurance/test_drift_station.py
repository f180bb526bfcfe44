"""The drift watch in a station: level 3 turns PASS into UNSURE within one part, until released."""

from __future__ import annotations

import io
import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="the simulator needs the extra demo")

from forge_station.assurance import drift, drift_command
from forge_station.assurance.drift import DriftConfig, Watch
from forge_station.assurance.error import AssuranceError
from forge_station.cli import build_parser
from forge_station.config import StationConfig, load_station
from forge_station.contract.verdict import Outcome
from forge_station.mes.outbox import Outbox
from forge_station.permit import Permit
from forge_station.run import Runner
from tests.station.certificates import certified
from tests.station.test_station import Bench, triggers

STATION = Path("station_config/demo/station.yaml")


@pytest.fixture
def bench(tmp_path):
    with Outbox(tmp_path / "outbox.sqlite", ballast_bytes=0) as outbox, ExitStack() as stack:
        yield Bench(tmp_path, outbox, stack)


def test_level_3_turns_the_next_pass_into_unsure_and_a_release_turns_it_back(bench):
    watch = Watch(DriftConfig(golden={"G": "FAIL"}), bench.folder / "outbox.drift.json")
    station = replace(bench.make(["fine"] * 4), drift=watch)
    first, golden, third, fourth = triggers(4)
    assert station.inspect(first).verdict.outcome is Outcome.PASS
    missed = station.inspect(replace(golden, serial="G")).verdict
    assert missed.outcome is Outcome.PASS and watch.level == 3  # it should have been a FAIL
    told = station.inspect(third).verdict
    assert told.outcome is Outcome.UNSURE
    assert [reason.code for reason in told.reasons] == ["NO_CERTIFICATE"]
    assert "golden part G must be FAIL, the checks say PASS" in told.reasons[0].text
    assert told.certification is not None and told.certification.mode == "advisory"
    assert "ADVISORY" in station.inspector.permit.text
    watch.state = replace(watch.state, golden={"G": drift.Golden("9999")})  # right since then
    order = {"action": "release", "by": "anna", "reason": "lens cleaned", "time": "t"}
    drift.order_path(watch.path).write_text(json.dumps(order))
    assert station.inspect(fourth).verdict.outcome is Outcome.PASS


def test_another_bundle_does_not_get_around_level_3(bench):
    """Whoever puts a new permit into the station: the watch takes it back before the next part."""
    path = bench.folder / "outbox.drift.json"
    path.write_text("damaged")
    station = replace(bench.make(["fine"]), drift=Watch(DriftConfig(), path))
    station.inspector = replace(station.inspector, permit=certified())
    assert station.inspect(triggers(1)[0]).verdict.outcome is Outcome.UNSURE


def test_a_watch_that_breaks_withholds_pass_and_stops_no_line(bench, monkeypatch):
    watch = Watch(DriftConfig(), bench.folder / "outbox.drift.json")
    station = replace(bench.make(["fine"] * 2), drift=watch)

    def broken(verdict: object) -> int:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(watch, "part", broken)
    first, second = triggers(2)
    assert station.inspect(first).verdict.outcome is Outcome.PASS
    assert station.inspect(second).verdict.outcome is Outcome.UNSURE
    assert "the drift watch failed: ZeroDivisionError" in str(watch.objection)


def test_a_withheld_permit_objects_though_its_certificate_holds():
    permit = certified()
    assert permit.objection is None
    assert replace(permit, withheld="drift").objection == "drift"
    assert Permit(refusal="none", withheld="drift").objection == "drift"


def test_levels_2_and_3_are_alarms(bench, monkeypatch):
    watch = Watch(DriftConfig(), bench.folder / "outbox.drift.json")
    runner = Runner(bench.config(), io.StringIO())
    runner._station = replace(bench.make([]), drift=watch)
    told: list[tuple[bool, str, str]] = []
    monkeypatch.setattr(
        runner, "_alarm",
        lambda active, code, text, params=None, key="": told.append((active, code, key)),
    )  # fmt: skip
    runner._alarm_drift()
    assert told == [(False, "DRIFT", "act"), (False, "DRIFT", "withheld")]
    watch.failed(ValueError("x"))
    told.clear()
    runner._alarm_drift()
    assert told == [(True, "DRIFT", "act"), (True, "DRIFT", "withheld")]


def test_the_station_file_turns_it_on(tmp_path):
    assert load_station(STATION).drift is None
    for entry in STATION.parent.iterdir():
        if entry != STATION:
            (tmp_path / entry.name).symlink_to(entry.resolve())
    own = tmp_path / "station.yaml"
    text = STATION.read_text(encoding="utf-8")
    own.write_text(f"{text}\ndrift: {{golden: {{M-OK: PASS}}}}\n", encoding="utf-8")
    assert load_station(own).drift == DriftConfig(golden={"M-OK": "PASS"})


def config_of(tmp_path: Path, own: DriftConfig | None) -> StationConfig:
    return replace(load_station(STATION), outbox=tmp_path / "outbox.sqlite", drift=own)


def test_the_command_orders_and_shows(tmp_path, capsys, monkeypatch):
    config = config_of(tmp_path, DriftConfig())
    monkeypatch.setattr(drift_command, "load_station", lambda path: config)
    watch = Watch(DriftConfig(), drift.state_path(config.outbox))
    watch.failed(ValueError("x"))
    parser = build_parser()

    def command(*words: str) -> int:
        args = parser.parse_args(["drift", *words])
        code: int = args.run(args)
        return code

    assert command("status") == 3
    assert (
        "the drift watch failed" in json.loads(capsys.readouterr().out.splitlines()[-1])["withheld"]
    )
    assert command("release", "--by", "anna", "--reason", "restarted") == 0
    order = watch.obey()
    assert order is not None and (order.by, order.reason) == ("anna", "restarted")
    assert command("status") == 0
    with pytest.raises(AssuranceError, match="reason"):
        command("release", "--reason", " ")


def test_a_station_without_a_watch_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(drift_command, "load_station", lambda path: config_of(tmp_path, None))
    args = build_parser().parse_args(["drift", "status"])
    with pytest.raises(AssuranceError, match="no drift watch"):
        args.run(args)
