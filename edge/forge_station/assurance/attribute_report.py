"""The report of an attribute study: figures as JSON, lines for people, HTML with charts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_station.assurance import agreement, report, svg
from forge_station.assurance.agreement import Agreement, Appraiser, Kappa, Rate

LIMITS = (
    "AIAG: acceptable with effectiveness >= 90 %, miss <= 2 %, false alarm <= 5 %, kappa >= 0.75; "
    "marginal to 80 %, 5 %, 10 %, 0.40. Of the station we ask kappa >= 0.90, interval from 0.75."
)
WARNING = (
    "This study shows that decisions are consistent. It does not show how many defects escape: "
    "that takes hundreds of independent defective parts (see the certificate and `forge-station "
    "audit`). Every part must have been removed and fed again before each trial: a model that sees "
    "one image twice agrees with itself."
)


def result(found: Agreement) -> dict[str, Any]:
    """All figures as plain data."""
    return {
        "study": "attribute",
        "parts": found.parts,
        "good": found.good,
        "bad": found.bad,
        "trials": found.trials,
        "between": _rate(found.between),
        "between_kappa": _kappa(found.between_kappa),
        "all_right": _rate(found.all_right),
        "appraisers": {item.name: _appraiser(item) for item in found.appraisers},
        "pairs": [
            {"appraisers": list(names), "kappa": _kappa(own)} for names, own in found.pairs.items()
        ],
        "warnings": warnings(found),
    }


def _appraiser(found: Appraiser) -> dict[str, Any]:
    rates = {name: _rate(getattr(found, name)) for name in _RATES}
    kappas = {
        "within_kappa": _kappa(found.within_kappa),
        "reference_kappa": _kappa(found.reference_kappa),
    }
    decisions = {"bands": agreement.bands(found), "decision": agreement.worst_band(found)}
    return {**rates, **kappas, **decisions}


_RATES: Mapping[str, str] = {
    "within": "within (all trials equal)",
    "effectiveness": "effectiveness (all trials right, UNSURE is wrong)",
    "effectiveness_routed": "effectiveness (UNSURE goes to a person)",
    "miss": "miss rate (PASS of bad)",
    "missed_parts": "bad parts missed at least once",
    "false_alarm": "false alarm rate (FAIL of good)",
    "unsure": "UNSURE of all decisions",
    "majority_right": "majority right (not the effectiveness)",
}


def _rate(found: Rate | None) -> dict[str, Any] | None:
    if found is None:
        return None
    low, high = found.interval
    return {"count": found.count, "of": found.of, "share": found.share, "low": low, "high": high}


def _kappa(found: Kappa | None) -> dict[str, Any] | None:
    if found is None:
        return None
    low, high = found.interval or (None, None)
    own = {"value": found.value, "low": low, "high": high}
    return {**own, "agreement": found.agreement, "pabak": found.prevalence_adjusted}


def warnings(found: Agreement) -> list[str]:
    """Where the study is smaller or more lopsided than the manual asks."""
    told = []
    if found.parts < 50:
        told.append(f"{found.parts} parts; 50 or more are usual")
    if found.trials < 2:
        told.append("one trial: repeatability cannot be seen")
    if found.good + found.bad and min(found.good, found.bad) * 5 < found.parts:
        told.append(f"{found.good} good and {found.bad} bad parts: kappa suffers from the skew")
    if not found.good + found.bad:
        told.append("no reference: agreement only, no effectiveness, no miss rate")
    return told


def lines(found: Agreement) -> list[str]:
    """The study for a terminal."""
    out = [
        f"{found.parts} parts ({found.good} good, {found.bad} bad), {found.trials} trials, "
        f"{len(found.appraisers)} appraisers"
    ]
    for item in found.appraisers:
        out += [f"{item.name}: {agreement.worst_band(item) or 'no reference'}"]
        out += [
            f"  {text:<52} {report.rate(own)}"
            for name, text in _RATES.items()
            if (own := getattr(item, name)) is not None
        ]
        out += [f"  {'kappa, trials among themselves':<52} {report.kappa(item.within_kappa)}"]
        if item.reference_kappa is not None:
            out += [f"  {'kappa, against the reference':<52} {report.kappa(item.reference_kappa)}"]
    out += [f"{'all appraisers equal':<54} {report.rate(found.between)}"]
    out += [f"kappa of {a} and {b}: {report.kappa(k)}" for (a, b), k in found.pairs.items()]
    return [*out, *(f"note: {text}" for text in warnings(found))]


def rows(found: Agreement) -> list[dict[str, object]]:
    """One line a figure, for a spreadsheet."""
    out: list[dict[str, object]] = []
    for item in found.appraisers:
        for name, own in _appraiser(item).items():
            if isinstance(own, dict) and "low" in own:
                out.append({"appraiser": item.name, "figure": name, **own})
    return out


def html(found: Agreement, facts: Mapping[str, str]) -> str:
    """The report as one file."""
    sections = []
    for item in found.appraisers:
        band = agreement.worst_band(item)
        if band is not None:
            sections.append(report.decision(f"{item.name}: {band}", band))
    names = [item.name for item in found.appraisers]
    body = [
        (text, *(report.rate(getattr(item, name)) for item in found.appraisers))
        for name, text in _RATES.items()
    ]
    all_of = found.appraisers
    body += [
        ("kappa, trials among themselves", *(report.kappa(i.within_kappa) for i in all_of)),
        ("kappa, against the reference", *(report.kappa(i.reference_kappa) for i in all_of)),
        ("PABAK, against the reference", *(_pabak(i.reference_kappa) for i in all_of)),
    ]
    pairs = [(f"Cohen's kappa, {a} and {b}", report.kappa(k)) for (a, b), k in found.pairs.items()]
    sections += [
        report.heading("Each appraiser"),
        report.note("Rates with count and exact 95 % interval (Clopper and Pearson)."),
        report.table(("", *names), body),
        report.note(LIMITS),
        report.charts([*_rate_charts(found), _kappa_chart(found)]),
        report.heading("Between appraisers"),
        report.table(
            ("", "value"),
            [
                ("parts on which all trials of all are equal", report.rate(found.between)),
                ("parts on which all are right", report.rate(found.all_right)),
                ("Fleiss' kappa of all trials", report.kappa(found.between_kappa)),
                *pairs,
            ],
        ),
        report.heading("What it does not say"),
        report.note(WARNING),
        *(report.note(f"Note: {text}.") for text in warnings(found)),
    ]  # fmt: skip
    return report.page("Attribute agreement analysis", facts, sections)


def _pabak(found: Kappa | None) -> str:
    return "\u2013" if found is None else f"{found.prevalence_adjusted:.2f}"


def _rate_charts(found: Agreement) -> list[str]:
    shown = (
        ("within", "Within: all trials equal", None),
        ("effectiveness", "Effectiveness: all trials right", agreement.EFFECTIVENESS),
        ("miss", "Miss rate: PASS of bad", agreement.MISS),
        ("false_alarm", "False alarm rate: FAIL of good", agreement.FALSE_ALARM),
    )
    return [
        _chart(found, title, {i.name: getattr(i, name) for i in found.appraisers}, limits)
        for name, title, limits in shown
        if any(getattr(item, name) is not None for item in found.appraisers)
    ]


def _chart(
    found: Agreement,
    title: str,
    rates: Mapping[str, Rate | None],
    limits: tuple[float, float] | None,
) -> str:
    known = {name: item for name, item in rates.items() if item is not None and item.of}
    if limits is not None and limits[0] < limits[1]:  # small rates
        top = max([limits[1] * 1.3, *(item.interval[1] for item in known.values())])
        span = (0.0, min(1.0, top * 1.05))
    else:
        span = (min([0.6, *(item.interval[0] for item in known.values())]), 1.0)
    chart = _frame(found, title, (100 * span[0], 100 * span[1]), "%")
    for x, name in enumerate(rates):
        if name in known:
            low, high = known[name].interval
            chart.whisker(x, 100 * low, 100 * high)
            chart.dots([(x, 100 * (known[name].share or 0.0))])
    for limit, text in zip(limits or (), ("acceptable", "marginal"), strict=False):
        chart.level(100 * limit, text)
    return chart.text()


def _kappa_chart(found: Agreement) -> str:
    chart = _frame(found, "Kappa against the reference, 95 %", (0.0, 1.0), "kappa")
    for x, item in enumerate(found.appraisers):
        own = item.reference_kappa
        if own is not None and own.value is not None:
            if own.interval is not None:
                chart.whisker(x, max(0.0, own.interval[0]), max(0.0, own.interval[1]))
            chart.dots([(x, max(0.0, own.value))])
    for limit, text in zip(agreement.KAPPA, ("acceptable", "marginal"), strict=True):
        chart.level(limit, text)
    return chart.text()


def _frame(found: Agreement, title: str, span: tuple[float, float], unit: str) -> svg.Chart:
    names = [(float(x), item.name[:18]) for x, item in enumerate(found.appraisers)]
    return svg.Chart(title, (-0.5, len(names) - 0.5), span, y_label=unit, names=names)
