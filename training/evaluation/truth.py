"""What is true of a scene: who is wrong and how, which points and cells are defective.

By rule and by geometry only; no model, no files. Evaluation needs no torch, so this does not
import the training pools.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from forge_station.contract import grid as grids
from forge_station.contract import tasks
from forge_station.contract.views import NANO_LAYOUT, VIEWS
from forge_station.geometry import render, sheet
from forge_station.geometry.pose import PartCloud
from training.evaluation import lookalikes

Cells = NDArray[np.bool_]


@dataclass(frozen=True)
class Wrong:
    """`answer`: letters that are each right, ("none",) if nothing is wrong with a part."""

    answer: tuple[str, ...]
    missing: tuple[str, ...]
    violations: int


def wrong(required: Mapping[str, int], readings: Mapping[str, str]) -> Wrong:
    """Compare the parts at the marks with those required, as multisets.

    Of a part that lies there too often every one is a right answer. A wrong part in place of a
    right one is one violation, and the right one is missing.
    """
    present = Counter(readings.values())
    needed = Counter(required)
    surplus = present - needed
    missing = sorted((needed - present).elements())
    letters = tuple(mark for mark, part in sorted(readings.items()) if surplus[part] > 0)
    violations = max(sum(surplus.values()), len(missing))
    return Wrong(letters or (tasks.NONE,), tuple(missing), violations)


def defect_flags(
    part: PartCloud, points: NDArray[np.floating], defect: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """For every point of a separated part 1 where the scene's nearest point is defective, else 0.

    `points` [N, 3] mm in the tray frame and their flags [N]; the part may have been levelled.
    """
    if not defect.any():
        return np.zeros(len(part.points), np.float32)
    matrix = part.tray_from_part
    own = part.points.astype(np.float64) @ matrix[:3, :3].T + matrix[:3, 3]
    # Only points around the defect can be nearest to one of its points.
    low, high = points[defect].min(axis=0), points[defect].max(axis=0)
    near, asked = _within(points, low - 2.0, high + 2.0), _within(own, low - 1.0, high + 1.0)
    flags = np.zeros(len(own), np.float32)
    _, index = cKDTree(points.compress(near, axis=0)).query(own.compress(asked, axis=0))
    flags[asked] = defect[near][index]
    return flags


def _within(
    points: NDArray[np.floating], low: NDArray[np.floating], high: NDArray[np.floating]
) -> Cells:
    inside = np.ones(len(points), bool)
    for axis in range(3):
        inside &= (points[:, axis] >= low[axis]) & (points[:, axis] <= high[axis])
    return inside


@dataclass(frozen=True)
class SurfaceTruth:
    """`cells`, `filled` bool [3, 16, 16] over front, side, top: defective, and part of the part."""

    cells: Cells
    filled: Cells
    score: int


def surface_truth(part: PartCloud, flags: NDArray[np.floating]) -> SurfaceTruth:
    """Cells whose seen surface is defective by more than a tenth of the cell, and the score.

    `flags` [N] 0..1 by point of the part. The grid does not depend on the size of the picture.
    """
    picture, views = sheet.surface_picture(part.points, NANO_LAYOUT)
    centre = sheet.robust_box(part.points).centre
    side = NANO_LAYOUT.panel
    cells = np.zeros((len(VIEWS), tasks.GRID_ROWS, tasks.GRID_ROWS), bool)
    filled = np.zeros_like(cells)
    for i, view in enumerate(VIEWS):
        filled[i] = grids.coverage(views[view].filled) > 0.5
        if not flags.any():
            continue
        share = render.view_mean(part.points, flags, view, picture.mm_per_px, (side, side), centre)
        mask = np.nan_to_num(share, nan=0.0) > 0.5
        if mask.any():
            cells[i] = grids.coverage(mask) > grids.STATION_COVERAGE
    return SurfaceTruth(cells, filled, score_of(cells, filled))


def score_of(cells: Cells, filled: Cells) -> int:
    """Surface score 0..10 that the share of defective cells deserves."""
    return tasks.surface_score(float(cells.sum()) / max(float(filled.sum()), 1.0))


Fault = Literal["", "wrong workpiece", "wrong model", "missing", "extra", "several"]
FAULTS: tuple[Fault, ...] = ("wrong workpiece", "wrong model", "missing", "extra", "several")
"""`wrong workpiece` is an error at workpiece level, `wrong model` one at model-number level."""


def fault_of(
    required: Mapping[str, int],
    readings: Mapping[str, str],
    answers: tuple[str, ...] | None,
    missing: tuple[str, ...] | None,
    violations: int | None,
) -> tuple[Fault, str]:
    """(what is wrong, how wrong and right part resemble each other or ""), by the truth.

    `required` empty: a batch in which the majority is right. ("", "") also where it is not told.
    """
    if (violations or 0) > 1:
        return "several", ""
    objected = [mark for mark in answers or () if mark in readings]
    absent = list(missing or ())
    if not required and readings and objected:
        ((right, times),) = Counter(readings.values()).most_common(1)
        if times > 1:
            absent = [right]
    if objected and not absent:
        return "extra", ""
    if absent and not objected:
        return "missing", ""
    if not objected:
        return "", ""
    wrong_part, right_part = readings[objected[0]], absent[0]
    if wrong_part.partition(" ")[0] != right_part.partition(" ")[0]:
        return "wrong workpiece", ""
    return "wrong model", lookalikes.kind(right_part, wrong_part) or ""
