"""Which of the 16 x 16 cells of each view are defective by the truth of a case. Reads files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station.contract import grid as grids
from forge_station.contract import tasks
from forge_station.contract.grid import DefectGrid
from forge_station.contract.views import MARKS, VIEWS, Layout
from forge_station.errors import InputError
from forge_station.geometry import view_images
from forge_station.geometry.pose import PartCloud
from training.evaluation.case_files import PHOTO, Case
from training.evaluation.case_input import Seen
from training.evaluation.rows import CELL_VIEWS, Cell
from training.evaluation.truth import defect_flags, surface_truth

Cells = tuple[Cell, ...]
Mask = NDArray[np.bool_]


def true_cells(
    case: Case, seen: Seen, part: PartCloud | None, folder: Path, layout: Layout
) -> tuple[Cells | None, Cells]:
    """(defective cells or None where they are not told, all cells of the part)."""
    truth = case.truth
    whole: Cells = ()
    if part is not None:
        flags = np.zeros(len(part.points), np.float32)
        if truth.points is not None:
            flags = _flags(folder / truth.points, seen, part)
        found = surface_truth(part, flags)
        whole = _listed(found.filled)
        if truth.points is not None:
            return _listed(found.cells), whole
    if case.input.photo and PHOTO in {**(truth.masks or {}), **(truth.grids or {})}:
        return _on_panel(_photo_mask(case, folder), layout), whole
    if truth.masks is not None:
        return _masked(truth.masks, seen, folder, layout), whole
    if truth.grids is not None:
        return _given(truth.grids), whole
    return (() if truth.defect == tasks.NORMAL else None), whole


def true_photo_cells(case: Case, folder: Path) -> Cells | None:
    """Defective cells of the one grid that lies over a photo; None where they are not told."""
    truth = case.truth
    if truth.masks is not None:
        grid = grids.from_mask(_photo_mask(case, folder))
        return tuple((CELL_VIEWS.index(PHOTO), r, c) for r, c in grid.indices())
    if truth.grids is not None:
        return _given(truth.grids)
    return () if truth.defect == tasks.NORMAL else None


def _given(listed: Mapping[str, tuple[tuple[int, int], ...]]) -> Cells:
    return tuple(
        (CELL_VIEWS.index(view), row, column)
        for view, cells in listed.items()
        for row, column in cells
    )


def _flags(path: Path, seen: Seen, part: PartCloud) -> NDArray[np.float32]:
    where = f"truth.points: {path}, array defect"
    if seen.cloud is None:
        raise InputError("defective points need a scene in the tray frame", which=where)
    try:
        with np.load(path, allow_pickle=False) as stored:
            defect = np.asarray(stored["defect"], bool).ravel()
    except (OSError, KeyError, ValueError) as error:
        raise InputError("defective points cannot be read", which=where, got=error) from error
    if len(defect) != len(seen.cloud.points):
        raise InputError(
            "not one flag for every point of the scene",
            which=where,
            expected=f"bool [{len(seen.cloud.points)}]",
            got=f"[{len(defect)}]",
        )
    return defect_flags(part, seen.cloud.points, defect)


def _masked(masks: Mapping[str, str], seen: Seen, folder: Path, layout: Layout) -> Cells:
    """Cells of masks that have the size of their views; they are placed as the views are."""
    views = seen.views.get(MARKS[0])
    if views is None:
        raise InputError("masks need views", which="truth.masks", expected="input.views")
    placed = np.zeros((len(VIEWS), grids.SIDE, grids.SIDE), bool)
    for view, name in masks.items():
        mask = _mask(folder / name, f"truth.masks.{view}", views[view].shape)
        # Drawn as the view is, but bright where the mask is: the same box, the same place.
        grey = np.where(views[view] > 0, np.where(mask, 255, 1), 0).astype(np.uint8)
        placed[VIEWS.index(view)] = _panel_cells({**views, view: grey}, view, layout).cells
    return _listed(placed)


def _on_panel(mask: Mask, layout: Layout) -> Cells:
    """Where a photo's mask comes to lie when the photo is drawn as a top view."""
    grey = np.where(mask, 255, 1).astype(np.uint8)
    placed = np.zeros((len(VIEWS), grids.SIDE, grids.SIDE), bool)
    placed[VIEWS.index("top")] = _panel_cells({"top": grey}, "top", layout).cells
    return _listed(placed)


def _panel_cells(views: Mapping[str, NDArray[np.uint8]], view: str, layout: Layout) -> DefectGrid:
    drawn = view_images.surface_picture(views, 1.0, layout)
    left = VIEWS.index(view) * layout.panel
    return grids.from_mask(drawn.image[:, left : left + layout.panel, 0] > 127)


def _photo_mask(case: Case, folder: Path) -> Mask:
    """bool of the photo's size, from its mask or from its cells."""
    photo = view_images.read_image(folder / (case.input.photo or ""))
    if case.truth.masks and PHOTO in case.truth.masks:
        return _mask(folder / case.truth.masks[PHOTO], f"truth.masks.{PHOTO}", photo.shape)
    cells = DefectGrid.of((case.truth.grids or {}).get(PHOTO, ())).cells.astype(np.uint8)
    size = (photo.shape[1], photo.shape[0])
    return np.asarray(cv2.resize(cells, size, interpolation=cv2.INTER_NEAREST) > 0)


def _mask(path: Path, which: str, shape: tuple[int, ...]) -> Mask:
    mask = view_images.read_image(path) > 0
    if mask.shape != shape:
        raise InputError(
            "mask and view differ in size",
            which=f"{which}: {path}",
            expected=f"{shape[1]}x{shape[0]}",
            got=f"{mask.shape[1]}x{mask.shape[0]}",
        )
    return mask


def _listed(cells: Mask) -> Cells:
    return tuple((int(v), int(r), int(c)) for v, r, c in np.argwhere(cells))
