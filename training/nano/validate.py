"""Surface figures of a checkpoint that is not a bundle yet: classes, grids and alarms on a pool.

Decoded as the station does (`answers.best`); takes a second or two a hundred samples.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen2_5_VLForConditionalGeneration

from forge_station.checks import Thresholds
from forge_station.contract.grid import SIDE, DefectGrid
from forge_station.contract.grid_metrics import grid_figures, rank_correlation
from training.nano import answers
from training.nano import model as nano
from training.nano.pools import SurfacePool
from training.nano.sft import auroc

SHIPPED = Thresholds(defect_fail=0.55, defect_unsure=0.2, grid_row=0.4)
"""The operating point of the shipped nano bundle."""


def surface_answers(
    model: Qwen2_5_VLForConditionalGeneration,
    pool: SurfacePool,
    count: int,
    row_threshold: float,
    vision: answers.Vision | None = None,
    batch: int = 25,
) -> answers.Answers:
    """Best answers to the first `count` samples of a pool, G = 1; `vision`: tokens if known."""
    vision = vision or answers.Vision(nano.Forward(model), pool, frozen=False)
    found = []
    training = model.training
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for start in range(0, min(count, len(pool)), batch):
            index = np.arange(start, min(start + batch, count, len(pool)))
            given = answers.prompts(pool, index, None)
            found.append(answers.best(model, given, vision(index), row_threshold))
    model.train(training)
    return answers.joined(found)


def surface_figures(
    model: Qwen2_5_VLForConditionalGeneration,
    pool: SurfacePool,
    count: int = 500,
    at: Thresholds = SHIPPED,
    vision: answers.Vision | None = None,
) -> dict[str, float]:
    """Figures on the first `count` samples, every grid decoded whatever the class says.

    grid_iou: mean over defective parts of one IoU over all three views. clean_alarms_grid: clean
    parts with a marked cell; _station: of these the ones whose grid the station would decode;
    _class: clean parts that fail by their class.
    """
    found = surface_answers(model, pool, count, at.grid_row, vision)
    meta = pool.shards.meta
    count = len(found.cells)
    truth = meta["grid"][:count].reshape(count, -1)
    defect, score = meta["defect"][:count].astype(int), meta["score"][:count]
    cells = found.cells.reshape(count, -1)
    defective: NDArray[np.bool_] = defect > 0
    clean = ~defective
    hits, either = (cells & truth).sum(1), (cells | truth).sum(1)
    odds = 1 - found.class_odds[:, 0]
    expected = found.score_odds @ np.arange(found.score_odds.shape[1])
    rank = rank_correlation(expected.tolist(), score.tolist())
    views = [
        (DefectGrid(p), DefectGrid(t))
        for p, t in zip(cells.reshape(-1, SIDE, SIDE), truth.reshape(-1, SIDE, SIDE), strict=True)
    ]
    pooled = grid_figures(views)
    marked = np.asarray(cells.any(1), bool)
    opened = marked & (odds >= at.defect_unsure)
    failed: NDArray[np.bool_] = odds >= at.defect_fail
    figures = {
        "samples": count,
        "grid_iou": float((hits / np.maximum(either, 1))[defective].mean()),
        "grid_f1": pooled.f1,
        "grid_precision": pooled.precision,
        "grid_recall": pooled.recall,
        "grid_escapes": 1 - float(marked[defective].mean()),
        "clean_alarms_grid": float(marked[clean].mean()),
        "clean_alarms_station": float(opened[clean].mean()),
        "clean_alarms_class": float(failed[clean].mean()),
        "five_class": float((found.defect[:, 0] == defect).mean()),
        "auroc": auroc(odds, defective),
        "score_error": float(np.abs(expected - score).mean()),
        "score_srcc": float("nan") if rank is None else rank,
    }
    return {name: round(value, 4) for name, value in figures.items()}
