"""Sends a signed command to a station and waits for its answer: `forge-station command`.

A library for integrators as well: it knows the interface, nothing of the station's inside. The
private key stays here; the station has the public one (`commands.keys` of its file).
"""

from __future__ import annotations

import argparse
import base64
import getpass
import json
import queue
import secrets
import threading
import time
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

import paho.mqtt.client as mqtt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.reasoncodes import ReasonCode

from forge_station import private_key
from forge_station.errors import ConfigError, LinkError
from forge_station.mes import command, party, schema
from forge_station.mes.link import NO_SUBSCRIBERS, equip
from forge_station.mes.stamp import uuid7
from forge_station.mes.topics import MqttConfig, topic_of
from forge_station.signing import PublicKey

LIFETIME_S = 30.0


def signed(
    name: str,
    args: Mapping[str, Any],
    key: Ed25519PrivateKey,
    *,
    root: str,
    epoch: str,
    issuer: str,
    lifetime_s: float = LIFETIME_S,
) -> dict[str, Any]:
    """A command message, complete. Its counter is the time in microseconds: one sender a key."""
    now = datetime.now(timezone.utc)
    body: dict[str, Any] = {
        "schema": "command/1.0",
        "cmdId": uuid7(),
        "name": name,
        "args": dict(args),
        "issuedAt": _rfc3339(now),
        "expiresAt": _rfc3339(now + timedelta(seconds=lifetime_s)),
        "issuer": issuer,
        "counter": time.time_ns() // 1000,
        "target": {"root": root, "epoch": epoch},
    }
    value = base64.b64encode(key.sign(command.canonical(body))).decode()
    key_id = PublicKey(key.public_key().public_bytes_raw()).id
    return {**body, "sig": {"keyId": key_id, "alg": "ed25519", "value": value}}


class Commander:
    """`with Commander(config, key, issuer) as commander: commander.send("ping")`.

    `config` says broker, credentials of the sender, and the station (by its topic root). Raises
    LinkError when the broker cannot be reached, or knows no station there.
    """

    def __init__(
        self, config: MqttConfig, key: Ed25519PrivateKey, issuer: str, timeout_s: float = 10.0
    ) -> None:
        self._config = config
        self._key = key
        self._issuer = issuer
        self._timeout_s = timeout_s
        self._replies: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._acks: queue.SimpleQueue[tuple[int, ReasonCode]] = queue.SimpleQueue()
        self._conn: dict[str, Any] | None = None
        self._seen = threading.Event()
        self._subscribed = threading.Event()
        self._refusal: str | None = None
        self._client: mqtt.Client | None = None

    def __enter__(self) -> Commander:
        config = self._config
        client = self._client = self._new_client()
        try:
            client.connect(config.host, config.port, config.keepalive_s)
        except (OSError, ValueError) as error:
            where = f"{config.host}:{config.port}"
            raise LinkError("no connection to the broker", which=where, got=error) from error
        client.loop_start()
        if not self._subscribed.wait(self._timeout_s) or self._refusal:
            got = self._refusal or f"no answer in {self._timeout_s:g} s"
            self.close()
            raise LinkError("the broker does not let the commander in", got=got)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect. May be called twice."""
        client, self._client = self._client, None
        if client is not None:
            client.disconnect()
            client.loop_stop()

    def epoch(self) -> str:
        """The station's epoch, from its retained conn message. Raises LinkError without one."""
        if not self._seen.wait(self._timeout_s) or self._conn is None:
            raise LinkError(
                "no station there",
                which=topic_of(self._config, "conn"),
                expected="a retained conn message",
                got=f"none in {self._timeout_s:g} s",
                action="check the station file, and that the station has ever connected",
            )
        return str(self._conn["epoch"])

    def send(
        self, name: str, args: Mapping[str, Any] | None = None, timeout_s: float = LIFETIME_S
    ) -> dict[str, Any]:
        """Sign, send, and wait for the answer: the reply message. Raises LinkError without one."""
        message = signed(
            name,
            args or {},
            self._key,
            root=self._config.root,
            epoch=self.epoch(),
            issuer=self._issuer,
            lifetime_s=min(max(timeout_s, 1.0), command.MAX_LIFETIME_S),
        )
        self.publish(name, json.dumps(message).encode())
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                reply = self._replies.get(timeout=left_s)
            except queue.Empty:
                break
            if reply.get("cmdId") == message["cmdId"] and reply["status"] not in (
                "ACCEPTED",
                "IN_PROGRESS",
            ):
                return reply
        raise LinkError(
            "the station does not answer",
            which=f"command {name}, {message['cmdId']}",
            got=f"nothing in {timeout_s:g} s; its connection is {self._state()}",
            action="check that commands.keys of its file names a key; its audit messages say more",
        )

    def publish(self, name: str, body: bytes, *, retain: bool = False) -> None:
        """Publish to a command topic as it is. Raises LinkError when the broker refuses it, or
        says that nobody takes commands there."""
        client = self._client
        if client is None:
            raise LinkError("the commander is not connected")
        info = client.publish(topic_of(self._config, "command", name), body, 1, retain)
        deadline = time.monotonic() + self._timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                packet, reason = self._acks.get(timeout=left_s)
            except queue.Empty:
                break
            if packet == info.mid and reason.is_failure:
                raise LinkError(
                    "the broker refuses the command",
                    which=topic_of(self._config, "command", name),
                    got=reason,
                    action="its access rules must let this certificate or user write in/cmd",
                )
            if packet == info.mid and reason.value == NO_SUBSCRIBERS:
                raise LinkError(
                    "the station takes no commands",
                    which=topic_of(self._config, "command", name),
                    got=f"{reason}; its connection is {self._state()}",
                    action="one that is starting takes them once it is ready; else commands.keys of"
                    " its file must name a key",
                )
            if packet == info.mid:
                return
        raise LinkError("the broker does not confirm", got=f"nothing in {self._timeout_s:g} s")

    def _state(self) -> str:
        return str(self._conn["state"]) if self._conn else "unknown"

    def _new_client(self) -> mqtt.Client:
        config = self._config
        v5 = config.version == "5"
        client = mqtt.Client(
            CallbackAPIVersion.VERSION2,
            f"command-{secrets.token_hex(4)}",
            protocol=mqtt.MQTTv5 if v5 else mqtt.MQTTv311,
        )
        equip(client, config)
        conn = topic_of(config, "conn")

        def on_connect(_: Any, __: Any, ___: Any, reason: ReasonCode, ____: Any) -> None:
            if reason.is_failure:
                self._refusal = str(reason)
                self._subscribed.set()
            else:
                client.subscribe([(conn, 1), (topic_of(config, "reply", "+"), 1)])

        def on_message(_: Any, __: Any, message: mqtt.MQTTMessage) -> None:
            kind = "conn/1.0" if message.topic == conn else "reply/1.0"
            try:
                content = json.loads(message.payload)
                schema.require(content)
            except (ValueError, RecursionError):
                return
            if content["schema"] != kind:
                return
            if message.topic == conn:
                self._conn = content
                self._seen.set()
            else:
                self._replies.put(content)

        client.on_connect = on_connect
        client.on_subscribe = lambda *_: self._subscribed.set()
        client.on_message = on_message
        client.on_publish = lambda _, __, mid, reason, ___: self._acks.put((mid, reason))
        return client


