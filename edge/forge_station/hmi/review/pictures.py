"""Pictures of a part that say nothing of its verdict: drawn anew from its points.

Every picture has the same size. The window follows from the points alone, and is the one of the
surface check, so that the 16 x 16 cells of a picture are those of the model's grid.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import cv2

from forge_station.contract.views import MARKS, VIEWS, Layout
from forge_station.geometry import render, sheet
from forge_station.geometry.pose import PartCloud

SIDE_PX = 480
DRAWN_PX = Layout.panel
"""Drawn as coarsely as the model's picture, then enlarged: walls that the cameras saw at a slant
have fewer points, and finer pixels show the far side through them, which looks like pits."""
_MARGIN = 14 / 13
"""The window over the longest side of the part, as in `geometry.sheet.surface_picture`."""


@dataclass(frozen=True)
class Shown:
    """One part. `views`: view -> PNG, SIDE_PX square, grey."""

    mark: str
    views: Mapping[str, bytes]
    side_mm: float
    """What a side of the pictures is long."""


def drawn(parts: Sequence[PartCloud], *, together: bool = False) -> list[Shown]:
    """Pictures of every part that has a mark. `together`: all at the scale of the largest."""
    marked = list(zip(MARKS, parts, strict=False))
    boxes = [sheet.robust_box(part.points) for _, part in marked]
    sides = [max(1e-3, _MARGIN * max(box.extent(axis) for axis in range(3))) for box in boxes]
    if together and sides:
        sides = [max(sides)] * len(sides)
    found = []
    for (mark, part), box, side_mm in zip(marked, boxes, sides, strict=True):
        views = {}
        for view in VIEWS:
            depth = render.view_depth(
                part.points, view, side_mm / DRAWN_PX, (DRAWN_PX, DRAWN_PX), box.centre
            )
            sized = cv2.resize(
                render.shade(depth), (SIDE_PX, SIDE_PX), interpolation=cv2.INTER_LINEAR
            )
            views[view] = cv2.imencode(".png", sized)[1].tobytes()
        found.append(Shown(mark, views, side_mm))
    return found


def digests(shown: Sequence[Shown]) -> dict[str, str]:
    """`A.front` -> SHA-256 of the picture."""
    return {
        f"{part.mark}.{view}": hashlib.sha256(png).hexdigest()
        for part in shown
        for view, png in part.views.items()
    }


__all__ = ["SIDE_PX", "Shown", "digests", "drawn"]
