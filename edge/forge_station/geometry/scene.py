"""A cloud of the tray -> parts, each aligned in its own frame, and what is wrong with the scene.

It does not know models, catalogues or lines. numpy and OpenCV only; deterministic. Which cells
belong together is `geometry.cells`, what looks like two parts in touch is looked at closer by
`geometry.gaps`, the tray plane is `geometry.plane`, the part frame `geometry.pose`.

Simulated scans (2026-11-30, all catalogue parts, two to six a tray, three or four poses): the
count was right in 235 of 235 scenes with gaps of at least 8 camera pixels, and no part or tray
was reported without cause. Round outlines are told apart down to gaps of 2 pixels; where straight
sides face each other, gaps of 2 to 7 pixels may merge.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forge_station.capture.base import Cloud
from forge_station.geometry import cells, gaps, plane
from forge_station.geometry.pose import PartCloud, Points, align
from forge_station.geometry.problem import Problem
from forge_station.geometry.rest import rested

Outlines = dict[int, tuple[NDArray[np.bool_], bool]]
"""Number of a part -> its outline on the grid, and whether it has a waist."""

_MIN_POINTS = 100
# Seen tray this far from z = 0 (camera pixels) means the calibration no longer holds.
_OFFSET_LIMIT_PX = 3.0
# No camera is that wide: the map of such a cloud is coarse, and full of shreds.
_WIDEST_PX = 32768
_TILT_LIMIT_DEG = 0.5


@dataclass(frozen=True)
class Scene:
    """`parts` from left to right (x, then y).

    `tray_share`: points on the tray of all points; None for a bare part, which has no tray.
    """

    parts: tuple[PartCloud, ...]
    problems: tuple[Problem, ...]
    tray_share: float | None


def separate(cloud: Cloud, *, max_marks: int = 6) -> Scene:
    """Remove the tray, find the parts, align each. Never raises for bad data: see `problems`.

    In a cloud whose frame is not "tray" the dominant plane becomes the tray; NO_TRAY when there
    is none (a bare part: use `single`). Parts beyond `max_marks` are still returned, with
    TOO_MANY_PARTS.
    """
    points = np.asarray(cloud.points, np.float32).reshape(-1, 3)
    white = cloud.intensity
    if not np.isfinite(points.sum(dtype=np.float64)):
        finite = np.isfinite(points).all(axis=1)
        points, white = points[finite], None if white is None else white[finite]
    pixel = float(cloud.camera_pixel_mm)
    if len(points) < _MIN_POINTS:
        text = (
            f"the cloud holds {len(points)} points, at least {_MIN_POINTS} are needed; check that "
            "the scanner sees the tray and that exposure and projector work"
        )
        return Scene((), (Problem("NO_DATA", text, "ERROR"),), 0.0)
    if cloud.frame != "tray":
        found = plane.find_tray(points, pixel)
        if found is None:
            text = (
                "no tray plane found in the cloud; give the cloud in the tray frame, or inspect "
                "it as a single part"
            )
            return Scene((), (Problem("NO_TRAY", text, "ERROR"),), 0.0)
        points = plane.moved(points, found)
    problems: list[Problem] = []
    fit = plane.fit_tray(points, pixel)
    if fit is not None:
        problems += _calibration_problems(fit, pixel)
    height = plane.heights(points, fit)

    grid = cells.grid(points, height, pixel)
    wide_mm = max(grid.seen.shape) * grid.cell_mm
    if wide_mm > _WIDEST_PX * pixel:
        text = (
            f"the points lie over {wide_mm:.0f} mm, {wide_mm / pixel:.0f} camera pixels of "
            f"{pixel:.3f} mm; check the unit of the points, and that the calibration is this head's"
        )
        return Scene((), (Problem("CALIBRATION_MISMATCH", text, "ERROR"),), 0.0)
    labels, count = cells.components(grid, cloud.poses)
    outlines = _outlines(labels, count)
    if suspects := [number for number, (_, waist) in outlines.items() if waist]:
        high = np.flatnonzero(height > np.float32(cells.RISE_PX * pixel))
        labels, count = gaps.opened(labels, count, suspects, grid, points, high)
        outlines = _outlines(labels, count)
    parts = _parts(points, white, height, grid, labels, outlines, pixel, cloud.poses)
    parts.sort(key=lambda part: (part.tray_from_part[0, 3], part.tray_from_part[1, 3]))
    problems += _scene_problems(parts, max_marks)
    problems += _unseen_problems(labels, grid)
    return Scene(tuple(parts), tuple(problems), fit.tray_share if fit is not None else 0.0)


def single(points: Points, camera_pixel_mm: float | None = None) -> PartCloud:
    """One part without a tray (a mesh's samples, an evaluation cloud): rest it, then align it.

    `camera_pixel_mm` None: the typical distance of neighbouring points. Raises ValueError for
    fewer than 10 finite points.
    """
    xyz = np.asarray(points, np.float64).reshape(-1, 3)
    xyz = xyz[np.isfinite(xyz).all(axis=1)]
    if len(xyz) < 10:
        raise ValueError(f"single part: expected at least 10 finite points, got {len(xyz)}")
    pixel = plane.typical_spacing(xyz) if camera_pixel_mm is None else camera_pixel_mm
    return align(rested(xyz, pixel), pixel)


def _outlines(labels: cells.Labels, count: int) -> Outlines:
    found = {number: cells.outline(labels, number) for number in range(1, count + 1)}
    return {number: (outline, cells.has_waist(outline)) for number, outline in found.items()}


def _parts(
    points: NDArray[np.float32],
    white: NDArray[np.uint8] | None,
    height: NDArray[np.float32],
    grid: cells.Grid,
    labels: cells.Labels,
    outlines: Outlines,
    pixel: float,
    poses: int,
) -> list[PartCloud]:
    count = len(outlines)
    if count == 0:
        return []
    border = cells.at_border(labels, grid)
    above = np.flatnonzero(height > np.float32(cells.CUT_PX * pixel))
    on_tray = cells.tray_cells(grid, poses).ravel()[grid.cell[above]]
    above = above[~on_tray | (height[above] > np.float32(cells.TRAY_NOISE_PX * pixel))]
    label_of = cells.grown(labels, count).ravel()[grid.cell[above]]
    order = np.argsort(label_of, kind="stable")
    starts = np.searchsorted(label_of[order], np.arange(1, count + 2))
    parts = []
    for number, (outline, waist) in outlines.items():
        mine = above[order[starts[number - 1] : starts[number]]]
        own = points[mine]
        own[:, 2] = height[mine]
        parts.append(
            align(
                own,
                pixel,
                white=None if white is None else white[mine],
                poses=poses,
                touches_border=number in border,
                has_waist=waist,
                unseen_share=float((outline & ~grid.seen).sum() / outline.sum()),
            )
        )
    return parts


def _calibration_problems(fit: plane.TrayFit, pixel: float) -> list[Problem]:
    limit = _OFFSET_LIMIT_PX * pixel
    if abs(fit.offset_mm) <= limit and fit.tilt_deg <= _TILT_LIMIT_DEG:
        return []
    text = (
        f"the tray was seen {fit.offset_mm:+.2f} mm from its calibrated plane, tilted "
        f"{fit.tilt_deg:.2f} degrees (limits {limit:.2f} mm, {_TILT_LIMIT_DEG} degrees); "
        "check that the tray sits right and calibrate the head again"
    )
    return [Problem("CALIBRATION_MISMATCH", text, "UNSURE")]


def _scene_problems(parts: list[PartCloud], max_marks: int) -> list[Problem]:
    problems = []
    if not parts:
        text = "no part was found on the tray; put a part on it or check the trigger"
        problems.append(Problem("EMPTY_SCENE", text, "ERROR"))
    if len(parts) > max_marks:
        text = (
            f"{len(parts)} separate parts were found, at most {max_marks} can be marked; take "
            "parts off the tray or split the batch"
        )
        problems.append(Problem("TOO_MANY_PARTS", text, "ERROR"))
    for index, part in enumerate(parts):
        if part.touches_border:
            text = (
                f"{part.place(index)} reaches the border of what the scanner sees; move it "
                "towards the middle of the tray"
            )
            problems.append(Problem("PART_OUT_OF_FIELD", text, "UNSURE", index))
    return problems


def _unseen_problems(labels: cells.Labels, grid: cells.Grid) -> list[Problem]:
    areas = cells.unseen_areas(labels, grid)
    if not areas:
        return []
    text = (
        f"{len(areas)} areas of the tray away from every part were not seen (the largest "
        f"{areas[0]:.0f} mm2, limit {cells.least_unseen_mm2(grid):.0f} mm2); a black or shiny "
        "part may lie there: look, clean the tray, or add an exposure"
    )
    return [Problem("UNSEEN_AREA", text, "UNSURE")]


__all__ = ["PartCloud", "Problem", "Scene", "align", "rested", "separate", "single"]
