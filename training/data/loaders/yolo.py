"""YOLO text labels: boxes (`class cx cy w h`) or polygons, as shares of the size -> examples."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path

import yaml

from training.data.loaders import regions
from training.data.loaders.regions import Annotated, Reading, Region
from training.data.loaders.sample import (
    Grouping,
    Loaded,
    LoadError,
    Picture,
    Problems,
    pictures_in,
)

HELP = """A folder with images/ and labels/, one .txt a picture.

  python -m training.load yolo screws --names 0=black,1=long,2=medium,3=short --as marks \\
      --out .work/screws
  python -m training.load yolo pcb --names pcb/data.yaml --part pcb --unannotated clean \\
      --out .work/pcb

Lines are `class cx cy w h`, or `class x y x y x y ...` for a polygon, as shares of the size.
A label file that is missing or empty is a picture without annotation: see --unannotated."""

_SLACK = 1e-3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="folder with images/ and labels/")
    parser.add_argument("--images", type=Path, help="default: FOLDER/images")
    parser.add_argument("--labels", type=Path, help="default: FOLDER/labels")
    parser.add_argument(
        "--names", required=True, help="0=name,1=name..., data.yaml, or a text file, one a line"
    )
    regions.add_arguments(parser)


def run(args: argparse.Namespace, grouping: Grouping, problems: Problems) -> Loaded:
    images = args.images or args.folder / "images"
    labels = args.labels or args.folder / "labels"
    names = class_list(args.names)
    reading = regions.reading_of(args)
    return load(args.folder, images, labels, names, reading, grouping, problems)


def load(
    folder: Path,
    images: Path,
    labels: Path,
    names: Mapping[int, str],
    reading: Reading,
    grouping: Grouping,
    problems: Problems,
) -> Loaded:
    """All pictures below `images`, and label files without a picture as problems."""
    paths = pictures_in(images)
    texts = {path: labels / path.relative_to(images).with_suffix(".txt") for path in paths}
    for text in sorted(set(labels.rglob("*.txt")) - set(texts.values())):
        with problems.of(text.relative_to(labels)):
            raise LoadError("label without a picture", expected=f"its picture in {images}")
    found = []
    for path, text in texts.items():
        with problems.of(text.relative_to(labels)):
            size = Picture(path, which=path.name).size()
            lines = text.read_text("utf-8", "replace").splitlines() if text.is_file() else []
            areas = [
                line_region(line, names, size, f"line {number}")
                for number, line in enumerate(lines, 1)
                if line.strip()
            ]
            found.append(Annotated(images, path, tuple(areas)))
    return regions.loaded(folder.resolve().name, found, reading, grouping, problems)


def line_region(line: str, names: Mapping[int, str], size: tuple[int, int], which: str) -> Region:
    """One line of a label file in a picture (height, width)."""
    words = line.split()
    try:
        number, values = int(words[0]), [float(item) for item in words[1:]]
    except ValueError as error:
        raise LoadError("not numbers", which=which, expected="class cx cy w h", got=line) from error
    if number not in names:
        raise LoadError("unknown class", which=which, expected=f"one of {names}", got=number)
    if not all(math.isfinite(v) and -_SLACK <= v <= 1 + _SLACK for v in values):
        raise LoadError(
            "not shares of the picture", which=which, expected="numbers 0..1", got=line.strip()
        )
    height, width = size
    if len(values) == 4:
        x, y, w, h = values
        box = (
            (x - w / 2) * width, (y - h / 2) * height, (x + w / 2) * width, (y + h / 2) * height,
        )  # fmt: skip
        return regions.checked(Region(names[number], box), size, which)
    if len(values) < 6 or len(values) % 2:
        raise LoadError(
            "neither box nor polygon", which=which, got=f"{len(values)} numbers",
            expected="4 numbers, or x y of 3 points or more",
        )  # fmt: skip
    scaled = [v * (height if i % 2 else width) for i, v in enumerate(values)]
    return regions.checked(regions.outlined(names[number], [scaled], which), size, which)


def class_list(text: str) -> dict[int, str]:
    """Number -> name from `0=a,1=b`, a YOLO data.yaml, or a file of one name a line."""
    path = Path(text)
    if "=" in text:
        pairs = [item.partition("=") for item in text.split(",")]
        if all(number.strip().isdigit() and name.strip() for number, _, name in pairs):
            return {int(number): name.strip() for number, _, name in pairs}
    elif path.is_file():
        content = path.read_text("utf-8", "replace")
        if path.suffix not in (".yaml", ".yml"):
            return dict(enumerate(line.strip() for line in content.splitlines() if line.strip()))
        try:
            data = yaml.safe_load(content)
        except yaml.YAMLError:
            data = None
        names = data.get("names") if isinstance(data, dict) else None
        listed = dict(enumerate(names)) if isinstance(names, list) else names
        if isinstance(listed, dict) and all(type(number) is int for number in listed):
            return {number: str(name) for number, name in listed.items()}
    raise LoadError(
        "no class names", which="--names", got=text,
        expected="0=name,1=name, data.yaml or a text file",
    )  # fmt: skip
