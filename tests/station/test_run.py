"""`forge-station run`: a line that goes on through what breaks, and stops without losing a part."""

from __future__ import annotations

import io
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("numba", reason="the simulator needs the extra demo")

from forge_station import notify, run
from forge_station.capture.base import Trigger
from forge_station.cli import build_parser
from forge_station.config import EvidenceConfig, Runtime, SimScanner, StationConfig
from forge_station.contract.spec import LineSpec, Product
from forge_station.contract.verdict import Outcome
from forge_station.errors import CameraLostError, ConfigError, OutboxError
from forge_station.evidence.keeper import Keeper
from forge_station.journal import Journal
from forge_station.mes.outbox import Outbox, OutboxFull
from forge_station.mes.publisher import Publisher
from forge_station.mes.topics import MqttConfig
from forge_station.permit import Permit
from forge_station.run import Runner
from forge_station.station import Station
from forge_station.triggers.gate import Refusal, TriggerRefusedError
from forge_station.triggers.settings import CameraSource, MqttSource, PlcSource, SoftwareSource
from tests.station.certificates import certified
from tests.station.fake_model import FakeModel
from tests.station.test_station import NUT, PartInspector, Script

LINE = LineSpec("l1", (Product("NUT", "single", ("workpiece", "surface"), {NUT: 1}),))
PASSING = {"A": (NUT, 0.98)}


@dataclass
class Slow(Script):
    """A scanner that waits for the test: `entered` is set, `go` lets it end."""

    entered: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)

    def capture(self, trigger: Trigger) -> list[Any]:
        self.entered.set()
        self.go.wait(60.0)
        return super().capture(trigger)


@dataclass
class FakeLine:
    scanner: Script
    camera: None = None

    def warm_up(self) -> None: ...

    def scanner_of(self, trigger: Trigger) -> Script:
        return self.scanner


