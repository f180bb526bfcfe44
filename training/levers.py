r"""What each channel of the surface picture is worth, alone and together, at equal training.

    python -m training.levers --out .work/levers            # table, levers.json, levers.png

A small network judges every cell of the 16 x 16 grids by itself: mean, spread and percentiles of
each channel in the cell, and how they differ from the four cells around it. It is trained on
surrogate scans and tested on decoded ones (pattern images, decoding, separation), once with each
set of channels: shading of the view, relief (height over the local mean), difference from the
reference of the part, the scanner's white image, and shading at half the resolution. So it ranks
what the pictures show to a local look in a few minutes; what the model makes of them is measured by
`training.evaluate`, the second look too: with and without `--threshold look_again=1`.

A share of the cracks is closed: dark lines without depth, which are left out of training where the
white image is not shown, for nothing shows them there. The pools are kept: call it again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from forge_station.contract import tasks
from forge_station.contract.error import StationError
from forge_station.contract.grid import SIDE
from forge_station.contract.views import DIFFERENCE, VIEWS, WHITE
from training import synth
from training.data import engine
from training.data.pool import Recipe, Shares
from training.data.variation import USUAL
from training.nano.pools import STORED_CHANNELS, SurfacePool
from training.nano.sft import auroc

matplotlib.use("Agg")
from matplotlib import pyplot as plt

CLOSED = 0.3
"""Share of the cracks without depth."""
_RATE, _BATCH, _HIDDEN, _ALARMS, _LEAST = 3e-3, 1024, 48, 0.10, 0.1
_PERCENTILES = (5, 50, 95)
_WORST = 3
"""Cells whose mean is the score of a picture."""


@dataclass(frozen=True)
class Lever:
    """What the network is shown. `shrink`: pixels of the picture that become one."""

    name: str
    channels: tuple[str, ...]
    shrink: int = 1


LEVERS = (
    Lever("shading, half the resolution", ("shade",), 2),
    Lever("shading", ("shade",)),
    Lever("shading + relief", ("shade", "relief")),
    Lever("shading + reference", ("shade", DIFFERENCE)),
    Lever("shading + white image", ("shade", WHITE)),
    Lever("shading + relief + reference", ("shade", "relief", DIFFERENCE)),
    Lever("all four", ("shade", "relief", DIFFERENCE, WHITE)),
)


def pools(out: Path, train: int, test: int, jobs: int) -> tuple[SurfacePool, SurfacePool]:
    """Surrogate scans to train on and decoded ones to test on; made where they are missing."""
    vary = replace(USUAL, closed_cracks=CLOSED)
    made = []
    for name, path, count, seed in (
        ("surface", "surrogate", train, 31),
        ("surface-val", "decoded", test, synth.VALIDATION_SEED + 31),
    ):
        recipe = Recipe("surface", path, seed, 50, Shares(promised=1.0), vary)  # type: ignore[arg-type]
        by = partial(engine.processes, workers=jobs)
        done = synth.fill(recipe, out / "data" / name, count, by)
        if done["failed"]:
            raise SystemExit(f"levers: shards {done['failed']} of {name} failed, see above")
        made.append(SurfacePool.open(out / "data", name))
    return made[0], made[1]


@dataclass(frozen=True)
class Cells:
    """Cells of a pool: `seen` float32 [N, 16, 48, features], `filled` bool, `true` bool."""

    seen: np.ndarray
    filled: np.ndarray
    true: np.ndarray


def cells_of(pool: SurfacePool, lever: Lever) -> Cells:
    """What a lever shows of every cell; views side by side, as their panels are."""
    chosen = [STORED_CHANNELS.index(name) for name in lever.channels]
    seen, filled = [], []
    for number in range(len(pool)):
        image = pool.shards.image(number)
        height, width = image.shape[:2]
        side = height // SIDE
        covered = (image[..., 0] > 0).reshape(SIDE, side, width // side, side).mean((1, 3))
        filled.append(covered > _LEAST)
        seen.append(_described(image[..., chosen].astype(np.float32), side, lever.shrink))
    grids = pool.shards.meta["grid"]
    true = np.concatenate([grids[:, i] for i in range(len(VIEWS))], 2)
    return Cells(np.stack(seen), np.stack(filled), true)


def _described(image: np.ndarray, side: int, shrink: int) -> np.ndarray:
    """[H, W, channels] -> [16, 48, features]: of the cell, and against its four neighbours."""
    height, width, channels = image.shape
    if shrink > 1:
        whole = (height // shrink, shrink, width // shrink, shrink, channels)
        image, side = image.reshape(whole).mean((1, 3)), side // shrink
    rows, columns = image.shape[0] // side, image.shape[1] // side
    cells = image.reshape(rows, side, columns, side, channels).transpose(0, 2, 1, 3, 4)
    cells = cells.reshape(rows, columns, side * side, channels)
    levels = np.percentile(cells, _PERCENTILES, axis=2)
    own = np.concatenate([cells.mean(2), cells.std(2), *levels], axis=-1) / 64.0
    around = np.pad(own, ((1, 1), (1, 1), (0, 0)), mode="edge")
    beside = (around[:-2, 1:-1], around[2:, 1:-1], around[1:-1, :-2], around[1:-1, 2:])
    gaps = [np.abs(own - other) for other in beside]
    return np.concatenate([own, *gaps], axis=-1).astype(np.float32)


def train(pool: SurfacePool, lever: Lever, steps: int, seed: int) -> nn.Sequential:
    """A network of one hidden layer on the cells that show something of the part."""
    torch.manual_seed(seed)
    cells = cells_of(pool, lever)
    able = ~pool.shards.meta["closed"].astype(bool) | (WHITE in lever.channels)
    used = cells.filled & able[:, None, None]
    seen = torch.from_numpy(cells.seen[used])
    true = torch.from_numpy(cells.true[used].astype(np.float32))
    model = nn.Sequential(
        _Scaled(seen), nn.Linear(seen.shape[1], _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps)
    rare = ((1 - true).sum() / true.sum().clamp_min(1)).sqrt()
    for _ in tqdm(range(steps), desc=lever.name, mininterval=5):
        index = torch.randint(0, len(seen), (_BATCH,))
        said = model(seen[index])[:, 0]
        loss = F.binary_cross_entropy_with_logits(said, true[index], pos_weight=rare)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


class _Scaled(nn.Module):
    """Features at mean 0 and deviation 1 over the training cells."""

    def __init__(self, seen: torch.Tensor) -> None:
        super().__init__()
        self.mean, self.spread = seen.mean(0), seen.std(0) + 1e-3

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        return (seen - self.mean) / self.spread


@torch.no_grad()
def measure(model: nn.Module, pool: SurfacePool, lever: Lever) -> dict[str, Any]:
    """Figures on a test pool.

    `cells`, `pictures`: AUROC of open defects and clean parts, by cell and by the mean of the worst
    cells; `closed cells`: the same of closed cracks. `found`: share of the defects of a kind whose
    picture scores above the limit that `_ALARMS` of the clean ones exceed.
    """
    cells = cells_of(pool, lever)
    said = model(torch.from_numpy(cells.seen))[..., 0].numpy()
    said = np.where(cells.filled, said, -np.inf)
    worst = np.sort(said.reshape(len(said), -1), axis=1)[:, -_WORST:].mean(1)
    meta = pool.shards.meta
    kind, closed = meta["defect"].astype(int), meta["closed"].astype(bool)
    limit = float(np.quantile(worst[kind == 0], 1 - _ALARMS))
    found = {
        name: _share(worst[(kind == i) & ~closed] > limit)
        for i, name in enumerate(tasks.SURFACE_CLASSES)
        if i > 0
    }

    def by_cell(chosen: np.ndarray) -> float | None:
        used = cells.filled & chosen[:, None, None]
        return _rounded(auroc(said[used], cells.true[used]))

    return {
        "channels": list(lever.channels),
        "cells": by_cell(~closed),
        "pictures": _rounded(auroc(worst[~closed], kind[~closed] > 0)),
        "closed cells": by_cell(closed | (kind == 0)),
        "found": {**found, "closed crack": _share(worst[closed] > limit)},
        "n": {
            "clean": int((kind == 0).sum()),
            "open": int(((kind > 0) & ~closed).sum()),
            "closed": int(closed.sum()),
        },
    }


def _share(hits: np.ndarray) -> float | None:
    return round(float(np.mean(hits)), 4) if len(hits) else None


def _rounded(value: float) -> float | None:
    return round(value, 4) if np.isfinite(value) else None


def table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """One row a set of channels."""
    kinds = list(next(iter(figures.values()))["found"])
    head = ["shown", "cells", "pictures", "closed cells", *kinds]
    rows = [head]
    for name, row in figures.items():
        values = [row["cells"], row["pictures"], row["closed cells"], *row["found"].values()]
        rows.append([name, *("-" if value is None else f"{value:.3f}" for value in values)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def draw(figures: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Share of each kind of defect found at equal alarms, a group of bars a kind."""
    kinds = list(next(iter(figures.values()))["found"])
    picture, axes = plt.subplots(figsize=(10, 4), layout="constrained")
    width = 0.8 / len(figures)
    for place, (name, row) in enumerate(figures.items()):
        left = np.arange(len(kinds)) + (place - (len(figures) - 1) / 2) * width
        axes.bar(left, [value or 0.0 for value in row["found"].values()], width, label=name)
    axes.set_xticks(range(len(kinds)), kinds)
    axes.set_ylabel(f"found at {_ALARMS:.0%} alarms on clean parts")
    axes.set_ylim(0, 1)
    axes.legend(fontsize=8)
    picture.savefig(path, dpi=110)
    plt.close(picture)


