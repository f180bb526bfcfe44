"""The command line that signs, sends and waits; and the one that writes the broker's rules."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paho.mqtt.client as mqtt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

pytest.importorskip("rfc8785", reason="commands need the extra commands")

from forge_station import private_key
from forge_station.contract.error import ContractError
from forge_station.errors import ConfigError, LinkError, OutboxError
from forge_station.mes import acl, command, command_client, party, schema
from forge_station.mes.command_client import Commander, arguments_of, signed
from forge_station.mes.command_store import CommandStore
from forge_station.mes.commands import CommandServer
from forge_station.mes.interface import example
from forge_station.mes.outbox import Outbox
from forge_station.mes.publisher import Publisher, Timing
from forge_station.mes.settings import SparkplugConfig
from forge_station.mes.topics import MqttConfig, topic_of
from tests.mes import signing_rig
from tests.mes.rig import MOSQUITTO, Mosquitto, wait_for

needs_mosquitto = pytest.mark.skipif(MOSQUITTO is None, reason="no mosquitto on this machine")
QUICK = Timing(reconnect_s=(0.05, 0.2), settle_s=0.0)


def pem(key: Any, encryption: KeySerializationEncryption | None = None) -> bytes:
    found: bytes = key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption()
    )
    return found


def public(key: Any) -> bytes:
    found: bytes = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return found


@pytest.mark.parametrize(
    ("name", "pairs", "found"),
    [
        ("ping", [], {}),
        (
            "setThreshold",
            ["name=defect_fail", "value=0.45"],
            {"name": "defect_fail", "value": 0.45},
        ),
        (
            "replay",
            ["fromSeq=17", "toSeq=20", "epoch=5f0c2a91"],
            {"fromSeq": 17, "toSeq": 20, "epoch": "5f0c2a91"},
        ),
        ("selectRecipe", ["productId=0815=x"], {"productId": "0815=x"}),
    ],
)
def test_arguments_get_the_types_of_the_schema(
    name: str, pairs: list[str], found: dict[str, Any]
) -> None:
    assert arguments_of(name, pairs) == found


@pytest.mark.parametrize(
    ("name", "pairs", "said"),
    [
        ("fly", [], "expected ping, rebirth"),
        ("ping", ["x=1"], "no arguments"),
        ("setThreshold", ["valu=1"], "name=..., value=..."),
        ("setThreshold", ["value"], "name=..., value=..."),
        ("setThreshold", ["value=much"], "expected value: number, got much"),
    ],
)
def test_wrong_arguments_are_answered_with_the_right_ones(
    name: str, pairs: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        arguments_of(name, pairs)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"no key", "not a private key"),
        (public(signing_rig.KEY), "got a public key. Name the private file"),
        (pem(signing_rig.KEY, BestAvailableEncryption(b"secret")), "no passphrase"),
        (pem(ec.generate_private_key(ec.SECP256R1())), "expected Ed25519"),
        (None, "cannot be read"),
    ],
)
def test_key_that_cannot_sign_is_named(tmp_path: Path, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / "key.pem").write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        private_key.read(tmp_path / "key.pem")


def test_what_it_signs_a_station_accepts() -> None:
    made = signed("ping", {}, signing_rig.KEY, root="a/b", epoch="0123abcd", issuer="me")
    found = command.read(json.dumps(made).encode(), signing_rig.settings().keys)
    assert (found.root, found.epoch, found.issuer) == ("a/b", "0123abcd", "me")
    assert 0 < found.expires_at - found.issued_at <= command.MAX_LIFETIME_S


@pytest.fixture
def config(tmp_path: Path) -> Iterator[MqttConfig]:
    with Mosquitto(tmp_path) as broker:
        yield MqttConfig(port=broker.port, keepalive_s=5)


def given(tmp_path: Path, name: str, *pairs: str, as_json: bool = False) -> argparse.Namespace:
    key = tmp_path / "me.pem"
    key.write_bytes(pem(signing_rig.KEY))
    return argparse.Namespace(
        name=name, arguments=list(pairs), key=key, issuer="me", timeout=10.0, json=as_json,
        tls_cert=None, tls_key=None, username=None, password_file=None,
    )  # fmt: skip


@needs_mosquitto
def test_command_line_tells_how_it_went(
    config: MqttConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def replay(args: Any) -> Any:
        if args["fromSeq"] > args["toSeq"]:
            raise ContractError("no range")
        if args["epoch"] != "0123abcd":
            raise OutboxError("another epoch")
        return {"rows": 4}

    with (
        Outbox(tmp_path / "o.db", ballast_bytes=0) as outbox,
        CommandStore(tmp_path / "c.db") as store,
        Publisher(outbox, config, timing=QUICK) as publisher,
        CommandServer(config, signing_rig.settings(), {"replay": replay}, publisher, outbox, store),
    ):

        def run(*pairs: str, **more: Any) -> tuple[int, str]:
            code = command_client.run(given(tmp_path, "replay", *pairs, **more), config)
            return code, capsys.readouterr().out

        good = ("fromSeq=1", "toSeq=4", "epoch=0123abcd")
        code, text = run(*good)
        assert (code, text.splitlines()[0]) == (0, "SUCCEEDED: replay: done")
        assert '"rows": 4' in text
        code, text = run(*good, as_json=True)
        assert json.loads(text)["result"] == {"rows": 4}
        assert run("fromSeq=5", "toSeq=4", "epoch=0123abcd")[0] == 1
        code, text = run("fromSeq=1", "toSeq=4", "epoch=ffffffff")
        assert (code, text.split(":")[0]) == (1, "FAILED (OUTBOX_FAILED)")
        code, text = run("fromSeq=1")
        assert (code, text.split(":")[0]) == (1, "REJECTED (BAD_ARGS)")


@needs_mosquitto
def test_no_station_and_no_answer_are_clear_errors(config: MqttConfig, tmp_path: Path) -> None:
    with (
        Commander(config, signing_rig.KEY, "me", timeout_s=0.3) as commander,
        pytest.raises(LinkError, match="no station there"),
    ):
        commander.send("ping", timeout_s=0.3)
    with (
        Outbox(tmp_path / "o.db", ballast_bytes=0) as outbox,
        Publisher(outbox, config, timing=QUICK) as publisher,
        Commander(config, signing_rig.KEY, "me") as commander,
    ):
        with pytest.raises(LinkError, match=r"takes no commands.*its connection is ONLINE"):
            commander.send("ping")
        publisher.subscribe(topic_of(config, "command", "+"), lambda _: None)
        assert wait_for(lambda: _is_taken(commander))
        with pytest.raises(LinkError, match=r"does not answer.*its connection is ONLINE"):
            commander.send("ping", timeout_s=0.5)
    with pytest.raises(LinkError, match="no connection"):
        Commander(MqttConfig(port=1), signing_rig.KEY, "me").__enter__()


@pytest.mark.parametrize("topic", [("conn",), ("reply", "x")])
@pytest.mark.parametrize("body", [b"5", b"null", b"[]", b"", b"[" * 9999, b"\xff", b"other"])
def test_what_is_no_reply_is_passed_over(topic: tuple[str, ...], body: bytes) -> None:
    """`other`: a whole message that belongs to another topic."""
    config = MqttConfig(line="l1")
    commander = Commander(config, signing_rig.KEY, "me")
    if body == b"other":
        body = json.dumps(example("health" if topic[0] == "conn" else "conn")).encode()
        schema.require(json.loads(body))
    message = mqtt.MQTTMessage(topic=topic_of(config, *topic).encode())
    message.payload = body
    client = commander._new_client()
    assert client.on_message is not None
    client.on_message(client, None, message)
    assert not commander._seen.is_set() and commander._replies.empty()


def _is_taken(commander: Commander) -> bool:
    try:
        commander.publish("ping", b"{}")
    except LinkError:
        return False
    return True


def test_who_listens_or_commands_is_not_the_station(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    party.add_arguments(parser)
    station = MqttConfig(tls=True, tls_cert=tmp_path / "s1.crt", tls_key=tmp_path / "s1.key")
    assert party.config_of(parser.parse_args([]), station) == station
    mine = ["--tls-cert", "me.crt", "--tls-key", "me.key"]
    found = party.config_of(parser.parse_args(mine), station)
    assert (found.tls_cert, found.tls_key) == (Path("me.crt"), Path("me.key"))
    with pytest.raises(ContractError, match="username"):
        party.config_of(parser.parse_args(["--password-file", "f"]), station)


def test_access_rules_are_written_beside_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = argparse.Namespace(
        consumers=["historian"], commanders=["mes"], mosquitto="2.0", port=8883,
        plugin=acl.PLUGIN, out=tmp_path / "conf",
    )  # fmt: skip
    stations = [
        (MqttConfig(station="s1"), None),
        (MqttConfig(station="s2"), SparkplugConfig("plant", node="n2")),
    ]
    assert acl.run(args, stations) == 0
    assert f"acl_file {tmp_path}/conf/acl" in (tmp_path / "conf/mosquitto.conf").read_text()
    text = (tmp_path / "conf/acl").read_text()
    assert "user historian" in text and "user mes" in text
    assert text.count("topic write spBv1.0/plant/NBIRTH/n2") == 1
    assert len(capsys.readouterr().out.splitlines()) == 2
    args.out = None
    assert acl.run(args, stations) == 0
    assert "# ---- acl" in capsys.readouterr().out
    args.out = tmp_path / "conf" / "acl"  # a file
    with pytest.raises(ConfigError, match="cannot be written"):
        acl.run(args, stations)
