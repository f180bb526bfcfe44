"""Camera and projector calibration from scans of a board: corners, lenses, their pose, the tray.

The method is that of Moreno and Taubin (2012): the projector is an inverse camera, whose image of a
board corner is the projected code at that corner. The code around each corner is fitted with a
second-order polynomial (a local homography to second order, which also works for columns alone), so
integer codes give sub-pixels. Then Zhang's method for both devices and OpenCV's stereo calibration
for the pose between them. Knows no files and writes no text for people.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station.capture.base import PatternStack
from forge_station.capture.board import Board, spacing
from forge_station.capture.calibration import Calibration, Optics, PatternSpec
from forge_station.capture.structured_light import Code, Limits, read_code
from forge_station.capture.triangulation import triangulate
from forge_station.errors import CalibrationError, CaptureError

Float = NDArray[np.float64]
# Black print returns a tenth of the light that a part does.
_INK = Limits(contrast=6, modulation=3.0, pair_contrast=2, pair_white_minus_black=6)
_WINDOW_PX = (5, 24)  # half size of the neighbourhood of a corner, least and most
_WINDOW_OF_SQUARE = 0.45
_FILLED = 0.5  # share of the neighbourhood that must have a code
LEAST_CORNERS = 8  # of one pose: fewer do not hold a plane's pose
LEAST_POSES = 4


@dataclass(frozen=True, eq=False)
class View:
    """One pose of the board, as both devices see it.

    ids int [N] of the board's corners; camera, projector float64 [N, 2] pixels, the projector's in
    true pixel indices whatever the code; its rows are NaN where only columns are coded. fit_px:
    median rms of the code around its fit. white: the camera image. lost: corners seen by the camera
    without a usable code.
    """

    name: str
    ids: NDArray[np.int32]
    camera: Float
    projector: Float
    fit_px: float
    lost: int
    white: NDArray[np.uint8]

    @property
    def both_axes(self) -> bool:
        """The projector's rows are known too."""
        return bool(np.isfinite(self.projector).all())


@dataclass(frozen=True, eq=False)
class Deviation:
    """One standard deviation of the camera's or projector's found values, px."""

    focal_px: float
    centre_px: float


@dataclass(frozen=True, eq=False)
class PoseResidual:
    """rms reprojection errors of one pose, px, and how the board was held.

    tilt_deg (about the image's x and y axis) and distance_mm of the board in the camera frame.
    camera_error, projector_error float64 [N, 2]: per corner, found minus true.
    """

    name: str
    corners: int
    camera_px: float
    projector_px: float
    tilt_deg: tuple[float, float]
    distance_mm: float
    camera_error: Float
    projector_error: Float

    @property
    def worst_px(self) -> float:
        return max(self.camera_px, self.projector_px)


@dataclass(frozen=True, eq=False)
class Solution:
    """What was found. rms in px over all corners: each device alone, and both together
    (with the board where the camera sees it).
    """

    camera: Optics
    projector: Optics
    projector_from_camera: Float
    camera_rms_px: float
    projector_rms_px: float
    stereo_rms_px: float
    camera_deviation: Deviation
    projector_deviation: Deviation
    poses: tuple[PoseResidual, ...]

    def calibration(self, name: str, pattern: PatternSpec, notes: dict[str, str]) -> Calibration:
        """The calibration of scans that project `pattern`; the tray is not known yet."""
        shift = half_code(pattern)
        matrix = self.projector.matrix.copy()
        matrix[:2, 2] -= shift
        return Calibration(
            name=name,
            camera=self.camera,
            projector=replace(self.projector, matrix=matrix),
            projector_from_camera=self.projector_from_camera,
            tray_from_camera=None,
            pattern=pattern,
            rms_px=self.stereo_rms_px,
            notes=notes,
        )


def half_code(pattern: PatternSpec) -> float:
    """Projector pixels from what the decoder says to the middle of the code it means.

    Pairs of Gray code are decoded as code x step, without half a step; phases exactly.
    """
    return (pattern.code_step - 1) / 2 if pattern.kind == "gray_pairs" else 0.0


