"""Labelled parts that train also choose limits: the model is trained again without some of them.

The labelled parts are dealt into folds. For each fold the same recipe trains without its parts, and
the draft of that judges them: scores of parts that the model has never seen, from labels alone. A
fold is a run of the loop's own steps in a folder of its own; training in it goes on from its own
states.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from training.calibration import stored
from training.loop import judging
from training.loop.labelled import Told

if TYPE_CHECKING:
    from training.loop.steps import Loop, Notes

ROWS = "rows.jsonl"


def name(number: int) -> str:
    """Step and folder of a fold, counted from 1."""
    return f"fold-{number}"


def deal(parts: Mapping[str, bool], folds: int) -> dict[str, int]:
    """Part -> its fold, from 1. `parts`: part -> defective. Good and defective parts apart, each in
    the order of a digest of its name, in turn and on from one kind to the other: no fold has two
    more of a kind, or in all, than another."""
    order = [
        part
        for kind in (False, True)
        for part in sorted((part for part, bad in parts.items() if bad == kind), key=_order)
    ]
    return {part: 1 + number % folds for number, part in enumerate(order)}


def _order(part: str) -> str:
    return hashlib.sha256(f"fold {part}".encode()).hexdigest()


def split(told: Sequence[Told], number: int, folds: int) -> tuple[list[Told], list[Told]]:
    """(what trains in a fold, what it judges): all labels of a part on one side. A part is
    defective if any label of it says so."""
    parts: dict[str, bool] = {}
    for one in told:
        parts[one.part] = parts.get(one.part, False) or one.label.label == "NG"
    dealt = deal(parts, folds)
    return (
        [one for one in told if dealt[one.part] != number],
        [one for one in told if dealt[one.part] == number],
    )


def of(loop: Loop, number: int) -> Loop:
    """The run of a fold: the loop's recipe, pools and references, in a folder of its own."""
    return replace(loop, out=loop.out / name(number), whole=loop, fold=number)


def make(loop: Loop, number: int) -> Notes:
    """Train without the fold's parts and judge them; leaves rows.jsonl in the fold's folder."""
    own = of(loop, number)
    shutil.rmtree(own.out / "labels", ignore_errors=True)
    labels = own.take_labels()
    own.fine_tune()
    own.reinforce()
    judging.draft(own)
    with stored.judge(own.out / "draft", own.recipe.threads) as inspector:
        judged = stored.rows_of(own.kept_out(), inspector, quiet=own.quiet)
    judging.keep(own.out / ROWS, judged.rows)
    notes: Notes = {"trained_on": labels["trained_on"], "judged": len(judged.rows)}
    return {**notes, "left_out": dict(judged.left_out)} if judged.left_out else notes
