"""Pictures with labelled regions (COCO, LabelMe, YOLO) -> examples, in one of two readings.

`defects`: the regions are damage. Class (of the largest region if there are several), score and a
grid in which every region has one cell at least. `marks`: the regions are parts. Each gets a mark
in reading order, its centre goes into the question, its class is the answer; a picture with more
parts than marks becomes several examples.

A picture without regions is not known to be clean: annotators leave out what they have not looked
at. `--unannotated` says what it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from forge_station.contract import grid, tasks
from forge_station.contract.grid import SIDE, DefectGrid
from forge_station.contract.views import MARKS
from training.data import conversations
from training.data.loaders.documents import is_number
from training.data.loaders.masks import parse_classes
from training.data.loaders.sample import (
    Grouping,
    Loaded,
    LoadError,
    Picture,
    Problems,
    Sample,
    class_name,
    part_name,
    sample_id,
    word,
)
from training.data.loaders.surfaces import photo_surface

Box = tuple[float, float, float, float]
_CANVAS = 1000
_SLACK_PX = 1.0
"""Boxes may leave their picture by this much: rounding of the tools."""


@dataclass(frozen=True)
class Region:
    """One labelled region in pixels: a box (x0, y0, x1, y1), with outlines or a mask if known."""

    label: str
    box: Box
    outlines: tuple[tuple[tuple[float, float], ...], ...] = ()
    mask: NDArray[np.bool_] | None = None

    def area(self) -> float:
        """Square pixels of the box: what decides which class a picture with several has."""
        return (self.box[2] - self.box[0]) * (self.box[3] - self.box[1])

    def cells(self, size: tuple[int, int], coverage: str) -> DefectGrid:
        """The grid of the region in a picture (height, width), by the area or the paper's rule."""
        height, width = size
        if coverage == "area":
            if self.mask is not None:
                return grid.from_mask(self.mask)
            if self.outlines:
                return grid.from_mask(_drawn(self.outlines, size, 1.0, 1.0))
            return grid.from_boxes([self.box], size)
        if self.mask is not None:
            return grid.from_mask_paper(self.mask)
        x, y = _CANVAS / width, _CANVAS / height
        if self.outlines:
            return grid.from_mask_paper(_drawn(self.outlines, (_CANVAS, _CANVAS), x, y))
        x0, y0, x1, y1 = self.box
        return grid.from_boxes_paper([(x0 * x, y0 * y, (x1 - x0) * x, (y1 - y0) * y)])


@dataclass(frozen=True)
class Annotated:
    """A picture and its regions; `path` below the folder of the pictures."""

    folder: Path
    path: Path
    regions: tuple[Region, ...]

    @property
    def picture(self) -> Picture:
        return Picture(self.path, which=str(self.path.relative_to(self.folder)))


@dataclass(frozen=True)
class Reading:
    """How regions become examples."""

    kind: Literal["defects", "marks"]
    part: str
    coverage: str = "area"
    unannotated: Literal["error", "clean", "skip"] = "error"
    classes: Mapping[str, str] | None = None
    """Name in the source -> class or part; None: the name in lower case."""


@dataclass
class Tally:
    """What the command reports beside the counts of labels."""

    pictures: int = 0
    regions: int = 0
    unannotated: int = 0
    vanished: int = 0
    """Pictures with regions whose grid is empty (paper's rule only)."""

    def figures(self) -> dict[str, Any]:
        return dict(vars(self))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--as", dest="kind", choices=["defects", "marks"], default="defects",
        help="regions are damage (class, score, grid) or parts (one mark each)")  # fmt: skip
    add("--part", default="part", help="part name in the facts (defects)")
    add("--classes", help="NAME=class,...: only these names are known")
    add("--coverage", choices=["area", "lanczos"], default="area", help="rule of the grid cells")
    add("--unannotated", choices=["error", "clean", "skip"], default="error",
        help="a picture without regions: refuse, clean, or leave out")  # fmt: skip


def reading_of(args: argparse.Namespace) -> Reading:
    check = class_name if args.kind == "defects" else part_name
    classes = parse_classes(args.classes, check) if args.classes else None
    return Reading(args.kind, part_name(args.part), args.coverage, args.unannotated, classes)


def loaded(
    name: str,
    found: Sequence[Annotated],
    reading: Reading,
    grouping: Grouping,
    problems: Problems,
) -> Loaded:
    """Examples of annotated pictures; `name` is the source."""
    groups = grouping.names([item.path.relative_to(item.folder).as_posix() for item in found])
    tally = Tally()
    samples: list[Sample] = []
    for item in found:
        relative = item.path.relative_to(item.folder)
        with problems.of(relative):
            group = groups[relative.as_posix()]
            tally.pictures += 1
            tally.regions += len(item.regions)
            if not item.regions:
                tally.unannotated += 1
                if reading.unannotated == "skip":
                    continue
                if reading.unannotated == "error" or reading.kind == "marks":
                    raise LoadError(
                        "picture without annotation", which="regions",
                        expected="one region or more, or --unannotated clean or skip",
                    )  # fmt: skip
            if reading.kind == "defects":
                samples.append(_defects(item, reading, group, tally))
            else:
                samples += _marks(item, reading, group)
    return Loaded(word(name), samples, tally.figures())


