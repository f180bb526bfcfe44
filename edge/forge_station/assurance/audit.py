"""Escapes and overkill of a line from labelled parts, with exact bounds, and what is refused.

Denominators, because usage mixes them:
    escape    P(PASS | part defective)          overkill   P(FAIL | part good)
    outgoing  P(part defective | PASS)          unsure     P(UNSURE | part good)
ERROR parts are in none of them, but counted. n is the number of distinct parts (serials).

What a label proves depends on how its part was chosen (`more: {"origin": ...}` of the label). Parts
that people looked at because the station stopped them prove nothing of escapes. Pure computation.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forge_station.assurance import distributions
from forge_station.assurance.agreement import Rate
from forge_station.contract.label import Label, settle
from forge_station.contract.verdict import Outcome, Verdict

ORIGINS: Mapping[str, str] = {
    "manual": "every part of a time window, inspected by people whatever the station said",
    "audit": "drawn at random from the parts that the station passed",
    "challenge": "seeded or challenge parts with a known fault, sent through the line",
    "returns": "parts that a customer sent back",
    "harvested": "found among the station's own FAIL and UNSURE parts",
}
HARVESTED_ONLY = (
    "all labelled parts were chosen because the station stopped them: those are the ones that it "
    "finds, so they say nothing of escapes; label parts drawn at random from PASS (origin audit), "
    "all parts of a time window (manual), or challenge parts"
)
ALARM_A, ALARM_B = 0.5, 20.0


@dataclass(frozen=True)
class Judged:
    """One distinct part with its truth. Of several captures the one that speaks against us."""

    serial: str
    outcome: Outcome
    defective: bool
    origin: str
    place: int
    """Of its last label among all labels: the order in which truths became known."""


@dataclass(frozen=True)
class Alarm:
    """Sequential test of "events are more frequent than `limit`", sound at every look.

    A mixture of likelihood ratios (Beta(0.5, 20)): by Ville's inequality it ever exceeds 1/`delta`
    with probability `delta` at most while the rate is the limit or less.
    """

    what: str
    limit: float
    delta: float
    parts: int
    events: int
    log_evidence: float
    """Natural logarithm of the evidence, the largest seen."""
    raised_at: int | None
    """After how many parts the alarm came; None: it did not."""


@dataclass(frozen=True)
class Span:
    """A share with bounds of 95 % confidence that combine several counts."""

    share: float
    low: float
    high: float


@dataclass(frozen=True)
class Ledger:
    """One line and bundle. Rates are None where no label carries them."""

    line: str
    model: str
    """Digest of the bundle."""
    bundle: str
    seen: Mapping[str, int]
    """Outcome -> inspections."""
    labelled: Mapping[str, int]
    """Origin -> distinct labelled parts."""
    left_out: Mapping[str, int]
    """Why labels did not count -> how many."""
    escape: Mapping[str, Rate] = field(default_factory=dict)
    """Origin (manual, challenge) -> PASS of the defective parts."""
    overkill: Mapping[str, Rate] = field(default_factory=dict)
    """Origin (manual, challenge) -> FAIL of the good parts."""
    unsure: Mapping[str, Rate] = field(default_factory=dict)
    outgoing: Rate | None = None
    """Defective of the audited PASS parts."""
    false_calls: Rate | None = None
    """Good of the reviewed FAIL parts: of the alarms, not of the good parts."""
    line_escape: Span | None = None
    """From audit and review together, weighted with how often the line says PASS, FAIL, UNSURE."""
    line_overkill: Span | None = None
    alarms: tuple[Alarm, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    """What cannot be said -> why."""
    defective: Mapping[str, bool] = field(default_factory=dict)
    """Serial of each defective part of a manual or challenge origin -> whether it passed."""


def ledgers(
    verdicts: Sequence[Verdict],
    labels: Sequence[Label],
    *,
    origin: str | None = None,
    escape_limit: float = 0.01,
    outgoing_limit: float = 0.01,
    delta: float = 0.05,
) -> list[Ledger]:
    """One ledger for each line and bundle; two bundles are never pooled. The oldest first.

    `origin`: of labels that name none, on PASS parts; stopped parts without one are harvested.
    """
    truths, counted = _truths(verdicts, labels)
    groups: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        model = verdict.model.sha256 if verdict.model is not None else ""
        groups[verdict.line, model].append(verdict)
    known = {verdict.result_id for verdict in verdicts}
    counted["no verdict"] = len({label.result_id for label in labels} - known)
    found = []
    for (line, model), own in groups.items():
        judged, left_out = _judged(own, truths, labels, origin)
        used = own[-1].model
        found.append(
            _ledger(
                Ledger(
                    line,
                    model,
                    "" if used is None else f"{used.name} {used.version}",
                    dict(Counter(verdict.outcome.value for verdict in own)),
                    dict(Counter(part.origin for part in judged)),
                    {name: n for name, n in (counted + left_out).items() if n},
                ),
                judged,
                (escape_limit, outgoing_limit, delta),
            )
        )
    return found


def _truths(
    verdicts: Sequence[Verdict], labels: Sequence[Label]
) -> tuple[dict[str, bool], Counter[str]]:
    """Result id -> defective. A tray is defective when any mark is; good when all are."""
    settled, counted = settle(labels)
    said: dict[str, dict[str | None, bool]] = defaultdict(dict)
    for label, _ in settled:
        said[label.result_id][label.mark] = label.label == "NG"
    found = {}
    for verdict in verdicts:
        own = said.get(verdict.result_id, {})
        marks = {part.mark for part in verdict.parts}
        if any(own.values()):
            found[verdict.result_id] = True
        elif None in own or (marks and marks <= set(own)):
            found[verdict.result_id] = False
        elif own:
            counted["some marks only"] += 1
    return found, counted


def _judged(
    verdicts: Sequence[Verdict],
    truths: Mapping[str, bool],
    labels: Sequence[Label],
    origin: str | None,
) -> tuple[list[Judged], Counter[str]]:
    """Distinct parts with their truth, in the order of their labels, which the alarms need."""
    told = {
        label.result_id: str(label.more["origin"]) for label in labels if "origin" in label.more
    }
    place = {label.result_id: number for number, label in enumerate(labels)}
    left_out: Counter[str] = Counter()
    parts: dict[str, list[Judged]] = defaultdict(list)
    for verdict in verdicts:
        if verdict.result_id not in truths:
            continue
        if verdict.outcome is Outcome.ERROR:
            left_out["ERROR"] += 1
            continue
        stopped = verdict.outcome is not Outcome.PASS
        named = told.get(verdict.result_id) or ("harvested" if stopped else origin)
        if named is None:
            left_out["origin of a PASS not told"] += 1
            continue
        serial = verdict.serial if verdict.serial_source != "none" else verdict.result_id
        truth = truths[verdict.result_id]
        parts[serial].append(
            Judged(serial, verdict.outcome, truth, named, place[verdict.result_id])
        )
    found = []
    for own in parts.values():
        left_out["the same part again"] += len(own) - 1
        if len({part.defective for part in own}) > 1:
            left_out["a part with two truths"] += 1
            continue
        order = (Outcome.PASS, Outcome.UNSURE, Outcome.FAIL)
        worst = min if own[0].defective else max
        found.append(worst(own, key=lambda part: order.index(part.outcome)))
    return sorted(found, key=lambda part: part.place), left_out


def _ledger(own: Ledger, judged: Sequence[Judged], limits: tuple[float, float, float]) -> Ledger:
    escape_limit, outgoing_limit, delta = limits
    direct = [part for part in judged if part.origin in ("manual", "challenge")]
    audited = [part for part in judged if part.origin == "audit" and part.outcome is Outcome.PASS]
    reviewed = [part for part in judged if part.outcome is not Outcome.PASS]
    refused = {}
    if judged and not direct and not audited:
        returned = any(part.origin == "returns" for part in judged)
        refused["escape"] = HARVESTED_ONLY if not returned else (
            "returned parts escaped by definition: how many did not come back is not known"
        )  # fmt: skip
    elif not judged:
        refused["escape"] = "no label counts, see what was left out"
    fails = [part for part in reviewed if part.outcome is Outcome.FAIL]
    escapes = [part for part in direct if part.defective]
    alarms = []
    if escapes:
        events = [part.outcome is Outcome.PASS for part in escapes]
        alarms.append(alarm("escape", events, escape_limit, delta))
    if audited:
        events = [part.defective for part in audited]
        alarms.append(alarm("outgoing", events, outgoing_limit, delta))
    spans = _line_spans(own.seen, audited, reviewed)
    return Ledger(
        own.line, own.model, own.bundle, own.seen, own.labelled, own.left_out,
        escape=_by_origin(escapes, Outcome.PASS),
        overkill=_by_origin([part for part in direct if not part.defective], Outcome.FAIL),
        unsure=_by_origin([part for part in direct if not part.defective], Outcome.UNSURE),
        outgoing=Rate(sum(p.defective for p in audited), len(audited)) if audited else None,
        false_calls=Rate(sum(not p.defective for p in fails), len(fails)) if fails else None,
        line_escape=spans[0] if spans else None,
        line_overkill=spans[1] if spans else None,
        alarms=tuple(alarms),
        refused=refused,
        defective={part.serial: part.outcome is Outcome.PASS for part in escapes},
    )  # fmt: skip


def _by_origin(parts: Sequence[Judged], outcome: Outcome) -> dict[str, Rate]:
    found = {}
    for origin in ("manual", "challenge"):
        own = [part for part in parts if part.origin == origin]
        if own:
            found[origin] = Rate(sum(part.outcome is outcome for part in own), len(own))
    return found


def _line_spans(
    seen: Mapping[str, int], audited: Sequence[Judged], reviewed: Sequence[Judged]
) -> tuple[Span, Span] | None:
    """Escape and overkill of the line from the three shares of defective parts, among PASS, FAIL
    and UNSURE. Each share at a third of the risk, so that all hold together. Sound where FAIL and
    UNSURE parts were labelled all, or by chance."""
    shares = {}
    for outcome in (Outcome.PASS, Outcome.FAIL, Outcome.UNSURE):
        drawn = audited if outcome is Outcome.PASS else reviewed
        own = [part for part in drawn if part.outcome is outcome]
        count = seen.get(outcome.value, 0)
        if count and not own:
            return None
        k, n, risk = sum(part.defective for part in own), len(own), 0.025 / 3
        low = distributions.lower(k, n, risk) if n else 0.0
        high = 1.0 - distributions.lower(n - k, n, risk) if n else 0.0
        shares[outcome] = (count, k / n if n else 0.0, low, high)
    escape = _span(shares, Outcome.PASS)
    good = {o: (c, 1 - s, 1 - high, 1 - low) for o, (c, s, low, high) in shares.items()}
    return escape, _span(good, Outcome.FAIL)


def _span(shares: Mapping[Outcome, tuple[int, float, float, float]], of: Outcome) -> Span:
    """The share of `of` among all parts of a kind: estimate, low, high."""

    def ratio(own: int, others: int) -> float:
        top = shares[of][0] * shares[of][own]
        rest = sum(item[0] * item[others] for name, item in shares.items() if name is not of)
        return top / (top + rest) if top + rest > 0 else 0.0

    return Span(ratio(1, 1), ratio(2, 3), ratio(3, 2))


def alarm(what: str, events: Sequence[bool], limit: float, delta: float) -> Alarm:
    """The alarm over events in the order in which they were seen."""
    largest, raised_at, k = -math.inf, None, 0
    for t, event in enumerate(events, start=1):
        k += event
        evidence = log_evidence(k, t, limit)
        if k / t > limit:
            largest = max(largest, evidence)
            if raised_at is None and evidence > -math.log(delta):
                raised_at = t
    return Alarm(what, limit, delta, len(events), k, largest, raised_at)


def log_evidence(k: int, t: int, limit: float) -> float:
    """Logarithm of the evidence against "at most `limit`" after `k` events of `t`."""
    return (
        _log_beta(ALARM_A + k, ALARM_B + t - k)
        - _log_beta(ALARM_A, ALARM_B)
        - k * math.log(limit)
        - (t - k) * math.log1p(-limit)
    )


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
