"""What a certification refuses to do, with the reason and what would do."""

from __future__ import annotations

from typing import ClassVar

from forge_station.contract.error import StationError


class CalibrationError(StationError):
    """A claim that the data cannot carry, or data that no claim may rest on."""

    code: ClassVar[str] = "CALIBRATION_REFUSED"