def run(out: Path, train_count: int, test_count: int, steps: int, seed: int, jobs: int) -> Any:
    """Figures of every lever, also in `out`/levers.json."""
    training, test = pools(out, train_count, test_count, jobs)
    settings = {"steps": steps, "batch": _BATCH, "train": len(training), "test": len(test)}
    figures = {
        lever.name: measure(train(training, lever, steps, seed), test, lever) for lever in LEVERS
    }
    draw(figures, out / "levers.png")
    found = {**settings, "seed": seed, "alarms": _ALARMS, "levers": figures}
    partial_file = out / "levers.partial"
    partial_file.write_text(json.dumps(found, indent=1), encoding="utf-8")
    partial_file.replace(out / "levers.json")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path(".work/levers"))
    add("--train", type=int, default=3000, help="surrogate scans (default 3000)")
    add("--test", type=int, default=500, help="decoded scans (default 500)")
    add("--steps", type=int, default=1500, help=f"of {_BATCH} cells, each lever (default 1500)")
    add("--seed", type=int, default=0)
    add("--jobs", type=int, default=1, help="processes that make the pools")
    add("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    for name, least in (
        ("train", 1),
        ("test", 1),
        ("steps", 1),
        ("seed", 0),
        ("jobs", 1),
        ("threads", 1),
    ):
        if getattr(args, name) < least:
            parser.error(f"--{name}: expected {least} or more, got {getattr(args, name)}")
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        found = run(args.out, args.train, args.test, args.steps, args.seed, args.jobs)
    except StationError as error:
        print(f"training.levers: {error}", file=sys.stderr)
        return 1
    print(table(found["levers"]))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
