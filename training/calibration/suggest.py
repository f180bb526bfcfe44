"""Limits of the surface check from labelled parts, with what they would cost. Never a certificate.

A part FAILs from `defect_fail` on, is UNSURE from `defect_unsure` on, and else what the other
checks leave it. `defect_unsure` is the highest limit that lets no more of the defective parts
through than asked, `defect_fail` the lowest that fails no more of the good ones. Figures of the
parts that chose a limit flatter it, so half of the parts choose and the others predict; a part
belongs to its half by its name, for good. Pure computation, but for the picture.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forge_station.assurance.agreement import Rate
from forge_station.assurance.audit import HARVESTED_ONLY
from forge_station.checks import Thresholds
from training.calibration.error import CalibrationError
from training.evaluation.rows import Row

GRID = tuple(round(0.05 * step, 2) for step in range(1, 20))
_OWN = ("SURFACE_", "GRID_CONTRADICTS", "LOW_SURFACE_SCORE")
_SURFACE = "surface"
_LEAST = 5
"""Good and defective parts of each half below which nothing is suggested."""


@dataclass(frozen=True)
class Scored:
    """One physical part. `others`: what the checks but the surface's limits leave of it."""

    id: str
    defective: bool
    probability: float
    others: str
    provenance: str

    def outcome(self, fail: float, unsure: float) -> str:
        """PASS, UNSURE or FAIL with these limits."""
        if self.probability >= fail or self.others == "FAIL":
            return "FAIL"
        return "UNSURE" if self.probability >= unsure else self.others


@dataclass(frozen=True)
class Figures:
    """What two limits do to some parts, each with its exact 95 % interval."""

    fail: float
    unsure: float
    escape: Rate
    overkill: Rate
    held: Rate
    """Good parts that are UNSURE."""
    caught: Rate
    """Defective parts that FAIL; the others neither pass nor fail."""


@dataclass(frozen=True)
class Suggested:
    """Limits, what the choosing parts say of them, and what the others predict."""

    now: Figures
    """The bundle's own limits on all parts, which nobody chose on them."""
    chosen_on: Figures
    predicted: Figures
    curve: tuple[Figures, ...]
    """All parts, one limit for both."""
    left_out: Mapping[str, int]

    @property
    def thresholds(self) -> dict[str, float]:
        return {"defect_fail": self.chosen_on.fail, "defect_unsure": self.chosen_on.unsure}


def scored(rows: Sequence[Row], limits: Thresholds) -> tuple[list[Scored], dict[str, int]]:
    """The parts of surface rows, one entry a physical part: of several captures the one that speaks
    against the station. Also how many rows were left out, by reason."""
    left_out = {
        "not about a surface": 0,
        "ERROR": 0,
        "without a score": 0,
        "the same part again": 0,
    }
    parts: dict[str, Scored] = {}
    for row in rows:
        odds = row.log_odds.get(_SURFACE)
        if row.task != _SURFACE or row.expected is None:
            left_out["not about a surface"] += 1
        elif row.outcome == "ERROR":
            left_out["ERROR"] += 1
        elif odds is None:
            left_out["without a score"] += 1
        else:
            probability = 1.0 / (1.0 + math.exp(-max(-500.0, min(500.0, odds))))
            doubts = any(not reason.startswith(_OWN) for reason in row.reasons)
            failed = row.outcome == "FAIL" and probability < limits.defect_fail
            others = "FAIL" if failed else "UNSURE" if doubts else "PASS"
            own = Scored(
                row.part or row.id, row.expected == "FAIL", probability, others, row.provenance
            )
            before = parts.get(own.id)
            if before is not None:
                left_out["the same part again"] += 1
                if (own.probability < before.probability) != own.defective:
                    continue
            parts[own.id] = own
    return list(parts.values()), {why: count for why, count in left_out.items() if count}


def figures(parts: Sequence[Scored], fail: float, unsure: float) -> Figures:
    """What limits do to parts. Escapes count parts only that the station did not choose itself."""
    good = [part.outcome(fail, unsure) for part in parts if not part.defective]
    bad = [
        part.outcome(fail, unsure)
        for part in parts
        if part.defective and part.provenance != "harvested"
    ]
    return Figures(
        fail,
        unsure,
        escape=Rate(bad.count("PASS"), len(bad)),
        overkill=Rate(good.count("FAIL"), len(good)),
        held=Rate(good.count("UNSURE"), len(good)),
        caught=Rate(bad.count("FAIL"), len(bad)),
    )


def escape_of(rows: Sequence[Row]) -> float:
    """The share of the defective parts that the bundle of these rows lets through, surfaces only.
    CalibrationError without any."""
    bad = [
        row.outcome
        for row in rows
        if row.task == _SURFACE and row.expected == "FAIL" and row.provenance != "harvested"
    ]
    if not bad:
        raise CalibrationError("no defective part whose surface the bundle in use was asked about")
    return bad.count("PASS") / len(bad)


def choose(parts: Sequence[Scored], escape: float, overkill: float) -> tuple[float, float]:
    """(defect_fail, defect_unsure) of the two shares asked for, on these parts."""
    bad = sum(part.defective and part.provenance != "harvested" for part in parts)
    good = sum(not part.defective for part in parts)
    return at_ranks(parts, int(escape * bad), int(overkill * good))


