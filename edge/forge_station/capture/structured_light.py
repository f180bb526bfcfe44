"""A pattern stack and its calibration -> organised scan. numpy only.

Does not know cameras or files. Two codes: Gray code of the half period plus phase shift
(sub-pixel), and integer Gray code with inverse pairs, columns or columns and rows; what the images
look like is in `capture.patterns`. Column coordinates are projector pixel indices (centre of pixel
0 is 0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from forge_station.capture import base
from forge_station.capture.base import PatternStack, Scan, ScanQuality
from forge_station.capture.calibration import Calibration, PatternSpec
from forge_station.capture.plausibility import (
    refuse_mismatch,
    refuse_points_off_the_tray,
    refuse_wrong_code_step,
)
from forge_station.capture.triangulation import (
    camera_rays,
    to_points,
    triangulate,
    without_flying_points,
)
from forge_station.errors import CalibrationError

Bool = NDArray[np.bool_]
Float32 = NDArray[np.float32]
# Half a half-period is 0.25; the rest is blur and noise at the bit edges.
CODE_TOLERANCE_PERIODS = 0.36
# Largest rms deviation of the phase images from a cosine: grey levels, and share of its amplitude.
PHASE_RESIDUAL, PHASE_RESIDUAL_SHARE = np.float32(2.0), np.float32(0.15)


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


def decode(stack: PatternStack, calibration: Calibration, limits: Limits | None = None) -> Scan:
    """Pattern stack -> organised points in the tray frame, or the camera's where no tray is known.

    Raises CaptureError for a stack that is incomplete, of the wrong size or repeats an image,
    CalibrationError when stack and calibration do not belong together or no code step fits. Poor
    light does not raise: see the flags of ScanQuality. About 40 ms for 640x480, 2 exposures x 17
    images on one core of an EPYC (2026-11).
    """
    limits = limits or Limits()
    refuse_mismatch(stack, calibration)
    code = read_code(stack, limits)
    saturated = code.saturated
    size = calibration.projector.image_size
    ok = code.ok & (code.column > 0) & (code.column < size[0] - 1)
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
        refuse_wrong_code_step(
            reprojection, keep, direction_x, direction_y, column, row, calibration, limits.gate_px
        )
    refuse_points_off_the_tray(direction_x[keep], direction_y[keep], depth[keep], calibration)
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
class Code:
    """What the images say, per camera pixel: projector coordinates and why a pixel has none.

    column, row float32 [H, W] projector pixels; ok [H, W]: both can be trusted. white uint8 [H, W]:
    the camera image under full light.
    """

    column: Float32
    row: Float32 | None
    ok: Bool
    saturated: Bool
    dark: Bool
    inconsistent: Bool
    white: NDArray[np.uint8]
    confidence: Float32


def read_code(stack: PatternStack, limits: Limits | None = None) -> Code:
    """Pattern stack -> projector coordinates, without a calibration; the stack is not checked."""
    limits = limits or Limits()
    longest_first = np.argsort(-np.asarray(stack.exposures), kind="stable")
    images, saturated = _merge_exposures(
        [stack.images[k] for k in longest_first], limits.saturation
    )
    reader = _decode_gray_phase if stack.pattern.kind == "gray_phase" else _decode_gray_pairs
    return reader(images, saturated, stack.pattern, limits)


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
        high <<= 1
        high |= low >> 7
        low <<= 1
        low |= accumulated
    index: NDArray[np.uint16] = high.astype(np.uint16)
    index <<= 8
    index |= low
    return index


def _decode_gray_phase(
    images: NDArray[np.uint8], saturated: Bool, spec: PatternSpec, limits: Limits
) -> Code:
    """Absolute column per pixel.

    The half-period code only selects which 2-pi period, so its bit edges cannot cause jumps.
    """
    white, black = images[0], images[1]
    middle = (white >> 1) + (black >> 1) + (white & black & 1)
    index = _gray_to_index([image > middle for image in images[2 : 2 + spec.column_bits]])
    contrast = np.where(white > black, white - black, 0)
    dark = contrast <= limits.contrast
    k = np.arange(spec.steps)
    turn = 2 * np.pi * k / spec.steps
    kernel = np.stack([np.cos(turn), np.sin(turn), np.ones(spec.steps)]).astype(np.float32)
    first = 2 + spec.column_bits
    shifted = images[first : first + spec.steps].reshape(spec.steps, -1).astype(np.float32)
    cosine, sine, total = (kernel @ shifted).reshape(3, *white.shape)
    modulation = np.sqrt(cosine * cosine + sine * sine) * np.float32(2 / spec.steps)
    dark |= modulation <= limits.modulation
    period = np.float32(spec.period_px)
    fraction = np.arctan2(sine, cosine) * np.float32(period / (2 * np.pi))
    centre = (index.astype(np.float32) + np.float32(0.5)) * (period / 2)
    column = fraction + period * np.rint((centre - fraction) * (1 / period))
    inconsistent = np.abs(column - centre) > np.float32(CODE_TOLERANCE_PERIODS) * period
    # Two surfaces in one pixel: their phases cancel, the white image does not notice.
    inconsistent |= modulation < np.float32(0.3) * contrast
    # Not a cosine over the steps: motion, flicker, or images in the wrong order.
    energy = np.einsum("kp,kp->p", shifted, shifted).reshape(white.shape)
    energy -= total * total * np.float32(1 / spec.steps)
    energy -= modulation * modulation * np.float32(spec.steps / 2)
    allowed = PHASE_RESIDUAL + PHASE_RESIDUAL_SHARE * modulation
    inconsistent |= energy > allowed * allowed * np.float32(spec.steps)
    inconsistent &= ~dark
    if spec.code_step != 1:
        column *= np.float32(spec.code_step)
    column -= np.float32(0.5)
    return Code(
        column=column,
        row=None,
        ok=~(dark | inconsistent | saturated),
        saturated=saturated,
        dark=dark,
        inconsistent=inconsistent,
        white=white,
        confidence=np.minimum(modulation * np.float32(1 / 127.5), np.float32(1)),
    )


def _decode_gray_pairs(
    images: NDArray[np.uint8], saturated: Bool, spec: PatternSpec, limits: Limits
) -> Code:
    """Integer codes from patterns and their inverses.

    A pixel whose pair differs too little has no code.
    """
    first = 2 * (spec.column_bits + spec.row_bits)
    white, black = images[first], images[first + 1]
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
    return Code(
        column=coordinates[0],
        row=coordinates[1] if spec.row_bits else None,
        ok=~(dark | weak | saturated),
        saturated=saturated,
        dark=dark,
        inconsistent=weak,
        white=white,
        confidence=least.astype(np.float32) / np.float32(255),
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
    if quality.inconsistent_share > 0.25 or quality.flying_share > 0.08:
        flags.append(base.INCONSISTENT_CODE)
    if quality.valid_share < 0.15:
        flags.append(base.LOW_COVERAGE)
    return tuple(flags)
