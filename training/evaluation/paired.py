"""Two runs over the same cases: the difference of every figure with an interval, and the flips.

Paired: each resample draws the same cases for both runs, so that what is hard for both cancels.
Pure functions of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from forge_station.errors import InputError
from training.evaluation import tray_figures
from training.evaluation.measures import RESAMPLES, Array, Measure, drawn, ratio_resampled
from training.evaluation.rows import Row
from training.evaluation.scoring import measures_of

Rows = Sequence[Row]


def aligned(first: Rows, second: Rows) -> list[tuple[Row, Row]]:
    """Rows of the same case side by side. InputError where the runs are not over the same cases."""
    one, two = {row.id: row for row in first}, {row.id: row for row in second}
    for rows, by_id, name in ((first, one, "first"), (second, two, "second")):
        if len(rows) != len(by_id):
            twice = next(row.id for row in rows if sum(r.id == row.id for r in rows) > 1)
            raise InputError("a case stands twice", which=f"the {name} file", got=twice)
    only_one, only_two = sorted(set(one) - set(two)), sorted(set(two) - set(one))
    if only_one or only_two:
        raise InputError(
            "the two runs are not over the same cases",
            expected="the same ids in both",
            got=f"{len(only_one)} only in the first ({_few(only_one)}), "
            f"{len(only_two)} only in the second ({_few(only_two)})",
            action="evaluate both on the same folder with the same --limit",
        )
    changed = [i for i in one if one[i].case and two[i].case and one[i].case != two[i].case]
    if changed:
        raise InputError(
            "cases changed between the two runs",
            expected="the same line of cases.jsonl behind the same id",
            got=f"{len(changed)} that differ ({_few(changed)})",
            action="evaluate both again",
        )
    return [(row, two[row.id]) for row in first]


def _few(ids: Sequence[str]) -> str:
    return ", ".join(ids[:3]) + (", ..." if len(ids) > 3 else "") or "none"


def compare(first: Rows, second: Rows, defect_fail: tuple[float, float]) -> dict[str, Any]:
    """Task -> figures (first, second, difference, interval, n), and flips. second - first.

    `defect_fail`: the limit of each run's own bundle.
    """
    pairs = aligned(first, second)
    out: dict[str, Any] = {}
    for task in dict.fromkeys(row.task for row, _ in pairs):
        own = [(a, b) for a, b in pairs if a.task == task]
        both = [row for pair in own for row in pair]
        measures = [measures_of(task, both, limit) for limit in defect_fail]
        figures = {}
        for one, two in zip(*measures, strict=True):
            found = _difference(one, two, own)
            if found is not None:
                figures[one.name] = found
        out[task] = {"cases": len(own), "figures": figures, "flips": _flips(task, own)}
    return out


def _difference(
    one: Measure, two: Measure, pairs: Sequence[tuple[Row, Row]]
) -> dict[str, Any] | None:
    """None where either run has nothing to measure."""
    a, b = one.figure([row for row, _ in pairs]), two.figure([row for _, row in pairs])
    if a["value"] is None or b["value"] is None:
        return None
    chosen = drawn(len(pairs), RESAMPLES)
    gaps = _resampled(two, [row for _, row in pairs], chosen)
    gaps = gaps - _resampled(one, [row for row, _ in pairs], chosen)
    low, high = np.nanpercentile(gaps, (2.5, 97.5)) if np.isfinite(gaps).any() else (-1.0, 1.0)
    return {
        "first": a["value"],
        "second": b["value"],
        "difference": round(b["value"] - a["value"], 4),
        "interval": [round(float(low), 4), round(float(high), 4)],
        "n": [a["n"], b["n"]],
        "lower_is_better": one.lower_is_better,
    }


def _resampled(measure: Measure, rows: Rows, chosen: NDArray[np.int64]) -> Array:
    """The figure of every resample; NaN where it has nothing to measure."""
    items = [measure.of(row) for row in rows]
    if measure.kind != "ranking":
        parts = np.array([sum(item[0] for item in case or ()) for case in items], float)
        wholes = np.array([sum(item[1] for item in case or ()) for case in items], float)
        if measure.kind == "share":  # as Measure.figure counts it: a case is right or not
            parts, wholes = (parts > 0).astype(float), (wholes > 0).astype(float)
        return ratio_resampled(parts, wholes, chosen)
    function = measure.function
    assert function is not None
    blocks = [np.array(case, float) if case else None for case in items]
    found = np.full(len(chosen), np.nan)
    for number, drawn_cases in enumerate(chosen):
        own = [block for i in drawn_cases if (block := blocks[i]) is not None]
        value = function(np.concatenate(own)) if own else None
        if value is not None:
            found[number] = value
    return found


def _flips(task: str, pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    """Cases that one run has right and the other wrong, with McNemar's exact test."""
    rights: dict[str, Callable[[Row], bool | None]] = {
        "verdict": lambda row: None if row.expected is None else row.outcome == row.expected,
    }
    if task == "surface":
        rights["class"] = lambda row: (
            None if row.defect_true is None else row.defect == row.defect_true
        )
    else:
        rights["decision"] = lambda row: (
            None if row.answers_true is None else tray_figures.decision_right(row)
        )
    return {name: flips(pairs, right) for name, right in rights.items()}


def flips(pairs: Sequence[tuple[Row, Row]], right: Callable[[Row], bool | None]) -> dict[str, Any]:
    """McNemar's exact two-sided test on the cases that changed sides."""
    told = [(right(a), right(b), a.id) for a, b in pairs]
    known = [(a, b, name) for a, b, name in told if a is not None and b is not None]
    lost = [name for a, b, name in known if a and not b]
    won = [name for a, b, name in known if b and not a]
    changed = len(lost) + len(won)
    p = float(binomtest(len(won), changed, 0.5).pvalue) if changed else 1.0
    return {
        "n": len(known), "both_right": sum(bool(a and b) for a, b, _ in known),
        "only_first": len(lost), "only_second": len(won),
        "both_wrong": sum(not a and not b for a, b, _ in known),
        "mcnemar_p": round(p, 5), "lost": lost, "won": won,
    }  # fmt: skip
