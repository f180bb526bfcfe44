"""Attribute agreement: do appraisers agree with themselves, with each other and with the truth?

Parts are judged several times by each appraiser (the station is one), removed and fed again each
time. The rates are those of the AIAG's manual (MSA, 4th edition, chapter III C); the trap is the
effectiveness, which counts a part only when *every* trial is right, not the majority of trials.
Pure computation: no files, no pictures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from forge_station.assurance import distributions
from forge_station.assurance.error import AssuranceError

Decision = Literal["PASS", "FAIL", "UNSURE"]
DECISIONS: tuple[Decision, ...] = ("PASS", "FAIL", "UNSURE")
Band = Literal["acceptable", "marginal", "unacceptable"]

# AIAG: acceptable up to the first limit, marginal up to the second.
EFFECTIVENESS, MISS, FALSE_ALARM = (0.90, 0.80), (0.02, 0.05), (0.05, 0.10)
KAPPA = (0.75, 0.40)


@dataclass(frozen=True)
class Study:
    """`decisions[appraiser][part]`: one decision a trial, in the order of the trials.

    `reference[part]`: PASS for a good part, FAIL for a bad one; empty: no reference is known.
    """

    parts: tuple[str, ...]
    trials: int
    decisions: Mapping[str, Mapping[str, tuple[Decision, ...]]]
    reference: Mapping[str, Decision]

    def __post_init__(self) -> None:
        for appraiser, own in self.decisions.items():
            short = [part for part in self.parts if len(own.get(part, ())) != self.trials]
            if short:
                raise AssuranceError(
                    "the study is not complete", which=f"appraiser {appraiser}, part {short[0]}",
                    expected=f"{self.trials} trials of each part by each appraiser",
                    got=f"{len(own.get(short[0], ()))} trials",
                    action="judge the missing ones, or leave out the part",
                )  # fmt: skip
        unknown = [part for part in self.parts if part not in self.reference]
        if self.reference and unknown:
            raise AssuranceError(
                "some parts have a reference and others none", which=f"part {unknown[0]}",
                expected="a reference for all parts, or for none",
            )  # fmt: skip


@dataclass(frozen=True)
class Rate:
    """`count` of `of`, with its exact 95 % interval."""

    count: int
    of: int

    @property
    def share(self) -> float | None:
        """None of nothing."""
        return self.count / self.of if self.of else None

    @property
    def interval(self) -> tuple[float, float]:
        return distributions.interval(self.count, self.of)


@dataclass(frozen=True)
class Kappa:
    """Agreement beyond chance, 1 is perfect; None where all decisions are the same.

    `interval`: 95 %, by the jackknife over parts, since the trials of one part belong together.
    """

    value: float | None
    interval: tuple[float, float] | None
    agreement: float
    """Observed share of equal pairs, Po."""

    @property
    def prevalence_adjusted(self) -> float:
        """PABAK, 2 Po - 1: kappa of a mix without skew, which pulls kappa down."""
        return 2.0 * self.agreement - 1.0


@dataclass(frozen=True)
class Appraiser:
    """One appraiser. Figures that need a reference are None without one."""

    name: str
    within: Rate
    """Parts whose trials are all equal."""
    within_kappa: Kappa | None
    """Fleiss, of the trials; None with one trial."""
    effectiveness: Rate | None = None
    """Parts whose trials are all equal to the reference; UNSURE is wrong."""
    effectiveness_routed: Rate | None = None
    """The same, where UNSURE is no mistake: the part went to a person."""
    miss: Rate | None = None
    """Decisions PASS on bad parts, of all decisions on bad parts."""
    missed_parts: Rate | None = None
    """Bad parts with at least one PASS: the interval of `miss` takes trials for independent,
    this one does not need to."""
    false_alarm: Rate | None = None
    """Decisions FAIL on good parts, of all decisions on good parts."""
    unsure: Rate | None = None
    """Decisions UNSURE, of all."""
    majority_right: Rate | None = None
    """Parts whose most frequent decision is the reference. No AIAG figure: shown because some
    programs call it effectiveness, and it is larger."""
    reference_kappa: Kappa | None = None
    """Cohen, decisions beside the reference."""


@dataclass(frozen=True)
class Agreement:
    """The whole study."""

    parts: int
    good: int
    bad: int
    trials: int
    appraisers: tuple[Appraiser, ...]
    between: Rate
    """Parts on which all trials of all appraisers are equal."""
    between_kappa: Kappa | None
    """Fleiss, of all trials of all appraisers."""
    all_right: Rate | None
    """Parts on which all of them are equal to the reference."""
    pairs: Mapping[tuple[str, str], Kappa]
    """Cohen, two appraisers side by side, trial by trial."""


def analyse(study: Study) -> Agreement:
    """All figures of a complete study."""
    parts = study.parts
    everything = {
        part: tuple(item for own in study.decisions.values() for item in own[part])
        for part in parts
    }
    pairs = {
        (a, b): _cohen([(study.decisions[a][p], study.decisions[b][p]) for p in parts])
        for a, b in combinations(study.decisions, 2)
    }
    said = [study.reference.get(part) for part in parts]
    raters = study.trials * len(study.decisions)
    return Agreement(
        parts=len(parts),
        good=said.count("PASS"),
        bad=said.count("FAIL"),
        trials=study.trials,
        appraisers=tuple(_appraiser(study, name) for name in study.decisions),
        between=_count(parts, lambda part: len(set(everything[part])) == 1),
        between_kappa=fleiss(list(everything.values())) if raters > 1 else None,
        all_right=_count(parts, lambda part: set(everything[part]) == {study.reference[part]})
        if study.reference
        else None,
        pairs=pairs,
    )


def _appraiser(study: Study, name: str) -> Appraiser:
    own, parts, truth = study.decisions[name], study.parts, study.reference
    within = _count(parts, lambda part: len(set(own[part])) == 1)
    repeat = fleiss([own[part] for part in parts]) if study.trials > 1 else None
    if not truth:
        return Appraiser(name, within, repeat)
    bad = [part for part in parts if truth[part] == "FAIL"]
    good = [part for part in parts if truth[part] == "PASS"]
    return Appraiser(
        name,
        within,
        repeat,
        effectiveness=_count(parts, lambda part: set(own[part]) == {truth[part]}),
        effectiveness_routed=_count(parts, lambda part: set(own[part]) <= {truth[part], "UNSURE"}),
        miss=Rate(sum(own[part].count("PASS") for part in bad), len(bad) * study.trials),
        missed_parts=_count(bad, lambda part: "PASS" in own[part]),
        false_alarm=Rate(sum(own[part].count("FAIL") for part in good), len(good) * study.trials),
        unsure=Rate(sum(own[part].count("UNSURE") for part in parts), len(parts) * study.trials),
        majority_right=_count(
            parts, lambda part: Counter(own[part])[truth[part]] * 2 > study.trials
        ),
        reference_kappa=_cohen([(own[part], (truth[part],) * study.trials) for part in parts]),
    )


def _count(parts: Sequence[str], holds: Callable[[str], bool]) -> Rate:
    return Rate(sum(1 for part in parts if holds(part)), len(parts))


def _cohen(pairs: Sequence[tuple[Sequence[Decision], Sequence[Decision]]]) -> Kappa:
    """Kappa of two columns of decisions; an entry a part, each with its trials."""
    tables = np.zeros((len(pairs), 3, 3))
    for table, (left, right) in zip(tables, pairs, strict=True):
        for a, b in zip(left, right, strict=True):
            table[DECISIONS.index(a), DECISIONS.index(b)] += 1

    def kappa(total: NDArray[np.float64]) -> tuple[float, float]:
        share = total / total.sum()
        return float(np.trace(share)), float(share.sum(0) @ share.sum(1))

    return _kappa(tables, kappa)


def fleiss(rows: Sequence[Sequence[Decision]]) -> Kappa:
    """Fleiss' kappa of the decisions on each part, as many on every part."""
    counts = np.array([[row.count(item) for item in DECISIONS] for row in rows], float)
    raters = counts.sum(1)[0]
    agreeing = ((counts * (counts - 1)).sum(1) / (raters * (raters - 1)))[:, None]
    with_agreement = np.hstack([counts, agreeing, np.ones_like(agreeing)])

    def kappa(total: NDArray[np.float64]) -> tuple[float, float]:
        share = total[:3] / total[:3].sum()
        return float(total[3] / total[4]), float(share @ share)

    return _kappa(with_agreement, kappa)


