"""GigE Vision and USB3 Vision cameras through Aravis.

Address: the IP address of a GigE Vision camera; vendor, model or serial number as Aravis lists them
(arv-viewer) for USB3 Vision. Options: SFNC features by name; `buffers` (default 16), `chunks`
(default true), `packet_socket` (default false; true needs the right CAP_NET_RAW: receives straight
from the network card, for cameras near the limit of the link, and arming takes 0.1 s longer).
Proven against Aravis' own fake GigE Vision camera.

A GigE Vision camera is refused by its id: on a station with several networks Aravis may reach it
over another one, and then no frame ever comes, without any error.
"""

from __future__ import annotations

import ctypes
import ipaddress
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from forge_station.capture.camera import Camera, CameraSettings
from forge_station.capture.cameras import pixels, sfnc
from forge_station.capture.cameras.aravis_library import (
    STATUS,
    SUCCESS,
    AravisError,
    ControlLost,
    Library,
    library,
)
from forge_station.capture.cameras.sfnc import NodeError, Sfnc, Value
from forge_station.capture.cameras.transport import (
    Buffer,
    Number,
    Part,
    TransportCamera,
    checked_options,
)
from forge_station.capture.drivers import closed_on_error
from forge_station.errors import CameraBusyError, CameraNotFoundError, CameraSettingsError

DEFAULTS: Mapping[str, Value] = {"buffers": 16, "chunks": True, "packet_socket": False}
_NO_PACKET_SOCKET = 1  # ArvGvStreamOption
_SOCKET_BUFFER = 32_000_000  # bytes at most; the kernel gives no more than net.core.rmem_max
_ENABLE = 1  # ArvRangeCheckPolicy and ArvAccessCheckPolicy


def open_aravis(settings: CameraSettings) -> Camera:
    """Open a device; it blocks for 3 to 6 s where there is none. Entry point `aravis`."""
    options = checked_options(settings, DEFAULTS)
    source = f"{settings.driver} {settings.address or '(first camera)'}"
    transport = AravisTransport(settings.address, source, options)
    with closed_on_error(transport):
        return TransportCamera(transport, settings, source)


class AravisNodes:
    """The features of a device as `sfnc.Nodes`; `silent` is called when it does not answer."""

    def __init__(self, aravis: Library, device: int, silent: Callable[[], None]) -> None:
        self._aravis, self._device, self._silent = aravis, device, silent

    @contextmanager
    def _node_errors(self) -> Iterator[None]:
        try:
            yield
        except AravisError as error:
            if error.silent:
                self._silent()
            raise NodeError(str(error)) from error

    def available(self, name: str) -> bool:
        try:
            with self._node_errors():
                return bool(
                    self._aravis.arv_device_is_feature_available(self._device, name.encode())
                )
        except NodeError:
            return False

    def _node(self, name: str) -> int:
        node: int | None = self._aravis.arv_device_get_feature(self._device, name.encode())
        if not node:
            raise NodeError(f"the device has no feature {name}")
        return node

    def get(self, name: str) -> Value:
        """Aravis tells every kind of value as text; this guesses back."""
        with self._node_errors():
            found = self._aravis.arv_gc_feature_node_get_value_as_string(self._node(name))
        text = (found or b"").decode()
        if text in ("true", "false"):
            return text == "true"
        for kind in (int, float):
            with suppress(ValueError):
                return kind(text)
        return text

    def set(self, name: str, value: Value) -> None:
        text = str(value).lower() if isinstance(value, bool) else str(value)
        with self._node_errors():
            self._aravis.arv_gc_feature_node_set_value_from_string(self._node(name), text.encode())

    def execute(self, name: str) -> None:
        with self._node_errors():
            self._aravis.arv_device_execute_command(self._device, name.encode())

    def entries(self, name: str) -> tuple[str, ...]:
        with self._node_errors():
            return self._aravis.strings(self._device, name)


