"""Pattern images for the projector, and a pattern stack with its calibration -> organised scan.
numpy only.

Does not know cameras or files. Two codes: Gray code of the half period plus phase shift
(sub-pixel), and integer Gray code with inverse pairs, columns or columns and rows. Column
coordinates are projector pixel indices (centre of pixel 0 is 0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from forge_station.capture import base
from forge_station.capture.base import PatternStack, Scan, ScanQuality
from forge_station.capture.calibration import Calibration, PatternSpec
from forge_station.capture.triangulation import (
    camera_rays,
    to_points,
    triangulate,
    without_flying_points,
)
from forge_station.errors import CalibrationError, CaptureError

Bool = NDArray[np.bool_]
Float32 = NDArray[np.float32]
# Half a half-period is 0.25; the rest is blur and noise at the bit edges.
CODE_TOLERANCE_PERIODS = 0.36


@dataclass(frozen=True)
class Limits:
    """Thresholds of the decoder, grey levels of 255 unless named otherwise.

    jump: largest depth step between neighbouring pixels of one surface, in camera pixel sizes (2.7
    = 70 degrees to the view). support: how many of the 8 neighbours must lie within it. gate_px:
    reprojection gate of two-axis codes.
    """

    saturation: int = 254
    contrast: int = 10
    modulation: float = 5.0
    pair_contrast: int = 5
    pair_white_minus_black: int = 40
    jump: float = 2.7
    support: int = 5
    gate_px: float = 2.0


def profiles(
    spec: PatternSpec, projector_size: tuple[int, int]
) -> list[tuple[int, NDArray[np.float64]]]:
    """One (axis, intensity 0..1 along that axis) per image.

    Axis 0 varies with the column, 1 with the row.
    """
    _refuse_bad_spec(spec, projector_size)
    width, height = projector_size
    x = np.arange(width)
    white, black = (0, np.ones(width)), (0, np.zeros(width))
    if spec.kind == "gray_phase":
        column = x // spec.code_step
        index = (column // (spec.period_px / 2)).astype(np.int64)
        gray = index ^ (index >> 1)
        bits = [(0, ((gray >> b) & 1).astype(float)) for b in reversed(range(spec.column_bits))]
        phase = 2 * np.pi * (column + 0.5) / spec.period_px
        shifts = [
            (0, 0.5 + 0.5 * np.cos(phase - 2 * np.pi * k / spec.steps)) for k in range(spec.steps)
        ]
        return [white, black, *bits, *shifts]
    images: list[tuple[int, NDArray[np.float64]]] = []
    for axis, length, bit_count in ((0, width, spec.column_bits), (1, height, spec.row_bits)):
        code = np.arange(length) // spec.code_step
        gray = code ^ (code >> 1)
        for b in reversed(range(bit_count)):
            bit = ((gray >> b) & 1).astype(float)
            images += [(axis, bit), (axis, 1 - bit)]
    return [*images, white, black]


def patterns(spec: PatternSpec, projector_size: tuple[int, int]) -> NDArray[np.uint8]:
    """Images for the projector, uint8 [N, height, width].

    Linear in light: the projector must not apply a gamma.
    """
    width, height = projector_size
    out = np.empty((spec.image_count, height, width), np.uint8)
    for image, (axis, profile) in zip(out, profiles(spec, projector_size), strict=True):
        values = np.round(profile * 255).astype(np.uint8)
        image[:] = values[None, :] if axis == 0 else values[:, None]
    return out


def decode(stack: PatternStack, calibration: Calibration, limits: Limits | None = None) -> Scan:
    """Pattern stack -> organised points in the tray frame, or the camera's where no tray is known.

    Raises CaptureError for a stack that is incomplete, of the wrong size or repeats an image,
    CalibrationError when stack and calibration do not belong together or no code step fits. Poor
    light does not raise: see the flags of ScanQuality. About 40 ms for 640x480, 2 exposures x 17
    images on one core of an EPYC (2026-11).
    """
    limits = limits or Limits()
    _refuse_mismatch(stack, calibration)
    longest_first = np.argsort(-np.asarray(stack.exposures), kind="stable")
    images, saturated = _merge_exposures(
        [stack.images[k] for k in longest_first], limits.saturation
    )
    if calibration.pattern.kind == "gray_phase":
        code = _decode_gray_phase(images, calibration.pattern, limits)
    else:
        code = _decode_gray_pairs(images, calibration.pattern, limits)
    size = calibration.projector.image_size
    ok = code.ok & ~saturated & (code.column > 0) & (code.column < size[0] - 1)
    if code.row is not None:
        ok &= (code.row >= 0) & (code.row <= size[1] - 1)
    pixels = np.flatnonzero(ok)
    direction_x, direction_y = camera_rays(calibration, pixels)
    column = code.column.ravel()[pixels]
    row = None if code.row is None else code.row.ravel()[pixels]
    depth, residual = triangulate(direction_x, direction_y, column, row, calibration)
    reprojection = None
    keep = np.isfinite(depth) & (depth > 0)
    if residual is not None and pixels.size:
        reprojection = float(np.median(residual))
        keep &= residual < limits.gate_px
        _refuse_wrong_code_step(
            reprojection, keep, direction_x, direction_y, column, row, calibration, limits
        )
    depth_image = np.full(ok.size, np.nan, np.float32)
    depth_image[pixels[keep]] = depth[keep]
    solid = without_flying_points(
        depth_image.reshape(ok.shape), calibration, limits.jump, limits.support
    )
    points = to_points(depth_image, solid, calibration)
    valid_share = float(solid.mean())
    quality = ScanQuality(
        valid_share=valid_share,
        saturated_share=float(saturated.mean()),
        dark_share=float((code.dark & ~saturated).mean()),
        inconsistent_share=float((code.inconsistent & ~saturated).mean()),
        flying_share=float(keep.sum() / ok.size) - valid_share,
        reprojection_px=reprojection,
    )
    pixel_mm = calibration.camera_pixel_mm
    if pixel_mm is None:
        nearest = float(np.median(depth[keep])) if keep.any() else 0.0
        pixel_mm = nearest / float(calibration.camera.matrix[0, 0])
    return Scan(
        points=points,
        intensity=code.white,
        confidence=code.confidence,
        quality=replace(quality, flags=_flags(quality)),
        camera_pixel_mm=pixel_mm,
        frame="camera" if calibration.tray_from_camera is None else "tray",
        calibration_digest=calibration.digest,
    )


def decode_all(
    stacks: Sequence[PatternStack], calibrations: Mapping[str, Calibration]
) -> list[Scan]:
    """Each stack with the calibration that it names."""
    scans = []
    for stack in stacks:
        if stack.calibration_digest not in calibrations:
            raise CalibrationError(
                f"stack {stack.name or '(unnamed)'}: taken with calibration "
                f"{stack.calibration_digest[:12]}, which is not "
                f"among {', '.join(d[:12] for d in calibrations) or 'none'}; load the calibration "
                "that the head had"
            )
        scans.append(decode(stack, calibrations[stack.calibration_digest]))
    return scans


@dataclass(frozen=True, eq=False)
class _Code:
    """What the images say, per camera pixel: projector coordinates and why a pixel has none."""

    column: Float32
    row: Float32 | None
    ok: Bool
    dark: Bool
    inconsistent: Bool
    white: NDArray[np.uint8]
    confidence: Float32


def _refuse_bad_spec(spec: PatternSpec, projector_size: tuple[int, int]) -> None:
    found = spec.problems()
    if not found:
        per_code = (
            spec.period_px / 2 * spec.code_step if spec.kind == "gray_phase" else spec.code_step
        )
        for name, bits, length in zip(
            ("column", "row"), (spec.column_bits, spec.row_bits), projector_size, strict=True
        ):
            if bits and per_code * 2**bits < length:
                found.append(
                    f"pattern.{name}_bits: {bits} bits x {per_code:g} px reach "
                    f"{per_code * 2**bits:g} px, projector has {length}"
                )
    if found:
        raise CalibrationError("pattern: " + "; ".join(found))


def _refuse_mismatch(stack: PatternStack, calibration: Calibration) -> None:
    name = f"stack {stack.name or '(unnamed)'}"
    width, height = calibration.camera.image_size
    spec = calibration.pattern
    _refuse_bad_spec(spec, calibration.projector.image_size)
    if stack.pattern != spec:
        fields = [
            f"{field}: stack {getattr(stack.pattern, field)}, calibration {getattr(spec, field)}"
            for field in (
                "kind",
                "axis",
                "period_px",
                "steps",
                "column_bits",
                "row_bits",
                "code_step",
            )
            if getattr(stack.pattern, field) != getattr(spec, field)
        ]
        raise CalibrationError(
            f"{name}: pattern differs from calibration {calibration.name}: {'; '.join(fields)}; "
            "decode with the calibration that was made for this pattern"
        )
    if stack.calibration_digest != calibration.digest:
        raise CalibrationError(
            f"{name}: taken with calibration {stack.calibration_digest[:12] or '(none)'}, asked "
            "to decode with "
            f"{calibration.digest[:12]} ({calibration.name}); use the calibration that the head had"
        )
    images = stack.images
    if images.dtype != np.uint8 or images.ndim != 4:
        raise CaptureError(
            f"{name}: images must be uint8 [E, N, H, W], got {images.dtype} {images.shape}"
        )
    if images.shape[2:] != (height, width):
        raise CaptureError(
            f"{name}: image size {images.shape[3]}x{images.shape[2]}, calibration "
            f"{calibration.name} expects {width}x{height}"
        )
    if images.shape[0] < 1 or images.shape[0] != len(stack.exposures):
        raise CaptureError(
            f"{name}: {images.shape[0]} exposures of images, {len(stack.exposures)} exposure times"
        )
    if images.shape[1] != spec.image_count:
        raise CaptureError(
            f"{name}: {images.shape[1]} pattern images, pattern {spec.kind} has "
            f"{spec.image_count}: "
            "an image is missing or too many were taken; capture again"
        )
    thumb = images[:, :, ::16, ::16]
    same = (thumb[:, 1:] == thumb[:, :-1]).all(axis=(2, 3))
    for exposure, first in np.argwhere(same):
        image = images[exposure, first]
        if image.max() != image.min() and np.array_equal(image, images[exposure, first + 1]):
            raise CaptureError(
                f"{name}: pattern images {first} and {first + 1} of exposure {exposure} are "
                "identical: "
                "the camera repeated a frame; capture again"
            )


def _merge_exposures(
    images: Sequence[NDArray[np.uint8]], saturation: int
) -> tuple[NDArray[np.uint8], Bool]:
    """[N, H, W] each, longest exposure first -> per pixel the longest unsaturated one [N, H, W],
    and where none is.
    """
    merged = images[0]
    clipped = merged.max(axis=0) >= saturation
    for exposure in images[1:]:
        if not clipped.any():
            break
        if merged is images[0]:
            merged = np.ascontiguousarray(merged).copy()
        pixels = np.flatnonzero(clipped)
        flat = merged.reshape(len(merged), -1)
        flat[:, pixels] = exposure.reshape(len(merged), -1)[:, pixels]
        clipped = merged.max(axis=0) >= saturation
    return merged, clipped


def _gray_to_index(bits: Sequence[Bool]) -> NDArray[np.uint16]:
    """Gray bits, MSB first -> binary code."""
    accumulated = bits[0].view(np.uint8)
    low = accumulated.copy()
    high = np.zeros_like(low)
    for bit in bits[1:]:
        accumulated = accumulated ^ bit.view(np.uint8)
        high = (high << 1) | (low >> 7)
        low = (low << 1) | accumulated
    index: NDArray[np.uint16] = high.astype(np.uint16)
    index <<= 8
    index |= low
    return index


def _decode_gray_phase(images: NDArray[np.uint8], spec: PatternSpec, limits: Limits) -> _Code:
    """Absolute column per pixel.

    The half-period code only selects which 2-pi period, so its bit edges cannot cause jumps.
    """
    white, black = images[0], images[1]
    middle = (white >> 1) + (black >> 1) + (white & black & 1)
    index = _gray_to_index([image > middle for image in images[2 : 2 + spec.column_bits]])
    contrast = np.where(white > black, white - black, 0)
    dark = contrast <= limits.contrast
    k = np.arange(spec.steps)
    kernel = np.stack(
        [np.cos(2 * np.pi * k / spec.steps), np.sin(2 * np.pi * k / spec.steps)]
    ).astype(np.float32)
    shifted = images[2 + spec.column_bits :].reshape(spec.steps, -1)
    cosine, sine = (kernel @ shifted.astype(np.float32)).reshape(2, *white.shape)
    modulation = np.sqrt(cosine * cosine + sine * sine) * np.float32(2 / spec.steps)
    dark |= modulation <= limits.modulation
    period = np.float32(spec.period_px)
    fraction = np.arctan2(sine, cosine) * np.float32(period / (2 * np.pi))
    centre = (index.astype(np.float32) + np.float32(0.5)) * (period / 2)
    column = fraction + period * np.rint((centre - fraction) * (1 / period))
    inconsistent = np.abs(column - centre) > np.float32(CODE_TOLERANCE_PERIODS) * period
    # Two surfaces in one pixel: their phases cancel, the white image does not notice.
    inconsistent |= modulation < np.float32(0.3) * contrast
    inconsistent &= ~dark
    if spec.code_step != 1:
        column *= np.float32(spec.code_step)
    column -= np.float32(0.5)
    return _Code(
        column=column,
        row=None,
        ok=~(dark | inconsistent),
        dark=dark,
        inconsistent=inconsistent,
        white=white,
        confidence=np.minimum(modulation * np.float32(1 / 127.5), np.float32(1)),
    )


def _decode_gray_pairs(images: NDArray[np.uint8], spec: PatternSpec, limits: Limits) -> _Code:
    """Integer codes from patterns and their inverses.

    A pixel whose pair differs too little has no code.
    """
    white, black = images[-2], images[-1]
    dark = white.astype(np.int16) - black <= limits.pair_white_minus_black
    weak = np.zeros(white.shape, np.bool_)
    least = np.full(white.shape, 255, np.uint8)
    coordinates = []
    first = 0
    for count in (spec.column_bits, spec.row_bits):
        bits = []
        for k in range(first, first + 2 * count, 2):
            bit = images[k] > images[k + 1]
            difference = np.where(bit, images[k] - images[k + 1], images[k + 1] - images[k])
            np.minimum(least, difference, out=least)
            bits.append(bit)
        first += 2 * count
        # Projector coordinate = code x code step, without half a step: calibrations are made with
        # the same rule.
        if bits:
            coordinates.append(_gray_to_index(bits).astype(np.float32) * np.float32(spec.code_step))
    weak = (least < limits.pair_contrast) & ~dark
    return _Code(
        column=coordinates[0],
        row=coordinates[1] if spec.row_bits else None,
        ok=~(dark | weak),
        dark=dark,
        inconsistent=weak,
        white=white,
        confidence=least.astype(np.float32) / np.float32(255),
    )


def _refuse_wrong_code_step(
    reprojection: float,
    keep: Bool,
    x: Float32,
    y: Float32,
    column: Float32,
    row: Float32 | None,
    calibration: Calibration,
    limits: Limits,
) -> None:
    """A median residual of many pixels has one cause: say so, and which code step would fit."""
    if reprojection < 10 * limits.gate_px or keep.mean() > 0.2 or keep.size < 1000:
        return
    step = calibration.pattern.code_step
    sample = slice(None, None, max(1, keep.size // 5000))
    fits = []
    for other in (1, 2, 3, 4, 6, 8):
        _, residual = triangulate(
            x[sample],
            y[sample],
            column[sample],
            row if row is None else row[sample],
            calibration,
            other / step,
        )
        if (
            other != step
            and residual is not None
            and float(np.median(residual)) < 2 * limits.gate_px
        ):
            fits.append(f"code_step {other} gives {float(np.median(residual)):.1f} px")
    raise CalibrationError(
        f"calibration {calibration.name}: median reprojection error {reprojection:.0f} px with "
        f"code_step {step}, "
        f"{100 * keep.mean():.1f} % of the points within {limits.gate_px:g} px; "
        + (
            f"{' and '.join(fits)}: set pattern.code_step to it"
            if fits
            else "no other code step fits: wrong calibration, pattern order or transform direction "
            "(must be projector-from-camera)"
        )
    )


def _flags(quality: ScanQuality) -> tuple[str, ...]:
    """What the shares mean.

    Usable poses have 38 % (one real capture) to 98 % (simulated) valid pixels; inconsistent are 15
    % of the real capture, under 0.1 % of the simulated ones.
    """
    flags = []
    if quality.valid_share == 0:
        flags.append(base.NO_DATA)
    if quality.dark_share > 0.85:
        flags.append(base.TOO_DARK)
    if quality.saturated_share > 0.05:
        flags.append(base.SATURATED)
    if quality.inconsistent_share > 0.25:
        flags.append(base.INCONSISTENT_CODE)
    if quality.valid_share < 0.15:
        flags.append(base.LOW_COVERAGE)
    return tuple(flags)
