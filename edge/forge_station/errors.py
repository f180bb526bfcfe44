"""Every error of the station, one small tree. It does not know who raises or who catches them.

A message says what, which, expected, got and what to do (see `StationError`). `code` is the
reason code that a verdict carries when it ends because of the error.
"""

from __future__ import annotations

from typing import ClassVar

from forge_station.contract.error import ContractError, Fault, StationError


class ConfigError(ContractError):
    """A station or line file is wrong; `faults` lists all problems with path, value, allowed."""

    code: ClassVar[str] = "CONFIG_WRONG"


class InputError(StationError):
    """A file given from outside (cloud, mesh, picture, case) cannot be read or is malformed."""

    code: ClassVar[str] = "INPUT_WRONG"


class CaptureError(StationError):
    """No usable pattern stack: the scanner failed, or a pattern is missing or of a wrong size."""

    code: ClassVar[str] = "CAPTURE_FAILED"


class CalibrationError(CaptureError):
    """The camera calibration is malformed, or is not the one that the patterns belong to."""

    code: ClassVar[str] = "CALIBRATION_MISMATCH"


class ScanError(StationError):
    """A scan that cannot be inspected: no points, no plane, nothing but NaN."""

    code: ClassVar[str] = "NO_DATA"


class BundleError(StationError):
    """A model bundle is incomplete, altered, or made under another contract."""

    code: ClassVar[str] = "BUNDLE_REFUSED"


class ModelError(StationError):
    """The model cannot run, or its answer breaks the grammar it was asked to keep."""

    code: ClassVar[str] = "MODEL_FAILED"


class LinkError(StationError):
    """The broker refuses the station or cannot be used. The outbox keeps what was decided."""

    code: ClassVar[str] = "LINK_FAILED"


class OutboxError(StationError):
    """A result could not be made durable. The station must stop: it would lose verdicts."""

    code: ClassVar[str] = "OUTBOX_FAILED"


__all__ = [
    "BundleError",
    "CalibrationError",
    "CaptureError",
    "ConfigError",
    "ContractError",
    "Fault",
    "InputError",
    "LinkError",
    "ModelError",
    "OutboxError",
    "ScanError",
    "StationError",
]
