"""What a study or an audit refuses, with the reason and what would do."""

from __future__ import annotations

from typing import ClassVar

from forge_station.contract.error import StationError


class AssuranceError(StationError):
    """Data that no study, no claim or no chart may rest on."""

    code: ClassVar[str] = "ASSURANCE_REFUSED"
