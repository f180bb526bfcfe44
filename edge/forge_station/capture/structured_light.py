"""A pattern stack and its calibration -> organised scan. numpy only.

Does not know cameras or files. Two codes: Gray code of the half period plus phase shift
(sub-pixel), and integer Gray code with inverse pairs, columns or columns and rows; what the images
look like is in `capture.patterns`. Column coordinates are projector pixel indices (centre of pixel
0 is 0).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from forge_station.capture import base
from forge_station.capture.base import PatternStack, Scan, ScanQuality
from forge_station.capture.calibration import Calibration, PatternSpec
from forge_station.capture.motion import BIN, binned, moved_px
from forge_station.capture.plausibility import (
    refuse_mismatch,
    refuse_points_off_the_tray,
    refuse_wrong_code_step,
    refuse_wrong_order,
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
_T = TypeVar("_T")
THREADS = 2
# A bit's edges for the focus: least contrast (grey levels) and pixels, distance, and the width from
# 20 to 80 % of an edge in standard deviations of its blur.
_EDGE_CONTRAST, _LEAST_PIXELS, _EDGES_APART_PX, _EDGE_WIDTH = 20, 500, 16.0, 1.683
_VIEW_FIELDS = ("first", "last", "usable")
# Pixels of a strip: what one thread works on stays in its cache.
_STRIP_PIXELS = 1 << 16
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
    motion_px: float = 0.5
    blur_px: float = 3.0


def decode(
    stack: PatternStack,
    calibration: Calibration,
    limits: Limits | None = None,
    threads: int = THREADS,
) -> Scan:
    """Pattern stack -> organised points in the tray frame, or the camera's where no tray is known.

    Raises CaptureError for a stack that is incomplete, of the wrong size or order or repeats an
    image, CalibrationError when stack and calibration do not belong together or no code step fits.
    Poor light, motion and blur do not raise: see the flags of ScanQuality. The result does not
    depend on `threads`. Figures: docs/SCANNING.md.
    """
    limits = limits or Limits()
    refuse_mismatch(stack, calibration)
    refuse_wrong_order(stack)
    shape = stack.images.shape[2:]
    strips = _strips(shape)
    parts = _mapped(lambda rows: _measure(stack, calibration, limits, rows), strips, threads)
    code = _joined([part.code for part in parts])
    pixels, x, y, column, depth = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("pixels", "x", "y", "column", "depth")
    )
    reprojection = None
    keep = np.isfinite(depth) & (depth > 0)
    rows = [part.row for part in parts if part.row is not None]
    residuals = [part.residual for part in parts if part.residual is not None]
    if residuals and pixels.size:
        residual = np.concatenate(residuals)
        reprojection = float(np.median(residual))
        keep &= residual < limits.gate_px
        refuse_wrong_code_step(
            reprojection, keep, x, y, column, np.concatenate(rows), calibration, limits.gate_px
        )
    kept = np.flatnonzero(keep)
    some = kept[:: max(1, kept.size // 5000)]
    if kept.size >= 1000:
        refuse_points_off_the_tray(x[some], y[some], depth[some], calibration)
    depth_image = np.full(shape, np.nan, np.float32)
    depth_image.ravel()[pixels] = np.where(keep, depth, np.float32(np.nan))
    finished = _mapped(
        lambda rows: _points(depth_image, calibration, limits, rows), strips, threads
    )
    points = np.concatenate(finished)
    valid_share = float(np.isfinite(points[..., 2]).mean())
    quality = ScanQuality(
        valid_share=valid_share,
        saturated_share=float(code.saturated.mean()),
        dark_share=float((code.dark & ~code.saturated).mean()),
        inconsistent_share=float((code.inconsistent & ~code.saturated).mean()),
        flying_share=kept.size / depth_image.size - valid_share,
        reprojection_px=reprojection,
        motion_px=_motion(code),
        blur_px=_blur(code, stack.pattern),
        decoded_share=float(code.ok.mean()),
    )
    pixel_mm = calibration.camera_pixel_mm
    if pixel_mm is None:
        nearest = float(np.median(depth[kept])) if kept.size else 0.0
        pixel_mm = nearest / float(calibration.camera.matrix[0, 0])
    return Scan(
        points=points,
        intensity=code.white,
        confidence=code.confidence,
        quality=replace(quality, flags=_flags(quality, limits)),
        camera_pixel_mm=pixel_mm,
        frame="camera" if calibration.tray_from_camera is None else "tray",
        calibration_digest=calibration.digest,
    )


def decode_all(
    stacks: Sequence[PatternStack],
    calibrations: Mapping[str, Calibration],
    limits: Limits | None = None,
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
        scans.append(decode(stack, calibrations[stack.calibration_digest], limits))
    return scans


@dataclass(frozen=True, eq=False)
class Code:
    """What the images say, per camera pixel: projector coordinates and why a pixel has none.

    column, row float32 [H, W] projector pixels; ok [H, W]: both can be trusted. white uint8 [H, W]:
    the camera image under full light. views: the projector's light early and late (see `motion`).
    edges: pixels on a transition of a bit, and pixels looked at.
    """

    column: Float32
    row: Float32 | None
    ok: Bool
    saturated: Bool
    dark: Bool
    inconsistent: Bool
    white: NDArray[np.uint8]
    confidence: Float32
    edges: tuple[int, int]
    views: tuple[_Views, ...] = ()


@dataclass(frozen=True, eq=False)
class _Views:
    """White without the surrounding light, early and late, and where both can be compared; binned.

    Of one exposure each: within the merged one, and of the first and the last.
    """

    first: Float32
    last: Float32
    usable: Bool


def read_code(stack: PatternStack, limits: Limits | None = None, threads: int = THREADS) -> Code:
    """Pattern stack -> projector coordinates, without a calibration; the stack is not checked."""
    limits = limits or Limits()
    strips = _strips(stack.images.shape[2:])
    return _joined(_mapped(lambda rows: _code(stack, limits, rows), strips, threads))


def _code(stack: PatternStack, limits: Limits, rows: slice) -> Code:
    longest_first = np.argsort(-np.asarray(stack.exposures), kind="stable")
    images, saturated = _merge_exposures(
        [stack.images[k][:, rows] for k in longest_first], limits.saturation
    )
    reader = _decode_gray_phase if stack.pattern.kind == "gray_phase" else _decode_gray_pairs
    views = [_views(images, images, saturated, stack.pattern)]
    if len(stack.exposures) > 1:
        one, other = stack.images[0][:, rows], stack.images[-1][:, rows]
        clipped = np.maximum(one.max(axis=0), other.max(axis=0)) >= limits.saturation
        views.append(_views(one, other, clipped, stack.pattern))
    return replace(reader(images, saturated, stack.pattern, limits), views=tuple(views))


def _views(
    early: NDArray[np.uint8], late: NDArray[np.uint8], clipped: Bool, spec: PatternSpec
) -> _Views:
    """From images [N, H, W] of the exposures that were taken first and last."""
    at = spec.white_at
    dark = binned(late[at + 1])
    if spec.kind == "gray_phase":
        first = binned(early[at]) - binned(early[at + 1])
    else:
        first = binned(early[0]) + binned(early[1]) - 2 * binned(early[at + 1])
    if spec.white_last or spec.kind == "gray_pairs":
        last = binned(late[-1] if spec.white_last else late[at]) - dark
    else:
        shifts = late[2 + spec.column_bits :].sum(axis=0, dtype=np.uint16)
        last = binned(shifts) * np.float32(2 / spec.steps) - 2 * dark
    height, width = (side * BIN for side in dark.shape)
    free = ~clipped[:height, :width]
    usable = free[0::2, 0::2] & free[1::2, 0::2] & free[0::2, 1::2] & free[1::2, 1::2]
    return _Views(first, last, usable)


def _strips(shape: Sequence[int]) -> list[slice]:
    """Rows of an image in pieces of an even number of rows."""
    height, width = shape
    step = max(4, _STRIP_PIXELS // width // 4 * 4)
    return [slice(top, min(top + step, height)) for top in range(0, height, step)]


def _mapped(do: Callable[[slice], _T], strips: Sequence[slice], threads: int) -> list[_T]:
    """numpy lets go of the interpreter's lock, so that threads share the work."""
    if threads <= 1 or len(strips) == 1:
        return [do(rows) for rows in strips]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(do, strips))


