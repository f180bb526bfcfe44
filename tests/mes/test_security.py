"""Mutual TLS, the generated access rules and signed commands, on a real mosquitto.

A subscription that is granted proves nothing: mosquitto denies at delivery. So every test publishes
and looks at what arrives.
"""

from __future__ import annotations

import json
import os
import pwd
import queue
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from forge_station.errors import ConfigError, LinkError
from forge_station.mes import acl, credentials, sparkplug_payload
from forge_station.mes.command_client import Commander, signed
from forge_station.mes.command_store import CommandStore
from forge_station.mes.commands import CommandServer
from forge_station.mes.link import Outgoing, connect, tls_context
from forge_station.mes.listen import Listener
from forge_station.mes.outbox import Outbox
from forge_station.mes.publisher import Publisher, Timing
from forge_station.mes.report import put_verdict
from forge_station.mes.settings import SparkplugConfig
from forge_station.mes.sparkplug import Mirror
from forge_station.mes.sparkplug_payload import DataType
from forge_station.mes.topics import FlatTopic, MqttConfig
from tests.mes import signing_rig
from tests.mes.certificates import Authority
from tests.mes.rig import MOSQUITTO, Mosquitto, verdict, wait_for

pytestmark = pytest.mark.skipif(MOSQUITTO is None, reason="no mosquitto on this machine")
QUICK = Timing(reconnect_s=(0.05, 0.2), settle_s=0.0)
SOON_S = 0.5
"""What is to arrive on this machine has arrived by then."""


_HERE = f"user {pwd.getpwuid(os.getuid()).pw_name}\nlog_dest none\n"


class GeneratedBroker(Mosquitto):
    """A mosquitto that runs what `forge-station acl` wrote, on a free port of this machine."""

    def __init__(self, folder: Path, parties: acl.Parties) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.host = "127.0.0.1"
        self.process = None
        (folder / "acl").write_text(acl.acl(parties))
        text = acl.configuration("2.0", folder, port=self.port)
        text = text.replace("/var/lib/mosquitto/", f"{folder}/")
        self._file = folder / "mosquitto.conf"
        self._file.write_text(text + _HERE)


MIRROR = SparkplugConfig("plant", primary_host="scada")


@dataclass(frozen=True)
class Plant:
    authority: Authority
    broker: GeneratedBroker
    folder: Path

    def config(self, name: str, station: str = "s1", authority: Authority | None = None) -> Any:
        """How the party with this certificate reaches the broker and names the station."""
        issuer = authority or self.authority
        certificate, key = issuer.issue(name)
        return MqttConfig(
            host="localhost", port=self.broker.port, station=station, tls=True,
            tls_ca=self.authority.file, tls_cert=certificate, tls_key=key, keepalive_s=5,
        )  # fmt: skip

    def peer(self, name: str) -> Peer:
        return Peer(self.config(name), name)


class Peer:
    """A plain client with a certificate: what it may publish, and what it gets."""

    def __init__(self, config: MqttConfig, name: str) -> None:
        self.config = config
        self.got: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self.acks: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self.ready = False
        self.client = mqtt.Client(CallbackAPIVersion.VERSION2, f"peer-{name}", protocol=mqtt.MQTTv5)
        self.client.tls_set_context(tls_context(config))
        self.client.on_publish = lambda _, __, mid, reason, ___: self.acks.put((mid, reason.value))
        self.client.on_message = lambda _, __, item: self.got.put((item.topic, item.payload))
        self.client.on_subscribe = lambda *_: setattr(self, "ready", True)
        self.client.connect("localhost", config.port, 10)
        self.client.loop_start()

    def subscribe(self, *topics: str) -> Peer:
        self.client.subscribe([(topic, 1) for topic in topics])
        assert wait_for(lambda: self.ready)
        return self

    def publish(self, topic: str, body: bytes = b"{}", *, retain: bool = False) -> int:
        """The broker's reason code."""
        packet = self.client.publish(topic, body, 1, retain).mid
        found = self.acks.get(timeout=5)
        assert found[0] == packet
        return found[1]

    def arrived(self) -> list[str]:
        found = []
        try:
            while True:
                found.append(self.got.get(timeout=SOON_S if not found else 0.1)[0])
        except queue.Empty:
            return found

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()


@pytest.fixture
def plant(tmp_path: Path) -> Iterator[Plant]:
    authority = Authority(tmp_path, "ca")
    authority.issue("localhost", file="broker")
    parties = acl.Parties(
        (MqttConfig(station="s1"), MqttConfig(station="s2")),
        ("historian", "scada"),
        ("mes",),
        {"s1": MIRROR},
    )
    with GeneratedBroker(tmp_path, parties) as broker:
        yield Plant(authority, broker, tmp_path)


