"""The part frame: points of one part -> aligned, centred, free of flying points.

Training and the station align parts with this code. It does not know trays, neighbours or kinds
of part. Deterministic: no random numbers, the same points give the same bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.floating]
Cloud32 = NDArray[np.float32]
Matrix = NDArray[np.float64]

# A comb of at least so many bins with so many points each is a depth map's rows.
_MIN_ROWS, _ROW_POINTS = 4, 6
# An end of a part: share of the density just inside, bins and reach in camera pixels.
EDGE_DENSITY, TOP_DENSITY = 0.1, 0.2
_BIN_PX, _EDGE_REACH_PX = 0.25, 3.0
_EDGE_POINTS_PER_POSE, _EDGE_POINTS_SHARE = 10.0, 0.004
# Search for the rectangle: cells of about so many points, at least a camera pixel wide; shares of
# the median count from which cells are taken; turns tried after; points that rate a rectangle.
_POINTS_PER_CELL, _MAX_CELLS = 3.0, 2048
_CELL_DENSITIES = (0.4, 0.7, 1.3)
_TURNS = (math.radians(0.8), math.radians(0.4))
_SEARCH_POINTS = 4000
# Voxel of the density filter in camera pixels, and the points its neighbourhood must hold.
_VOXEL_PX = 3.0
_MIN_NEIGHBOURS = 4.0
_MAX_VOXELS = 4_000_000
# A half counts as the heavy end only if its volume is larger by this share.
_FLIP_MARGIN = 0.02


@dataclass(frozen=True)
class PartCloud:
    """One part in its own frame.

    `points` [N, 3] float32 mm: long side of the least in-plane rectangle along +x, heavier end
    towards -x, xy centred on the robust box, z = 0 on the tray. `footprint` [4, 2] float32 mm:
    corners of that rectangle in the tray frame. `tray_from_part` [4, 4] float64.
    `camera_pixel_mm`: size of a camera pixel on the part, the resolution of everything measured.
    `unseen_share`: cells inside the outline in which nothing was seen; holes show the tray.
    `has_waist`: the outline looks like two bodies in touch.
    """

    points: Cloud32
    tray_from_part: Matrix
    footprint: Cloud32
    touches_border: bool
    camera_pixel_mm: float
    poses: int = 1
    unseen_share: float = 0.0
    has_waist: bool = False
    white: NDArray[np.uint8] | None = None
    """[N] brightness of each point under full light, where the scanner tells it."""

    def place(self, index: int) -> str:
        """Where a person finds the part; `index` from 0 in the scene's order."""
        x, y = self.tray_from_part[:2, 3]
        return f"part {index + 1} from the left (at x {x:.0f} mm, y {y:.0f} mm)"


def ends(values: Matrix, camera_pixel_mm: float, poses: int = 1) -> tuple[float, float]:
    """(low, high) end of the coordinates [N] of a part, mm.

    An end is where the points reach a tenth of the density that they have just inside. On
    simulated scans (407 parts, four poses) that is unbiased for flat, round and pointed ends
    alike; fixed shares or counts of points are 1 to 2 camera pixels wrong on one or the other.
    """
    return -_high_end(-values, camera_pixel_mm, poses, EDGE_DENSITY), _high_end(
        values, camera_pixel_mm, poses, EDGE_DENSITY
    )


def top(z: Matrix, camera_pixel_mm: float, poses: int = 1) -> float:
    """Height of the top of a part, mm. A flat top is noisy on both sides: denser than `ends`."""
    return _high_end(z, camera_pixel_mm, poses, TOP_DENSITY)


def _high_end(
    values: Matrix, camera_pixel_mm: float, poses: int, density: float, *, even: bool = False
) -> float:
    highest = float(values.max())
    span = highest - float(values.min())
    # Thin clouds (meshes, files) get wider bins, of about eight points.
    width = max(_BIN_PX * camera_pixel_mm, min(8.0 * span / len(values), span / 8.0), 1e-9)
    depth = round(_EDGE_REACH_PX / _BIN_PX)
    count = 4 * depth + int(0.25 * span / width) + 1
    near = values[values >= highest - (count + 1) * width]
    number = np.minimum((highest - near) / width, count).astype(np.int64)
    held = np.bincount(number, minlength=count + 1)[:count].astype(np.float64)
    if not even and _in_rows(held):
        spread = _rows_spread(values, camera_pixel_mm)
        return _high_end(spread, camera_pixel_mm, poses, density, even=True)
    # Of every bin and the `depth` bins inside of it: the fullest, and all points.
    ahead = np.concatenate([held, np.zeros(depth)])
    fullest = np.max([ahead[k : k + count] for k in range(depth + 1)], axis=0)
    below = np.concatenate([[0.0], np.cumsum(ahead)])
    inside = below[depth + 1 :] - below[:count]
    full = held >= np.maximum(0.5 * poses, density * fullest)
    # One of the next two bins must be full as well: a thin rim has gaps, a stray point is alone.
    full &= np.concatenate([full[1:], [True]]) | np.concatenate([full[2:], [True, True]])
    # A clump of flying points has nothing behind it.
    clump = min(_EDGE_POINTS_PER_POSE * poses, _EDGE_POINTS_SHARE * len(values))
    full &= inside >= clump
    first = int(np.argmax(full)) if full.any() else 0
    return max(highest - (first + 0.5) * width, highest - span / 2.0)


