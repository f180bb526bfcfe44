"""The ledgers of a line over its bundles and over time, as figures and as a page with charts.

Time is cut into windows of whole days by when parts were inspected; a bundle that changes within a
window makes two entries. Nothing is pooled that `audit.ledgers` keeps apart, so a short window has
wide intervals rather than borrowed parts. Trends are for eyes: the tests that may raise an alarm
are those of the audit as a whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from forge_station.assurance import audit, report, svg
from forge_station.assurance.agreement import Rate
from forge_station.assurance.audit import Ledger, Span
from forge_station.assurance.error import AssuranceError
from forge_station.contract.label import Label
from forge_station.contract.verdict import Verdict

RATES = {
    "escape": "escape P(PASS | defective)",
    "overkill": "overkill P(FAIL | good)",
    "unsure": "UNSURE of the good parts",
}
_DIRECT = ("manual", "challenge")
_LEAST_SCALE = 0.05


@dataclass(frozen=True)
class Entry:
    """What is known of one line and bundle in one window. `begin`: its first day, YYYY-MM-DD."""

    begin: str
    days: int
    ledger: Ledger

    def share(self, name: str) -> tuple[str, float, float, float] | None:
        """(origin, share, low, high) of a rate, each 95 %: of labelled parts directly where there
        are any, else of the line by audit and review together; None: no label tells."""
        rates: Mapping[str, Rate] = getattr(self.ledger, name)
        for origin in _DIRECT:
            found = rates.get(origin)
            if found is not None and found.share is not None:
                return origin, found.share, *found.interval
        span: Span | None = getattr(self.ledger, f"line_{name}", None)
        return None if span is None else ("combined", span.share, span.low, span.high)


def entries(
    verdicts: Sequence[Verdict], labels: Sequence[Label], days: int, *, origin: str | None = None
) -> list[Entry]:
    """The ledgers of every window, the oldest first. Raises AssuranceError for a verdict without a
    time."""
    windows: dict[int, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        windows[_day(verdict) // days].append(verdict)
    return [
        Entry(_text(number * days), days, found)
        for number, own in sorted(windows.items())
        for found in audit.ledgers(own, labels, origin=origin)
    ]


def facts(entry: Entry) -> dict[str, Any]:
    """Plain data of one entry."""
    told: dict[str, Any] = {
        "begin": entry.begin,
        "days": entry.days,
        "line": entry.ledger.line,
        "bundle": entry.ledger.bundle,
        "model": entry.ledger.model,
        "seen": dict(entry.ledger.seen),
        "labelled": dict(entry.ledger.labelled),
    }
    for name in RATES:
        found = entry.share(name)
        keys = ("origin", "share", "low", "high")
        told[name] = None if found is None else dict(zip(keys, found, strict=True))
    return told


def page(found: Sequence[Entry], source: str) -> str:
    """One HTML file: for each line the charts over time, a colour a bundle, and the table."""
    sections: list[str] = []
    for line in dict.fromkeys(entry.ledger.line for entry in found):
        own = [entry for entry in found if entry.ledger.line == line]
        sections.append(report.heading(f"Line {line or '-'}"))
        sections.append(report.charts([chart(own, name) for name in RATES]))
        rows = [
            (
                entry.begin,
                f"{entry.ledger.bundle or '-'} ({entry.ledger.model[:8]})",
                ", ".join(f"{count} {name}" for name, count in entry.ledger.seen.items()),
                sum(entry.ledger.labelled.values()),
                *(_cell(entry.share(name)) for name in RATES),
            )
            for entry in own
        ]
        head = ("from", "bundle", "inspected", "labelled parts", *RATES.values())
        sections.append(report.table(head, rows))
    sections.append(
        report.note(
            "Shares with exact 95 % intervals: of parts labelled whatever the station said "
            "(manual) or with a known fault (challenge); else of the line, by audit and review "
            "together. Each window stands for itself; two bundles are never pooled."
        )
    )
    return report.page("Escapes and overkill over bundles and time", {"evidence": source}, sections)


def chart(found: Sequence[Entry], name: str) -> str:
    """An SVG chart of one rate over the windows, with whiskers of 95 %."""
    told = [(place, entry, entry.share(name)) for place, entry in enumerate(found)]
    shown = [(place, entry, share) for place, entry, share in told if share is not None]
    top = max([share[3] for _, _, share in shown] + [_LEAST_SCALE])
    step = max(1, -(-len(found) // 6))
    drawn = svg.Chart(
        RATES[name],
        (-0.5, len(found) - 0.5),
        (0.0, 100.0 * min(1.0, 1.05 * top)),
        "from",
        "%",
        names=[(place, entry.begin[5:]) for place, entry in enumerate(found) if place % step == 0],
    )
    bundles = list(dict.fromkeys(entry.ledger.model for entry in found))
    for place, entry, (_, share, low, high) in shown:
        colour = svg.SERIES[bundles.index(entry.ledger.model) % len(svg.SERIES)]
        drawn.whisker(place, 100 * low, 100 * high, colour)
        drawn.dots([(place, 100 * share)], colour)
    return drawn.text()


def _cell(found: tuple[str, float, float, float] | None) -> str:
    if found is None:
        return "no label tells"
    origin, share, low, high = found
    return f"{100 * share:.1f} % ({100 * low:.1f} to {100 * high:.1f}), {origin}"


def _day(verdict: Verdict) -> int:
    """Days since 1970, in UTC."""
    text = verdict.end_time or verdict.begin_time
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError as error:
        raise AssuranceError(
            "a verdict without a time", which=verdict.result_id, expected="RFC 3339", got=text
        ) from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return (moment - _EPOCH) // timedelta(days=1)


def _text(day: int) -> str:
    return (_EPOCH + timedelta(days=day)).strftime("%Y-%m-%d")


_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
