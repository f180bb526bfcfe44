"""Prompts drawn by stratum: class by number of true cells, as VIEScore2 does. Knows no model."""

from __future__ import annotations

import numpy as np

from training.rewards import RewardError

CELL_EDGES = (1, 25, 97)
"""Strata of the number of true cells: 0, 1-24, 25-96, 97 and more (VIEScore2)."""


def strata(defect: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """Stratum of each sample, int [N]: class x number of true cells."""
    bins = np.digitize(cells, CELL_EDGES)
    return np.asarray(defect.astype(np.int64) * (len(CELL_EDGES) + 1) + bins)


def largest_remainder(shares: np.ndarray, count: int) -> np.ndarray:
    """Whole numbers that add up to `count`, in proportion to `shares`."""
    exact = shares / shares.sum() * count
    whole = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - whole), kind="stable")
    whole[order[: count - int(whole.sum())]] += 1
    return whole


def stratified(
    labels: np.ndarray, count: int, rng: np.random.Generator, clean: np.ndarray, share: float | None
) -> np.ndarray:
    """`count` sample numbers in random order, each stratum by its share of the pool.

    `clean` bool [N]; with `share` the clean strata get that share of the prompts. A stratum that
    is too small for its part repeats its samples, each equally often to within one.
    """
    names, sizes = np.unique(labels, return_counts=True)
    wanted = sizes.astype(np.float64)
    if share is not None:
        is_clean = np.array([clean[labels == name].all() for name in names])
        for chosen, part in ((is_clean, share), (~is_clean, 1 - share)):
            if part > 0 and not chosen.any():
                raise RewardError("clean_share", expected="clean and defective samples", got=names)
            wanted[chosen] *= part / max(wanted[chosen].sum(), 1.0)
    drawn = []
    for name, number in zip(names, largest_remainder(wanted, count), strict=True):
        members = np.flatnonzero(labels == name)
        rounds = -(-int(number) // len(members))
        again = [rng.permutation(members) for _ in range(rounds)]
        drawn.append(np.concatenate([*again, members[:0]])[:number])
    return rng.permutation(np.concatenate(drawn))
