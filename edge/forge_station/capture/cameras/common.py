"""What simple camera drivers share: their options, and which frames are due.

A driver of a vendor's library has both from its device and needs neither class.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from forge_station.capture.camera import CameraSettings, TriggerMode
from forge_station.errors import CameraLostError, CameraSettingsError, CameraTimeoutError

Option = str | int | float | bool


def options_of(settings: CameraSettings, defaults: Mapping[str, Option]) -> dict[str, Any]:
    """All options of a driver, of the types of their defaults.

    Raises CameraSettingsError for one that the driver does not have, or of another type.
    """
    found: dict[str, Any] = dict(defaults)
    for name, value in settings.options.items():
        if name not in defaults:
            raise CameraSettingsError(
                "unknown option of the camera driver",
                which=f"{settings.driver}: {name}",
                expected=", ".join(sorted(defaults)),
            )
        kind = type(defaults[name])
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise CameraSettingsError(
                "option of the camera driver has another type",
                which=f"{settings.driver}: {name}",
                expected=f"{kind.__name__}, like {defaults[name]!r}",
                got=repr(value),
            )
        if type(value) in (int, float) and float(value) < 0:
            raise CameraSettingsError(
                "option of the camera driver is negative",
                which=f"{settings.driver}: {name}",
                expected="0 or more",
                got=value,
            )
        found[name] = value
    return found


def refuse(settings: CameraSettings, *names: str) -> None:
    """Raise CameraSettingsError where one of the settings is given: the driver cannot do it."""
    given = [name for name in names if getattr(settings, name) is not None]
    if given:
        raise CameraSettingsError(
            "the driver cannot set this",
            which=f"{settings.driver}: {', '.join(given)}",
            action="leave it out; such a camera has it fixed, or its driver has an option for it",
        )


class Arming:
    """The trigger mode, software triggers not yet answered, and how many frames are left."""

    def __init__(self, name: str, triggers: tuple[TriggerMode, ...]) -> None:
        self.name, self.triggers = name, triggers
        self.mode: TriggerMode | None = None
        self.left: int | None = None
        self.pending = 0
        self._closed = False

    def arm(self, trigger: TriggerMode, count: int | None) -> None:
        self.refuse_closed()
        if trigger not in self.triggers:
            raise CameraSettingsError(
                "the camera has no such trigger",
                which=self.name,
                expected=", ".join(self.triggers),
                got=trigger,
            )
        if count is not None and count < 1:
            raise CameraSettingsError(
                "number of frames of a burst", which=self.name, expected="1 or more", got=count
            )
        self.mode, self.left, self.pending = trigger, count, 0

    def trigger(self) -> None:
        self.refuse_closed()
        if self.mode != "software":
            raise CameraSettingsError(
                "software trigger of a camera that is not armed for it",
                which=self.name,
                expected="software",
                got=self.mode or "not armed",
            )
        self.pending += 1

    def refuse_unarmed(self) -> None:
        """A grab of a camera that is not armed is a mistake of the caller, not a slow frame."""
        self.refuse_closed()
        if self.mode is None:
            raise CameraSettingsError(
                "frame asked of a camera that is not armed", which=self.name, action="arm it first"
            )

    @property
    def due(self) -> bool:
        """A frame may come without a pulse on the line: free, or asked for by software."""
        return self.left != 0 and (self.mode == "free" or self.pending > 0)

    def taken(self) -> None:
        """One frame was handed out."""
        self.pending = max(0, self.pending - 1)
        self.left = None if self.left is None else self.left - 1

    def disarm(self) -> None:
        self.mode, self.left, self.pending = None, None, 0

    def close(self) -> None:
        self.disarm()
        self._closed = True

    def refuse_closed(self) -> None:
        if self._closed:
            raise CameraLostError("the camera is closed", which=self.name, action="open it anew")

    def late(self, timeout_s: float) -> CameraTimeoutError:
        """The error for a frame that did not come in time."""
        why = f"{self.mode or 'not armed'}"
        if self.left == 0:
            why += ", all frames of the burst were taken"
        elif self.mode == "software" and not self.pending:
            why += ", no trigger was given"
        return CameraTimeoutError(
            "no frame", which=self.name, expected=f"one within {timeout_s:g} s", got=why
        )


def wait_until(moment: float, deadline: float) -> bool:
    """Sleep until `moment` (of time.monotonic) or `deadline`; False where `deadline` is first."""
    time.sleep(max(0.0, min(moment, deadline) - time.monotonic()))
    return moment <= deadline
