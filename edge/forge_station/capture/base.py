"""What capture hands on: frames, pattern stacks, scans, the cloud; and a driver's protocol.

Knows nothing of how images are taken or decoded. Everything is mm; invalid points are NaN.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from forge_station.capture.calibration import Calibration, PatternSpec
from forge_station.errors import CaptureError

Clock = Literal["ptp", "device", "host", "replay"]

# Quality flags, in the words of the reason codes that the station reports.
NO_DATA = "NO_DATA"
TOO_DARK = "TOO_DARK"
SATURATED = "SATURATED"
LOW_COVERAGE = "LOW_COVERAGE"
INCONSISTENT_CODE = "INCONSISTENT_CODE"
MOTION = "MOTION"
OUT_OF_FOCUS = "OUT_OF_FOCUS"
POSE_MISFIT = "POSE_MISFIT"


@dataclass(frozen=True)
class Trigger:
    """One request to scan. `serial` identifies the parts on the tray to MES.

    `t_utc_ns` when it was asked for.
    """

    serial: str
    part_number: str = ""
    t_utc_ns: int = 0


@dataclass(frozen=True, eq=False)
class Frame:
    """One camera image.

    image uint8 or uint16, [H, W] or [H, W, 3] (RGB); sequence: number that the device gave it
    (frame id or chunk counter), which tells lost frames; complete: it arrived whole. Times in ns:
    t_monotonic by the host's monotonic clock at arrival, t_utc by its wall clock, t_device by
    `clock` (ptp: one time in the whole line; device: since the device's start; host; replay).
    gain in dB; pixel_format by its name in the PFNC standard; source: driver and address.
    """

    image: NDArray[np.uint8] | NDArray[np.uint16]
    sequence: int
    complete: bool = True
    t_monotonic_ns: int = 0
    t_utc_ns: int = 0
    t_device_ns: int | None = None
    clock: Clock = "host"
    exposure_us: float | None = None
    gain: float | None = None
    pixel_format: str = "Mono8"
    source: str = ""

    @cached_property
    def sha256(self) -> str:
        """Digest of the pixels, in row order: equal for equal images."""
        return hashlib.sha256(np.ascontiguousarray(self.image).tobytes()).hexdigest()


@dataclass(frozen=True, eq=False)
class PatternStack:
    """All images of one head pose.

    images uint8 [E, N, H, W]: exposures (longest first) x patterns in the order of `pattern`;
    exposures are relative times. calibration_digest names the calibration the head had; decoding
    with another one is refused.
    """

    images: NDArray[np.uint8]
    exposures: tuple[float, ...]
    pattern: PatternSpec
    calibration_digest: str
    name: str = ""
    meta: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ScanQuality:
    """Shares of the camera image's pixels (0..1), and what they mean.

    valid: became a point. decoded: had a code, before any gate. saturated: clipped in every
    exposure. dark: too little projected light (shadow, black, outside). inconsistent: Gray code and
    phase (or a pattern and its inverse) contradict each other. flying: removed at depth jumps.
    reprojection_px: median |column, row| residual; None where only columns are coded. motion_px:
    how far anything moved between the first and the last image; blur_px: standard deviation of the
    blur; None where there is nothing to tell it from. misfits: why poses do not fit together, one
    text each; residual_mm, shift_mm, turn_deg: of the worst pose, what was left and what was
    corrected (see `fusion`). flags: see the constants above.
    """

    valid_share: float
    saturated_share: float = 0.0
    dark_share: float = 0.0
    inconsistent_share: float = 0.0
    flying_share: float = 0.0
    reprojection_px: float | None = None
    motion_px: float | None = None
    blur_px: float | None = None
    decoded_share: float | None = None
    residual_mm: float | None = None
    shift_mm: float | None = None
    turn_deg: float | None = None
    misfits: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Scan:
    """One decoded pose, organised like the camera image.

    points float32 [H, W, 3] mm in `frame` ("tray" or "camera"), NaN where invalid; intensity uint8
    [H, W] (white image); confidence float32 [H, W] 0..1 (phase modulation or bit contrast of full
    scale); camera_pixel_mm at the tray.
    """

    points: NDArray[np.float32]
    intensity: NDArray[np.uint8]
    confidence: NDArray[np.float32]
    quality: ScanQuality
    camera_pixel_mm: float
    frame: str = "tray"
    calibration_digest: str = ""


@dataclass(frozen=True, eq=False)
class Cloud:
    """Points of all poses together.

    points float32 [N, 3] mm, finite, in `frame` ("tray", "camera" or "unknown"); intensity uint8
    [N] or None; camera_pixel_mm: distance of neighbouring samples. organised float32 [H, W, 3] with
    NaN, where a single grid exists. notes: what was assumed while reading (unit, normals ignored,
    ...).
    """

    points: NDArray[np.float32]
    intensity: NDArray[np.uint8] | None
    camera_pixel_mm: float
    poses: int = 1
    quality: ScanQuality = field(default_factory=lambda: ScanQuality(valid_share=1.0))
    frame: str = "tray"
    organised: NDArray[np.float32] | None = None
    notes: tuple[str, ...] = ()


@runtime_checkable
class Scanner(Protocol):
    """A driver: one trigger in, one pattern stack per head pose out. Time-bounded.

    Raises CaptureError, never returns less than all poses. `close` may be called twice; use
    contextlib.closing.
    """

    @property
    def calibrations(self) -> Mapping[str, Calibration]:
        """By digest: every calibration that a stack of this driver can name."""
        ...

    def capture(self, trigger: Trigger) -> list[PatternStack]: ...

    def close(self) -> None: ...


class ScanSource(Protocol):
    """A driver of heads that measure by themselves: scans instead of pattern stacks.

    Otherwise as `Scanner`; it has no calibration to name.
    """

    @property
    def calibrations(self) -> Mapping[str, Calibration]: ...

    def capture(self, trigger: Trigger) -> list[Scan]: ...

    def close(self) -> None: ...


def white_and_black(pattern: PatternSpec) -> tuple[int, int]:
    """Numbers of the images under full light and without light."""
    if pattern.kind == "gray_phase":
        return 0, 1
    first = 2 * (pattern.column_bits + pattern.row_bits)
    return first, first + 1


def assemble(
    frames: Sequence[Frame], exposures: tuple[float, ...], calibration: Calibration, name: str
) -> PatternStack:
    """Frames of one burst, exposure by exposure and pattern by pattern -> stack.

    Raises CaptureError when a frame is incomplete, missing, repeated or of another size: a scan
    with a hole in it must be taken again.
    """
    count = calibration.pattern.image_count
    if len(frames) != count * len(exposures):
        raise CaptureError(
            f"pose {name}: {len(frames)} frames",
            expected=f"{count} patterns x {len(exposures)} exposures",
            action="capture again",
        )
    width, height = calibration.camera.image_size
    for k, frame in enumerate(frames):
        where = f"pose {name}, frame {k} of {frame.source or 'the camera'}"
        if not frame.complete:
            raise CaptureError("frame arrived incomplete", which=where, action="capture again")
        if frame.sequence != frames[0].sequence + k:
            raise CaptureError(
                "frame lost or repeated",
                which=where,
                expected=f"number {frames[0].sequence + k}",
                got=frame.sequence,
                action="capture again",
            )
        if frame.image.shape != (height, width) or frame.image.dtype != np.uint8:
            raise CaptureError(
                "frame has another format than the calibration",
                which=where,
                expected=f"uint8 {width}x{height}",
                got=f"{frame.image.dtype} {'x'.join(map(str, frame.image.shape[::-1]))}",
            )
    images = np.stack([frame.image for frame in frames]).astype(np.uint8, copy=False)
    return PatternStack(
        images=images.reshape(len(exposures), count, height, width),
        exposures=exposures,
        pattern=calibration.pattern,
        calibration_digest=calibration.digest,
        name=name,
        meta={"source": frames[0].source},
    )


def fuse(scans: Sequence[Scan]) -> Cloud:
    """All valid points of scans in one frame, concatenated in scan order.

    Shares are averaged over the poses, of other figures the worst counts; a flag of any pose is
    kept. Raises CaptureError for no scan
    or mixed frames.
    """
    if not scans:
        raise CaptureError("fuse: no scan given; expected one per head pose")
    frames = {scan.frame for scan in scans}
    if len(frames) > 1 or (len(scans) > 1 and frames == {"camera"}):
        raise CaptureError(
            f"fuse: {len(scans)} scans in frame {', '.join(sorted(frames))}; only scans in the "
            "tray "
            "frame can be fused: add tray_from_camera to the calibrations"
        )
    valid = [np.flatnonzero(np.isfinite(scan.points[..., 2])) for scan in scans]
    ends = np.cumsum([len(pixels) for pixels in valid])
    points, intensity = np.empty((ends[-1], 3), np.float32), np.empty(ends[-1], np.uint8)
    for scan, pixels, end in zip(scans, valid, ends, strict=True):
        own = slice(end - len(pixels), end)
        # The mode is what lets numpy write to `out` at once; every pixel is there.
        np.take(scan.points.reshape(-1, 3), pixels, axis=0, out=points[own], mode="clip")
        np.take(scan.intensity.ravel(), pixels, out=intensity[own], mode="clip")
    qualities = [scan.quality for scan in scans]

    def mean(name: str) -> float:
        return float(np.mean([getattr(q, name) for q in qualities]))

    decoded = [q.decoded_share for q in qualities if q.decoded_share is not None]

    def worst(name: str) -> float | None:
        found = [getattr(q, name) for q in qualities if getattr(q, name) is not None]
        return float(max(found)) if found else None

    quality = ScanQuality(
        valid_share=mean("valid_share"),
        saturated_share=mean("saturated_share"),
        dark_share=mean("dark_share"),
        inconsistent_share=mean("inconsistent_share"),
        flying_share=mean("flying_share"),
        reprojection_px=worst("reprojection_px"),
        motion_px=worst("motion_px"),
        blur_px=worst("blur_px"),
        decoded_share=float(np.mean(decoded)) if decoded else None,
        flags=tuple(dict.fromkeys(flag for q in qualities for flag in q.flags)),
    )
    return Cloud(
        points=points,
        intensity=intensity,
        camera_pixel_mm=float(np.median([scan.camera_pixel_mm for scan in scans])),
        poses=len(scans),
        quality=quality,
        frame=scans[0].frame,
        organised=scans[0].points if len(scans) == 1 else None,
    )