def at_ranks(
    parts: Sequence[Scored], passing: int, failing: int, most: float = 1.0
) -> tuple[float, float]:
    """(defect_fail, defect_unsure): the highest `defect_unsure` up to `most` that lets no more than
    `passing` defective parts through, the lowest `defect_fail` that fails no more than `failing`
    good ones. Defective parts of a harvest do not count; there has to be another."""
    reach = sorted(
        part.probability if part.others == "PASS" else 1.0
        for part in parts
        if part.defective and part.provenance != "harvested"
    )
    unsure = min(most, _rounded(reach[min(passing, len(reach) - 1)], math.floor))
    alarms = sorted((part.probability for part in parts if not part.defective), reverse=True)
    above = alarms[failing] if failing < len(alarms) else 0.0
    fail = _rounded(min(0.999, above + 1e-9), math.ceil)
    return max(fail, unsure), unsure


def _rounded(value: float, way: Any) -> float:
    """To three digits, to the side that lets no more through."""
    return float(way(1000.0 * value)) / 1000.0


def suggest(
    rows: Sequence[Row], limits: Thresholds, *, escape: float, overkill: float
) -> Suggested:
    """Limits for a bundle whose own are `limits`. CalibrationError where the parts cannot tell."""
    parts, left_out = scored(rows, limits)
    bad = [part for part in parts if part.defective]
    if bad and all(part.provenance == "harvested" for part in bad):
        raise CalibrationError("no limit can be suggested", got=HARVESTED_ONLY)
    choosing = [part for part in parts if _chooses(part.id)]
    others = [part for part in parts if not _chooses(part.id)]
    short = [
        f"{sum(part.defective == defective for part in half)} {word}"
        for half in (choosing, others)
        for defective, word in ((True, "defective"), (False, "good"))
        if sum(part.defective == defective for part in half) < _LEAST
    ]
    if short:
        raise CalibrationError(
            "too few labelled parts to choose limits with some and predict with the others",
            expected=f"{_LEAST} good and {_LEAST} defective parts in each half",
            got=f"{', '.join(short)} in a half; left out {left_out or 'none'}",
            action="label more parts; the limits stay as they are",
        )
    fail, unsure = choose(choosing, escape, overkill)
    return Suggested(
        now=figures(parts, limits.defect_fail, limits.defect_unsure),
        chosen_on=figures(choosing, fail, unsure),
        predicted=figures(others, fail, unsure),
        curve=tuple(figures(parts, limit, limit) for limit in GRID),
        left_out=left_out,
    )


def _chooses(part: str) -> bool:
    return hashlib.sha256(f"choose {part}".encode()).digest()[0] < 128


def facts(found: Figures) -> dict[str, Any]:
    """Plain data, rates with their intervals."""
    told: dict[str, Any] = {"defect_fail": found.fail, "defect_unsure": found.unsure}
    for name in ("escape", "overkill", "held", "caught"):
        rate: Rate = getattr(found, name)
        low, high = rate.interval
        told["unsure" if name == "held" else name] = {
            "count": rate.count, "of": rate.of, "share": rate.share, "low": low, "high": high,
        }  # fmt: skip
    return told


def table(found: Suggested) -> str:
    """For a person."""
    lines = [
        f"{'limits':<34}{'overkill P(FAIL|good)':<28}{'UNSURE of good':<28}escape P(PASS|defective)"
    ]
    for name, one in (
        ("now, all parts", found.now),
        ("suggested, parts that chose it", found.chosen_on),
        ("suggested, predicted by the others", found.predicted),
    ):
        lines.append(f"{name} (FAIL {one.fail:.3f}, UNSURE {one.unsure:.3f})")
        rates = "".join(f"{_text(rate):<28}" for rate in (one.overkill, one.held, one.escape))
        lines.append(f"{'':<34}{rates}")
    lines += ["", "one limit for both, all parts:"]
    lines += [
        f"{one.fail:<34.2f}{_text(one.overkill):<28}{'':<28}{_text(one.escape):<28}"
        for one in found.curve[1::2]
    ]
    return "\n".join(lines)


def _text(rate: Rate) -> str:
    if rate.share is None:
        return "no part"
    low, high = rate.interval
    return f"{100 * rate.share:.1f} % ({100 * low:.1f}-{100 * high:.1f}), n {rate.of}"


def picture(curve: Sequence[Figures], chosen: Figures, now: Figures) -> bytes:
    """PNG: overkill and escape over the limit, with pointwise 95 % intervals, and both limits."""
    from training.calibration import plots

    return plots.limits_curve(
        [one.fail for one in curve],
        {
            "good parts at or above (FAIL or UNSURE)": [_points(one.overkill) for one in curve],
            "defective parts that pass": [_points(one.escape) for one in curve],
        },
        {"FAIL from": chosen.fail, "UNSURE from": chosen.unsure},
        {"FAIL now": now.fail, "UNSURE now": now.unsure},
    )


def _points(rate: Rate) -> tuple[float, float, float]:
    low, high = rate.interval
    return (rate.share if rate.share is not None else float(np.nan), low, high)
