"""Narrow gaps: outlines that look like parts in touch, looked at again in cells of one pixel.

In cells of two pixels a gap of three pixels is much like a shadow: few poses see the tray at its
bottom, and most of its cells hold points of an edge. In cells of one pixel it is empty from end to
end, while parts in touch, and the narrow middle of one part, are as dense there as anywhere. A
shadow that crosses a part is as empty; but there both sides face each other over their whole
width, and two parts that a waist joins are near each other at one place only. It does not know part
frames or sizes.

Simulated scans (2026-11-30): flat washers, which stand closest, fell together on 16 of 60 trays;
all are told apart, gaps of 1.5 pixels among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station.geometry.cells import Grid, Labels, filled

_FINE = 2
# A fine cell counts from this share of the typical number of points on: noise and registration
# throw single points into a gap.
_FIRM_SHARE = 0.5
# Share of the firm cells that each body holds at least, and all together: shreds are no bodies.
_BODY_SHARE, _BODIES_SHARE = 0.05, 0.8
# Cells half way between two bodies (distances differ by at most so many cells) hold at most this
# share of the typical number of points.
_HALF_WAY_CELLS, _EMPTY_SHARE = 2.0, 0.3
# The side of a body that is as near to another as its nearest cell, give or take so many cells, is
# at most this share as long as the narrower of both is wide. Washers: 0.13 to 0.29.
_FACING_CELLS, _FACING_SHARE = 2.0, 0.45
# Bodies further apart are no neighbours: nothing bridges that.
_NEIGHBOUR_CELLS = 12.0

Mask = NDArray[np.uint8]
Cells = NDArray[np.bool_]
Distances = NDArray[np.generic]


def opened(
    labels: Labels,
    count: int,
    suspects: Iterable[int],
    grid: Grid,
    points: NDArray[np.float32],
    high: NDArray[np.intp],
) -> tuple[Labels, int]:
    """(labels, count) with the components `suspects` taken apart where a gap runs through them.

    `points` [N, 3] mm are those of the grid, `high` the numbers of those above the tray. The first
    body keeps the number of its component, others get the numbers after `count`.
    """
    labels = labels.copy()
    label_of = labels.ravel()[grid.cell[high]]
    for suspect in suspects:
        own = points[high[label_of == suspect], :2]
        x, y, width, height = cv2.boundingRect((labels == suspect).astype(np.uint8))
        window = labels[y : y + height, x : x + width]
        shape = (_FINE * height, _FINE * width)
        column, row = (
            (own - np.asarray(grid.low_mm, np.float32)) * np.float32(_FINE / grid.cell_mm)
        ).T
        column = np.clip(column.astype(np.int64) - _FINE * x, 0, shape[1] - 1)
        row = np.clip(row.astype(np.int64) - _FINE * y, 0, shape[0] - 1)
        held = np.bincount(row * shape[1] + column, minlength=shape[0] * shape[1]).reshape(shape)
        bodies = _bodies(held)
        if len(bodies) < 2:
            continue
        away = [cv2.distanceTransform(np.uint8(1) - body, cv2.DIST_L2, 5) for body in bodies]
        inside = np.repeat(np.repeat(window == suspect, _FINE, axis=0), _FINE, axis=1)
        if not _is_empty(held, away, inside) or not _are_parts(bodies, away):
            continue
        # A cell is given to the body that is nearest to it on average.
        coarse = [cv2.resize(far, (width, height), interpolation=cv2.INTER_AREA) for far in away]
        numbers = np.array([suspect, *range(count + 1, count + len(bodies))], np.int32)
        count += len(bodies) - 1
        window[:] = np.where(window == suspect, numbers[np.argmin(coarse, axis=0)], window)
    return labels, count


def _bodies(held: NDArray[np.int64]) -> list[Mask]:
    """The bodies in a map of the points in each fine cell; none where they are not most of it."""
    firm = held >= max(1.0, _FIRM_SHARE * _typical(held))
    _, number, stats, _ = cv2.connectedComponentsWithStats(firm.astype(np.uint8), connectivity=8)
    area = stats[1:, cv2.CC_STAT_AREA]
    large = np.flatnonzero(area >= _BODY_SHARE * area.sum())
    if area[large].sum() < _BODIES_SHARE * area.sum():
        return []
    return [(number == k + 1).astype(np.uint8) for k in large]


def _typical(held: NDArray[np.int64]) -> float:
    return float(np.median(held[held > 0]))


def _is_empty(held: NDArray[np.int64], away: Sequence[Distances], inside: Cells) -> bool:
    """Whether next to nothing was seen half way between bodies, whose distances are `away`."""
    nearest, second = np.sort(away, axis=0)[:2]
    half_way = held[inside & (nearest > 0) & (second - nearest <= _HALF_WAY_CELLS)]
    return bool(half_way.sum() <= _EMPTY_SHARE * _typical(held) * len(half_way))


def _are_parts(bodies: list[Mask], away: Sequence[Distances]) -> bool:
    """Whether neighbours are near each other at one place, not along their whole width."""
    widths = [
        2.0 * float(cv2.distanceTransform(filled(np.pad(body, 1)), cv2.DIST_L2, 5).max())
        for body in bodies
    ]
    for one, other in combinations(range(len(bodies)), 2):
        far = np.where(bodies[one] > 0, away[other], np.inf)
        least = float(far.min())
        if least > _NEIGHBOUR_CELLS:
            continue
        row, column = np.nonzero(far <= least + _FACING_CELLS)
        facing = 1.0 + float(np.hypot(np.ptp(row), np.ptp(column)))
        if facing > _FACING_SHARE * min(widths[one], widths[other]):
            return False
    return True
