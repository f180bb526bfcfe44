"""Driver `opencv`: webcams and UVC cameras (V4L2), network streams (RTSP, HTTP), video files.

address: /dev/video0 (or 0), rtsp://..., http://..., or a video file. OpenCV knows no trigger and no
frame numbers: `sequence` counts the frames handed out, a lost frame goes unnoticed. "software" is
made from free running: after each trigger the frames that may have been on their way are thrown
away. For a projector in a window that is enough; a part that moves needs a camera with a trigger.
Options:

    backend           v4l2 or ffmpeg (default: by the address). Always named to OpenCV: with another
                      one it would ignore the timeouts
    read_timeout_s    how long one read may block (default 1; ffmpeg; v4l2: whole seconds)
    rtsp_transport    tcp or udp (default tcp: udp shows lost packets as grey blocks)
    width, height     of the image, where the device offers it
    fourcc            of the stream between device and driver, e.g. MJPG or YUYV
    discard           frames thrown away after a software trigger (default 4 for a device or a
                      stream: the buffers that the kernel or decoder may hold; 0 for a file)
    loop              a file begins again at its end (default false)

Behind this driver's rules stand faults of OpenCV 5.0 that were measured: after one failed read the
handle never recovers, though `isOpened()` stays true. Any failed read is therefore a lost camera.
"""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station.capture.base import Frame
from forge_station.capture.camera import CameraHealth, CameraInfo, CameraSettings, TriggerMode
from forge_station.capture.cameras.common import Arming, Option, options_of, refuse, wait_until
from forge_station.errors import (
    CameraLostError,
    CameraNotFoundError,
    CameraSettingsError,
)

BACKENDS = {"v4l2": cv2.CAP_V4L2, "ffmpeg": cv2.CAP_FFMPEG}
FORMATS = ("Mono8", "RGB8")
_DEFAULTS: dict[str, Option] = {
    "backend": "", "read_timeout_s": 1.0, "rtsp_transport": "tcp", "width": 0, "height": 0,
    "fourcc": "", "discard": -1, "loop": False,
}  # fmt: skip
_KERNEL_BUFFERS = 4
_V4L2_MANUAL_EXPOSURE, _V4L2_EXPOSURE_US = 1, 100.0  # V4L2_EXPOSURE_MANUAL; unit of the control


