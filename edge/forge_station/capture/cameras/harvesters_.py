"""Cameras of any vendor through its GenTL producer (a .cti file), by Harvesters. Extra: genicam.

Address: serial number or GenTL id of the device; empty where there is only one. Options: SFNC
features by name; `producer` (path of the .cti file; default: the only one on GENICAM_GENTL64_PATH),
`buffers` (default 8), `chunks` (default true). Proven against the virtual producer that comes with
the package genicam.

The list of devices is made once, before the device is opened: to make it again kills every open
device of the process. A device that was lost comes back in a new process only.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from forge_station.capture.camera import Camera, CameraSettings
from forge_station.capture.cameras import pixels, sfnc
from forge_station.capture.cameras.sfnc import NodeError, Sfnc, Value, genapi_text
from forge_station.capture.cameras.transport import (
    Buffer,
    Number,
    Part,
    TransportCamera,
    checked_options,
)
from forge_station.capture.drivers import closed_on_error
from forge_station.errors import CameraBusyError, CameraNotFoundError, CameraSettingsError

try:
    from genicam import genapi, gentl
    from harvesters.core import Callback, Harvester, ParameterKey, ParameterSet
except ModuleNotFoundError as missing:
    raise CameraNotFoundError(
        f"this camera driver needs {missing.name}",
        action="install the extra: pip install forge-station[genicam]",
    ) from missing

DEFAULTS: Mapping[str, Value] = {"producer": "", "buffers": 8, "chunks": True}
SEARCH_PATH = "GENICAM_GENTL64_PATH"

_FAILURES = (genapi.GenericException, gentl.GenericException)
_POLL_MS = 20  # Harvesters asks for a frame so often; its own 1 ms costs a tenth of a core
_GONE = gentl.DEVICE_ACCESS_STATUS_LIST.DEVICE_ACCESS_STATUS_NOACCESS
_BUSY = (
    gentl.DEVICE_ACCESS_STATUS_LIST.DEVICE_ACCESS_STATUS_BUSY,
    gentl.DEVICE_ACCESS_STATUS_LIST.DEVICE_ACCESS_STATUS_OPEN_READWRITE,
)
_HELD = (gentl.ResourceInUseException, gentl.AccessDeniedException, gentl.BusyException)


_log = logging.getLogger(__name__)
_log.setLevel(logging.CRITICAL)  # Harvesters would log every lost frame, with a traceback


def open_harvesters(settings: CameraSettings) -> Camera:
    """Open a device; how long that takes is up to the producer. Entry point `harvesters`."""
    options = checked_options(settings, DEFAULTS)
    source = f"{settings.driver} {settings.address or '(only camera)'}"
    producer = find_producer(options["producer"])
    transport = HarvestersTransport(producer, settings.address, source, options["buffers"])
    with closed_on_error(transport):
        return TransportCamera(transport, settings, source)


def find_producer(given: str, search_path: str | None = None) -> Path:
    """The .cti file given, or the only one on the search path. Raises CameraNotFoundError."""
    if given:
        path = Path(given)
        if path.is_file():
            return path
        raise CameraNotFoundError("no such GenTL producer", which=path, expected="a .cti file")
    text = os.environ.get(SEARCH_PATH, "") if search_path is None else search_path
    found = [
        file
        for folder in text.split(os.pathsep)
        if folder
        for file in sorted(Path(folder).glob("*.cti"))
    ]
    if len(found) == 1:
        return found[0]
    raise CameraNotFoundError(
        "which GenTL producer is meant is not clear" if found else "no GenTL producer",
        which=f"{SEARCH_PATH}={text}",
        expected="one .cti file",
        got=", ".join(map(str, found)) or "none",
        action="name it in the camera's options: producer: /path/to/vendor.cti",
    )


class GenApiNodes:
    """A node map of the package genicam as `sfnc.Nodes`."""

    def __init__(self, node_map: Any) -> None:
        self._map = node_map

    def _node(self, name: str) -> Any:
        try:
            return self._map.get_node(name)
        except _FAILURES:
            raise NodeError(f"the device has no feature {name}") from None

    def available(self, name: str) -> bool:
        try:
            return bool(genapi.is_available(self._node(name)))
        except (NodeError, *_FAILURES):
            return False

    def get(self, name: str) -> Value:
        node = self._node(name)
        try:
            found: Value = node.value
        except (AttributeError, *_FAILURES) as error:
            raise NodeError(genapi_text(error)) from error
        return found

    def set(self, name: str, value: Value) -> None:
        node = self._node(name)
        try:
            node.value = value
        except (AttributeError, TypeError, *_FAILURES) as error:
            raise NodeError(genapi_text(error)) from error

    def execute(self, name: str) -> None:
        node = self._node(name)
        try:
            node.execute()
        except (AttributeError, *_FAILURES) as error:
            raise NodeError(genapi_text(error)) from error

    def entries(self, name: str) -> tuple[str, ...]:
        node = self._node(name)
        try:
            return tuple(e.symbolic for e in node.entries if genapi.is_available(e))
        except (AttributeError, *_FAILURES) as error:
            raise NodeError(genapi_text(error)) from error


class _Incomplete(Callback):  # type: ignore[misc]
    """Counts buffers that Harvesters threw away because they were not whole."""

    def __init__(self) -> None:
        self.count = 0

    def emit(self, context: object = None) -> None:
        self.count += 1


class HarvestersTransport:
    """One open device of one producer."""

    def __init__(self, producer: Path, address: str, source: str, buffers: int) -> None:
        self._acquirer: Any = None
        self._lost = ""
        self._harvester = Harvester(logger=_log)
        with closed_on_error(self):
            self._open(producer, address, source)
        acquirer: Any = self._acquirer
        acquirer.num_buffers = max(acquirer.min_num_buffers, buffers)
        self._incomplete = _Incomplete()
        acquirer.add_callback(acquirer.Events.INCOMPLETE_BUFFER, self._incomplete)
        self.nodes = GenApiNodes(acquirer.remote_device.node_map)

    def _open(self, producer: Path, address: str, source: str) -> None:
        try:
            ctypes.CDLL(str(producer))  # Harvesters would go on without it
        except OSError as error:
            raise CameraNotFoundError(
                "the GenTL producer cannot be loaded", which=producer, got=error
            ) from error
        self._harvester.add_file(str(producer))
        self._harvester.update()
        listed = [info.property_dict for info in self._harvester.device_info_list]
        names = [f"{info['serial_number']} ({info['id_']})" for info in listed]
        matching = [
            k
            for k, info in enumerate(listed)
            if address in ("", info["serial_number"], info["id_"])
        ]
        if len(matching) != 1:
            raise CameraNotFoundError(
                "several cameras match" if matching else "no such camera",
                which=f"{source}, producer {producer.name}",
                expected="serial number (or id): " + ", ".join(names) if names else None,
                action="name one by its id; a camera may be seen over several networks"
                if matching
                else "check cable, power and network, and that no other process holds the producer",
            )
        if listed[matching[0]]["access_status"] in _BUSY:
            raise CameraBusyError("another program holds the camera", which=source)
        config = ParameterSet({ParameterKey.TIMEOUT_PERIOD_ON_UPDATE_EVENT_DATA_CALL: _POLL_MS})
        try:
            with _own_interrupt_handler():
                self._acquirer = self._harvester.create(matching[0], config=config)
        except _HELD as error:
            raise CameraBusyError(
                "another program holds the camera", which=source, got=genapi_text(error)
            ) from error
        except _FAILURES as error:
            raise CameraNotFoundError(
                "the camera cannot be opened", which=source, got=genapi_text(error)
            ) from error
        if len(self._acquirer.data_streams) != 1:
            raise CameraSettingsError(
                "the device has several data streams, this driver reads one",
                which=source,
                got=len(self._acquirer.data_streams),
            )

    def identity(self) -> tuple[str, str, str]:
        device = self._acquirer.device.module
        return device.vendor, device.model, device.serial_number

    def version(self) -> str:
        return metadata.version("harvesters")

    def start(self) -> None:
        try:
            self._acquirer.start()
        except (AttributeError, *_FAILURES) as error:
            self.stop()
            raise NodeError(genapi_text(error)) from error

    def pop(self, timeout_s: float) -> Buffer | None:
        seen = self._incomplete.count
        try:
            raw = self._acquirer.try_fetch(timeout=max(timeout_s, 1e-3), is_raw=True)
            if raw is None:
                return Buffer((), complete=False) if self._incomplete.count > seen else None
            try:
                return self._buffer(raw)
            finally:
                raw.parent.queue_buffer(raw)
        except gentl.GenericException as error:
            self._lost = genapi_text(error)
            return None

    def _buffer(self, raw: Any) -> Buffer:
        data = np.frombuffer(raw.raw_buffer, np.uint8)
        return Buffer(
            parts=tuple(self._parts(raw, data)),
            frame_id=_optional(raw, "frame_id"),
            device_ns=self._time(raw),
            chunks=self._chunks(raw),
        )

    def _parts(self, raw: Any, data: pixels.Bytes) -> Iterator[Part]:
        if raw.payload_type == gentl.PAYLOADTYPE_INFO_IDS.PAYLOAD_TYPE_MULTI_PART:
            for part in raw.parts:
                begin = part.data_offset
                yield Part(
                    data=data[begin : begin + part.data_size].copy(),
                    pixel_format=pixels.name_of(part.data_format),
                    width=part.width,
                    height=part.height,
                    padding=_optional(part, "x_padding") or 0,
                )
            return
        width = _optional(raw, "width") or self.nodes.get("Width")
        height = _optional(raw, "delivered_image_height") or _optional(raw, "height")
        height = int(height or self.nodes.get("Height"))
        code = _optional(raw, "pixel_format")
        name = pixels.name_of(code) if code else str(self.nodes.get("PixelFormat"))
        padding = _optional(raw, "padding_x") or 0
        begin = _optional(raw, "image_offset") or 0
        length = (pixels.row_bytes(name, int(width)) + padding) * height
        yield Part(data[begin : begin + length].copy(), name, int(width), height, padding)

    def _time(self, raw: Any) -> int | None:
        found = _optional(raw, "timestamp_ns")
        if found is None:
            ticks, hertz = (
                _optional(raw, "timestamp"),
                _optional(self._acquirer.device.module, "timestamp_frequency"),
            )
            found = ticks * 1_000_000_000 // hertz if ticks and hertz else None
        return found or None

    def _chunks(self, raw: Any) -> dict[str, Number]:
        if not _optional(raw, "num_chunks"):
            return {}
        features = Sfnc(self.nodes, "")
        found = {key: features.number(names) for key, names in sfnc.CHUNKS.items()}
        chunks: dict[str, Number] = {k: v for k, v in found.items() if v is not None}
        if "frame_id" in chunks:
            chunks["frame_id"] = int(chunks["frame_id"])
        return chunks

    def ready(self, timeout_s: float) -> bool:
        return Sfnc(self.nodes, "").wait_ready(timeout_s)

    def stop(self) -> None:
        with suppress(AttributeError, *_FAILURES):  # it fails halfway on a device that is gone
            self._acquirer.stop()

    def lost(self) -> str:
        if not self._lost:
            try:
                if self._acquirer.device.module.access_status == _GONE:
                    self._lost = "the producer has no access to it any more"
            except gentl.GenericException as error:
                self._lost = genapi_text(error)
        return self._lost

    def counters(self) -> Mapping[str, int]:
        if not self._acquirer.data_streams:
            return {}
        stream = self._acquirer.data_streams[0].module
        found = {name: _optional(stream, f"num_{name}") for name in ("delivered", "underrun")}
        return {name: value for name, value in found.items() if value is not None}

    def close(self) -> None:
        with suppress(AttributeError, *_FAILURES):
            if self._acquirer is not None:
                self._acquirer.destroy()
        with suppress(AttributeError, *_FAILURES):
            self._harvester.reset()


def _optional(thing: Any, name: str) -> Any:
    """An attribute of a GenTL module; None where the producer does not tell it."""
    try:
        return getattr(thing, name)
    except (AttributeError, gentl.GenericException):
        return None


@contextmanager
def _own_interrupt_handler() -> Iterator[None]:
    """Harvesters takes SIGINT over when it opens a device; give it back."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        with suppress(ValueError):  # not the main thread: it took nothing
            signal.signal(signal.SIGINT, before)
