"""Outbox, publisher and listener over real brokers: mosquitto (apt) and iotcore (extra `demo`)."""

from __future__ import annotations

import gc
import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from forge_station.errors import LinkError
from forge_station.mes import consumer, listen, payloads
from forge_station.mes.broker import EmbeddedBroker
from forge_station.mes.listen import Listener
from forge_station.mes.outbox import Outbox
from forge_station.mes.publisher import Publisher, Timing
from forge_station.mes.report import put_verdict
from forge_station.mes.topics import MqttConfig, topic_of
from tests.mes import kill_runs
from tests.mes.rig import MOSQUITTO, Mosquitto, verdict, wait_for

QUICK = Timing(settle_s=0.3, reconnect_s=(0.1, 0.5), no_consumer_s=(0.1, 0.3))
needs_mosquitto = pytest.mark.skipif(
    MOSQUITTO is None, reason="mosquitto is not installed (apt-get install mosquitto)"
)
needs_iotcore = pytest.mark.skipif(
    find_spec("iotcore") is None, reason="iotcore is not installed (extra demo)"
)
BROKERS = [
    pytest.param("mosquitto", marks=needs_mosquitto),
    pytest.param("iotcore", marks=needs_iotcore),
]


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    with Outbox(tmp_path / "outbox.db", ballast_bytes=0) as opened:
        yield opened


def a_broker(name: str, folder: Path) -> Mosquitto | EmbeddedBroker:
    return Mosquitto(folder) if name == "mosquitto" else EmbeddedBroker()


@pytest.mark.parametrize("name", BROKERS)
def test_verdict_reaches_a_consumer_and_gives_its_grids(
    name: str, tmp_path: Path, outbox: Outbox
) -> None:
    with a_broker(name, tmp_path) as broker:
        config = MqttConfig(port=broker.port)
        made = verdict(front=[(4, 5)], result_id="r-1")
        with Listener(config) as listener, Publisher(outbox, config) as publisher:
            put_verdict(outbox, config, made.to_dict(), sw_version="0.1.0")
            put_verdict(outbox, config, made.to_dict(), sw_version="0.1.0")
            assert publisher.drain(5.0)
            received = list(listener.messages(0.5))
    (event,) = [item for item in received if item.kind == "verdict"]
    assert event.fault is None
    assert event.message["id"] == event.message["resultId"] == "r-1"
    assert event.message["verdict"] == "FAIL"
    grids = payloads.grids_of(event.message)
    assert grids["A", "front"].indices() == ((4, 5),)
    assert [item.kind for item in received if item.kind != "verdict"] == ["birth", "conn"]
    assert not any(item.fault for item in received)


@pytest.mark.parametrize("name", BROKERS)
def test_broker_that_comes_after_the_station_gets_everything(
    name: str, tmp_path: Path, outbox: Outbox
) -> None:
    broker = a_broker(name, tmp_path)
    config = MqttConfig(port=broker.port)
    with Publisher(outbox, config, timing=QUICK) as publisher:
        began = time.perf_counter()
        for _ in range(20):
            put_verdict(outbox, config, verdict().to_dict())
        assert time.perf_counter() - began < 5.0  # of a disk, never of a broker
        assert wait_for(lambda: publisher.stats().last_error)
        assert publisher.stats().last_error.startswith("no connection to the broker")  # type: ignore[union-attr]
        with broker, Listener(config, statuses=False) as listener:
            assert wait_for(lambda: publisher.drain(0.1), 8.0)
            assert len(list(listener.messages(0.5))) == 20 or name == "iotcore"


@pytest.mark.parametrize("name", BROKERS)
def test_retained_status_tells_offline_from_broken(
    name: str, tmp_path: Path, outbox: Outbox
) -> None:
    with a_broker(name, tmp_path) as broker:
        config = MqttConfig(port=broker.port)
        with Publisher(outbox, config) as publisher:
            publisher.set_status("state", {"state": "OPERATIONAL", "mode": "READY"})
            assert wait_for(lambda: publisher.stats().connected)
            time.sleep(0.3)
            with Listener(config) as listener:
                online = {item.kind: item for item in listener.messages(0.4)}
        with Listener(config) as listener:
            offline = {item.kind: item for item in listener.messages(0.4)}
    assert all(item.retained for item in online.values())
    assert online["conn"].message["state"] == "ONLINE"
    assert online["state"].message["mode"] == "READY"
    assert online["birth"].message["previousShutdown"] == "first"
    assert offline["conn"].message["state"] == "OFFLINE"


