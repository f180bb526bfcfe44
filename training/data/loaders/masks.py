"""Pictures and defect masks -> class, score and 16 x 16 grid of a photo.

The class is the folder of the picture, whose mask is beside it (`crack/7.jpg`, `crack/7.png`) or
at the same place below another folder (`--masks`, `--mask-suffix`; MVTec: `_mask.png`). A picture
of a normal class may lack its mask. The score is that of the share of defective cells.

Masks: 1 bit, 8 bit grey (0..255 or 0..1), or a palette or grey picture of a few class numbers,
where every number above 0 is defective.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from forge_station.contract import grid, tasks
from training.data.loaders.sample import (
    PICTURE_SUFFIXES,
    Grouping,
    Loaded,
    LoadError,
    Picture,
    Problems,
    Sample,
    class_name,
    part_name,
    pictures_in,
    sample_id,
    word,
)
from training.data.loaders.surfaces import photo_surface

NORMAL_FOLDERS = ("normal", "good", "ok", "free", "clean")
_CLASS_NUMBERS = 32
"""Grey masks whose values all lie below this are numbers of classes, not shades."""

HELP = """Pictures in folders of their class, masks beside them or in a folder of their own.

  python -m training.load masks tiles --part magnetic_tile --out .work/tiles \\
      --group 'num_(?P<run>[0-9]+)' --run-gap 300 --contact-sheet tiles.png
  python -m training.load masks mvtec/screw/test --masks mvtec/screw/ground_truth \\
      --mask-suffix _mask.png --part screw --out .work/screw

Class names are the folders in lower case without what all of them begin with (MT_Crack -> crack);
normal, good, ok, free and clean become `normal`. --coverage area marks a cell that is covered by
more than a tenth and at least one cell of every mask; --coverage lanczos is the rule of the paper,
under which small defects vanish. The report says how many do under either rule."""


@dataclass
class Vanished:
    """How many non-empty masks leave an empty grid, by class and rule."""

    masks: dict[str, int] = field(default_factory=dict)
    lanczos: dict[str, int] = field(default_factory=dict)
    area: dict[str, int] = field(default_factory=dict)
    """By the area rule before its one-cell guarantee."""

    def count(self, defect: str, mask: NDArray[np.float64]) -> None:
        self.masks[defect] = self.masks.get(defect, 0) + 1
        empty = grid.from_mask_paper(mask).count == 0
        self.lanczos[defect] = self.lanczos.get(defect, 0) + empty
        small = not (grid.coverage(mask) > grid.STATION_COVERAGE).any()
        self.area[defect] = self.area.get(defect, 0) + small

    def figures(self) -> dict[str, dict[str, dict[str, int]]]:
        table = {
            name: {
                "masks": self.masks[name],
                "lanczos": self.lanczos[name],
                "area_before_one_cell": self.area[name],
            }
            for name in sorted(self.masks)
        }
        return {"vanished": table}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="folder of the class folders")
    parser.add_argument("--part", help="part name in the facts (default: the folder's name)")
    parser.add_argument("--masks", type=Path, help="folder of the masks (default: beside pictures)")
    parser.add_argument("--mask-suffix", default=".png", help="end of a mask's name after the stem")
    parser.add_argument(
        "--classes", help="FOLDER=class,...: only these folders are known (default: all, by name)"
    )
    parser.add_argument("--coverage", choices=["area", "lanczos"], default="area")


def run(args: argparse.Namespace, grouping: Grouping, problems: Problems) -> Loaded:
    return load(
        args.folder,
        args.part or args.folder.resolve().name,
        grouping,
        problems,
        masks=args.masks,
        mask_suffix=args.mask_suffix,
        classes=parse_classes(args.classes) if args.classes else None,
        coverage=args.coverage,
    )


def load(
    folder: Path,
    part: str,
    grouping: Grouping,
    problems: Problems,
    *,
    masks: Path | None = None,
    mask_suffix: str = ".png",
    classes: Mapping[str, str] | None = None,
    coverage: str = "area",
) -> Loaded:
    """All pictures below `folder`. `classes`: folder name -> class; None: by the folders' names."""
    beside = masks is None
    suffixes = [s for s in PICTURE_SUFFIXES if not (beside and s == Path(mask_suffix).suffix)]
    paths = [
        path
        for path in pictures_in(folder, suffixes)
        if not (beside and path.name.endswith(mask_suffix))
    ]
    part = part_name(part)
    names = classes or class_names(sorted({path.parent.name for path in paths}))
    groups = grouping.names([path.relative_to(folder).as_posix() for path in paths])
    vanished = Vanished()
    samples: list[Sample] = []
    for path in paths:
        relative = path.relative_to(folder)
        with problems.of(relative):
            defect = names.get(path.parent.name)
            if defect is None:
                raise LoadError(
                    "unknown class", which="folder", expected=", ".join(names), got=path.parent.name
                )
            picture = Picture(path, which=str(relative))
            mask_path = (masks or folder) / relative.parent / f"{path.stem}{mask_suffix}"
            mask = _mask_of(mask_path, picture, defect)
            if mask.any():
                vanished.count(defect, mask)
            paper = coverage == "lanczos"
            cells = (grid.from_mask_paper(mask) if paper else grid.from_mask(mask)).cells
            samples.append(
                Sample(
                    id=sample_id(folder, path),
                    pictures=(picture,),
                    messages=photo_surface(part, defect, cells),
                    group=groups[relative.as_posix()],
                    labels=(defect,),
                    clean=defect == tasks.NORMAL,
                )
            )
    return Loaded(word(part), samples, vanished.figures() | {"coverage": coverage})


