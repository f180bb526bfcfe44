"""Compare the three ways to read a defect grid: rows in parallel, soft, and one text.

    python -m training.readouts --bundle station_config/demo/bundle --cases .work/test \
        --references cad --limit 320 --out .work/readouts.jsonl
    python -m training.readouts --bundle station_config/demo/bundle \
        --pool .work/data/surface-val --limit 320 --out .work/readouts-pool.jsonl

Every surface case is drawn as the station draws it (a pool holds its pictures ready drawn, which is
much quicker) and read in all three ways behind the same picture, always, whatever its class. Beside
that the true grid is written with the grammar holding the model's hand (`rows, truth` and `text,
truth`): what a grid of that size costs in passes and time, independent of what the model can read.
Times are CPU time of this process; use one thread.

A model has to be trained on text to write it well: of one that was trained on rows, the figures of
`text` say what it costs, not how good a model of text can be.

Prints a table, the curve of the soft threshold, and as the last line one JSON object. One JSON row
a case goes to --out; a run that is interrupted goes on there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from forge_station import checks
from forge_station.contract import tasks
from forge_station.contract.error import StationError
from forge_station.contract.views import VIEWS
from forge_station.geometry import gauge
from forge_station.pipeline import Inspector
from forge_station.vlm.decode import Branch, Limits
from forge_station.vlm.grid_readout import (
    READOUTS,
    read_grid,
    row_tokens,
    text_tokens,
)
from forge_station.vlm.model import Trunk, VisionLanguageModel
from training.evaluation import by_station, case_input, readout_figures
from training.evaluation.by_station import BUNDLE, Settings
from training.evaluation.case_files import Case, read_cases
from training.evaluation.case_row import product_of
from training.evaluation.cells import true_cells
from training.evaluation.rows import CELL_VIEWS
from training.nano.pack import PART_IDS
from training.nano.pools import SurfacePool

KEYS = [tasks.row_key(view, row) for view in VIEWS for row in range(tasks.GRID_ROWS)]
LIMITS = Limits(max_tokens=1000)
Cells = NDArray[np.bool_]


@dataclass
class Meter:
    """Passes, tokens and CPU milliseconds of what a model was asked since `start`."""

    model: VisionLanguageModel

    def start(self) -> None:
        self._fed, self._cpu = self.model.fed, time.process_time()

    def stop(self) -> dict[str, float]:
        spent = (time.process_time() - self._cpu) * 1000
        fed = self.model.fed
        passes, tokens = fed.passes - self._fed.passes, fed.tokens - self._fed.tokens
        return {"passes": passes, "tokens": tokens, "ms": round(spent, 3)}


@dataclass(frozen=True)
class Shown:
    """A picture uint8 [H, W, 3], the user's facts, and the true cells bool [48, 16] where told."""

    name: str
    picture: NDArray[np.uint8]
    facts: str
    truth: Cells | None


def of_case(inspector: Inspector, case: Case, settings: Settings) -> Shown:
    """A case as the station draws it. Raises StationError where it cannot be drawn."""
    seen = case_input.look(case, settings.folder, inspector.layout)
    part = max(seen.parts, key=lambda item: len(item.points))
    truth, _ = true_cells(case, seen, part, settings.folder, inspector.layout)
    drawn, _ = by_station.surface_of(inspector, part, case, settings)
    facts = tasks.surface_facts(product_of(case).part or "", gauge.measure(part).box)
    wanted = None if truth is None else _grid(truth)
    return Shown(case.id, drawn.picture.image, facts, wanted)


def of_pool(pool: SurfacePool, number: int) -> Shown:
    """A picture of a pool of training.synth."""
    meta = pool.shards.meta
    (picture,) = pool.pictures(np.array([number]), np.random.default_rng(0))
    length, width, height = (float(value) for value in meta["size"][number])
    part = PART_IDS[int(meta["part"][number])]
    facts = tasks.surface_facts(part, (length, width, height))
    return Shown(f"{number:06d}", picture, facts, meta["grid"][number].reshape(len(KEYS), 16))


def read(model: VisionLanguageModel, shown: Shown, at: float) -> dict[str, Any]:
    """One picture, read in all ways. `at`: the threshold of rows and cells."""
    meter = Meter(model)
    meter.start()
    trunk = model.trunk([shown.picture], checks.trunk_text(shown.facts))
    row: dict[str, Any] = {"id": shown.name, "trunk": meter.stop()}
    odds = model.score_lines(trunk, {tasks.CLASS_KEY: model.manifest.vocabulary.classes})
    row["defect"] = round(1.0 - odds[tasks.CLASS_KEY][tasks.NORMAL], 6)
    for how in READOUTS:
        meter.start()
        found = read_grid(model, trunk, KEYS, how, at, LIMITS)
        row[how] = {**meter.stop(), "overrun": found.overrun, "cells": _listed(found.cells)}
        if found.probabilities is not None:
            row["soft"]["p"] = np.round(found.probabilities.reshape(-1), 4).tolist()
    row["truth"] = None if shown.truth is None else _listed(shown.truth)
    row["part"] = _listed(_on_part(shown.picture))
    wanted = np.zeros((len(KEYS), 16), np.bool_) if shown.truth is None else shown.truth
    row["rows, truth"] = followed(model, trunk, wanted, meter, rows=True)
    row["text, truth"] = followed(model, trunk, wanted, meter, rows=False)
    return row


