"""The part of libaravis that the driver calls, by ctypes.

By ctypes and not by PyGObject, because that exists for the system's own Python only: so any
virtual environment and any version of Python will do, and the one thing to install is the shared
library (Debian and Ubuntu: apt install libaravis-0.8-0). Calls release the GIL.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import (
    POINTER,
    byref,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint,
    c_uint32,
    c_uint64,
    c_void_p,
)  # fmt: skip
from functools import cache
from typing import Any

from forge_station.errors import CameraNotFoundError

SONAME = "libaravis-0.8.so.0"  # one ABI for the whole 0.8 series

SUCCESS = 0
"""ArvBufferStatus of a whole buffer."""
STATUS = {
    -1: "unknown", 0: "success", 1: "cleared", 2: "timeout", 3: "missing packets",
    4: "wrong packet id", 5: "size mismatch", 6: "filling", 7: "aborted",
    8: "payload not supported",
}  # fmt: skip

_G_TYPE_INT = 6 << 2
_TIMEOUT = 5  # ArvDeviceError

ControlLost = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)

_ERROR = object()  # in a signature: GError **, which makes the call raise
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    # name: (result, arguments...)
    "arv_get_major_version": (c_uint,),
    "arv_get_minor_version": (c_uint,),
    "arv_get_micro_version": (c_uint,),
    "arv_camera_new": (c_void_p, c_char_p, _ERROR),
    "arv_camera_get_device": (c_void_p, c_void_p),
    "arv_camera_is_gv_device": (c_int, c_void_p),
    "arv_camera_create_stream": (c_void_p, c_void_p, c_void_p, c_void_p, _ERROR),
    "arv_camera_create_chunk_parser": (c_void_p, c_void_p),
    "arv_camera_get_payload": (c_uint, c_void_p, _ERROR),
    "arv_camera_start_acquisition": (None, c_void_p, _ERROR),
    "arv_camera_stop_acquisition": (None, c_void_p, _ERROR),
    "arv_camera_gv_set_stream_options": (None, c_void_p, c_int),
    "arv_gv_device_is_controller": (c_int, c_void_p),
    "arv_gv_device_get_device_address": (c_void_p, c_void_p),
    "g_inet_socket_address_get_address": (c_void_p, c_void_p),
    "g_inet_address_to_string": (c_void_p, c_void_p),
    "arv_device_error_quark": (c_uint32,),
    "arv_device_is_feature_available": (c_int, c_void_p, c_char_p, _ERROR),
    "arv_device_get_feature": (c_void_p, c_void_p, c_char_p),
    "arv_device_execute_command": (None, c_void_p, c_char_p, _ERROR),
    "arv_device_dup_available_enumeration_feature_values_as_strings": (
        c_void_p, c_void_p, c_char_p, POINTER(c_uint), _ERROR,
    ),
    "arv_device_set_range_check_policy": (None, c_void_p, c_int),
    "arv_device_set_access_check_policy": (None, c_void_p, c_int),
    "arv_gc_feature_node_get_value_as_string": (c_char_p, c_void_p, _ERROR),
    "arv_gc_feature_node_set_value_from_string": (None, c_void_p, c_char_p, _ERROR),
    "arv_stream_push_buffer": (None, c_void_p, c_void_p),
    "arv_stream_timeout_pop_buffer": (c_void_p, c_void_p, c_uint64),
    "arv_stream_get_n_infos": (c_uint, c_void_p),
    "arv_stream_get_info_name": (c_char_p, c_void_p, c_uint),
    "arv_stream_get_info_uint64_by_name": (c_uint64, c_void_p, c_char_p),
    "arv_buffer_new_allocate": (c_void_p, c_size_t),
    "arv_buffer_get_status": (c_int, c_void_p),
    "arv_buffer_get_data": (c_void_p, c_void_p, POINTER(c_size_t)),
    "arv_buffer_get_image_data": (c_void_p, c_void_p, POINTER(c_size_t)),
    "arv_buffer_get_image_width": (c_int32, c_void_p),
    "arv_buffer_get_image_height": (c_int32, c_void_p),
    "arv_buffer_get_image_padding": (None, c_void_p, POINTER(c_int32), POINTER(c_int32)),
    "arv_buffer_get_image_pixel_format": (c_uint32, c_void_p),
    "arv_buffer_get_frame_id": (c_uint64, c_void_p),
    "arv_buffer_get_timestamp": (c_uint64, c_void_p),
    "arv_buffer_get_system_timestamp": (c_uint64, c_void_p),
    "arv_buffer_has_chunks": (c_int, c_void_p),
    "arv_chunk_parser_get_integer_value": (c_int64, c_void_p, c_void_p, c_char_p, _ERROR),
    "arv_chunk_parser_get_float_value": (c_double, c_void_p, c_void_p, c_char_p, _ERROR),
    "g_signal_connect_data": (
        c_uint64, c_void_p, c_char_p, c_void_p, c_void_p, c_void_p, c_int,
    ),
    "g_signal_handler_disconnect": (None, c_void_p, c_uint64),
    "g_value_init": (c_void_p, c_void_p, c_size_t),
    "g_value_set_int": (None, c_void_p, c_int),
    "g_object_set_property": (None, c_void_p, c_char_p, c_void_p),
    "g_object_unref": (None, c_void_p),
    "g_free": (None, c_void_p),
    "g_error_free": (None, c_void_p),
}  # fmt: skip


class AravisError(Exception):
    """What a call reported by GError. `silent`: the device did not answer in time."""

    silent = False


class _GError(ctypes.Structure):
    _fields_ = (("domain", c_uint32), ("code", c_int), ("message", c_char_p))


class Library:
    """Functions of libaravis and GLib by their C names; one with a GError raises AravisError.

    Raises CameraNotFoundError where the shared library is not installed or too old.
    """

    def __init__(self, soname: str = SONAME) -> None:
        try:
            self._library = ctypes.CDLL(soname)  # its dependencies, GLib among them, come along
            self._functions = {
                name: self._bind(name, *signature) for name, signature in _SIGNATURES.items()
            }
        except (OSError, AttributeError) as error:
            raise CameraNotFoundError(
                "the Aravis library is not usable",
                which=soname,
                got=error,
                action="install it; Debian and Ubuntu: apt install libaravis-0.8-0",
            ) from error

    def _bind(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        function = getattr(self._library, name)
        function.restype = result
        if _ERROR not in arguments:
            function.argtypes = arguments
            return function  # type: ignore[no-any-return]
        function.argtypes = (*arguments[:-1], POINTER(POINTER(_GError)))

        def call(*given: Any) -> Any:
            error = POINTER(_GError)()
            found = function(*given, byref(error))
            if error:
                told = error.contents
                failure = AravisError((told.message or b"").decode(errors="replace"))
                failure.silent = (told.domain, told.code) == (
                    self.arv_device_error_quark(),
                    _TIMEOUT,
                )
                self.g_error_free(error)
                raise failure
            return found

        return call

    def __getattr__(self, name: str) -> Callable[..., Any]:
        try:
            return self._functions[name]
        except KeyError:
            raise AttributeError(name) from None

    def strings(self, device: int, enumeration: str) -> tuple[str, ...]:
        """The available entries of an enumeration."""
        count = c_uint()
        array = self.arv_device_dup_available_enumeration_feature_values_as_strings(
            device, enumeration.encode(), byref(count)
        )
        if not array:
            return ()
        found = ctypes.cast(array, POINTER(c_char_p))
        names = tuple((found[k] or b"").decode() for k in range(count.value))
        self.g_free(array)
        return names

    def address(self, device: int) -> str:
        """IP address of a GigE Vision device."""
        inet = self.g_inet_socket_address_get_address(self.arv_gv_device_get_device_address(device))
        text = self.g_inet_address_to_string(inet)
        found = (ctypes.cast(text, c_char_p).value or b"").decode()
        self.g_free(text)
        return found

    def set_int(self, thing: int, name: bytes, value: int) -> None:
        """Set a property of a GObject that is an int."""
        held = (c_uint64 * 3)()  # a GValue
        self.g_value_init(held, _G_TYPE_INT)
        self.g_value_set_int(held, value)
        self.g_object_set_property(thing, name, held)

    @property
    def version(self) -> str:
        parts = ("major", "minor", "micro")
        return ".".join(str(self._functions[f"arv_get_{part}_version"]()) for part in parts)


@cache
def library() -> Library:
    """Loaded once a process."""
    return Library()
