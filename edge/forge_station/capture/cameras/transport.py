"""A camera over a transport: what Aravis, a GenTL producer and pylon have in common.

A driver writes a `Transport`, the thin layer over its SDK; `TransportCamera` is the Camera
(capture.camera) over it: settings, triggers, numbers and times of frames, counters. Knows no SDK.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import numpy as np

from forge_station.capture.base import Clock, Frame
from forge_station.capture.camera import CameraHealth, CameraInfo, CameraSettings, TriggerMode
from forge_station.capture.cameras import pixels, sfnc
from forge_station.capture.cameras.common import Arming, options_of
from forge_station.capture.cameras.sfnc import FrameCounter, NodeError, Sfnc, Value
from forge_station.errors import CameraLostError, CameraSettingsError, CameraTimeoutError

Number = int | float

# A transport is asked so often whether its device is still there, while a frame is awaited.
_SLICE_S = 0.25
_READY_S = 2.0


@dataclass(frozen=True)
class Part:
    """One component of a buffer, e.g. the range map of a 3D head.

    data uint8 [bytes], a copy; padding: bytes after each row. component: its id as the transport
    tells it, else None: then only the order of the parts says what they are.
    """

    data: pixels.Bytes
    pixel_format: str
    width: int
    height: int
    padding: int = 0
    component: int | None = None


@dataclass(frozen=True)
class Buffer:
    """What came for one frame. Several parts come from 3D heads; of a camera it is one.

    device_ns: the device's time stamp in ns; arrival_ns: wall clock of this host when the first
    packet came; both None where the transport does not know. chunks: by the keys of sfnc.CHUNKS.
    parts may be empty for an incomplete frame.
    """

    parts: tuple[Part, ...]
    complete: bool = True
    frame_id: int | None = None
    device_ns: int | None = None
    arrival_ns: int | None = None
    chunks: Mapping[str, Number] = field(default_factory=dict)


class Transport(Protocol):
    """One open device of an SDK, not streaming. Calls come from one thread."""

    @property
    def nodes(self) -> sfnc.Nodes: ...

    def identity(self) -> tuple[str, str, str]:
        """(vendor, model, serial number)."""
        ...

    def version(self) -> str:
        """Of the SDK."""
        ...

    def start(self) -> None:
        """Stream into empty buffers. Raises NodeError or CameraLostError."""
        ...

    def pop(self, timeout_s: float) -> Buffer | None:
        """The oldest buffer, copied and given back; None when none comes in time."""
        ...

    def ready(self, timeout_s: float) -> bool:
        """A software trigger will be obeyed now. Raises NodeError."""
        ...

    def stop(self) -> None:
        """Stop streaming, whatever state the device is in. May block for seconds. Never raises."""
        ...

    def lost(self) -> str:
        """Why the device is known to be gone; empty while it is not."""
        ...

    def counters(self) -> Mapping[str, int]:
        """Of the SDK since the stream began, e.g. resent packets. Never raises."""
        ...

    def close(self) -> None:
        """Release the device. May block for seconds. Never raises."""
        ...


class TransportCamera:
    """A Camera over any transport. Opening sets the device, so it raises CameraSettingsError."""

    def __init__(self, transport: Transport, settings: CameraSettings, source: str) -> None:
        self._transport, self._settings, self._source = transport, settings, source
        self._sfnc = Sfnc(transport.nodes, source)
        try:
            self._sfnc.apply(settings)
            self._prepare()
            if settings.options.get("chunks", True):
                self._sfnc.enable_chunks()
            self._clock: Clock = self._sfnc.clock()
            triggers = self._sfnc.triggers(settings.line)
        except NodeError as error:
            raise self._failed("setting the camera up", error) from error
        self._arming = Arming(source, triggers)
        self._counter = FrameCounter()
        self._last: int | None = None
        self._frames = self._incomplete = self._dropped = 0
        self._exposure: float | None = None
        self._gain: float | None = None
        self._format, self._size = "", (0, 0)
        self._closed = False
        self._refresh()

    def _prepare(self) -> None:
        """What a kind of device needs besides; once, after its settings were made."""

    def _refresh(self) -> None:
        """What may have changed with the settings, read once instead of for every frame."""
        self._exposure = self._sfnc.number(sfnc.EXPOSURE)
        self._gain = self._sfnc.number(sfnc.GAIN)
        self._format = self._sfnc.text("PixelFormat")
        width, height = (int(self._sfnc.number((name,)) or 0) for name in ("Width", "Height"))
        self._size = (width, height)
        self._clock = self._sfnc.clock()

    def describe(self) -> CameraInfo:
        self._arming.refuse_closed()
        vendor, model, serial = self._transport.identity()
        return CameraInfo(
            driver=self._settings.driver,
            driver_version=self._transport.version(),
            vendor=vendor,
            model=model,
            serial=serial,
            address=self._settings.address,
            width=self._size[0],
            height=self._size[1],
            triggers=self._arming.triggers,
            clock=self._clock,
        )

    def arm(
        self, trigger: TriggerMode, count: int | None = None, *, exposure_us: float | None = None
    ) -> None:
        self._arming.refuse_closed()
        self.disarm()
        self._arming.arm(trigger, count)
        try:
            if exposure_us is not None:
                self._sfnc.set_exposure(exposure_us)
            self._sfnc.set_trigger(trigger, self._settings.line)
            self._refresh()
            self._transport.start()
        except NodeError as error:
            self._arming.disarm()
            raise self._failed("arming", error) from error
        except CameraSettingsError:
            self._arming.disarm()
            self._raise_if_lost()
            raise
        self._counter, self._last = FrameCounter(), None

    def trigger(self) -> None:
        self._arming.trigger()
        try:
            if not self._transport.ready(_READY_S):
                self._raise_if_lost()
                raise CameraTimeoutError(
                    "the camera is not ready for a trigger",
                    which=self._source,
                    expected=f"within {_READY_S:g} s",
                    action="take the frames of earlier triggers; check exposure and frame rate",
                )
            self._sfnc.fire()
        except NodeError as error:
            raise self._failed("software trigger", error) from error

    def grab(self, timeout_s: float) -> Frame:
        self._arming.refuse_unarmed()
        buffer = None if self._arming.left == 0 else self._wait(timeout_s)
        if buffer is None:
            raise self._arming.late(timeout_s)
        self._arming.taken()
        frame = self._frame(buffer)
        if self._arming.left == 0:
            self._transport.stop()  # a free-running device would fill its buffers in vain
        return frame

    def _wait(self, timeout_s: float) -> Buffer | None:
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            buffer = self._transport.pop(min(_SLICE_S, max(0.0, left)))
            if buffer is not None:
                return buffer
            self._raise_if_lost()
            if left <= _SLICE_S:
                return None

    def _frame(self, buffer: Buffer) -> Frame:
        monotonic, utc = time.monotonic_ns(), time.time_ns()
        if buffer.arrival_ns is not None:
            monotonic -= max(0, utc - buffer.arrival_ns)
            utc = buffer.arrival_ns
        chunks = buffer.chunks
        sequence = self._sequence(cast("int | None", chunks.get("frame_id", buffer.frame_id)))
        self._frames += 1
        self._incomplete += not buffer.complete
        image, pixel_format = self._image(buffer)
        return Frame(
            image=image,
            sequence=sequence,
            complete=buffer.complete,
            t_monotonic_ns=monotonic,
            t_utc_ns=utc,
            t_device_ns=buffer.device_ns,
            clock=self._clock if buffer.device_ns is not None else "host",
            exposure_us=chunks.get("exposure_us", self._exposure),
            gain=chunks.get("gain", self._gain),
            pixel_format=pixel_format,
            source=self._source,
        )

    def _image(self, buffer: Buffer) -> tuple[pixels.Image, str]:
        """The image and the name of its format; black where nothing usable came."""
        if not buffer.parts:
            return np.zeros((self._size[1], self._size[0]), np.uint8), self._format
        part = buffer.parts[0]
        image = pixels.image(part.data, part.pixel_format, part.width, part.height, part.padding)
        return image, part.pixel_format

    def _sequence(self, frame_id: int | None) -> int:
        """The frame's number; where the device gives none, one more than the last."""
        if frame_id is None:
            found = 0 if self._last is None else self._last + 1
        else:
            found = self._counter.number(frame_id)
            if self._last is not None:
                self._dropped += max(0, found - self._last - 1)
        self._last = found
        return found

    def disarm(self) -> None:
        if self._arming.mode is not None:
            self._transport.stop()
        self._arming.disarm()

    def health(self) -> CameraHealth:
        self._arming.refuse_closed()
        self._raise_if_lost()
        details: dict[str, str | int | float] = dict(self._transport.counters())
        packet_size = self._sfnc.number(sfnc.PACKET_SIZE)
        if packet_size is not None:
            details["packet_size"] = int(packet_size)
        status = self._sfnc.ptp_status()
        if status:
            details["ptp_status"] = status
            offset = self._sfnc.ptp_offset_ns()
            if offset is not None:
                details["ptp_offset_ns"] = offset
        temperature = self._sfnc.number(sfnc.TEMPERATURE)
        self._raise_if_lost()  # which the reading may have shown
        return CameraHealth(
            self._frames, self._incomplete, self._dropped, temperature, details=details
        )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.disarm()
        self._arming.close()
        self._transport.close()

    def _raise_if_lost(self) -> None:
        why = self._transport.lost()
        if why:
            raise CameraLostError(
                "the camera is gone", which=self._source, got=why, action="open it anew"
            )

    def _failed(self, what: str, error: NodeError) -> CameraLostError | CameraSettingsError:
        """The error for a node that failed: mostly the device is gone, or does not obey."""
        why = self._transport.lost()
        if why:
            return CameraLostError(
                "the camera is gone", which=self._source, got=why, action="open it anew"
            )
        return CameraSettingsError(f"{what} failed", which=self._source, got=error)


def checked_options(settings: CameraSettings, defaults: Mapping[str, Value]) -> dict[str, Any]:
    """The driver's own options (small letters); SFNC features are checked by the device."""
    own = {name: value for name, value in settings.options.items() if not name[:1].isupper()}
    return options_of(replace(settings, options=own), defaults)
