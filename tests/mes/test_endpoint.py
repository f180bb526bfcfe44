"""The HTTP endpoint: probes and metrics as Prometheus and an orchestrator would read them."""

from __future__ import annotations

import http.client
import json
import math
import re
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="metrics need the extra metrics")

from prometheus_client.parser import text_string_to_metric_families

from forge_station.contract.error import ContractError
from forge_station.errors import LinkError
from forge_station.mes import endpoint
from forge_station.mes.alarms import CODES, Alarms
from forge_station.mes.delivery import Stats
from forge_station.mes.endpoint import Endpoint, Probes
from forge_station.mes.health import CameraFacts, Health, Sources
from forge_station.mes.metrics import CONTENT_TYPE, Metrics
from forge_station.mes.outbox import Outbox
from forge_station.mes.settings import MonitorConfig
from forge_station.mes.topics import MqttConfig
from tests.mes.rig import verdict, wait_for

CONFIG = MqttConfig(station="s1")


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    with Outbox(tmp_path / "outbox.sqlite", ballast_bytes=0) as found:
        yield found


def get(endpoint: Endpoint, path: str, method: str = "GET") -> tuple[int, str, bytes]:
    url = f"http://127.0.0.1:{endpoint.port}{path}"
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, method=method), timeout=5
        ) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read()


