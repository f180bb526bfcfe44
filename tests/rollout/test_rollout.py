"""A bundle to three stations at a real broker: forward, stopped, taken back, cut off, resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba", reason="the simulator needs the extra demo")
pytest.importorskip("rfc8785", reason="commands need the extra commands")

from forge_station import cli, control, private_key
from forge_station.bundles import deploy
from forge_station.mes.command import CommandConfig
from forge_station.mes.listen import Listener, line_of
from forge_station.rollout import command, runner, ways
from forge_station.rollout.record import Folder, RolloutRecord
from tests.bundles.test_deploy import bundle
from tests.mes import signing_rig
from tests.mes.rig import MOSQUITTO, Mosquitto
from tests.mes.test_command_client import pem
from tests.rollout.rig import Plant, RigStation, opened, until

pytestmark = pytest.mark.skipif(MOSQUITTO is None, reason="no mosquitto on this machine")
STATES = [
    "QUEUED", "DOWNLOADING", "VERIFYING", "STAGED", "SELF_TEST", "SHADOW", "ACTIVATING", "TRIAL",
    "SUCCEEDED",
]  # fmt: skip


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plant]:
    monkeypatch.setattr(control, "open_station_inspector", lambda config, folder: opened(folder))
    monkeypatch.setattr(command, "TICK_S", 0.02)
    monkeypatch.setattr(runner, "AGAIN_S", 0.2)
    monkeypatch.setattr(ways, "AGAIN_S", 0.2)
    (tmp_path / "me.pem").write_bytes(pem(signing_rig.KEY))
    (tmp_path / "other.pem").write_bytes(pem(signing_rig.STRANGER))
    with ExitStack() as stack:
        broker = stack.enter_context(Mosquitto(tmp_path))
        yield Plant(tmp_path, broker.port, stack, fresh_bundle)


def fresh_bundle(folder: Path, release: int, says: str = "PASS") -> str:
    """A bundle file; the same again is the same file."""
    path = folder / f"bundle{release}{says}.fsb"
    return str(path) if path.exists() else bundle(folder, release, says)


def rollout(plant: Plant, action: str, *more: str, key: str = "me.pem") -> int:
    arguments = ["rollout", action, str(plant.folder / "plan.yaml"), *more]
    if action in ("start", "resume", "abort", "check"):
        arguments += ["--key", str(plant.folder / key)]
    return cli.main(arguments)


def record(plant: Plant) -> RolloutRecord:
    return Folder(plant.folder / "plan.rollout").read()


def steps(plant: Plant) -> dict[str, tuple[str, str]]:
    return {item.name: (item.step, item.state) for item in record(plant).stations}


def test_group_by_group_and_the_consumer_sees_every_step(
    plant: Plant, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("s1", "s2", "s3"):
        plant.add(name)
    port = free_port()
    plant.plan(bundle(plant.folder, 2), url=None, serve=f"http://127.0.0.1:{port}")
    assert rollout(plant, "check") == 0
    with ExitStack() as stack:
        heard = {
            name: stack.enter_context(Listener(station.config.mqtt))
            for name, station in plant.stations.items()
        }
        assert rollout(plant, "start", "--json") == 0
        for name, listener in heard.items():
            came = [item for item in listener.messages(0.5) if item.kind == "job"]
            told = {item.message["version"]: item.message["state"] for item in came}
            assert [told[version] for version in sorted(told)] == STATES, name
            last = max(came, key=lambda item: item.message["version"])
            assert last.message["shadow"] == {"parts": 3, "different": 0}
            assert "SUCCEEDED (9)  nuts release 2  shadow 3 parts, 0 different" in line_of(last)
    assert plant.releases == {"s1": 2, "s2": 2, "s3": 2}
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["phase"], [item["step"] for item in found["stations"]]) == (
        "SUCCEEDED", ["DONE"] * 3,
    )  # fmt: skip
    lines = (plant.folder / "plan.rollout" / "log.jsonl").read_text().splitlines()
    log = [(entry.get("station"), entry["text"]) for entry in map(json.loads, lines)]
    done = log.index((None, "group canary is done"))
    assert all(log.index((name, "order")) > done for name in ("s2", "s3"))
    assert rollout(plant, "start") == 64, "begun once"
    assert "begun already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("max_failed", "phase", "left", "step"),
    [(0, "ROLLED_BACK", 1, "BACK"), (0.5, "SUCCEEDED", 2, "DONE")],
)
def test_a_station_with_a_bad_bundle_goes_back_by_itself_and_the_limit_decides_on_the_others(
    plant: Plant, max_failed: float, phase: str, left: int, step: str
) -> None:
    for name in ("s1", "s2", "s3"):
        plant.add(name)
    stations = [
        {"name": "s1"},
        {"name": "s2", "bundle": bundle(plant.folder, 2, "FAIL")},
        {"name": "s3"},
    ]
    plant.plan(bundle(plant.folder, 3), stations=stations, gates={"max_failed": max_failed})
    assert rollout(plant, "start") == (0 if phase == "SUCCEEDED" else 1)
    assert record(plant).phase == phase
    assert steps(plant)["s2"] == ("FAILED", "ROLLED_BACK")
    assert "TRIAL" in record(plant).station("s2").code
    assert plant.releases == {"s1": {1: 1, 2: 3}[left], "s2": 1, "s3": {1: 1, 2: 3}[left]}
    assert (steps(plant)["s1"][0], steps(plant)["s3"][0]) == (step, step)


def test_a_canary_that_fails_stops_it_before_anybody_else_is_asked(plant: Plant) -> None:
    for name in ("s1", "s2"):
        plant.add(name)
    plant.plan(bundle(plant.folder, 2, "FAIL"), when_exceeded="stop")
    assert rollout(plant, "start") == 1
    found = record(plant)
    assert (found.phase, "1 of 1 stations" in found.why) == ("STOPPED", True)
    assert steps(plant)["s2"] == ("WAITING", "")
    assert plant.stations["s2"].jobs == []


def test_what_a_station_allows_and_the_plan_does_not_goes_back(plant: Plant) -> None:
    plant.add("s1", trial_parts=0)  # it keeps at once what it tried beside the line
    plant.plan(bundle(plant.folder, 2, "FAIL"), groups=None, gates={"shadow_disagree": 0.5})
    assert rollout(plant, "start") == 1
    (item,) = record(plant).stations
    assert (item.step, item.state, item.code) == ("BACK", "ROLLED_BACK", "GATE")
    assert "3 of 3 parts judged differently in SHADOW, the gate is 50 %" in item.detail
    assert plant.releases == {"s1": 1}


def test_approval_pause_and_resume(plant: Plant, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("s1", "s2"):
        plant.add(name)
    groups = [
        {"name": "canary", "stations": ["s1"], "gates": {"approval": True}},
        {"name": "all", "share": 1},
    ]
    plant.plan(bundle(plant.folder, 2), groups=groups)
    assert rollout(plant, "start", "--no-wait") == 2
    assert plant.releases == {"s1": 2, "s2": 1}
    assert "waits for approval of group canary" in capsys.readouterr().out
    assert rollout(plant, "approve", "canari") == 64
    assert rollout(plant, "pause") == 0
    assert rollout(plant, "approve", "canary", "--by", "j.doe") == 0
    assert rollout(plant, "status") == 2
    assert "paused" in capsys.readouterr().out
    assert plant.releases == {"s1": 2, "s2": 1}
    assert rollout(plant, "resume") == 0
    assert plant.releases == {"s1": 2, "s2": 2}
    assert rollout(plant, "pause") == 1, "it is over"


def test_an_approval_says_what_the_next_group_still_waits_for(
    plant: Plant, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("s1", "s2"):
        plant.add(name)
    gates = {"approval": True, "wait_s": 3600}
    groups = [
        {"name": "canary", "stations": ["s1"], "gates": gates},
        {"name": "all", "share": 1, "gates": {"wait_s": 60}},
    ]
    plant.plan(bundle(plant.folder, 2), groups=groups)
    assert rollout(plant, "start", "--no-wait") == 2
    ends = datetime.fromtimestamp(record(plant).group_done + 3600).astimezone()
    wait = f"gates.wait_s of group canary, until {ends.isoformat(' ', 'seconds')} ("
    assert f"waits for {wait}" in capsys.readouterr().out
    assert rollout(plant, "approve", "canary") == 0
    assert f"the next group still waits for {wait}" in capsys.readouterr().out
    assert rollout(plant, "approve", "all") == 0
    assert (
        "once this one is done and has been so for gates.wait_s (60 s)" in capsys.readouterr().out
    )


def test_check_says_each_cause_by_its_own(plant: Plant, capsys: pytest.CaptureFixture[str]) -> None:
    plant.add("s1", running=False)
    plant.add("s2", running=False)
    mute, bare = plant.stations.values()
    mute.config = replace(mute.config, commands=CommandConfig())
    bare.takes_bundles = False
    with mute, bare:
        plant.plan(bundle(plant.folder, 2))
        assert rollout(plant, "check") == 1
    said = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "NOT READY: it takes no commands (commands.keys" in said["s1"]
    assert "NOT READY: it has no bundle store" in said["s2"]


def test_abort_takes_back_who_is_under_way(plant: Plant) -> None:
    for name in ("s1", "s2", "s3"):
        plant.add(name)
    plant.stations["s2"].flowing.clear()  # it stays in SHADOW
    plant.plan(bundle(plant.folder, 2))
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(rollout(plant, "start")))
    thread.start()
    try:
        until(lambda: Folder(plant.folder / "plan.rollout").exists)
        until(lambda: steps(plant)["s2"] == ("UNDER_WAY", "SHADOW"))
        until(lambda: steps(plant)["s3"][0] == "DONE")
        assert rollout(plant, "resume") == 64, "one process at a time"
        assert (rollout(plant, "pause"), rollout(plant, "resume")) == (0, 0), "of the other one"
        assert rollout(plant, "abort") == 0
    finally:
        thread.join(30)
    assert (codes, record(plant).phase) == ([1], "ABORTED")
    assert steps(plant) == {
        "s1": ("DONE", "SUCCEEDED"), "s2": ("BACK", "CANCELED"), "s3": ("DONE", "SUCCEEDED"),
    }  # fmt: skip
    assert plant.releases == {"s1": 2, "s2": 1, "s3": 2}


def test_another_file_under_the_name_of_the_bundle_is_refused(
    plant: Plant, capsys: pytest.CaptureFixture[str]
) -> None:
    plant.add("s1", running=False)
    stick = str(plant.folder / "stick")
    stations = [{"name": "s1", "stick": stick}]
    file = bundle(plant.folder, 2)
    plant.plan(file, groups=None, stations=stations, mqtt=None)
    assert rollout(plant, "start", "--no-wait") == 2
    shutil.copyfile(bundle(plant.folder, 3), file)
    assert rollout(plant, "resume") == 64
    assert "another one than when the rollout began" in capsys.readouterr().err
    (plant.folder / "stick").mkdir()
    assert rollout(plant, "abort") == 1
    assert record(plant).phase == "ABORTED"


def test_abort_with_back_where_no_process_is_at_it(plant: Plant) -> None:
    for name in ("s1", "s2"):
        plant.add(name)
    groups = [
        {"name": "canary", "stations": ["s1"], "gates": {"wait_s": 3600}},
        {"name": "all", "share": 1},
    ]
    plant.plan(bundle(plant.folder, 2), groups=groups)
    assert rollout(plant, "start", "--no-wait") == 2
    assert plant.releases == {"s1": 2, "s2": 1}
    assert rollout(plant, "abort", "--back") == 1
    assert (record(plant).phase, plant.releases) == ("ABORTED", {"s1": 1, "s2": 1})
    assert steps(plant)["s1"] == ("BACK", "ROLLED_BACK")


def test_a_killed_process_is_only_late(plant: Plant, repository: Path) -> None:
    for name in ("s1", "s2"):
        plant.add(name)
    plant.stations["s1"].flowing.clear()
    plan = plant.plan(bundle(plant.folder, 2))
    key = str(plant.folder / "me.pem")
    process = subprocess.Popen(
        [sys.executable, "-m", "forge_station.cli", "rollout", "start", str(plan), "--key", key],
        cwd=repository,
        env={**os.environ, "PYTHONPATH": "edge:."},
        stdout=subprocess.DEVNULL,
    )
    try:
        until(lambda: Folder(plant.folder / "plan.rollout").exists)
        until(lambda: steps(plant)["s1"] == ("UNDER_WAY", "SHADOW"))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    plant.stations["s1"].flowing.set()
    until(lambda: plant.stations["s1"].release == 2)  # a station needs nobody to go on
    assert rollout(plant, "status") == 2
    assert rollout(plant, "resume") == 0
    assert plant.releases == {"s1": 2, "s2": 2}
    assert [len(station.jobs) for station in plant.stations.values()] == [1, 1]


def test_an_offline_station_gets_its_order_when_it_comes(plant: Plant) -> None:
    late = plant.add("s1", running=False)
    plant.plan(bundle(plant.folder, 2), groups=None)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(rollout(plant, "start")))
    thread.start()
    try:
        until(lambda: Folder(plant.folder / "plan.rollout").exists)
        until(lambda: "nothing is known" in record(plant).station("s1").detail)
        plant.stack.enter_context(late)
    finally:
        thread.join(30)
    assert (codes, plant.releases) == ([0], {"s1": 2})


def test_an_offline_station_fails_after_its_time_and_is_not_ordered_any_more(
    plant: Plant,
) -> None:
    plant.add("s1")
    late = plant.add("s2", running=False)
    plant.plan(
        bundle(plant.folder, 2), gates={"timeout_s": 1}, groups=[{"name": "all", "share": 1}]
    )
    plant.stations["s1"].flowing.set()
    assert rollout(plant, "check") == 1
    assert rollout(plant, "start") == 1
    item = record(plant).station("s2")
    assert (item.step, item.code, item.failed) == ("BACK", "TOO_LATE", True)
    with late:
        assert late.jobs == []
    assert plant.releases == {"s1": 1, "s2": 1}


def test_a_key_that_is_not_enrolled_is_refused_by_the_stations(plant: Plant) -> None:
    plant.add("s1")
    plant.plan(bundle(plant.folder, 2), groups=None)
    assert rollout(plant, "start", key="other.pem") == 1
    (item,) = record(plant).stations
    assert (item.step, item.state, item.code) == ("FAILED", "REFUSED", "UNKNOWN_KEY")


@pytest.mark.parametrize("allowed", [False, True])
def test_stations_of_different_releases(plant: Plant, allowed: bool) -> None:
    """One is behind, one runs it already, one is ahead."""
    for name, release in (("s1", 1), ("s2", 2), ("s3", 9)):
        plant.add(name, release=release)
    plant.plan(
        fresh_bundle(plant.folder, 2),
        groups=None,
        allow_downgrade=allowed,
        when_exceeded="stop",
    )
    assert rollout(plant, "start") == (0 if allowed else 1)
    assert plant.releases == {"s1": 2, "s2": 2, "s3": 2 if allowed else 9}
    assert plant.stations["s2"].jobs == []
    wanted = ("DONE", "SUCCEEDED") if allowed else ("FAILED", "REJECTED")
    assert steps(plant)["s3"] == wanted


@pytest.fixture
def carried(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RigStation]:
    """A station without a network whose stick was there and is back; with a key or without."""

    def make(**limits: Any) -> RigStation:
        monkeypatch.setattr(deploy, "LOOK_S", 0.05)
        private_key.generate(plant.folder / "s1.pem", plant.folder / "s1.pub.pem")
        station = plant.add("s1", **limits)
        home, there = plant.folder / "stick", plant.folder / "there"
        stations = [{"name": "s1", "stick": str(home), "key": "s1.pub.pem"}]
        plant.plan(bundle(plant.folder, 2), groups=None, stations=stations, mqtt=None)
        assert rollout(plant, "check") == 0
        assert rollout(plant, "start", "--no-wait") == 2, "no stick is plugged in"
        assert record(plant).station("s1").code == ""
        home.mkdir()
        assert rollout(plant, "resume", "--no-wait") == 2
        shutil.move(home, there)
        monkeypatch.setattr(command, "load_station", lambda path: station.config)
        apply = ["rollout", "apply", str(there), "--station", "x.yaml", "--json"]
        assert cli.main(apply) == 0
        assert station.release == 2
        assert rollout(plant, "resume", "--no-wait") == 2, "the stick is not back"
        shutil.move(there, home)
        return station

    return make


def test_a_station_without_a_network_gets_it_by_a_stick(
    plant: Plant, carried: Callable[..., RigStation], capsys: pytest.CaptureFixture[str]
) -> None:
    carried(report_key=plant.folder / "s1.pem")
    assert "by a stick, its report signed with" in capsys.readouterr().out
    assert rollout(plant, "resume") == 0
    assert "SUCCEEDED" in capsys.readouterr().out
    item = record(plant).station("s1")
    assert (item.step, item.trial, item.unsigned) == ("DONE", (3, 0, 0, 0), False)


def test_a_report_that_nobody_signed_counts_only_if_asked_for_by_name(
    plant: Plant, carried: Callable[..., RigStation], capsys: pytest.CaptureFixture[str]
) -> None:
    carried()
    assert "the report is not signed (release.report_key)" in capsys.readouterr().out
    assert rollout(plant, "resume", "--no-wait") == 2
    text = "its report does not count: it is not signed (rollout resume --unsigned s1)"
    assert text in capsys.readouterr().out
    item = record(plant).station("s1")
    assert (item.step, item.state, item.detail) == ("ORDERED", "", text)
    assert rollout(plant, "resume", "--unsigned", "s2") == 64
    assert "no station by a stick" in capsys.readouterr().err
    assert rollout(plant, "resume", "--no-wait") == 2
    assert text in capsys.readouterr().out, "told again"
    assert rollout(plant, "status") == 2
    assert f"s1: {text}" in capsys.readouterr().out
    report = next((plant.folder / "stick").glob("*/report.json"))
    content = report.read_text()
    sig = {"keyId": "0" * 16, "alg": "ed25519", "value": ""}
    report.write_text(json.dumps({**json.loads(content), "sig": sig}))
    assert rollout(plant, "resume", "--no-wait", "--unsigned", "s1") == 64
    error = capsys.readouterr().err
    assert "SUCCEEDED, sha256" in error and "it is signed with the key 0000" in error
    assert "does not help for an altered one" in error
    report.unlink()
    assert rollout(plant, "resume", "--no-wait", "--unsigned", "s1") == 64
    assert "no report" in capsys.readouterr().err
    report.write_text(content)
    assert rollout(plant, "resume", "--no-wait") == 2, "what was refused is not kept"
    assert rollout(plant, "resume", "--unsigned", "s1", "--issuer", "anna") == 0
    told = capsys.readouterr().out
    assert "SUCCEEDED (unsigned)" in told and "counts unsigned: anna asked" in told
    assert (record(plant).station("s1").step, record(plant).station("s1").unsigned) == (
        "DONE",
        True,
    )


def test_abort_leaves_an_order_whose_report_does_not_count_to_a_person(
    plant: Plant, carried: Callable[..., RigStation]
) -> None:
    """The station may have taken it: that it is back nobody can say."""
    station = carried()
    assert rollout(plant, "abort") == 1
    item = record(plant).station("s1")
    assert (item.step, item.code, station.release) == ("FAILED", "NOT_BACK", 2)
    assert "by hand there" in item.detail


def test_two_rollouts_on_one_stick_are_refused_at_both_ends_until_one_is_over(
    plant: Plant, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    station = plant.add("s1", running=False)
    home = plant.folder / "stick"
    home.mkdir()
    stations = [{"name": "s1", "stick": str(home)}]
    plant.plan(fresh_bundle(plant.folder, 2), groups=None, stations=stations, mqtt=None)
    assert rollout(plant, "start", "--no-wait") == 2
    second = ("--state", str(plant.folder / "second"))
    assert rollout(plant, "start", "--no-wait", *second) == 64
    assert f"got one of rollout {record(plant).id}" in capsys.readouterr().err
    assert not (plant.folder / "second").exists() and len(list(home.iterdir())) == 1
    shutil.move(home, plant.folder / "away")
    assert rollout(plant, "start", "--no-wait", *second) == 2, "no stick is plugged in"
    shutil.move(plant.folder / "away", home)
    assert rollout(plant, "resume", "--no-wait", *second) == 64
    [place] = home.iterdir()
    order = json.loads((place / "order.json").read_text())
    (other := home / "rollout-x.s1").mkdir()
    (other / "order.json").write_text(json.dumps({**order, "job": "x.s1"}))
    capsys.readouterr()
    monkeypatch.setattr(command, "load_station", lambda path: station.config)
    apply = ["rollout", "apply", str(home), "--station", "x.yaml", "--no-wait"]
    assert cli.main(apply) == 64
    assert "another rollout is not over on this stick" in capsys.readouterr().err
    assert not list(home.glob("*/report.json")), "none was taken"
    shutil.rmtree(other)
    (place / "report.json").write_text(
        json.dumps({"jobId": order["job"], "state": "ROLLED_BACK", "version": 9})
    )
    assert rollout(plant, "resume", "--no-wait", *second) == 2, "the other one is over"
    assert len(list(home.iterdir())) == 2


def test_a_stick_for_another_station_is_one_clear_error(
    plant: Plant, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    station = plant.add("s1", running=False)
    home = plant.folder / "stick"
    home.mkdir()
    plan = {"groups": None, "stations": [{"name": "s9", "stick": str(home)}], "mqtt": None}
    plant.plan(bundle(plant.folder, 2), **plan)
    assert rollout(plant, "start", "--no-wait") == 2
    monkeypatch.setattr(command, "load_station", lambda path: station.config)
    assert cli.main(["rollout", "apply", str(home), "--station", "x.yaml"]) == 64
    assert "got orders for s9" in capsys.readouterr().err
    assert rollout(plant, "abort") == 1
    assert not list(home.iterdir()), "the order is off the stick"
    assert steps(plant)["s9"][0] == "BACK"


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
