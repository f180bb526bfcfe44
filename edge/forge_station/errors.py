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


class CameraNotFoundError(CaptureError):
    """No device of that address, or its driver or vendor library is not installed."""

    code: ClassVar[str] = "CAMERA_NOT_FOUND"


class CameraBusyError(CaptureError):
    """The device is there, but another process holds it."""

    code: ClassVar[str] = "CAMERA_BUSY"


class CameraTimeoutError(CaptureError):
    """No frame in the time given. The device may be fine: a trigger may not have come."""

    code: ClassVar[str] = "CAMERA_TIMEOUT"


class FrameIncompleteError(CaptureError):
    """A frame arrived with packets missing; the next one may be whole."""

    code: ClassVar[str] = "FRAME_INCOMPLETE"


class CameraLostError(CaptureError):
    """The device or its process is gone. The handle is dead: only opening it anew helps."""

    code: ClassVar[str] = "CAMERA_LOST"


class CameraSettingsError(CaptureError):
    """The device refuses a setting, or does not have the feature."""

    code: ClassVar[str] = "CAMERA_SETTINGS"


class ProjectorNotFoundError(CaptureError):
    """No projector of that address, or its driver or library is not installed."""

    code: ClassVar[str] = "PROJECTOR_NOT_FOUND"


class ProjectorLostError(CaptureError):
    """The projector is gone or closed, or did not answer in time."""

    code: ClassVar[str] = "PROJECTOR_LOST"


class ProjectorSettingsError(CaptureError):
    """The projector cannot show that: another size, another number of images, a wrong setting."""

    code: ClassVar[str] = "PROJECTOR_SETTINGS"


class TriggerError(StationError):
    """A source of triggers cannot be opened: a port is taken, an extra or a setting is missing."""

    code: ClassVar[str] = "TRIGGER_FAILED"


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
    """The broker refuses the station or cannot be used, or a port that others read the station at
    cannot be had. The outbox keeps what was decided."""

    code: ClassVar[str] = "LINK_FAILED"


class OutboxError(StationError):
    """A result could not be made durable. The station must stop: it would lose verdicts."""

    code: ClassVar[str] = "OUTBOX_FAILED"


__all__ = [
    "BundleError",
    "CalibrationError",
    "CameraBusyError",
    "CameraLostError",
    "CameraNotFoundError",
    "CameraSettingsError",
    "CameraTimeoutError",
    "CaptureError",
    "ConfigError",
    "ContractError",
    "Fault",
    "FrameIncompleteError",
    "InputError",
    "LinkError",
    "ModelError",
    "OutboxError",
    "ProjectorLostError",
    "ProjectorNotFoundError",
    "ProjectorSettingsError",
    "ScanError",
    "StationError",
    "TriggerError",
]