def arguments_of(name: str, pairs: list[str]) -> dict[str, Any]:
    """`["value=0.5"]` -> `{"value": 0.5}`, typed as the command's schema says."""
    known = schema.load(command.SCHEMA)["$defs"]
    if name not in known:
        raise ConfigError("unknown command", expected=", ".join(known), got=name)
    properties = known[name]["properties"]
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or key not in properties:
            allowed = ", ".join(f"{item}=..." for item in properties) or "no arguments"
            raise ConfigError(f"argument of {name}", expected=allowed, got=pair)
        kind = properties[key].get("type")
        try:
            found[key] = {"integer": int, "number": float}.get(kind, str)(text)
        except ValueError as error:
            raise ConfigError(f"argument of {name}", expected=f"{key}: {kind}", got=text) from error
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = schema.load(command.SCHEMA)["$defs"]
    listed = []
    for name, rules in names.items():
        listed.append(f"  {name:<13}{rules['title']}")
        if rules["properties"]:
            listed.append(f"{'':<15}{' '.join(f'{item}=...' for item in rules['properties'])}")
    lines = "\n".join(listed)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Sign a command, send it through the broker and wait for the station's answer.\n"
        "A key: openssl genpkey -algorithm ed25519 -out me.pem; openssl pkey -in me.pem -pubout\n"
        "gives the public key for `commands.keys` of the station file.\n\ncommands:\n"
        f"{lines}\n\nWhich of them a station takes, its birth message says (capabilities)."
    )
    parser.add_argument("name", metavar="NAME", help="see above")
    parser.add_argument("arguments", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--key", type=Path, required=True, help="Ed25519 private key (PEM)")
    parser.add_argument(
        "--issuer", default=getpass.getuser(), help="who sends it, for the audit (default: you)"
    )
    parser.add_argument(
        "--timeout", type=float, default=LIFETIME_S, metavar="SECONDS", help="for the answer"
    )
    parser.add_argument("--json", action="store_true", help="print the reply message itself")
    party.add_arguments(parser)


def run(args: argparse.Namespace, config: MqttConfig) -> int:
    """The command `forge-station command`. 0: it succeeded, 1: it did not."""
    key = private_key.read(args.key)
    given = arguments_of(args.name, args.arguments)
    with Commander(party.config_of(args, config), key, args.issuer) as commander:
        reply = commander.send(args.name, given, args.timeout)
    if args.json:
        print(json.dumps(reply))
    else:
        code = f" ({reply['code']})" if "code" in reply else ""
        print(f"{reply['status']}{code}: {reply['detail']}")
        if reply.get("result"):
            print(json.dumps(reply["result"], indent=2))
    return 0 if reply["status"] == "SUCCEEDED" else 1


def _rfc3339(time_: datetime) -> str:
    return time_.isoformat(timespec="milliseconds").replace("+00:00", "Z")


__all__ = ["Commander", "add_arguments", "arguments_of", "run", "signed"]