def class_names(folders: list[str]) -> dict[str, str]:
    """Folder -> class: lower case, without the words that all begin with; good ones `normal`."""
    words = [word(name).split("_") for name in folders]
    common = 0
    while len(words) > 1 and all(
        len(w) > common + 1 and w[common] == words[0][common] for w in words
    ):
        common += 1
    names = ["_".join(w[common:]) for w in words]
    return {
        folder: tasks.NORMAL if name in NORMAL_FOLDERS else class_name(name)
        for folder, name in zip(folders, names, strict=True)
    }


def parse_classes(text: str, check: Callable[[str], str] = class_name) -> dict[str, str]:
    """`MT_Free=normal,MT_Crack=crack` -> name in the source -> class."""
    out = {}
    for item in text.split(","):
        folder, equals, name = item.partition("=")
        if not equals or not folder.strip():
            raise LoadError("not a class", which="--classes", expected="NAME=class", got=item)
        out[folder.strip()] = check(name.strip())
    return out


def read_mask(path: Path) -> NDArray[np.float64]:
    """float64 [H, W] 0..1 of a mask file; LoadError if it is no mask."""
    try:
        with Image.open(path) as image:
            if image.mode in ("1", "P"):
                return (np.asarray(image) > 0).astype(np.float64)
            bands = np.asarray(image)
    except (OSError, UnidentifiedImageError, ValueError, SyntaxError) as error:
        raise LoadError("mask cannot be read", which=path.name, got=error) from error
    if bands.ndim == 3:
        bands = bands[..., :3]
        if (bands != bands[..., :1]).any():
            raise LoadError(
                "mask in colour", which=path.name, expected="one grey channel or a palette"
            )
        bands = bands[..., 0]
    values = bands.astype(np.float64)
    top = values.max(initial=0.0)
    if top < _CLASS_NUMBERS and (values == np.round(values)).all():
        return (values > 0).astype(np.float64)
    return np.asarray(values / (255.0 if top <= 255 else 65535.0))


def _mask_of(path: Path, picture: Picture, defect: str) -> NDArray[np.float64]:
    size = picture.size()
    if not path.is_file():
        if defect == tasks.NORMAL:
            return np.zeros(size)
        raise LoadError("picture without a mask", which="mask", expected=path)
    mask = read_mask(path)
    if mask.shape != size:
        raise LoadError(
            "mask of another size", which=path.name,
            expected=f"{size[1]} x {size[0]} as its picture",
            got=f"{mask.shape[1]} x {mask.shape[0]}",
        )  # fmt: skip
    if mask.any() != (defect != tasks.NORMAL):
        got = "empty" if defect != tasks.NORMAL else "not empty"
        raise LoadError(
            "class and mask contradict", which=path.name, expected=f"as class {defect}", got=got
        )
    return mask
