"""A product line of photos from its folder to the table: load, train, export, evaluate, compare.

    python -m training.photo_lines tile   --data DATA/magnetic_tile  --out .work/photo --minutes 8
    python -m training.photo_lines screws --data DATA/screws_missing --out .work/photo --minutes 8

`tile`: the magnetic-tile set (surface class and 16 x 16 grid), cross-validated in 3 folds of whole
capture runs. `screws`: the screws-missing set (four fixed places), 5 folds of photos. Each fold is
loaded, trained for --minutes CPU minutes, exported as a bundle and read through the station's code
by `training.evaluate`; beside it stand trivial answers and, with the same pictures and time, a
U-Net (tile) or a patch classifier (screws). Every step that is done is kept: call it again and it
goes on. --only-fold makes one fold; the table takes the folds that are there.

In the names of the tile set, `exp` is the exposure and `num` the camera's frame counter: one tile
was taken at up to six exposures in a row. A run is a row of frames without a gap above 1000; runs
with look-alike pictures are joined. Dividing by `exp` would put the same tile on both sides.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from forge_station.contract import tasks
from forge_station.contract.error import StationError
from forge_station.contract.manifest import PhotoInput
from training import load
from training.data import examples
from training.evaluation.photo_cases import write_cases
from training.evaluation.photo_figures import (
    PlacesAnswer,
    SurfaceAnswer,
    places_figures,
    surface_figures,
)
from training.nano import photo_baselines as baselines
from training.nano.photo import PhotoRun, train_photos, vocabulary_of
from training.nano.photo_samples import PhotoSample, Variation, read_samples


@dataclass(frozen=True)
class Line:
    """How a line is loaded, varied and trained."""

    source: tuple[str, ...]
    """Arguments of `training.load`, `{data}` for the folder."""
    folds: int
    photo: PhotoInput
    variation: Variation
    batch: int


LINES: Mapping[str, Line] = {
    "tile": Line(
        source=(
            *("masks", "{data}", "--part", "magnetic_tile", "--group", "num_(?P<run>[0-9]+)"),
            *("--run-gap", "1000", "--leaks", "merge", "--skip-bad"),
        ),
        folds=3,
        photo=PhotoInput(224, 224, "detail"),
        variation=Variation(),
        batch=24,
    ),
    "screws": Line(
        source=(
            *("names", "{data}/images", "--values", "1=screw,0=none", "--pattern"),
            "^[0-9]+_(?P<A>[01])(?P<B>[01])(?P<C>[01])(?P<D>[01])$",
        ),
        folds=5,
        photo=PhotoInput(112, 112, "where"),
        variation=Variation(tilt_degrees=5, zoom=0.1, shift=0.06, places=(2, 2)),
        batch=32,
    ),
}


@dataclass(frozen=True)
class Fold:
    """One fold of a line and where its files are."""

    line: Line
    name: str
    number: int
    folder: Path
    minutes: float

    @property
    def examples(self) -> Path:
        return self.folder / "data" / examples.FILE

    def samples(self, split: str) -> list[PhotoSample]:
        return read_samples(self.examples, split, (self.line.photo.height, self.line.photo.width))

    def load(self, data: Path) -> None:
        """Examples with this fold as `test`."""
        if self.examples.is_file():
            return
        words = [word.format(data=data) if "{data}" in word else word for word in self.line.source]
        words += ["--out", str(self.examples.parent), "--quiet"]
        words += ["--fold", f"{self.number}/{self.line.folds}"]
        if load.main(words):
            raise SystemExit(f"photo_lines: fold {self.number} could not be loaded, see above")

    def nano(self) -> list[dict[str, Any]]:
        """Rows of `training.evaluate` on the test split, read by the exported bundle."""
        checkpoint, bundle = self.folder / "nano", self.folder / "bundle"
        cases, rows = self.folder / "cases", self.folder / "rows.jsonl"
        if rows.is_file():
            return _lines(rows)
        if not (checkpoint / "training_card.json").is_file():
            train_photos(
                PhotoRun(
                    examples=(self.examples,),
                    out=checkpoint,
                    minutes=self.minutes,
                    photo=self.line.photo,
                    variation=self.line.variation,
                    batch=self.line.batch,
                    full_attention=(1, 3),
                    seed=self.number,
                    resume=True,
                )
            )
        write_cases(self.examples, cases)
        run_module(
            *("export.bundle", "--checkpoint", checkpoint, "--out", bundle),
            *("--name", f"{self.name}-{self.number}", "--replace"),
        )
        partial = rows.with_suffix(".partial")
        run_module("training.evaluate", "--bundle", bundle, "--cases", cases, "--out", partial)
        partial.replace(rows)
        return _lines(rows)

    def unet(self) -> list[dict[str, Any]]:
        """Odds and cells of the U-Net on the test split."""
        rows = self.folder / "unet.jsonl"
        if rows.is_file():
            return _lines(rows)
        train, test = self.samples("train"), self.samples("test")
        classes = vocabulary_of(train).classes
        line = self.line
        model = baselines.train_unet(
            train, classes, line.photo, line.variation, self.minutes, seed=self.number
        )
        odds, cells = baselines.unet_answers(model, test, line.photo)
        out = [
            {
                "id": sample.id,
                "odds": dict(zip(classes, chances.tolist(), strict=True)),
                "cells": _cells(grid),
            }
            for sample, chances, grid in zip(test, odds, cells, strict=True)
        ]
        partial = rows.with_suffix(".partial")
        partial.write_text("".join(f"{json.dumps(row)}\n" for row in out), encoding="utf-8")
        partial.replace(rows)
        return out


def surface_answers(fold: Fold, groups: Mapping[str, str]) -> dict[str, list[SurfaceAnswer]]:
    """Method -> answers on the fold's test photos."""
    train, test = fold.samples("train"), fold.samples("test")
    classes = vocabulary_of(train).classes
    share = baselines.trivial_odds(train, classes)
    defects = {name: share[name] for name in classes if name != tasks.NORMAL}
    worst = max(defects, key=lambda name: defects[name])
    usual_map = _cells(baselines.mean_map(train))
    nano = {
        row["id"]: (row["probabilities"], [cell[1:] for cell in row["cells"] or ()])
        for row in fold.nano()
    }
    unet = {row["id"]: (row["odds"], row["cells"]) for row in fold.unet()}
    methods: dict[str, Mapping[str, tuple[Mapping[str, float], Iterable[Sequence[int]]]]] = {
        "nano": nano,
        "unet": unet,
        "always_normal": {s.id: (share | {tasks.NORMAL: 1.0}, ()) for s in test},
        "commonest_defect_mean_map": {s.id: (share | {worst: 1.0}, usual_map) for s in test},
    }
    return {
        method: [
            SurfaceAnswer(
                id=sample.id,
                group=groups[sample.id],
                truth=sample.defect or "",
                odds=said[sample.id][0],
                cells=frozenset((int(r), int(c)) for r, c in said[sample.id][1]),
                cells_true=frozenset(
                    (r, c) for r, c in (_cells(sample.cells) if sample.cells is not None else ())
                ),
            )
            for sample in test
        ]
        for method, said in methods.items()
    }


