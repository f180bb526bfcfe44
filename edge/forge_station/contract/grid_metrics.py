"""How well predicted grids and scores agree with the truth: IoU, Dice, pooled F1, rank correlation.

Definitions of VIEScore2 (evaluation and reward). A prediction of None is an answer that could not
be parsed. Knows nothing of text or images.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forge_station.contract.grid import DefectGrid


def iou(predicted: DefectGrid | None, truth: DefectGrid) -> float:
    """Intersection over union of one image: unparsed 0, both empty 1, exactly one empty 0."""
    if predicted is None:
        return 0.0
    union = int((predicted.cells | truth.cells).sum())
    return int((predicted.cells & truth.cells).sum()) / union if union else 1.0


def dice(
    predicted: DefectGrid | None, truth: DefectGrid, *, beta: float = 1.0, major_weight: float = 2.0
) -> float:
    """The reward r_dice: F-beta over cells, true major cells weighing `major_weight` in TP and FN.

    Unparsed 0, both empty 1, otherwise 0 without a hit. False positives always weigh 1.
    """
    if predicted is None:
        return 0.0
    if not predicted.count and not truth.count:
        return 1.0
    weight = np.where(truth.major, major_weight, 1.0)
    hits = float(weight[predicted.cells & truth.cells].sum())
    missed = float(weight[truth.cells & ~predicted.cells].sum())
    false = int((predicted.cells & ~truth.cells).sum())
    if hits == 0.0:
        return 0.0
    return (1 + beta**2) * hits / ((1 + beta**2) * hits + beta**2 * missed + false)


@dataclass(frozen=True)
class GridFigures:
    """Agreement over many images. Rates are None when nothing was there to count."""

    images: int
    non_empty: int
    """Images whose truth has a defect: the base of `iou`."""
    iou: float | None
    """Headline: mean over images with a defect only."""
    iou_all: float | None
    """Mean over all images; inflated by empty images that stay empty."""
    precision: float
    recall: float
    f1: float
    """Pooled over all cells; 1 when there is nothing on either side."""
    clean_alarm_rate: float | None
    """Images without a defect in which at least one cell was predicted (or unparsed text)."""
    vanish_rate: float | None
    """Images with a defect for which no cell was predicted: escapes of the grid."""
    parse_rate: float | None


def grid_figures(pairs: Iterable[tuple[DefectGrid | None, DefectGrid]]) -> GridFigures:
    """Figures over (predicted or None, truth); unparsed counts all true cells as missed."""
    seen = list(pairs)
    hits = false = missed = 0
    for predicted, truth in seen:
        cells = np.zeros_like(truth.cells) if predicted is None else predicted.cells
        hits += int((cells & truth.cells).sum())
        false += int((cells & ~truth.cells).sum())
        missed += int((~cells & truth.cells).sum())
    defects = [(predicted, truth) for predicted, truth in seen if truth.count]
    clean = [predicted for predicted, truth in seen if not truth.count]
    return GridFigures(
        images=len(seen),
        non_empty=len(defects),
        iou=_mean([iou(predicted, truth) for predicted, truth in defects]),
        iou_all=_mean([iou(predicted, truth) for predicted, truth in seen]),
        precision=_ratio(hits, hits + false),
        recall=_ratio(hits, hits + missed),
        f1=_ratio(2 * hits, 2 * hits + false + missed),
        clean_alarm_rate=_mean([float(item is None or item.count > 0) for item in clean]),
        vanish_rate=_mean([float(item is None or item.count == 0) for item, _ in defects]),
        parse_rate=_mean([float(predicted is not None) for predicted, _ in seen]),
    )


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman: Pearson on tie-averaged ranks; None for fewer than 2 values or a constant side."""
    if len(first) != len(second):
        raise ValueError(f"expected equally many values, got {len(first)} and {len(second)}")
    if len(first) < 2 or len(set(first)) < 2 or len(set(second)) < 2:
        return None
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: Sequence[float]) -> npt.NDArray[np.float64]:
    array = np.asarray(values, np.float64)
    _, place, counts = np.unique(array, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    average: npt.NDArray[np.float64] = (last - (counts - 1) / 2)[place]
    return average


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 1.0


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
