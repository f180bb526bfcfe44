"""The topic table and the connection settings: where every message goes, with which QoS.

It does not know what is inside a message (`payloads`) nor how it is sent (`link`, `publisher`).
Version and direction follow the station's root at once, because broker access rules need
`evt/#`, `sts/#` (the station writes) and `in/#` (the station only reads) as separate prefixes.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from forge_station.contract import record
from forge_station.contract.error import ContractError, Fault
from forge_station.contract.record import Limit
from forge_station.mes import flat

Level = Annotated[
    str,
    Limit(
        pattern=r"[A-Za-z0-9_-]{1,32}",
        meaning="1 to 32 letters, digits, _ or - (one level of an MQTT topic)",
    ),
]


LEVELS = ("enterprise", "site", "area", "line", "station")
"""The places that a topic template may name, as `{site}`."""
ROOT_PATTERN = r"[A-Za-z0-9_-]{1,32}(/[A-Za-z0-9_-]{1,32}){0,11}"
GridEncoding = Literal["base64", "json"]


@dataclass(frozen=True)
class FlatTopic:
    """Chosen fields of the last verdict, retained, for a consumer that knows no nesting.

    `fields`: name in the message -> where it stands in the verdict message (`partId`,
    `reasons.0.code`, `model.version`; `cells` is the number of defective cells). `format` json: one
    flat object. values: one topic a field, `<topic>/<name>`, the bare value as text.
    """

    topic: Annotated[
        str,
        Limit(
            pattern=r"([A-Za-z0-9_-]+|\{(enterprise|site|area|line|station)\}|/)+",
            meaning="levels between slashes, with any of {enterprise} {site} {area} {line}"
            " {station}",
        ),
    ]
    fields: Mapping[str, str]
    format: Literal["json", "values"] = "json"

    def __post_init__(self) -> None:
        record.check(self)
        faults = [
            Fault(f"fields.{name}", name, "1 to 64 letters, digits, _ or -")
            for name in self.fields
            if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name)
        ]
        for name, path in self.fields.items():
            allowed = flat.allowed(path)
            if allowed:
                faults.append(Fault(f"fields.{name}", path, allowed))
        if not self.fields:
            faults.append(Fault("fields", "empty", "a name and a field of the verdict, or more"))
        if faults:
            raise ContractError("the flat topic is not valid", faults=faults)


@dataclass(frozen=True)
class MqttConfig:
    """How to reach the broker and who the station is. The MQTT client id is `station`."""

    host: str = "127.0.0.1"
    port: Annotated[int, Limit(1, 65535)] = 1883
    enterprise: Level = "enterprise"
    site: Level = "site"
    area: Level = "area"
    line: Level = "line"
    station: Level = "station"
    username: str | None = None
    password_file: Path | None = None
    """A file with the password alone; there is no field for the password itself."""
    tls: bool = False
    """Encrypt, with the certificate and the host name of the broker checked."""
    tls_ca: Path | None = None
    """CA certificates (PEM) that the broker's certificate must lead to; None: the system's."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False
    """Written out by whoever accepts an unencrypted connection to another machine."""
    keepalive_s: Annotated[int, Limit(2, 600)] = 15
    """A silent death of the broker is noticed after at most twice this time."""
    version: Literal["5", "3.1.1"] = "5"
    """3.1.1 only for a broker without MQTT 5: it cannot report that a message was refused."""

    receipts: Level | None = None
    """Name of the consumer whose receipts say what is delivered (level 2); None: the broker's word
    is enough (level 1)."""
    root_template: Annotated[
        str,
        Limit(
            pattern=r"(?=.*\{station\})([A-Za-z0-9_-]+|\{(enterprise|site|area|line|station)\}|/)+",
            meaning="levels between slashes, with {station} and any of {enterprise} {site} {area}"
            " {line}",
        ),
    ] = "{enterprise}/{site}/{area}/{line}/{station}"
    """Where the station stands among the site's topics; `insp/v1/...` follows it."""
    flat: tuple[FlatTopic, ...] = ()
    """Topics that carry chosen fields of the last verdict under names of the site's choice."""
    grid_encoding: GridEncoding = "base64"
    """json: grids as rows of numbers, for a consumer that cannot decode base64."""

    def __post_init__(self) -> None:
        record.check(self)
        faults = []
        if not self.host.strip():
            faults.append(Fault("host", repr(self.host), "a host name or address"))
        elif not self.tls and not self.insecure and not is_loopback(self.host):
            allowed = "tls: true for another machine, or insecure: true to send in the clear"
            faults.append(Fault("tls", f"off, with host {self.host}", allowed))
        if (self.tls_cert is None) != (self.tls_key is None):
            given = "tls_cert" if self.tls_cert else "tls_key"
            faults.append(Fault(given, "given alone", "tls_cert and tls_key together"))
        if not self.tls and (self.tls_ca or self.tls_cert):
            faults.append(Fault("tls", "false, with certificates", "tls: true"))
        if self.password_file is not None and self.username is None:
            faults.append(Fault("username", "missing", "a name to go with password_file"))
        if not re.fullmatch(ROOT_PATTERN, self.root):
            allowed = "1 to 12 levels of 1 to 32 letters, digits, _ or -"
            faults.append(Fault("root_template", self.root, allowed))
        names = [filled(item.topic, self) for item in self.flat]
        for number, topic in enumerate(names):
            if topic in names[:number] or topic.startswith(f"{self.root}/insp/"):
                allowed = "a topic of its own, outside the station's own topics"
                faults.append(Fault(f"flat[{number}].topic", topic, allowed))
        if faults:
            raise ContractError("the MQTT settings are not valid", faults=faults)

    @property
    def root(self) -> str:
        """The station's topic root, by default `enterprise/site/area/line/station` (ISA-95)."""
        return filled(self.root_template, self)

    @property
    def security(self) -> Literal["tls", "loopback", "insecure"]:
        """How the connection is protected: encrypted, within this machine, or not at all."""
        if self.tls:
            return "tls"
        return "loopback" if is_loopback(self.host) else "insecure"