def _joined(parts: Sequence[Code]) -> Code:
    """Strips of an image, one below the other."""
    if len(parts) == 1:
        return parts[0]
    names = ("column", "ok", "saturated", "dark", "inconsistent", "white", "confidence")
    rows = [part.row for part in parts if part.row is not None]
    return Code(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names},
        row=np.concatenate(rows) if rows else None,
        views=tuple(
            _Views(*(np.concatenate([getattr(v, n) for v in same]) for n in _VIEW_FIELDS))
            for same in zip(*(part.views for part in parts), strict=True)
        ),
        edges=(sum(part.edges[0] for part in parts), sum(part.edges[1] for part in parts)),
    )


@dataclass(frozen=True, eq=False)
class _Measured:
    """A strip: its code, and for each pixel with a code: number, ray, coordinates and depth."""

    code: Code
    pixels: NDArray[np.intp]
    x: Float32
    y: Float32
    column: Float32
    row: Float32 | None
    depth: Float32
    residual: Float32 | None


def _measure(
    stack: PatternStack, calibration: Calibration, limits: Limits, rows: slice
) -> _Measured:
    code = _code(stack, limits, rows)
    size = calibration.projector.image_size
    ok = code.ok & (code.column > 0) & (code.column < size[0] - 1)
    if code.row is not None:
        ok &= (code.row >= 0) & (code.row <= size[1] - 1)
    inside = np.flatnonzero(ok)
    pixels = inside + rows.start * ok.shape[1]
    x, y = camera_rays(calibration, pixels)
    column = code.column.ravel()[inside]
    row = None if code.row is None else code.row.ravel()[inside]
    depth, residual = triangulate(x, y, column, row, calibration)
    return _Measured(code, pixels, x, y, column, row, depth, residual)


