"""The two pictures the model is given: the marks sheet and the surface picture.

Same code in training and at the edge. Knows layouts and part clouds, not what a part is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from forge_station.contract.views import AXES, MARKS, VIEWS, Layout
from forge_station.geometry import render

Points = NDArray[np.floating]

# 5 x 7 letters, one string of bits a row.
_GLYPHS = {
    "A": ("01110", "10001", "10001", "11111", "10001", "10001", "10001"),
    "B": ("11110", "10001", "10001", "11110", "10001", "10001", "11110"),
    "C": ("01110", "10001", "10000", "10000", "10000", "10001", "01110"),
    "D": ("11110", "10001", "10001", "10001", "10001", "10001", "11110"),
    "E": ("11111", "10000", "10000", "11110", "10000", "10000", "11111"),
    "F": ("11111", "10000", "10000", "11110", "10000", "10000", "10000"),
}


@dataclass(frozen=True)
class Box:
    """Axis-aligned robust bounds of a part, mm, in the part frame."""

    low: tuple[float, float, float]
    high: tuple[float, float, float]

    @property
    def centre(self) -> tuple[float, float, float]:
        return (
            (self.low[0] + self.high[0]) / 2,
            (self.low[1] + self.high[1]) / 2,
            (self.low[2] + self.high[2]) / 2,
        )

    def extent(self, axis: int) -> float:
        return self.high[axis] - self.low[axis]


@dataclass(frozen=True)
class Sheet:
    """A picture for the model. `image` [H, W, 3] uint8 (shade, relief, height)."""

    image: NDArray[np.uint8]
    mm_per_px: float
    column_of: dict[str, int] = field(default_factory=dict)
    """Column of each mark (marks sheet only)."""
    centre_mm: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Point of the part frame in the middle of every panel (surface picture only)."""


def robust_box(points: Points) -> Box:
    """Bounds that ignore the outermost 0.3 % of points a side (flying points); z starts at 0.

    The tray plane is known, so the underside of a part is the tray, seen or not.
    """
    (x_low, x_high), (y_low, y_high), (_, z_high) = (
        _bounds(np.ascontiguousarray(axis)) for axis in np.asarray(points).T
    )
    return Box((x_low, y_low, 0.0), (x_high, y_high, z_high))


def _bounds(values: Points) -> tuple[float, float]:
    """The 0.3 and 99.7 percentile, linear between values."""
    ranks = (len(values) - 1) * np.array([0.003, 0.997])
    below = ranks.astype(np.int64)
    above = np.minimum(below + 1, len(values) - 1)
    ordered = np.partition(values, np.unique([below, above]))
    low, high = ordered[below].astype(np.float64), ordered[above].astype(np.float64)
    found = low + (high - low) * (ranks - below)
    return float(found[0]), float(found[1])


def _step_up(mm_per_px: float) -> float:
    """The next value of a geometric series with 20 steps a decade: one scale, few values."""
    return float(10 ** (math.ceil(20 * math.log10(mm_per_px) - 1e-9) / 20))


def marks_sheet(parts: Sequence[Points], columns: Sequence[int], layout: Layout) -> Sheet:
    """Draw parts (clouds [N, 3] mm in their part frames) as marks A, B, ... on one sheet.

    `columns[i]` is the column of part i: marks stand in shuffled order so that a reader must read
    the letter. All cells share one scale. Raises ValueError for more parts than marks.
    """
    if len(parts) != len(columns) or len(set(columns)) != len(columns):
        raise ValueError(f"marks sheet: {len(parts)} parts need as many distinct columns")
    if not 0 < len(parts) <= layout.columns:
        raise ValueError(f"marks sheet: 1..{layout.columns} parts fit, got {len(parts)}")
    if not set(columns) <= set(range(layout.columns)):
        raise ValueError(f"marks sheet: columns 0..{layout.columns - 1} fit, got {columns}")
    boxes = [robust_box(points) for points in parts]
    inner = (layout.cell - layout.strip - layout.margin, layout.cell - 2 * layout.margin)
    needed = max(
        max(box.extent(AXES[view].up) / inner[0], box.extent(AXES[view].right) / inner[1])
        for box in boxes
        for view in VIEWS
    )
    mm_per_px = _step_up(max(needed, 1e-3))
    image = np.zeros((*layout.sheet_size, 3), np.uint8)
    size = (layout.cell - layout.strip, layout.cell)
    for index, (points, box) in enumerate(zip(parts, boxes, strict=True)):
        left = columns[index] * layout.cell
        for row, view in enumerate(VIEWS):
            rendered = render.view_depth(points, view, mm_per_px, size, box.centre)
            axes = AXES[view]
            top = row * layout.cell
            image[top + layout.strip : top + layout.cell, left : left + layout.cell] = (
                render.channels(rendered, axes.sign * box.centre[axes.towards])
            )
            draw_letter(image, MARKS[index], left, top, layout)
    column_of = {MARKS[i]: int(c) for i, c in enumerate(columns)}
    return Sheet(image, mm_per_px, column_of)


def surface_picture(points: Points, layout: Layout) -> tuple[Sheet, dict[str, render.View]]:
    """One part, field filled: panels front, side, top in a row, one scale.

    Returns the picture and the depth view of each panel (to place cells in mm).
    """
    box = robust_box(points)
    inner = layout.panel * (1 - 1 / 14)
    needed = max(box.extent(axis) for axis in range(3)) / inner
    mm_per_px = max(needed, 1e-4)
    image = np.zeros((*layout.surface_size, 3), np.uint8)
    views = {}
    for index, view in enumerate(VIEWS):
        rendered = render.view_depth(
            points, view, mm_per_px, (layout.panel, layout.panel), box.centre
        )
        axes = AXES[view]
        left = index * layout.panel
        image[:, left : left + layout.panel] = render.channels(
            rendered, axes.sign * box.centre[axes.towards]
        )
        views[view] = rendered
    return Sheet(image, mm_per_px, centre_mm=box.centre), views


def draw_letter(image: NDArray[np.uint8], mark: str, left: int, top: int, layout: Layout) -> None:
    """Draw `mark` into the strip of the cell whose upper left pixel is (left, top)."""
    factor = max(1, layout.cell // 56)
    bits = np.array([[int(bit) for bit in row] for row in _GLYPHS[mark]], np.uint8)
    glyph = np.kron(bits, np.ones((factor, factor), np.uint8)) * 255
    y, x = top + factor, left + factor
    image[y : y + glyph.shape[0], x : x + glyph.shape[1]] = glyph[..., None]
