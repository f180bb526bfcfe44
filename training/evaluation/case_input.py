"""The input of a case -> what the station's checks take: parts, or pictures without a cloud.

Reads files; decides nothing and knows no model. Every error names the field and the file.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station import sources
from forge_station.capture import base, replay, structured_light
from forge_station.capture.base import Cloud
from forge_station.contract.verdict import ScanSummary
from forge_station.contract.views import MARKS, VIEWS, Layout
from forge_station.errors import InputError
from forge_station.geometry import cloud_io, quality, scene, sheet, view_images
from forge_station.geometry.gauge import Size
from forge_station.geometry.pose import PartCloud
from forge_station.geometry.problem import Problem
from forge_station.geometry.view_images import ByteImage
from training.evaluation.case_files import Case

Views = Mapping[str, ByteImage]
NO_SIZE = Size(0.0, 0.0, 0.0, 1e6)
"""The size of a part on a photo: nothing is known, so nothing is contradicted."""


@dataclass(frozen=True)
class Pictures:
    """What comes without a cloud. `marks` shows all parts, `surface` the one at A.

    `sizes` are measured on the views; of a photo they are 0.
    """

    marks: sheet.Sheet
    surface: sheet.Sheet
    sizes: Mapping[str, Size]


@dataclass(frozen=True)
class Seen:
    """Parts in the order of their marks, or pictures; `cloud` where all of it is one tray."""

    parts: tuple[PartCloud, ...]
    problems: tuple[Problem, ...]
    summary: ScanSummary
    cloud: Cloud | None = None
    pictures: Pictures | None = None
    views: Mapping[str, Views] = field(default_factory=dict)


def look(case: Case, folder: Path, layout: Layout) -> Seen:
    """What the station sees of a case. Raises StationError where a file cannot be used."""
    given = case.input
    match given.source:
        case "scene":
            cloud = cloud_io.read_cloud(_file(folder, given.scene or ""), unit=given.unit)
            return _of_cloud(cloud, given.scene or "")
        case "scan":
            recording = replay.read(_file(folder, given.scan or ""))
            scans = structured_light.decode_all(recording.stacks, recording.calibrations)
            return _of_cloud(base.fuse(scans), given.scan or "")
        case "clouds":
            return _of_clouds(case, folder)
        case "views":
            return _of_views(case, folder, layout)
        case _:
            return _of_photo(case, folder, layout)


def _file(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.exists():
        raise InputError("no such file or folder", which=path)
    return path


def _of_cloud(cloud: Cloud, source: str) -> Seen:
    parts, problems = _separated(cloud)
    summary = ScanSummary(
        points=len(cloud.points),
        flags=tuple(cloud.quality.flags),
        source=source,
        poses=cloud.poses,
        camera_pixel_mm=cloud.camera_pixel_mm,
    )
    return Seen(parts, problems, summary, cloud if cloud.frame == "tray" else None)


def _separated(cloud: Cloud) -> tuple[tuple[PartCloud, ...], tuple[Problem, ...]]:
    """As at the station; a cloud without a tray is one bare part."""
    found = scene.separate(cloud, max_marks=len(MARKS))
    if any(problem.code == "NO_TRAY" for problem in found.problems):
        try:
            part = scene.single(cloud.points, cloud.camera_pixel_mm)
        except ValueError as error:
            raise InputError("the cloud is no part", got=error) from error
        found = scene.Scene((part,), (), 0.0)
    return found.parts, quality.gate(cloud, found)


def _of_clouds(case: Case, folder: Path) -> Seen:
    parts: list[PartCloud] = []
    problems: list[Problem] = []
    points = 0
    for mark, name in sorted(case.input.clouds.items()):
        path = _file(folder, name)
        cloud = _cloud_of_file(path, case, mark)
        own, found = _separated(cloud)
        if len(own) != 1:
            raise InputError(
                "a cloud of one mark holds one part",
                which=f"clouds.{mark}: {path}",
                expected="1 part",
                got=f"{len(own)}: {'; '.join(problem.text for problem in found) or 'none'}",
                action="give a cloud with several parts as input.scene",
            )
        parts += own
        problems += found
        points += len(cloud.points)
    names = ", ".join(case.input.clouds.values())
    summary = ScanSummary(points=points, source=names)
    return Seen(tuple(parts), tuple(problems), summary)


def _cloud_of_file(path: Path, case: Case, mark: str) -> Cloud:
    """A cloud file as it is; a mesh scanned by the simulated head, or sampled without numba."""
    options = sources.Options(unit=case.input.unit)
    (item,) = sources.items_of([path], options)
    if item.kind == "cloud":
        return cloud_io.read_cloud(path, unit=case.input.unit)
    if item.kind != "mesh":
        raise InputError(
            "neither a cloud nor a mesh", which=f"clouds.{mark}: {path}", got=item.kind
        )
    mesh = sources.read_mesh(item, options)
    seed = zlib.crc32(f"{case.id} {mark}".encode())
    try:
        taken = sources.scanned(mesh, seed, None, str(path))
    except ModuleNotFoundError:
        points, spacing_mm = sources.sampled(mesh, seed, str(path))
        return Cloud(points.astype(np.float32), None, spacing_mm, frame="unknown")
    return base.fuse(structured_light.decode_all(taken.stacks, taken.calibrations))


def _of_views(case: Case, folder: Path, layout: Layout) -> Seen:
    views: dict[str, Views] = {}
    scales: dict[str, float] = {}
    sizes: dict[str, Size] = {}
    for mark, files in sorted(case.input.views.items()):
        paths = {view: _file(folder, getattr(files, view)) for view in VIEWS}
        views[mark] = view_images.read_views(paths)
        scales[mark] = files.mm_per_px
        box = view_images.size_of(views[mark], files.mm_per_px, f"views.{mark}")
        sizes[mark] = Size(*box, uncertainty_mm=2 * files.mm_per_px)
    pictures = Pictures(
        marks=views_sheet(views, scales, layout),
        surface=view_images.surface_picture(views[MARKS[0]], scales[MARKS[0]], layout),
        sizes=sizes,
    )
    summary = ScanSummary(points=0, source="views")
    return Seen((), (_not_qualified("ready views were"),), summary, None, pictures, views)


def _of_photo(case: Case, folder: Path, layout: Layout) -> Seen:
    path = _file(folder, case.input.photo or "")
    photo = np.maximum(view_images.read_image(path), 1)
    pictures = Pictures(
        marks=photo_sheet(photo, layout),
        surface=view_images.surface_picture({"top": photo}, 1.0, layout),
        sizes=dict.fromkeys(case.input.marks or MARKS[:1], NO_SIZE),
    )
    summary = ScanSummary(points=0, source=str(case.input.photo))
    return Seen((), (_not_qualified("a photo was"),), summary, None, pictures)


def _not_qualified(what: str) -> Problem:
    text = (
        f"{what} read, not a scan: the model is not qualified for them, so the readings decide "
        "nothing"
    )
    return Problem("NOT_CHECKED", text, "UNSURE")


def views_sheet(
    views: Mapping[str, Views], scales: Mapping[str, float], layout: Layout
) -> sheet.Sheet:
    """The marks sheet of several parts from their ready views, one scale for all.

    `scales` are mm per pixel by mark. Each part's sheet is drawn alone and then brought to the
    scale of the largest.
    """
    alone = {
        mark: view_images.marks_sheet(views[mark], scales[mark], layout) for mark in sorted(views)
    }
    mm_per_px = max(single.mm_per_px for single in alone.values())
    image = np.zeros((*layout.sheet_size, 3), np.uint8)
    column_of = {}
    for column, (mark, single) in enumerate(alone.items()):
        left = column * layout.cell
        column_of[mark] = column
        for row in range(len(VIEWS)):
            top = row * layout.cell
            box = (slice(top + layout.strip, top + layout.cell), slice(left, left + layout.cell))
            cell = single.image[box[0], : layout.cell]
            image[box] = _shrunk(cell, single.mm_per_px / mm_per_px)
            sheet.draw_letter(image, mark, left, top, layout)
    return sheet.Sheet(image, mm_per_px, column_of)


def _shrunk(cell: ByteImage, factor: float) -> NDArray[np.uint8]:
    """A cell [H, W, 3] with its content scaled by `factor` <= 1 about its middle."""
    if factor == 1.0:
        return cell
    height, width = cell.shape[:2]
    wanted = (max(1, round(width * factor)), max(1, round(height * factor)))
    small = cv2.resize(cell, wanted, interpolation=cv2.INTER_AREA)
    out = np.zeros_like(cell)
    top, left = (height - wanted[1]) // 2, (width - wanted[0]) // 2
    out[top : top + wanted[1], left : left + wanted[0]] = small
    return out


def photo_sheet(photo: ByteImage, layout: Layout) -> sheet.Sheet:
    """A grey photo [H, W] fitted into the frame of a marks sheet, without depth."""
    height, width = layout.sheet_size
    factor = min(height / photo.shape[0], width / photo.shape[1])
    wanted = (max(1, int(photo.shape[1] * factor)), max(1, int(photo.shape[0] * factor)))
    small = cv2.resize(photo, wanted, interpolation=cv2.INTER_AREA)
    image = np.zeros((height, width, 3), np.uint8)
    top, left = (height - wanted[1]) // 2, (width - wanted[0]) // 2
    image[top : top + wanted[1], left : left + wanted[0], 0] = small
    image[top : top + wanted[1], left : left + wanted[0], 1:] = 128
    return sheet.Sheet(image, 1.0)