def look(stack: PatternStack, board: Board) -> View:
    """Find the board in one stack, and the projected code at its corners.

    Raises CaptureError, with what to change, when the board cannot be seen or has no code.
    """
    code = read_code(stack, _INK)
    corners = board.find(code.white)
    name = stack.name or "the scan"
    if len(corners.ids) < LEAST_CORNERS:
        raise CaptureError(
            "board not found",
            which=name,
            expected=f"{LEAST_CORNERS} corners or more of {board}",
            got=f"{len(corners.ids)} corners, {_light(code)}",
            action="check the board's kind and its layout; the projector must light all of it",
        )
    side = spacing(corners.pixels)
    half = int(np.clip(round(_WINDOW_OF_SQUARE * side), *_WINDOW_PX))
    axes = [code.column] if code.row is None else [code.column, code.row]
    fits = [_at(axes, code.ok, pixel, half, stack.pattern.code_step) for pixel in corners.pixels]
    good = np.array([fit is not None for fit in fits])
    if good.sum() < LEAST_CORNERS:
        raise CaptureError(
            "no projected code on the board",
            which=name,
            expected=f"a code at {LEAST_CORNERS} corners or more",
            got=f"{good.sum()} of {len(good)} corners, {_light(code)}",
            action="light the board with the projector alone, focus it, and check the order of the "
            "pattern images",
        )
    found = [fit for fit in fits if fit is not None]
    projector = np.full((len(found), 2), np.nan)
    projector[:, : len(axes)] = [fit[0] for fit in found]
    return View(
        name=name,
        ids=corners.ids[good],
        camera=corners.pixels[good],
        projector=projector + half_code(stack.pattern),
        fit_px=float(np.median([fit[1] for fit in found])),
        lost=int((~good).sum()),
        white=code.white,
    )


def _light(code: Code) -> str:
    """How bright the image is, and what to do where that is the fault."""
    bright = float(np.percentile(code.white, 99))
    saturated = float(code.saturated.mean())
    advice = "" if bright >= 60 else ": turn the exposure up"
    if saturated > 0.2:
        advice = f", {saturated:.0%} saturated: turn the exposure down"
    return f"brightest part {bright:.0f} of 255{advice}"


def _at(
    axes: Sequence[NDArray[np.float32]],
    ok: NDArray[np.bool_],
    pixel: Float,
    half: int,
    code_step: int,
) -> tuple[Float, float] | None:
    """Code at a camera pixel by a second-order fit around it, and the fit's rms; None: no code."""
    x0, y0 = (round(float(v)) for v in pixel)
    rows, columns = slice(max(y0 - half, 0), y0 + half + 1), slice(max(x0 - half, 0), x0 + half + 1)
    inside = ok[rows, columns]
    if inside.sum() < _FILLED * (2 * half + 1) ** 2:
        return None
    y, x = np.nonzero(inside)
    dx, dy = x + columns.start - pixel[0], y + rows.start - pixel[1]
    terms = np.stack([np.ones(dx.size), dx, dy, dx * dx, dx * dy, dy * dy], axis=1)
    terms[:, 1:3] /= half
    terms[:, 3:] /= half * half
    values = np.stack([axis[rows, columns][inside] for axis in axes], axis=1).astype(np.float64)
    keep = np.ones(dx.size, np.bool_)
    for _ in range(3):
        solved = np.linalg.lstsq(terms[keep], values[keep], rcond=None)[0]
        error = np.abs(values - terms @ solved).max(axis=1)
        limit = max(4.5 * float(np.median(error)), 1.0 * code_step)
        if (error <= limit).sum() < 0.5 * keep.size:
            return None
        keep = error <= limit
    return solved[0], float(np.sqrt((error[keep] ** 2).mean()))


def solve(
    views: Sequence[View],
    board: Board,
    camera_size: tuple[int, int],
    projector_size: tuple[int, int],
    *,
    sixth_order: bool = False,
) -> Solution:
    """Calibrate both devices and the pose between them from views of both axes.

    `sixth_order`: also fit k3, for wide lenses. Raises CalibrationError for too few poses, views
    of columns alone, or when no lens fits.
    """
    if len(views) < LEAST_POSES:
        raise CalibrationError(
            "too few poses to calibrate", expected=f"{LEAST_POSES} or more", got=len(views)
        )
    one_axis = [view.name for view in views if not view.both_axes]
    if one_axis:
        raise CalibrationError(
            "a projector cannot be calibrated from columns alone",
            which=", ".join(one_axis),
            expected="scans with a pattern that codes columns and rows (axis: both)",
            action="record the poses with the calibration pattern; see docs/CALIBRATION.md",
        )
    objects = [board.corners_mm[view.ids].astype(np.float32) for view in views]
    seen = [view.camera.astype(np.float32) for view in views]
    lit = [view.projector.astype(np.float32) for view in views]
    flags = 0 if sixth_order else cv2.CALIB_FIX_K3
    camera = _one(objects, seen, camera_size, flags, "camera")
    projector = _one(objects, lit, projector_size, flags, "projector")
    # stereoCalibrate takes all pixels as equally good. The code is noisier than the corners of the
    # camera, so the projector's image is scaled until both residuals are alike.
    weight = np.diag([camera.rms_px / projector.rms_px] * 2 + [1.0])
    found = cv2.stereoCalibrate(
        objects, seen, [image * np.float32(weight[0, 0]) for image in lit],
        camera.matrix.copy(), camera.distortion.copy(),
        weight @ projector.matrix, projector.distortion.copy(), camera_size,
        flags=flags | cv2.CALIB_USE_INTRINSIC_GUESS,
        criteria=(cv2.TERM_CRITERIA_COUNT + cv2.TERM_CRITERIA_EPS, 100, 1e-9),
    )  # fmt: skip
    k1, d1, k2, d2, rotation, translation = found[1:7]
    transform = np.eye(4)
    transform[:3, :3], transform[:3, 3] = rotation, np.ravel(translation)
    optics = Optics(camera_size, np.asarray(k1, np.float64), np.ravel(d1)[:5].astype(np.float64))
    lamp = Optics(projector_size, np.linalg.inv(weight) @ k2, np.ravel(d2)[:5].astype(np.float64))
    poses = tuple(_residual(view, board, optics, lamp, transform) for view in views)
    squares = [p.corners * (p.camera_px**2 + p.projector_px**2) / 2 for p in poses]
    return Solution(
        camera=optics,
        projector=lamp,
        projector_from_camera=transform,
        camera_rms_px=camera.rms_px,
        projector_rms_px=projector.rms_px,
        stereo_rms_px=float(np.sqrt(sum(squares) / sum(p.corners for p in poses))),
        camera_deviation=camera.deviation,
        projector_deviation=projector.deviation,
        poses=poses,
    )


