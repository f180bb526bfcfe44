"""The limits of a certificate by the exact order-statistic rule, and what they cost.

The rule is fixed before the scores are seen, so that the same parts may choose the limit and carry
the claim (contract/binomial.rank). Refuses a claim that the number of parts cannot carry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forge_station.checks import CERTAIN
from forge_station.contract import binomial
from forge_station.contract.certificate import Claim, Share
from training.calibration.error import CalibrationError
from training.calibration.parts import Part, PartSet

EVENTS = (0, 1, 3, 6)
RATES = (0.1, 0.05, 0.02, 0.01, 0.005, 0.001)


@dataclass(frozen=True)
class Target:
    """What is to be claimed. `together`: one claim for the mix of checks in the set.

    Otherwise every check carries the claim by itself, and it holds for any mix of products.
    """

    escape: float
    confidence: float
    overkill: float
    together: bool = False

    def groups(self, found: PartSet) -> dict[tuple[str, ...], list[Part]]:
        """Checks -> their defective parts; one group a claim."""
        checks = sorted({part.check for part in found.parts})
        named = [tuple(checks)] if self.together else [(check,) for check in checks]
        bad = found.of(defective=True)
        return {group: [part for part in bad if part.check in group] for group in named}

    def delta(self, look: int, groups: int) -> float:
        """Risk that each claim may spend at this look."""
        return binomial.look_delta(1.0 - self.confidence, look) / groups


@dataclass(frozen=True)
class Limits:
    """What follows for the station, and what it costs on good parts."""

    claims: tuple[Claim, ...]
    limit_pass: float
    limit_fail: float | None
    overkill: Share
    unsure: Share


def require(found: PartSet, target: Target, look: int) -> dict[tuple[str, ...], int]:
    """Group of checks -> rank of its limit. Looks at numbers of parts only, at no score.

    CalibrationError when a group has too few defective parts: names how many it needs.
    """
    groups = target.groups(found)
    delta = target.delta(look, max(1, len(groups)))
    ranks = {
        group: binomial.rank(len(parts), target.escape, delta) for group, parts in groups.items()
    }
    short = {group: len(groups[group]) for group, rank in ranks.items() if rank == 0}
    if not groups or short:
        needed = binomial.needed(target.escape, delta)
        had = "; ".join(f"{', '.join(group)}: {count}" for group, count in short.items())
        raise CalibrationError(
            f"too few defective parts for escape <= {target.escape:g} "
            f"at {100 * target.confidence:g} %, look {look}",
            expected=f"{needed} distinct defective parts {_each(target, len(groups))}",
            got=had or "no parts",
            action=_advice(groups, target, delta),
        )
    return ranks


def _each(target: Target, groups: int) -> str:
    return "of all checks together" if target.together or groups == 1 else "of each check"


def _advice(groups: Mapping[tuple[str, ...], Sequence[Part]], target: Target, delta: float) -> str:
    """How many parts would do, and what these would do for."""
    table = ", ".join(
        f"{binomial.needed(target.escape, delta, events)} with {events} beyond the limit"
        for events in EVENTS
    )
    fewest = min((len(parts) for parts in groups.values()), default=0)
    rate = binomial.upper(0, fewest, delta)
    text = f"parts needed: {table}"
    if fewest:
        text += f". These parts carry escape <= {rate:.2g}"
    return text if target.together else f"{text}; --together claims for the mix of the set"


def choose(found: PartSet, target: Target, look: int, temperatures: Mapping[str, float]) -> Limits:
    """The limits. Raises CalibrationError where `require` does."""
    ranks = require(found, target, look)
    groups = target.groups(found)
    delta = target.delta(look, len(groups))
    least: dict[tuple[str, ...], float] = {}
    for group, parts in groups.items():
        reach = sorted(part.reach(temperatures) for part in parts)
        least[group] = reach[ranks[group] - 1]
    limit = min(least.values())
    claims = tuple(
        Claim(
            checks=group,
            defective=len(parts),
            rank=ranks[group],
            delta=delta,
            limit=least[group],
            escapes=sum(part.reach(temperatures) < limit for part in parts),
            upper=binomial.upper(ranks[group] - 1, len(parts), delta),
        )
        for group, parts in groups.items()
    )
    good = found.of(defective=False)
    risk = 1.0 - target.confidence
    failed = sum(part.failed for part in good)
    passed = sum(part.reach(temperatures) < limit for part in good)
    return Limits(
        claims,
        limit,
        _limit_fail(good, target.overkill, risk, temperatures, limit),
        share(failed, len(good), risk),
        share(len(good) - failed - passed, len(good), risk),
    )


def share(count: int, parts: int, delta: float) -> Share:
    return Share(parts, count, binomial.upper(count, parts, delta) if parts else 1.0)


def _limit_fail(
    good: Sequence[Part],
    overkill: float,
    delta: float,
    temperatures: Mapping[str, float],
    limit_pass: float,
) -> float | None:
    """At most `overkill` of the good parts score above: the upper order statistic; None: too few.

    Not below the limit of a PASS: then nothing lies between the two.
    """
    rank = binomial.rank(len(good), overkill, delta)
    if rank == 0:
        return None
    scores = sorted((part.score(temperatures) for part in good), reverse=True)
    return max(scores[rank - 1], limit_pass)


def curve(
    found: PartSet, temperatures: Mapping[str, float]
) -> tuple[list[float], list[float], list[float]]:
    """Over all limits, rising: (limit, share of defective that pass, share of good that do not)."""
    bad = sorted(part.reach(temperatures) for part in found.of(defective=True))
    good = sorted(part.reach(temperatures) for part in found.of(defective=False))
    limits = sorted({*bad, *good, CERTAIN})
    escaped, passed = _below(bad, limits), _below(good, limits)
    return limits, escaped, [1.0 - value for value in passed]


def _below(values: Sequence[float], limits: Sequence[float]) -> list[float]:
    """Share of the sorted values strictly below each of the rising limits."""
    found, index = [], 0
    for limit in limits:
        while index < len(values) and values[index] < limit:
            index += 1
        found.append(index / len(values) if values else 0.0)
    return found


def families(found: PartSet) -> dict[str, tuple[str, ...]]:
    """Check -> workpieces that its parts ask for."""
    named: dict[str, set[str]] = {}
    for part in found.parts:
        named.setdefault(part.check, set()).update(part.families)
    return {check: tuple(sorted(own)) for check, own in sorted(named.items())}


def strictest_rules(found: PartSet) -> dict[str, float]:
    """Limits of the products by name; of several values the strictest, that is the largest."""
    rules: dict[str, float] = {}
    for part in found.parts:
        for name, value in part.rules.items():
            rules[name] = max(value, rules.get(name, value))
    return rules


def origins(found: PartSet) -> dict[str, int]:
    return dict(sorted(Counter(part.provenance for part in found.parts).items()))
