"""A 3D head that measures by itself: one trigger in, organised scans out, no decoding here.

Any camera driver whose frames are packed scans will do (`gentl3d`). The head is supervised like a
camera: a process of its own, killed and opened anew when it fails. A scan that fails is taken
again, once; then the part is an error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from forge_station.capture import base, scan3d
from forge_station.capture.base import Frame, Scan, ScanQuality, Trigger
from forge_station.capture.calibration import Calibration
from forge_station.capture.camera import REGISTRY, Camera
from forge_station.capture.drivers import closed_on_error
from forge_station.capture.head import TRIGGER_AGE_S, refuse_stale
from forge_station.capture.lifecycle import Patience
from forge_station.capture.settings import DepthHeadSettings, Pose
from forge_station.capture.supervisor import Change, SupervisedCamera
from forge_station.errors import (
    CameraSettingsError,
    CaptureError,
    FrameIncompleteError,
)

log = logging.getLogger(__name__)

_LOW_COVERAGE = 0.15  # as for decoded scans


class DepthHead:
    """One open head. camera: a supervised one, or a driver's (tests, tools)."""

    def __init__(
        self,
        settings: DepthHeadSettings,
        camera: Camera,
        *,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.settings, self.camera, self._now_ns = settings, camera, now_ns
        self.name = settings.name

    def scan(self, trigger: Trigger) -> Scan:
        """The part that lies there now. Raises CaptureError after two tries."""
        try:
            return self._take()
        except CameraSettingsError:
            raise
        except CaptureError as error:
            log.warning(
                "head %s, part %s, taken again: %s", self.settings.name, trigger.serial, error
            )
        return self._take()

    def _take(self) -> Scan:
        if isinstance(self.camera, SupervisedCamera):
            self.camera.wait_open(self.settings.recover_s, patient=True)
        by_software = "software" in self.camera.describe().triggers
        asked_ns = self._now_ns()
        self.camera.arm("software" if by_software else "free", 1)
        try:
            if by_software:
                self.camera.trigger()
            frame = self.camera.grab(self.settings.timeout_s)
        finally:
            self.camera.disarm()
        self._refuse_foreign(frame, asked_ns)
        return scan_of(frame, self.settings.tray_from_camera)

    def _refuse_foreign(self, frame: Frame, asked_ns: int) -> None:
        where = f"head {self.name}, number {frame.sequence}"
        if frame.pixel_format != scan3d.PACKED:
            raise CameraSettingsError(
                "the driver's frames are no scans",
                which=where,
                expected="the driver gentl3d, or another for 3D heads",
                got=frame.pixel_format,
            )
        if not frame.complete:
            raise FrameIncompleteError(
                "scan arrived with parts missing",
                which=where,
                action="check the cable, and packet size and bandwidth of the network",
            )
        if frame.t_monotonic_ns < asked_ns:
            raise CaptureError("the scan is older than its trigger", which=where)

    def close(self) -> None:
        """Release the head; may be called twice."""
        self.camera.close()


def scan_of(frame: Frame, tray_from_camera: Pose | None = None) -> Scan:
    """A packed frame -> scan, in the tray frame where the head's pose is known.

    Shares that only a decoder knows (dark, saturated, inconsistent) stay 0.
    """
    points, confidence, intensity = scan3d.unpack(frame.image.astype(np.uint8, copy=False))
    valid = np.isfinite(points[..., 2])
    share = float(valid.mean())
    flags = [base.NO_DATA] if share == 0 else []
    if share < _LOW_COVERAGE:
        flags.append(base.LOW_COVERAGE)
    pixel_mm = _pixel_mm(points)
    if tray_from_camera is not None:
        pose = np.array(tray_from_camera, np.float32)
        points = points @ pose[:3, :3].T + pose[:3, 3]
    return Scan(
        points=points,
        intensity=intensity,
        confidence=confidence,
        quality=ScanQuality(valid_share=share, flags=tuple(flags)),
        camera_pixel_mm=pixel_mm,
        frame="camera" if tray_from_camera is None else "tray",
    )


def _pixel_mm(points: scan3d.Float32) -> float:
    """Median distance of neighbouring pixels across the line of sight; 0 without any."""
    across, down = points[:, 1:, :2] - points[:, :-1, :2], points[1:, :, :2] - points[:-1, :, :2]
    steps = np.concatenate([np.linalg.norm(d.reshape(-1, 2), axis=1) for d in (across, down)])
    steps = steps[np.isfinite(steps)]
    return float(np.median(steps)) if steps.size else 0.0


class DepthScanner:
    """One or several 3D heads on one tray, one after the other, as a `base.Scanner`."""

    def __init__(
        self,
        heads: Sequence[DepthHead],
        *,
        trigger_age_s: float = TRIGGER_AGE_S,
        utc_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        if not heads:
            raise CaptureError("a scanner without heads", expected="at least one")
        if len(heads) > 1 and any(head.settings.tray_from_camera is None for head in heads):
            raise CaptureError(
                "several 3D heads, and where they are is not known",
                expected="tray_from_camera of each",
            )
        self.heads = tuple(heads)
        self._trigger_age_s, self._utc_ns = trigger_age_s, utc_ns

    @property
    def calibrations(self) -> Mapping[str, Calibration]:
        """None: the heads are calibrated by their makers."""
        return {}

    def capture(self, trigger: Trigger) -> list[Scan]:
        """One scan a head. Raises CaptureError."""
        refuse_stale(trigger, self._trigger_age_s, self._utc_ns)
        return [head.scan(trigger) for head in self.heads]

    def close(self) -> None:
        """Release all heads; may be called twice."""
        for head in self.heads:
            head.close()


def open_depth_heads(
    settings: Sequence[DepthHeadSettings],
    *,
    trigger_age_s: float = TRIGGER_AGE_S,
    on_change: Callable[[Change], None] | None = None,
) -> DepthScanner:
    """Open the 3D heads of a station. One that is not there yet is waited for in the background.

    Raises StationError for what waiting cannot mend.
    """
    for item in settings:
        REGISTRY.find(item.camera.driver, f"head {item.name}: ")
    heads: list[DepthHead] = []
    with ExitStack() as opened:
        for item in settings:
            eye = SupervisedCamera(
                item.camera,
                name=item.name,
                patience=Patience(stall_s=max(Patience().stall_s, item.timeout_s)),
                on_change=on_change,
            )
            opened.enter_context(closed_on_error(eye))
            heads.append(DepthHead(item, eye))
        return DepthScanner(heads, trigger_age_s=trigger_age_s)
