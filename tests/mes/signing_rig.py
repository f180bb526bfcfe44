"""Keys and signed commands for tests: what an honest sender does, and a dishonest one."""

from __future__ import annotations

import base64
import json
from datetime import datetime, timezone
from itertools import count
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from forge_station.mes import command
from forge_station.mes.command import CommandConfig, CommandKey, Role
from forge_station.mes.link import Inbound
from forge_station.mes.topics import MqttConfig, topic_of
from forge_station.signing import PublicKey

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
STRANGER = Ed25519PrivateKey.from_private_bytes(bytes(32))
CONFIG = MqttConfig()
EPOCH = "0123abcd"
_counter = count(1_000)


def public(key: Ed25519PrivateKey) -> PublicKey:
    return PublicKey(key.public_key().public_bytes_raw())


def settings(*roles: Role, **more: Any) -> CommandConfig:
    return CommandConfig((CommandKey("mes-1", public(KEY), roles or ("engineer",)),), **more)


def rfc3339(unix: float) -> str:
    found = datetime.fromtimestamp(unix, timezone.utc).isoformat(timespec="milliseconds")
    return found.replace("+00:00", "Z")


def message(
    name: str = "ping",
    args: dict[str, Any] | None = None,
    *,
    now: float,
    key: Ed25519PrivateKey = KEY,
    age_s: float = 0.0,
    lifetime_s: float = 30.0,
    **changes: Any,
) -> dict[str, Any]:
    """A command as an honest sender signs it; `changes` are made before it signs."""
    number = next(_counter)
    body: dict[str, Any] = {
        "schema": "command/1.0",
        "cmdId": f"cmd-{number:08d}",
        "name": name,
        "args": args or {},
        "issuedAt": rfc3339(now - age_s),
        "expiresAt": rfc3339(now - age_s + lifetime_s),
        "issuer": "test",
        "counter": number,
        "target": {"root": CONFIG.root, "epoch": EPOCH},
        **changes,
    }
    value = base64.b64encode(key.sign(command.canonical(body))).decode()
    return {**body, "sig": {"keyId": public(key).id, "alg": "ed25519", "value": value}}


def inbound(body: dict[str, Any] | bytes, name: str = "ping", **more: Any) -> Inbound:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Inbound(topic_of(CONFIG, "command", name), content, **more)
