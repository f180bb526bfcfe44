"""Which prompts a GRPO run draws."""

from __future__ import annotations

import numpy as np
import pytest

from training.data import strata
from training.rewards import RewardError


def test_strata_are_class_by_number_of_cells():
    cells = np.array([0, 1, 24, 25, 96, 97, 500])
    assert strata.strata(np.zeros(7, np.uint8), cells).tolist() == [0, 1, 1, 2, 2, 3, 3]
    assert strata.strata(np.array([4], np.uint8), cells[:1]).tolist() == [16]


def test_largest_remainder_by_hand():
    assert strata.largest_remainder(np.array([5.0, 3, 2]), 7).tolist() == [4, 2, 1]  # 3.5 2.1 1.4
    assert strata.largest_remainder(np.array([1.0, 1, 1]), 2).tolist() == [1, 1, 0]


def test_prompts_are_stratified_seeded_and_as_clean_as_asked():
    labels = np.repeat([0, 5, 6], [50, 30, 20])
    clean = labels == 0

    def counts(count: int, share: float | None, seed: int = 0) -> list[int]:
        drawn = strata.stratified(labels, count, np.random.default_rng(seed), clean, share)
        assert len(drawn) == count
        assert np.bincount(drawn, minlength=100).max() <= -(-count // 20)
        return [int((labels[drawn] == name).sum()) for name in (0, 5, 6)]

    assert counts(10, None) == [5, 3, 2]
    assert counts(10, 0.2) == [2, 5, 3]  # 8 x .6 = 4.8, 8 x .4 = 3.2
    assert counts(60, 0.0) == [0, 36, 24]  # more than there are: some repeat
    first, again, other = (
        strata.stratified(labels, 10, np.random.default_rng(seed), clean, None)
        for seed in (0, 0, 1)
    )
    assert first.tolist() == again.tolist() != other.tolist()
    with pytest.raises(RewardError, match="clean_share"):
        strata.stratified(labels[~clean], 10, np.random.default_rng(0), clean[~clean], 0.5)
