"""Health: what is looked at, what the message says of it, which alarms it raises and clears."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from forge_station.mes import machine, payloads
from forge_station.mes.alarms import Alarms
from forge_station.mes.delivery import Stats
from forge_station.mes.health import (
    CameraFacts,
    Health,
    Sources,
    Watch,
    days_left,
)
from forge_station.mes.outbox import Counts, Outbox
from forge_station.mes.publisher import Publisher
from forge_station.mes.receipts import Heard, Position
from forge_station.mes.topics import MqttConfig

CONFIG = MqttConfig(station="s1")
UP = Stats(True, 3, 3, 0, 0, 0, 2, 20, (), None)
COUNTS = Counts(0, 0, 0, 0, 4096, 0.0, None, False, False)


MES = Heard("mes", True, None, {"verdict": Position(7, 7)})


@dataclass
class Facts:
    """What the station would tell, to be changed by a test."""

    outbox: Any
    stats: Stats = UP
    camera: CameraFacts | None = None
    certified: tuple[bool, str] = (True, "")
    now: float = 0.0
    consumers: list[Heard] = field(default_factory=list)

    def sources(self) -> Sources:
        return Sources(
            outbox=self.outbox,
            stats=lambda: self.stats,
            camera=lambda: self.camera,
            consumers=lambda: self.consumers,
            state=lambda: ("OPERATIONAL", "READY"),
            certified=lambda: self.certified,
            model={"name": "nano", "version": "1.0.0"},
            boot_id="0123abcd",
        )


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    with Outbox(tmp_path / "outbox.sqlite", ballast_bytes=0) as found:
        yield found


def part(outcome: str = "PASS", code: str | None = None, **timings: float) -> dict[str, Any]:
    reasons = [{"code": code, "text": "x"}] if code else []
    return {"outcome": outcome, "reasons": reasons, "timings_ms": timings}


def test_the_message_of_a_full_station_keeps_its_schema(outbox: Outbox) -> None:
    facts = Facts(outbox, camera=CameraFacts(True, 100, 2, 41.5), consumers=[MES])
    health = Health(CONFIG, facts.sources(), monotonic=lambda: facts.now)
    health.look()
    facts.now, facts.camera = 10.0, CameraFacts(True, 150, 2, 41.5)
    for number in range(1, 101):
        health.note(part(read=float(number), surface=1.0, decode=500.0))
    health.note(part("FAIL", "SURFACE_DENT"))
    fields = health.fields(health.look(), ["LINK_DOWN", "LINK_DOWN"])
    message = json.loads(payloads.status_body("health", CONFIG.root, fields))
    assert message["camera"] == {
        "up": True, "fps": 5.0, "frames": 150, "drops": 2, "tempC": 41.5,
    }  # fmt: skip
    assert message["infer"] == {"p50Ms": 51.0, "p99Ms": 100.0, "parts": 100}
    assert message["parts"] == {"total": 101, "PASS": 100, "FAIL": 1}
    assert message["alarms"] == ["LINK_DOWN"]
    assert message["link"]["reconnects"] == 1 and message["link"]["connected"]
    assert message["model"] == {"name": "nano", "version": "1.0.0", "certified": True}
    assert message["consumers"] == [{"id": "mes", "alive": True, "upto": 7}]
    assert message["memBytes"] > 1e6 and message["disk"]["totalBytes"] > 0


def test_the_message_of_a_bare_station_leaves_out_what_it_cannot_know(outbox: Outbox) -> None:
    health = Health(CONFIG, Sources(outbox))
    fields = health.fields(health.look(), [])
    message = json.loads(payloads.status_body("health", CONFIG.root, fields))
    assert not {"camera", "infer", "model", "certDaysLeft", "consumers"} & set(message)
    assert message["link"]["connected"] is False and message["parts"] == {"total": 0}


def test_a_publisher_and_an_outbox_are_sources_as_they_are(outbox: Outbox) -> None:
    publisher = Publisher(outbox, CONFIG)
    outbox.put("verdict", "t", b"{}")
    health = Health(CONFIG, Sources(outbox, publisher.stats))
    fields = health.fields(health.look(), [])
    publisher.set_status("health", fields)
    assert fields["outbox"]["depth"] == 1 and fields["outbox"]["oldestAgeS"] >= 0
    assert fields["link"]["window"] == 0


class Bench:
    """Looks with made-up facts through `Health`, judged by `Watch`, on a clock of its own."""

    def __init__(self, outbox: Outbox, config: MqttConfig = CONFIG) -> None:
        self.facts = Facts(outbox)
        self.now = 0.0
        self.alarms = Alarms(outbox, config)
        self.health = Health(config, self.facts.sources(), monotonic=lambda: self.now)
        self.watch = Watch(self.alarms, config, monotonic=lambda: self.now)
        good = machine.Clock(True, 0.0)
        self.good = replace(self.health.look(), clock=good, counts=COUNTS)

    def after(self, seconds: float, **changes: Any) -> list[str]:
        """Codes (and keys) active after so long with these facts."""
        self.now += seconds
        self.watch.judge(replace(self.good, **changes))
        return [f"{item.code}{item.key and ' '}{item.key}" for item in self.alarms.active()]


DOWN = replace(UP, connected=False, last_error="refused")


def test_a_lost_link_is_told_after_two_keepalives_and_over_at_once(outbox: Outbox) -> None:
    bench = Bench(outbox)
    assert bench.after(10, stats=UP) == []
    assert bench.after(10, stats=DOWN) == []
    assert bench.after(20, stats=DOWN) == []
    assert bench.after(10, stats=DOWN) == ["LINK_DOWN"]
    assert bench.after(10, stats=UP) == []
    assert bench.after(10, stats=replace(DOWN, taken_over=True)) == ["DUPLICATE_ID"]


def test_a_stream_without_consumer_does_not_flap_over_reconnects(outbox: Outbox) -> None:
    bench = Bench(outbox)
    waits = replace(UP, waiting_for_consumer=("grid",))
    assert bench.after(10, stats=waits) == ["NO_CONSUMER grid"]
    assert bench.after(10, stats=DOWN) == ["NO_CONSUMER grid"]
    assert bench.after(10, stats=UP) == ["NO_CONSUMER grid"]
    assert bench.after(10, stats=waits) == ["NO_CONSUMER grid"]
    assert bench.after(10, stats=UP) == ["NO_CONSUMER grid"]
    assert bench.after(30, stats=UP) == []


def test_levels_of_the_outbox_have_hysteresis(outbox: Outbox) -> None:
    bench = Bench(outbox)
    levels = [(percent, replace(COUNTS, fill_pct=percent)) for percent in (69, 70, 66, 91, 86)]
    seen = [bench.after(10, counts=counts) for _, counts in levels]
    both = ["OUTBOX_90", "OUTBOX_70"]
    assert seen == [[], ["OUTBOX_70"], ["OUTBOX_70"], both, both]
    full = replace(COUNTS, fill_pct=96.0, full=True)
    assert bench.after(10, counts=full) == ["OUTBOX_FULL", *both]
    assert bench.after(10) == []


def test_disk_clock_camera_and_certificate_of_the_model(outbox: Outbox) -> None:
    bench = Bench(outbox)
    unsynced = machine.Clock(False, 0.0)
    assert bench.after(10, counts=replace(COUNTS, disk_low=True)) == ["DISK_LOW"]
    assert bench.after(10) == ["DISK_LOW"] and bench.after(30) == []
    assert bench.after(10, clock=unsynced) == []
    assert bench.after(60, clock=unsynced) == ["CLOCK_UNSYNCED"]
    assert bench.after(10) == []
    assert bench.after(10, camera=CameraFacts(False)) == ["CAMERA_LOST"]
    assert bench.after(10, camera=CameraFacts(True)) == []
    assert bench.after(10, certified=(False, "no certificate")) == ["NOT_CERTIFIED"]


def test_a_camera_without_supervisor_is_judged_by_the_parts(outbox: Outbox) -> None:
    bench = Bench(outbox)
    bench.health.note(part("ERROR", "CAMERA_LOST"))
    vitals = bench.health.look()
    assert bench.after(10, camera=vitals.camera) == ["CAMERA_LOST"]
    bench.health.note(part("FAIL", "SURFACE_DENT"))
    assert bench.after(10, camera=bench.health.look().camera) == []


def test_a_station_without_broker_misses_none(outbox: Outbox) -> None:
    bench = Bench(outbox)
    assert bench.after(1000, stats=None) == []


def certificate(path: Path, days: float) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "s1")])
    now = datetime.now(timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=400))
        .not_valid_after(now + timedelta(days=days))
        .sign(key, hashes.SHA256())
    )
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    return path


def test_the_days_of_a_certificate(outbox: Outbox, tmp_path: Path) -> None:
    file = certificate(tmp_path / "cert.pem", 20.0)
    assert days_left(file) == pytest.approx(20.0, abs=0.1)
    assert days_left(None) is None and days_left(tmp_path / "none.pem") is None
    bench = Bench(outbox)
    assert bench.after(10, certificate_days=31.0) == []
    assert bench.after(10, certificate_days=20.0) == ["CERT_EXPIRING"]
    assert bench.after(10, certificate_days=6.0) == ["CERT_EXPIRING 7 days", "CERT_EXPIRING"]
    assert bench.after(10, certificate_days=-1.0) == ["CERT_EXPIRED"]
    assert bench.after(10, certificate_days=365.0) == []


def test_an_unencrypted_link_to_another_machine_stays_an_alarm(outbox: Outbox) -> None:
    config = MqttConfig(host="broker.plant", insecure=True, station="s1")
    bench = Bench(outbox, config)
    assert bench.health.look().insecure
    assert bench.after(10, insecure=True) == ["INSECURE_LINK"]


def test_what_linux_tells(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1\n")
    load = machine.CpuLoad(stat)
    assert load.percent() is None, "no time has passed"
    stat.write_text("cpu  200 0 200 800 300 0 0 0 0 0\n")
    assert load.percent() == 40.0
    stat.write_text("nonsense")
    assert load.percent() is None
    zone = tmp_path / "thermal_zone0"
    zone.mkdir()
    (zone / "type").write_text("cpu-thermal\n")
    (zone / "temp").write_text("51500\n")
    assert machine.temperatures(tmp_path) == {"thermal_zone0-cpu-thermal": 51.5}
    assert machine.temperatures(tmp_path / "none") == {}
    assert machine.memory_bytes(tmp_path / "none") is None
    found = machine.disk(tmp_path / "not" / "yet")
    assert found is not None and 0 < found.free_bytes <= found.total_bytes
