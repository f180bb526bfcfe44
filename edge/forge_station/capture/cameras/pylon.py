"""Basler cameras through pylon. Extra: basler.

Address: IP address or serial number; empty where there is only one camera. Options: SFNC features
by name; `buffers` (default 16), `chunks` (default true). Proven against pylon's own camera
emulation (PYLON_CAMEMU=1 in the environment), which replays a folder of images:

    options: {TestImageSelector: "Off", ImageFileMode: "On", ImageFilename: /path/to/folder}
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
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
from forge_station.errors import CameraBusyError, CameraNotFoundError

try:
    from pypylon import genicam, pylon
except ModuleNotFoundError as missing:
    raise CameraNotFoundError(
        f"this camera driver needs {missing.name}",
        action="install the extra: pip install forge-station[basler]",
    ) from missing

DEFAULTS: Mapping[str, Value] = {"buffers": 16, "chunks": True}
_HELD = ("controlled by another", "exclusively opened")


def open_pylon(settings: CameraSettings) -> Camera:
    """Open a device. Entry point `pylon`."""
    options = checked_options(settings, DEFAULTS)
    source = f"{settings.driver} {settings.address or '(only camera)'}"
    transport = PylonTransport(settings.address, source, options["buffers"])
    with closed_on_error(transport):
        return TransportCamera(transport, settings, source)


class PylonNodes:
    """A node map of pylon as `sfnc.Nodes`."""

    def __init__(self, node_map: Any) -> None:
        self._map = node_map

    def _node(self, name: str) -> Any:
        node = self._map.GetNode(name)
        if node is None:
            raise NodeError(f"the device has no feature {name}")
        return node

    def available(self, name: str) -> bool:
        try:
            return bool(genicam.IsAvailable(self._node(name)))
        except (NodeError, genicam.GenericException):
            return False

    def get(self, name: str) -> Value:
        with _node_errors():
            found: Value = self._node(name).Value
        return found

    def set(self, name: str, value: Value) -> None:
        with _node_errors():
            self._node(name).Value = value

    def execute(self, name: str) -> None:
        with _node_errors():
            self._node(name).Execute()

    def entries(self, name: str) -> tuple[str, ...]:
        with _node_errors():
            return tuple(self._node(name).Symbolics)


@contextmanager
def _node_errors() -> Iterator[None]:
    try:
        yield
    except (AttributeError, TypeError, genicam.GenericException) as error:
        raise NodeError(genapi_text(error)) from error


class PylonTransport:
    """One open Basler camera."""

    def __init__(self, address: str, source: str, buffers: int) -> None:
        self._camera: Any = None
        self._lost = ""
        try:
            self._camera = pylon.InstantCamera(_create(address, source))
            self._camera.Open()
            self._camera.MaxNumBuffer.Value = max(1, buffers)
        except genicam.GenericException as error:
            self.close()
            if any(text in str(error) for text in _HELD):
                raise CameraBusyError("another program holds the camera", which=source) from error
            raise CameraNotFoundError(
                "the camera cannot be opened", which=source, got=genapi_text(error)
            ) from error
        self.nodes = PylonNodes(self._camera.GetNodeMap())
        self._ticks = Sfnc(self.nodes, "").number(("GevTimestampTickFrequency",)) or 1e9

    def identity(self) -> tuple[str, str, str]:
        info = self._camera.GetDeviceInfo()
        return info.GetVendorName(), info.GetModelName(), info.GetSerialNumber()

    def version(self) -> str:
        return ".".join(map(str, pylon.GetPylonVersion()[:3]))

    def start(self) -> None:
        with _node_errors():
            self._camera.StartGrabbing(pylon.GrabStrategy_OneByOne)

    def pop(self, timeout_s: float) -> Buffer | None:
        try:
            result = self._camera.RetrieveResult(int(timeout_s * 1e3), pylon.TimeoutHandling_Return)
        except genicam.GenericException as error:
            self._lost = genapi_text(error) if self._gone() else self._lost
            return None
        try:
            return self._buffer(result) if result.IsValid() else None
        finally:
            result.Release()

    def _buffer(self, result: Any) -> Buffer:
        complete = result.GrabSucceeded()
        ticks = result.TimeStamp
        return Buffer(
            parts=(self._part(result),) if complete else (),
            complete=complete,
            frame_id=None if result.BlockID == 2**64 - 1 else result.BlockID,
            device_ns=int(ticks * 1e9 / self._ticks) if ticks else None,
            chunks=self._chunks(result) if complete else {},
        )

    @staticmethod
    def _part(result: Any) -> Part:
        return Part(
            data=np.frombuffer(result.GetBuffer(), np.uint8),  # GetBuffer copies
            pixel_format=pixels.name_of(result.PixelType),
            width=result.Width,
            height=result.Height,
            padding=result.PaddingX,
        )

    @staticmethod
    def _chunks(result: Any) -> dict[str, Number]:
        if not result.IsChunkDataAvailable():
            return {}
        features = Sfnc(PylonNodes(result.GetChunkDataNodeMap()), "")
        found = {key: features.number(names) for key, names in sfnc.CHUNKS.items()}
        chunks: dict[str, Number] = {k: v for k, v in found.items() if v is not None}
        if "frame_id" in chunks:
            chunks["frame_id"] = int(chunks["frame_id"])
        return chunks

    def ready(self, timeout_s: float) -> bool:
        """pylon knows by events when the camera waits for a trigger; polling would be late."""
        if not self._camera.CanWaitForFrameTriggerReady():
            return Sfnc(self.nodes, "").wait_ready(timeout_s)
        with _node_errors():
            return bool(
                self._camera.WaitForFrameTriggerReady(
                    int(timeout_s * 1e3), pylon.TimeoutHandling_Return
                )
            )

    def stop(self) -> None:
        with suppress(genicam.GenericException):
            self._camera.StopGrabbing()

    def _gone(self) -> bool:
        try:
            return bool(self._camera.IsCameraDeviceRemoved())
        except genicam.GenericException:
            return True

    def lost(self) -> str:
        if not self._lost and self._gone():
            self._lost = "the device was removed"
        return self._lost

    def counters(self) -> Mapping[str, int]:
        """Statistics of pylon's stream grabber, where the transport layer has them."""
        nodes = PylonNodes(self._camera.GetStreamGrabberNodeMap())
        found = {}
        for name in (
            "Statistic_Buffer_Underrun_Count",
            "Statistic_Failed_Buffer_Count",
            "Statistic_Missed_Frame_Count",
            "Statistic_Resend_Request_Count",
        ):
            value = Sfnc(nodes, "").number((name,))
            if value is not None:
                found[name.removeprefix("Statistic_").lower()] = int(value)
        return found

    def close(self) -> None:
        if self._camera is None:
            return
        with suppress(genicam.GenericException):
            self._camera.Close()
        with suppress(genicam.GenericException):
            self._camera.DestroyDevice()  # Close alone keeps its file descriptors
        self._camera = None


def _create(address: str, source: str) -> Any:
    """The device of that address, not yet open. Raises CameraNotFoundError."""
    factory = pylon.TlFactory.GetInstance()
    wanted = pylon.DeviceInfo()
    if _is_ip(address):
        wanted.SetIpAddress(address)
    elif address:
        wanted.SetSerialNumber(address)
    found = factory.EnumerateDevices([wanted] if address else [])
    if len(found) != 1:
        listed = [_name(info) for info in factory.EnumerateDevices()]
        raise CameraNotFoundError(
            "several cameras match" if found else "no such camera",
            which=source,
            expected="IP address or serial number: " + ", ".join(listed) if listed else None,
            action=None if found else "check cable, power and that its network is this host's too",
        )
    return factory.CreateDevice(found[0])


def _is_ip(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return "." in address


def _name(info: Any) -> str:
    address = f"{info.GetIpAddress()} " if info.IsIpAddressAvailable() else ""
    return f"{address}{info.GetSerialNumber()} ({info.GetModelName()})"
