"""One command message: its canonical form, its signature, and why it may not be carried out.

It knows no broker, no disk and no station. The signature is Ed25519 (RFC 8032) over the RFC 8785
canonical form of the message without `sig`: member order, spaces and number notation on the wire
do not matter, what is said does. The broker is not trusted: everything that binds a command to one
station, one time and one occasion is signed.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Literal

from forge_station.contract import record
from forge_station.contract.error import ContractError, Fault
from forge_station.contract.record import Limit
from forge_station.errors import ConfigError
from forge_station.mes import schema
from forge_station.signing import PublicKey

MAX_BYTES = 16 << 10
MAX_LIFETIME_S = 300.0
CLOCK_SKEW_S = 5.0
"""So much the clock of the sender may be ahead of the station's."""
SCHEMA = "command-1.0.json"
_CMD_ID = re.compile(r"[A-Za-z0-9_-]{8,64}")
_NAME = re.compile(r"[a-z][A-Za-z]{1,31}")
_LEVEL = re.compile(r"[A-Za-z0-9_-]{1,64}")

Role = Literal["operator", "engineer", "release"]
ROLES: Mapping[str, frozenset[Role]] = {
    "ping": frozenset({"operator", "engineer", "release"}),
    "rebirth": frozenset({"operator", "engineer"}),
    "replay": frozenset({"operator", "engineer"}),
    "ackAlarm": frozenset({"operator", "engineer"}),
    "start": frozenset({"operator", "engineer"}),
    "stop": frozenset({"operator", "engineer"}),
    "selectRecipe": frozenset({"operator", "engineer"}),
    "capture": frozenset({"operator", "engineer"}),
    "setThreshold": frozenset({"engineer"}),
    "deploy": frozenset({"release"}),
    "rollback": frozenset({"release"}),
}
"""Command -> roles of which a key needs one."""

Bound = tuple[float, float]


@dataclass(frozen=True)
class CommandKey:
    """A key whose commands the station takes. Use one for each sender: a counter goes with it."""

    name: Annotated[
        str, Limit(pattern=r"[A-Za-z0-9_. -]{1,64}", meaning="1 to 64 letters, digits, _ . - space")
    ]
    """For the audit."""
    key: PublicKey
    roles: tuple[Role, ...]

    def __post_init__(self) -> None:
        record.check(self)
        if not self.roles:
            allowed = "operator, engineer, release, or several of them"
            raise ContractError("no role", faults=[Fault("roles", "empty", allowed)])


@dataclass(frozen=True)
class CommandConfig:
    """Who may command the station. Without a key it takes no command and does not listen."""

    keys: tuple[CommandKey, ...] = ()
    thresholds: Mapping[str, Bound] = field(default_factory=dict)
    """Operating points that `setThreshold` may change, each with its lowest and highest value."""

    def __post_init__(self) -> None:
        faults = [
            Fault(f"thresholds.{name}", f"{low:g} to {high:g}", "a lowest and a highest value")
            for name, (low, high) in self.thresholds.items()
            if not low <= high
        ]
        ids = [item.key.id for item in self.keys]
        for number, key_id in enumerate(ids):
            if key_id in ids[:number]:
                faults.append(Fault(f"keys[{number}].key", key_id, "a key that is not listed yet"))
        if faults:
            raise ContractError("the commands table is not valid", faults=faults)