@pytest.fixture
def peers(plant: Plant) -> Iterator[Any]:
    with ExitStack() as stack:

        def make(name: str) -> Peer:
            peer = plant.peer(name)
            stack.callback(peer.close)
            return peer

        yield make


def topic(path: str, station: str = "s1") -> str:
    return f"{MqttConfig(station=station).root}/insp/v1/{path}"


def refused(config: MqttConfig) -> None:
    with pytest.raises(LinkError):
        connect(config, Outgoing(topic("sts/conn"), b"{}"), lambda _: None)


def test_verdict_goes_from_the_station_to_a_consumer(plant: Plant) -> None:
    with (
        Outbox(plant.folder / "outbox.db", ballast_bytes=0) as outbox,
        Listener(plant.config("historian")) as listener,
        Publisher(outbox, plant.config("s1"), timing=QUICK),
    ):
        put_verdict(outbox, MqttConfig(station="s1"), verdict(result_id="r-1").to_dict())
        kinds = {item.kind: item for item in listener.messages(idle_s=2.0)}
    assert kinds["verdict"].message["resultId"] == "r-1"
    assert "conn" in kinds


def test_foreign_authority_missing_certificate_and_plain_text_are_refused(plant: Plant) -> None:
    foreign = Authority(plant.folder, "stranger-ca")
    refused(plant.config("s1", authority=foreign))
    own = plant.config("s1")
    refused(replace(own, tls_cert=None, tls_key=None))
    refused(MqttConfig(host="localhost", port=plant.broker.port, station="s1"))


# paho drops the socket of a failed handshake without closing it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_station_does_not_talk_to_a_broker_of_a_foreign_authority(plant: Plant) -> None:
    foreign = Authority(plant.folder, "stranger-ca")
    refused(replace(plant.config("s1"), tls_ca=foreign.file))


def test_renewed_certificate_is_taken_while_the_station_runs(plant: Plant) -> None:
    config = plant.config("s1")
    serials = []
    with (
        Outbox(plant.folder / "outbox.db", ballast_bytes=0) as outbox,
        Listener(plant.config("historian")) as listener,
        Publisher(outbox, config, timing=QUICK) as publisher,
        credentials.Watch(config, publisher.reconnect, look_s=0.05),
    ):
        for connects in (1, 2):
            assert wait_for(lambda: publisher.stats().connects == connects)  # noqa: B023
            serials.append(credentials.read(config.tls_cert).serial_number)
            put_verdict(outbox, config, verdict(result_id=f"r-{connects}").to_dict())
            assert publisher.drain(5.0)
            plant.authority.issue("s1", file="s1")
        arrived = [item.message["resultId"] for item in listener.messages(1.0)
                   if item.kind == "verdict"]  # fmt: skip
    assert serials[0] != serials[1]
    assert arrived == ["r-1", "r-2"]


FORBIDDEN = [
    ("s1", "in/cmd/start", "s1"),  # a stolen station key commands its own station
    ("s1", "in/receipt/historian", "s1"),
    ("s1", "in/cmd/start", "s2"),
    ("s1", "evt/verdict", "s2"),
    ("s1", "sts/conn", "s2"),
    ("historian", "evt/verdict", "s1"),
    ("historian", "sts/state", "s1"),
    ("historian", "in/cmd/start", "s1"),
    ("historian", "in/receipt/mes", "s1"),
    ("mes", "evt/verdict", "s1"),
    ("mes", "rsp/cmd-1", "s1"),
    ("mes", "evt/audit", "s1"),
]


def test_what_nobody_may_write_is_refused_and_reaches_nobody(peers: Any) -> None:
    parties = {name: peers(name).subscribe("#") for name in ("s1", "s2", "historian", "mes")}
    answers = {case: parties[case[0]].publish(topic(*case[1:])) for case in FORBIDDEN}
    assert answers == dict.fromkeys(FORBIDDEN, 0x87)
    assert {name: peer.arrived() for name, peer in parties.items()} == {
        name: [] for name in parties
    }


