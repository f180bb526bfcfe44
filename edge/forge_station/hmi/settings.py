"""Section `hmi` of the station file: the operator's page. Plain settings, no web framework."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from forge_station.contract import record
from forge_station.contract.error import ContractError, Fault
from forge_station.contract.record import Limit
from forge_station.hmi.review.settings import ReviewSettings
from forge_station.mes.topics import is_loopback

Language = Literal["en", "de", "zh"]
MM_PER_INCH = 25.4
ClockTime = Annotated[
    str, Limit(pattern=r"([01][0-9]|2[0-3]):[0-5][0-9]", meaning="a time of day like 06:00")
]
LOWEST_MM = 160.0
"""Height of the smallest panel that the live screen fits on whole: 12.1 inches, 1280x800. On a
lower one it has no boxes below the verdict."""
SMALLEST_MM = (200.0, 122.0)
"""Width and height of the smallest panel for the verdict in letters that are read at 5 m, the alarm
and the buttons. On a smaller one there is no page that keeps what docs/OPERATOR.md says."""


@dataclass(frozen=True)
class Panel:
    """The screen that the page is laid out for. Sizes on it are millimetres."""

    diag_in: Annotated[float, Limit(5.0, 120.0)] = 21.5
    """Diagonal in inches."""
    px: tuple[Annotated[int, Limit(800, 8000)], Annotated[int, Limit(600, 8000)]] = (1920, 1080)
    """Width and height in pixels."""

    @property
    def px_per_mm(self) -> float:
        return math.hypot(*self.px) / (self.diag_in * MM_PER_INCH)

    @property
    def width_mm(self) -> float:
        return self.px[0] / self.px_per_mm

    @property
    def height_mm(self) -> float:
        return self.px[1] / self.px_per_mm


@dataclass(frozen=True)
class PageCommands:
    """How the page commands the station: with a key that is enrolled in `commands.keys`."""

    key: Path
    """Ed25519 private key (PEM), of this page alone."""
    username: str | None = None
    """Who the page is at the broker, where it is not the station."""
    password_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None


@dataclass(frozen=True)
class HmiConfig:
    """Section `hmi`."""

    host: str = "127.0.0.1"
    """Another address needs `tls_cert`, `tls_key` and users."""
    port: Annotated[int, Limit(1, 65535)] = 8090
    folder: Path | None = None
    """Users, audit and labels; None: the folder `hmi` beside the outbox."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    panel: Panel = Panel()
    language: Language = "en"
    """Until somebody chooses another one at the panel."""
    palette: Literal["muted", "classic"] = "muted"
    """classic: a saturated green, where a site expects it."""
    shifts: tuple[ClockTime, ...] = ("06:00", "14:00", "22:00")
    """When shifts begin, local time. Counters begin anew."""
    takt_s: Annotated[float, Limit(0.0, 86_400.0)] = 0.0
    """The line's takt, for comparison; 0: none is shown."""
    review: ReviewSettings = field(default_factory=ReviewSettings)
    """What people are asked to look at again (docs/REVIEW.md)."""
    commands: PageCommands | None = None
    """None: the page shows and commands nothing."""

    def __post_init__(self) -> None:
        record.check(self)
        faults = []
        if (self.tls_cert is None) != (self.tls_key is None):
            given = "tls_cert" if self.tls_cert else "tls_key"
            faults.append(Fault(given, "given alone", "tls_cert and tls_key together"))
        if not is_loopback(self.host) and self.tls_cert is None:
            allowed = "a loopback address, or tls_cert and tls_key"
            faults.append(Fault("host", self.host, allowed))
        if not self.shifts or list(self.shifts) != sorted(set(self.shifts)):
            faults.append(Fault("shifts", ", ".join(self.shifts), "one time or more, ascending"))
        if faults:
            raise ContractError("the settings of the page are not valid", faults=faults)
