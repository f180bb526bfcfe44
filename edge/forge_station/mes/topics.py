"""The topic table and the connection settings: where every message goes, with which QoS.

It does not know what is inside a message (`payloads`) nor how it is sent (`link`, `publisher`).
Version and direction follow the station's root at once, because broker access rules need
`evt/#`, `sts/#` (the station writes) and `in/#` (the station only reads) as separate prefixes.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from forge_station.contract import record
from forge_station.contract.error import ContractError, Fault
from forge_station.contract.record import Limit

Level = Annotated[
    str,
    Limit(
        pattern=r"[A-Za-z0-9_-]{1,32}",
        meaning="1 to 32 letters, digits, _ or - (one level of an MQTT topic)",
    ),
]


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

    def __post_init__(self) -> None:
        record.check(self)
        faults = []
        if not self.host.strip():
            faults.append(Fault("host", repr(self.host), "a host name or address"))
        elif not self.tls and not self.insecure and not _is_loopback(self.host):
            allowed = "tls: true for another machine, or insecure: true to send in the clear"
            faults.append(Fault("tls", f"off, with host {self.host}", allowed))
        if (self.tls_cert is None) != (self.tls_key is None):
            given = "tls_cert" if self.tls_cert else "tls_key"
            faults.append(Fault(given, "given alone", "tls_cert and tls_key together"))
        if not self.tls and (self.tls_ca or self.tls_cert):
            faults.append(Fault("tls", "false, with certificates", "tls: true"))
        if self.password_file is not None and self.username is None:
            faults.append(Fault("username", "missing", "a name to go with password_file"))
        if faults:
            raise ContractError("the MQTT settings are not valid", faults=faults)

    @property
    def root(self) -> str:
        """The station's topic root, `enterprise/site/area/line/station` (ISA-95 order)."""
        return f"{self.enterprise}/{self.site}/{self.area}/{self.line}/{self.station}"


@dataclass(frozen=True)
class Topic:
    """One kind of message the station sends."""

    name: str
    path: str
    """Below the root, after `insp/v1/`."""
    schema: str
    qos: int = 1
    retain: bool = False
    expiry_s: int | None = None


TOPICS: Mapping[str, Topic] = {
    item.name: item
    for item in (
        # Events: through the outbox, one stream each, never retained.
        Topic("alarm", "evt/alarm", "alarm/1.0"),
        Topic("verdict", "evt/verdict", "verdict/1.0"),
        Topic("grid", "evt/grid", "grid/1.0"),
        # Status: the latest value only, retained, past the outbox.
        Topic("conn", "sts/conn", "conn/1.0", retain=True),
        Topic("birth", "sts/birth", "birth/1.0", retain=True),
        Topic("state", "sts/state", "state/1.0", retain=True),
        Topic("last", "sts/last", "last/1.0", qos=0, retain=True),
        Topic("health", "sts/health", "health/1.0", qos=0, retain=True, expiry_s=30),
    )
}

STREAMS: tuple[str, ...] = ("alarm", "verdict", "grid")
"""The streams of the outbox, most urgent first; order is kept inside a stream only."""

STATUSES: tuple[str, ...] = ("conn", "birth", "state", "last", "health")


def topic_of(config: MqttConfig, name: str) -> str:
    """The full topic of one message kind: `<root>/insp/v1/evt/verdict`."""
    return f"{config.root}/insp/v1/{TOPICS[name].path}"


def events_filter(config: MqttConfig) -> str:
    """The subscription that receives every event of the station."""
    return f"{config.root}/insp/v1/evt/#"


def statuses_filter(config: MqttConfig) -> str:
    """The subscription that receives the retained status of the station."""
    return f"{config.root}/insp/v1/sts/#"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