def test_what_each_may_write_arrives_where_it_should(plant: Plant, peers: Any) -> None:
    station, other = peers("s1").subscribe("#"), peers("s2").subscribe("#", topic("in/#", "s1"))
    historian, mes = peers("historian").subscribe("#"), peers("mes")
    assert mes.publish(topic("in/cmd/start")) == 0
    assert historian.publish(topic("in/receipt/historian")) == 0
    for path in ("evt/verdict", "sts/last", "rsp/cmd-1", "job/7"):
        assert station.publish(topic(path)) == 0
    assert sorted(station.arrived()) == [topic("in/cmd/start"), topic("in/receipt/historian")]
    assert sorted(historian.arrived()) == [
        topic(item) for item in ("evt/verdict", "job/7", "rsp/cmd-1", "sts/last")
    ]
    assert other.arrived() == []  # granted, and yet nothing of another station


def test_station_reads_its_own_conn_and_with_mqtt_3_its_own_probe(plant: Plant, peers: Any) -> None:
    station = peers("s1").subscribe("#")
    for path in ("sts/state", "sts/conn", "evt/probe"):
        assert station.publish(topic(path)) == 0
    assert station.arrived() == [topic("sts/conn")]
    plant.broker.close()
    rules = acl.acl(acl.Parties((MqttConfig(station="s1", version="3.1.1"),)))
    (plant.folder / "acl").write_text(rules)
    plant.broker.start()
    config = replace(plant.config("s1"), version="3.1.1")
    connect(config, Outgoing(topic("sts/conn"), b"{}"), lambda _: None).drop()


@dataclass
class Commanded:
    """A station that takes commands, as its consumers see it."""

    plant: Plant
    outbox: Outbox
    publisher: Publisher
    done: list[Mapping[str, Any]]

    def audits(self, count: int) -> list[dict[str, Any]]:
        def found() -> list[dict[str, Any]]:
            rows = self.outbox.fetch("audit", 0, 99)
            return [json.loads(row.body) for row in rows]

        assert wait_for(lambda: len(found()) >= count)
        return found()


@pytest.fixture
def commanded(plant: Plant, tmp_path: Path) -> Iterator[Commanded]:
    done: list[Mapping[str, Any]] = []
    with ExitStack() as stack:
        outbox = stack.enter_context(Outbox(tmp_path / "outbox.db", ballast_bytes=0))
        store = stack.enter_context(CommandStore(tmp_path / "commands.db"))
        config = plant.config("s1")
        publisher = Publisher(outbox, config, timing=QUICK)
        server = CommandServer(
            config, signing_rig.settings(), {"start": done.append}, publisher, outbox, store
        )
        stack.enter_context(server)
        stack.enter_context(publisher)
        yield Commanded(plant, outbox, publisher, done)


def test_command_over_the_broker_is_answered_once_and_not_done_twice(commanded: Commanded) -> None:
    config = commanded.plant.config("mes")
    with Commander(config, signing_rig.KEY, "engineer") as commander:
        reply = commander.send("start", timeout_s=10)
        assert (reply["status"], reply["source"]) == ("SUCCEEDED", config.root)
        again = signed(
            "start", {}, signing_rig.KEY, root=config.root, epoch=commander.epoch(), issuer="e"
        )
        for _ in range(2):
            commander.publish("start", json.dumps(again).encode())
        outcomes = [item["outcome"] for item in commanded.audits(3)]
    assert outcomes == ["SUCCEEDED", "SUCCEEDED", "DUPLICATE"]
    assert len(commanded.done) == 2


def test_row_14_every_bad_command_is_refused_and_audited_and_nothing_is_done(
    commanded: Commanded,
) -> None:
    config = commanded.plant.config("mes")
    with Commander(config, signing_rig.KEY, "engineer") as commander:
        epoch = commander.epoch()

        def made(
            key: Any = signing_rig.KEY, root: str = config.root, **more: Any
        ) -> dict[str, Any]:
            return signed("start", {}, key, root=root, epoch=epoch, issuer="e", **more)

        unsigned = {key: value for key, value in made().items() if key != "sig"}
        sent = {
            "MALFORMED": (unsigned, False),
            "UNKNOWN_KEY": (made(signing_rig.STRANGER), False),
            "BAD_SIGNATURE": ({**made(), "issuer": "boss"}, False),
            "WRONG_TARGET": (made(root="enterprise/site/area/line/s2"), False),
            "RETAINED": (made(), True),
            "TOO_LARGE": ({**made(), "pad": "x" * 1_000_000}, False),
        }
        for body, retain in sent.values():
            commander.publish("start", json.dumps(body).encode(), retain=retain)
        codes = [item["code"] for item in commanded.audits(len(sent))]
    assert codes == list(sent)
    assert commanded.done == []


