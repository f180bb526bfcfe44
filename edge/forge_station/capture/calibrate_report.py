"""What a calibration is worth, in words and as a picture: coverage, residuals, verdict, advice.

Knows the figures of `capture.calibrate` and no files or commands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station.capture import calibrate
from forge_station.capture.board import Board
from forge_station.capture.calibrate import BoardFit, Solution, View
from forge_station.capture.calibration import Optics

Level = Literal["pass", "warn", "fail"]
Picture = NDArray[np.uint8]
GRID = (6, 4)  # cells of the camera image that corners should reach
# A board leans when it is tilted by more, degrees: less says little about the focal length.
LEANS_DEG = 10.0
_REGIONS = ("upper left", "top", "upper right", "left", "centre", "right",
            "lower left", "bottom", "lower right")  # fmt: skip
_LEANS = ("upper edge away", "lower edge away", "right edge away", "left edge away")


@dataclass(frozen=True)
class Finding:
    """One line of a verdict: how it is, the figure, and what to do about it."""

    level: Level
    what: str
    action: str = ""

    def __str__(self) -> str:
        return f"{self.level:4}  {self.what}" + (f": {self.action}" if self.action else "")


@dataclass(frozen=True)
class Bounds:
    """From where on a figure is a warning and a failure."""

    warn: float
    fail: float

    def level(self, value: float) -> Level:
        """`value` grows towards the bad."""
        return "pass" if value <= self.warn else "warn" if value <= self.fail else "fail"


CAMERA_PX, PROJECTOR_PX = Bounds(0.3, 0.6), Bounds(0.5, 1.0)
MISSING_POSES = Bounds(0, 4)  # of WANTED_POSES
WANTED_POSES = 12
UNSEEN = Bounds(0.25, 0.5)  # share of the cells of GRID without a corner
FOCAL = Bounds(0.001, 0.003)  # one sigma, relative: as much error of every distance
SCALE = Bounds(0.001, 0.003)
PLANE = Bounds(2e-4, 6e-4)  # rms of the board's plane, of the distance
DRIFT_CAMERA_PX, DRIFT_PROJECTOR_PX = Bounds(0.4, 1.0), Bounds(0.7, 2.0)


def worst(findings: Sequence[Finding]) -> Level:
    """The level of the whole: its worst line."""
    levels: tuple[Level, ...] = ("fail", "warn", "pass")
    found = {finding.level for finding in findings}
    return next((level for level in levels if level in found), "fail")


def covered(views: Sequence[View], size: tuple[int, int]) -> NDArray[np.bool_]:
    """Cells [rows, columns] of GRID of the camera image that hold a corner of any pose."""
    columns, rows = GRID
    cells = np.zeros((rows, columns), np.bool_)
    for view in views:
        x = np.clip(view.camera[:, 0] / size[0] * columns, 0, columns - 1).astype(int)
        y = np.clip(view.camera[:, 1] / size[1] * rows, 0, rows - 1).astype(int)
        cells[y, x] = True
    return cells


def missing_regions(views: Sequence[View], size: tuple[int, int]) -> list[str]:
    """Names of the ninths of the camera image that are hardly more than half covered."""
    cells = covered(views, size).repeat(3, axis=0).repeat(3, axis=1).astype(float)
    high, wide = cells.shape[0] // 3, cells.shape[1] // 3
    ninths = cells.reshape(3, high, 3, wide).mean(axis=(1, 3)).ravel()
    return [name for name, share in zip(_REGIONS, ninths, strict=True) if share < 0.6]


def missing_leans(tilts: Sequence[tuple[float, float]]) -> list[str]:
    """Which ways the board was not tilted yet."""
    about_x = [t[0] for t in tilts]
    about_y = [t[1] for t in tilts]
    reached = (max(about_x), -min(about_x), max(about_y), -min(about_y))
    return [name for name, most in zip(_LEANS, reached, strict=True) if most < LEANS_DEG]


def guess(size: tuple[int, int]) -> Optics:
    """A lens good enough to tell how a board is held: 40 degrees of field."""
    focal = 1.4 * size[0]
    centre = (size[0] - 1) / 2, (size[1] - 1) / 2
    return Optics(size, np.array([[focal, 0, centre[0]], [0, focal, centre[1]], [0, 0, 1.0]]))


def progress(views: Sequence[View], board: Board, size: tuple[int, int]) -> str:
    """What the last pose gave, and what is still missing."""
    lens, view = guess(size), views[-1]
    tilts = [calibrate.tilt(calibrate.camera_pose(v, board, lens)) for v in views]
    total = len(board.corners_mm)
    text = [f"{len(view.ids)} of {total} corners"]
    if view.lost:
        text.append(f"{view.lost} more without a projected code")
    text.append(f"code fits to {view.fit_px:.2f} px")
    text.append(_lean_text(tilts[-1]))
    share = covered(views, size).mean()
    wanted = missing_regions(views, size) + missing_leans(tilts)
    more = max(WANTED_POSES - len(views), 0)
    end = f"missing: {', '.join(wanted)}" if wanted else "nothing is missing"
    if more:
        end += f"; {more} more pose{'s' * (more > 1)} wanted"
    return f"{', '.join(text)}. So far {share:.0%} of the image; {end}"


def _lean_text(tilt: tuple[float, float]) -> str:
    amounts = (tilt[0], -tilt[0], tilt[1], -tilt[1])
    words = [
        f"{name} by {amount:.0f} deg"
        for name, amount in zip(_LEANS, amounts, strict=True)
        if amount >= LEANS_DEG
    ]
    return " and ".join(words) or "held flat"


def judge(solution: Solution, views: Sequence[View], fits: Sequence[BoardFit]) -> list[Finding]:
    """Is it good enough? `fits`: the board as measured with it, pose by pose."""
    size = solution.camera.image_size
    tilts = [pose.tilt_deg for pose in solution.poses]
    odd = calibrate.outliers(solution.poses)
    leave = f"look at {', '.join(odd)}; scan again, or leave out with --without" if odd else ""
    found = [
        Finding(
            MISSING_POSES.level(WANTED_POSES - len(views)),
            f"{len(views)} poses",
            "" if len(views) >= WANTED_POSES else f"take {WANTED_POSES} or more",
        ),
        _finding(
            CAMERA_PX.level(solution.camera_rms_px),
            f"camera rms {solution.camera_rms_px:.3f} px",
            leave or "focus the camera, keep the board still and flat, measure its squares",
        ),
        _finding(
            PROJECTOR_PX.level(solution.projector_rms_px),
            f"projector rms {solution.projector_rms_px:.3f} px",
            leave or "focus the projector, darken the room, expose longer",
        ),
        _finding(
            PROJECTOR_PX.level(solution.stereo_rms_px),
            f"both together rms {solution.stereo_rms_px:.3f} px",
            leave or "the head moved in itself between poses: fasten it",
        ),
    ]
    unseen = 1 - float(covered(views, size).mean())
    regions = missing_regions(views, size)
    found.append(
        _finding(
            UNSEEN.level(unseen),
            f"corners in {1 - unseen:.0%} of the camera image",
            f"hold the board at {', '.join(regions) or 'the borders'} as well",
        )
    )
    leans = missing_leans(tilts)
    flat = len(leans) >= 3
    found.append(
        _finding(
            "fail" if flat else "warn" if leans else "pass",
            "tilted to all four sides" if not leans else f"not tilted: {', '.join(leans)}",
            f"add poses tilted by 20 to 40 degrees ({', '.join(leans)})",
        )
    )
    focal = solution.camera_deviation.focal_px / float(solution.camera.matrix[0, 0])
    found.append(
        _finding(
            FOCAL.level(focal),
            f"focal length known to {focal:.3%} (one sigma), {focal * fits[0].distance_mm:.2f} mm "
            f"of {fits[0].distance_mm:.0f} mm",
            "add poses, tilted more and at other distances",
        )
    )
    scale = float(np.median([abs(fit.scale_error) for fit in fits]))
    plane = float(np.median([fit.plane_mm / fit.distance_mm for fit in fits]))
    found.append(
        _finding(
            SCALE.level(scale),
            f"the board is measured {scale:.3%} off its size",
            "measure the print with a calliper, and give --square as it is",
        )
    )
    found.append(
        _finding(
            PLANE.level(plane),
            f"its plane to {plane * fits[0].distance_mm:.3f} mm rms",
            "glue the print on a flat plate (glass, aluminium)",
        )
    )
    if odd:
        found.append(Finding("warn", f"poses that fit worse than the others: {', '.join(odd)}",
                             "scan them again, or leave them out with --without NAME"))  # fmt: skip
    return found


def drift(fit: BoardFit) -> list[Finding]:
    """Does the head still measure a board as it is? One pose against a calibration."""
    again = "calibrate the head again"
    return [
        _finding(
            DRIFT_CAMERA_PX.level(fit.camera_px),
            f"camera reprojection {fit.camera_px:.3f} px rms over {fit.corners} corners",
            f"the lens or its focus has changed, or the board is bent: {again}",
        ),
        _finding(
            DRIFT_PROJECTOR_PX.level(fit.projector_px),
            f"projector reprojection {fit.projector_px:.3f} px rms",
            f"the projector has moved or its lens has changed: {again}",
        ),
        _finding(
            SCALE.level(abs(fit.scale_error)),
            f"scale {fit.scale_error:+.3%}",
            f"check the square's size with a calliper, then {again}",
        ),
        _finding(
            PLANE.level(fit.plane_mm / fit.distance_mm),
            f"plane {fit.plane_mm:.3f} mm rms at {fit.distance_mm:.0f} mm",
            f"check that the board is flat, then {again}",
        ),
    ]


def _finding(level: Level, what: str, action: str) -> Finding:
    """Advice only where something is wrong."""
    return Finding(level, what, "" if level == "pass" else action)


def table(solution: Solution) -> str:
    """Residuals pose by pose."""
    odd = calibrate.outliers(solution.poses)
    lines = [f"{'pose':16} corners  camera px  projector px  distance mm  held"]
    for pose in solution.poses:
        mark = "  <- outlier" if pose.name in odd else ""
        lines.append(
            f"{pose.name[:16]:16} {pose.corners:7}  {pose.camera_px:9.3f}"
            f"  {pose.projector_px:12.3f}  {pose.distance_mm:11.1f}"
            f"  {_lean_text(pose.tilt_deg)}{mark}"
        )
    return "\n".join(lines)


_WIDE, _HIGH, _PAD = 480, 360, 40
_INK, _GREY, _PALE = (60, 50, 40), (150, 150, 150), (235, 235, 235)


def draw(solution: Solution, views: Sequence[View], title: str) -> Picture:
    """Where the corners were in both images, their errors, and the residual of each pose (BGR)."""
    page = np.full((_HIGH + 300, 2 * _WIDE + 3 * _PAD, 3), 255, np.uint8)
    _words(page, title, (_PAD, 24), 0.55)
    panels = (
        ("camera", solution.camera.image_size, [v.camera for v in views],
         [p.camera_error for p in solution.poses], solution.camera_rms_px),
        ("projector", solution.projector.image_size, [v.projector for v in views],
         [p.projector_error for p in solution.poses], solution.projector_rms_px),
    )  # fmt: skip
    for k, (name, size, places, errors, rms) in enumerate(panels):
        left, top = _PAD + k * (_WIDE + _PAD), 64
        scale = min(_WIDE / size[0], _HIGH / size[1])
        if name == "camera":
            _uncovered(page, covered(views, size), (left, top), scale, size)
        corner = (left + round(size[0] * scale), top + round(size[1] * scale))
        cv2.rectangle(page, (left, top), corner, _GREY, 1)
        _words(page, f"{name}: rms {rms:.3f} px; lines: error x 100", (left, top - 10), 0.42)
        for at, error in zip(places, errors, strict=True):
            for point, offset in zip(at * scale, error * scale * 100, strict=True):
                here = (left + round(point[0]), top + round(point[1]))
                there = (here[0] + round(offset[0]), here[1] + round(offset[1]))
                colour = _colour(float(np.hypot(*offset)) / scale / 100, 3 * rms)
                cv2.line(page, here, there, colour, 1, cv2.LINE_AA)
                cv2.circle(page, here, 2, colour, -1, cv2.LINE_AA)
    _bars(page, solution, _HIGH + 110)
    return page


def _uncovered(
    page: Picture,
    cells: NDArray[np.bool_],
    origin: tuple[int, int],
    scale: float,
    size: tuple[int, int],
) -> None:
    wide, high = size[0] * scale / cells.shape[1], size[1] * scale / cells.shape[0]
    for row, column in np.argwhere(~cells):
        a = (origin[0] + round(column * wide), origin[1] + round(row * high))
        b = (origin[0] + round((column + 1) * wide), origin[1] + round((row + 1) * high))
        cv2.rectangle(page, a, b, _PALE, -1)
        _words(page, "no corner", (a[0] + 4, (a[1] + b[1]) // 2), 0.35)


def _bars(page: Picture, solution: Solution, top: int) -> None:
    """Two bars a pose; outliers named in red."""
    poses, odd = solution.poses, calibrate.outliers(solution.poses)
    most = max(0.3, *(pose.worst_px for pose in poses))
    step = (page.shape[1] - 2 * _PAD) / len(poses)
    base, room = top + 120, 100
    _words(page, f"rms per pose, px (full height {most:.2f}): camera dark, projector light",
           (_PAD, top), 0.42)  # fmt: skip
    for k, pose in enumerate(poses):
        left = _PAD + k * step
        for j, (value, colour) in enumerate(((pose.camera_px, _INK), (pose.projector_px, _GREY))):
            x = round(left + (0.1 + 0.4 * j) * step)
            high = round(value / most * room)
            cv2.rectangle(page, (x, base - high), (x + round(0.36 * step), base), colour, -1)
        name = pose.name[-max(int(step // 8), 2) :]
        place = (round(left), base + 16)
        _words(page, name, place, 0.36, (0, 0, 200) if pose.name in odd else _INK)


def _colour(error: float, most: float) -> tuple[int, int, int]:
    """Green over yellow to red (BGR)."""
    share = min(error / max(most, 1e-9), 1.0)
    return (0, round(170 * min(1.0, 2 - 2 * share)), round(220 * min(1.0, 2 * share)))


def _words(
    page: Picture,
    text: str,
    at: tuple[int, int],
    size: float,
    colour: tuple[int, int, int] = _INK,
) -> None:
    cv2.putText(page, text, at, cv2.FONT_HERSHEY_SIMPLEX, size, colour, 1, cv2.LINE_AA)