@dataclass(frozen=True, eq=False)
class _Lens:
    matrix: Float
    distortion: Float
    rms_px: float
    deviation: Deviation


def _one(
    objects: Sequence[Any], pixels: Sequence[Any], size: tuple[int, int], flags: int, what: str
) -> _Lens:
    """One device by itself."""
    try:
        found = cv2.calibrateCameraExtended(objects, pixels, size, None, None, flags=flags)  # type: ignore[call-overload]
    except cv2.error as error:
        raise CalibrationError(
            f"no {what} fits the poses",
            got=str(error).strip().splitlines()[-1],
            action="tilt the board about both axes; poses that are all parallel say too little",
        ) from error
    rms, matrix, distortion, _, _, spread = found[:6]
    spread = np.ravel(spread)
    if not np.isfinite(rms) or not np.isfinite(matrix).all():
        raise CalibrationError(f"no {what} fits the poses", expected="a finite residual", got=rms)
    return _Lens(
        np.asarray(matrix, np.float64),
        np.ravel(distortion)[:5].astype(np.float64),
        float(rms),
        Deviation(float(np.max(spread[:2])), float(np.max(spread[2:4]))),
    )


def _residual(
    view: View, board: Board, camera: Optics, projector: Optics, projector_from_camera: Float
) -> PoseResidual:
    pose = camera_pose(view, board, camera)
    seen = board.corners_mm[view.ids] @ pose[:3, :3].T + pose[:3, 3]
    there = seen @ projector_from_camera[:3, :3].T + projector_from_camera[:3, 3]
    camera_error = view.camera - camera.project(seen)
    projector_error = view.projector - projector.project(there)
    return PoseResidual(
        name=view.name,
        corners=len(view.ids),
        camera_px=_rms(camera_error),
        projector_px=_rms(projector_error),
        tilt_deg=tilt(pose),
        distance_mm=float((pose[:3, :3] @ board.centre_mm + pose[:3, 3])[2]),
        camera_error=camera_error,
        projector_error=projector_error,
    )


def tilt(camera_from_board: Float) -> tuple[float, float]:
    """Degrees about the image's x axis (upper edge away: positive) and y axis (right edge away)."""
    normal = camera_from_board[:3, 2]  # into the board
    return (
        float(np.degrees(np.arctan2(normal[1], normal[2]))),
        float(np.degrees(np.arctan2(-normal[0], normal[2]))),
    )


def _rms(errors: Float) -> float:
    return float(np.sqrt((errors**2).sum(axis=1).mean()))


def camera_pose(view: View, board: Board, camera: Optics) -> Float:
    """camera_from_board float64 [4, 4] from the camera's corners alone."""
    points = board.corners_mm[view.ids]
    ok, turn, shift = cv2.solvePnP(points, view.camera, camera.matrix, camera.distortion)
    pose = np.eye(4)
    pose[:3, :3], pose[:3, 3] = cv2.Rodrigues(turn)[0], np.ravel(shift)
    if not ok or not np.isfinite(pose).all():
        raise CalibrationError("the pose of the board cannot be found", which=view.name)
    return pose


