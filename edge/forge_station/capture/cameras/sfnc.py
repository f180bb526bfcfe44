"""Features of a camera by their names in the GenICam SFNC standard, for every GenICam driver.

Knows no SDK: a driver hands in its node map as `Nodes`. Every feature is optional; what a device
does not have is left alone, unless the settings ask for it. Older names (SFNC 1, GigE Vision 1) are
tried after the present ones.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from forge_station.capture.base import Clock
from forge_station.capture.camera import CameraSettings, TriggerMode
from forge_station.errors import CameraSettingsError

Value = str | int | float | bool

EXPOSURE = ("ExposureTime", "ExposureTimeAbs")
GAIN = ("Gain", "GainAbs")
FRAME_RATE = ("AcquisitionFrameRate", "AcquisitionFrameRateAbs")
TEMPERATURE = ("DeviceTemperature", "TemperatureAbs")
PACKET_SIZE = ("GevSCPSPacketSize", "DeviceStreamChannelPacketSize")
PTP_LATCH = ("PtpDataSetLatch", "GevIEEE1588DataSetLatch")
PTP_STATUS = ("PtpStatus", "GevIEEE1588Status")
PTP_OFFSET = ("PtpOffsetFromMaster", "GevIEEE1588OffsetFromMaster")
CHUNKS = {
    "frame_id": ("ChunkFrameID", "ChunkFramecounter"),
    "timestamp": ("ChunkTimestamp",),
    "exposure_us": ("ChunkExposureTime",),
    "gain": ("ChunkGain",),
}
"""What a frame tells of itself -> chunk features, newest name first."""

_FRAME_TRIGGERS = ("FrameStart", "FrameBurstStart", "AcquisitionStart")
_READY_POLL_S = 0.002


class NodeError(Exception):
    """The device does not have the node now, or refuses what is asked; the text says why."""


def genapi_text(error: BaseException) -> str:
    """What GenApi says, without the place in its own source where it says so."""
    text = re.sub(r" : \w+Exception thrown .*", "", str(error), flags=re.DOTALL).strip()
    return text.splitlines()[0].rstrip(". ") if text else repr(error)


class Nodes(Protocol):
    """A node map. Every call but `available` raises NodeError; each is one or two round trips."""

    def available(self, name: str) -> bool:
        """The device has it and it can be used now."""
        ...

    def get(self, name: str) -> Value: ...

    def set(self, name: str, value: Value) -> None: ...

    def execute(self, name: str) -> None: ...

    def entries(self, name: str) -> tuple[str, ...]:
        """Values that an enumeration can take now."""
        ...


@dataclass(frozen=True)
class Sfnc:
    """The features of one open device. `source` names it in errors."""

    nodes: Nodes
    source: str

    def first(self, names: Sequence[str]) -> str | None:
        """The first of the names that the device has."""
        return next((name for name in names if self.nodes.available(name)), None)

    def number(self, names: Sequence[str]) -> float | None:
        """A feature's value; None where it cannot be read."""
        try:
            name = self.first(names)
            return None if name is None else float(self.nodes.get(name))
        except (NodeError, ValueError):
            return None

    def text(self, name: str) -> str:
        """A feature's value as text; empty where it cannot be read."""
        try:
            return str(self.nodes.get(name)) if self.nodes.available(name) else ""
        except NodeError:
            return ""

    def write(self, name: str, value: Value) -> None:
        """Set a feature. Raises CameraSettingsError with what the device says and would take."""
        try:
            if not self.nodes.available(name):
                raise NodeError("the device does not have this feature, or not in its present mode")
            self.nodes.set(name, value)
        except NodeError as error:
            raise CameraSettingsError(
                f"the camera refuses {name} = {value}",
                which=self.source,
                expected=self._allowed(name),
                got=error,
                action="look the feature up in the camera's manual; names are those of the SFNC",
            ) from error

    def _allowed(self, name: str) -> str | None:
        try:
            return f"one of {', '.join(self.nodes.entries(name))}"
        except NodeError:
            return None

    def require(self, name: str, value: Value) -> None:
        """Set a feature that may be fixed: `write`, unless it has the value already."""
        if self.text(name) != str(value):
            self.write(name, value)

    def entries(self, name: str) -> tuple[str, ...]:
        """Values that an enumeration can take now; none where the device does not have it."""
        try:
            return self.nodes.entries(name)
        except NodeError:
            return ()

    def offer(self, name: str, value: Value) -> bool:
        """Set a feature where the device has it and takes the value; say whether it did."""
        try:
            if not self.nodes.available(name):
                return False
            self.nodes.set(name, value)
        except NodeError:
            return False
        return True

    def apply(self, settings: CameraSettings) -> None:
        """Set what the settings ask for, in the order in which features depend on each other.

        Options first, in their order (selectors before what they select), then pixel format,
        exposure, gain, frame rate. Raises CameraSettingsError for the first that is refused.
        """
        self.offer("AcquisitionMode", "Continuous")
        for name, value in features(settings).items():
            self.write(name, value)
        if settings.pixel_format is not None:
            self.write("PixelFormat", settings.pixel_format)
        if settings.exposure_us is not None:
            self.set_exposure(settings.exposure_us)
        if settings.gain is not None:
            self.offer("GainAuto", "Off")
            self.write(self.first(GAIN) or GAIN[0], settings.gain)
        if settings.fps is not None:
            self.offer("AcquisitionFrameRateEnable", True)
            self.write(self.first(FRAME_RATE) or FRAME_RATE[0], settings.fps)

    def set_exposure(self, exposure_us: float) -> None:
        """A fixed exposure time. Raises CameraSettingsError."""
        self.offer("ExposureAuto", "Off")
        self.offer("ExposureMode", "Timed")
        self.write(self.first(EXPOSURE) or EXPOSURE[0], exposure_us)

    def triggers(self, line: str) -> tuple[TriggerMode, ...]:
        """What the device can be triggered by; hardware where it has this `line`."""
        try:
            if not self.nodes.available("TriggerMode"):
                return ("free",)
            with self._frame_trigger():
                sources = self.nodes.entries("TriggerSource")
        except NodeError:
            return ("free",)
        found: list[TriggerMode] = ["free"]
        if "Software" in sources:
            found.append("software")
        if line in sources:
            found.append("hardware")
        return tuple(found)

    def set_trigger(self, mode: TriggerMode, line: str) -> None:
        """One frame for each trigger, or free running. Raises CameraSettingsError."""
        if not self.nodes.available("TriggerMode"):
            if mode == "free":
                return
            raise CameraSettingsError(
                "the camera has no trigger", which=self.source, expected="free", got=mode
            )
        # Whatever else the device could wait for is off: a forgotten trigger of a burst stops all.
        for selector in self.entries("TriggerSelector"):
            self.offer("TriggerSelector", selector)
            self.offer("TriggerMode", "Off")
        if mode == "free":
            return
        with self._frame_trigger():
            self.write("TriggerSource", "Software" if mode == "software" else line)
            self.write("TriggerMode", "On")

    def fire(self) -> None:
        """Software trigger. Raises NodeError."""
        with self._frame_trigger():
            self.nodes.execute("TriggerSoftware")

    @contextmanager
    def _frame_trigger(self) -> Iterator[None]:
        """Select the trigger of a single frame; where there is no selector there is one trigger."""
        selectors = self.entries("TriggerSelector")
        wanted = next((name for name in _FRAME_TRIGGERS if name in selectors), None)
        if wanted is not None:
            self.nodes.set("TriggerSelector", wanted)
        yield

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until a trigger will be obeyed; one that comes earlier is lost without a word.

        True at once for a device that cannot tell.
        """
        if not self.offer("AcquisitionStatusSelector", "FrameTriggerWait"):
            return True
        deadline = time.monotonic() + timeout_s
        while True:
            if self.nodes.get("AcquisitionStatus"):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_READY_POLL_S)

    def enable_chunks(self) -> tuple[str, ...]:
        """Let every frame carry its number, time, exposure and gain; those that the device can."""
        if not self.offer("ChunkModeActive", True):
            return ()
        enabled = []
        for key, names in CHUNKS.items():
            for name in names:
                selected = self.offer("ChunkSelector", name.removeprefix("Chunk"))
                if selected and self.offer("ChunkEnable", True):
                    enabled.append(key)
                    break
        if not enabled:
            self.offer("ChunkModeActive", False)
        return tuple(enabled)

    def clock(self) -> Clock:
        """ptp while the device follows a master clock, else its own clock since power-up."""
        return "ptp" if self.ptp_status() == "Slave" else "device"

    def ptp_status(self) -> str:
        """Empty where the device has no PTP or it is off."""
        self._latch_ptp()
        name = self.first(PTP_STATUS)
        return "" if name is None else self.text(name)

    def ptp_offset_ns(self) -> int | None:
        """Offset from the master clock; positive when the device is ahead."""
        self._latch_ptp()
        found = self.number(PTP_OFFSET)
        return None if found is None else int(found)

    def _latch_ptp(self) -> None:
        name = self.first(PTP_LATCH)
        if name is not None:
            try:
                self.nodes.execute(name)
            except NodeError:
                return


def features(settings: CameraSettings) -> dict[str, Value]:
    """The options that are SFNC features: names that begin with a capital."""
    return {name: value for name, value in settings.options.items() if name[:1].isupper()}


class FrameCounter:
    """Frame ids of a device -> numbers that only grow.

    GigE Vision 1 counts in 16 bits from 1 to 65535 and then from 1 again: a burst over the turn
    would look like one with lost frames.
    """

    _TURN = 65535

    def __init__(self) -> None:
        self._added = 0
        self._last: int | None = None

    def number(self, frame_id: int) -> int:
        """The frame's number; an id far below the last one has turned."""
        last = self._last
        if last is not None and frame_id < last <= self._TURN and last - frame_id > self._TURN // 2:
            self._added += self._TURN
        self._last = frame_id
        return frame_id + self._added
