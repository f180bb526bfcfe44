"""Sections of the station file for what mirrors and watches the station.

Plain settings, without the packages (extras) that their owners need: `sparkplug`, `opcua`,
`endpoint`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from forge_station.contract import record
from forge_station.contract.error import ContractError, Fault
from forge_station.contract.record import Limit
from forge_station.mes.topics import Level, is_loopback

Port = Annotated[int, Limit(1, 65535)]
NAMESPACE = "spBv1.0"
"""First level of every Sparkplug topic."""


@dataclass(frozen=True)
class SparkplugConfig:
    """Section `sparkplug`: the mirror for Sparkplug B hosts. The broker is that of `mqtt`."""

    group: Level
    node: Level | None = None
    """Edge node id; None: the station's id."""
    primary_host: Level | None = None
    """Sparkplug host id. Given: births and data wait until this host says that it is online."""
    keep: Annotated[int, Limit(1, 100_000)] = 1000
    """Most verdicts held while nobody can hear them."""
    datatypes: bool = False
    """Repeat data types in NDATA, for hosts that do not look them up in the birth."""

    def __post_init__(self) -> None:
        record.check(self)


@dataclass(frozen=True)
class OpcUaConfig:
    """Section `opcua`: a server with the Machine Vision interface of OPC 40100-1."""

    host: str = "127.0.0.1"
    port: Port = 4840
    certificate: Path | None = None
    """Of the server (DER or PEM), with `key`. Without them only clients here may connect."""
    key: Path | None = None
    trusted: Path | None = None
    """Folder with the certificates of the clients that may connect."""

    def __post_init__(self) -> None:
        record.check(self)
        faults = []
        if (self.certificate is None) != (self.key is None):
            given = "certificate" if self.certificate else "key"
            faults.append(Fault(given, "given alone", "certificate and key together"))
        if not is_loopback(self.host) and (self.certificate is None or self.trusted is None):
            allowed = "certificate, key and trusted, or a loopback host"
            faults.append(Fault("host", self.host, allowed))
        if faults:
            raise ContractError("the OPC UA settings are not valid", faults=faults)


@dataclass(frozen=True)
class MonitorConfig:
    """Section `monitor`: metrics and probes over HTTP. Off without `port`."""

    port: Port | None = None
    host: str = "127.0.0.1"
    insecure: bool = False
    """Written out by whoever lets other machines read it: there is no access control."""

    def __post_init__(self) -> None:
        record.check(self)
        if not self.insecure and not is_loopback(self.host):
            allowed = "a loopback address, or insecure: true to let every machine read it"
            raise ContractError(
                "the monitor settings are not valid", faults=[Fault("host", self.host, allowed)]
            )
