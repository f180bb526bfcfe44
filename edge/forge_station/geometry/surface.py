"""One part's surface as the model is shown it: a first look, and a closer one where it matters.

The first look shows the whole part in each view. A closer look shows, of each view, a window of
half its side at twice the scale: what the 16 x 16 grid and the first look's pixels lose. Knows
part clouds and references, no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from forge_station.contract.grid import SIDE as GRID_SIDE
from forge_station.contract.views import AXES, VIEWS, Layout
from forge_station.geometry import reference, render, sheet
from forge_station.geometry.reference import Fit, Point, Reference
from forge_station.geometry.render import View
from forge_station.geometry.sheet import Sheet

ZOOM = 2
WINDOW = GRID_SIDE // ZOOM
"""Side of a window, cells of the first look."""
_CENTRE = (GRID_SIDE // 2, GRID_SIDE // 2)
Window = tuple[int, int]
"""Upper left cell (row, column) of a window, 0..GRID_SIDE - WINDOW."""


@dataclass(frozen=True)
class CloserLook:
    """A picture like the first, but of `windows`: view -> window."""

    picture: Sheet
    windows: Mapping[str, Window]


@dataclass(frozen=True)
class Surface:
    """The first look at a part. `picture`: shade, relief, and the difference from the reference.

    `views`: its depth views. `fit` None: no reference was known, the third channel is blank; or,
    with `height`, it is the height.
    """

    picture: Sheet
    views: Mapping[str, View]
    points: NDArray[np.floating]
    layout: Layout
    fit: Fit | None = None
    height: bool = False

    def closer(self, windows: Mapping[str, Window]) -> tuple[Sheet, dict[str, View]]:
        """The same picture of a window of each view at `ZOOM` times the scale, and its views."""
        panel = self.layout.panel
        mm_per_px = self.picture.mm_per_px / ZOOM
        image = np.zeros_like(self.picture.image)
        views = {}
        for index, name in enumerate(VIEWS):
            middle = self.middle(name, windows[name])
            drawn = render.view_depth(self.points, name, mm_per_px, (panel, panel), middle)
            left = index * panel
            image[:, left : left + panel] = self._channels(drawn, name, middle)
            views[name] = drawn
        return replace(self.picture, image=image, mm_per_px=mm_per_px), views

    def closer_look(self, windows: Mapping[str, Window]) -> CloserLook:
        """The picture of `closer` alone."""
        return CloserLook(self.closer(windows)[0], windows)

    def middle(self, name: str, window: Window) -> Point:
        """The point of the part frame in the middle of a view's window, mm."""
        cell = self.picture.mm_per_px * self.layout.panel / GRID_SIDE
        row, column = (at + (WINDOW - GRID_SIDE) / 2 for at in window)
        axes = AXES[name]
        middle = list(self.picture.centre_mm)
        middle[axes.right] += column * cell
        middle[axes.up] -= row * cell
        return middle[0], middle[1], middle[2]

    def _channels(self, view: View, name: str, middle: Point) -> NDArray[np.uint8]:
        axes = AXES[name]
        drawn = render.channels(view, axes.sign * self.picture.centre_mm[axes.towards])
        if not self.height:
            drawn[..., 2] = 0 if self.fit is None else self.fit.channel(view, name, middle)
        return drawn


def look(
    points: NDArray[np.floating],
    layout: Layout,
    known: Reference | None = None,
    *,
    height: bool = False,
) -> Surface:
    """The first look at a part cloud [N, 3] mm in its part frame. `height`: show no difference."""
    picture, views = sheet.surface_picture(points, layout)
    if height:
        return Surface(picture, views, points, layout, None, True)
    image = picture.image.copy()
    image[..., 2] = 0
    fit = None
    if known is not None:
        fit = reference.fit(views, picture.centre_mm, known)
        image[..., 2] = np.concatenate([fit.channel(views[n], n) for n in VIEWS], axis=1)
    return Surface(replace(picture, image=image), views, points, layout, fit)


def suspicious(cells: NDArray[np.floating]) -> dict[str, Window]:
    """Of each view the window with the most in it; `cells` [views, 16, 16], how suspicious each is.

    Of equal windows the one around the most suspicious cell, or the middle one where there is none.
    """
    found = {}
    for name, view in zip(VIEWS, np.asarray(cells, np.float64), strict=True):
        total = np.pad(view.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
        inside = total[WINDOW:, WINDOW:] - total[:-WINDOW, WINDOW:]
        inside = inside - total[WINDOW:, :-WINDOW] + total[:-WINDOW, :-WINDOW]
        best = np.argwhere(inside >= 0.98 * inside.max())
        peak = np.unravel_index(int(view.argmax()), view.shape) if view.any() else _CENTRE
        away = np.abs(best - (np.asarray(peak) - WINDOW // 2)).sum(1)
        row, column = best[int(away.argmin())]
        found[name] = (int(row), int(column))
    return found
