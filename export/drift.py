"""How far a bundle's answers are from those of the same checkpoint in full precision.

Takes the row files that `training.evaluate` writes for both over the same cases. Pure figures and
limits: it runs nothing. A flip from PASS to FAIL or back is what must not happen; a part that turns
UNSURE, or no longer is, costs a look.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forge_station.contract import binomial, record
from forge_station.errors import InputError

Row = Mapping[str, Any]
_DECIDED = ("PASS", "FAIL")


@dataclass(frozen=True)
class Limits:
    """What the gate allows; shares, cells and points of the ten-point score.

    Decided beforehand (2026-11-30): no decided verdict flips; the others are about what two runs
    of training differ by, an order of magnitude smaller.
    """

    flips: int = 0
    unsure: float = 0.03
    readings: float = 0.01
    classes: float = 0.03
    grid_iou: float = 0.95
    score: float = 0.2


LIMITS = Limits()


@dataclass(frozen=True)
class Drift:
    """Second run (quantised) against first (full precision), over `cases` cases.

    `flips`: ids that changed between PASS and FAIL, or to or from ERROR. `unsure`: cases that
    became UNSURE or no longer are. `readings`, `classes`: (changed, asked). `grid_iou`: mean over
    the `grids` surfaces where either run marks a cell; None without such. `score`: mean difference
    of the surface and conformity scores over `scores` cases. `lost`, `won`: verdicts right in one
    run only.
    """

    cases: int
    flips: tuple[str, ...]
    unsure: int
    readings: tuple[int, int]
    classes: tuple[int, int]
    grid_iou: float | None
    grids: int
    score: float
    score_most: float
    scores: int
    lost: int
    won: int
    limits: Limits = LIMITS
    accepted: str = ""
    """Why a bundle over the limits was written all the same."""

    def faults(self) -> list[str]:
        """What is over a limit; empty when the bundle may be written."""
        limits, found = self.limits, []
        if len(self.flips) > limits.flips:
            found.append(f"{len(self.flips)} verdicts flipped ({', '.join(self.flips[:3])})")
        for name, (changed, asked), most in (
            ("cases turned to or from UNSURE", (self.unsure, self.cases), limits.unsure),
            ("readings changed", self.readings, limits.readings),
            ("surface classes changed", self.classes, limits.classes),
        ):
            if changed > most * asked:
                found.append(f"{changed} of {asked} {name}, at most {most:.0%}")
        if self.grid_iou is not None and self.grid_iou < limits.grid_iou:
            found.append(f"grid IoU {self.grid_iou:.3f}, at least {limits.grid_iou}")
        if self.score > limits.score:
            found.append(f"scores differ by {self.score:.2f} on average, at most {limits.score}")
        return found

    def table(self) -> list[tuple[str, str, str]]:
        """(what, value, limit) of every figure, for people."""
        limits = self.limits
        high = binomial.upper(len(self.flips), self.cases, 0.05)
        iou = "-" if self.grid_iou is None else f"{self.grid_iou:.3f} (n = {self.grids})"
        return [
            (
                "verdicts flipped between PASS and FAIL",
                f"{len(self.flips)} of {self.cases} (95 %: at most {high:.2%})",
                str(limits.flips),
            ),
            ("turned to or from UNSURE", _share(self.unsure, self.cases), f"{limits.unsure:.0%}"),
            ("readings changed", _share(*self.readings), f"{limits.readings:.0%}"),
            ("surface classes changed", _share(*self.classes), f"{limits.classes:.0%}"),
            ("grid IoU between both", iou, f"at least {limits.grid_iou}"),
            (
                "score difference, mean (largest)",
                f"{self.score:.3f} ({self.score_most:.1f}), n = {self.scores}",
                f"{limits.score}",
            ),
            ("verdicts right only before / only after", f"{self.lost} / {self.won}", "-"),
        ]

    def accept(self, reason: str) -> Drift:
        return replace(self, accepted=reason)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the manifest and the last line of a command."""
        return {**record.write(self), "faults": self.faults()}


def _share(changed: int, asked: int) -> str:
    return f"{changed} of {asked}" + (f" ({changed / asked:.2%})" if asked else "")


def compare(full: Sequence[Row], own: Sequence[Row], limits: Limits = LIMITS) -> Drift:
    """Rows of both runs, over the same cases in any order. Raises InputError."""
    first, second = ({str(row["id"]): row for row in rows} for rows in (full, own))
    if not first or set(first) != set(second):
        raise InputError(
            "the two runs are not over the same cases",
            expected=f"{len(first)} ids of the first",
            got=f"{len(set(first) & set(second))} of them and {len(set(second) - set(first))} more",
            action="evaluate both on the same folder",
        )
    pairs = [(row, second[name]) for name, row in first.items()]
    told = [(a, b) for a, b in pairs if not (a["outcome"] == b["outcome"] == "ERROR")]
    if not told:
        raise InputError(
            "no case could be evaluated, so nothing was compared",
            expected="cases with an outcome in either run",
            got=f"{len(pairs)} that ended in ERROR in both",
            action="look at the rows: each says why",
        )
    flips, unsure, lost, won = [], 0, 0, 0
    readings, classes, scores, ious = [], [], [], []
    for a, b in told:
        before, after = a["outcome"], b["outcome"]
        if before != after:
            if "UNSURE" in (before, after) and "ERROR" not in (before, after):
                unsure += 1
            else:
                flips.append(str(a["id"]))
        if a.get("expected") in _DECIDED:
            lost += before == a["expected"] != after
            won += after == a["expected"] != before
        marks = {mark["mark"]: mark["read"] for mark in b["marks"]}
        readings += [marks.get(mark["mark"]) != mark["read"] for mark in a["marks"]]
        if a["defect"] or b["defect"]:
            classes.append(a["defect"] != b["defect"])
        if a["score"] is not None and b["score"] is not None:
            scores.append(abs(a["score"] - b["score"]))
        cells = [{tuple(cell) for cell in row["cells"] or ()} for row in (a, b)]
        if cells[0] | cells[1]:
            ious.append(len(cells[0] & cells[1]) / len(cells[0] | cells[1]))
    return Drift(
        cases=len(told),
        flips=tuple(flips),
        unsure=unsure,
        readings=(sum(readings), len(readings)),
        classes=(sum(classes), len(classes)),
        grid_iou=round(sum(ious) / len(ious), 4) if ious else None,
        grids=len(ious),
        score=round(sum(scores) / len(scores), 4) if scores else 0.0,
        score_most=round(max(scores, default=0.0), 2),
        scores=len(scores),
        lost=lost,
        won=won,
        limits=limits,
    )


def read_rows(path: Path) -> list[Row]:
    """Rows of a file of `training.evaluate`. Raises InputError."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
        for row in rows:
            missing = {"id", "outcome", "marks", "defect", "score", "cells"} - set(row)
            if missing:
                raise ValueError(f"a row lacks {', '.join(sorted(missing))}")
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            "rows cannot be read",
            which=path,
            expected="a file that training.evaluate wrote",
            got=error,
        ) from error
    return rows