class Refused(Exception):
    """Why a command is not carried out. `code` stands in reply and audit, `text` is for people."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


@dataclass(frozen=True)
class Command:
    """A command that is well-formed and rightly signed; nothing else is known of it yet."""

    id: str
    name: str
    args: Mapping[str, Any]
    issuer: str
    issued_at: float
    expires_at: float
    counter: int
    root: str
    epoch: str
    key: CommandKey


def read(body: bytes, keys: Sequence[CommandKey]) -> Command:
    """Parse a message and verify who signed it. Raises Refused."""
    if len(body) > MAX_BYTES:
        raise Refused("TOO_LARGE", f"{len(body)} bytes, at most {MAX_BYTES} are read")
    message = _parsed(body)
    found = schema.faults(message, SCHEMA)
    if found:
        raise Refused("MALFORMED", "; ".join(map(str, found[:3])))
    issued_at, expires_at = _seconds(message["issuedAt"]), _seconds(message["expiresAt"])
    key = next((item for item in keys if item.key.id == message["sig"]["keyId"]), None)
    if key is None:
        raise Refused("UNKNOWN_KEY", f"the key {message['sig']['keyId']} is not enrolled here")
    if not key.key.verifies(base64.b64decode(message["sig"]["value"]), canonical(message)):
        raise Refused("BAD_SIGNATURE", "the signature is wrong, or the message was altered")
    return Command(
        message["cmdId"],
        message["name"],
        message["args"],
        message["issuer"],
        issued_at,
        expires_at,
        message["counter"],
        message["target"]["root"],
        message["target"]["epoch"],
        key,
    )


def require_valid(
    command: Command, *, topic_name: str, root: str, epoch: str, counter: int, now: float
) -> None:
    """Hold a rightly signed command against place, time and occasion. Raises Refused.

    `topic_name` is the last level of its topic, `counter` the last one of its key, `now` Unix time.
    """
    if command.name != topic_name:
        raise Refused("WRONG_NAME", f"{command.name} came on the topic of {topic_name}")
    if command.root != root:
        raise Refused("WRONG_TARGET", f"meant for {command.root}, this is {root}")
    if command.epoch != epoch:
        raise Refused("WRONG_TARGET", f"meant for epoch {command.epoch}, this is {epoch}")
    lifetime = command.expires_at - command.issued_at
    if not 0 < lifetime <= MAX_LIFETIME_S:
        raise Refused("MALFORMED", f"valid for {lifetime:g} s, at most {MAX_LIFETIME_S:g} s")
    if now > command.expires_at:
        raise Refused("EXPIRED", f"{now - command.expires_at:.1f} s too late by this clock")
    if command.issued_at > now + CLOCK_SKEW_S:
        ahead = command.issued_at - now
        raise Refused("NOT_YET_VALID", f"issued {ahead:.1f} s ahead of this clock")
    if command.counter <= counter:
        raise Refused("REPLAYED", f"counter {command.counter}, the key is at {counter} already")
    allowed = ROLES.get(command.name, frozenset())
    if command.name in ROLES and not allowed & set(command.key.roles):
        raise Refused("FORBIDDEN", f"needs one of the roles {', '.join(sorted(allowed))}")


def require_args(command: Command) -> None:
    """Hold the arguments against the schema of the command. Raises Refused."""
    found = schema.faults(command.args, SCHEMA, part=command.name)
    if found:
        raise Refused("BAD_ARGS", "; ".join(map(str, found[:3])))


def canonical(message: Mapping[str, Any]) -> bytes:
    """The bytes that are signed: RFC 8785 of everything but `sig`. Raises Refused, ConfigError."""
    try:
        import rfc8785
    except ModuleNotFoundError as error:
        raise ConfigError(
            "commands need the package rfc8785", action="install forge-station[commands]"
        ) from error
    try:
        return rfc8785.dumps({key: value for key, value in message.items() if key != "sig"})
    except ValueError as error:  # CanonicalizationError, or half a character in a member's name
        raise Refused("MALFORMED", f"no canonical form: {error}") from error


def told_id(body: bytes) -> str | None:
    """The cmdId of a message that was refused, to answer it by; None when it has none."""
    try:
        found = _parsed(body[:MAX_BYTES]).get("cmdId") if len(body) <= MAX_BYTES else None
    except Refused:
        return None
    return found if isinstance(found, str) and _CMD_ID.fullmatch(found) else None


def is_name(text: str) -> bool:
    """Whether it could be the name of a command."""
    return _NAME.fullmatch(text) is not None


def is_level(text: str) -> bool:
    """Whether it is one level of a topic, and no wildcard."""
    return _LEVEL.fullmatch(text) is not None


def _parsed(body: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError("a member is given twice")
        return dict(pairs)

    def number(text: str) -> float:
        raise ValueError(f"{text} is no JSON")

    try:
        message = json.loads(body, object_pairs_hook=once, parse_constant=number)
    except (ValueError, RecursionError) as error:
        raise Refused("MALFORMED", f"no JSON: {str(error)[:200]}") from error
    if not isinstance(message, dict):
        raise Refused("MALFORMED", "not a JSON object")
    return message


def _seconds(text: str) -> float:
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError as error:
        raise Refused("MALFORMED", f"{text} is no time") from error