def checked(region: Region, size: tuple[int, int], which: str) -> Region:
    """The region with its box cut to the picture; LoadError when it is empty or outside."""
    x0, y0, x1, y1 = region.box
    height, width = size
    if not all(np.isfinite(region.box)) or not (x0 < x1 and y0 < y1):
        raise LoadError("empty box", which=which, expected="x0 < x1, y0 < y1", got=region.box)
    outside = max(-x0, -y0, x1 - width, y1 - height) > _SLACK_PX
    if outside or x1 <= 0 or y1 <= 0 or x0 >= width or y0 >= height:
        raise LoadError(
            "region outside its picture", which=which, expected=f"within {width} x {height}",
            got=tuple(round(value, 1) for value in region.box),
        )  # fmt: skip
    box = (max(0.0, x0), max(0.0, y0), min(float(width), x1), min(float(height), y1))
    return Region(region.label, box, region.outlines, region.mask)


def outlined(label: str, outlines: Sequence[Sequence[float]], which: str) -> Region:
    """A region of polygons given as x, y, x, y ...; its box is theirs."""
    polygons = []
    for flat in outlines:
        numbers = isinstance(flat, Sequence) and all(is_number(value) for value in flat)
        if not numbers or len(flat) < 6 or len(flat) % 2:
            raise LoadError(
                "not a polygon", which=which, expected="x, y of three points or more", got=flat
            )
        polygons.append(tuple(zip(map(float, flat[::2]), map(float, flat[1::2]), strict=True)))
    points = np.array([point for polygon in polygons for point in polygon])
    low, high = points.min(0), points.max(0)
    return Region(label, (low[0], low[1], high[0], high[1]), tuple(polygons))


def masked(label: str, mask: NDArray[np.bool_], which: str) -> Region:
    """A region of a mask bool [h, w]."""
    if not mask.any():
        raise LoadError("empty annotation", which=which, expected="a mask with a pixel or more")
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    box = (float(columns[0]), float(rows[0]), columns[-1] + 1.0, rows[-1] + 1.0)
    return Region(label, box, (), mask)


def reading_order(regions: Sequence[Region]) -> list[Region]:
    """Left to right, then down: a new line where a centre is half a median height lower."""
    if not regions:
        return []
    height = float(np.median([r.box[3] - r.box[1] for r in regions]))
    lines: list[list[Region]] = []
    top = -np.inf
    for region in sorted(regions, key=lambda r: _centre(r)[1]):
        if _centre(region)[1] - top > height / 2:
            lines.append([])
            top = _centre(region)[1]
        lines[-1].append(region)
    return [region for line in lines for region in sorted(line, key=lambda r: _centre(r)[0])]


def _defects(item: Annotated, reading: Reading, group: str, tally: Tally) -> Sample:
    size = item.picture.size()
    cells = np.zeros((SIDE, SIDE), np.bool_)
    for region in item.regions:
        cells |= region.cells(size, reading.coverage).cells
    tally.vanished += bool(item.regions) and not cells.any()
    names = {region.label: class_name(_named(region.label, reading)) for region in item.regions}
    largest = max(item.regions, key=Region.area, default=None)
    defect = names[largest.label] if largest is not None else tasks.NORMAL
    return Sample(
        id=sample_id(item.folder, item.path),
        pictures=(item.picture,),
        messages=photo_surface(reading.part, defect, cells),
        group=group,
        labels=tuple(sorted(set(names.values()))) or (tasks.NORMAL,),
        clean=largest is None,
    )


def _marks(item: Annotated, reading: Reading, group: str) -> list[Sample]:
    height, width = item.picture.size()
    ordered = reading_order(item.regions)
    out = []
    for start in range(0, len(ordered), len(MARKS)):
        own = dict(zip(MARKS, ordered[start : start + len(MARKS)], strict=False))
        places = {
            mark: f"[{x / width:.2f},{y / height:.2f}]"
            for mark, region in own.items()
            for x, y in [_centre(region)]
        }
        names = {mark: part_name(_named(r.label, reading)) for mark, r in own.items()}
        extra = f"-{start // len(MARKS)}" if len(ordered) > len(MARKS) else ""
        out.append(
            Sample(
                id=sample_id(item.folder, item.path) + extra,
                pictures=(item.picture,),
                messages=conversations.sheet(places_facts(places), names),
                group=group,
                labels=tuple(sorted(set(names.values()))),
            )
        )
    return out


def places_facts(places: Mapping[str, str]) -> str:
    """`positions`, then a line a mark: `A [0.43,0.44]`, shares of width and height."""
    return "\n".join(["positions", *(f"{mark} {place}" for mark, place in places.items())])


def _named(label: str, reading: Reading) -> str:
    if reading.classes is None:
        return word(label)
    if label not in reading.classes:
        raise LoadError(
            "unknown class", which="class", expected=", ".join(reading.classes), got=label
        )
    return reading.classes[label]


def _centre(region: Region) -> tuple[float, float]:
    return (region.box[0] + region.box[2]) / 2, (region.box[1] + region.box[3]) / 2


def _drawn(
    outlines: Sequence[Sequence[tuple[float, float]]], size: tuple[int, int], x: float, y: float
) -> NDArray[np.bool_]:
    """Mask [height, width] of polygons whose points are scaled by x and y; borders included."""
    image = Image.new("1", (size[1], size[0]))
    draw = ImageDraw.Draw(image)
    for polygon in outlines:
        draw.polygon([(px * x, py * y) for px, py in polygon], fill=1, outline=1)
    return np.asarray(image)
