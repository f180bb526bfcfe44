"""Pools of a few random pictures with plausible truth, as `training.synth` lays them out."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from forge_station.contract import tasks
from forge_station.contract.catalogue import CATALOGUE
from forge_station.contract.views import NANO_LAYOUT
from training.nano.pools import write_shard

SAMPLES = 8


def write_pools(folder: Path) -> None:
    """The four pools that a run opens."""
    for seed, (split, samples) in enumerate((("", SAMPLES), ("-val", 3))):
        write_sheets(folder / f"sheet{split}", 0, seed, samples)
        write_surfaces(folder / f"surface{split}", 0, seed, samples)


def write_sheets(
    folder: Path, number: int, seed: int, samples: int = SAMPLES
) -> dict[str, np.ndarray]:
    """Every stored cell is one grey value of its own: 1 + 10 x sample + column."""
    rng = np.random.default_rng([seed, number])
    height, width = NANO_LAYOUT.sheet_size
    images = np.zeros((samples, height, width, 3), np.uint8)
    count = rng.integers(1, NANO_LAYOUT.columns + 1, samples)
    part = np.full((samples, NANO_LAYOUT.columns), -1, np.int16)
    for row in range(samples):
        n = int(count[row])
        part[row, :n] = rng.integers(0, len(CATALOGUE), n)
        for column in range(n):
            left = column * NANO_LAYOUT.cell
            images[row, :, left : left + NANO_LAYOUT.cell] = 1 + 10 * row + column
    meta = {
        "count": count.astype(np.int8),
        "part": part,
        "size": rng.uniform(2, 40, (samples, NANO_LAYOUT.columns, 3)).astype(np.float32),
        "mm_per_px": rng.uniform(0.1, 1, samples).astype(np.float32),
    }
    write_shard(folder, number, images, meta)
    return meta


def write_surfaces(
    folder: Path, number: int, seed: int, samples: int = SAMPLES
) -> dict[str, np.ndarray]:
    """Noise in the top panel, nothing in the others; a short row of cells where defective."""
    rng = np.random.default_rng([seed, number, 1])
    defect = np.arange(samples, dtype=np.uint8) % len(tasks.SURFACE_CLASSES)
    grid = np.zeros((samples, 3, 16, 16), bool)
    grid[defect > 0, 2, 5, 4:7] = True
    images = np.zeros((samples, *NANO_LAYOUT.surface_size, 4), np.uint8)
    side = NANO_LAYOUT.panel
    images[:, :, 2 * side :] = rng.integers(0, 255, (samples, side, side, 4))
    meta = {
        "part": rng.integers(0, len(CATALOGUE), samples).astype(np.int16),
        "size": rng.uniform(2, 40, (samples, 3)).astype(np.float32),
        "defect": defect,
        "grid": grid,
        "score": np.where(defect > 0, 4, 10).astype(np.int8),
    }
    write_shard(folder, number, images, meta)
    return meta
