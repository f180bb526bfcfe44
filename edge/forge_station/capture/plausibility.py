"""Do a pattern stack and a calibration belong together, and can the points be true? If not: why.

Does not decode. Every refusal names the stack or calibration, what was expected and what to do.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy.typing import NDArray

from forge_station.capture.base import PatternStack
from forge_station.capture.calibration import Calibration, PatternSpec
from forge_station.capture.triangulation import triangulate
from forge_station.errors import CalibrationError, CaptureError

Bool = NDArray[np.bool_]
Float32 = NDArray[np.float32]
# Grey levels from the darkest to the brightest image of a lit pixel; how many tell an order.
_LIT, _LEAST_LIT, _LIT_PIXELS = 40, 12, 50


def refuse_bad_spec(spec: PatternSpec, projector_size: tuple[int, int]) -> None:
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


def refuse_mismatch(stack: PatternStack, calibration: Calibration) -> None:
    name = f"stack {stack.name or '(unnamed)'}"
    width, height = calibration.camera.image_size
    spec = calibration.pattern
    refuse_bad_spec(spec, calibration.projector.image_size)
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
    if not all(math.isfinite(exposure) and exposure > 0 for exposure in stack.exposures):
        raise CaptureError(
            "exposure times that cannot be",
            which=name,
            expected="finite numbers above 0, relative to the longest",
            got=", ".join(f"{exposure:g}" for exposure in stack.exposures),
            action="correct them where the stack is made",
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


def refuse_wrong_order(stack: PatternStack) -> None:
    """White must be the brightest image and black the darkest, where the projector reaches.

    A sequence that began late or lost a pulse has them elsewhere: say by how many images.
    """
    thumb = stack.images[:, :, ::16, ::16].reshape(*stack.images.shape[:2], -1).astype(np.int16)
    for exposure, images in enumerate(thumb):
        contrast = images.max(axis=0) - images.min(axis=0)
        # A short exposure has less of everything.
        least = min(_LIT, max(_LEAST_LIT, float(np.percentile(contrast, 95)) / 2))
        lit = images[:, contrast > least]
        if lit.shape[1] < _LIT_PIXELS:
            continue
        fits = [_in_order(lit, stack.pattern.white_at + late) for late in range(len(lit))]
        if fits[0] > 0.5:
            continue
        late = int(np.argmax(fits))
        known = fits[late] > 0.5
        raise CaptureError(
            "white and black are not where the pattern has them",
            which=f"stack {stack.name or '(unnamed)'}, exposure {exposure}",
            expected=f"white image {stack.pattern.white_at}, black after it",
            got=f"a sequence that is {late} images late" if known else "another order",
            action="start projector and camera together, check the trigger wire, capture again"
            if known
            else "check the order of the images, and that they belong to this pattern",
        )


def refuse_swapped_exposures(stack: PatternStack) -> None:
    """The white image of a longer exposure must not be darker than that of a shorter one."""
    white = stack.images[:, stack.pattern.white_at, ::16, ::16].astype(np.int16)
    order = np.argsort(-np.asarray(stack.exposures), kind="stable")
    for longer, shorter in itertools.pairwise(order):
        lit = white[shorter] > _LIT
        darker = white[longer] + 4 + white[shorter] // 8 < white[shorter]
        if lit.sum() >= _LIT_PIXELS and darker[lit].mean() > 0.5:
            raise CaptureError(
                "the images of a longer exposure are darker than those of a shorter one",
                which=f"stack {stack.name or '(unnamed)'}, exposures {longer} and {shorter}",
                expected=f"brighter at {stack.exposures[longer]:g} than at "
                f"{stack.exposures[shorter]:g}",
                got=f"mean {white[longer][lit].mean():.0f} and {white[shorter][lit].mean():.0f} "
                "of 255",
                action="exposure times in the order of their images; automatic exposure and gain "
                "of the camera off",
            )


def _in_order(lit: NDArray[np.int16], white_at: int) -> float:
    """Share of pixels [N, P] that are brightest in image `white_at` and darkest in the next."""
    white, black = lit[white_at % len(lit)], lit[(white_at + 1) % len(lit)]
    slack = 4 + (white - black) // 8
    fits = (white + slack >= lit.max(axis=0)) & (black - slack <= lit.min(axis=0))
    return float(fits.mean())


def refuse_wrong_code_step(
    reprojection: float,
    keep: Bool,
    x: Float32,
    y: Float32,
    column: Float32,
    row: Float32 | None,
    calibration: Calibration,
    gate_px: float,
) -> None:
    """A median residual of many pixels has one cause: say so, and which code step would fit."""
    if reprojection < 4 * gate_px or keep.mean() > 0.1 or keep.size < 1000:
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
        if other != step and residual is not None and float(np.median(residual)) < 2 * gate_px:
            fits.append(f"code_step {other} gives {float(np.median(residual)):.1f} px")
    raise CalibrationError(
        f"calibration {calibration.name}: median reprojection error {reprojection:.0f} px with "
        f"code_step {step}, "
        f"{100 * keep.mean():.1f} % of the points within {gate_px:g} px; "
        + (
            f"{' and '.join(fits)}: set pattern.code_step to it"
            if fits
            else "no other code step fits: wrong calibration, pattern order or transform direction "
            "(must be projector-from-camera)"
        )
    )


def refuse_points_off_the_tray(
    x: Float32, y: Float32, depth: Float32, calibration: Calibration
) -> None:
    """A head that looks at its tray sees points near z = 0; a wrong code step sees none there.

    Some thousand rays and depths will do.
    """
    reach, pose = calibration.range_mm, calibration.tray_from_camera
    if reach is None or pose is None or not depth.size:
        return
    ray = pose[2, 0] * x + pose[2, 1] * y + pose[2, 2]
    height = np.abs(ray * depth + pose[2, 3])
    middle = float(np.median(height))
    if middle > 0.12 * reach and float((height < 0.03 * reach).mean()) < 0.02:
        raise CalibrationError(
            f"calibration {calibration.name}: half of the points lie more than {middle:.0f} mm "
            f"from the tray plane, the head is {reach:.0f} mm away: code step "
            f"({calibration.pattern.code_step}), calibration or head pose is wrong, or something "
            "covers the tray"
        )
