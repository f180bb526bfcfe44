"""A cloud of the tray -> parts, each aligned in its own frame, and what is wrong with the scene.

It does not know models, catalogues or lines. numpy and OpenCV only; deterministic.

Separation is a height map with connected components. Cells bridged only where nothing was seen:
a narrow gap in which the tray was seen stays a gap. What touches cannot be separated by height;
a waist in the outline raises TOUCHING_PARTS.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station.capture.base import Cloud
from forge_station.geometry import plane
from forge_station.geometry.pose import PartCloud, Points, align, ends
from forge_station.geometry.problem import Problem

ByteMap = NDArray[np.uint8]
LabelMap = NDArray[np.int32]

# All in camera pixels. Points lower than CUT belong to the tray; a cell is occupied by points
# higher than RISE (tray noise is about 0.15 px, registration error adds as much).
CUT_PX = 0.5
RISE_PX = 0.9
CELL_PX = 2.0
# Points above RISE that make a cell occupied, per pose that was fused.
_POINTS_PER_POSE = 1.0
_MIN_PART_CELLS = 20
_MIN_PART_POINTS = 60
# A component smaller than this share of the largest one is a shred of flying points.
_MIN_PART_SHARE = 0.004
_BRIDGE_CELLS = 3
_MAX_GRID = 4096
# Empty cells up to this width are sampling, not a part of the tray that was not seen.
_SEEN_BRIDGE_CELLS = 5
_UNSEEN_CELLS = 60
_NEAR = np.ones((9, 9), np.uint8)
# Seen tray this far from z = 0 (camera pixels) means the calibration no longer holds.
_OFFSET_LIMIT_PX = 3.0
_TILT_LIMIT_DEG = 0.5
# A waist narrower than this share of both sides it joins looks like two parts in touch.
_WAIST = 0.5


@dataclass(frozen=True)
class Scene:
    """`parts` from left to right (x, then y). `tray_share`: points on the tray of all points."""

    parts: tuple[PartCloud, ...]
    problems: tuple[Problem, ...]
    tray_share: float


@dataclass(frozen=True)
class _Grid:
    """Cells over the tray. `cell` [N] int32: flat cell of every point; maps are [rows, columns].

    `high` counts points above RISE, `flat` those on the tray, `seen` all. The outermost cells
    hold what lies beyond the grid and are not counted.
    """

    cell: NDArray[np.int32]
    high: NDArray[np.int64]
    flat: NDArray[np.int64]
    seen: NDArray[np.bool_]
    cell_mm: float


def separate(cloud: Cloud, *, max_marks: int = 6) -> Scene:
    """Remove the tray, find the parts, align each. Never raises for bad data: see `problems`.

    In a cloud whose frame is not "tray" the dominant plane becomes the tray; NO_TRAY when there
    is none (a bare part: use `single`). Parts beyond `max_marks` are still returned, with
    TOO_MANY_PARTS.
    """
    points = np.asarray(cloud.points, np.float32).reshape(-1, 3)
    if not np.isfinite(points.sum(dtype=np.float64)):
        points = points[np.isfinite(points).all(axis=1)]
    pixel = float(cloud.camera_pixel_mm)
    problems: list[Problem] = []
    if len(points) < 100:
        text = (
            f"the cloud holds {len(points)} points, at least 100 are needed; check that the "
            "scanner sees the tray and that exposure and projector work"
        )
        return Scene((), (Problem("NO_DATA", text, "ERROR"),), 0.0)
    if cloud.frame != "tray":
        found = plane.find_tray(points, max(pixel, 1e-6))
        if found is None:
            text = (
                "no tray plane found in the cloud; give the cloud in the tray frame, or inspect "
                "it as a single part"
            )
            return Scene((), (Problem("NO_TRAY", text, "ERROR"),), 0.0)
        points = plane.moved(points, found)
    fit = plane.fit_tray(points, pixel)
    if fit is not None:
        problems += _calibration_problems(fit, pixel)
        points = plane.levelled(points, fit)

    grid = _grid(points, pixel)
    labels, touching = _components(grid, cloud.poses)
    parts = _parts(points, grid, labels, pixel, cloud.poses)
    parts.sort(key=lambda part: (part.tray_from_part[0, 3], part.tray_from_part[1, 3]))
    problems += _scene_problems(parts, touching, max_marks)
    problems += _unseen_areas(labels, grid)
    return Scene(tuple(parts), tuple(problems), fit.tray_share if fit is not None else 0.0)


def single(points: Points, camera_pixel_mm: float | None = None) -> PartCloud:
    """One part without a tray (a mesh's samples, an evaluation cloud): rest it, then align it.

    Raises ValueError for fewer than 10 finite points.
    """
    xyz = np.asarray(points, np.float64).reshape(-1, 3)
    xyz = xyz[np.isfinite(xyz).all(axis=1)]
    if len(xyz) < 10:
        raise ValueError(f"single part: expected at least 10 finite points, got {len(xyz)}")
    pixel = plane.typical_spacing(xyz) if camera_pixel_mm is None else camera_pixel_mm
    return align(rested(xyz), pixel)


def rested(points: Points) -> NDArray[np.float32]:
    """Turn points [N, 3] so that their smallest robust extent is up and stand them on z = 0."""
    xyz = np.asarray(points, np.float64)
    xyz = xyz - np.median(xyz, axis=0)
    some = plane.spread(xyz, 3000)
    directions = _hemisphere(500)
    principal = np.linalg.eigh(np.cov(some.T))[1].T
    directions = np.concatenate([principal, directions])
    up = directions[int(np.argmin(_widths(some, directions)))]
    for reach in (0.06, 0.02, 0.006):
        near = up + reach * _hemisphere_ball()
        near /= np.linalg.norm(near, axis=1)[:, None]
        near = np.concatenate([up[None], near])
        up = near[int(np.argmin(_widths(some, near)))]
    up = up * (1.0 if up[int(np.argmax(np.abs(up)))] > 0 else -1.0)
    turned = plane.moved(xyz, plane.frame(up, np.zeros(3))).astype(np.float64)
    low, high = ends(turned[:, 2], plane.typical_spacing(xyz))
    # The wider side goes down: a part left alone lies on it.
    if np.median(turned[:, 2]) > (low + high) / 2:
        turned[:, 1:] *= -1.0
        low, high = -high, -low
    turned[:, 2] -= low
    return turned.astype(np.float32)


def _hemisphere(count: int) -> NDArray[np.float64]:
    """Even directions over the upper half sphere (Fibonacci spiral), [count, 3]."""
    step = np.arange(count) + 0.5
    z = step / count
    turn = np.pi * (1.0 + 5.0**0.5) * step
    radius = np.sqrt(1.0 - z * z)
    return np.column_stack([radius * np.cos(turn), radius * np.sin(turn), z])


def _hemisphere_ball() -> NDArray[np.float64]:
    half = _hemisphere(20)
    return np.concatenate([half, -half])


def _widths(points: NDArray[np.float64], directions: NDArray[np.float64]) -> NDArray[np.float64]:
    along = directions @ points.T
    skip = int(0.003 * len(points))
    ends = (skip, len(points) - 1 - skip)
    ordered = np.partition(along, ends, axis=1)
    return np.asarray(ordered[:, ends[1]] - ordered[:, ends[0]])


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


def _grid(points: NDArray[np.float32], pixel: float) -> _Grid:
    cell_mm = CELL_PX * pixel
    some = plane.spread(points, 20000)[:, :2].astype(np.float64)
    low, high = np.percentile(some, (0.05, 99.95), axis=0)
    margin = 0.05 * (high - low) + 4 * cell_mm
    low, high = low - margin, high + margin
    cell_mm = max(cell_mm, float((high - low).max()) / _MAX_GRID)
    columns, rows = (int(n) + 1 for n in np.ceil((high - low) / cell_mm))
    column = _cells(points[:, 0], low[0], cell_mm, columns)
    row = _cells(points[:, 1], low[1], cell_mm, rows)
    cell = row * np.int32(columns) + column
    z = points[:, 2]
    kind = (z > np.float32(RISE_PX * pixel)).astype(np.int32)
    kind += 2 * (np.abs(z) < np.float32(CUT_PX * pixel)).astype(np.int32)
    counts = np.bincount(cell * 3 + kind, minlength=3 * rows * columns).reshape(rows, columns, 3)
    counts[[0, -1]] = 0
    counts[:, [0, -1]] = 0
    seen = counts.sum(axis=2) > 0
    return _Grid(cell, counts[..., 1], counts[..., 2], seen, cell_mm)


def _cells(
    values: NDArray[np.float32], low: float, cell_mm: float, count: int
) -> NDArray[np.int32]:
    scaled = (values - np.float32(low)) * np.float32(1.0 / cell_mm)
    return np.clip(scaled, 0, count - 1).astype(np.int32)


def _components(grid: _Grid, poses: int) -> tuple[LabelMap, list[int]]:
    """(labels [rows, columns] int32: 0 tray, 1.. parts; labels that look like parts in touch)."""
    needed = max(1.0, _POINTS_PER_POSE * poses)
    high, flat = grid.high, grid.flat
    occupied = (high >= needed).astype(np.uint8)
    seen_tray = (flat >= max(1.0, 0.5 * poses)) & (occupied == 0)
    kernel = np.ones((_BRIDGE_CELLS, _BRIDGE_CELLS), np.uint8)
    bridged = cv2.morphologyEx(occupied, cv2.MORPH_CLOSE, kernel)
    bridged[seen_tray] = 0
    count, labels, stats, _ = cv2.connectedComponentsWithStats(bridged, connectivity=8)
    area = stats[:, cv2.CC_STAT_AREA]
    if count < 2:
        return labels, []
    biggest = int(area[1:].max())
    points_in = np.bincount(labels.ravel(), weights=high.ravel(), minlength=count)
    renumber = np.zeros(count, np.int32)
    number = 0
    for label in range(1, count):
        if (
            area[label] >= max(_MIN_PART_CELLS, _MIN_PART_SHARE * biggest)
            and points_in[label] >= _MIN_PART_POINTS
        ):
            number += 1
            renumber[label] = number
    kept = renumber[labels].astype(np.int32)
    touching = [n for n in range(1, number + 1) if _has_waist((kept == n).astype(np.uint8))]
    return kept, touching


def _has_waist(mask: ByteMap) -> bool:
    """Whether an outline is two bodies joined by a waist much narrower than either."""
    box = cv2.boundingRect(mask)
    mask = cv2.copyMakeBorder(
        mask[box[1] : box[1] + box[3], box[0] : box[0] + box[2]], 1, 1, 1, 1, cv2.BORDER_CONSTANT
    )
    solid = _filled(mask)
    radius = cv2.distanceTransform(solid, cv2.DIST_L2, 5)
    largest = float(radius.max())
    total = int(solid.sum())
    for share in (0.3, 0.4, 0.5, 0.6, 0.7):
        core = (radius > share * largest).astype(np.uint8)
        count, labels, stats, _ = cv2.connectedComponentsWithStats(core, connectivity=8)
        if count < 3:
            continue
        peaks = np.sort([float(radius[labels == k].max()) for k in range(1, count)])
        areas = np.sort(stats[1:, cv2.CC_STAT_AREA])
        if peaks[-2] * _WAIST >= share * largest and areas[-2] > 0.05 * total:
            return True
    return False


def _parts(
    points: NDArray[np.float32], grid: _Grid, labels: LabelMap, pixel: float, poses: int
) -> list[PartCloud]:
    count = int(labels.max())
    if count == 0:
        return []
    border = _at_border(labels, grid.seen)
    above = np.flatnonzero(points[:, 2] > np.float32(CUT_PX * pixel))
    label_of = _grown(labels, count).ravel()[grid.cell[above]]
    order = np.argsort(label_of, kind="stable")
    starts = np.searchsorted(label_of[order], np.arange(1, count + 2))
    parts = []
    for number in range(1, count + 1):
        mine = above[order[starts[number - 1] : starts[number]]]
        outline = _filled((labels == number).astype(np.uint8)) > 0
        parts.append(
            align(
                points[mine],
                pixel,
                poses=poses,
                touches_border=number in border,
                unseen_share=float((outline & ~grid.seen).sum() / outline.sum()),
            )
        )
    return parts


def _grown(labels: LabelMap, count: int) -> LabelMap:
    """Labels widened by one cell where free, so that low edge points stay with their part."""
    kernel = np.ones((3, 3), np.uint8)
    grown = labels.copy()
    claims = np.zeros(labels.shape, np.uint8)
    widened = []
    for number in range(1, count + 1):
        mask = cv2.dilate((labels == number).astype(np.uint8), kernel)
        claims += mask
        widened.append(mask)
    for number, mask in enumerate(widened, start=1):
        grown[(mask > 0) & (labels == 0) & (claims == 1)] = number
    return grown


def _filled(mask: ByteMap) -> ByteMap:
    """A mask with its holes filled."""
    outlines = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)[0]
    return np.asarray(cv2.drawContours(np.zeros_like(mask), outlines, -1, 1, cv2.FILLED), np.uint8)


def _outside(seen: NDArray[np.bool_]) -> tuple[ByteMap, ByteMap]:
    """(beyond, holes): empty cells that reach the rim of the map, and those that do not."""
    kernel = np.ones((_SEEN_BRIDGE_CELLS, _SEEN_BRIDGE_CELLS), np.uint8)
    solid = cv2.morphologyEx(seen.astype(np.uint8), cv2.MORPH_CLOSE, kernel)
    empty = cv2.copyMakeBorder(1 - solid, 1, 1, 1, 1, cv2.BORDER_CONSTANT, value=1)
    labels = cv2.connectedComponents(empty, connectivity=4)[1]
    rim = labels == labels[0, 0]
    beyond = rim[1:-1, 1:-1].astype(np.uint8)
    holes = ((labels > 0) & ~rim)[1:-1, 1:-1].astype(np.uint8)
    return beyond, holes


def _tray_is_seen(labels: LabelMap, seen: NDArray[np.bool_]) -> bool:
    return bool((seen & (labels == 0)).sum() >= 2 * (labels > 0).sum())


def _at_border(labels: LabelMap, seen: NDArray[np.bool_]) -> set[int]:
    """Parts that reach cells where nothing was seen and that are open to the outside.

    Shadows beside a part are closed off by seen tray; beyond the field of view nothing is seen.
    A cloud without tray points says nothing about its border.
    """
    if not _tray_is_seen(labels, seen):
        return set()
    near = cv2.dilate(_outside(seen)[0], np.ones((5, 5), np.uint8)) > 0
    touched = np.bincount(labels[near], minlength=int(labels.max()) + 1)
    return {number for number in range(1, len(touched)) if touched[number] >= 3}


def _unseen_areas(labels: LabelMap, grid: _Grid) -> list[Problem]:
    """Holes in the seen tray away from every part: something black or shiny may lie there."""
    if not _tray_is_seen(labels, grid.seen):
        return []
    count, number, stats, _ = cv2.connectedComponentsWithStats(
        _outside(grid.seen)[1], connectivity=8
    )
    by_part = set(np.unique(number[cv2.dilate((labels > 0).astype(np.uint8), _NEAR) > 0]).tolist())
    area = stats[:, cv2.CC_STAT_AREA]
    alone = [k for k in range(1, count) if area[k] >= _UNSEEN_CELLS and k not in by_part]
    if not alone:
        return []
    text = (
        f"{len(alone)} areas of the tray away from every part were not seen (the largest "
        f"{max(area[k] for k in alone) * grid.cell_mm**2:.0f} mm2, limit "
        f"{_UNSEEN_CELLS * grid.cell_mm**2:.0f} mm2); a black or shiny part may lie there: look, "
        "clean the tray, or add an exposure"
    )
    return [Problem("UNSEEN_AREA", text, "UNSURE")]


def _scene_problems(parts: list[PartCloud], touching: list[int], max_marks: int) -> list[Problem]:
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
            x, y = part.tray_from_part[:2, 3]
            text = (
                f"part {index + 1} from the left (at x {x:.0f} mm, y {y:.0f} mm) reaches the "
                "border of what the scanner sees; move it towards the middle of the tray"
            )
            problems.append(Problem("PART_OUT_OF_FIELD", text, "UNSURE"))
    if touching:
        text = (
            f"{len(touching)} of {len(parts)} outlines look like two parts in touch; leave a "
            "gap of at least a fifth of the tallest part"
        )
        problems.append(Problem("TOUCHING_PARTS", text, "UNSURE"))
    return problems


__all__ = ["PartCloud", "Problem", "Scene", "align", "rested", "separate", "single"]
