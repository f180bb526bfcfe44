"""Splits: groups stay whole, shares and labels are balanced, the seed decides, clean is thinned."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data.examples import Message
from training.data.loaders import splits
from training.data.loaders.sample import LoadError, Sample


def sample(n: int, group: str, label: str = "normal") -> Sample:
    turns = (Message("user", "x"), Message("assistant", "a: b"))
    return Sample(f"s{n}", (), turns, group, (label,), label == "normal")


def many(groups: int = 120) -> list[Sample]:
    """Groups of 1 to 6; every fifth is cracked, every fifteenth dented."""
    out = []
    for g in range(groups):
        label = "dent" if g % 15 == 0 else "crack" if g % 5 == 0 else "normal"
        out += [sample(len(out) + k, f"g{g}", label) for k in range(1 + g % 6)]
    return out


def sizes(samples: list[Sample], split: dict[str, splits.Split]) -> dict[str, Counter[str]]:
    out: dict[str, Counter[str]] = defaultdict(Counter)
    for item in samples:
        out[split[item.group]].update((*item.labels, "all"))
    return out


def test_shares_hold_for_every_label():
    samples = many()
    found = sizes(samples, splits.by_shares(samples, (0.8, 0.1, 0.1), 0))
    total = Counter(label for s in samples for label in (*s.labels, "all"))
    for name, share in (("train", 0.8), ("val", 0.1), ("test", 0.1)):
        for label, n in total.items():
            assert abs(found[name][label] - share * n) <= 6, (name, label)


def test_the_seed_decides():
    samples = many()
    first = splits.by_shares(samples, (0.8, 0.1, 0.1), 0)
    assert splits.by_shares(samples[::-1], (0.8, 0.1, 0.1), 0) == first
    assert splits.by_shares(samples, (0.8, 0.1, 0.1), 1) != first


def test_every_group_is_tested_once_in_the_folds():
    samples = many()
    tested: Counter[str] = Counter()
    for index in range(5):
        split = splits.by_fold(samples, (index, 5), 0.1, 3)
        assert set(split) == {s.group for s in samples}
        tested.update(group for group, name in split.items() if name == "test")
        found = sizes(samples, split)
        assert abs(found["test"]["all"] - len(samples) / 5) <= 6
        assert found["test"]["dent"] > 0 and found["val"]["all"] > 0
    assert set(tested.values()) == {1}


def test_clean_examples_of_train_are_thinned_and_no_others():
    samples = many()
    split = splits.by_shares(samples, (0.6, 0.2, 0.2), 0)
    kept = splits.thin_clean(samples, split, 0.1, 0)
    before, after = sizes(samples, split), sizes(kept, split)
    defects = before["train"]["all"] - before["train"]["normal"]
    assert after["train"]["normal"] == int(defects / 9)
    assert after["train"]["normal"] / after["train"]["all"] <= 0.1
    assert after["val"] == before["val"] and after["test"] == before["test"]
    assert splits.thin_clean(samples, split, 0.9, 0) == samples


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abc")), min_size=1, max_size=40),
    st.sampled_from([(0.8, 0.1, 0.1), (1.0, 0.0, 0.0), (0.5, 0.0, 0.5)]),
    st.integers(0, 3),
)
def test_any_groups_are_divided_whole(rows, shares, seed):
    samples = [sample(n, f"g{group}", label) for n, (group, label) in enumerate(rows)]
    split = splits.by_shares(samples, shares, seed)
    assert set(split) == {s.group for s in samples}
    empty = {
        name for name, share in zip(("train", "val", "test"), shares, strict=True) if not share
    }
    assert not empty & set(split.values())


@pytest.mark.parametrize("text", ["0.8,0.1", "0.8,0.1,0.2", "a,b,c", "1.5,-0.5,0", ""])
def test_shares_that_are_none(text):
    with pytest.raises(LoadError, match="--split"):
        splits.parse_shares(text)


@pytest.mark.parametrize("text", ["5/5", "0/1", "1", "-1/5", "a/b"])
def test_folds_that_are_none(text):
    with pytest.raises(LoadError, match="--fold"):
        splits.parse_fold(text)


def test_more_folds_than_groups_are_refused():
    with pytest.raises(LoadError, match="too few groups"):
        splits.by_fold([sample(0, "a"), sample(1, "b")], (0, 3), 0.0, 0)
