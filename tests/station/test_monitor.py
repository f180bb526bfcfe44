"""The monitor beside a station: what it tells, mirrors and serves; none of it reaches the loop."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from forge_station.capture.base import PatternStack, Scan, Trigger
from forge_station.capture.calibration import Calibration
from forge_station.config import EvidenceConfig, ReplayScanner, StationConfig
from forge_station.contract.spec import LineSpec, Product
from forge_station.contract.verdict import Outcome, ScanSummary
from forge_station.errors import CameraLostError, ConfigError
from forge_station.mes import payloads
from forge_station.mes.outbox import Outbox
from forge_station.mes.publisher import Publisher
from forge_station.mes.settings import MonitorConfig, OpcUaConfig, SparkplugConfig
from forge_station.mes.topics import MqttConfig
from forge_station.monitor import Monitor
from forge_station.permit import Permit
from forge_station.pipeline import Inspection, Inspector, Job
from forge_station.station import Station
from forge_station.timing import Stopwatch
from forge_station.triggers.gate import Gate
from tests.mes.rig import MOSQUITTO, Mosquitto, wait_for
from tests.station.certificates import certified
from tests.station.fake_model import FakeModel, part_cloud

NUT = "hex_nut M8"
LINE = LineSpec("l1", (Product("NUT", "single", ("workpiece", "surface"), {NUT: 1}),))


class NoScanner:
    """Hands out nothing but its name; `lost` makes the next capture fail."""

    lost = False

    @property
    def calibrations(self) -> Mapping[str, Calibration]:
        return {}

    def capture(self, trigger: Trigger) -> list[PatternStack]:
        if self.lost:
            raise CameraLostError("unplugged")
        return []

    def close(self) -> None: ...


@dataclass(frozen=True)
class PartInspector(Inspector):
    """Sees one nut in place of decoded stacks."""

    def inspect_stacks(
        self,
        job: Job,
        stacks: Sequence[PatternStack] | Sequence[Scan],
        calibrations: Mapping[str, Calibration],
        watch: Stopwatch | None = None,
    ) -> Inspection:
        part = part_cloud(NUT)
        return self.inspect_parts(job, [part], ScanSummary(points=len(part.points)), [], watch)


@dataclass
class Bench:
    station: Station
    scanner: NoScanner

    def status(self, name: str) -> dict[str, Any]:
        """A status as the publisher would send it now."""
        found = self.station.publisher._statuses[name]
        return dict(json.loads(payloads.status_body(name, self.station.config.mqtt.root, found)))

    def alarms(self) -> list[tuple[str, bool]]:
        rows = self.station.outbox.fetch("alarm", 0, 100)
        bodies = [json.loads(row.body) for row in rows]
        return [(body["code"], body["active"]) for body in bodies]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Outbox(tmp_path / "outbox.sqlite", ballast_bytes=0) as outbox:
        config = StationConfig(
            line=LINE,
            bundle=tmp_path / "bundle",
            scanner=ReplayScanner("replay", tmp_path),
            outbox=tmp_path / "outbox.sqlite",
            evidence=EvidenceConfig(tmp_path / "evidence"),
            mqtt=MqttConfig(line="l1", station="s1"),
            broker="none",
        )
        scanner = NoScanner()
        inspector = PartInspector(FakeModel({"A": (NUT, 0.98)}), permit=certified())  # type: ignore[arg-type]
        publisher = Publisher(outbox, config.mqtt)
        yield Bench(
            Station(
                config,
                inspector,
                lambda _: scanner,
                outbox,
                publisher,
                simulated=True,
            ),
            scanner,
        )


def test_health_and_alarms_without_any_section(bench: Bench) -> None:
    bench.station.inspector = replace(bench.station.inspector, permit=Permit())
    with Monitor(bench.station, period_s=0.02) as monitor:
        assert wait_for(lambda: "health" in bench.station.publisher._statuses)
        for done in bench.station.run([Trigger("s1-1", "NUT"), Trigger("s1-2", "NUT")]):
            monitor.part(done)
        assert wait_for(lambda: bench.status("health")["parts"].get("UNSURE") == 2)
        health = bench.status("health")
        assert health["model"]["certified"] is False and "NOT_CERTIFIED" in health["alarms"]
        assert (health["state"], health["mode"]) == ("OPERATIONAL", "READY")
        assert health["bootId"] == bench.station.outbox.boot_id
        bench.station.inspector = replace(bench.station.inspector, permit=certified())
        assert wait_for(lambda: ("NOT_CERTIFIED", False) in bench.alarms())
        assert bench.alarms().count(("NOT_CERTIFIED", True)) == 1
    assert not [item for item in threading.enumerate() if item.name == "monitor"]


def test_an_outbox_that_was_moved_aside_is_told_of(bench: Bench, tmp_path: Path) -> None:
    bench.station.outbox.quarantined = tmp_path / "outbox.sqlite.damaged"
    with Monitor(bench.station, period_s=0.02):
        assert bench.alarms()[0] == ("OUTBOX_RENEWED", False)


def test_the_board_tells_what_the_page_shows(bench: Bench) -> None:
    folder = bench.station.outbox.path.with_name("outbox.sqlite.board")

    def status() -> dict[str, Any]:
        path = folder / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    with Monitor(bench.station, period_s=0.02) as monitor:
        (done,) = bench.station.run([Trigger("s1-1", "NUT")])
        monitor.part(done)
        assert wait_for(lambda: status().get("state") == "OPERATIONAL")
        assert status()["certificate"]["limit_pass"] == certified().certificate.limit_pass
        assert status()["link"] is None  # it has no broker
        bench.station.inspector = replace(bench.station.inspector, permit=Permit())
        assert wait_for(lambda: status()["certificate"] is None)
        assert status()["permit"].startswith("ADVISORY") and not status()["ended"]
    assert status()["ended"] and status()["n"] == 1
    (path,) = folder.glob("parts-*.jsonl")
    (line,) = map(json.loads, path.read_text().splitlines())
    verdict = done.verdict
    assert (line["id"], line["outcome"], line["n"]) == (verdict.result_id, "PASS", 1)
    assert line["checks"] == {item.check: item.outcome.value for item in verdict.checks}
    assert line["score"] == verdict.certification.score < line["limit_pass"]


def test_a_lost_camera_is_an_alarm_until_a_part_is_captured(bench: Bench) -> None:
    with Monitor(bench.station, period_s=0.02) as monitor:
        bench.scanner.lost = True
        for number in range(3):
            (done,) = bench.station.run([Trigger(f"s1-{number}", "NUT")])
            assert done.verdict.outcome is (Outcome.PASS if number == 2 else Outcome.ERROR)
            monitor.part(done)
            if number == 1:
                assert wait_for(lambda: ("CAMERA_LOST", True) in bench.alarms())
                assert monitor.ready()["scanner"] is not None
                bench.scanner.lost = False
        assert wait_for(lambda: ("CAMERA_LOST", False) in bench.alarms())
        assert bench.alarms().count(("CAMERA_LOST", True)) == 1
        assert monitor.ready() == dict.fromkeys(monitor.ready())


def test_what_cannot_be_mirrored_stops_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Monitor(bench.station, period_s=0.02) as monitor:

        def broken(_: object) -> None:
            raise ValueError("no such metric")

        monitor._listeners.insert(0, broken)
        (done,) = bench.station.run([Trigger("s1-1", "NUT")])
        monitor.part(done)
        assert "could not be mirrored" in caplog.text
        assert wait_for(lambda: bench.status("health")["parts"]["total"] == 1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get(port: int, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_readiness_follows_the_station(bench: Bench) -> None:
    bench.station.config = replace(bench.station.config, monitor=MonitorConfig(port=free_port()))
    with Monitor(bench.station, period_s=0.02) as monitor:
        assert monitor.endpoint is not None
        port = monitor.endpoint.port
        assert get(port, "/healthz")[0] == 200
        code, body = get(port, "/readyz")
        assert code == 503 and json.loads(body)["checks"]["station"] == "PREOPERATIONAL"
        bench.station.tell(None)
        code, body = get(port, "/readyz")
        assert code == 200 and set(json.loads(body)["checks"].values()) == {"ok"}
        bench.station.stopped = "told to"
        bench.station.tell(None)
        assert json.loads(get(port, "/readyz")[1])["checks"]["station"] == "stopped: told to"
        bench.station.tell("results cannot be stored")
        assert get(port, "/readyz")[0] == 503
        bench.station.stopped = None
        bench.station.tell(None)
        bench.station.inspector = replace(bench.station.inspector, permit=Permit())
        checks = json.loads(get(port, "/readyz")[1])["checks"]
        assert checks["certificate"] == "no certificate was asked for"
    with pytest.raises(urllib.error.URLError):
        get(port, "/healthz")


def test_a_section_that_cannot_be_served_leaves_nothing_open(bench: Bench) -> None:
    pytest.importorskip("google.protobuf")
    port = free_port()
    bench.station.config = replace(
        bench.station.config, monitor=MonitorConfig(port=port), sparkplug=SparkplugConfig("plant")
    )
    with pytest.raises(ConfigError, match="broker: external"), Monitor(bench.station):
        pass
    socket.create_server(("127.0.0.1", port)).close()


def test_a_missing_package_is_named_with_its_extra(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    bench.station.config = replace(bench.station.config, opcua=OpcUaConfig(port=free_port()))
    with pytest.raises(ConfigError, match=r"forge-station\[opcua\]"), Monitor(bench.station):
        pass


@pytest.mark.skipif(MOSQUITTO is None, reason="no mosquitto here")
def test_a_job_from_an_opc_ua_client_reaches_every_mirror(bench: Bench, tmp_path: Path) -> None:
    """OPC UA StartSingleJob -> gate -> loop -> outbox, OPC UA, Sparkplug and metrics."""
    pytest.importorskip("asyncua")
    pytest.importorskip("google.protobuf")
    pytest.importorskip("prometheus_client")
    from tests.mes.test_opcua import Host
    from tests.mes.test_sparkplug import Host as SparkplugHost

    gate, port = Gate(), free_port()
    with Mosquitto(tmp_path) as broker:
        bench.station.config = replace(
            bench.station.config,
            mqtt=replace(bench.station.config.mqtt, port=broker.port),
            broker="external",
            monitor=MonitorConfig(port=free_port()),
            sparkplug=SparkplugConfig("plant"),
            opcua=OpcUaConfig(port=port),
        )
        scada = SparkplugHost(broker.port)

        def triggers() -> Iterator[Trigger]:
            gate.open()
            while True:
                try:
                    found = gate.take(0.05)
                except EOFError:
                    return
                if found is not None:
                    yield found

        with Monitor(bench.station, gate=gate, period_s=0.2) as monitor:
            assert monitor.endpoint is not None
            http = monitor.endpoint.port

            def loop() -> None:
                for done in bench.station.run(triggers()):
                    gate.finish(done.verdict)
                    monitor.part(done)

            thread = threading.Thread(target=loop, daemon=True)
            thread.start()
            client = Host(f"opc.tcp://127.0.0.1:{port}/")
            try:
                assert wait_for(lambda: client.state() == ("Operational", "Ready"))
                client.subscribe()
                job, error = client.start(product="NUT", part="tray-7")
                assert error == 0
                assert wait_for(lambda: len(client.events) == 3)
                result = client.events[1]
                assert (result.JobId.Id, result.PartId.Id) == (job.Id, "tray-7")
                assert result.ResultContent[0].Value == "PASS"
                assert wait_for(lambda: "tray-7" in map(part_of, scada.seen))
                text = get(http, "/metrics")[1].decode()
                assert 'forge_verdicts_total{outcome="PASS"} 1.0' in text
                (row,) = bench.station.outbox.fetch("verdict", 0, 10)
                assert json.loads(row.body)["resultId"] == result.ResultId.Id == row.id
                gate.shut("a test")
                refused, error = client.start(product="NUT")
                assert (refused.Id, error) == ("", 1)
                skipped = b'forge_skipped_total{reason="NOT_READY"} 1.0'
                assert wait_for(lambda: skipped in get(http, "/metrics")[1])
            finally:
                client.close()
                gate.end("a test")
                thread.join(10)
        assert wait_for(lambda: "NDEATH" in [item.kind for item in scada.seen])
        scada.close()


def part_of(seen: Any) -> object:
    return seen.values().get("Verdict/Part Id")
