"""The worst cases of a run and what the model was shown of them, for the report. Asks no model."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station import checks
from forge_station.contract import tasks
from forge_station.contract.views import LARGE_LAYOUT, VIEWS
from forge_station.errors import StationError
from forge_station.geometry import sheet
from forge_station.pipeline import Inspector
from training.evaluation import by_photo, case_input, surface_figures, tray_figures
from training.evaluation.by_station import BAD_DATA, Settings, surface_of
from training.evaluation.case_files import PHOTO, Case
from training.evaluation.pictures import METRIC, encoded
from training.evaluation.rows import CELL_VIEWS, Row

ByteImage = NDArray[np.uint8]
_LONGEST_PX = 1344


@dataclass(frozen=True)
class Drawn:
    """Pictures of one case as PNG; `panels`: view index -> (x, y, width, height) of its grid."""

    images: tuple[bytes, ...]
    width: int
    height: int
    panels: Mapping[int, tuple[int, int, int, int]]

    @property
    def addresses(self) -> list[str]:
        """The pictures as data addresses."""
        return [f"data:image/png;base64,{base64.b64encode(png).decode()}" for png in self.images]


@dataclass(frozen=True)
class Drawer:
    """Draws what was shown. Without an inspector: what an endpoint was shown."""

    folder: Path
    inspector: Inspector | None
    settings: Settings | None
    style: str = METRIC

    def draw(self, case: Case) -> Drawn | None:
        """The model's picture of a case; None where it has none."""
        try:
            return self._draw(case)
        except (StationError, *BAD_DATA):
            return None

    def _draw(self, case: Case) -> Drawn | None:
        wanted = None if self.inspector is None else self.inspector.model.manifest.photo
        if case.input.photo and wanted is not None:
            return _of_photo(by_photo.picture_of(case, self.folder, wanted).image)
        layout = LARGE_LAYOUT if self.inspector is None else self.inspector.layout
        if case.input.photo and self.inspector is None:
            return _of_photo(_read(self.folder / case.input.photo))
        seen = case_input.look(case, self.folder, layout)
        if seen.pictures is not None:
            surface, marks = seen.pictures.surface, seen.pictures.marks
        elif not seen.parts:
            return None
        elif case.task == "surface":
            part = max(seen.parts, key=lambda item: len(item.points))
            if self.inspector is not None and self.settings is not None:
                surface = surface_of(self.inspector, part, case, self.settings)[0].picture
            else:
                surface, _ = sheet.surface_picture(part.points, layout)
            marks = surface
        else:
            columns = checks.columns_of(len(seen.parts), layout)
            marks = sheet.marks_sheet([part.points for part in seen.parts], columns, layout)
            surface = marks
        if case.task != "surface":
            return _of(marks.image, {})
        side = layout.panel
        panels = {i: (i * side, 0, side, side) for i in range(len(VIEWS))}
        return _of(surface.image, panels)


def _read(path: Path) -> ByteImage:
    image = cv2.imread(str(path), cv2.IMREAD_COLOR)
    if image is None:
        raise ValueError(f"not a readable image: {path}")
    return np.asarray(cv2.cvtColor(image, cv2.COLOR_BGR2RGB), np.uint8)


def _of_photo(image: ByteImage) -> Drawn:
    longest = max(image.shape[:2])
    if longest > _LONGEST_PX:
        factor = _LONGEST_PX / longest
        small = cv2.resize(image, None, fx=factor, fy=factor, interpolation=cv2.INTER_AREA)
        image = np.asarray(small, np.uint8)
    height, width = image.shape[:2]
    panels = {CELL_VIEWS.index(PHOTO): (0, 0, width, height)}
    return Drawn((encoded(image),), width, height, panels)


def _of(image: ByteImage, panels: Mapping[int, tuple[int, int, int, int]]) -> Drawn:
    """The shading; of a surface also the third channel, height or difference."""
    height, width = image.shape[:2]
    channels = (0, 2) if panels else (0,)
    grey = [np.repeat(image[..., c : c + 1], 3, axis=2) for c in channels]
    return Drawn(tuple(encoded(item) for item in grey), width, height, panels)


def badness(row: Row) -> float:
    """How wrong a row is, for the order of the report: 0 is right, an escape is worst."""
    if row.error:
        return 0.0
    bad = 0.0
    if row.expected == "FAIL" and row.outcome == "PASS":
        bad += 3.0
    elif row.expected == "PASS" and row.outcome == "FAIL":
        bad += 2.0
    if row.task == "surface":
        return bad + _surface_badness(row)
    wrong = [mark for mark in row.marks if mark.read != mark.true]
    bad += sum(0.5 + mark.probability / 2 for mark in wrong)
    if row.answers_true is not None and not tray_figures.decision_right(row):
        bad += 1.0
    return bad


def _surface_badness(row: Row) -> float:
    bad = 0.0
    p = row.defect_probability
    if row.defect_true is not None and row.defect != row.defect_true:
        bad += 1.0
        if p is not None:
            bad += p if row.defect_true == tasks.NORMAL else 1.0 - p
    if row.cells_true:
        bad += 0.8 * (1.0 - surface_figures.iou(row.cells or (), row.cells_true))
    elif row.cells_true == () and row.cells:
        bad += 0.3
    return bad


def worst(rows: Sequence[Row], task: str, count: int) -> list[Row]:
    """The `count` worst rows of a task that are wrong in anything, worst first."""
    own = [(badness(row), row) for row in rows if row.task == task]
    ranked = sorted((item for item in own if item[0] > 0), key=lambda item: -item[0])
    return [row for _, row in ranked[:count]]
