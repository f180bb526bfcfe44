"""How well people judge: agreement, misses on gold, overrides, pace. Figures for the lead name
nobody; a person's own are for that person. Pure computation.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, tzinfo
from typing import Any

from forge_station.assurance.agreement import Decision, Kappa, Rate, fleiss
from forge_station.contract.label import Label
from forge_station.contract.verdict import Outcome
from forge_station.hmi.review.draw import Draw
from forge_station.hmi.review.queue import Gold
from forge_station.hmi.shift import begin_of

FAST_MS, FEW = 1500, 20
"""A median below is too fast to have looked; of so many answers at least."""
STAMPED = 200
"""So many reviews in a row that agree with the station: a rubber stamp."""
KAPPA = 0.8
_DECISION: Mapping[str, Decision] = {"OK": "PASS", "NG": "FAIL", "cannot_tell": "UNSURE"}


@dataclass(frozen=True)
class Pace:
    """Of first answers."""

    reviews: int
    median_ms: float | None
    fast: bool
    overrides: int
    stamped: bool
    """The last 200 reviews of parts with a verdict all agree with the station."""


@dataclass(frozen=True)
class GoldRate:
    """Answers on parts of known truth. Can't tell is neither a miss nor a false alarm."""

    miss: Rate
    """OK of the looks at defective parts."""
    false_alarm: Rate
    """NG of the looks at good parts."""
    cannot_tell: int


@dataclass(frozen=True)
class Figures:
    """Of a span of time. Reviews are first answers on parts that are no gold."""

    pace: Pace
    kappa: Kappa | None
    """Of two people, blind; None before there is a pair."""
    pairs: int
    gold: Mapping[str, GoldRate]
    """By task."""
    shifts: Mapping[str, Rate]
    """Begin of the shift -> answers against the verdict, of those on PASS and FAIL parts."""
    changed: int
    """Answers taken back after the reveal."""
    cells: Mapping[str, int]
    """Of the NG: given, skipped, asked (and never answered)."""
    said: Mapping[str, int]
    stamps: int
    """How many people are rubber stamps; who, only they are told."""
    hasty: int
    """How many people answer too fast; who, only they are told."""


def figures(
    labels: Sequence[Label],
    draws: Mapping[str, Draw],
    gold: Mapping[str, Gold],
    *,
    tasks: Mapping[str, str],
    shifts: Sequence[str],
    zone: tzinfo | None = None,
    since: str = "",
) -> Figures:
    """`tasks`: product -> what is asked of it. `since`: RFC 3339; `zone` None: local time."""
    recent = [label for label in labels if str(label.more.get("time", "")) >= since]
    first = _first(recent)
    people: dict[str, list[Label]] = defaultdict(list)
    for label in first:
        people[label.reviewer].append(label)
    paces = [pace(own, draws) for own in people.values()]
    pairs = _pairs(recent)
    by_shift: dict[str, list[bool]] = defaultdict(list)
    for label in first:
        if (against := _against(label, draws)) is not None:
            by_shift[_shift(str(label.more["time"]), shifts, zone)].append(against)
    return Figures(
        pace=pace(first, draws),
        kappa=fleiss(pairs) if pairs else None,
        pairs=len(pairs),
        gold=_gold(recent, gold, tasks),
        shifts={name: Rate(sum(own), len(own)) for name, own in sorted(by_shift.items())},
        changed=sum(not item.blind and not item.more.get("gold") for item in recent),
        cells=_cells(recent),
        said={word: sum(item.label == word for item in first) for word in _DECISION},
        stamps=sum(item.stamped for item in paces),
        hasty=sum(item.fast for item in paces),
    )


def pace(first: Sequence[Label], draws: Mapping[str, Draw]) -> Pace:
    """Of first answers, in their order: of one person, or of all."""
    times = [label.more["ms"] for label in first if label.more.get("ms")]
    median = float(statistics.median(times)) if times else None
    against = [item for label in first if (item := _against(label, draws)) is not None]
    return Pace(
        reviews=len(first),
        median_ms=median,
        fast=median is not None and len(times) >= FEW and median < FAST_MS,
        overrides=sum(against),
        stamped=len(against) >= STAMPED and not any(against[-STAMPED:]),
    )