@pytest.mark.parametrize("victim", ["station", "broker"])
@pytest.mark.parametrize("name", BROKERS)
def test_kills_under_load_lose_nothing(name: str, victim: str, tmp_path: Path) -> None:
    # The listener is back after one second; mosquitto would say that it is not there.
    settle_s = 1.3 if name == "mosquitto" else 1.8
    with a_broker(name, tmp_path) as broker:
        result = kill_runs.run(
            victim,
            broker,
            tmp_path,
            kills=3 if victim == "station" else 2,
            # the second broker dies while it is sent what waited for the first one to come back
            between_s=(0.5, 0.9) if victim == "station" else (settle_s + 0.3, settle_s + 0.5),
            timing=Timing(
                settle_s=0.0 if victim == "station" else settle_s,
                resend_s=1.0,
                reconnect_s=(0.1, 0.3),
            ),
        )
    assert result.committed > 40
    assert result.lost == 0, result
    assert result.left_in_outbox == 0, result
    assert result.missing_numbers == 0, result
    assert result.ids_with_two_bodies == 0, result  # a repeat is the same message
    assert result.unreported <= 3, result
    if victim == "station":
        assert result.duplicates <= 3 * 20, result  # at most what was on its way


@needs_mosquitto
def test_nobody_there_keeps_the_rows_until_somebody_is(tmp_path: Path, outbox: Outbox) -> None:
    with Mosquitto(tmp_path) as broker:
        config = MqttConfig(port=broker.port)
        for _ in range(30):
            put_verdict(outbox, config, verdict().to_dict())
        with Publisher(outbox, config, timing=QUICK) as publisher:
            assert wait_for(lambda: publisher.stats().held >= 20)
            assert outbox.pending == 30
            with Listener(config, statuses=False) as listener:
                assert publisher.drain(5.0)
                assert len(list(listener.messages(0.5))) == 30
                assert listener.missing() == {}


@needs_mosquitto
def test_denied_publish_is_a_dead_letter(tmp_path: Path, outbox: Outbox) -> None:
    (tmp_path / "acl").write_text("topic readwrite +/+/+/+/+/insp/v1/sts/#\ntopic read #\n")
    setting = f"allow_anonymous true\nacl_file {tmp_path}/acl"
    with Mosquitto(tmp_path, setting) as broker:
        config = MqttConfig(port=broker.port)
        with Publisher(outbox, config) as publisher:
            put_verdict(outbox, config, verdict().to_dict())
            assert wait_for(lambda: publisher.stats().dead == 2)  # and its alarm
    assert {letter.reason for letter in outbox.dead_letters()} == {0x87}


@pytest.mark.parametrize("name", BROKERS)
def test_message_the_broker_hangs_up_on_does_not_stop_the_others(name: str, tmp_path: Path) -> None:
    limit = "allow_anonymous true\nmessage_size_limit 1048576"
    with (
        Outbox(tmp_path / "outbox.db", max_body_bytes=4 << 20, ballast_bytes=0) as outbox,
        Mosquitto(tmp_path, limit) if name == "mosquitto" else EmbeddedBroker() as broker,
    ):
        config = MqttConfig(port=broker.port)
        topic = topic_of(config, "verdict")
        first = put_verdict(outbox, config, verdict().to_dict())
        poison = outbox.put("verdict", topic, b'{"x":"%s"}' % (b"y" * 1_200_000))
        last = put_verdict(outbox, config, verdict().to_dict())
        timing = Timing(settle_s=0.0, resend_s=0.0, reconnect_s=(0.1, 0.2))
        with (
            Listener(config, statuses=False) as listener,
            Publisher(outbox, config, timing=timing) as publisher,
        ):
            assert publisher.drain(12.0)
            received = list(listener.messages(0.5))
        assert [letter.seq for letter in outbox.dead_letters()] == [poison]
        assert [i.message["seq"] for i in received if i.kind == "verdict"] == [first, last]
        assert [i.message["code"] for i in received if i.kind == "alarm"] == ["DEAD_LETTER"]


@needs_mosquitto
def test_wrong_password_is_a_clear_error_and_the_right_one_works(
    tmp_path: Path, outbox: Outbox
) -> None:
    passwords = tmp_path / "passwords"
    tool = shutil.which("mosquitto_passwd")
    if tool is None:
        pytest.skip("mosquitto_passwd is not installed")
    subprocess.run([tool, "-b", "-c", str(passwords), "st", "right"], check=True)
    passwords.chmod(0o644)
    secret = tmp_path / "secret"
    setting = f"allow_anonymous false\npassword_file {passwords}"
    with Mosquitto(tmp_path, setting) as broker:
        config = MqttConfig(port=broker.port, username="st", password_file=secret)
        with Publisher(outbox, config, timing=QUICK) as publisher:
            assert wait_for(lambda: "password file cannot be read" in str(publisher.stats()))
            secret.write_text("wrong\n")
            assert wait_for(lambda: "refuses the station" in str(publisher.stats()))
            assert "check the user name" in str(publisher.stats()).lower()
            secret.write_text("right\n")
            assert wait_for(lambda: publisher.stats().connected)
            with Listener(config, statuses=False):
                put_verdict(outbox, config, verdict().to_dict())
                assert publisher.drain(5.0)