def test_sparkplug_mirror_is_heard_by_its_host_and_nobody_speaks_for_another(
    plant: Plant, peers: Any, tmp_path: Path
) -> None:
    host = peers("scada").subscribe("spBv1.0/#")
    historian, other = peers("historian").subscribe("spBv1.0/#"), peers("s2").subscribe("#")
    station = peers("s1")
    with Mirror(plant.config("s1"), MIRROR, tmp_path / "sparkplug.json") as mirror:
        online = b'{"online": true, "timestamp": 1}'
        assert host.publish("spBv1.0/STATE/scada", online, retain=True) == 0
        assert wait_for(lambda: mirror.born)
        assert host.arrived() == ["spBv1.0/STATE/scada", "spBv1.0/plant/NBIRTH/s1"]
        rebirth = sparkplug_payload.Metric("Node Control/Rebirth", True, DataType.BOOLEAN)
        body = sparkplug_payload.encode(sparkplug_payload.Payload((rebirth,), 1))
        refused = {
            (who, topic): peer.publish(topic, body)
            for who, peer, topic in (
                ("s1", station, "spBv1.0/plant/NCMD/s1"),
                ("s1", station, "spBv1.0/STATE/scada"),
                ("s2", other, "spBv1.0/plant/NDATA/s1"),
                ("historian", historian, "spBv1.0/plant/NCMD/s1"),
                ("historian", historian, "spBv1.0/plant/NBIRTH/s1"),
                ("historian", historian, "spBv1.0/STATE/scada"),
                ("scada", host, "spBv1.0/plant/NDATA/s1"),
            )
        }
        assert refused == dict.fromkeys(refused, 0x87)
        assert mirror.births == 1
        for births, peer in enumerate((host, peers("mes")), 2):
            assert peer.publish("spBv1.0/plant/NCMD/s1", body) == 0
            assert wait_for(lambda: mirror.births == births)  # noqa: B023
    assert set(historian.arrived()) == {f"spBv1.0/plant/{kind}/s1" for kind in ("NBIRTH", "NDEATH")}
    assert other.arrived() == []


def test_primary_host_that_is_no_party_is_an_error() -> None:
    with pytest.raises(ConfigError, match="primary_host scada"):
        acl.Parties((MqttConfig(station="s1"),), ("historian",), (), {"s1": MIRROR})


def test_access_file_of_a_site_with_flat_topics(tmp_path: Path) -> None:
    station = MqttConfig(
        station="s1",
        root_template="plant/{station}",
        flat=(
            FlatTopic("mes/{station}/last", {"a": "partId"}),
            FlatTopic("tulip/{station}", {"a": "partId"}, "values"),
        ),
    )
    text = acl.acl(acl.Parties((station,), ("tulip",)))
    rights = {line for line in text.splitlines() if line.startswith("topic")}
    assert {"topic write mes/s1/last", "topic write tulip/s1/+"} <= rights
    assert {"topic read mes/s1/last/#", "topic read tulip/s1/#"} <= rights
    assert "topic read plant/s1/insp/v1/in/#" in rights


def test_the_configuration_is_an_addition_to_that_of_debian(tmp_path: Path) -> None:
    included = tmp_path / acl.DROP_IN
    included.mkdir()
    Authority(included, "ca").issue("localhost", file="broker")
    broker = GeneratedBroker(included, acl.Parties((MqttConfig(station="s1"),)))
    own = tmp_path / "mosquitto.conf"
    kept = f"persistence true\npersistence_location {tmp_path}/\n"
    own.write_text(f"{kept}include_dir {included}\n")
    broker._file = own
    with broker:  # it listens, or this raises
        pass


def test_configuration_of_mosquitto_2_1_loads_the_plugin(tmp_path: Path) -> None:
    text = acl.configuration("2.1", tmp_path, plugin="/opt/acl.so")
    assert f"plugin /opt/acl.so\nplugin_opt_acl_file {tmp_path}/acl\n" in text
    assert "\nacl_file" not in text


@pytest.mark.parametrize(
    ("consumers", "commanders", "said"),
    [
        (("a b",), (), "cannot stand"),
        (("a\ntopic write #",), (), "cannot stand"),
        (("s1",), (), "one name for two"),
        (("x", "x"), (), "one name for two"),
        ((), ("s1",), "one name for two"),
    ],
)
def test_names_that_would_undermine_the_rules_are_refused(
    consumers: tuple[str, ...], commanders: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        acl.Parties((MqttConfig(station="s1"),), consumers, commanders)
