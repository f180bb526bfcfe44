"""What is kept of an inspection, as files: its picture and verdict for people, the model's input.

    <name>.png, <name>.verdict.json
    <name>.input.json               which pictures the model was given, and the facts beside each
    <name>.sheet.png, <name>.surface-A.png ...      those pictures, to the bit

With a person's label the last ones become training examples (`training.load evidence`).
It does not decide or inspect. Files appear whole or not at all, and a disk that is full or
read-only is a warning, never an error: the verdict goes to MES by another way.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_station.contract import tasks
from forge_station.contract.catalogue import WORKPIECES
from forge_station.contract.verdict import Outcome, PartReading, SurfaceReading, Verdict
from forge_station.contract.views import AXES, MARKS, NANO_LAYOUT, VIEWS, Layout
from forge_station.geometry import picture, render, sheet
from forge_station.geometry.picture import MarkPicture, Title
from forge_station.geometry.pose import PartCloud
from forge_station.pipeline import Inspection

ByteImage = NDArray[np.uint8]

INPUT_SCHEMA = "forge-station.input/1.0"
VIEW_PX = 480
"""Longest side of a rendered view in pixels: several times what the model is given."""
_FAST = 1
"""PNG compression of files that are kept for later and not sent."""
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


@dataclass(frozen=True)
class Stored:
    """The files of one inspection; a path is None where the file could not be written."""

    verdict: Path | None
    picture: Path | None
    inputs: tuple[Path, ...] = ()
    """What the model was given: its pictures, and last the JSON that lists them."""
    warnings: tuple[str, ...] = ()


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


def store(
    folder: Path, inspection: Inspection, layout: Layout = NANO_LAYOUT, name: str | None = None
) -> Stored:
    """Write the files of an inspection; the default name is serial and result id.

    Never raises for the file system: what could not be written is in `warnings`.
    """
    name = name or default_name(inspection.verdict)
    png = picture_of(inspection, layout)
    return store_files(folder, name, inspection.verdict, png, inputs_of(inspection, name))


def store_files(
    folder: Path,
    name: str,
    verdict: Verdict,
    png: bytes,
    inputs: Mapping[str, bytes] | None = None,
) -> Stored:
    """As `store`, of a picture that is drawn already and of `inputs_of`."""
    warnings: list[str] = []

    def written(path: Path, content: bytes) -> Path | None:
        try:
            _write_whole(path, content)
        except OSError as error:
            warnings.append(f"evidence not written ({path}): {error.strerror or error}")
            return None
        return path

    picture = written(folder / f"{name}.png", png)
    kept = written(folder / f"{name}.verdict.json", _json(verdict.to_dict()))
    files: list[Path] = []
    for file, content in (inputs or {}).items() if kept is not None else ():
        path = written(folder / file, content)
        if path is None:
            break
        files.append(path)
    return Stored(kept, picture, tuple(files), tuple(warnings))


def inputs_of(inspection: Inspection, name: str) -> dict[str, bytes]:
    """File name -> content of what the model was given; {} when it was given nothing.

    PNG channels are those of the model's picture (red shade, green relief, blue height or
    difference). A second look is listed under `closer`, with the upper left cells of its windows.
    The JSON comes last, so that whoever finds it finds the pictures.
    """
    parts = {part.mark: part for part in inspection.verdict.parts if part.size_mm is not None}
    files: dict[str, bytes] = {}
    listed: list[dict[str, str]] = []
    if inspection.marks_picture is not None and parts:
        sizes = {mark: part.size_mm for mark, part in parts.items() if part.size_mm}
        facts = tasks.sheet_facts(sizes, inspection.marks_picture.mm_per_px)
        files[f"{name}.sheet.png"] = picture.encode(inspection.marks_picture.image, _FAST)
        listed.append({"file": f"{name}.sheet.png", "facts": facts})
    for mark, seen in sorted(inspection.surface_pictures.items()):
        if mark in parts and (size := parts[mark].size_mm):
            file = f"{name}.surface-{mark}.png"
            files[file] = picture.encode(seen.image, _FAST)
            facts = tasks.surface_facts(parts[mark].part, size)
            listed.append({"file": file, "mark": mark, "facts": facts})
    closer: list[dict[str, Any]] = []
    for mark, look in sorted(inspection.closer_looks.items()):
        file = f"{name}.surface-{mark}-closer.png"
        files[file] = picture.encode(look.picture.image, _FAST)
        windows = {view: list(window) for view, window in look.windows.items()}
        closer.append({"file": file, "mark": mark, "windows": windows})
    if listed:
        result = {"schema": INPUT_SCHEMA, "result_id": inspection.verdict.result_id}
        looks = {"closer": closer} if closer else {}
        files[f"{name}.input.json"] = _json(result | {"pictures": listed} | looks)
    return files


def _json(data: object) -> bytes:
    return f"{json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)}\n".encode()


def default_name(verdict: Verdict) -> str:
    """`<serial>-<end of the result id>`: the same part inspected twice keeps both."""
    return f"{file_name(verdict.serial)}-{file_name(verdict.result_id)[-8:]}"


def file_name(text: str) -> str:
    """`text` with everything that a file name should not hold replaced by `_`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("._")[:80] or "part"


def _write_whole(path: Path, content: bytes) -> None:
    """Write beside the place, flush to disk, then rename: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


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
            shown[mark] = _square_views(part, side_mm, centre)
        else:
            finest = _MARGIN * longest / VIEW_PX
            shown[mark] = _fitted_views(part, boxes[mark], finest)
    return shown


def _square_views(
    part: PartCloud, side_mm: float, centre: tuple[float, float, float]
) -> ReadyViews:
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


__all__: Sequence[str] = (
    "ReadyViews",
    "Stored",
    "default_name",
    "file_name",
    "inputs_of",
    "picture_of",
    "store",
    "store_files",
)