def values(text: bytes) -> dict[str, float]:
    """`name{label="x"}` -> value, read by Prometheus' own parser."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def test_metrics_of_a_working_station(outbox: Outbox) -> None:
    camera = CameraFacts(True, 100, 3, 40.0)
    stats = Stats(True, 7, 5, 0, 0, 2, 1, 20, ("grid",), None)
    sources = Sources(outbox, lambda: stats, camera=lambda: camera, certified=lambda: (True, ""))
    health, metrics, alarms = Health(CONFIG, sources), Metrics(), Alarms(outbox, CONFIG)
    metrics.describe({"name": "nano"}, {"provider": "CPUExecutionProvider"})
    alarms.raise_("NO_CONSUMER", "grid", key="grid")
    outbox.put("verdict", "t", b"{}")
    for item in (verdict(), verdict(front=[(4, 5)]), verdict(front=[(4, 5)])):
        metrics.note(item.to_dict())
    for _ in range(2):
        metrics.triggers(1, {"BUSY": 3})
        metrics.look(health.look(), alarms.active())
    with Endpoint(
        MonitorConfig(), Probes(lambda: None, dict, lambda: (metrics.text(), CONTENT_TYPE))
    ) as endpoint:
        status, kind, text = get(endpoint, "/metrics?x=1")
    assert status == 200 and kind.startswith("text/plain; version=")
    found = values(text)
    expected = {
        'forge_verdicts_total{outcome="PASS"}': 1, 'forge_verdicts_total{outcome="FAIL"}': 2,
        'forge_verdicts_total{outcome="ERROR"}': 0,
        'forge_reasons_total{code="SURFACE_DENT",outcome="FAIL"}': 2,
        'forge_skipped_total{reason="BUSY"}': 3,
        'forge_stage_seconds_count{stage="total"}': 3,
        'forge_outbox_rows{state="pending"}': 2, "forge_queue_depth": 1,
        "forge_mqtt_acked_total": 5, "forge_mqtt_published_total": 7, "forge_mqtt_connected": 1,
        "forge_camera_up": 1, "forge_camera_frames_total": 100, "forge_camera_dropped_total": 3,
        "forge_certified": 1, 'forge_alarm_active{code="NO_CONSUMER"}': 1,
        'forge_alarm_active{code="LINK_DOWN"}': 0, 'forge_bundle_info{name="nano"}': 1,
        'forge_provider_info{provider="CPUExecutionProvider"}': 1,
        'forge_state{state="OPERATIONAL"}': 1,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert found['forge_stage_seconds_sum{stage="total"}'] == pytest.approx(3 * 0.7002)
    assert found["forge_process_memory_bytes"] > 1e6 and found["forge_storage_free_bytes"] > 0
    assert math.isnan(found["forge_certificate_days_left"]), "no certificate: not known, not zero"


def test_counters_follow_totals_that_begin_anew(outbox: Outbox) -> None:
    """A reopened camera counts from zero again; the series must not fall."""
    health, metrics = Health(CONFIG, Sources(outbox)), Metrics()
    for frames in (10, 30, 5, 8):
        seen = health.look()
        metrics.look(replace(seen, camera=CameraFacts(True, frames, 0)), ())
    assert values(metrics.text())["forge_camera_frames_total"] == 38


@pytest.mark.parametrize(
    ("path", "checks", "status"),
    [
        ("/healthz", {}, 200),
        ("/healthz", {"process": "nothing was looked at for 60 s"}, 503),
        ("/readyz", {"bundle": None, "scanner": None}, 200),
        ("/readyz", {"bundle": None, "scanner": "no camera answers"}, 503),
    ],
)
def test_probes(path: str, checks: dict[str, str | None], status: int) -> None:
    with Endpoint(MonitorConfig(), Probes(lambda: checks.get("process"), lambda: checks)) as found:
        code, kind, body = get(found, path)
        head = get(found, path, "HEAD")
    assert (code, kind) == (status, "application/json") and head[0] == status and head[2] == b""
    told = json.loads(body)
    assert told["status"] == ("ok" if status == 200 else "unavailable")
    assert {name: told["checks"][name] for name in checks} == {
        name: fault or "ok" for name, fault in checks.items()
    }


def test_without_the_package_the_probes_work_and_metrics_say_what_is_missing() -> None:
    with Endpoint(MonitorConfig(), Probes(lambda: None, dict)) as found:
        assert get(found, "/metrics")[0] == 501
        assert b"forge-station[metrics]" in get(found, "/metrics")[2]
        assert get(found, "/healthz")[0] == 200
        assert get(found, "/")[0] == 404
        assert get(found, "/readyz", "POST")[0] == 501


def test_a_client_that_says_nothing_holds_up_no_other() -> None:
    with (
        Endpoint(MonitorConfig(), Probes(lambda: None, dict)) as found,
        socket.create_connection(("127.0.0.1", found.port)),
    ):
        began = time.monotonic()
        assert get(found, "/healthz")[0] == 200
        assert time.monotonic() - began < 4, "answered while the silent one still waits"


def test_a_flood_of_silent_and_slow_clients_ends_and_takes_no_thread_beyond_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "REQUEST_TIMEOUT_S", 0.3)
    before = threading.active_count()
    with Endpoint(MonitorConfig(), Probes(lambda: None, dict)) as found, ExitStack() as stack:
        for number in range(60):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", found.port)))
            client.sendall(b"GET /healthz HTTP/1.0\r\nX: " if number % 2 else b"")
            slow = client
        assert threading.active_count() <= before + 1 + 2 * endpoint.MOST_REQUESTS

        def healthy() -> bool:
            with suppress(OSError):
                slow.sendall(b"x")  # a byte now and then holds no place
            with suppress(OSError, http.client.HTTPException):
                return get(found, "/healthz")[0] == 200
            return False

        assert wait_for(healthy)


def test_a_client_that_resets_its_connection_leaves_no_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Endpoint(MonitorConfig(), Probes(lambda: None, lambda: {"x": "y" * 10_000_000})) as found:
        with socket.create_connection(("127.0.0.1", found.port)) as client:
            client.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
            client.recv(10)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert get(found, "/healthz")[0] == 200
    assert wait_for(lambda: not any("process_request" in t.name for t in threading.enumerate()))
    assert "Traceback" not in capfd.readouterr().err


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LinkError, match=f"127.0.0.1:{port}"):
            Endpoint(MonitorConfig(port=port), Probes(lambda: None, dict))


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.4", "station.plant", ""])
def test_other_machines_may_read_only_when_written_out(host: str) -> None:
    with pytest.raises(ContractError) as caught:
        MonitorConfig(port=9100, host=host)
    assert caught.value.faults[0].path == "host"
    assert MonitorConfig(port=9100, host=host, insecure=True).host == host


def test_the_dashboard_asks_for_series_that_there_are(outbox: Outbox, repository: Path) -> None:
    metrics = Metrics()
    metrics.note(verdict(front=[(4, 5)]).to_dict())
    metrics.triggers(0, {"BUSY": 1})
    metrics.look(replace(Health(CONFIG, Sources(outbox)).look(), temperatures={"cpu": 40.0}), ())
    there = {name.partition("{")[0] for name in values(metrics.text())}
    text = (repository / "docs/grafana.json").read_text(encoding="utf-8")
    asked = set(re.findall(r"forge_[a-z_]+", text))
    assert len(asked) > 15 and asked <= there, asked - there
    panels = json.loads(text)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_the_reference_names_every_alarm_with_its_severity(repository: Path) -> None:
    text = (repository / "docs/MONITORING.md").read_text(encoding="utf-8")
    told = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        codes = re.findall(r"`([A-Z][A-Z0-9_]+)`", cells[0])
        if line.startswith("| `") and codes:
            numbers = [int(item) for item in re.findall(r"\d+", cells[1])]
            told.update(zip(codes, numbers, strict=False))
    assert told == {code: known.severity for code, known in CODES.items()}