def places_answers(fold: Fold) -> dict[str, list[PlacesAnswer]]:
    """Method -> answers on the fold's test photos."""
    train, test = fold.samples("train"), fold.samples("test")
    vocabulary, layout = vocabulary_of(train), fold.line.variation.places
    if layout is None:
        raise SystemExit(f"photo_lines: {fold.name} has no layout of its places")
    patches = baselines.PatchClassifier(train, vocabulary.parts, layout)
    usual = baselines.usual_places(train)
    full = vocabulary.parts[0]
    nano = {row["id"]: {m["mark"]: m["read"] for m in row["marks"]} for row in fold.nano()}
    methods = {
        "nano": nano,
        "patch_classifier": {s.id: patches(s) for s in test},
        "all_present": {s.id: dict.fromkeys(s.places, full) for s in test},
        "commonest_of_each_place": {s.id: usual for s in test},
    }
    return {
        method: [PlacesAnswer(s.id, said[s.id], s.places) for s in test]
        for method, said in methods.items()
    }


def run(name: str, data: Path, out: Path, minutes: float, folds: Sequence[int]) -> dict[str, Any]:
    """Figures of a line over the given folds, also written to `out`/NAME.json."""
    line = LINES[name]
    answers: dict[str, list[Any]] = {}
    for number in tqdm(folds, desc=name, unit="fold"):
        fold = Fold(line, name, number, out / f"{name}-{number}", minutes)
        fold.load(data)
        if line.variation.places:
            found: Mapping[str, Sequence[Any]] = places_answers(fold)
        else:
            groups = {item.id: item.group for item in examples.read(fold.examples)}
            found = surface_answers(fold, groups)
        for method, rows in found.items():
            answers.setdefault(method, []).extend(rows)
    measure: Any = places_figures if line.variation.places else surface_figures
    figures = {
        "line": name,
        "folds": [f"{number}/{line.folds}" for number in folds],
        "minutes": minutes,
        "photo": asdict(line.photo),
        "methods": {method: measure(rows) for method, rows in answers.items()},
    }
    (out / f"{name}.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return figures


def table(figures: Mapping[str, Any]) -> str:
    """One row a figure, one column a method: value [low, high]."""
    methods = figures["methods"]
    names = [n for n, v in next(iter(methods.values())).items() if isinstance(v, dict)]
    head = ["figure", "n", *methods]
    rows = [head]
    for name in names:
        cells = [methods[m][name] for m in methods if name in methods[m]]
        shown = [f"{c['value']:.3f} [{c['low']:.3f}, {c['high']:.3f}]" for c in cells]
        rows.append([name, str(cells[0]["n"]), *shown])
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        for row in rows
    )


def _cells(grid: Any) -> list[tuple[int, int]]:
    return [(int(row), int(column)) for row, column in zip(*grid.nonzero(), strict=True)]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run_module(name: str, *words: object) -> None:
    """`python -m name words` in this environment; SystemExit where it fails."""
    done = subprocess.run([sys.executable, "-m", name, *map(str, words)], check=False)
    if done.returncode:
        raise SystemExit(f"photo_lines: {name} failed, see above")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("line", choices=sorted(LINES))
    parser.add_argument("--data", type=Path, required=True, help="folder of the data set")
    parser.add_argument("--out", type=Path, default=Path(".work/photo"))
    parser.add_argument("--minutes", type=float, default=8, help="CPU minutes a fold and method")
    parser.add_argument("--only-fold", type=int, nargs="*", metavar="I", help="these folds only")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    count = LINES[args.line].folds
    folds = range(count) if args.only_fold is None else args.only_fold
    if not args.minutes > 0 or args.threads < 1:
        parser.error("--minutes and --threads: expected more than 0")
    if not folds or not set(folds) <= set(range(count)):
        parser.error(f"--only-fold: {args.line} has folds 0 to {count - 1}, got {list(folds)}")
    torch.set_num_threads(args.threads)
    try:
        figures = run(args.line, args.data, args.out, args.minutes, list(folds))
    except StationError as error:
        print(f"training.photo_lines: {error}", file=sys.stderr)
        return 1
    print(table(figures))
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
