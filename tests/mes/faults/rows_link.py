"""Rows 5, 9 to 13 and 18: what broker, network, certificates and clock do to the connection."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

from forge_station.errors import LinkError
from forge_station.mes import link as mqtt_link
from forge_station.mes import outbox_writer
from forge_station.mes.broker import EmbeddedBroker
from forge_station.mes.link import Acknowledged, Down, Emit, Event, Outgoing
from forge_station.mes.listen import Listener
from forge_station.mes.outbox import Outbox
from forge_station.mes.publisher import Publisher, Timing
from forge_station.mes.report import put_verdict
from forge_station.mes.topics import MqttConfig, topic_of
from tests.mes.certificates import Authority
from tests.mes.faults.load import TIMING, Mes, Station, config_of
from tests.mes.faults.netns import BlackHole
from tests.mes.faults.table import Checks, Result, Row, Skip
from tests.mes.rig import Mosquitto, ScriptedBroker, verdict, wait_for

QUICK = Timing(settle_s=0.0, resend_s=0.0, reconnect_s=(0.1, 0.3), no_consumer_s=(0.1, 0.3))
SCHEDULING_S = 2.0
"""A loaded machine may be so much later than the rule says."""


def put(outbox: Outbox, config: MqttConfig, count: int) -> list[str]:
    """Verdicts in the outbox; their ids."""
    found = []
    for _ in range(count):
        made = verdict().to_dict()
        put_verdict(outbox, config, made)
        found.append(str(made["result_id"]))
    return found


def counted(ids: list[str], listener: Listener, checks: Checks, note: str) -> Result:
    """What a listener got of the committed ids, in what order."""
    got = [item.message for item in listener.messages(1.0) if item.kind == "verdict"]
    arrived = [str(message["id"]) for message in got]
    lost = len(set(ids) - set(arrived))
    checks.that(not lost, f"{lost} lost")
    return Result(
        len(ids), len(set(arrived)), lost, len(arrived) - len(set(arrived)), note,
        tuple(checks.faults),
    )  # fmt: skip


def frozen(folder: Path, short: bool) -> Result:
    """Row 5: the broker's process is stopped; its socket stays."""
    rounds, waits, ids, checks = 1 if short else 5, [], [], Checks()
    with Mosquitto(folder) as broker, Outbox(folder / "outbox.db", ballast_bytes=0) as outbox:
        config = config_of(broker)
        with (
            Listener(config, client_id="mes", statuses=False, repeats=True) as listener,
            Publisher(outbox, config, timing=TIMING) as publisher,
        ):
            for _ in range(rounds):
                checks.that(wait_for(lambda: publisher.stats().connected, 15), "no connection")
                assert broker.process is not None
                broker.process.send_signal(signal.SIGSTOP)
                began = time.monotonic()
                ids += put(outbox, config, 5)
                wait_for(lambda: not publisher.stats().connected, 20.0)
                waits.append(time.monotonic() - began)
                broker.process.send_signal(signal.SIGCONT)
                checks.that(publisher.drain(20.0), "not drained")
            limit = 2 * config.keepalive_s
            checks.that(max(waits) <= limit + SCHEDULING_S, f"noticed after {max(waits):.1f} s")
            note = f"noticed after {max(waits):.1f} s at most, twice the keepalive is {limit} s"
            return counted(ids, listener, checks, note)


def black_hole(folder: Path, short: bool) -> Result:
    """Row 5b: packets vanish between station and broker, without FIN or RST."""
    rounds, waits, checks = 1 if short else 5, [], Checks()
    with BlackHole(folder) as net:
        config = MqttConfig(
            host=net.host, port=net.port, station="st1", keepalive_s=2, insecure=True
        )
        station = Station(config, folder / "outbox.db", 50.0, net.station)
        with Mes(config, folder, net.broker) as mes:
            station.start()
            for _ in range(rounds):
                checks.that(wait_for(lambda: _state(station) == "up", 30.0), "no connection")
                time.sleep(0.5)
                net.swallow(True)
                began = time.monotonic()
                checks.that(wait_for(lambda: _state(station) == "down", 30.0), "not noticed")
                waits.append(station.link[-1][1] - began)
                net.swallow(False)
            checks.that(wait_for(lambda: _state(station) == "up", 30.0), "no connection")
            wanted = set(station.committed)
            checks.that(wait_for(lambda: wanted <= mes.seen.keys(), 30.0), "not delivered")
            station.kill()
            counts = _settled_inside(station, mes, net)
    limit = 2 * config.keepalive_s
    checks.that(max(waits) <= limit + SCHEDULING_S, f"noticed after {max(waits):.1f} s")
    checks.that(counts[2] == 0, f"{counts[2]} lost")
    note = f"{rounds} times, noticed after {max(waits):.1f} s at most, 2 keepalives are {limit} s"
    return Result(*counts, note, tuple(checks.faults))