def own(labels: Sequence[Label], draws: Mapping[str, Draw], reviewer: str) -> Pace:
    """For that person alone."""
    return pace([label for label in _first(labels) if label.reviewer == reviewer], draws)


def plain(found: Figures) -> dict[str, Any]:
    """For JSON; rates with their exact 95 % intervals."""
    told = asdict(found)
    told["gold"] = {
        task: {
            "miss": _rate(item.miss),
            "false_alarm": _rate(item.false_alarm),
            "cannot_tell": item.cannot_tell,
        }
        for task, item in found.gold.items()
    }
    told["shifts"] = {name: _rate(rate) for name, rate in found.shifts.items()}
    return told


def _rate(rate: Rate) -> dict[str, Any]:
    low, high = rate.interval if rate.of else (0.0, 1.0)
    return {"count": rate.count, "of": rate.of, "share": rate.share, "low": low, "high": high}


def _first(labels: Sequence[Label]) -> list[Label]:
    """First blind answers of looks at parts that are no gold and no dispute."""
    found: dict[str, Label] = {}
    for label in labels:
        look = label.more.get("look")
        if label.blind and look and not label.adjudicates and not label.more.get("gold"):
            found.setdefault(str(look), label)
    return list(found.values())


def _against(label: Label, draws: Mapping[str, Draw]) -> bool | None:
    """Whether the answer contradicts the verdict; None where either says nothing."""
    drawn = draws.get(label.result_id)
    if drawn is None or label.label == "cannot_tell":
        return None
    if drawn.outcome not in (Outcome.PASS, Outcome.FAIL):
        return None
    return (label.label == "OK") != (drawn.outcome == Outcome.PASS)


def _pairs(labels: Sequence[Label]) -> list[tuple[Decision, ...]]:
    """The first answers of the first two people on each part."""
    said: dict[str, list[Decision]] = defaultdict(list)
    for label in _first(labels):
        said[label.result_id].append(_DECISION[label.label])
    return [tuple(words[:2]) for words in said.values() if len(words) > 1]


def _gold(
    labels: Sequence[Label], gold: Mapping[str, Gold], tasks: Mapping[str, str]
) -> dict[str, GoldRate]:
    looks: dict[str, Label] = {}
    for label in labels:
        if label.more.get("gold") and label.blind and label.result_id in gold:
            looks.setdefault(str(label.more.get("look")), label)
    by_task: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for label in looks.values():
        known = gold[label.result_id]
        by_task[tasks.get(known.product, known.product)].append((known.truth, label.label))
    return {
        task: GoldRate(
            Rate(said.count(("NG", "OK")), sum(truth == "NG" for truth, _ in said)),
            Rate(said.count(("OK", "NG")), sum(truth == "OK" for truth, _ in said)),
            sum(word == "cannot_tell" for _, word in said),
        )
        for task, said in sorted(by_task.items())
    }


def _cells(labels: Sequence[Label]) -> dict[str, int]:
    last: dict[str, str] = {}
    for label in labels:
        if label.blind and "cells" in label.more and not label.more.get("gold"):
            last[str(label.more.get("look"))] = str(label.more["cells"])
    words = list(last.values())
    return {word: words.count(word) for word in ("given", "skipped", "asked")}


def _shift(time: str, shifts: Sequence[str], zone: tzinfo | None) -> str:
    """Local date and time at which the shift began that this time falls into."""
    moment = datetime.fromisoformat(time.replace("Z", "+00:00")).astimezone(zone)
    return f"{begin_of(moment, shifts):%Y-%m-%d %H:%M}"


__all__ = ["FAST_MS", "KAPPA", "STAMPED", "Figures", "GoldRate", "Pace", "figures", "own", "plain"]