def _in_rows(held: Matrix) -> bool:
    """Whether a histogram [bins] is a comb: the points stand in rows, as those of a depth map do.

    A comb has about as many runs of filled bins as filled bins; a scan from free poses has one run.
    """
    filled = held >= _ROW_POINTS
    runs = int((filled[1:] & ~filled[:-1]).sum())
    return runs >= _MIN_ROWS and 2.5 * runs > int(filled.sum())


def _rows_spread(values: Matrix, camera_pixel_mm: float) -> Matrix:
    """Each point moved within its own pixel: a row stands for a strip as wide as a pixel.

    The moves follow the golden ratio: even, and the same on every run.
    """
    share = (np.arange(len(values)) * ((5.0**0.5 - 1.0) / 2.0)) % 1.0
    return np.asarray(values + camera_pixel_mm * (share - 0.5))


def align(
    points: Points,
    camera_pixel_mm: float,
    *,
    white: NDArray[np.uint8] | None = None,
    poses: int = 1,
    touches_border: bool = False,
    unseen_share: float = 0.0,
    has_waist: bool = False,
) -> PartCloud:
    """Points [N, 3] of one part standing on z = 0 -> the part frame. Needs at least one point."""
    if len(points) == 0:
        raise ValueError("align: expected at least one point, got none")
    xyz = np.ascontiguousarray(points, np.float32)
    kept = solid(xyz, camera_pixel_mm)
    clean = xyz.compress(kept, axis=0)
    x, y = clean[:, 0].astype(np.float64), clean[:, 1].astype(np.float64)
    angle = _rectangle_angle(x, y, camera_pixel_mm, poses)
    cos, sin = math.cos(angle), math.sin(angle)
    along, across = cos * x + sin * y, cos * y - sin * x
    (x_low, x_high) = ends(along, camera_pixel_mm, poses)
    (y_low, y_high) = ends(across, camera_pixel_mm, poses)
    if x_high - x_low < y_high - y_low:
        angle += math.pi / 2
        along, across = across, -along
        x_low, x_high, y_low, y_high = y_low, y_high, -x_high, -x_low
    if angle > math.pi / 2:
        # Of two equal halves the turn by less than 90 degrees is taken.
        angle, along, across = angle - math.pi, -along, -across
        x_low, x_high, y_low, y_high = -x_high, -x_low, -y_high, -y_low
    along -= (x_low + x_high) / 2
    across -= (y_low + y_high) / 2
    centre = np.array([x_low + x_high, y_low + y_high]) / 2
    z = np.ascontiguousarray(clean[:, 2])
    if _heavy_end_right(along, across, z, max(2.0 * camera_pixel_mm, 1e-6)):
        angle, along, across, centre = angle + math.pi, -along, -across, -centre
    cos, sin = math.cos(angle), math.sin(angle)
    tray_from_part = np.eye(4)
    tray_from_part[:2, :2] = [[cos, -sin], [sin, cos]]
    tray_from_part[:2, 3] = tray_from_part[:2, :2] @ centre
    half = np.array([x_high - x_low, y_high - y_low]) / 2
    corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * half
    footprint = corners @ tray_from_part[:2, :2].T + tray_from_part[:2, 3]
    local = np.empty((len(clean), 3), np.float32)
    local[:, 0], local[:, 1], local[:, 2] = along, across, z
    return PartCloud(
        points=local,
        tray_from_part=tray_from_part,
        footprint=footprint.astype(np.float32),
        touches_border=touches_border,
        camera_pixel_mm=float(camera_pixel_mm),
        poses=poses,
        unseen_share=unseen_share,
        has_waist=has_waist,
        white=None if white is None else white.compress(kept),
    )


