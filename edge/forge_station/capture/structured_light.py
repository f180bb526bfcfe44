"""A pattern stack and its calibration -> organised scan. numpy and OpenCV only.

Does not know cameras or files. Two codes: Gray code of the half period plus phase shift
(sub-pixel), and integer Gray code with inverse pairs, columns or columns and rows; what the images
look like is in `capture.patterns`. Column coordinates are projector pixel indices (centre of pixel
0 is 0).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station.capture import base
from forge_station.capture.base import PatternStack, Scan, ScanQuality
from forge_station.capture.calibration import Calibration, PatternSpec
from forge_station.capture.motion import BIN, binned, moved_px
from forge_station.capture.plausibility import (
    refuse_mismatch,
    refuse_points_off_the_tray,
    refuse_swapped_exposures,
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
_GATED_FIELDS = ("x", "y", "column", "row", "residual", "depth")
# Most pixels of a strip. Smaller ones stay in a core's own cache, but the threads then wait for the
# interpreter's lock more often than they compute.
_STRIP_PIXELS = 1 << 18
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

    Raises CaptureError for a stack that is incomplete, of the wrong size or order, repeats an image
    or has exposure times that cannot be, CalibrationError when stack and calibration do not belong
    together or no code step fits.
    Poor light, motion and blur do not raise: see the flags of ScanQuality. The result does not
    depend on `threads`. Figures: docs/SCANNING.md.
    """
    limits = limits or Limits()
    refuse_mismatch(stack, calibration)
    refuse_wrong_order(stack)
    refuse_swapped_exposures(stack)
    shape = stack.images.shape[2:]
    strips = _strips(shape)
    code, depth = _blank(shape, stack.pattern), np.full(shape, np.nan, np.float32)
    parts = _mapped(
        lambda rows: _measure(stack, calibration, limits, rows, code, depth), strips, threads
    )
    code = _with(code, [seen for seen, _ in parts])
    reprojection = None
    gated = [found for _, found in parts if found is not None and found.depth.size]
    if gated:
        x, y, column, row, residual, found = (
            np.concatenate([getattr(part, name) for part in gated]) for name in _GATED_FIELDS
        )
        reprojection = float(np.median(residual))
        keep = np.isfinite(found) & (found > 0) & (residual < limits.gate_px)
        refuse_wrong_code_step(reprojection, keep, x, y, column, row, calibration, limits.gate_px)
    kept = np.flatnonzero(np.isfinite(depth))
    some = kept[:: max(1, kept.size // 5000)]
    if kept.size >= 1000:
        refuse_points_off_the_tray(
            *camera_rays(calibration, some), depth.ravel()[some], calibration
        )
    points = np.empty((*shape, 3), np.float32)
    solid = _mapped(lambda rows: _points(depth, calibration, limits, rows, points), strips, threads)
    valid_share = sum(solid) / depth.size
    quality = ScanQuality(
        valid_share=valid_share,
        saturated_share=float(code.saturated.mean()),
        dark_share=float((code.dark & ~code.saturated).mean()),
        inconsistent_share=float((code.inconsistent & ~code.saturated).mean()),
        flying_share=kept.size / depth.size - valid_share,
        reprojection_px=reprojection,
        motion_px=_motion(code),
        blur_px=_blur(code, stack.pattern),
        decoded_share=float(code.ok.mean()),
    )
    pixel_mm = calibration.camera_pixel_mm
    if pixel_mm is None:
        nearest = float(np.median(depth.ravel()[kept])) if kept.size else 0.0
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
    shape = stack.images.shape[2:]
    code = _blank(shape, stack.pattern)
    seen = _mapped(lambda rows: _code(stack, limits, rows, code), _strips(shape), threads)
    return _with(code, seen)


@dataclass(frozen=True, eq=False)
class _Seen:
    """What is known of a strip apart from its pixels, see Code."""

    edges: tuple[int, int]
    views: tuple[_Views, ...]


def _code(stack: PatternStack, limits: Limits, rows: slice, code: Code) -> _Seen:
    """Fill these rows of the code."""
    longest_first = np.argsort(-np.asarray(stack.exposures), kind="stable")
    images, saturated = _merge_exposures(
        [stack.images[k][:, rows] for k in longest_first], limits.saturation
    )
    read = _decode_gray_phase if stack.pattern.kind == "gray_phase" else _decode_gray_pairs
    views = [_views(images, images, saturated, stack.pattern)]
    if len(stack.exposures) > 1:
        one, other = stack.images[0][:, rows], stack.images[-1][:, rows]
        clipped = np.maximum(one.max(axis=0), other.max(axis=0)) >= limits.saturation
        views.append(_views(one, other, clipped, stack.pattern))
    strip = _rows(code, rows)
    strip.saturated[:] = saturated
    edges = read(images, strip, stack.pattern, limits)
    np.logical_or(strip.dark, strip.inconsistent, out=strip.ok)
    strip.ok[:] |= saturated
    np.logical_not(strip.ok, out=strip.ok)
    return _Seen(edges, tuple(views))


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
    """Rows of an image in an even number of pieces, each of four rows or a multiple."""
    height, width = shape
    pieces = 2 * math.ceil(height * width / (2 * _STRIP_PIXELS))
    step = 4 * math.ceil(height / (4 * pieces))
    return [slice(top, min(top + step, height)) for top in range(0, height, step)]


def _mapped(do: Callable[[slice], _T], strips: Sequence[slice], threads: int) -> list[_T]:
    """numpy lets go of the interpreter's lock, so that threads share the work."""
    if threads <= 1 or len(strips) == 1:
        return [do(rows) for rows in strips]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(do, strips))


def _blank(shape: Sequence[int], spec: PatternSpec) -> Code:
    """A code to be filled in strips."""
    column, row, confidence = (np.empty(shape, np.float32) for _ in range(3))
    ok, saturated, dark, inconsistent = (np.empty(shape, np.bool_) for _ in range(4))
    return Code(
        column=column,
        row=row if spec.row_bits else None,
        ok=ok,
        saturated=saturated,
        dark=dark,
        inconsistent=inconsistent,
        white=np.empty(shape, np.uint8),
        confidence=confidence,
        edges=(0, 0),
    )


def _rows(code: Code, rows: slice) -> Code:
    """Some rows of the same arrays."""
    images = (f.name for f in fields(Code) if isinstance(getattr(code, f.name), np.ndarray))
    return replace(code, **{name: getattr(code, name)[rows] for name in images})


def _with(code: Code, seen: Sequence[_Seen]) -> Code:
    """The filled code with what is known of its strips, from the top."""
    return replace(
        code,
        views=tuple(
            _Views(*(np.concatenate([getattr(v, n) for v in same]) for n in _VIEW_FIELDS))
            for same in zip(*(strip.views for strip in seen), strict=True)
        ),
        edges=(sum(strip.edges[0] for strip in seen), sum(strip.edges[1] for strip in seen)),
    )


@dataclass(frozen=True, eq=False)
class _Gated:
    """The pixels of a strip with codes on both axes: rays, coordinates, residual px, depth mm."""

    x: Float32
    y: Float32
    column: Float32
    row: Float32
    residual: Float32
    depth: Float32


def _measure(
    stack: PatternStack,
    calibration: Calibration,
    limits: Limits,
    rows: slice,
    code: Code,
    depth: Float32,
) -> tuple[_Seen, _Gated | None]:
    """Fill these rows of the code and, where it can be believed, of the depth."""
    seen = _code(stack, limits, rows, code)
    strip, size = _rows(code, rows), calibration.projector.image_size
    ok = strip.ok & (strip.column > 0) & (strip.column < size[0] - 1)
    if strip.row is not None:
        ok &= (strip.row >= 0) & (strip.row <= size[1] - 1)
    inside = np.flatnonzero(ok)
    x, y = camera_rays(calibration, inside, rows.start)
    column = strip.column.ravel()[inside]
    row = None if strip.row is None else strip.row.ravel()[inside]
    found, residual = triangulate(x, y, column, row, calibration)
    keep = np.isfinite(found)
    keep &= found > 0
    if residual is not None:
        keep &= residual < limits.gate_px
    depth[rows].ravel()[inside[keep]] = found[keep]
    if row is None or residual is None:
        return seen, None
    return seen, _Gated(x, y, column, row, residual, found)


def _points(
    depth: Float32, calibration: Calibration, limits: Limits, rows: slice, points: Float32
) -> int:
    """Fill these rows of the points, without flying ones, and count them.

    The neighbours of a strip are looked at as well.
    """
    top = max(0, rows.start - 1)
    near = without_flying_points(
        depth[top : rows.stop + 1], calibration, limits.jump, limits.support
    )
    solid = near[rows.start - top :][: rows.stop - rows.start]
    to_points(depth[rows], solid, calibration, points[rows], rows.start)
    return int(np.count_nonzero(solid))


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
    images: NDArray[np.uint8], code: Code, spec: PatternSpec, limits: Limits
) -> tuple[int, int]:
    """Absolute column per pixel; fills all of the code but `saturated` and `ok`, returns its edges.

    The half-period code only selects which 2-pi period, so its bit edges cannot cause jumps.
    """
    white, black = images[0], images[1]
    middle = (white >> 1) + (black >> 1) + (white & black & 1)
    index = _gray_to_index([image > middle for image in images[2 : 2 + spec.column_bits]])
    contrast = cv2.subtract(white, black)
    turn = 2 * np.pi * np.arange(spec.steps) / spec.steps
    first = 2 + spec.column_bits
    # Not as a matrix product: the threads of a BLAS would compete with those of the strips.
    cosine, sine, total, energy = (np.zeros(white.shape, np.float32) for _ in range(4))
    light, part = np.empty_like(total), np.empty_like(total)
    for image, cos, sin in zip(images[first:], np.cos(turn), np.sin(turn), strict=False):
        light[:] = image
        cosine += np.multiply(light, np.float32(cos), out=part)
        sine += np.multiply(light, np.float32(sin), out=part)
        total += light
        energy += np.multiply(light, light, out=part)
    modulation = np.multiply(cosine, cosine, out=light)
    modulation += np.multiply(sine, sine, out=part)
    np.sqrt(modulation, out=modulation)
    modulation *= np.float32(2 / spec.steps)
    np.less_equal(contrast, limits.contrast, out=code.dark)
    code.dark[:] |= modulation <= limits.modulation
    np.minimum(modulation * np.float32(1 / 127.5), np.float32(1), out=code.confidence)
    # Not a cosine over the steps: motion, flicker, or images in the wrong order.
    total *= total
    total *= np.float32(1 / spec.steps)
    energy -= total
    np.multiply(modulation, modulation, out=part)
    part *= np.float32(spec.steps / 2)
    energy -= part
    np.multiply(modulation, PHASE_RESIDUAL_SHARE, out=part)
    part += PHASE_RESIDUAL
    part *= part
    part *= np.float32(spec.steps)
    np.greater(energy, part, out=code.inconsistent)
    # Two surfaces in one pixel: their phases cancel, the white image does not notice.
    code.inconsistent[:] |= modulation < np.multiply(contrast, np.float32(0.3), out=part)
    period = np.float32(spec.period_px)
    fraction = np.arctan2(sine, cosine, out=sine)
    fraction *= np.float32(period / (2 * np.pi))
    centre = np.add(index, np.float32(0.5), out=cosine)
    centre *= period / 2
    column = np.subtract(centre, fraction, out=code.column)
    column *= 1 / period
    np.rint(column, out=column)
    column *= period
    column += fraction
    centre -= column
    np.abs(centre, out=centre)
    code.inconsistent[:] |= centre > np.float32(CODE_TOLERANCE_PERIODS) * period
    code.inconsistent[:] &= ~code.dark
    if spec.code_step != 1:
        column *= np.float32(spec.code_step)
    column -= np.float32(0.5)
    code.white[:] = white
    return _edges(images[1 + spec.column_bits], white, black, contrast)