def _points(depth: Float32, calibration: Calibration, limits: Limits, rows: slice) -> Float32:
    """Points [rows, W, 3] without flying ones; the neighbours of a strip are looked at as well."""
    top = max(0, rows.start - 1)
    near = without_flying_points(
        depth[top : rows.stop + 1], calibration, limits.jump, limits.support
    )
    solid = near[rows.start - top :][: rows.stop - rows.start]
    return to_points(depth[rows], solid, calibration, rows.start)


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
    first = 2 + spec.column_bits
    shifted = images[first : first + spec.steps].reshape(spec.steps, -1).astype(np.float32)
    # Not as a matrix product: the threads of a BLAS would compete with those of the strips.
    sums = np.zeros((3, shifted.shape[1]), np.float32)
    for image, cos, sin in zip(shifted, np.cos(turn), np.sin(turn), strict=True):
        sums[0] += image * np.float32(cos)
        sums[1] += image * np.float32(sin)
        sums[2] += image
    cosine, sine, total = sums.reshape(3, *white.shape)
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
        edges=_edges(images[1 + spec.column_bits], white, black, contrast),
    )


def _decode_gray_pairs(
    images: NDArray[np.uint8], saturated: Bool, spec: PatternSpec, limits: Limits
) -> Code:
    """Integer codes from patterns and their inverses.

    A pixel whose pair differs too little has no code.
    """
    white, black = images[spec.white_at], images[spec.white_at + 1]
    lit = white.astype(np.int16) - black
    dark = lit <= limits.pair_white_minus_black
    on_bit = 2 * (spec.column_bits - 1 - _edge_bit(spec))
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
        edges=_edges(images[on_bit], white, black, lit),
    )


def _edges(
    bit: NDArray[np.uint8],
    white: NDArray[np.uint8],
    black: NDArray[np.uint8],
    contrast: NDArray[np.generic],
) -> tuple[int, int]:
    """(pixels between 20 and 80 % of the way from black to white, pixels looked at)."""
    some = slice(None, None, 4)
    step = contrast[some].astype(np.int16)
    level = 2 * bit[some].astype(np.int16) - white[some] - black[some]
    looked = step > _EDGE_CONTRAST
    return int((looked & (10 * np.abs(level) < 6 * step)).sum()), int(looked.sum())


def _edge_bit(spec: PatternSpec) -> int:
    """Number of the Gray bit (0: the last) whose edges are far enough apart to look at one."""
    if spec.kind == "gray_phase":
        return 0
    bit = max(0, math.ceil(math.log2(_EDGES_APART_PX / (2 * spec.code_step))))
    return min(bit, spec.column_bits - 1)


def _blur(code: Code, spec: PatternSpec) -> float | None:
    """Standard deviation of the blur of camera and projector together, camera pixels.

    From the share of pixels on the edges of a bit. None where too little is lit.
    """
    on_edge, looked = code.edges
    some, next_row = code.column[:-1:4], code.column[1::4]
    ok, ok_next = code.ok[:-1:4], code.ok[1::4]
    across = (some[:, 1:] - some[:, :-1])[ok[:, 1:] & ok[:, :-1]]
    down = (next_row - some)[ok & ok_next]
    if looked < _LEAST_PIXELS or across.size < _LEAST_PIXELS:
        return None
    # Depth jumps are no slope.
    most = np.float32(4 * max(1, spec.code_step))
    slope = math.hypot(*(float(d[np.abs(d) < most].mean()) for d in (across, down) if d.size))
    if spec.kind == "gray_phase":
        apart = spec.period_px * spec.code_step
    else:
        apart = spec.code_step * 2.0 ** (1 + _edge_bit(spec))
    if not 0.02 < slope < 50:
        return None
    return on_edge / looked * apart / slope / _EDGE_WIDTH


def _motion(code: Code) -> float | None:
    """The most that anything moved within an exposure, or from the first to the last of them."""
    moved = [moved_px(view.first, view.last, view.usable) for view in code.views]
    return max((value for value in moved if value is not None), default=None)


def _flags(quality: ScanQuality, limits: Limits) -> tuple[str, ...]:
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
    if quality.motion_px is not None and quality.motion_px > limits.motion_px:
        flags.append(base.MOTION)
    if quality.blur_px is not None and quality.blur_px > limits.blur_px:
        flags.append(base.OUT_OF_FOCUS)
    return tuple(flags)
