"""Rows of an evaluation -> all its figures, by task. Pure functions; no files, no model.

A task holds figures {value, interval, n}, plain numbers, and under `detail` what has a shape of its
own: classes, confusion, faults (the level of an error), look-alikes, missing parts, views, recall
over size, calibration bins, subsets and parse warnings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from forge_station.timing import percentile
from training.evaluation import surface_figures, tray_figures
from training.evaluation.measures import Measure, share_of
from training.evaluation.replies import NO_ANSWER
from training.evaluation.rows import Row
from training.evaluation.tray_figures import figures_of

OUTCOMES = ("PASS", "FAIL", "UNSURE", "ERROR")


def _of(expected: str, outcome: str) -> Measure:
    names = {
        ("PASS", "FAIL"): "overkill",
        ("FAIL", "PASS"): "escape",
        ("PASS", "UNSURE"): "unsure_of_good",
        ("FAIL", "UNSURE"): "unsure_of_bad",
    }
    return share_of(
        names[expected, outcome],
        lambda row: row.outcome == outcome if row.expected == expected else None,
        lower=True,
    )


def _parsed(row: Row) -> bool:
    """Every answer of a free text could be read, the grid too where it was asked for."""
    lost = row.cells is None and row.cells_true is not None
    return not lost and not any(code.endswith(NO_ANSWER) for code in row.warnings)


VERDICTS: tuple[Measure, ...] = (
    share_of(
        "pass_fail_right",
        lambda row: None if row.expected is None else row.outcome == row.expected,
    ),
    _of("PASS", "FAIL"),
    _of("FAIL", "PASS"),
)
COMMON: tuple[Measure, ...] = (
    share_of(
        "count_right",
        lambda row: None if row.parts_true is None else row.parts_seen == row.parts_true,
    ),
    *VERDICTS,
    share_of("parse_rate", lambda row: _parsed(row) if row.exchanges else None),
    share_of("unsure", lambda row: row.outcome == "UNSURE", lower=True),
    _of("PASS", "UNSURE"),
    _of("FAIL", "UNSURE"),
)


def measures_of(task: str, rows: Sequence[Row], defect_fail: float) -> tuple[Measure, ...]:
    """Every figure with an interval of a task; `rows` tell which classes there are."""
    if task == "surface":
        own = surface_figures.measures(defect_fail, surface_figures.classes_of(rows))
    else:
        own = tray_figures.MEASURES
    extra: tuple[Measure, ...] = ()
    if task == "assembly":
        extra += tray_figures.MISSING_PART
    return (*COMMON, *own, *extra, *tray_figures.probe_measures(rows))


def headline_of(task: str, defect_fail: float) -> tuple[Measure, ...]:
    """The figures that are shown again for every subset of a task."""
    own = surface_figures.headline(defect_fail) if task == "surface" else tray_figures.HEADLINE
    return (*VERDICTS, *own)


def figures(
    rows: Sequence[Row], defect_fail: float, *, by_workpiece: bool = False
) -> dict[str, Any]:
    """All figures by task. `defect_fail`: the bundle's probability from which a surface fails."""
    out: dict[str, Any] = {}
    for task in dict.fromkeys(row.task for row in rows):
        own = [row for row in rows if row.task == task]
        out[task] = _task(task, own, defect_fail, by_workpiece)
    return out


def _task(task: str, rows: Sequence[Row], defect_fail: float, by_workpiece: bool) -> dict[str, Any]:
    judged = [row for row in rows if row.expected is not None]
    good = sum(row.expected == "PASS" for row in judged)
    outcomes = Counter(row.outcome for row in rows)
    out: dict[str, Any] = {
        "cases": len(rows),
        "bad_files": sum(bool(row.error) for row in rows),
        "outcomes": {name: outcomes[name] for name in OUTCOMES},
    }
    out |= {m.name: m.figure(rows) for m in measures_of(task, rows, defect_fail)}
    if judged:
        out["baseline_pass_fail_always_pass"] = round(good / len(judged), 4)
        out["baseline_pass_fail_majority"] = round(max(good, len(judged) - good) / len(judged), 4)
    surface = task == "surface"
    out |= surface_figures.plain(rows) if surface else tray_figures.baselines(rows)
    detail = surface_figures.detail(rows, defect_fail) if surface else tray_figures.detail(rows)
    headline = headline_of(task, defect_fail)
    subsets = sorted({row.subset for row in rows if row.subset})
    if subsets:
        detail["subsets"] = {
            name: _block(headline, [row for row in rows if row.subset == name]) for name in subsets
        }
    if by_workpiece:
        kinds = sorted({kind for row in rows for kind in row.families})
        detail["workpieces"] = {
            kind: _block(headline, [row for row in rows if kind in row.families]) for kind in kinds
        }
    warnings = Counter(code for row in rows for code in row.warnings)
    if warnings:
        detail["warnings"] = dict(warnings.most_common())
    return {**out, "detail": detail, **_latency(rows)}


def _block(measures: Sequence[Measure], rows: Sequence[Row]) -> dict[str, Any]:
    return {"cases": len(rows), **figures_of(measures, rows)}


def _latency(rows: Sequence[Row]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in ("model_ms", "total_ms"):
        values = sorted(v for row in rows if (v := getattr(row, name)) is not None)
        if values:
            found = {"p50": percentile(values, 50), "p95": percentile(values, 95)}
            out[f"latency_{name}"] = {key: round(value, 2) for key, value in found.items()}
    return out