def _decode_gray_pairs(
    images: NDArray[np.uint8], code: Code, spec: PatternSpec, limits: Limits
) -> tuple[int, int]:
    """Integer codes from patterns and their inverses; fills and returns as `_decode_gray_phase`.

    A pixel whose pair differs too little has no code.
    """
    white, black = images[spec.white_at], images[spec.white_at + 1]
    lit = white.astype(np.int16) - black
    np.less_equal(lit, limits.pair_white_minus_black, out=code.dark)
    on_bit = 2 * (spec.column_bits - 1 - _edge_bit(spec))
    least = np.full(white.shape, 255, np.uint8)
    first = 0
    for count, coordinate in ((spec.column_bits, code.column), (spec.row_bits, code.row)):
        bits = []
        for k in range(first, first + 2 * count, 2):
            bits.append(images[k] > images[k + 1])
            np.minimum(least, cv2.absdiff(images[k], images[k + 1]), out=least)
        first += 2 * count
        # Projector coordinate = code x code step, without half a step: calibrations are made with
        # the same rule.
        if coordinate is not None:
            np.multiply(_gray_to_index(bits), np.float32(spec.code_step), out=coordinate)
    np.less(least, limits.pair_contrast, out=code.inconsistent)
    code.inconsistent[:] &= ~code.dark
    np.divide(least, np.float32(255), out=code.confidence)
    code.white[:] = white
    return _edges(images[on_bit], white, black, lit)


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