@dataclass(frozen=True)
class Topic:
    """One kind of message: who sends it, where, how."""

    name: str
    path: str
    """Below the root, after `insp/v1/`. `{...}` stands for one level."""
    schema: str
    summary: str
    qos: int = 1
    retain: bool = False
    expiry_s: int | None = None
    inbound: bool = False
    """The station receives it. Otherwise it alone sends it."""
    reserved: bool = False
    """Its form is fixed, this release does not use it."""


TOPICS: Mapping[str, Topic] = {
    item.name: item
    for item in (
        # Events: through the outbox, one stream each, never retained.
        Topic("alarm", "evt/alarm", "alarm/1.0", "Something that somebody must know"),
        Topic("verdict", "evt/verdict", "verdict/1.0", "The result of record of one part or tray"),
        Topic("grid", "evt/grid", "grid/1.0", "Defect grids that did not fit in the verdict"),
        Topic("audit", "evt/audit", "audit/1.0", "A command was carried out or refused"),
        Topic("gone", "evt/gone", "gone/1.0", "Numbers that a consumer misses and will not get"),
        # Status: the latest value only, retained, past the outbox.
        Topic("conn", "sts/conn", "conn/1.0", "Whether the station is there", retain=True),
        Topic("birth", "sts/birth", "birth/1.0", "What the station is and can do", retain=True),
        Topic("state", "sts/state", "state/1.0", "The machine state", retain=True),
        Topic("last", "sts/last", "last/1.0", "The last verdict, flat", qos=0, retain=True),
        Topic(
            "health", "sts/health", "health/1.0", "Load, link, outbox, clock",
            qos=0, retain=True, expiry_s=30,
        ),
        # Answers and progress.
        Topic("reply", "rsp/{cmdId}", "reply/1.0", "The answer to a command", expiry_s=3600),
        Topic(
            "job", "job/{jobId}", "job/1.0", "Progress of a model release",
            retain=True,
        ),
        # What the station takes. Nothing in it is trusted for having come this way.
        Topic(
            "command", "in/cmd/{name}", "command/1.0", "A signed command",
            expiry_s=60, inbound=True,
        ),
        Topic(
            "receipt", "in/receipt/{consumer}", "receipt/1.0", "What a consumer has stored",
            retain=True, inbound=True,
        ),
    )
}  # fmt: skip

STREAMS: tuple[str, ...] = ("alarm", "verdict", "grid", "audit")
"""The streams of the outbox, most urgent first; order is kept inside a stream only."""

STATUSES: tuple[str, ...] = ("conn", "birth", "state", "last", "health")


def topic_of(config: MqttConfig, name: str, level: str | None = None) -> str:
    """The full topic of one message kind: `<root>/insp/v1/evt/verdict`.

    `level` stands in for the `{...}` of kinds that have one; `+` makes a subscription of it.
    """
    path = TOPICS[name].path
    if level is not None:
        path = re.sub(r"\{\w+\}", lambda _: level, path)
    return f"{config.root}/insp/v1/{path}"


def filled(template: str, config: MqttConfig) -> str:
    """A topic template with the station's levels put in. Raises KeyError for an unknown name."""
    return template.format_map({name: getattr(config, name) for name in LEVELS})


def events_filter(config: MqttConfig) -> str:
    """The subscription that receives every event of the station."""
    return f"{config.root}/insp/v1/evt/#"


def probe_topic(config: MqttConfig) -> str:
    """Where a station without MQTT 5 sends itself a message, to see that it may write events."""
    return f"{config.root}/insp/v1/evt/probe"


def statuses_filter(config: MqttConfig) -> str:
    """The subscription that receives the retained status of the station."""
    return f"{config.root}/insp/v1/sts/#"


def jobs_filter(config: MqttConfig) -> str:
    """The subscription that receives the progress of all deployments of the station."""
    return topic_of(config, "job", "+")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