class AravisTransport:
    """One open camera. A stream is made anew for each burst: nothing of an old one is left."""

    def __init__(self, address: str, source: str, options: Mapping[str, Any]) -> None:
        self._aravis = aravis = library()
        self._buffers = max(1, options["buffers"])
        try:
            camera = aravis.arv_camera_new(address.encode() or None)
        except AravisError as error:
            raise CameraNotFoundError(
                "no camera answers",
                which=source,
                got=error,
                action="check address, cable, power and that its network is this host's too",
            ) from error
        self._camera: int | None = camera
        self._device = aravis.arv_camera_get_device(camera)
        self._stream: int | None = None
        self._parser: int | None = None
        self._lost = ""
        self._status: dict[str, int] = {}
        self._callback = ControlLost(self._control_lost)
        self._handler = aravis.g_signal_connect_data(
            self._device, b"control-lost", self._callback, None, None, 0
        )
        with closed_on_error(self):
            self._refuse(address, source)
        if not options["packet_socket"] and aravis.arv_camera_is_gv_device(camera):
            aravis.arv_camera_gv_set_stream_options(camera, _NO_PACKET_SOCKET)
        aravis.arv_device_set_range_check_policy(self._device, _ENABLE)
        aravis.arv_device_set_access_check_policy(self._device, _ENABLE)
        self.nodes = AravisNodes(aravis, self._device, self._no_answer)

    def _control_lost(self, *_: Any) -> None:  # from Aravis' heartbeat thread
        self._lost = "control lost: it does not answer its heartbeat"

    def _no_answer(self) -> None:
        self._lost = self._lost or "it does not answer"

    def _refuse(self, address: str, source: str) -> None:
        if not self._aravis.arv_camera_is_gv_device(self._camera):
            return
        if not self._aravis.arv_gv_device_is_controller(self._device):
            raise CameraBusyError(
                "another program controls the camera",
                which=source,
                action="stop it; after a crash wait for the camera's heartbeat timeout (3 s)",
            )
        try:
            ipaddress.ip_address(address)
        except ValueError:
            raise CameraSettingsError(
                "a GigE Vision camera must be opened by its IP address",
                which=source,
                expected=self._aravis.address(self._device),
                action="an id may be reached over a network on which no frame arrives",
            ) from None

    def identity(self) -> tuple[str, str, str]:
        features = Sfnc(self.nodes, "")
        serial = features.text("DeviceSerialNumber") or features.text("DeviceID")
        return features.text("DeviceVendorName"), features.text("DeviceModelName"), serial

    def version(self) -> str:
        return self._aravis.version

    def start(self) -> None:
        aravis = self._aravis
        self._status = {}
        try:
            size = aravis.arv_camera_get_payload(self._camera)
            self._stream = aravis.arv_camera_create_stream(self._camera, None, None)
            if not self._stream:
                raise NodeError("Aravis made no stream")
            if aravis.arv_camera_is_gv_device(self._camera):
                wanted = min(size * self._buffers, _SOCKET_BUFFER)
                aravis.set_int(self._stream, b"socket-buffer-size", wanted)
            for _ in range(self._buffers):
                aravis.arv_stream_push_buffer(self._stream, aravis.arv_buffer_new_allocate(size))
            self._parser = aravis.arv_camera_create_chunk_parser(self._camera)
            aravis.arv_camera_start_acquisition(self._camera)
        except (AravisError, NodeError) as error:
            self._drop_stream()
            raise NodeError(str(error)) from error

    def pop(self, timeout_s: float) -> Buffer | None:
        if self._stream is None:
            return None
        aravis = self._aravis
        found = aravis.arv_stream_timeout_pop_buffer(self._stream, int(timeout_s * 1e6))
        if not found:
            return None
        try:
            status = aravis.arv_buffer_get_status(found)
            complete = status == SUCCESS
            if not complete:
                name = STATUS.get(status, str(status))
                self._status[name] = self._status.get(name, 0) + 1
            return Buffer(
                parts=(self._part(found),) if complete else (),
                complete=complete,
                frame_id=aravis.arv_buffer_get_frame_id(found),
                device_ns=aravis.arv_buffer_get_timestamp(found) or None,
                arrival_ns=aravis.arv_buffer_get_system_timestamp(found) or None,
                chunks=self._chunks(found) if complete else {},
            )
        finally:
            aravis.arv_stream_push_buffer(self._stream, found)

    def _part(self, found: int) -> Part:
        aravis = self._aravis
        size = ctypes.c_size_t()
        data = aravis.arv_buffer_get_image_data(found, ctypes.byref(size))
        right, bottom = ctypes.c_int32(), ctypes.c_int32()
        aravis.arv_buffer_get_image_padding(found, ctypes.byref(right), ctypes.byref(bottom))
        return Part(
            data=np.frombuffer(ctypes.string_at(data, size.value), np.uint8),
            pixel_format=pixels.name_of(aravis.arv_buffer_get_image_pixel_format(found)),
            width=aravis.arv_buffer_get_image_width(found),
            height=aravis.arv_buffer_get_image_height(found),
            padding=right.value,
        )

    def _chunks(self, found: int) -> dict[str, Number]:
        aravis = self._aravis
        if not self._parser or not aravis.arv_buffer_has_chunks(found):
            return {}
        chunks: dict[str, Number] = {}
        for key, names in sfnc.CHUNKS.items():
            kind = "float" if key in ("exposure_us", "gain") else "integer"
            read = getattr(aravis, f"arv_chunk_parser_get_{kind}_value")
            for name in names:
                with suppress(AravisError):
                    chunks[key] = read(self._parser, found, name.encode())
                    break
        return chunks

    def ready(self, timeout_s: float) -> bool:
        return Sfnc(self.nodes, "").wait_ready(timeout_s)

    def stop(self) -> None:
        if self._stream is None:
            return
        if not self._lost:  # it would only block for its timeouts
            with suppress(AravisError):
                self._aravis.arv_camera_stop_acquisition(self._camera)
        self._drop_stream()

    def _drop_stream(self) -> None:
        for thing in (self._parser, self._stream):
            if thing:
                self._aravis.g_object_unref(thing)
        self._parser = self._stream = None

    def lost(self) -> str:
        return self._lost

    def counters(self) -> Mapping[str, int]:
        found = {f"incomplete: {name}": count for name, count in self._status.items()}
        if self._stream is not None:
            for name in (b"n_underruns", b"n_resent_packets", b"n_missing_packets"):
                known = {
                    self._aravis.arv_stream_get_info_name(self._stream, k)
                    for k in range(self._aravis.arv_stream_get_n_infos(self._stream))
                }
                if name in known:
                    found[name.decode().removeprefix("n_")] = (
                        self._aravis.arv_stream_get_info_uint64_by_name(self._stream, name)
                    )
        return found

    def close(self) -> None:
        self.stop()
        if self._camera is not None:
            self._aravis.g_signal_handler_disconnect(self._device, self._handler)
            self._aravis.g_object_unref(self._camera)
        self._camera = None
