"""Cells over the tray: what is occupied, seen or hidden, and which cells belong together.

It does not know part frames or sizes. A cell is two camera pixels wide. Cells are bridged only
where no tray was seen, so a narrow gap in which the tray shows stays a gap. What touches cannot
be told apart by height; `has_waist` finds outlines that look like two bodies.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station.geometry import plane

Mask = NDArray[np.uint8]
Labels = NDArray[np.int32]

# In camera pixels. Points lower than CUT belong to the tray; a cell is occupied by points higher
# than RISE (tray noise is about 0.15 px, registration error adds as much).
CUT_PX = 0.5
RISE_PX = 0.9
# In a cell in which the tray shows, what is lower than this is tray, not the foot of a part.
TRAY_NOISE_PX = 1.2
# What has next to nothing (a share of its points) above this and lets the tray show through is the
# tray, seen higher by a pose that is off. Solid things hide the tray beneath them.
TALL_PX = 2.0
_TALL_SHARE, _SHOWS_SHARE = 0.05, 0.5
CELL_PX = 2.0
# Points above RISE that make a cell occupied, per pose that was fused.
_POINTS_PER_POSE = 1.0
_TRAY_POINTS_PER_POSE = 0.5
_MIN_PART_CELLS = 20
_MIN_PART_POINTS = 60
# A component smaller than this share of the largest one is a shred of flying points.
_MIN_PART_SHARE = 0.004
# Closing kernels: over cells without seen tray, and over cells in which nothing was seen. On 340
# simulated scenes a larger or smaller second one merges or splits more parts.
_BRIDGE_CELLS, _SHADOW_CELLS = 3, 5
# A component this thin (inscribed radius in cells) beside something unseen is the far rim of a
# larger one, the rest of it being in shadow. Parts as thin are too small to be read.
_SLIVER_CELLS = 2.6
# Empty cells up to this width are sampling, not a part of the tray that was not seen.
_SEEN_BRIDGE_CELLS = 5
# A hole in the seen tray counts from this inscribed radius on: shadows away from parts are thin.
_UNSEEN_RADIUS_CELLS = 5.0
_BESIDE_CELLS = 9
# ... and only where several poses look: the tray around it is half as dense as elsewhere. Near the
# border a single pose sees the tray, and a shadow in it is a hole: 0.39 at most in simulated trays;
# around a black part of full height 0.56 to 0.6.
_FULL_VIEW_SHARE = 0.5
# A waist narrower than this share of both bodies it joins.
_WAIST = 0.5
_MAX_SIDE = 4096


@dataclass(frozen=True)
class Grid:
    """Maps over the tray, [rows, columns], row 0 at the lowest y.

    `cell` [N] int32: flat cell of every point. `high` counts points above RISE, `tall` those above
    TALL, `flat` those on the tray, `seen` marks cells with any. The outermost cells hold what lies
    beyond the grid and are not counted. `low_mm`: x and y where the first cell begins.
    """

    cell: NDArray[np.int32]
    high: NDArray[np.int64]
    tall: NDArray[np.int64]
    flat: NDArray[np.int64]
    seen: NDArray[np.bool_]
    cell_mm: float
    low_mm: tuple[float, float]


def grid(points: NDArray[np.float32], height: NDArray[np.float32], camera_pixel_mm: float) -> Grid:
    """Count points [N, 3] (mm, tray frame) of heights [N] by cell. Needs at least one point."""
    cell_mm = CELL_PX * camera_pixel_mm
    some = plane.spread(points, 20000)[:, :2].astype(np.float64)
    low, high = np.percentile(some, (0.05, 99.95), axis=0)
    margin = 0.05 * (high - low) + 4 * cell_mm
    low, high = low - margin, high + margin
    cell_mm = max(cell_mm, float((high - low).max()) / _MAX_SIDE)
    columns, rows = (int(n) + 1 for n in np.ceil((high - low) / cell_mm))
    cell = _index(points[:, 1], low[1], cell_mm, rows)
    cell *= np.int32(columns)
    cell += _index(points[:, 0], low[0], cell_mm, columns)
    # Of four kinds: neither, above RISE, on the tray, above TALL.
    kind = cell * np.int32(4)
    kind += height > np.float32(RISE_PX * camera_pixel_mm)
    kind += (np.abs(height) < np.float32(CUT_PX * camera_pixel_mm)).view(np.int8) * np.int8(2)
    kind += (height > np.float32(TALL_PX * camera_pixel_mm)).view(np.int8) * np.int8(2)
    counts = np.bincount(kind, minlength=4 * rows * columns).reshape(rows, columns, 4)
    counts[[0, -1]] = 0
    counts[:, [0, -1]] = 0
    return Grid(
        cell,
        high=counts[..., 1] + counts[..., 3],
        tall=counts[..., 3],
        flat=counts[..., 2],
        seen=counts.sum(axis=2) > 0,
        cell_mm=cell_mm,
        low_mm=(float(low[0]), float(low[1])),
    )


def _index(
    values: NDArray[np.float32], low: float, cell_mm: float, count: int
) -> NDArray[np.int32]:
    scaled = (values - np.float32(low)) * np.float32(1.0 / cell_mm)
    return np.asarray(np.clip(scaled, 0, count - 1, out=scaled), np.int32)


def components(grid: Grid, poses: int) -> tuple[Labels, int]:
    """(labels, count): 0 tray, 1..count parts."""
    occupied = (grid.high >= max(1.0, _POINTS_PER_POSE * poses)).astype(np.uint8)
    seen_tray = tray_cells(grid, poses) & (occupied == 0)
    bridged = occupied.copy()
    for reach, allowed in ((_BRIDGE_CELLS, ~seen_tray), (_SHADOW_CELLS, ~grid.seen)):
        closed = cv2.morphologyEx(occupied, cv2.MORPH_CLOSE, _square(reach))
        bridged[(closed > 0) & allowed] = 1
    found, raw, stats, _ = cv2.connectedComponentsWithStats(bridged, connectivity=8)
    labels, area = np.asarray(raw, np.int32), np.asarray(stats[:, cv2.CC_STAT_AREA], np.int64)
    if found < 2:
        return labels, 0
    labels = _slivers_joined(labels, area, grid.seen)
    least = max(_MIN_PART_CELLS, _MIN_PART_SHARE * int(area[1:].max()))
    left = np.bincount(labels.ravel(), minlength=found)
    high, tall, flat = (
        np.bincount(labels.ravel(), weights=counts.ravel(), minlength=found)
        for counts in (grid.high, grid.tall, grid.flat)
    )
    kept = (left >= least) & (high >= _MIN_PART_POINTS)
    kept &= (tall > _TALL_SHARE * high) | (flat < _SHOWS_SHARE * high)
    kept[0] = False
    renumber = np.where(kept, np.cumsum(kept), 0).astype(np.int32)
    return np.asarray(renumber[labels], np.int32), int(kept.sum())


def tray_cells(grid: Grid, poses: int) -> NDArray[np.bool_]:
    """Cells in which the tray was seen, whatever else is above it."""
    return np.asarray(grid.flat >= max(1.0, _TRAY_POINTS_PER_POSE * poses), np.bool_)


def _slivers_joined(labels: Labels, area: NDArray[np.int64], seen: NDArray[np.bool_]) -> Labels:
    """Thin components give their cells to the largest component across the same unseen hole."""
    radius = np.zeros(len(area), np.float32)
    thickness = cv2.distanceTransform((labels > 0).astype(np.uint8), cv2.DIST_L2, 5)
    np.maximum.at(radius, labels.ravel(), thickness.ravel())
    thin = [k for k in range(1, len(area)) if radius[k] <= _SLIVER_CELLS and area[k] >= 4]
    if not thin:
        return labels
    unseen = _unseen(seen, 1)[1] & (labels == 0)
    holes = np.asarray(cv2.connectedComponents(unseen, connectivity=8)[1], np.int32)
    joined = labels.copy()
    for k in thin:
        beside = holes[_widened(labels == k, 5)]
        numbers = np.unique(beside[beside > 0])
        if len(numbers) == 0:
            continue
        rim = _widened(np.isin(holes, numbers), 5)
        others = np.unique(labels[rim & (labels > 0) & (labels != k)])
        others = others[area[others] > 2 * area[k]]
        if len(others):
            joined[labels == k] = others[int(np.argmax(area[others]))]
    return joined


def grown(labels: Labels, count: int) -> Labels:
    """Labels widened by one cell where free, so that low edge points stay with their part."""
    claims = np.zeros(labels.shape, np.uint8)
    widened = [_widened(labels == number, 3) for number in range(1, count + 1)]
    for mask in widened:
        claims += mask
    out = labels.copy()
    for number, mask in enumerate(widened, start=1):
        out[mask & (labels == 0) & (claims == 1)] = number
    return out


def outline(labels: Labels, number: int) -> NDArray[np.bool_]:
    """Cells of a part with its holes filled."""
    return filled((labels == number).astype(np.uint8)) > 0


def has_waist(solid: NDArray[np.bool_]) -> bool:
    """Whether an outline is two bodies joined by a waist much narrower than either."""
    x, y, width, height = cv2.boundingRect(solid.astype(np.uint8))
    window = np.pad(solid[y : y + height, x : x + width].astype(np.uint8), 1)
    radius = cv2.distanceTransform(window, cv2.DIST_L2, 5)
    largest = float(radius.max())
    for share in (0.3, 0.4, 0.5, 0.6, 0.7):
        core = (radius > share * largest).astype(np.uint8)
        count, labels, stats, _ = cv2.connectedComponentsWithStats(core, connectivity=8)
        if count < 3:
            continue
        peaks = np.sort([float(radius[labels == k].max()) for k in range(1, count)])
        areas = np.sort(stats[1:, cv2.CC_STAT_AREA])
        if peaks[-2] * _WAIST >= share * largest and areas[-2] > 0.05 * window.sum():
            return True
    return False


def at_border(labels: Labels, grid: Grid) -> set[int]:
    """Parts that reach cells where nothing was seen and that are open to the outside.

    Shadows beside a part are closed off by seen tray; beyond the field of view nothing is seen.
    A cloud without tray points says nothing about its border.
    """
    if not _tray_is_seen(labels, grid.seen):
        return set()
    near = _widened(_unseen(grid.seen, _SEEN_BRIDGE_CELLS)[0] > 0, 5)
    touched = np.bincount(labels[near], minlength=int(labels.max()) + 1)
    return {number for number in range(1, len(touched)) if touched[number] >= 3}


def unseen_areas(labels: Labels, grid: Grid) -> list[float]:
    """Sizes (mm2) of holes in the seen tray away from every part, largest first."""
    if not _tray_is_seen(labels, grid.seen):
        return []
    holes = _unseen(grid.seen, _SEEN_BRIDGE_CELLS)[1]
    count, number, stats, _ = cv2.connectedComponentsWithStats(holes, connectivity=8)
    if count < 2:
        return []
    if not grid.flat.any():
        return []
    full = _FULL_VIEW_SHARE * float(np.percentile(grid.flat[grid.flat > 0], 75))
    radius = np.zeros(count, np.float32)
    depth = cv2.distanceTransform(holes, cv2.DIST_L2, 5)
    np.maximum.at(radius, np.asarray(number, np.int32).ravel(), depth.ravel())
    beside = set(np.unique(number[_widened(labels > 0, _BESIDE_CELLS)]).tolist())
    alone = [
        k
        for k in range(1, count)
        if radius[k] >= _UNSEEN_RADIUS_CELLS
        and k not in beside
        and _mean(grid.flat[_widened(number == k, _BESIDE_CELLS) & (grid.flat > 0)]) >= full
    ]
    return sorted(float(stats[k, cv2.CC_STAT_AREA]) * grid.cell_mm**2 for k in alone)[::-1]


def _mean(counts: NDArray[np.int64]) -> float:
    """0 where there is none."""
    return float(counts.mean()) if counts.size else 0.0


def least_unseen_mm2(grid: Grid) -> float:
    """The smallest area that `unseen_areas` reports."""
    return float(np.pi * (_UNSEEN_RADIUS_CELLS * grid.cell_mm) ** 2)


def _unseen(seen: NDArray[np.bool_], bridge: int) -> tuple[Mask, Mask]:
    """(beyond, holes): empty cells that reach the rim of the map, and those that do not.

    Empty cells narrower than `bridge` cells count as seen.
    """
    solid = cv2.morphologyEx(seen.astype(np.uint8), cv2.MORPH_CLOSE, _square(bridge))
    empty = cv2.copyMakeBorder(1 - solid, 1, 1, 1, 1, cv2.BORDER_CONSTANT, value=1)
    labels = cv2.connectedComponents(empty, connectivity=4)[1]
    rim = labels == labels[0, 0]
    beyond = rim[1:-1, 1:-1].astype(np.uint8)
    holes = ((labels > 0) & ~rim)[1:-1, 1:-1].astype(np.uint8)
    return beyond, holes


def _tray_is_seen(labels: Labels, seen: NDArray[np.bool_]) -> bool:
    return bool((seen & (labels == 0)).sum() >= 2 * (labels > 0).sum())


def filled(mask: Mask) -> Mask:
    outlines = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)[0]
    return np.asarray(cv2.drawContours(np.zeros_like(mask), outlines, -1, 1, cv2.FILLED), np.uint8)


def _widened(mask: NDArray[np.bool_], kernel: int) -> NDArray[np.bool_]:
    return np.asarray(cv2.dilate(mask.astype(np.uint8), _square(kernel)) > 0, np.bool_)


def _square(side: int) -> Mask:
    return np.ones((side, side), np.uint8)
