"""The report of a gauge study: figures as JSON, lines for people, HTML with charts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from forge_station.assurance import gauge_study, report, svg
from forge_station.assurance.gauge_study import Bias, Grr, Study

LIMITS = (
    "AIAG: %GRR below 10 acceptable, to 30 marginal (for the purpose), above unacceptable; ndc 5 "
    "or more. %Tol: six standard deviations of the gauge in shares of the tolerance."
)


def result(study: Study, feature: str, tolerance: float | None) -> dict[str, Any]:
    """All figures of one feature as plain data."""
    bias = gauge_study.bias(study)
    variance, ranges = gauge_study.by_variance(study), gauge_study.by_range(study)
    p, o, r = study.values.shape
    return {
        "study": "gauge",
        "feature": feature,
        "unit": study.unit,
        "parts": p,
        "appraisers": o,
        "trials": r,
        "anova": _grr(variance, tolerance),
        "average_and_range": _grr(ranges, tolerance),
        "decision": variance.decision,
        "bias": None if bias is None else _bias(bias),
        "out_of_control": [list(item) for item in gauge_study.out_of_control(study)],
        "warnings": warnings(study),
    }


def _grr(found: Grr, tolerance: float | None) -> dict[str, Any]:
    return {
        "EV": found.repeatability,
        "AV": found.reproducibility,
        "INT": found.interaction,
        "GRR": found.grr,
        "PV": found.part,
        "TV": found.total,
        "percent_GRR": found.percent,
        "percent_tolerance": found.percent_of(tolerance) if tolerance else None,
        "ndc": found.categories,
        "interaction_pooled": found.pooled,
    }


def _bias(found: Bias) -> dict[str, Any]:
    line = found.line
    return {
        "mean": found.mean,
        "low": found.interval[0],
        "high": found.interval[1],
        "p": found.p,
        "significant": found.significant,
        "linearity": None
        if line is None
        else {
            "slope": line.slope,
            "intercept": line.intercept,
            "slope_p": line.slope_p,
            "intercept_p": line.intercept_p,
            "r_squared": line.r_squared,
        },
    }


def warnings(study: Study) -> list[str]:
    """Where the study is smaller than the manual asks, or a trial stands out."""
    p, o, r = study.values.shape
    told = []
    if p < 10 or r < 3 or o < 3:
        told.append(f"{p} parts, {o} appraisers, {r} trials; 10 x 3 x 3 is usual")
    if o == 1:
        told.append("one appraiser: repeatability only, no reproducibility")
    for part, appraiser in gauge_study.out_of_control(study):
        told.append(
            f"part {part}, appraiser {appraiser}: the range of its trials is out of control"
        )
    return told


def lines(study: Study, feature: str, tolerance: float | None) -> list[str]:
    """One feature for a terminal."""
    found = gauge_study.by_variance(study)
    p, o, r = study.values.shape
    out = [f"{feature or 'value'}: {found.decision} ({p} parts, {o} appraisers, {r} trials)"]
    for own in (found, gauge_study.by_range(study)):
        percent = f", %Tol {own.percent_of(tolerance):.2f}" if tolerance else ""
        out.append(
            f"  {own.method:<20} EV {own.repeatability:.5g}  AV {own.reproducibility:.5g}  "
            f"GRR {own.grr:.5g}  PV {own.part:.5g} {study.unit}; %GRR {own.percent:.2f}{percent}, "
            f"ndc {own.categories}"
        )
    bias = gauge_study.bias(study)
    if bias is not None:
        low, high = bias.interval
        said = "significant" if bias.significant else "not significant"
        out.append(f"  bias {bias.mean:+.5g} ({low:+.5g} to {high:+.5g}) {study.unit}, {said}")
        if bias.line is not None:
            line = bias.line
            out.append(
                f"  linearity {line.slope:+.5g} per {study.unit} (p {line.slope_p:.3g}), "
                f"R2 {line.r_squared:.3f}"
            )
    return [*out, *(f"  note: {text}" for text in warnings(study))]


def html(studies: Mapping[str, Study], tolerance: float | None, facts: Mapping[str, str]) -> str:
    """The report of all features as one file."""
    sections: list[str] = []
    for feature, study in studies.items():
        sections += _section(study, feature or "value", tolerance)
    return report.page("Gauge repeatability and reproducibility", facts, sections)


def _section(study: Study, feature: str, tolerance: float | None) -> list[str]:
    found, ranges = gauge_study.by_variance(study), gauge_study.by_range(study)
    components = [
        (text, *(_component(own, name) for own in (found, ranges)))
        for name, text in (
            ("repeatability", "repeatability EV"),
            ("reproducibility", "reproducibility AV"),
            ("interaction", "part x appraiser INT"),
            ("grr", "gauge GRR"),
            ("part", "parts PV"),
            ("total", "total TV"),
        )
    ]
    components.append(("%GRR", f"{found.percent:.2f}", f"{ranges.percent:.2f}"))
    if tolerance:
        of_tolerance = (f"{own.percent_of(tolerance):.2f}" for own in (found, ranges))
        components.append(("%Tol", *of_tolerance))
    components.append(("ndc", str(found.categories), str(ranges.categories)))
    variance = [
        (
            item.name,
            item.freedom,
            f"{item.squares:.6g}",
            f"{item.mean_square:.6g}" if item.name != "total" else "",
            "" if item.f is None else f"{item.f:.3f}",
            "" if item.p is None else f"{item.p:.3f}",
        )
        for item in found.table
    ]
    out = [
        report.heading(f"{feature}, {study.unit}"),
        report.decision(f"{feature}: {found.decision}", found.decision),
        report.table(
            (f"standard deviation, {study.unit}", found.method, ranges.method), components
        ),
        report.note(LIMITS),
        report.table(("analysis of variance", "df", "SS", "MS", "F", "p"), variance),
    ]
    if found.pooled:
        out.append(report.note("The interaction is not significant (p > 0.25) and is pooled."))
    drawn = [_by_part(study), _ranges(study), _interaction(study), _components(found)]
    bias = gauge_study.bias(study)
    if bias is not None:
        out += _bias_section(study, bias)
        drawn.append(_bias_chart(study, bias))
    out.append(report.charts(drawn))
    return [*out, *(report.note(f"Note: {text}.") for text in warnings(study))]


def _component(found: Grr, name: str) -> str:
    value = getattr(found, name)
    share = 100 * value / found.total if found.total else 0.0
    return f"{value:.5g} ({share:.1f} % TV)"


def _bias_section(study: Study, bias: Bias) -> list[str]:
    low, high = bias.interval
    rows = [("mean bias", f"{bias.mean:+.5g}", f"{low:+.5g} to {high:+.5g}", f"{bias.p:.3g}")]
    if bias.line is not None:
        line = bias.line
        rows.append(("linearity, slope", f"{line.slope:+.5g}", "", f"{line.slope_p:.3g}"))
        rows.append(
            ("linearity, intercept", f"{line.intercept:+.5g}", "", f"{line.intercept_p:.3g}")
        )
    return [report.table((f"against the reference, {study.unit}", "value", "95 %", "p"), rows)]


def _by_part(study: Study) -> str:
    low, high = float(study.values.min()), float(study.values.max())
    chart = _parts_chart(study, "All readings by part", svg.padded(low, high), study.unit)
    for j, colour in zip(range(len(study.appraisers)), svg.SERIES * 9, strict=False):
        offset = (j - (len(study.appraisers) - 1) / 2) * 0.18
        for i, own in enumerate(study.values[:, j]):
            chart.dots([(i + offset, float(value)) for value in own], colour)
    chart.legend([name[:10] for name in study.appraisers[:5]])
    return chart.text()


def _ranges(study: Study) -> str:
    ranges = study.values.max(2) - study.values.min(2)
    limit = gauge_study.range_limit(study)
    top = max(float(ranges.max()), limit)
    chart = _parts_chart(study, "Range of the trials", (0.0, 1.08 * top or 1.0), study.unit)
    for j, colour in zip(range(len(study.appraisers)), svg.SERIES * 9, strict=False):
        chart.line([(i, float(value)) for i, value in enumerate(ranges[:, j])], colour)
        chart.dots([(i, float(value)) for i, value in enumerate(ranges[:, j])], colour)
    chart.level(limit, "upper limit")
    return chart.text()


def _interaction(study: Study) -> str:
    means = study.values.mean(2)
    centred = means - means.mean(1, keepdims=True)
    span = svg.padded(float(centred.min()), float(centred.max()))
    chart = _parts_chart(study, "Appraiser's mean less the part's mean", span, study.unit)
    for j, colour in zip(range(len(study.appraisers)), svg.SERIES * 9, strict=False):
        chart.line([(i, float(value)) for i, value in enumerate(centred[:, j])], colour)
    return chart.text()


def _components(found: Grr) -> str:
    shares = [
        ("GRR", found.grr), ("EV", found.repeatability), ("AV", found.reproducibility),
        ("INT", found.interaction), ("PV", found.part),
    ]  # fmt: skip
    names = [(float(x), name) for x, (name, _) in enumerate(shares)]
    chart = svg.Chart(
        "Components", (-0.6, len(shares) - 0.4), (0.0, 105.0), y_label="% of TV", names=names
    )
    for x, (_, value) in enumerate(shares):
        chart.bar(x, 100 * value / found.total if found.total else 0.0, 0.6)
    chart.level(gauge_study.GRR_LIMITS[0], "GRR 10 %", at=3.4)
    chart.level(gauge_study.GRR_LIMITS[1], "GRR 30 %", at=3.4)
    return chart.text()


def _bias_chart(study: Study, bias: Bias) -> str:
    assert study.reference is not None
    deviations = study.values - study.reference[:, None, None]
    low, high = float(study.reference.min()), float(study.reference.max())
    chart = svg.Chart(
        "Deviation from the reference",
        svg.padded(low, high),
        svg.padded(min(0.0, float(deviations.min())), max(0.0, float(deviations.max()))),
        x_label=f"reference, {study.unit}",
        y_label=study.unit,
    )
    for x, own in zip(study.reference, deviations, strict=True):
        chart.dots([(float(x), float(value)) for value in np.ravel(own)], svg.GREY)
    chart.dots(list(zip(study.reference.tolist(), bias.by_part, strict=True)), svg.RED)
    if bias.line is not None:
        ends = [(x, bias.line.intercept + bias.line.slope * x) for x in (low, high)]
        chart.line(ends, svg.RED)
    chart.level(0.0, "no bias", svg.INK)
    return chart.text()


def _parts_chart(study: Study, title: str, span: tuple[float, float], unit: str) -> svg.Chart:
    every = max(1, len(study.parts) // 12)
    names = [(float(i), part[-6:]) for i, part in enumerate(study.parts) if i % every == 0]
    x = (-0.5, len(study.parts) - 0.5)
    return svg.Chart(title, x, span, x_label="part", y_label=unit, names=names)


def rows(study: Study, feature: str, tolerance: float | None) -> list[dict[str, object]]:
    """One line a method, for a spreadsheet."""
    told = result(study, feature, tolerance)
    return [
        {"feature": feature, "method": name, **told[name]}
        for name in ("anova", "average_and_range")
    ]