@dataclass
class Rig:
    """A run in a thread of this process, around a scripted scanner and model."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    scanner: Script = field(default_factory=lambda: Script(["fine"] * 100))
    permit: Permit = field(default_factory=certified)
    out: io.StringIO = field(default_factory=io.StringIO)
    code: int | None = None
    failed: OutboxError | None = None

    def config(self, **changes: object) -> StationConfig:
        config = StationConfig(
            line=LINE,
            bundle=self.folder / "bundle",
            scanner=SimScanner("sim"),
            outbox=self.folder / "outbox.sqlite",
            evidence=EvidenceConfig(self.folder / "evidence"),
            mqtt=MqttConfig(line="l1", station="s1"),
            broker="none",
            trigger=MqttSource("mqtt"),
        )
        return replace(config, **changes)  # type: ignore[arg-type]

    @contextmanager
    def opened(self, config: StationConfig, scanner_of: Any) -> Iterator[Station]:
        with Outbox(config.outbox, ballast_bytes=0) as outbox:
            inspector = PartInspector(FakeModel(PASSING), permit=self.permit)  # type: ignore[arg-type]
            publisher = Publisher(outbox, config.mqtt)
            self.station = Station(config, inspector, scanner_of, outbox, publisher, simulated=True)
            yield self.station

    @contextmanager
    def running(self, config: StationConfig | None = None) -> Iterator[Runner]:
        """Until the block ends, then told to stop. The exit code is in `code`."""
        self.monkeypatch.setattr(run, "open_line", lambda config, *more: FakeLine(self.scanner))
        self.monkeypatch.setattr(run, "open_station", self.opened)
        runner = Runner(config or self.config(), self.out)
        with ExitStack() as stack:
            runner.open(stack)

            def serve() -> None:
                try:
                    self.code = runner.serve()
                except OutboxError as error:
                    self.failed = error

            loop = threading.Thread(target=serve)
            loop.start()
            try:
                wait_for(lambda: runner.gate.objection() is None)
                yield runner
            finally:
                if not runner._stopping.is_set():
                    runner._signals.put(signal.SIGTERM)
                loop.join(60.0)
                assert not loop.is_alive()

    def stored(self) -> dict[str, str]:
        """Serial -> outcome of every verdict in the outbox."""
        return {body["partId"]: body["verdict"] for body in self.bodies("verdict")}

    def alarms(self) -> list[tuple[str, bool]]:
        return [(body["code"], body["active"]) for body in self.bodies("alarm")]

    def bodies(self, stream: str) -> list[dict[str, Any]]:
        with Outbox(self.folder / "outbox.sqlite", ballast_bytes=0) as outbox:
            return [json.loads(row.body) for row in outbox.fetch(stream, 0, 100)]


def wait_for(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, "did not come about"
        time.sleep(0.005)


@pytest.fixture
def rig(tmp_path, monkeypatch) -> Rig:
    return Rig(tmp_path, monkeypatch)


def ask(runner: Runner, serial: str, number: str = "NUT") -> queue.SimpleQueue[Any]:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    runner.commands.put(Trigger(serial, number), answers.put)
    return answers


def test_parts_come_in_and_verdicts_go_out_one_line_each(rig):
    with rig.running() as runner:
        for serial in ("a", "b"):
            assert ask(runner, serial).get(timeout=60).outcome is Outcome.PASS
    assert rig.code == run.STOPPED
    assert rig.stored() == {"a": "PASS", "b": "PASS"}
    lines = [line.split("  ") for line in rig.out.getvalue().splitlines() if "  NUT  " in line]
    assert [(line[1], line[3], line[4]) for line in lines] == [
        ("a", "PASS", "-"),
        ("b", "PASS", "-"),
    ]


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "No space left on device")])
def test_output_that_nobody_takes_stops_no_line(rig, error):
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    rig.out = Gone()
    with rig.running() as runner:
        for serial in ("a", "b"):
            assert ask(runner, serial).get(timeout=60).outcome is Outcome.PASS
    assert rig.code == run.STOPPED and rig.stored() == {"a": "PASS", "b": "PASS"}


@pytest.mark.parametrize(
    "change", [{"result_id": "?"}, {"begin_time": "now"}, {"serial": "x" * 999}]
)
def test_a_note_of_a_part_that_cannot_be_reported_does_not_keep_the_station_down(rig, change):
    config = rig.config()
    left = config.outbox.with_name("outbox.sqlite.part.json")
    facts = {
        "result_id": "0198c1f0-0000-7000-8000-000000000000", "serial": "a", "serial_source": "none",
        "begin_time": "2026-11-30T10:38:36.741Z", "line": "l1", "station": "s1", "source": "sim",
        "simulated": True, "part_number": "NUT",
    }  # fmt: skip
    left.write_text(json.dumps({**facts, **change}))
    with rig.running(config) as runner:
        assert ask(runner, "b").get(timeout=60).outcome is Outcome.PASS
    assert rig.stored()["b"] == "PASS" and json.loads(left.read_text()) == {}


def test_numbers_go_on_after_a_restart_whatever_was_refused(rig):
    rig.scanner = Slow(["fine"] * 9)
    for expected in ("s1-000001", "s1-000002"):
        rig.scanner.entered.clear()
        rig.scanner.go.clear()
        with rig.running() as runner:
            answer = ask(runner, "")
            assert rig.scanner.entered.wait(60)
            for _ in range(3):
                with pytest.raises(TriggerRefusedError):
                    ask(runner, "")
            rig.scanner.go.set()
            assert answer.get(timeout=60).serial == expected


def test_a_lost_scanner_is_an_error_and_an_alarm_and_the_line_goes_on(rig):
    rig.scanner = Script(["fine", CameraLostError("unplugged"), CameraLostError("gone"), "fine"])
    with rig.running() as runner:
        outcomes = [ask(runner, serial).get(timeout=60).outcome for serial in "abcd"]
    assert outcomes == [Outcome.PASS, Outcome.ERROR, Outcome.ERROR, Outcome.PASS]
    assert rig.alarms() == [("CAMERA_LOST", True), ("CAMERA_LOST", False)]


def test_an_overrun_is_refused_told_and_over_when_the_line_keeps_up(rig):
    rig.scanner = Slow(["fine"] * 9)
    with rig.running() as runner:
        first = ask(runner, "a")
        assert rig.scanner.entered.wait(60)
        for serial in ("b", "c"):
            with pytest.raises(TriggerRefusedError):
                ask(runner, serial)
        rig.scanner.go.set()
        assert first.get(timeout=60).outcome is Outcome.PASS
        for serial in ("d", "e"):
            wait_for(lambda: runner.gate.objection() is None)
            ask(runner, serial).get(timeout=60)
        assert runner.gate.counts().refused == {Refusal.BUSY: 2}
    assert rig.stored() == dict.fromkeys("ade", "PASS")
    assert rig.alarms() == [("TRIGGER_REFUSED", True), ("TRIGGER_REFUSED", False)]
    assert rig.out.getvalue().count("REFUSED  BUSY") == 2


class TestAFullOutbox:
    """The line holds: no PASS is sent, and nothing is lost."""

    @pytest.fixture
    def full(self, monkeypatch) -> threading.Event:
        """While it is set, there is no room for a verdict."""
        is_full = threading.Event()
        put = Outbox.put

        def maybe(self, stream, topic, body, id=None, timeout_s=10.0):
            if is_full.is_set() and stream == "verdict":
                raise OutboxFull("no room")
            return put(self, stream, topic, body, id, timeout_s)

        monkeypatch.setattr(Outbox, "put", maybe)
        monkeypatch.setattr(run, "HOLD_S", 0.01)
        return is_full

    def test_holds_the_part_and_the_line_until_there_is_room(self, rig, full):
        with rig.running() as runner:
            assert ask(runner, "a").get(timeout=60).outcome is Outcome.PASS
            full.set()
            wait_for(lambda: runner.gate.objection() is None)
            assert ask(runner, "b").get(timeout=60) is None, "the line is told ERROR at once"
            with pytest.raises(TriggerRefusedError, match="cannot be stored"):
                ask(runner, "c")
            full.clear()
            wait_for(lambda: runner.gate.objection() is None)
            assert ask(runner, "d").get(timeout=60).outcome is Outcome.PASS
        assert rig.stored() == {"a": "PASS", "b": "ERROR", "d": "PASS"}
        (held,) = [body for body in rig.bodies("verdict") if body["partId"] == "b"]
        assert [reason["code"] for reason in held["reasons"]] == ["OUTBOX_FULL"]

    def test_stopped_while_it_holds_it_reports_the_part_at_the_next_start(self, rig, full):
        with rig.running() as runner:
            full.set()
            assert ask(runner, "b").get(timeout=60) is None
        assert isinstance(rig.failed, OutboxFull)
        assert rig.stored() == {}
        full.clear()
        with rig.running():
            pass
        assert rig.stored() == {"b": "ERROR"}
        (body,) = rig.bodies("verdict")
        assert body["reasons"][0]["code"] == "INTERRUPTED" and body["productId"] == "NUT"
        with rig.running():
            pass
        assert len(rig.bodies("verdict")) == 1, "reported once"


def test_a_disk_that_takes_no_evidence_is_an_alarm_and_no_more(rig):
    keeper = Keeper(EvidenceConfig(rig.folder / "file"))
    (rig.folder / "file").touch()
    with rig.running() as runner, keeper:
        runner._station.keeper = keeper
        assert ask(runner, "a").get(timeout=60).outcome is Outcome.PASS
        assert keeper.drain(60)
        runner._monitor._look()
    assert rig.stored() == {"a": "PASS"} and rig.alarms() == [("EVIDENCE_NOT_STORED", True)]


def test_told_to_stop_it_finishes_the_part_in_work(rig):
    rig.scanner = Slow(["fine"])
    with rig.running() as runner:
        answer = ask(runner, "a")
        assert rig.scanner.entered.wait(60)
        runner._signals.put(signal.SIGTERM)
        wait_for(lambda: runner.gate.objection() == (Refusal.NOT_READY, "the station stops"))
        rig.scanner.go.set()
    assert rig.code == run.STOPPED
    assert answer.get(timeout=60).outcome is Outcome.PASS and rig.stored() == {"a": "PASS"}


def test_a_part_that_takes_longer_than_the_grace_gets_its_error(rig, monkeypatch):
    ended: list[int] = []
    monkeypatch.setattr(run.os, "_exit", lambda code: ended.append(code))
    rig.scanner = Slow(["fine"])
    rig_config = rig.config(runtime=Runtime(stop_grace_s=0.05))
    with rig.running(rig_config) as runner:
        answer = ask(runner, "a")
        assert rig.scanner.entered.wait(60)
        runner._signals.put(signal.SIGTERM)
        assert answer.get(timeout=60) is None
        wait_for(lambda: bool(ended))
        rig.scanner.go.set()
    assert ended[0] == run.GAVE_UP and isinstance(rig.failed, OutboxError)
    assert rig.stored() == {"a": "ERROR"}
    assert not Journal(rig.folder / "outbox.sqlite.part.json").left()


def test_a_serial_with_a_line_break_stays_one_line():
    assert run._printable("A1\nA2\x1b[2J \u00e9") == "A1\\nA2\\x1b[2J \u00e9"


class TestJournal:
    def test_a_part_that_a_crash_left_is_an_error_under_its_own_id(self, rig):
        with rig.running():
            job = rig.station.job_of(Trigger("a", "NUT"))
        Journal(rig.folder / "outbox.sqlite.part.json").begin(job, "NUT")
        with rig.running():
            pass
        (body,) = rig.bodies("verdict")
        assert (body["resultId"], body["partId"], body["verdict"]) == (job.result_id, "a", "ERROR")
        assert "INTERRUPTED" in rig.out.getvalue()

    def test_a_verdict_that_was_stored_before_the_crash_stays(self, rig):
        path = rig.folder / "outbox.sqlite.part.json"
        with rig.running() as runner:
            done = ask(runner, "a").get(timeout=60)
            job = replace(rig.station.job_of(Trigger("a", "NUT")), result_id=done.result_id)
        Journal(path).begin(job, "NUT")
        with rig.running():
            pass
        assert [body["verdict"] for body in rig.bodies("verdict")] == ["PASS"]

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"serial": "a"}', "\x00"])
    def test_a_damaged_file_stops_nothing(self, rig, content):
        (rig.folder / "outbox.sqlite.part.json").write_text(content)
        with rig.running() as runner:
            assert ask(runner, "a").get(timeout=60).outcome is Outcome.PASS

    def test_a_disk_that_takes_no_note_stops_nothing(self, rig, caplog):
        with rig.running() as runner:
            runner._journal.path = rig.folder / "evidence" / "x" / "\0bad"
            runner._journal.path = rig.folder / "outbox.sqlite" / "no-folder.json"
            assert ask(runner, "a").get(timeout=60).outcome is Outcome.PASS
        assert "cannot be noted" in caplog.text


class TestOpening:
    def test_evidence_that_cannot_be_written_is_found_first(self, rig):
        (rig.folder / "file").touch()
        config = rig.config(evidence=EvidenceConfig(rig.folder / "file" / "parts"))
        with pytest.raises(ConfigError, match="evidence cannot be written"), rig.running(config):
            pass

    def test_a_camera_trigger_needs_a_camera(self, rig, capsys):
        rig.monkeypatch.setattr(run, "open_line", lambda config, *more: FakeLine(rig.scanner))
        assert run.run(rig.config(trigger=CameraSource("camera")), rig.out) == run.UNAVAILABLE
        assert "no camera with an input line" in capsys.readouterr().err

    def test_a_bundle_that_is_missing_is_one_line(self, rig, capsys):
        rig.monkeypatch.setattr(run, "open_line", lambda config, *more: FakeLine(rig.scanner))
        assert run.run(rig.config(), rig.out) == run.UNAVAILABLE
        error = capsys.readouterr().err
        assert error.startswith("forge-station: ") and error.count("\n") == 1

    def test_a_second_station_on_the_same_outbox_is_refused(self, rig, capsys):
        with rig.running():
            assert run.run(rig.config(), io.StringIO()) == run.UNAVAILABLE
        assert "open in another process" in capsys.readouterr().err

    def test_the_help_names_the_exit_codes(self, capsys):
        for command in ("run", "trigger"):
            with pytest.raises(SystemExit):
                build_parser().parse_args([command, "--help"])
        told = capsys.readouterr().out
        assert all(f"{code}" in told for code in (64, 69, 70, 74, 75))


def test_a_plc_goes_through_the_whole_station(rig):
    """Modbus TCP -> gate -> loop -> outbox -> Modbus TCP, certified and advisory."""
    pytest.importorskip("pymodbus", reason="the PLC needs the extra plc")
    from tests.triggers.simulated_plc import Plc
    from tests.triggers.test_plc import ModbusBus, free_port, through

    port = free_port()
    settings = PlcSource("plc", port=port, heartbeat_s=30.0)
    for permit, expected in ((certified(), "OK"), (Permit(refusal="none"), "UNSURE")):
        rig.permit = permit
        with rig.running(rig.config(trigger=settings)):
            plc = Plc(ModbusBus(port), patience=100_000)
            through(plc, f"plc-{expected}")
            plc.bus.close()
        assert plc.decisions == {f"plc-{expected}": expected} and plc.mismatches == 0
    assert rig.stored() == {"plc-OK": "PASS", "plc-UNSURE": "UNSURE"}


def test_the_command_trigger_asks_the_running_station(rig):
    config = rig.config(trigger=SoftwareSource("software"))
    told = io.StringIO()
    args = build_parser().parse_args(["trigger", "--serial", "x1"])
    with rig.running(config):
        assert run.trigger(config, args, told) == 0
        args = build_parser().parse_args(["trigger", "--serial", "x2", "--part-number", "NO"])
        assert run.trigger(config, args, told) == 3
    first, second, text = told.getvalue().splitlines()
    assert (first, second) == ("x1  PASS  -", "x2  ERROR  UNKNOWN_PRODUCT")
    assert text.startswith("  no such product in the line") and text.endswith("got NO")
    assert rig.stored() == {"x1": "PASS", "x2": "ERROR"}
    with pytest.raises(ConfigError, match="expected trigger"):
        run.trigger(rig.config(), args, told)


class TestSystemd:
    @pytest.fixture
    def told(self, tmp_path, monkeypatch) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
            listener.bind(str(tmp_path / "notify"))
            listener.settimeout(60.0)
            monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
            yield listener

    def test_hears_ready_watchdog_and_stopping(self, rig, told, monkeypatch):
        monkeypatch.setenv("WATCHDOG_USEC", "60000")
        heard: list[str] = []

        def listen() -> None:
            while not heard or heard[-1] != "end":
                heard.append(told.recv(200).decode())

        listener = threading.Thread(target=listen)
        listener.start()
        with rig.running():
            wait_for(lambda: "WATCHDOG=1" in heard)
        notify.notify("end")
        listener.join(60.0)
        states = [item.split("\n")[0] for item in heard]
        assert states.index("READY=1") < states.index("STOPPING=1")

    def test_hears_nothing_more_from_a_loop_that_hangs(self, told, monkeypatch):
        monkeypatch.setenv("WATCHDOG_USEC", "30000")
        now = [0.0]
        liveness = notify.Liveness(5.0, clock=lambda: now[0])
        with notify.Watchdog(liveness):
            assert told.recv(100) == b"WATCHDOG=1"
            now[0] = 5.1
            told.settimeout(0.5)
            heard = 0
            with suppress(TimeoutError):
                while heard < 100:
                    heard += len(told.recv(100)) > 0
            assert heard < 100, "at most what was on its way"
            liveness.beat()
            assert told.recv(100) == b"WATCHDOG=1"

    def test_is_left_alone_where_it_does_not_ask(self, monkeypatch):
        monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
        assert not notify.notify("READY=1")
        for usec, pid in (("", ""), ("0", ""), ("x", ""), ("1000", "1")):
            monkeypatch.setenv("WATCHDOG_USEC", usec)
            monkeypatch.setenv("WATCHDOG_PID", pid)
            assert notify.watchdog_s() is None

    def test_gaps_of_hours_are_no_hang(self):
        now = [0.0]
        liveness = notify.Liveness(120.0, clock=lambda: now[0])
        for _ in range(2 * 8 * 3600):  # the loop beats every IDLE_S while it waits
            now[0] += run.IDLE_S
            assert liveness.alive
            liveness.beat()


@pytest.mark.slow
def test_a_station_process_inspects_and_stops_at_sigterm(repository, tmp_path):
    """The real command on the demo's line: triggers from another process, then SIGTERM."""
    demo = repository / "station_config" / "demo"
    content = yaml.safe_load((demo / "station.yaml").read_text())
    content |= {
        "line": str(demo / "line.yaml"),
        "bundle": str(demo / "bundle"),
        "broker": "none",
        "outbox": str(tmp_path / "outbox.sqlite"),
        "evidence": str(tmp_path / "parts"),
        "trusted_keys": [str(demo / "certificate_key.pem")],
        "runtime": {"threads": 1},
    }
    content["scanner"] |= {"image_size": [320, 240], "poses": "front_side", "exposures": [1.0]}
    file = tmp_path / "station.yaml"
    file.write_text(yaml.safe_dump(content))
    command = [sys.executable, "-m", "forge_station.cli"]
    env = {**os.environ, "PYTHONPATH": str(repository / "edge"), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, "run", "--station", str(file)], stdout=subprocess.PIPE, text=True, env=env
    ) as station:
        assert station.stdout is not None
        try:
            for line in station.stdout:
                if line.startswith("ready"):
                    break
            asked = subprocess.run(
                [*command, "trigger", "--station", str(file), "--serial", "p1",
                 "--part-number", "NUT-M8-5"],
                capture_output=True, text=True, env=env, timeout=100,
            )  # fmt: skip
            station.send_signal(signal.SIGTERM)
            rest = station.stdout.read()
        finally:
            station.kill()
    assert station.returncode == 0
    assert asked.returncode in (0, 1, 2) and asked.stdout.startswith("p1  ")
    assert f"  p1  NUT-M8-5  {asked.stdout.split()[1]}  " in rest
    assert not (tmp_path / "trigger.sock").exists()
