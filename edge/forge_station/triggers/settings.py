"""The `trigger` table of the station file: one dataclass a source. It knows not what they do."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from forge_station.contract import record
from forge_station.contract.error import ContractError, Fault
from forge_station.contract.record import Limit

Queue = Annotated[int, Limit(0, 100)]
Seconds = Annotated[float, Limit(0.01, 86400.0)]


@dataclass(frozen=True, kw_only=True)
class _Source:
    """What every source has."""

    source: str
    part_number: str = ""
    """For triggers that name none; empty: the line's product, if it has only one."""
    queue: Queue = 0
    """Parts that may wait while one is in work; 0: a trigger that comes then is refused."""


@dataclass(frozen=True)
class SoftwareSource(_Source):
    """`forge-station trigger` on this machine, over a Unix socket that only this user may open."""

    source: Literal["software"]
    socket: Path | None = None
    """None: `trigger.sock` beside the outbox."""


@dataclass(frozen=True)
class StdinSource(_Source):
    """A line of standard input a part: `SERIAL [PART_NUMBER]`. The station ends with the input."""

    source: Literal["stdin"]


@dataclass(frozen=True)
class TimerSource(_Source):
    """A part every so many seconds, for tests and for lines with a fixed beat."""

    source: Literal["timer"]
    period_s: Seconds


@dataclass(frozen=True)
class CameraSource(_Source):
    """A pulse on the camera's input line: its first frame is the trigger."""

    source: Literal["camera"]


@dataclass(frozen=True)
class MqttSource(_Source):
    """The signed command `capture` alone. (With every other source it works beside that one.)"""

    source: Literal["mqtt"]


@dataclass(frozen=True)
class PlcSource(_Source):
    """A PLC that polls this station over Modbus TCP (extra `plc`), see docs/TRIGGERS.md."""

    source: Literal["plc"]
    host: str = "127.0.0.1"
    """Address of this machine on which the server listens."""
    port: Annotated[int, Limit(1, 65535)] = 502
    clients: tuple[str, ...] = ()
    """Addresses that may connect; Modbus knows no password. Empty: only with a loopback host."""
    heartbeat_s: Annotated[float, Limit(0.1, 60.0)] = 2.0
    """The PLC's heartbeat must change within it, else the outputs go to the safe state."""

    def __post_init__(self) -> None:
        record.check(self)
        faults = []
        for number, client in enumerate(self.clients):
            if not _is_address(client):
                faults.append(Fault(f"clients[{number}]", repr(client), "an IP address"))
        if not _is_address(self.host):
            faults.append(Fault("host", repr(self.host), "an IP address of this machine"))
        elif not self.clients and not ipaddress.ip_address(self.host).is_loopback:
            allowed = "the addresses that may connect, for Modbus knows no password"
            faults.append(Fault("clients", f"none, with host {self.host}", allowed))
        if faults:
            raise ContractError("the settings of the PLC are not valid", faults=faults)


TriggerSettings = SoftwareSource | StdinSource | TimerSource | CameraSource | MqttSource | PlcSource


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