def _state(station: Station) -> str:
    return station.link[-1][0] if station.link else ""


def _settled_inside(station: Station, mes: Mes, net: BlackHole) -> tuple[int, int, int, int]:
    """`settle`, from inside the station's namespace."""
    station.start()
    wait_for(lambda: set(station.committed) <= mes.seen.keys(), 20.0)
    station.kill()
    time.sleep(0.5)
    committed = set(station.committed)
    unsent = committed - mes.seen.keys()
    with Outbox(station.outbox, ballast_bytes=0) as outbox:
        held = {row.id for row in outbox.fetch("verdict", 0, 10**6)}
    return (len(committed), len(mes.seen), len(unsent - held), mes.repeats)


def refusals(folder: Path, short: bool) -> Result:
    """Row 9: a denied topic, an oversize message, nobody subscribed, a full quota, broken JSON."""
    checks = Checks()
    rules = folder / "acl"
    root = MqttConfig(station="st1").root
    rules.write_text(
        f"topic read {root}/insp/v1/#\ntopic write {root}/insp/v1/evt/verdict\n"
        f"topic write {root}/insp/v1/evt/alarm\ntopic write {root}/insp/v1/sts/#\n"
        f"topic write {root}/insp/v1/in/#\n"
    )
    setting = f"allow_anonymous true\nacl_file {rules}\nmessage_size_limit 20000"
    with Mosquitto(folder, setting) as broker, Outbox(folder / "o.db", ballast_bytes=0) as outbox:
        config = config_of(broker)
        topic = topic_of(config, "verdict")
        ids = put(outbox, config, 5)
        denied = outbox.put("grid", topic_of(config, "grid"), b"{}")
        poison = outbox.put("verdict", topic, b'{"x":"%s"}' % (b"y" * 40_000))
        broken = outbox.put("verdict", topic, b"no json")
        ids += put(outbox, config, 5)
        with Publisher(outbox, config, timing=QUICK) as publisher:
            checks.that(wait_for(lambda: publisher.stats().held > 0, 10), "0x10 was not seen")
            with Listener(config, statuses=False, repeats=True) as listener:
                checks.that(publisher.drain(30.0), "not drained")
                wanted = {denied: 0x87, poison: 0x95, broken: 0x99}
                wait_for(lambda: len(outbox.dead_letters()) == len(wanted))
                dead = {letter.seq: letter.reason for letter in outbox.dead_letters()}
                checks.that(dead == wanted, f"dead letters {dead}, expected {wanted}")
                note = "0x87, oversize and broken are dead letters, 0x10 and 0x97 are held"
                result = counted(ids, listener, checks, note)
    full = ScriptedBroker(lambda message: 0x97 if "/evt/" in message.topic else 0)
    with Outbox(folder / "q.db", ballast_bytes=0) as outbox:
        put(outbox, config, 3)
        with Publisher(outbox, config, timing=QUICK, connect=full.connect) as publisher:
            held = wait_for(lambda: publisher.stats().held >= 3, 10)
            full.answer = lambda _: 0
            checks.that(held and publisher.drain(10.0), "0x97 was not held and sent later")
    return replace(result, faults=tuple(checks.faults))


def same_id_twice(folder: Path, short: bool) -> Result:
    """Row 10."""
    checks, seconds = Checks(), 1.5 if short else 20.0
    timing = replace(QUICK, reconnect_s=Timing().reconnect_s)  # time to hear who else is there
    with (
        Mosquitto(folder) as broker,
        Outbox(folder / "a.db", ballast_bytes=0) as first,
        Outbox(folder / "b.db", ballast_bytes=0) as second,
    ):
        config = replace(config_of(broker), keepalive_s=15)
        ids = put(first, config, 5) + put(second, config, 5)
        with (
            Listener(config, statuses=False, repeats=True) as listener,
            Publisher(first, config, timing=timing) as a,
        ):
            checks.that(wait_for(lambda: not first.pending, 10.0), "the first did not send")
            with Publisher(second, config, timing=timing) as b:

                def waiting() -> list[bool]:
                    return [item.stats().taken_over for item in (a, b)]

                checks.that(wait_for(lambda: any(waiting()), 10.0), "no takeover noticed")
                time.sleep(seconds)
                connects = a.stats().connects + b.stats().connects
                checks.that(connects <= 5, f"{connects} connections in {seconds:g} s: a fight")
                # The first, unless the second was too slow to say ONLINE before it came back.
                checks.that(sum(waiting()) == 1, f"waiting and saying so: {waiting()}, not one")
                speaking, silent = (a, second) if waiting()[1] else (b, first)
                checks.that(speaking.drain(10.0), "the other one did not send")
                kept = {row.id for row in silent.fetch("verdict", 0, 99)}
            who = "first" if silent is first else "second"
            note = f"{connects} connections in {seconds:g} s, the {who} one waits and says so"
            return counted([item for item in ids if item not in kept], listener, checks, note)


