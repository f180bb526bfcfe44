"""Whether probabilities mean what they say: calibration errors, Brier score, AUROC.

Pure functions of arrays. A calibration error is a picture, not a gate: the plain one of a perfectly
calibrated model is 0.03 at 1000 answers in 15 bins, the debiased one 0.01.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

BINS = 15
_EQUAL_BINS = 10
Array = NDArray[np.float64]


def auroc(scores: ArrayLike, positive: ArrayLike) -> float | None:
    """Probability that a positive scores above a negative, ties count half; None without both."""
    values, truth = np.asarray(scores, float), np.asarray(positive, bool)
    count = int(truth.sum())
    if not 0 < count < len(truth):
        return None
    _, place, times = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(times) - (times - 1) / 2)[place]
    above = float(ranks[truth].sum()) - count * (count + 1) / 2
    return above / (count * (len(truth) - count))


def calibration_error(probabilities: ArrayLike, right: ArrayLike) -> float | None:
    """Expected calibration error: ten equal bins, |mean probability - share right| by bin size."""
    values, hits = np.asarray(probabilities, float), np.asarray(right, float)
    if not len(values):
        return None
    number = np.minimum((values * _EQUAL_BINS).astype(int), _EQUAL_BINS - 1)
    total = 0.0
    for k in range(_EQUAL_BINS):
        own = number == k
        if own.any():
            total += own.sum() * abs(float(values[own].mean()) - float(hits[own].mean()))
    return total / len(values)


def _equal_mass(probabilities: ArrayLike, right: ArrayLike, bins: int) -> list[tuple[Array, Array]]:
    """Answers sorted by probability in `bins` bins of equal size, each of two answers or more."""
    values, hits = np.asarray(probabilities, float), np.asarray(right, float)
    order = np.argsort(values, kind="stable")
    parts = np.array_split(order, max(1, min(bins, len(values) // 2)))
    return [(values[part], hits[part]) for part in parts if len(part)]


def equal_mass_error(probabilities: ArrayLike, right: ArrayLike, bins: int = BINS) -> float | None:
    """Expected calibration error over bins of equal size: sum n_b/n |right_b - probability_b|."""
    parts = _equal_mass(probabilities, right, bins)
    if not parts:
        return None
    gaps = [len(p) * abs(float(p.mean()) - float(hit.mean())) for p, hit in parts]
    return sum(gaps) / sum(len(p) for p, _ in parts)


def debiased_error(probabilities: ArrayLike, right: ArrayLike, bins: int = BINS) -> float | None:
    """ECE2: root of sum n_b/n [(p_b - r_b)^2 - r_b (1 - r_b)/(n_b - 1)], 0 where that is below 0.

    What chance alone adds to a squared gap is taken off (Kumar, Liang and Ma 2019). None below two
    answers.
    """
    parts = _equal_mass(probabilities, right, bins)
    count = sum(len(p) for p, _ in parts)
    if count < 2:
        return None
    total = 0.0
    for p, hit in parts:
        share = float(hit.mean())
        chance = share * (1 - share) / (len(p) - 1)
        total += len(p) / count * ((float(p.mean()) - share) ** 2 - chance)
    return max(0.0, total) ** 0.5


def brier(probabilities: Array, truth: Array) -> float | None:
    """Mean over answers of the sum over classes of (probability - truth)^2; both [n, classes]."""
    if not len(probabilities):
        return None
    return float(((probabilities - truth) ** 2).sum(axis=1).mean())


def brier_skill(probabilities: Array, truth: Array) -> float | None:
    """1 - Brier / Brier of the class shares themselves; None where only one class occurs."""
    own = brier(probabilities, truth)
    if own is None:
        return None
    base = brier(np.broadcast_to(truth.mean(axis=0), truth.shape), truth)
    return None if not base else 1.0 - own / base


def two_sided(probabilities: ArrayLike) -> Array:
    """Probabilities [n] of being right -> [n, 2] (right, wrong), for `brier`."""
    values = np.asarray(probabilities, float)
    return np.stack([values, 1.0 - values], axis=1)


def bins_of(probabilities: Sequence[float], right: Sequence[bool]) -> list[dict[str, Any]]:
    """The calibration diagram: mean probability, share right and size of each equal-mass bin."""
    return [
        {
            "probability": round(float(p.mean()), 4),
            "right": round(float(hit.mean()), 4),
            "n": len(p),
        }
        for p, hit in _equal_mass(probabilities, right, BINS)
    ]