def outliers(poses: Sequence[PoseResidual]) -> tuple[str, ...]:
    """Names of poses that fit much worse than the others: bumped, blurred, a bent board."""
    worst = np.array([pose.worst_px for pose in poses])
    limit = max(2.0 * float(np.median(worst)), 0.15)
    return tuple(pose.name for pose, value in zip(poses, worst, strict=True) if value > limit)


@dataclass(frozen=True, eq=False)
class BoardFit:
    """The board as the calibrated head measures it in 3D, against what it is.

    camera_px: rms of the camera alone (its lens). projector_px: rms between the code measured at
    the corners and that of the board's pose (the projector, and its pose to the camera); column
    only where rows are not coded. scale_error: measured / true lengths - 1. plane_mm: rms distance
    of the corners from their plane; shape_mm: rms 3D distance from the true board.
    camera_from_board float64 [4, 4] is the rigid fit; distance_mm along the camera's axis.
    """

    corners: int
    camera_px: float
    projector_px: float
    scale_error: float
    plane_mm: float
    shape_mm: float
    distance_mm: float
    camera_from_board: Float


def measure(view: View, board: Board, calibration: Calibration) -> BoardFit:
    """Triangulate the corners with the decoder's own arithmetic and compare them with the board."""
    camera, projector = calibration.camera, calibration.projector
    offset, shift = calibration.pixel_centre, half_code(calibration.pattern)
    pixels = view.camera + offset
    x, y = camera.undistort(
        (pixels[:, 0] - camera.matrix[0, 2]) / camera.matrix[0, 0],
        (pixels[:, 1] - camera.matrix[1, 2]) / camera.matrix[1, 1],
    )
    code = (view.projector - shift).astype(np.float32)
    row = code[:, 1] if view.both_axes else None
    depth, _ = triangulate(x.astype(np.float32), y.astype(np.float32), code[:, 0], row, calibration)
    points = np.stack([x, y, np.ones_like(x)], axis=1) * depth[:, None].astype(np.float64)
    if not np.isfinite(points).all() or (depth <= 0).any():
        raise CalibrationError(
            "the corners cannot be triangulated",
            which=view.name,
            expected=f"a board in front of the head of calibration {calibration.name}",
            action="check the transform direction and the code step of the calibration",
        )
    true = board.corners_mm[view.ids]
    pose, scale = _rigid(true, points)
    fitted = true @ pose[:3, :3].T + pose[:3, 3]
    away = (points - points.mean(axis=0)) @ np.linalg.svd(points - points.mean(axis=0))[2][2]
    shifted = View(view.name, view.ids, pixels, view.projector, 0.0, 0, view.white)
    by_camera = camera_pose(shifted, board, camera)
    seen = true @ by_camera[:3, :3].T + by_camera[:3, 3]
    m = calibration.projector_from_camera
    error = projector.project(seen @ m[:3, :3].T + m[:3, 3]) - (code + offset)
    known = error if view.both_axes else error[:, :1]
    return BoardFit(
        corners=len(view.ids),
        camera_px=_rms(camera.project(seen) - pixels),
        projector_px=_rms(known),
        scale_error=scale - 1.0,
        plane_mm=float(np.sqrt((away**2).mean())),
        shape_mm=float(np.sqrt(((points - fitted) ** 2).sum(axis=1).mean())),
        distance_mm=float((pose[:3, :3] @ board.centre_mm + pose[:3, 3])[2]),
        camera_from_board=pose,
    )


def _rigid(source: Float, target: Float) -> tuple[Float, float]:
    """target_from_source without scale (Kabsch), and the scale that would fit best (Umeyama)."""
    a, b = source - source.mean(axis=0), target - target.mean(axis=0)
    u, s, vt = np.linalg.svd(a.T @ b)
    sign = np.array([1.0, 1.0, np.sign(np.linalg.det(u @ vt))])
    rotation = (vt.T * sign) @ u.T
    pose = np.eye(4)
    pose[:3, :3] = rotation
    pose[:3, 3] = target.mean(axis=0) - rotation @ source.mean(axis=0)
    return pose, float((s * sign).sum() / (a**2).sum())


def tray(fit: BoardFit, board: Board, thickness_mm: float) -> Float:
    """tray_from_camera float64 [4, 4] from a board that lies on the tray, its print up.

    The tray's origin is under the board's middle, x runs along the board's columns, y up along its
    printed rows, z up from the tray, which lies `thickness_mm` below the print.
    """
    tray_from_board = np.diag([1.0, -1.0, -1.0, 1.0])
    centre = board.centre_mm
    tray_from_board[:3, 3] = -centre[0], centre[1], thickness_mm
    result: Float = tray_from_board @ np.linalg.inv(fit.camera_from_board)
    return result
