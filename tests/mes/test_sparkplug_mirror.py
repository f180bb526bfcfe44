"""The Sparkplug mirror by itself: its CONNECT packet, and what no broker is needed for."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.protobuf", reason="the mirror needs the extra sparkplug")

from forge_station.contract.error import ContractError
from forge_station.errors import LinkError
from forge_station.mes.link import Down, Event, Inbound
from forge_station.mes.settings import SparkplugConfig
from forge_station.mes.sparkplug import Mirror
from forge_station.mes.sparkplug_node import ALIASES
from forge_station.mes.sparkplug_payload import DataType, Metric, Payload, decode, encode
from forge_station.mes.topics import MqttConfig
from tests.mes.rig import verdict, wait_for
from tests.mes.test_sparkplug import HOST_STATE, TYPES


def connect_packet(config: MqttConfig, server: socket.socket, state: Path) -> bytes:
    """The CONNECT that a mirror sends to a server that then hangs up."""
    with Mirror(config, SparkplugConfig("plant"), state, reconnect_s=(0.01, 0.02)):
        connection, _ = server.accept()
        with connection:
            return connection.recv(4096)


def field_at(packet: bytes, at: int) -> tuple[bytes, int]:
    length = int.from_bytes(packet[at : at + 2], "big")
    return packet[at + 2 : at + 2 + length], at + 2 + length


@pytest.mark.parametrize(
    ("before", "expected"), [(None, 0), ({"bdSeq": 6}, 7), ({"bdSeq": 255}, 0), ({"bdSeq": -9}, 0)]
)
def test_connect_packet(tmp_path: Path, before: dict[str, int] | None, expected: int) -> None:
    """tck-id-principles-persistence-clean-session-311, tck-id-payloads-ndeath-will-message-retain,
    tck-id-message-flow-edge-node-birth-publish-will-message-qos, bdSeq over a restart."""
    state = tmp_path / "sparkplug.json"
    if before is not None:
        state.write_text(json.dumps(before))
    with socket.create_server(("127.0.0.1", 0)) as server:
        config = MqttConfig(port=server.getsockname()[1], station="s1")
        packet = connect_packet(config, server, state)
    assert packet[0] == 0x10
    start = packet.index(b"\x00\x04MQTT")
    assert packet[start + 6] == 4, "MQTT 3.1.1"
    flags = packet[start + 7]
    assert flags & 0x02, "clean session"
    assert flags & 0x04 and (flags >> 3) & 3 == 1 and not flags & 0x20, "will: QoS 1, not retained"
    client, at = field_at(packet, start + 10)
    topic, at = field_at(packet, at)
    body, _ = field_at(packet, at)
    assert (client, topic) == (b"s1-sparkplug", b"spBv1.0/plant/NDEATH/s1")
    (metric,) = decode(body).metrics
    assert (metric.name, metric.value, decode(body).seq) == ("bdSeq", expected, None)


class Silent:
    """A connection without a broker: keeps what is published; `gone` makes the next one fail."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []
        self.filters: tuple[str, ...] = ()
        self.alive = True
        self.closed = self.dropped = False
        self.gone = False

    def subscribe(self, filters: tuple[str, ...]) -> None:
        self.filters = filters

    def publish(self, topic: str, body: bytes, qos: int = 0) -> None:
        if self.gone:
            raise LinkError("gone")
        self.sent.append((topic.split("/")[2], body))

    def close(self) -> None:
        self.closed = True

    def drop(self) -> None:
        self.dropped = True