def _kappa(
    parts: NDArray[np.float64], shares: Callable[[NDArray[np.float64]], tuple[float, float]]
) -> Kappa:
    """(Po - Pe) / (1 - Pe) with the jackknife over the first axis; `shares`: a sum -> (Po, Pe)."""
    total = parts.sum(0)
    observed, chance = shares(total)
    if chance >= 1.0 - 1e-12:
        return Kappa(None, None, observed)
    value = (observed - chance) / (1.0 - chance)
    left_out = []
    for part in parts if len(parts) > 2 else ():
        po, pe = shares(total - part)
        left_out.append((po - pe) / (1.0 - pe) if pe < 1.0 - 1e-12 else 1.0)
    if not left_out:
        return Kappa(value, None, observed)
    n = len(left_out)
    half = 1.959964 * float(np.std(left_out)) * np.sqrt(n - 1.0)
    return Kappa(value, (max(-1.0, value - half), min(1.0, value + half)), observed)


def band(value: float | None, limits: tuple[float, float]) -> Band | None:
    """AIAG's decision; limits that fall (0.9, 0.8) ask for a large value, others for a small."""
    if value is None:
        return None
    first, second = limits
    sign = 1.0 if first > second else -1.0
    if sign * value >= sign * first:
        return "acceptable"
    return "marginal" if sign * value >= sign * second else "unacceptable"


def bands(appraiser: Appraiser) -> dict[str, Band | None]:
    """Figure -> AIAG's decision on it."""
    kappa = appraiser.reference_kappa
    rates = (
        ("effectiveness", appraiser.effectiveness, EFFECTIVENESS),
        ("miss", appraiser.miss, MISS),
        ("false_alarm", appraiser.false_alarm, FALSE_ALARM),
    )
    found = {name: band(rate.share if rate else None, limits) for name, rate, limits in rates}
    return {**found, "kappa": band(kappa.value if kappa else None, KAPPA)}


def worst_band(appraiser: Appraiser) -> Band | None:
    """The decision on an appraiser: the worst of its figures."""
    order: tuple[Band, ...] = ("unacceptable", "marginal", "acceptable")
    found = [item for item in bands(appraiser).values() if item is not None]
    return min(found, key=order.index) if found else None
