"""Limits of the surface check from few labelled parts, each judged by a model that never saw it.

`training.loop.folds` makes such scores. Halving 60 parts to choose with one half and predict with
the other leaves too few of either; here all choose, by ranks fixed before the scores are seen. Of
`n` labelled defective parts the bundle in use let `b` through: `allowed` = max(0, b - 1) of them
may lie below `defect_unsure`. Were a new part's score exchangeable with theirs, its escape would
be (allowed + 1) / (n + 1) on average, or less: the mean of an order statistic (Vovk, Gammerman and
Shafer, Algorithmic Learning in a Random World, 2005; over folds: Barber et al., Predictive
inference with the jackknife+, 2021). No certificate: one draw of parts can do worse, and the model
that is released is another one than those that gave the scores. Pure computation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forge_station.assurance.audit import HARVESTED_ONLY
from forge_station.checks import Thresholds
from training.calibration import suggest
from training.calibration.error import CalibrationError
from training.calibration.suggest import Figures
from training.evaluation.rows import Row

LEAST = 5
"""Good and defective parts below which nothing is chosen."""


@dataclass(frozen=True)
class Crossed:
    """Limits, and what they are expected to do to parts like the labelled ones."""

    now: Figures
    """The recipe's limits on the same scores."""
    chosen_on: Figures
    """The limits on the parts that chose them: flattered by what was asked of them."""
    passed_before: int
    """Defective parts that the bundle in use let through on the line."""
    allowed: int
    """Of the defective parts, below `defect_unsure`."""
    escape: float
    """Expected of a new defective part, at most."""
    overkill: float
    """Expected of a new good part."""
    curve: tuple[Figures, ...]
    left_out: Mapping[str, int]

    @property
    def thresholds(self) -> dict[str, float]:
        return {"defect_fail": self.chosen_on.fail, "defect_unsure": self.chosen_on.unsure}


def choose(
    rows: Sequence[Row], limits: Thresholds, *, passed: Collection[str], overkill: float
) -> Crossed:
    """Limits for a bundle whose recipe has `limits`. `rows`: out of their fold, one or more a part.
    `passed`: parts that were PASS on the line. `overkill`: share of the good parts that may FAIL.
    CalibrationError where the parts cannot tell."""
    parts, left_out = suggest.scored(rows, limits)
    good = [part for part in parts if not part.defective]
    bad = [part for part in parts if part.defective and part.provenance != "harvested"]
    if not bad and any(part.defective for part in parts):
        raise CalibrationError("no limit can be chosen", got=HARVESTED_ONLY)
    if min(len(good), len(bad)) < LEAST:
        raise CalibrationError(
            "too few labelled parts to choose limits",
            expected=f"{LEAST} good and {LEAST} defective parts, judged by a model that did not "
            "train on them",
            got=f"{len(good)} good, {len(bad)} defective; left out {left_out or 'none'}",
            action="label more parts; the limits stay as they are",
        )
    let_through = sum(part.id in passed for part in bad)
    allowed = max(0, let_through - 1)
    failing = int(overkill * len(good))
    fail, unsure = suggest.at_ranks([*good, *bad], allowed, failing, most=limits.defect_unsure)
    return Crossed(
        now=suggest.figures(parts, limits.defect_fail, limits.defect_unsure),
        chosen_on=suggest.figures(parts, fail, unsure),
        passed_before=let_through,
        allowed=allowed,
        escape=(allowed + 1) / (len(bad) + 1),
        overkill=(failing + 1) / (len(good) + 1),
        curve=tuple(suggest.figures(parts, limit, limit) for limit in suggest.GRID),
        left_out=left_out,
    )


def facts(found: Crossed) -> dict[str, Any]:
    """Plain data: what is expected, and the parts that chose, with their intervals."""
    return {
        "limits": found.thresholds,
        "defective_passed_before": found.passed_before,
        "defective_allowed_below": found.allowed,
        "expected": {"escape_at_most": found.escape, "overkill": found.overkill},
        "parts_that_chose": suggest.facts(found.chosen_on),
        "recipe_on_the_same_parts": suggest.facts(found.now),
        "left_out": dict(found.left_out),
        "certificate": "none: expected values of parts like these, see certify",
    }