class Bench:
    """A mirror on `Silent` connections."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.sessions: list[Silent] = []
        self.emits: list[Callable[[Event], None]] = []
        self.refuse = 0
        self.mirror = Mirror(
            MqttConfig(station="s1"), SparkplugConfig("plant", **settings), folder / "s.json",
            connect=self.connect, reconnect_s=(0.01, 0.02),
        )  # fmt: skip

    def connect(
        self, _: MqttConfig, __: str, ___: str, ____: bytes, emit: Callable[[Event], None]
    ) -> Silent:
        if self.refuse:
            self.refuse -= 1
            raise LinkError("no connection")
        self.emits.append(emit)
        self.sessions.append(Silent())
        return self.sessions[-1]

    def kinds(self, session: int = 0) -> list[str]:
        return [kind for kind, _ in self.sessions[session].sent]


def test_verdicts_wait_for_a_broker_and_only_the_newest_are_kept(tmp_path: Path) -> None:
    bench = Bench(tmp_path, keep=5)
    bench.refuse = 3
    for number in range(8):
        bench.mirror.verdict(verdict(result_id=f"r{number}").to_dict())
    assert (bench.mirror.held, bench.mirror.lost) == (5, 3)
    with bench.mirror:
        assert wait_for(lambda: bench.sessions and len(bench.sessions[0].sent) == 6)
        (_, birth), *held = bench.sessions[0].sent
        values = {item.name: item.value for item in decode(birth).metrics}
        assert values["Counters/Total"] == 8 and values["Verdict/Id"] == "r7"
        ids = [
            next(m.value for m in decode(body, TYPES).metrics if m.alias == ALIASES["Verdict/Id"])
            for _, body in held
        ]
        assert ids == ["r3", "r4", "r5", "r6", "r7"]
    assert bench.kinds() == ["NBIRTH", *["NDATA"] * 5, "NDEATH"] and bench.sessions[0].closed


def test_a_connection_that_breaks_is_dropped_and_the_next_is_born_anew(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with bench.mirror:
        assert wait_for(lambda: bench.mirror.born)
        bench.sessions[0].gone = True
        bench.mirror.verdict(verdict(result_id="late").to_dict())
        assert wait_for(lambda: len(bench.sessions) == 2 and "NDATA" in bench.kinds(1))
        assert bench.sessions[0].dropped
        bench.emits[1](Down(None, "reset"))
        assert wait_for(lambda: len(bench.sessions) == 3 and bench.kinds(2))
        bench.sessions[2].alive = False
        bench.mirror.update({"State/Mode": "READY"})
        assert wait_for(lambda: len(bench.sessions) == 4)


def test_a_retained_rebirth_request_is_of_another_time(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    body = encode(Payload((Metric("Node Control/Rebirth", True, DataType.BOOLEAN),), 1))
    with bench.mirror:
        assert wait_for(lambda: bench.mirror.born)
        time.sleep(1.05)
        bench.emits[0](Inbound("spBv1.0/plant/NCMD/s1", body, retained=True))
        bench.mirror.update({"State/Mode": "READY"})
        assert wait_for(lambda: "NDATA" in bench.kinds())
        assert bench.mirror.births == 1
        bench.emits[0](Inbound("spBv1.0/plant/NCMD/s1", body))
        assert wait_for(lambda: bench.mirror.births == 2)


@pytest.mark.parametrize(
    "body", [b"", b"ONLINE", b"[]", b"[" * 60_000, b'{"online": 1, "timestamp": 1}', b"{}"]
)
def test_a_state_that_cannot_be_read_changes_nothing(tmp_path: Path, body: bytes) -> None:
    bench = Bench(tmp_path, primary_host="scada")
    with bench.mirror:
        assert wait_for(lambda: bench.emits and bench.sessions[0].filters)
        bench.emits[0](Inbound(HOST_STATE, body))
        time.sleep(0.05)
        assert not bench.mirror.born
        bench.emits[0](Inbound(HOST_STATE, b'{"online": true, "timestamp": 5}'))
        assert wait_for(lambda: bench.mirror.born)


def test_a_fault_of_its_own_does_not_end_the_mirror(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with bench.mirror:
        assert wait_for(lambda: bench.mirror.born)
        bench.mirror.update({"No/Such Metric": 1})
        assert wait_for(lambda: bench.sessions[0].dropped)
        with bench.mirror._lock:
            del bench.mirror._values["No/Such Metric"]
        assert wait_for(lambda: bench.mirror.born and len(bench.sessions) > 1)


def test_without_a_primary_host_nothing_is_waited_for(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with bench.mirror:
        assert wait_for(lambda: bench.mirror.born)
        assert bench.sessions[0].filters == ("spBv1.0/plant/NCMD/s1",)


@pytest.mark.parametrize(
    "settings",
    [{"group": "a/b"}, {"group": "+"}, {"group": ""}, {"group": "p", "node": "#"},
     {"group": "p", "primary_host": "x/y"}, {"group": "p", "keep": 0}],
)  # fmt: skip
def test_ids_that_topics_cannot_carry(settings: dict[str, Any]) -> None:
    """tck-id-topic-structure-namespace-valid-group-id, -valid-edge-node-id."""
    with pytest.raises(ContractError):
        SparkplugConfig(**settings)
