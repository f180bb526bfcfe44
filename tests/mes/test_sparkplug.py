"""The Sparkplug mirror, held against the specification's own assertion ids.

One run against a real broker is recorded: a primary host that comes late, goes and returns, a
rebirth, more messages than sequence numbers, a broken connection, an orderly end. Each check below
carries the id of the statement in Sparkplug 3.0 (chapters 4 to 6) that it holds the record against.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.subscribeoptions import SubscribeOptions

pytest.importorskip("google.protobuf", reason="the mirror needs the extra sparkplug")

from forge_station.mes import sparkplug_link
from forge_station.mes.link import Event
from forge_station.mes.settings import SparkplugConfig
from forge_station.mes.sparkplug import Mirror
from forge_station.mes.sparkplug_node import ALIASES, DEFINITIONS
from forge_station.mes.sparkplug_payload import DataSet, DataType, Metric, Payload, decode, encode
from forge_station.mes.topics import MqttConfig
from tests.mes.rig import MOSQUITTO, Mosquitto, verdict, wait_for

TYPES = {ALIASES[item.name]: item.datatype for item in DEFINITIONS}
NAMES = {alias: name for name, alias in ALIASES.items()}
HOST_STATE = "spBv1.0/STATE/scada"


@dataclass(frozen=True)
class Seen:
    """One message of the station as a host saw it."""

    kind: str
    topic: str
    body: bytes
    qos: int
    retained: bool
    phase: str

    @property
    def payload(self) -> Payload:
        return decode(self.body, TYPES)

    def values(self) -> dict[str, Any]:
        return {item.name or NAMES[item.alias or 0]: item.value for item in self.payload.metrics}


class Host:
    """A Sparkplug host application, as far as a node can notice one."""

    def __init__(self, port: int) -> None:
        self.seen: list[Seen] = []
        self.phase = ""
        self.client = mqtt.Client(CallbackAPIVersion.VERSION2, "scada", protocol=mqtt.MQTTv5)
        self.client.on_message = self._on_message
        ready = threading.Event()
        self.client.on_subscribe = lambda *_: ready.set()
        self.client.connect("127.0.0.1", port)
        self.client.loop_start()
        options = SubscribeOptions(qos=1, retainAsPublished=True)
        self.client.subscribe([("spBv1.0/plant/+/s1", options)])
        assert ready.wait(5)

    def _on_message(self, _: Any, __: Any, message: mqtt.MQTTMessage) -> None:
        kind = message.topic.split("/")[2]
        if kind != "NCMD":
            self.seen.append(
                Seen(
                    kind, message.topic, bytes(message.payload), message.qos,
                    bool(message.retain), self.phase,
                )
            )  # fmt: skip

    def of(self, phase: str, kind: str | None = None) -> list[Seen]:
        return [item for item in self.seen if item.phase == phase and kind in (None, item.kind)]

    def state(self, online: bool, timestamp: int) -> None:
        body = json.dumps({"online": online, "timestamp": timestamp})
        self.client.publish(HOST_STATE, body, 1, retain=True).wait_for_publish(5)

    def command(self, *metrics: Metric, body: bytes | None = None, retain: bool = False) -> None:
        sent = body if body is not None else encode(Payload(metrics, 1))
        self.client.publish("spBv1.0/plant/NCMD/s1", sent, 0, retain=retain)

    def rebirth(self) -> None:
        self.command(Metric("Node Control/Rebirth", True, DataType.BOOLEAN, 1))

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()


@dataclass
class Record:
    """What happened in the run."""

    seen: list[Seen] = field(default_factory=list)
    wills: list[tuple[str, Payload]] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    """Result ids decided while the host was offline."""
    stored: list[int] = field(default_factory=list)

    def of(self, phase: str, kind: str | None = None) -> list[Seen]:
        return [item for item in self.seen if item.phase == phase and kind in (None, item.kind)]

    def all(self, *kinds: str) -> list[Seen]:
        return [item for item in self.seen if item.kind in kinds]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    if MOSQUITTO is None:
        pytest.skip("no mosquitto here")
    folder = tmp_path_factory.mktemp("sparkplug")
    found = Record()
    sessions: list[sparkplug_link.Session] = []

    def connect(
        config: MqttConfig, client: str, topic: str, body: bytes, emit: Callable[[Event], None]
    ) -> sparkplug_link.Session:
        session = sparkplug_link.connect(config, client, topic, body, emit)
        found.wills.append((topic, decode(body)))
        found.stored.append(json.loads((folder / "sparkplug.json").read_text())["bdSeq"])
        sessions.append(session)
        return session

    with Mosquitto(folder) as broker:
        config = MqttConfig(port=broker.port, station="s1")
        settings = SparkplugConfig("plant", primary_host="scada")
        host = Host(broker.port)

        def step(phase: str) -> None:
            host.phase = phase

        def arrived(phase: str, kind: str, count: int = 1) -> None:
            assert wait_for(lambda: len(host.of(phase, kind)) >= count, 10), (phase, kind)

        values = {"Properties/Software Version": "0.1.0", "State/Name": "OPERATIONAL"}
        with Mirror(
            config, settings, folder / "sparkplug.json", values,
            connect=connect, reconnect_s=(0.05, 0.1),
        ) as mirror:  # fmt: skip
            step("before")
            mirror.verdict(verdict().to_dict())
            assert wait_for(lambda: sessions)
            host.state(False, 100)
            host.client.publish("spBv1.0/STATE/other", '{"online":true,"timestamp":999}', 1)
            host.client.publish(HOST_STATE, b"ONLINE", 1)
            time.sleep(0.3)
            step("first")
            host.state(True, 200)
            arrived("first", "NDATA")
            step("data")
            for _ in range(260):
                mirror.verdict(verdict(front=[(4, 5)]).to_dict())
                assert wait_for(lambda: mirror.held == 0)
            mirror.update({"State/Name": "OPERATIONAL", "Health/Outbox Depth": 3})
            arrived("data", "NDATA", 261)
            step("rebirth")
            time.sleep(1.1)
            for _ in range(5):
                host.rebirth()
            arrived("rebirth", "NBIRTH", 2)
            step("no rebirth")
            time.sleep(1.1)
            host.command(Metric("Node Control/Rebirth", False, DataType.BOOLEAN, 1))
            host.command(Metric("Verdict/Code", "PASS", DataType.STRING, 1))
            host.command(body=b"\xff\xff")
            host.state(False, 150)  # older than the birth of the host: of another session
            mirror.update({"Health/Outbox Depth": 4})
            arrived("no rebirth", "NDATA")
            step("host offline")
            host.state(False, 300)
            arrived("host offline", "NDEATH")
            for number in range(3):
                found.held.append(f"held-{number}")
                mirror.verdict(verdict(result_id=f"held-{number}").to_dict())
            assert wait_for(lambda: len(sessions) == 2)
            time.sleep(0.2)
            step("host back")
            host.state(True, 400)
            arrived("host back", "NDATA", 3)
            step("broken")
            sessions[-1].drop()
            arrived("broken", "NBIRTH")
            step("end")
        arrived("end", "NDEATH")
        late = Host(broker.port)
        time.sleep(0.2)
        assert late.seen == [], "nothing was retained"
        late.close()
        host.close()
        found.seen = host.seen
    return found


def bd_seq(seen: Seen) -> object:
    return seen.values()["bdSeq"]


def topics(found: Record, kind: str) -> set[str]:
    return {item.topic for item in found.all(kind)}


def sequence(found: Record) -> list[int | None]:
    return [item.payload.seq for item in found.all("NBIRTH", "NDATA")]


def counts_up(found: Record) -> bool:
    expected, last = [], -1
    for item in found.all("NBIRTH", "NDATA"):
        last = 0 if item.kind == "NBIRTH" else (last + 1) % 256
        expected.append(last)
    return sequence(found) == expected


def metrics(found: Record, *kinds: str) -> list[Metric]:
    return [metric for item in found.all(*kinds) for metric in item.payload.metrics]


def named(found: Record, name: str) -> list[Metric]:
    return [item for item in metrics(found, "NBIRTH") if item.name == name]


def raw_metrics(found: Record, *kinds: str) -> list[Metric]:
    """Decoded without what the birth said: only what is on the wire."""
    return [metric for item in found.all(*kinds) for metric in decode(item.body).metrics]


def in_order(found: Record) -> bool:
    lists = [
        [metric.timestamp or 0 for metric in item.payload.metrics if not metric.historical]
        for item in found.all("NBIRTH", "NDATA")
    ]
    return all(times[2:] == sorted(times[2:]) for times in lists)


def birth_is_complete(found: Record) -> bool:
    wanted = {"bdSeq", "Node Control/Rebirth", *ALIASES}
    return all(set(item.values()) == wanted for item in found.all("NBIRTH"))


def only_changes(found: Record) -> bool:
    """Sixth to hundredth verdict: alike but for id and time, so nothing else is sent."""
    alike = {"Verdict/Id", "Counters/Total", "Counters/FAIL"}
    return all(set(item.values()) == alike for item in found.of("data", "NDATA")[5:100])


def within_session(found: Record) -> bool:
    """No data before the birth of its session: the first word of each phase that begins one."""
    firsts = [found.of(phase)[0].kind for phase in ("first", "host back")]
    return firsts == ["NBIRTH", "NBIRTH"]


CHECKS: dict[str, Callable[[Record], bool]] = {
    "topic-structure-namespace-a": lambda r: all(s.topic.startswith("spBv1.0/") for s in r.seen),
    "topic-structure-namespace-device-id-non-associated-message-types": lambda r: all(
        s.topic.count("/") == 3 for s in r.seen
    ),
    "topics-nbirth-topic": lambda r: topics(r, "NBIRTH") == {"spBv1.0/plant/NBIRTH/s1"},
    "topics-ndata-topic": lambda r: topics(r, "NDATA") == {"spBv1.0/plant/NDATA/s1"},
    "topics-ndeath-topic": lambda r: topics(r, "NDEATH") == {"spBv1.0/plant/NDEATH/s1"},
    "topics-nbirth-mqtt": lambda r: {(s.qos, s.retained) for s in r.all("NBIRTH")} == {(0, False)},
    "topics-ndata-mqtt": lambda r: {(s.qos, s.retained) for s in r.all("NDATA")} == {(0, False)},
    "topics-nbirth-seq-num": lambda r: {s.payload.seq for s in r.all("NBIRTH")} == {0},
    "topics-nbirth-timestamp": lambda r: all(s.payload.timestamp for s in r.all("NBIRTH")),
    "topics-nbirth-metric-reqs": birth_is_complete,
    "topics-nbirth-metrics": lambda r: all(
        m.name and m.datatype for m in raw_metrics(r, "NBIRTH")
    ),
    "topics-nbirth-bdseq-included": lambda r: all("bdSeq" in s.values() for s in r.all("NBIRTH")),
    "topics-nbirth-bdseq-matching": lambda r: [bd_seq(s) for s in r.all("NBIRTH")] == [
        0, 0, 0, 1, 2
    ],
    "topics-nbirth-bdseq-increment": lambda r: [
        will.metrics[0].value for _, will in r.wills
    ] == [0, 1, 2],
    "topics-nbirth-rebirth-metric": lambda r: all(
        m.datatype is DataType.BOOLEAN and m.value is False
        for m in named(r, "Node Control/Rebirth")
    ),
    "topics-ndata-seq-num": counts_up,
    "topics-ndata-timestamp": lambda r: all(s.payload.timestamp for s in r.all("NDATA")),
    "topics-ndata-payload": only_changes,
    "topics-ndeath-payload": lambda r: all(list(s.values()) == ["bdSeq"] for s in r.all("NDEATH")),
    "topics-ndeath-seq": lambda r: all(s.payload.seq is None for s in r.all("NDEATH")),
    "message-flow-edge-node-birth-publish-phid-wait": lambda r: r.of("before") == [],
    "message-flow-edge-node-birth-publish-phid-wait-id": lambda r: r.of("before") == [],
    "message-flow-edge-node-birth-publish-phid-wait-online": lambda r: r.of("before") == []
    and bool(r.of("first", "NBIRTH")),
    "message-flow-edge-node-birth-publish-phid-offline": lambda r: [
        s.kind for s in r.of("host offline")
    ] == ["NDEATH"],
    "operational-behavior-edge-node-termination-host-offline": lambda r: len(r.wills) == 3,
    "operational-behavior-edge-node-termination-host-offline-timestamp": lambda r: r.of(
        "no rebirth", "NDEATH"
    ) == [],
    "operational-behavior-edge-node-birth-sequence-wait": within_session,
    "message-flow-edge-node-birth-publish-will-message-payload-bdSeq": lambda r: all(
        will.metrics[0].name == "bdSeq" and will.metrics[0].datatype is DataType.INT64
        for _, will in r.wills
    ),
    "message-flow-edge-node-birth-publish-nbirth-payload-bdSeq": lambda r: all(
        m.datatype is DataType.INT64 for m in named(r, "bdSeq")
    ),
    "operational-behavior-edge-node-intentional-disconnect-ndeath": lambda r: [
        (s.kind, bd_seq(s)) for s in r.of("end")
    ] == [("NDEATH", 2)],
    "payloads-ndeath-will-message": lambda r: [
        bd_seq(s) for s in r.of("broken", "NDEATH")
    ] == [1],
    "payloads-ndeath-bdseq": lambda r: [bd_seq(s) for s in r.all("NDEATH")] == [0, 1, 2],
    "payloads-ndeath-will-message-qos": lambda r: {s.qos for s in r.all("NDEATH")} == {1},
    "payloads-sequence-num-always-included": lambda r: None not in sequence(r),
    "payloads-sequence-num-incrementing": lambda r: counts_up(r) and 255 in sequence(r),
    "payloads-alias-uniqueness": lambda r: all(
        len(numbers) == len(set(numbers)) == len(DEFINITIONS)
        for s in r.all("NBIRTH")
        for numbers in [[m.alias for m in s.payload.metrics if m.alias is not None]]
    ),
    "payloads-alias-birth-requirement": lambda r: all(
        m.name and (m.alias is not None or m.name in ("bdSeq", "Node Control/Rebirth"))
        for m in metrics(r, "NBIRTH")
    ),
    "payloads-alias-data-cmd-requirement": lambda r: all(
        not m.name and m.alias is not None for m in raw_metrics(r, "NDATA")
    ),
    "payloads-name-birth-data-requirement": lambda r: all(
        m.timestamp for m in raw_metrics(r, "NBIRTH", "NDATA")
    ),
    "payloads-metric-datatype-not-req": lambda r: all(
        m.datatype is None for m in raw_metrics(r, "NDATA")
    ),
    "payloads-metric-timestamp-in-UTC": lambda r: all(
        abs((m.timestamp or 0) - 1000 * time.time()) < 600_000 or m.historical
        for m in metrics(r, "NBIRTH")
        if not m.name.startswith("Verdict/")
    ),
    "payloads-ndata-order": within_session,
    "operational-behavior-data-commands-rebirth-name-aliases": lambda r: all(
        m.alias is None for m in named(r, "Node Control/Rebirth")
    ),
    "operational-behavior-data-commands-rebirth-action-1": lambda r: [
        s.kind for s in r.of("rebirth")
    ] == ["NBIRTH", "NBIRTH"],
    "operational-behavior-data-commands-rebirth-action-2": lambda r: all(
        set(s.values()) >= set(ALIASES) for s in r.of("rebirth", "NBIRTH")
    ),
    "operational-behavior-data-commands-rebirth-action-3": lambda r: {
        bd_seq(s) for s in r.of("rebirth", "NBIRTH")
    } == {0},
    "operational-behavior-data-publish-nbirth-change": only_changes,
    "operational-behavior-data-publish-nbirth-order": in_order,
    "operational-behavior-data-publish-nbirth-values": lambda r: all(
        (m.value is not None) or m.name in ("Verdict/Reason", "Verdict/Score")
        or not m.name.startswith(("Verdict/", "Counters/"))
        for m in metrics(r, "NBIRTH")
    ),
    "case-sensitivity-metric-names": lambda r: len({name.lower() for name in ALIASES})
    == len(ALIASES),
    "payloads-dataset-column-num-headers": lambda r: all(
        len(m.value.columns) == len(m.value.types)
        for m in metrics(r, "NBIRTH") if isinstance(m.value, DataSet)
    ),
}  # fmt: skip


@pytest.mark.parametrize("tck_id", CHECKS)
def test_tck_id(record: Record, tck_id: str) -> None:
    """`tck-id-<tck_id>` of the specification."""
    assert CHECKS[tck_id](record)


def test_what_was_decided_while_the_host_was_away_comes_as_historical(record: Record) -> None:
    birth, *data = record.of("host back")
    assert birth.values()["Verdict/Id"] == record.held[-1], "the birth has the present value"
    old = [item for item in data if any(m.historical for m in item.payload.metrics)]
    assert [item.values()["Verdict/Id"] for item in old] == record.held
    assert all(m.historical for item in old for m in item.payload.metrics)
    live = [item for item in record.of("data") if any(m.historical for m in item.payload.metrics)]
    assert live == []


def test_a_verdict_is_one_message_with_all_that_changed(record: Record) -> None:
    values = record.of("data", "NDATA")[0].values()
    assert values["Verdict/Code"] == "FAIL" and values["Verdict/Reason"] == "SURFACE_DENT"
    assert (
        values["Verdict/Score"] == 3.0
        and values["Verdict/Defective Cells"] == 1
        and values["Counters/FAIL"] == 1
    )
    assert values["Verdict/Grids"].rows == (("A", "front", "r5: 6"),)


def test_nothing_but_a_rebirth_can_be_commanded(record: Record) -> None:
    assert [item.kind for item in record.of("no rebirth")] == ["NDATA"]


def test_a_burst_of_rebirth_requests_is_answered_twice(record: Record) -> None:
    """At once, and once more after the pause for those that came in between."""
    first, second = record.of("rebirth", "NBIRTH")
    assert (second.payload.timestamp or 0) - (first.payload.timestamp or 0) >= 900


def test_bd_seq_is_on_disk_before_it_is_used(record: Record) -> None:
    assert record.stored == [0, 1, 2]
