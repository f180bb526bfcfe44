"""COCO instances (`images`, `annotations`, `categories`): boxes, polygons and RLE -> examples."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.data.loaders import regions, rle
from training.data.loaders.documents import entries, id_of, is_number, read_json, text_of
from training.data.loaders.regions import Annotated, Reading, Region
from training.data.loaders.sample import Grouping, Loaded, LoadError, Picture, Problems, inside

HELP = """COCO instances JSON: boxes, polygons, run-length masks.

  python -m training.load coco annotations/instances.json --images photos --part gear \\
      --unannotated clean --out .work/gears
  python -m training.load coco parts.json --images photos --as marks --out .work/parts"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="instances JSON")
    parser.add_argument("--images", type=Path, help="folder of the pictures (default: beside FILE)")
    regions.add_arguments(parser)


def run(args: argparse.Namespace, grouping: Grouping, problems: Problems) -> Loaded:
    folder = args.images or args.file.parent
    return load(args.file, folder, regions.reading_of(args), grouping, problems)


def load(
    file: Path, folder: Path, reading: Reading, grouping: Grouping, problems: Problems
) -> Loaded:
    """All pictures that the file lists, with the regions of their annotations."""
    data = read_json(file)
    names: dict[int | str, str] = {}
    for number, item in enumerate(entries(data, "categories", file)):
        which = f"{file.name}: categories[{number}]"
        names[id_of(item, "id", which)] = text_of(item, "name", which)
    pictures = entries(data, "images", file)
    known = {id_of(item, "id", f"{file.name}: images[{n}]") for n, item in enumerate(pictures)}
    if len(known) != len(pictures):
        raise LoadError("two pictures of one id", which=f"{file.name}: images")
    own: dict[int | str, list[tuple[str, Mapping[str, Any]]]] = {}
    for number, item in enumerate(entries(data, "annotations", file)):
        which = f"annotations[{number}]"
        with problems.of(f"{file.name}: {which}"):
            name = id_of(item, "image_id", which)
            if name not in known:
                raise LoadError("annotation of an unknown picture", which="image_id", got=name)
            own.setdefault(name, []).append((which, item))
    found = []
    for number, item in enumerate(pictures):
        with problems.of(f"{file.name}: images[{number}]"):
            path = inside(folder, item.get("file_name"), "file_name")
            size = Picture(path).size()
            stated = (item.get("height"), item.get("width"))
            if stated != size:
                raise LoadError(
                    "picture of another size", which=f"{path.name}: height, width",
                    expected=f"{stated} as the annotation says", got=size,
                )  # fmt: skip
            areas = [_region(a, names, size, which) for which, a in own.get(item["id"], [])]
            found.append(Annotated(folder, path, tuple(areas)))
    return regions.loaded(file.stem, found, reading, grouping, problems)


def _region(
    item: Mapping[str, Any], names: Mapping[int | str, str], size: tuple[int, int], which: str
) -> Region:
    category = id_of(item, "category_id", which)
    if category not in names:
        raise LoadError(
            "unknown class", which=f"{which}.category_id", expected=f"one of {list(names)}",
            got=category,
        )  # fmt: skip
    label = names[category]
    shape = item.get("segmentation")
    if isinstance(shape, dict):
        try:
            mask = rle.decode(shape, size)
        except LoadError as error:
            raise LoadError(
                error.what, which=f"{which}.segmentation.{error.which}",
                expected=error.expected, got=error.got,
            ) from error  # fmt: skip
        return regions.masked(label, mask, which)
    if isinstance(shape, list) and shape:
        outlined = regions.outlined(label, shape, f"{which}.segmentation")
        return regions.checked(outlined, size, f"{which}.segmentation")
    box = item.get("bbox")
    if not isinstance(box, list) or len(box) != 4 or not all(map(is_number, box)):
        raise LoadError("not a box", which=f"{which}.bbox", expected="[x, y, w, h]", got=box)
    x, y, w, h = box
    return regions.checked(Region(label, (x, y, x + w, y + h)), size, f"{which}.bbox")