def callback_fails(folder: Path, short: bool) -> Result:
    """Row 11: an exception in a callback ends paho's network thread; it still says connected."""
    rounds, checks, waits = 1 if short else 5, Checks(), []
    broken = threading.Event()

    def connect(config: MqttConfig, will: Outgoing, emit: Emit) -> mqtt_link.Link:
        def failing(event: Event) -> None:
            if broken.is_set() and isinstance(event, Acknowledged):
                broken.clear()
                raise RuntimeError("a fault in a callback")
            emit(event)

        return mqtt_link.connect(config, will, failing)

    with (
        Mosquitto(folder) as broker,
        Outbox(folder / "o.db", ballast_bytes=0) as outbox,
        mock.patch.object(threading, "excepthook"),
    ):
        config = config_of(broker)
        ids: list[str] = []
        with (
            Listener(config, statuses=False, repeats=True) as listener,
            Publisher(outbox, config, timing=QUICK, connect=connect) as publisher,
        ):
            for _ in range(rounds):
                checks.that(wait_for(lambda: publisher.stats().connected, 10), "no connection")
                connects = publisher.stats().connects
                broken.set()
                began = time.monotonic()
                ids += put(outbox, config, 5)
                wait_for(lambda before=connects: publisher.stats().connects > before, 40.0)  # type: ignore[misc]
                waits.append(time.monotonic() - began)
                checks.that(publisher.drain(20.0), "not drained")
            checks.that(max(waits) <= 30.0, f"rebuilt after {max(waits):.1f} s")
            return counted(ids, listener, checks, f"rebuilt after {max(waits):.1f} s at most")


def certificates(folder: Path, short: bool) -> Result:
    """Row 12: an ended certificate and a stranger's are refused, the renewed one is taken."""
    checks = Checks()
    plant, stranger = Authority(folder), Authority(folder, "stranger-ca")
    broker_cert, broker_key = plant.issue("broker")
    setting = (
        f"allow_anonymous true\ncafile {plant.file}\ncertfile {broker_cert}\n"
        f"keyfile {broker_key}\nrequire_certificate true\ntls_version tlsv1.2"
    )
    for file in folder.iterdir():
        file.chmod(0o600)
    cert, key = stranger.issue("st1", file="st1")
    key.chmod(0o600)
    with Mosquitto(folder, setting) as broker, Outbox(folder / "o.db", ballast_bytes=0) as outbox:
        config = MqttConfig(
            host="localhost", port=broker.port, station="st1", keepalive_s=2,
            tls=True, tls_ca=plant.file, tls_cert=cert, tls_key=key,
        )  # fmt: skip
        ids = put(outbox, config, 3)
        reader, reader_key = plant.issue("mes")
        reader_key.chmod(0o600)
        listening = replace(config, tls_cert=reader, tls_key=reader_key)
        with (
            Listener(listening, statuses=False, repeats=True) as listener,
            Publisher(outbox, config, timing=QUICK) as publisher,
        ):
            time.sleep(1.5)
            checks.that(publisher.stats().published == 0, "a stranger's certificate was taken")
            plant.issue("st1", days=-1, file="st1")
            key.chmod(0o600)
            checks.that(
                wait_for(lambda: "has ended" in str(publisher.stats().last_error), 10.0),
                f"ended certificate: {publisher.stats().last_error}",
            )
            plant.issue("st1", file="st1")
            key.chmod(0o600)
            checks.that(publisher.drain(20.0), f"renewed: {publisher.stats().last_error}")
            note = "stranger's and ended refused, the renewed one taken without a restart"
            return counted(ids, listener, checks, note)