def followed(
    model: VisionLanguageModel, trunk: Trunk, cells: Cells, meter: Meter, *, rows: bool
) -> dict[str, float]:
    """What it costs to write these cells [48, 16], as branches or as one text."""
    if rows:
        grammar = model.columns_grammar()
        none = (*model.codec.encode_key(f" {tasks.NONE}"), *grammar.ending)
        branches = [
            Branch(key, grammar, follow=row_tokens(grammar, row) if row.any() else none)
            for key, row in zip(KEYS, cells, strict=True)
        ]
    else:
        grammar = model.rows_grammar(KEYS)
        branches = [Branch(tasks.GRID_KEY, grammar, follow=text_tokens(grammar, cells))]
    meter.start()
    model.decode_branches(trunk, branches, LIMITS)
    return meter.stop()


def _grid(cells: Sequence[tuple[int, int, int]]) -> Cells:
    """Listed (view, row, column) of the three views -> bool [48, 16]."""
    grid = np.zeros((len(VIEWS), tasks.GRID_ROWS, 16), np.bool_)
    for view, row, column in cells:
        grid[VIEWS.index(CELL_VIEWS[view]), row, column] = True
    return grid.reshape(len(KEYS), 16)


def _on_part(picture: NDArray[np.uint8]) -> Cells:
    """Cells of the three panels in which the picture shows something, bool [48, 16]."""
    side = picture.shape[0] // 16
    brightest = picture.max(axis=2).reshape(16, side, len(VIEWS), 16, side).max(axis=(1, 4))
    return np.moveaxis(brightest > 0, 1, 0).reshape(len(KEYS), 16)


def _listed(cells: Cells) -> list[int]:
    return np.flatnonzero(cells).tolist()


def answered(path: Path) -> dict[str, dict[str, Any]]:
    """Rows of an earlier run by case; a line that was cut off is left out."""
    found = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            found[row["id"]] = row
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, required=True, help="bundle folder")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--cases", type=Path, help="folder with cases.jsonl")
    what.add_argument("--pool", type=Path, help="folder of surface pictures of training.synth")
    parser.add_argument("--references", default=BUNDLE, help="as of training.evaluate")
    parser.add_argument("--limit", type=int, help="at most so many pictures")
    parser.add_argument("--threads", type=int, default=1, help="of ONNX Runtime (default 1)")
    parser.add_argument(
        "--out", type=Path, default=Path("out/readouts.jsonl"), help="rows, one a picture"
    )
    args = parser.parse_args()
    cv2.setNumThreads(args.threads)
    settings = Settings(args.cases or Path(), references=args.references)
    try:
        inspector = by_station.opened(args.bundle, args.threads, settings)
        with inspector.model:
            shown = _of_pool(args, inspector) if args.pool else _of_cases(args, inspector, settings)
            rows, lost = _run(inspector, shown[: args.limit], args.out)
    except StationError as error:
        print(f"training.readouts: {error}", file=sys.stderr)
        return 1
    figures = {"pictures": len(rows), "lost": lost, **readout_figures.figures(rows)}
    print(readout_figures.table(figures))
    print(json.dumps(figures))
    return 0


Drawing = tuple[str, Callable[[], Shown]]


def _of_cases(
    args: argparse.Namespace, inspector: Inspector, settings: Settings
) -> Sequence[Drawing]:
    cases = [case for case in read_cases(args.cases) if isinstance(case, Case)]
    surfaces = [case for case in cases if case.task == "surface"]
    return [(case.id, partial(of_case, inspector, case, settings)) for case in surfaces]


def _of_pool(args: argparse.Namespace, inspector: Inspector) -> Sequence[Drawing]:
    channels = inspector.model.manifest.surface_channels
    pool = SurfacePool.open(args.pool.parent, args.pool.name, channels)
    return [(f"{number:06d}", partial(of_pool, pool, number)) for number in range(len(pool))]


def _run(
    inspector: Inspector, drawings: Sequence[Drawing], out: Path
) -> tuple[list[dict[str, Any]], int]:
    """(rows, pictures that could not be drawn); appends every row to `out`."""
    known, rows, lost = answered(out), [], 0
    at = inspector.thresholds.grid_row
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as file:
        for name, draw in tqdm(drawings, unit="picture"):
            if name not in known:
                try:
                    known[name] = read(inspector.model, draw(), at)
                except (StationError, ValueError) as error:
                    tqdm.write(f"{name}: {error}", file=sys.stderr)
                    lost += 1
                    continue
                file.write(json.dumps(known[name]) + "\n")
                file.flush()
            rows.append(known[name])
    return rows, lost


if __name__ == "__main__":
    sys.exit(main())
