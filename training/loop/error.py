"""What the loop refuses, with the reason and what would do."""

from __future__ import annotations

from typing import ClassVar

from forge_station.contract.error import StationError


class LineError(StationError):
    """A step of the loop that cannot be made, or whose files cannot be trusted."""

    code: ClassVar[str] = "LINE_REFUSED"
