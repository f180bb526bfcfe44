"""Samples -> a folder of pictures and examples.jsonl, which appears whole or not at all.

On the way: every picture is decoded, groups get their split, and the leakage guard looks at what
would be written. Knows no source format.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from forge_station.contract.error import Fault
from training.data import examples, leakage
from training.data.examples import Example
from training.data.leakage import Print
from training.data.loaders import splits
from training.data.loaders.sample import Loaded, LoadError, Problems, Sample
from training.data.loaders.splits import Split

_SHOWN = 20


@dataclass(frozen=True)
class Plan:
    """How samples are divided. `fold` wins over `shares`."""

    shares: tuple[float, float, float] = (0.8, 0.1, 0.1)
    fold: tuple[int, int] | None = None
    val_share: float = 0.0
    """With `fold`: share of the groups outside it that becomes `val`."""
    seed: int = 0
    clean_share: float | None = None
    """At most this share of `train` is clean; None keeps all."""
    leaks: Literal["error", "merge", "report"] = "error"
    bits: int = leakage.BITS
    overwrite: bool = False
    quiet: bool = False


def write(out: Path, loaded: Loaded, problems: Problems, plan: Plan) -> dict[str, Any]:
    """Decode, divide, guard, write. Returns the report; raises LoadError before anything is there.

    The report has `leaks` when they were asked for as a report only.
    """
    _check_free(out, plan.overwrite)
    samples, prints = _decoded(loaded.samples, problems, plan.quiet)
    problems.finish()
    if not samples:
        raise LoadError("nothing to write", which=loaded.source, expected="at least one example")
    _check_ids(samples)
    figures = dict(loaded.figures)
    if plan.leaks == "merge":
        samples, figures["groups_merged"] = _merged(samples, prints, plan.bits)
    split = (
        splits.by_fold(samples, plan.fold, plan.val_share, plan.seed)
        if plan.fold
        else splits.by_shares(samples, plan.shares, plan.seed)
    )
    kept = samples
    if plan.clean_share is not None:
        kept = splits.thin_clean(samples, split, plan.clean_share, plan.seed)
        figures["clean_left_out"] = len(samples) - len(kept)
    found = _guard(kept, prints, split, plan)
    _store(out, loaded.source, kept, split, plan)
    counts = splits.counts(kept, split)
    return {
        "source": loaded.source,
        "out": str(out),
        "examples": len(kept),
        "splits": counts,
        "missing_labels": _missing(kept, counts),
        "skipped": [str(fault) for fault in problems.faults],
        **figures,
        "leaks": found,
    }


def _decoded(
    samples: Sequence[Sample], problems: Problems, quiet: bool
) -> tuple[list[Sample], dict[str, Print]]:
    """Samples whose pictures all decode, and the fingerprint of the judged (last) one by id."""
    good, prints = [], {}
    for sample in tqdm(samples, desc="decode", unit="example", disable=quiet):
        with problems.of(sample.id):
            images = [picture.decoded() for picture in sample.pictures]
            prints[sample.id] = leakage.fingerprint(images[-1], sample.id)
            good.append(sample)
    return good, prints


def _check_ids(samples: Sequence[Sample]) -> None:
    twice = [name for name, n in Counter(sample.id for sample in samples).items() if n > 1]
    if twice:
        raise LoadError("two examples of one name", which=twice[0], action="rename one file")


def _merged(
    samples: Sequence[Sample], prints: dict[str, Print], bits: int
) -> tuple[list[Sample], int]:
    """Groups that share a picture become one; the number of groups that went."""
    parent = {sample.group: sample.group for sample in samples}

    def root(name: str) -> str:
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for a, b in leakage.alike([prints[sample.id] for sample in samples], bits):
        low, high = sorted((root(samples[a].group), root(samples[b].group)))
        parent[high] = low
    before = len(parent)
    out = [replace(sample, group=root(sample.group)) for sample in samples]
    return out, before - len({sample.group for sample in out})


def _guard(
    samples: Sequence[Sample], prints: dict[str, Print], split: dict[str, Split], plan: Plan
) -> list[str]:
    sided = [
        replace(prints[sample.id], side=split[sample.group], group=sample.group)
        for sample in samples
    ]
    found = [str(leak) for leak in leakage.leaks(sided, plan.bits)]
    if found and plan.leaks == "error":
        raise LoadError(
            f"{len(found)} leaks between splits (the first {min(_SHOWN, len(found))})",
            action="group what belongs together with --group, join look-alikes with --leaks merge, "
            "or look at the pairs and pass --leaks report",
            faults=[Fault("leak", text, "in one split") for text in found[:_SHOWN]],
        )
    return found


def _store(
    out: Path, source: str, samples: Sequence[Sample], split: dict[str, Split], plan: Plan
) -> None:
    with whole_folder(out, plan.overwrite) as folder:
        (folder / "images").mkdir()
        rows = []
        for sample in tqdm(samples, desc="write", unit="example", disable=plan.quiet):
            names = []
            for number, picture in enumerate(sample.pictures):
                suffix, content = picture.content()
                extra = f"-{number}" if len(sample.pictures) > 1 else ""
                names.append(f"images/{sample.id}{extra}{suffix}")
                (folder / names[-1]).write_bytes(content)
            rows.append(
                Example(
                    id=sample.id,
                    messages=sample.messages,
                    images=tuple(names),
                    source=source,
                    group=sample.group,
                    split=split[sample.group],
                    weight=sample.weight,
                )
            )
        examples.write(folder / examples.FILE, rows)


def _missing(samples: Sequence[Sample], counts: dict[str, dict[str, int]]) -> dict[str, list[str]]:
    """Labels that a split does not have at all: too few groups for them."""
    every = sorted({label for sample in samples for label in sample.labels})
    gaps = {name: [label for label in every if label not in own] for name, own in counts.items()}
    return {name: labels for name, labels in gaps.items() if labels}


def _check_free(out: Path, overwrite: bool) -> None:
    if not overwrite and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise LoadError(
            "something is there already", which=out, expected="a new folder",
            action="choose another --out, or pass --overwrite",
        )  # fmt: skip
    if overwrite and out.is_dir() and any(out.iterdir()) and not (out / examples.FILE).is_file():
        raise LoadError(
            "not a folder of examples", which=out, expected=f"{examples.FILE} in it",
            action="--overwrite replaces only what this command wrote",
        )  # fmt: skip


@contextmanager
def whole_folder(out: Path, overwrite: bool = False) -> Iterator[Path]:
    """A folder to fill beside `out`, which takes its place at the end, or goes with the error."""
    _check_free(out, overwrite)
    draft = out.with_name(f".{out.name}.{os.getpid()}.part")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        yield draft
        if out.exists():
            old = out.with_name(f".{out.name}.{os.getpid()}.old")
            out.replace(old)
            draft.replace(out)
            shutil.rmtree(old)
        else:
            draft.replace(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