def solid(points: Cloud32, camera_pixel_mm: float) -> NDArray[np.bool_]:
    """Which points [N, 3] do not fly: their neighbourhood of 3 x 3 x 3 voxels is not almost empty.

    Depth jumps leave strings of single points in the air. A cloud that is too thin for its own
    pixel size to judge by density (fewer points than that everywhere) is returned as it is.
    """
    everything = np.ones(len(points), bool)
    if len(points) < 50:
        return everything
    xyz = np.ascontiguousarray(points.T)
    low = xyz.min(axis=1).astype(np.float64)
    span = xyz.max(axis=1) - low
    voxel = max(_VOXEL_PX * camera_pixel_mm, float((span.prod() / _MAX_VOXELS) ** (1 / 3)), 1e-9)
    index = [
        ((axis - least) / voxel).astype(np.int64) + 1 for axis, least in zip(xyz, low, strict=True)
    ]
    width, depth, height = (int(axis.max()) + 2 for axis in index)
    if width * depth * height > 8 * _MAX_VOXELS:
        return everything
    flat = (index[2] * depth + index[1]) * width + index[0]
    grid = np.bincount(flat, minlength=width * depth * height).astype(np.float32)
    # The outermost voxels are empty, so rows and layers may be laid end to end.
    for shape, window in (((height * depth, width), (3, 3)), ((height, depth * width), (1, 3))):
        laid = grid.reshape(shape)
        summed = cv2.boxFilter(laid, -1, window, normalize=False, borderType=cv2.BORDER_CONSTANT)
        grid = np.asarray(summed, np.float32)
    near = grid.reshape(-1)[flat]
    needed = min(_MIN_NEIGHBOURS + 1.0, float(np.median(near)) / 6.0)
    keep = near >= needed
    return keep if keep.sum() >= 0.5 * len(points) else everything


def _rectangle_angle(x: Matrix, y: Matrix, camera_pixel_mm: float, poses: int) -> float:
    """Angle (radians, 0 <= a < pi/2) of the least-area rectangle around points [N].

    Candidates are the rectangles of cells of several densities: single points beside an edge
    turn that of all cells, unevenly seen sides that of the dense ones. The least area between
    `ends` decides, then small turns. 369 simulated parts: sides longer by 0.16 px on average,
    0.9 px at worst from four poses; 0.26 and 2.1 px from three.
    """
    widest = max(float(np.ptp(x)), float(np.ptp(y)))
    if widest <= 0:
        return 0.0
    least = max(camera_pixel_mm, widest / _MAX_CELLS)
    coarse = _cell_counts(x, y, 3.0 * least)
    per_cell = len(x) / (9.0 * np.count_nonzero(coarse))
    counts = _cell_counts(x, y, least * max(1.0, math.sqrt(_POINTS_PER_CELL / per_cell)))
    step = max(1, len(x) // _SEARCH_POINTS)
    some_x, some_y, per_pose = x[::step], y[::step], max(1, poses // step)

    def rated(angle: float) -> tuple[float, float]:
        cos, sin = math.cos(angle), math.sin(angle)
        x_low, x_high = ends(cos * some_x + sin * some_y, camera_pixel_mm, per_pose)
        y_low, y_high = ends(cos * some_y - sin * some_x, camera_pixel_mm, per_pose)
        return (x_high - x_low) * (y_high - y_low), angle

    typical = float(np.median(counts[counts > 0]))
    best = min(rated(_cells_angle(counts, share * typical)) for share in _CELL_DENSITIES)
    for turn in _TURNS:
        best = min(best, rated(best[1] - turn), rated(best[1] + turn))
    return best[1] % (math.pi / 2)


def _cells_angle(counts: NDArray[np.int64], least: float) -> float:
    """Angle of the least-area rectangle of the cells that hold at least `least` points."""
    kept = counts >= least
    if np.count_nonzero(kept) < 3:
        kept = counts > 0
    rows = np.flatnonzero(kept.any(axis=1))
    kept = kept[rows]  # the first and the last cell of each row have the same hull as all
    first, last = kept.argmax(axis=1), kept.shape[1] - 1 - kept[:, ::-1].argmax(axis=1)
    ends_of_rows = np.column_stack([np.concatenate([first, last]), np.tile(rows, 2)])
    rectangle = cv2.minAreaRect(cv2.convexHull(ends_of_rows.astype(np.float32)))
    return math.radians(rectangle[2])


def _cell_counts(x: Matrix, y: Matrix, cell: float) -> NDArray[np.int64]:
    column = ((x - x.min()) / cell).astype(np.int64)
    row = ((y - y.min()) / cell).astype(np.int64)
    width, height = int(column.max()) + 1, int(row.max()) + 1
    return np.bincount(row * width + column, minlength=width * height).reshape(height, width)


def _heavy_end_right(along: Matrix, across: Matrix, z: Cloud32, cell: float) -> bool:
    """Whether the height map holds more volume at +x than at -x, beyond noise."""
    column = np.floor(along / cell).astype(np.int64)
    row = np.floor(across / cell).astype(np.int64)
    first, low = int(column.min()), int(row.min())
    width = int(column.max()) - first + 1
    top = np.zeros(width * (int(row.max()) - low + 1), np.float32)
    np.maximum.at(top, (row - low) * width + (column - first), z)
    by_column = top.reshape(-1, width).sum(axis=0, dtype=np.float64)
    middle = min(max(-first, 0), width)
    left, right = float(by_column[:middle].sum()), float(by_column[middle:].sum())
    return right - left > _FLIP_MARGIN * (left + right)
