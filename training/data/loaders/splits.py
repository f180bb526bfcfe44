"""Groups -> train, val, test: balanced by label, seeded, and a group is never divided."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

from training.data.loaders.sample import LoadError, Sample

Split = Literal["train", "val", "test"]


def parse_shares(text: str) -> tuple[float, float, float]:
    """`0.8,0.1,0.1` -> train, val, test; they add up to 1."""
    try:
        shares = tuple(float(item) for item in text.split(","))
    except ValueError:
        shares = ()
    if len(shares) != 3 or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        raise LoadError(
            "not shares", which="--split", expected="train,val,test that add up to 1", got=text
        )
    return shares[0], shares[1], shares[2]


def parse_fold(text: str) -> tuple[int, int]:
    """`2/5` -> (2, 5); folds count from 0."""
    first, slash, last = text.partition("/")
    if slash and first.isdigit() and last.isdigit() and int(last) >= 2 and int(first) < int(last):
        return int(first), int(last)
    raise LoadError("not a fold", which="--fold", expected="i/k with 0 <= i < k, k >= 2", got=text)


def balanced(samples: Sequence[Sample], shares: Sequence[float], seed: int) -> dict[str, int]:
    """Group -> bin, so that every bin has about its share of every label and of the whole.

    Greedy: groups in seeded order, large ones first, each to the bin that lacks it most.
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for sample in samples:
        counts[sample.group].update(set(sample.labels))
        counts[sample.group][""] += 1
    total: Counter[str] = Counter()
    for count in counts.values():
        total.update(count)
    order = sorted(counts)
    random.Random(seed).shuffle(order)
    order.sort(key=lambda name: -counts[name][""])
    filled: list[Counter[str]] = [Counter() for _ in shares]
    bins = [index for index, share in enumerate(shares) if share > 0]
    found = {}
    for name in order:

        def lack(index: int, own: Counter[str] = counts[name]) -> float:
            """How empty the bin would be, label by label; a rare label weighs as much as all."""
            return sum(
                n / total[label]
                - n * (filled[index][label] + n / 2) / shares[index] / total[label] ** 2
                for label, n in own.items()
            )

        best = max(bins, key=lack)
        filled[best].update(counts[name])
        found[name] = best
    return found


def by_shares(
    samples: Sequence[Sample], shares: tuple[float, float, float], seed: int
) -> dict[str, Split]:
    """Group -> split."""
    names: tuple[Split, ...] = ("train", "val", "test")
    return {group: names[index] for group, index in balanced(samples, shares, seed).items()}


def by_fold(
    samples: Sequence[Sample], fold: tuple[int, int], val_share: float, seed: int
) -> dict[str, Split]:
    """Group -> split: fold i of k is `test`, `val_share` of the other groups is `val`."""
    index, folds = fold
    where = balanced(samples, [1 / folds] * folds, seed)
    groups = len(where)
    if groups < folds:
        raise LoadError("too few groups", which="--fold", expected=f"{folds} or more", got=groups)
    rest = [sample for sample in samples if where[sample.group] != index]
    inner = balanced(rest, (1 - val_share, val_share), seed)
    out: dict[str, Split] = {group: "test" for group, bin in where.items() if bin == index}
    out.update({group: "val" if bin else "train" for group, bin in inner.items()})
    return out


def thin_clean(
    samples: Sequence[Sample], split: Mapping[str, Split], share: float, seed: int
) -> list[Sample]:
    """Leave out clean samples of `train` until they are at most `share` of it.

    VIEScore2 trains with 10 % clean. A line is mostly good, so val and test stay as they are.
    """
    train = [sample for sample in samples if split[sample.group] == "train"]
    clean = sorted(sample.id for sample in train if sample.clean)
    allowed = int(share * (len(train) - len(clean)) / (1 - share) + 1e-9)
    dropped = set(random.Random(seed).sample(clean, max(0, len(clean) - allowed)))
    return [sample for sample in samples if sample.id not in dropped]


def counts(samples: Sequence[Sample], split: Mapping[str, Split]) -> dict[str, dict[str, int]]:
    """Split -> label -> samples (and `all`, `clean`, `groups`, `largest_group`), for the report."""
    out: dict[str, dict[str, int]] = {}
    for name in ("train", "val", "test"):
        own = [sample for sample in samples if split[sample.group] == name]
        if own:
            labels = Counter(label for sample in own for label in sample.labels)
            out[name] = {
                "all": len(own),
                "groups": len(groups := Counter(sample.group for sample in own)),
                "largest_group": max(groups.values()),
                "clean": sum(sample.clean for sample in own),
                **dict(sorted(labels.items())),
            }
    return out
