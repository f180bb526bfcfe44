"""Synthetic training pools: catalogue parts -> scanner surrogate -> the station's own pictures.

    python -m training.synth sheet       --out .work/data --count 30000 --jobs 2
    python -m training.synth surface     --out .work/data --count 15000 --jobs 2
    python -m training.synth sheet-val   --out .work/data --count 500 --seed 900000

Resumable: shards that exist are kept, every shard has its own seed. `--contact-sheet FILE.png`
draws a page of samples to look at. Evaluation never uses this path (see `training.cases`).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from pathlib import Path

import cv2
import numpy as np
from tqdm import tqdm

from forge_station.contract import tasks
from forge_station.contract.catalogue import CATALOGUE
from forge_station.contract.views import NANO_LAYOUT
from training.data.sheet_samples import make_sheet, plan_batch, plan_inventory, plan_kit
from training.data.surface_samples import make_surface, surface_part
from training.nano.pools import write_shard

SHARD = 250
_INDEX = {model.id: i for i, model in enumerate(CATALOGUE)}


def write_sheets(folder: Path, number: int, seed: int, samples: int = SHARD) -> None:
    """One shard of marks sheets; the same seed and number give the same bytes."""
    rng = np.random.default_rng([seed, number])
    height, width = NANO_LAYOUT.sheet_size
    images = np.zeros((samples, height, width, 3), np.uint8)
    part = np.full((samples, NANO_LAYOUT.columns), -1, np.int16)
    size = np.zeros((samples, NANO_LAYOUT.columns, 3), np.float32)
    count, scale = np.zeros(samples, np.int8), np.zeros(samples, np.float32)
    done = 0
    while done < samples:
        draw = rng.random()
        plan = (
            plan_batch(rng) if draw < 0.3 else plan_kit(rng) if draw < 0.6 else plan_inventory(rng)
        )
        try:
            drawn, sizes = make_sheet(plan, rng)
        except ValueError:
            continue
        n = len(plan.parts)
        images[done], scale[done], count[done] = drawn.image, drawn.mm_per_px, n
        part[done, :n] = [_INDEX[model.id] for model in plan.parts]
        size[done, :n] = sizes
        done += 1
    meta: dict[str, np.ndarray] = {"count": count, "part": part, "size": size, "mm_per_px": scale}
    write_shard(folder, number, images, meta)


def write_surfaces(folder: Path, number: int, seed: int, samples: int = SHARD) -> None:
    """One shard of surface pictures; the same seed and number give the same bytes."""
    rng = np.random.default_rng([seed, number, 7])
    images = np.zeros((samples, *NANO_LAYOUT.surface_size, 4), np.uint8)
    meta: dict[str, np.ndarray] = {
        "part": np.zeros(samples, np.int16),
        "size": np.zeros((samples, 3), np.float32),
        "defect": np.zeros(samples, np.uint8),
        "grid": np.zeros((samples, 3, 16, 16), bool),
        "score": np.zeros(samples, np.int8),
        "pixel_mm": np.zeros(samples, np.float32),
        "defect_mm": np.zeros(samples, np.float32),
        "defect_scale": np.zeros(samples, np.float32),
    }
    for done in range(samples):
        # The class is drawn before the retries, so that classes hard to see are not thinned out.
        kind = 0 if rng.random() < 0.3 else int(rng.integers(1, len(tasks.SURFACE_CLASSES)))
        sample = None
        while sample is None:
            model = surface_part(rng)
            try:
                sample = make_surface(model, tasks.SURFACE_CLASSES[kind], rng)
            except ValueError:
                continue
        images[done] = sample.image
        meta["part"][done], meta["defect"][done] = _INDEX[model.id], kind
        meta["size"][done], meta["grid"][done] = sample.size, sample.grid
        meta["score"][done], meta["pixel_mm"][done] = sample.score, sample.pixel_mm
        meta["defect_mm"][done], meta["defect_scale"][done] = sample.defect.mm, sample.defect.scale
    write_shard(folder, number, images, meta)


def _work(job: tuple[str, Path, int, int]) -> int:
    name, folder, number, seed = job
    cv2.setNumThreads(1)
    if name.startswith("sheet"):
        write_sheets(folder, number, seed)
    else:
        write_surfaces(folder, number, seed)
    return number


def contact_sheet(folder: Path, path: Path, count: int = 24) -> None:
    """A page of the first samples, shade channel."""
    images = np.load(next(iter(sorted(folder.glob("*.images.npy")))), mmap_mode="r")[:count]
    rows = [np.concatenate(list(images[i : i + 4, ..., 0]), 1) for i in range(0, len(images), 4)]
    cv2.imwrite(str(path), np.concatenate(rows, 0))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pool", choices=["sheet", "surface", "sheet-val", "surface-val"])
    parser.add_argument("--out", type=Path, required=True, help="data folder (git-ignored)")
    parser.add_argument("--count", type=int, default=1000, help="samples in all")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--contact-sheet", type=Path, help="PNG page of samples to look at")
    args = parser.parse_args()
    folder = args.out / args.pool
    wanted = range(-(-args.count // SHARD))
    missing = [n for n in wanted if not (folder / f"{n:05d}.meta.npz").exists()]
    jobs = [(args.pool, folder, number, args.seed) for number in missing]
    context = multiprocessing.get_context("spawn")
    with (
        context.Pool(args.jobs) as pool,
        tqdm(
            total=len(wanted) * SHARD, initial=(len(wanted) - len(missing)) * SHARD, unit="sample"
        ) as bar,
    ):
        for _ in pool.imap_unordered(_work, jobs):
            bar.update(SHARD)
    if args.contact_sheet:
        contact_sheet(folder, args.contact_sheet)


if __name__ == "__main__":
    main()
