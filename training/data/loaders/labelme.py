"""LabelMe: one JSON a picture with shapes -> examples. `imageData` is not looked at."""

from __future__ import annotations

import argparse
import base64
import binascii
import io
from collections.abc import Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from training.data.loaders import regions
from training.data.loaders.documents import entries, is_number, read_json, text_of
from training.data.loaders.regions import Annotated, Reading, Region
from training.data.loaders.sample import Grouping, Loaded, LoadError, Picture, Problems, inside

HELP = """A folder of LabelMe files: polygons, rectangles, circles, lines and masks.

  python -m training.load labelme labelled --part housing --out .work/housing
  python -m training.load labelme labels --images photos --part housing --out .work/housing

The picture is `imagePath`, which must lie in the folder of its JSON or, with --images, the file of
that name there. A file without shapes is a picture that somebody opened: see --unannotated."""

_CIRCLE = 48


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="folder with the JSON files")
    parser.add_argument("--images", type=Path, help="folder of the pictures, if it is another")
    regions.add_arguments(parser)


def run(args: argparse.Namespace, grouping: Grouping, problems: Problems) -> Loaded:
    return load(args.folder, args.images, regions.reading_of(args), grouping, problems)


def load(
    folder: Path, images: Path | None, reading: Reading, grouping: Grouping, problems: Problems
) -> Loaded:
    """All JSON files below `folder`."""
    files = sorted(folder.rglob("*.json"))
    if not files:
        raise LoadError("no LabelMe files", which=folder, expected="*.json")
    found = []
    for file in files:
        with problems.of(file.relative_to(folder)):
            data = read_json(file)
            shapes = entries(data, "shapes", file)
            name = text_of(data, "imagePath", file.name)
            if images is not None:
                path = inside(images, PureWindowsPath(name).name, "imagePath")
            else:
                path = inside(file.parent, name, "imagePath")
            size = Picture(path).size()
            stated = (data.get("imageHeight"), data.get("imageWidth"))
            if stated not in (size, (None, None)):
                raise LoadError(
                    "picture of another size", which="imageHeight, imageWidth",
                    expected=f"{stated} as the file says", got=size,
                )  # fmt: skip
            areas = [_region(shape, size, f"shapes[{n}]") for n, shape in enumerate(shapes)]
            found.append(Annotated(images or folder, path, tuple(areas)))
    return regions.loaded(folder.resolve().name, found, reading, grouping, problems)


def _region(shape: Mapping[str, Any], size: tuple[int, int], which: str) -> Region:
    label = text_of(shape, "label", which)
    kind = shape.get("shape_type") or "polygon"
    points = shape.get("points")
    pairs = isinstance(points, list) and all(
        isinstance(point, list) and len(point) == 2 and all(map(is_number, point))
        for point in points
    )
    if not pairs or not points:
        raise LoadError("not points", which=f"{which}.points", expected="[[x, y], ...]")
    place = np.array(points, float)
    low, high = place.min(0), place.max(0)
    if kind == "mask":
        return regions.masked(label, _pasted(shape, low, size, which), which)
    if kind == "rectangle" and len(place) >= 2:
        box = Region(label, (low[0], low[1], high[0], high[1]))
        return regions.checked(box, size, f"{which}.points")
    if kind == "circle" and len(place) == 2:
        angles = np.linspace(0, 2 * np.pi, _CIRCLE, endpoint=False)
        radius = float(np.hypot(*(place[1] - place[0])))
        circle = place[0] + radius * np.stack([np.cos(angles), np.sin(angles)], 1)
        place = np.clip(circle, 0, [size[1], size[0]])
    elif kind in ("line", "linestrip") and len(place) >= 2:
        # There and back: an outline without area, drawn one pixel wide.
        place = np.concatenate([place, place[-2::-1]])
    elif kind != "polygon":
        raise LoadError(
            "shape cannot be used", which=f"{which}.shape_type", got=f"{kind}, {len(place)} points",
            expected="polygon, rectangle, circle, line, linestrip or mask",
        )  # fmt: skip
    outlined = regions.outlined(label, [place.ravel().tolist()], f"{which}.points")
    x0, y0, x1, y1 = outlined.box
    box_px = (x0, y0, max(x1, x0 + 1), max(y1, y0 + 1))
    return regions.checked(Region(label, box_px, outlined.outlines), size, f"{which}.points")


def _pasted(
    shape: Mapping[str, Any], corner: np.ndarray, size: tuple[int, int], which: str
) -> np.ndarray:
    """The mask of a shape, a base64 PNG, in its place in the picture."""
    try:
        raw = base64.b64decode(shape.get("mask") or "", validate=True)
        with Image.open(io.BytesIO(raw)) as image:
            part = np.asarray(image.convert("L")) > 0
    except (binascii.Error, TypeError, UnidentifiedImageError, OSError, SyntaxError) as error:
        raise LoadError(
            "not a mask", which=f"{which}.mask", expected="a PNG in base64", got=error
        ) from error
    x, y = (round(float(value)) for value in corner)
    if x < 0 or y < 0 or y + part.shape[0] > size[0] or x + part.shape[1] > size[1]:
        raise LoadError("mask outside its picture", which=f"{which}.mask", expected=size)
    whole = np.zeros(size, np.bool_)
    whole[y : y + part.shape[0], x : x + part.shape[1]] = part
    return whole
