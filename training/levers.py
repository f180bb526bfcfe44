r"""What each channel of the surface picture is worth, alone and together, at equal training.

    python -m training.levers --out .work/levers            # table, levers.json, levers.png
    python -m training.levers --out .work/levers --steps 600 --train 8000

The same small U-Net is trained from scratch for the same steps on the same surrogate scans, and
tested on decoded scans (pattern images, decoding, separation), once with each set of channels:
shading of the view, relief (height over the local mean), difference from the reference of the part,
the scanner's white image, and shading alone at half the resolution. A share of the cracks is
closed: dark lines without depth, which are left out of training where the white image is not shown,
for nothing shows them there. It ranks what pictures show; the model's own figures are those of
`training.evaluate`. The second look is measured there: with and without `--threshold look_again=1`.

Pools and finished runs are kept: call it again and it goes on.
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
from tqdm import tqdm

from forge_station.contract import tasks
from forge_station.contract.error import StationError
from forge_station.contract.grid import SIDE
from forge_station.contract.views import DIFFERENCE, VIEWS, WHITE
from training import synth
from training.data import engine
from training.data.pool import Recipe, Shares
from training.data.variation import USUAL
from training.nano.photo_baselines import UNet
from training.nano.pools import STORED_CHANNELS, SurfacePool
from training.nano.sft import auroc

matplotlib.use("Agg")
from matplotlib import pyplot as plt

CLOSED = 0.3
"""Share of the cracks without depth."""
_RATE, _BATCH, _ALARMS = 2e-3, 16, 0.10


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


def shown(pool: SurfacePool, index: Sequence[int], lever: Lever) -> torch.Tensor:
    """Pictures float32 [B, channels, H, W], -1..1."""
    chosen = [STORED_CHANNELS.index(name) for name in lever.channels]
    images = np.stack([pool.shards.image(i)[..., chosen] for i in index])
    found = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1
    return F.avg_pool2d(found, lever.shrink) if lever.shrink > 1 else found


def cells_of(pool: SurfacePool, index: Sequence[int]) -> torch.Tensor:
    """True cells float32 [B, 16, 48]: the three views side by side, as their panels are."""
    grids = pool.shards.meta["grid"][list(index)]
    return torch.from_numpy(np.concatenate([grids[:, i] for i in range(len(VIEWS))], 2)).float()


def train(pool: SurfacePool, lever: Lever, steps: int, seed: int) -> UNet:
    """From scratch; cross-entropy of class and cells, and Dice of the cells."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    cells = (SIDE, SIDE * len(VIEWS))
    model = UNet(len(tasks.SURFACE_CLASSES), channels=len(lever.channels), cells=cells).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps)
    meta = pool.shards.meta
    able = np.flatnonzero(~meta["closed"] | (WHITE in lever.channels))
    bar = tqdm(range(steps), desc=lever.name, mininterval=5)
    for _ in bar:
        index = rng.choice(able, _BATCH).tolist()
        truth, kind = cells_of(pool, index), torch.from_numpy(meta["defect"][index]).long()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            seen, said = model(shown(pool, index, lever))
        seen, said = seen.float(), said.float()
        chance = seen.sigmoid()
        dice = 1 - (2 * (chance * truth).sum() + 1) / (chance.sum() + truth.sum() + 1)
        loss = F.cross_entropy(said, kind) + dice
        loss = loss + 2 * F.binary_cross_entropy_with_logits(seen, truth)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{float(loss.detach()):.2f}", refresh=False)
    return model.eval()


@torch.no_grad()
def measure(model: UNet, pool: SurfacePool, lever: Lever) -> dict[str, Any]:
    """Figures on a test pool.

    auroc, five_class: open defects and clean parts. found: share of the defects of a kind that are
    scored above the limit that `_ALARMS` of the clean parts exceed. iou: mean over open defects.
    """
    odds, cells = [], []
    for start in range(0, len(pool), _BATCH):
        index = list(range(start, min(start + _BATCH, len(pool))))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            seen, said = model(shown(pool, index, lever))
        odds.append(said.float().softmax(-1).numpy())
        cells.append((seen.float() > 0).numpy())
    chance, marked = np.concatenate(odds), np.concatenate(cells)
    meta = pool.shards.meta
    kind, closed = meta["defect"].astype(int), meta["closed"].astype(bool)
    defect = 1 - chance[:, 0]
    limit = float(np.quantile(defect[kind == 0], 1 - _ALARMS))
    truth = cells_of(pool, range(len(pool))).numpy() > 0
    both, either = (marked & truth).sum((1, 2)), (marked | truth).sum((1, 2))
    agreement = (both / np.maximum(either, 1))[(kind > 0) & ~closed]
    found = {
        name: _share(defect[(kind == i) & ~closed] > limit)
        for i, name in enumerate(tasks.SURFACE_CLASSES)
        if i > 0
    }
    return {
        "channels": list(lever.channels),
        "auroc": round(auroc(defect[~closed], kind[~closed] > 0), 4),
        "five_class": _share(chance.argmax(1)[~closed] == kind[~closed]),
        "iou": round(float(np.mean(agreement)), 4),
        "found": {**found, "closed crack": _share(defect[closed] > limit)},
        "n": {"clean": int((kind == 0).sum()), "open": len(agreement), "closed": int(closed.sum())},
    }


def _share(hits: np.ndarray) -> float | None:
    return round(float(np.mean(hits)), 4) if len(hits) else None


def table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """One row a set of channels."""
    kinds = list(next(iter(figures.values()))["found"])
    head = ["shown", "AUROC", "5 classes", "IoU", *kinds]
    rows = [head]
    for name, row in figures.items():
        values = [row["auroc"], row["five_class"], row["iou"], *row["found"].values()]
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
    """Figures of every lever, also in `out`/levers.json; finished runs are kept."""
    training, test = pools(out, train_count, test_count, jobs)
    settings = {"steps": steps, "batch": _BATCH, "train": len(training), "test": len(test)}
    figures: dict[str, Any] = {}
    for lever in LEVERS:
        asked = f"{seed}-{steps}-{len(training)}-{len(test)}"
        kept = out / f"{lever.name.replace(' ', '_').replace(',', '')}-{asked}.json"
        if kept.is_file():
            figures[lever.name] = json.loads(kept.read_text(encoding="utf-8"))
            continue
        figures[lever.name] = measure(train(training, lever, steps, seed), test, lever)
        partial_file = kept.with_suffix(".partial")
        partial_file.write_text(json.dumps(figures[lever.name]), encoding="utf-8")
        partial_file.replace(kept)
    draw(figures, out / "levers.png")
    found = {**settings, "seed": seed, "alarms": _ALARMS, "levers": figures}
    (out / "levers.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path(".work/levers"))
    add("--train", type=int, default=3000, help="surrogate scans (default 3000)")
    add("--test", type=int, default=500, help="decoded scans (default 500)")
    add("--steps", type=int, default=400, help=f"of {_BATCH} pictures, each lever (default 400)")
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