@needs_mosquitto
def test_mqtt_3_broker_is_named_and_usable_when_configured(tmp_path: Path, outbox: Outbox) -> None:
    with Mosquitto(tmp_path) as broker:
        config = MqttConfig(port=broker.port, version="3.1.1")
        with (
            Listener(config, statuses=False) as listener,
            Publisher(outbox, config) as publisher,
        ):
            put_verdict(outbox, config, verdict().to_dict())
            assert publisher.drain(5.0)
            (event,) = list(listener.messages(0.5))
    assert event.message["streamSeq"] == 1


@needs_iotcore
def test_mqtt_5_on_a_port_without_it_says_what_to_do(outbox: Outbox) -> None:
    with EmbeddedBroker() as broker:
        config = MqttConfig(port=broker.port_v4)
        with Publisher(outbox, config) as publisher:
            assert wait_for(lambda: publisher.stats().last_error, 8.0)
            assert "3.1.1" in str(publisher.stats().last_error)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca, rogue (self-signed CAs) and server (signed by ca, for localhost)."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("certificates")

    def run(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], cwd=folder, check=True, capture_output=True)

    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    for name in ("ca", "rogue"):
        run(
            "req", "-x509", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.crt",
            "-subj", f"/CN={name}", "-days", "2",
        )  # fmt: skip
    run("req", *new_key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=localhost")
    (folder / "san").write_text("subjectAltName=DNS:localhost")
    run(
        "x509", "-req", "-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key",
        "-CAcreateserial", "-out", "server.crt", "-days", "2", "-extfile", "san",
    )  # fmt: skip
    for file in folder.iterdir():
        file.chmod(0o644)
    return folder


@needs_mosquitto
# paho leaves the socket of a failed handshake to the garbage collector, which closes it.
@pytest.mark.filterwarnings("ignore:.*SSLSocket:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("host", "ca", "fault"),
    [
        ("localhost", "ca", None),
        ("localhost", "rogue", "certificate verify failed"),
        ("localhost", "absent", "certificates cannot be loaded"),
        ("127.0.0.1", "ca", "IP address mismatch"),
    ],
)
def test_tls_checks_certificate_and_host_name(
    host: str, ca: str, fault: str | None, certificates: Path, tmp_path: Path, outbox: Outbox
) -> None:
    setting = (
        f"allow_anonymous true\ncertfile {certificates}/server.crt\n"
        f"keyfile {certificates}/server.key\ntls_version tlsv1.2"
    )
    with Mosquitto(tmp_path, setting) as broker:
        config = MqttConfig(
            host=host, port=broker.port, tls=True, tls_ca=certificates / f"{ca}.crt"
        )
        with Publisher(outbox, config, timing=QUICK) as publisher:
            put_verdict(outbox, config, verdict().to_dict())
            if fault is None:
                with Listener(config, statuses=False):
                    assert publisher.drain(5.0)
            else:
                assert wait_for(lambda: fault in str(publisher.stats().last_error))
                assert outbox.pending == 1
    gc.collect()


@needs_mosquitto
def test_listener_prints_lines_for_people_and_raw_bodies_for_programs(
    tmp_path: Path, outbox: Outbox
) -> None:
    with Mosquitto(tmp_path) as broker:
        config = MqttConfig(port=broker.port)
        everything = [(row, column) for row in range(16) for column in range(16)]
        with Listener(config, client_id="mes", statuses=False):
            pass  # its session keeps what comes from now on
        with Publisher(outbox, config) as publisher:
            put_verdict(outbox, config, verdict(front=[(4, 5), (4, 6)]).to_dict())
            put_verdict(outbox, config, verdict().to_dict())
            put_verdict(outbox, config, verdict(side=everything).to_dict())
            alarm = payloads.alarm_message("DRIFT", "look", config.root, severity=300)
            outbox.put("alarm", topic_of(config, "alarm"), alarm.body, alarm.id)
            assert publisher.drain(5.0)
        with Listener(config, client_id="mes", statuses=False) as listener:
            lines = [listen.line_of(item) for item in listener.messages(0.5)]
            text = "\n".join(lines)
    assert "FAIL    #1 part 000123  clamp-bolts  A hex_bolt M8x30  SURFACE_DENT at A" in text
    assert "A front r5: 6,7  simulated" in text
    assert "PASS    #2 part 000123" in text
    assert "A side: 256 cells" in text
    assert "GRID    part 000123  A side r1: 1,2,3" in text
    assert "ALARM   DRIFT  look" in text
    assert all(len(line.splitlines()) == 1 for line in lines)


@needs_mosquitto
def test_listen_command_prints_json_and_ends_after_the_count(
    tmp_path: Path, outbox: Outbox
) -> None:
    with Mosquitto(tmp_path) as broker:
        config = MqttConfig(port=broker.port)
        put_verdict(outbox, config, verdict(result_id="r-1").to_dict())
        out = io.StringIO()
        with Publisher(outbox, config, timing=QUICK):
            assert listen.run(config, out, as_json=True, count=1, idle_s=5.0) == 0
    assert json.loads(out.getvalue())["resultId"] == "r-1"


@needs_mosquitto
def test_listen_command_says_when_fewer_came_than_were_asked_for(
    tmp_path: Path, outbox: Outbox, capsys: pytest.CaptureFixture[str]
) -> None:
    with Mosquitto(tmp_path) as broker:
        config = MqttConfig(port=broker.port)
        put_verdict(outbox, config, verdict(result_id="r-1").to_dict())
        with Publisher(outbox, config, timing=QUICK):
            out = io.StringIO()
            assert listen.run(config, out, as_json=True, count=2, idle_s=1.0) == 1
            assert json.loads(out.getvalue())["resultId"] == "r-1"
            assert "1 of 2 verdicts came" in capsys.readouterr().err
            mark = tmp_path / "shop.json"
            assert consumer.run(config, "shop", mark, out, count=2, idle_s=1.0) == 1
            assert "0 of 2 verdicts came" in capsys.readouterr().err
            assert listen.run(config, out, idle_s=0.3) == 0  # no number was asked for
    assert capsys.readouterr().err == ""


@needs_mosquitto
def test_listener_reports_gaps_and_unreadable_messages(tmp_path: Path) -> None:
    from forge_station.mes.link import Outgoing, connect
    from forge_station.mes.stamp import stamped, uuid7

    with Mosquitto(tmp_path) as broker:
        config = MqttConfig(port=broker.port)
        topic = topic_of(config, "verdict")
        body = payloads.messages_of(verdict().to_dict(), config.root)[0].body
        with Listener(config, statuses=False) as listener:
            link = connect(config, Outgoing(topic_of(config, "conn"), b"{}"), lambda _: None)
            for number in (1, 4, 3):
                fields = {"stream": "verdict", "epoch": "0123abcd", "bootId": "0123abcd"}
                message = stamped(body, id=uuid7(), seq=number, streamSeq=number, **fields)
                link.publish(Outgoing(topic, message))
            for garbage in (b"\xff", b"[]", b"{}", b'{"schema":"verdict/1.0"}'):
                link.publish(Outgoing(topic, garbage))
            lines = [listen.line_of(item) for item in listener.messages(0.5)]
            link.close()
            assert list(listener.missing().values()) == [(2,)]
    assert "GAP     verdict 2 to 3 did not come" in lines[1]
    assert "LATE    verdict 3, missing until now" in lines[2]
    assert all(line.startswith(f"UNREADABLE {topic}") for line in lines[3:])
    assert len(lines) == 7


def test_listener_without_a_broker_is_a_clear_error() -> None:
    with pytest.raises(LinkError, match="no connection to the broker"):
        Listener(MqttConfig(port=1)).start()


# The embedded broker


@needs_iotcore
def test_embedded_broker_listens_on_this_machine_only_and_frees_its_ports() -> None:
    with EmbeddedBroker() as broker:
        pid = broker.pid
        assert pid is not None
        listening = subprocess.run(["ss", "-ltn"], capture_output=True, text=True, check=False)
        if listening.returncode == 0:
            for port in (broker.port, broker.port_v4):
                assert f"127.0.0.1:{port}" in listening.stdout
                assert f"0.0.0.0:{port}" not in listening.stdout
        with pytest.raises(LinkError, match="taken"):
            EmbeddedBroker(port=broker.port).start()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@needs_iotcore
def test_embedded_broker_does_not_outlive_its_parent() -> None:
    script = (
        "import time; from forge_station.mes.broker import EmbeddedBroker\n"
        "broker = EmbeddedBroker(); broker.start(); print(broker.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_for(lambda: not _runs(pid))


def _runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.0.1", ""])
def test_embedded_broker_is_refused_to_other_machines(host: str) -> None:
    with pytest.raises(LinkError, match="this machine only"):
        EmbeddedBroker(host=host)
