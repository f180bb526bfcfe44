"""The picture of an inspection for people: outcome, reasons, each part as seen and as read.

It does not decide, inspect or write files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forge_station.contract.catalogue import WORKPIECES
from forge_station.contract.verdict import Outcome, PartReading, SurfaceReading, Verdict
from forge_station.contract.views import AXES, MARKS, NANO_LAYOUT, VIEWS, Layout
from forge_station.geometry import picture, render, sheet
from forge_station.geometry.picture import MarkPicture, Title
from forge_station.geometry.pose import PartCloud
from forge_station.pipeline import Inspection

ByteImage = NDArray[np.uint8]

VIEW_PX = 480
"""Longest side of a rendered view in pixels: several times what the model is given."""
_NAMES = re.compile(rf"\b(?:{'|'.join(WORKPIECES)})\b")
_MARGIN = 1.06
# A view pixel of this many camera pixels is filled by one pose, by two, by more fused ones.
_FILLED_PX = (1.3, 1.0, 0.8)


@dataclass(frozen=True)
class ReadyViews:
    """Views of a mark that came as images, for parts without a cloud. One mm per pixel for all.

    `metric` False: `mm_per_px` is a stand-in, nobody knows the size.
    """

    views: Mapping[str, ByteImage]
    mm_per_px: float
    metric: bool = True


def picture_of(
    inspection: Inspection,
    layout: Layout = NANO_LAYOUT,
    *,
    ready: Mapping[str, ReadyViews] | None = None,
) -> bytes:
    """PNG bytes of the picture for people: outcome, reasons, each part as seen and as read.

    All parts at one scale. A part whose defect grid has cells fills the field that the surface
    check looked at, with the cells outlined; `layout` is the one the inspector drew with. `ready`:
    views of marks that came as images instead of a cloud.
    """
    verdict = inspection.verdict
    shown = dict(ready or {})
    shown |= _rendered(inspection, layout)
    marks = [_mark_picture(verdict, mark, shown[mark]) for mark in sorted(shown)]
    product = "" if verdict.product == "none" else verdict.product
    title = Title(
        verdict.outcome,
        verdict.serial,
        "   ".join(word for word in (verdict.line, product) if word),
        verdict.timings_ms.get("total"),
        _details(verdict),
        metric=all(views.metric for views in shown.values()),
    )
    reasons = [_spoken(reason.text) for reason in verdict.reasons]
    return picture.encode(picture.draw(title, reasons, marks))


def _rendered(inspection: Inspection, layout: Layout) -> dict[str, ReadyViews]:
    """The views of every part cloud that has a mark; grids decide the window, else the part."""
    parts = dict(zip(MARKS, inspection.parts, strict=False))
    boxes = {mark: sheet.robust_box(part.points) for mark, part in parts.items()}
    longest = max((box.extent(axis) for box in boxes.values() for axis in range(3)), default=1.0)
    shown = {}
    for mark, part in parts.items():
        looked = inspection.surface_pictures.get(mark)
        marked = any(grid.cells for grid in inspection.verdict.grids if grid.mark == mark)
        if looked is not None and marked:
            side_mm, centre = looked.mm_per_px * layout.panel, looked.centre_mm
            shown[mark] = square_views(part, side_mm, centre)
        else:
            finest = _MARGIN * longest / VIEW_PX
            shown[mark] = _fitted_views(part, boxes[mark], finest)
    return shown


def square_views(part: PartCloud, side_mm: float, centre: tuple[float, float, float]) -> ReadyViews:
    """Views of exactly `side_mm` square, so that a grid over the whole image fits."""
    pixels = max(32, min(VIEW_PX, int(side_mm / _filled_mm(part))))
    mm_per_px = side_mm / pixels
    views = {
        view: render.shade(
            render.view_depth(part.points, view, mm_per_px, (pixels, pixels), centre)
        )
        for view in VIEWS
    }
    return ReadyViews(views, mm_per_px)


def _fitted_views(part: PartCloud, box: sheet.Box, finest_mm: float) -> ReadyViews:
    """Views just large enough for the part, at most as fine as the scan can fill."""
    mm_per_px = max(finest_mm, _filled_mm(part))
    views = {}
    for view in VIEWS:
        axes = AXES[view]
        height, width = (
            max(8, int(_MARGIN * box.extent(axis) / mm_per_px) + 6)
            for axis in (axes.up, axes.right)
        )
        depth = render.view_depth(part.points, view, mm_per_px, (height, width), box.centre)
        views[view] = render.shade(depth)
    return ReadyViews(views, mm_per_px)


def _filled_mm(part: PartCloud) -> float:
    """Size of a view pixel that the cloud still fills without holes."""
    share = _FILLED_PX[min(part.poses, len(_FILLED_PX)) - 1]
    return max(share * part.camera_pixel_mm, 1e-4)


def _mark_picture(verdict: Verdict, mark: str, shown: ReadyViews) -> MarkPicture:
    part = next((item for item in verdict.parts if item.mark == mark), None)
    surface = next((item for item in verdict.surface if item.mark == mark), None)
    grids: dict[str, NDArray[np.bool_]] = {}
    for grid in verdict.grids:
        if grid.mark == mark and any(g.cells for g in verdict.grids if g.mark == mark):
            cells = np.zeros((grid.rows, grid.columns), np.bool_)
            for row, column in grid.cells:
                cells[row, column] = True
            grids[grid.view] = cells
    return MarkPicture(
        mark=mark,
        views=shown.views,
        mm_per_px=shown.mm_per_px,
        reading=part.part if part is not None else "",
        probability=part.probability if part is not None else None,
        size_mm=part.size_mm if part is not None else None,
        grids=grids,
        notes=_notes(part, surface),
        flagged=_flagged(verdict, mark),
    )


def _notes(part: PartReading | None, surface: SurfaceReading | None) -> tuple[str, ...]:
    notes = []
    if surface is not None:
        words = [f"surface {surface.defect_class} {_percent(surface.probability)}"]
        if surface.score is not None:
            words.append(f"score {surface.score:.1f}/10")
        notes += words
    if part is not None and part.probability < 0.9 and part.alternatives:
        other = part.alternatives[0]
        notes.append(_spoken(f"or {other.part} {_percent(other.probability)}"))
    return tuple(notes)


def _spoken(text: str) -> str:
    """Names of the catalogue as people say them: `hex_nut` -> `hex nut`; file names stay."""
    return _NAMES.sub(lambda found: found[0].replace("_", " "), text)


def _percent(share: float) -> str:
    return ">99 %" if share >= 0.995 else f"{100 * share:.0f} %"


def _flagged(verdict: Verdict, mark: str) -> bool:
    """Whether a mark is a cause of the outcome."""
    if any(part.mark == mark and part.outcome is Outcome.FAIL for part in verdict.parts):
        return True
    return any(reason.mark == mark for reason in verdict.reasons)


def _details(verdict: Verdict) -> tuple[str, ...]:
    scan = verdict.scan
    details = [f"{scan.points} points"] if scan.points or not verdict.parts else []
    if scan.camera_pixel_mm:
        details.append(f"{scan.camera_pixel_mm:.3f} mm a pixel")
    if verdict.model is not None:
        details.append(f"{verdict.model.name} {verdict.model.version}")
    if scan.source:
        details.append(Path(re.split(r"[:;] ", scan.source)[0]).name)
    if verdict.certification is not None and verdict.certification.mode == "advisory":
        details.append("ADVISORY, not certified")
    if verdict.end_time or verdict.begin_time:
        details.append(verdict.end_time or verdict.begin_time)
    return tuple(details)