class OpenCvCamera:
    """See the module. pixel_format: Mono8 (luminance) or RGB8; None: RGB8."""

    def __init__(self, settings: CameraSettings) -> None:
        self._settings = settings
        self._options = options_of(settings, _DEFAULTS)
        self._name = f"opencv:{settings.address}"
        self._file = Path(settings.address) if _is_file(settings.address) else None
        self._backend = self._backend_of(settings.address)
        if settings.pixel_format not in (None, *FORMATS):
            raise CameraSettingsError(
                "pixel format", which=self._name, expected=", ".join(FORMATS),
                got=settings.pixel_format,
            )  # fmt: skip
        if self._backend == "ffmpeg":
            refuse(settings, "exposure_us", "gain", *(() if self._file else ("fps",)))
        self._discard = self._options["discard"]
        if self._discard < 0:
            self._discard = 0 if self._file else _KERNEL_BUFFERS
        self._exposure_us: float | None = None
        self._arming = Arming(self._name, ("free", "software"))
        self._frames = 0
        self._lost: str | None = None
        self._capture = self._open()
        self._size = self._first_size()
        self._model = self._capture.getBackendName()
        fps = settings.fps or self._capture.get(cv2.CAP_PROP_FPS)
        self._step_s = 1 / fps if self._file and fps > 0 else 0.0
        self._due_at = time.monotonic()

    def describe(self) -> CameraInfo:
        clock = "replay" if self._file else "host"
        return CameraInfo(
            "opencv", cv2.__version__, "", self._model, "",
            self._settings.address, *self._size, self._arming.triggers, clock,
        )  # fmt: skip

    def arm(
        self, trigger: TriggerMode, count: int | None = None, *, exposure_us: float | None = None
    ) -> None:
        self._refuse_lost()
        self._arming.arm(trigger, count)
        if exposure_us is not None:
            self._expose(self._capture, exposure_us)
        self._due_at = time.monotonic()
        if trigger == "free":
            self._skip(self._discard)

    def trigger(self) -> None:
        self._refuse_lost()
        self._arming.trigger()

    def grab(self, timeout_s: float) -> Frame:
        self._arming.refuse_unarmed()
        self._refuse_lost()
        deadline = time.monotonic() + timeout_s
        if not self._arming.due:
            wait_until(deadline, deadline)
            raise self._arming.late(timeout_s)
        if self._arming.mode == "software":
            self._skip(self._discard)
        elif self._step_s:
            if not wait_until(self._due_at, deadline):
                raise self._arming.late(timeout_s)
            self._due_at = max(self._due_at + self._step_s, time.monotonic() - self._step_s)
        image = self._read()
        now, wall = time.monotonic_ns(), time.time_ns()
        self._arming.taken()
        self._frames += 1
        return Frame(
            image=image,
            sequence=self._frames,
            t_monotonic_ns=now,
            t_utc_ns=wall,
            clock="replay" if self._file else "host",
            exposure_us=self._exposure_us,
            gain=self._settings.gain,
            pixel_format=self._settings.pixel_format or "RGB8",
            source=self._name,
        )

    def disarm(self) -> None:
        self._arming.disarm()

    def health(self) -> CameraHealth:
        """Without reading a frame only the loss of a local device can be seen."""
        self._arming.refuse_closed()
        self._refuse_lost()
        if self._backend == "v4l2" and not _device(self._settings.address).exists():
            self._lose("the device node is gone")
        return CameraHealth(frames=self._frames)

    def close(self) -> None:
        self._arming.close()
        self._capture.release()

    def _backend_of(self, address: str) -> str:
        asked = self._options["backend"]
        if asked and asked not in BACKENDS:
            raise CameraSettingsError(
                "OpenCV backend", which=self._name, expected=", ".join(BACKENDS), got=asked
            )
        found: str = asked or ("v4l2" if _is_device(address) else "ffmpeg")
        if "://" not in address and not _device(address).exists():
            raise CameraNotFoundError(
                "no such device or file",
                which=address or "empty address",
                expected="/dev/video0, rtsp://..., http://... or a video file",
            )
        return found

    def _open(self) -> cv2.VideoCapture:
        settings, option = self._settings, self._options
        read_ms, open_ms = int(1e3 * option["read_timeout_s"]), int(1e3 * settings.open_timeout_s)
        address = settings.address
        if self._backend == "v4l2":
            # Read once by OpenCV, in the process that this camera has for itself.
            os.environ["OPENCV_VIDEOIO_V4L_SELECT_TIMEOUT"] = str(max(1, round(read_ms / 1e3)))
            capture = cv2.VideoCapture(str(_device(address)), cv2.CAP_V4L2)
        else:
            transport = f"rtsp_transport;{option['rtsp_transport']}"
            os.environ["OPENCV_FFMPEG_CAPTURE_OPTIONS"] = transport
            limits = [cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, open_ms]
            limits += [cv2.CAP_PROP_READ_TIMEOUT_MSEC, read_ms]
            capture = cv2.VideoCapture(address, cv2.CAP_FFMPEG, limits)
        if not capture.isOpened():
            raise CameraNotFoundError(
                "OpenCV cannot open it",
                which=self._name,
                expected=f"a stream that {self._backend} reads",
                action="check address, cable and power, and that no other program has it",
            )
        if self._backend == "v4l2":
            self._set(capture)
        return capture

    def _set(self, capture: cv2.VideoCapture) -> None:
        """Settings of a device, each read back: V4L2 ignores what it does not like."""
        option, settings = self._options, self._settings
        if option["fourcc"]:
            code = cv2.VideoWriter.fourcc(*f"{option['fourcc']:<4}"[:4])
            self._put(capture, "fourcc", cv2.CAP_PROP_FOURCC, code)
        for name, prop in (
            ("width", cv2.CAP_PROP_FRAME_WIDTH),
            ("height", cv2.CAP_PROP_FRAME_HEIGHT),
        ):
            if option[name]:
                self._put(capture, name, prop, option[name])
        if settings.fps is not None:
            self._put(capture, "fps", cv2.CAP_PROP_FPS, settings.fps)
        if settings.gain is not None:
            self._put(capture, "gain", cv2.CAP_PROP_GAIN, settings.gain)
        if settings.exposure_us is not None:
            self._expose(capture, settings.exposure_us)

    def _expose(self, capture: cv2.VideoCapture, exposure_us: float) -> None:
        if self._backend != "v4l2":
            raise CameraSettingsError("a stream has no exposure to set", which=self._name)
        self._put(capture, "manual exposure", cv2.CAP_PROP_AUTO_EXPOSURE, _V4L2_MANUAL_EXPOSURE)
        units = round(exposure_us / _V4L2_EXPOSURE_US)
        self._put(capture, "exposure_us / 100", cv2.CAP_PROP_EXPOSURE, units)
        self._exposure_us = units * _V4L2_EXPOSURE_US

    def _put(self, capture: cv2.VideoCapture, name: str, prop: int, value: float) -> None:
        capture.set(prop, value)
        got = capture.get(prop)
        if abs(got - value) > 0.01 * abs(value):
            capture.release()
            raise CameraSettingsError(
                "the device does not take a setting",
                which=f"{self._name}: {name}",
                expected=f"{value:g}",
                got=f"{got:g}",
                action="see what it offers: v4l2-ctl --list-ctrls --list-formats-ext",
            )

    def _first_size(self) -> tuple[int, int]:
        """(width, height) of the first image: what a stream says of itself may be wrong."""
        try:
            height, width = self._read().shape[:2]
        except CameraLostError as error:
            self._capture.release()
            raise CameraNotFoundError(
                "it opens, but gives no image", which=self._name, got=error
            ) from error
        if self._file:
            self._capture.release()
            self._capture = self._open()
        return width, height

    def _skip(self, count: int) -> None:
        for _ in range(count):
            if not self._capture.grab():
                self._lose("a read failed or timed out")

    def _read(self) -> NDArray[np.uint8]:
        ok, image = self._capture.read()
        if not ok and self._file and self._options["loop"] and self._frames:
            self._capture.release()
            self._capture = self._open()
            ok, image = self._capture.read()
        if not ok or image is None or image.ndim not in (2, 3):
            self._lose("the file has ended" if self._file else "a read failed or timed out")
        if self._settings.pixel_format == "Mono8":
            return np.asarray(
                image if image.ndim == 2 else cv2.cvtColor(image, cv2.COLOR_BGR2GRAY), np.uint8
            )
        code = cv2.COLOR_GRAY2RGB if image.ndim == 2 else cv2.COLOR_BGR2RGB
        return np.asarray(cv2.cvtColor(image, code), np.uint8)

    def _lose(self, why: str) -> None:
        self._lost = why
        self._refuse_lost()

    def _refuse_lost(self) -> None:
        if self._lost is not None:
            raise CameraLostError("the stream broke", which=self._name, got=self._lost)


def open_opencv(settings: CameraSettings) -> OpenCvCamera:
    """Entry point of the driver `opencv`."""
    return OpenCvCamera(settings)


def _device(address: str) -> Path:
    return Path(f"/dev/video{address}" if address.isdecimal() else address)


def _is_device(address: str) -> bool:
    try:
        return stat.S_ISCHR(_device(address).stat().st_mode) if "://" not in address else False
    except OSError:
        return False


def _is_file(address: str) -> bool:
    return "://" not in address and Path(address).is_file()