def clock_jumps(folder: Path, short: bool) -> Result:
    """Row 13: the clock of the station jumps an hour forth and back while it sends."""
    checks, real = Checks(), time.time
    offset = [0.0]
    with (
        Mosquitto(folder) as broker,
        Outbox(folder / "o.db", ballast_bytes=0) as outbox,
        mock.patch.object(time, "time", side_effect=lambda: real() + offset[0]),
        mock.patch.object(time, "time_ns", side_effect=lambda: int((real() + offset[0]) * 1e9)),
        mock.patch.object(outbox_writer, "MAINTENANCE_S", 0.1),
    ):
        config = config_of(broker)
        ids: list[str] = []
        with (
            Listener(config, statuses=False, repeats=True) as listener,
            Publisher(outbox, config, timing=QUICK) as publisher,
        ):
            for jump in (0.0, 3600.0, -3600.0, 0.0):
                offset[0] = jump
                ids += put(outbox, config, 10)
                checks.that(publisher.drain(10.0), f"not drained after {jump:g} s")
                time.sleep(0.3)  # the outbox looks for rows past their time
            received = list(listener.messages(1.0))
        numbers = [item.message["seq"] for item in received if item.kind == "verdict"]
        checks.that(numbers == sorted(numbers), "the order by seq is broken")
        checks.that(outbox.counts().acked == len(ids), "rows were deleted by the jump")
        lost = len(ids) - len(set(numbers))
        checks.that(lost == 0, f"{lost} lost")
    note = "order by seq, no timer moved, nothing deleted"
    return Result(
        len(ids), len(set(numbers)), lost, len(numbers) - len(set(numbers)), note,
        tuple(checks.faults),
    )  # fmt: skip


def mqtt_3_only(folder: Path, short: bool) -> Result:
    """Row 18: said clearly; used when allowed, after a probe came back."""
    checks = Checks()
    try:
        embedded = EmbeddedBroker()
        embedded.start()
    except LinkError as error:
        raise Skip(f"no broker without MQTT 5: {error.what}") from error
    try:
        events: list[Event] = []
        try:
            mqtt_link.connect(
                MqttConfig(port=embedded.port_v4, station="st1"),
                Outgoing("will", b"{}"),
                events.append,
            ).drop()
            checks.that(False, "connected with MQTT 5")
        except LinkError as error:
            checks.that("3.1.1" in str(error), f"unclear: {error}")
        config = MqttConfig(port=embedded.port_v4, station="st1", version="3.1.1")
        with (
            Outbox(folder / "o.db", ballast_bytes=0) as outbox,
            Listener(config, statuses=False, repeats=True) as listener,
            Publisher(outbox, config, timing=QUICK) as publisher,
        ):
            ids = put(outbox, config, 5)
            checks.that(publisher.drain(10.0), f"3.1.1: {publisher.stats().last_error}")
            result = counted(ids, listener, checks, "")
    finally:
        embedded.close()
    rules = folder / "acl"
    rules.write_text("topic read #\n")
    with (
        Mosquitto(folder, f"allow_anonymous true\nacl_file {rules}") as broker,
        mock.patch.object(mqtt_link, "CONNECT_TIMEOUT_S", 1.0),
    ):
        try:
            mqtt_link.connect(
                MqttConfig(port=broker.port, station="st1", version="3.1.1"),
                Outgoing("will", b"{}"),
                lambda event: None if isinstance(event, Down) else events.append(event),
            ).drop()
            checks.that(False, "a broker that drops everything passed the probe")
        except LinkError as error:
            checks.that("does not deliver" in str(error), f"unclear: {error}")
    note = "clear error; with version '3.1.1' a probe must come back, a silent refusal is found"
    return replace(result, note=note, faults=tuple(checks.faults))


ROWS = [
    Row("5", "broker frozen (SIGSTOP)", "noticed in 2 keepalives, 0 lost", frozen),
    Row("5b", "silent black hole in a network namespace", "noticed in 2 keepalives, 0 lost",
        black_hole),
    Row("9", "denied, oversize, nobody there, quota, broken",
        "dead letter or held, the next flow", refusals),
    Row("10", "the station's client id used twice", "one waits with an alarm, no fight",
        same_id_twice),
    Row("11", "exception in a callback, dead network thread", "rebuilt in 30 s, 0 lost",
        callback_fails),
    Row("12", "ended, foreign, renewed certificate", "refused; taken without a restart",
        certificates),
    Row("13", "clock jumps an hour forth and back", "order by seq, timers stand", clock_jumps),
    Row("18", "broker without MQTT 5", "clear error, or probe first", mqtt_3_only),
]  # fmt: skip
