"""Figures of an evaluation as a table for people: value, 95 % interval, n, baselines beside them.

Knows the names of figures, not how they come about (see `training.evaluation.scoring`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training.evaluation.case_files import TASKS

LABELS: Mapping[str, str] = {
    "count_right": "number of parts right",
    "reading": "reading: workpiece and model number",
    "reading_workpiece": "reading: workpiece",
    "reading_model_number": "reading: model number",
    "reading_picture_alone": "reading without the measured size",
    "decision": "decision by the specification",
    "letter": "letter or none by the specification",
    "letter_direct": "letter or none by the model itself",
    "missing": "missing parts exactly right",
    "pass_fail_right": "PASS/FAIL as it should be",
    "overkill": "overkill: good, but FAIL",
    "escape": "escape: bad, but PASS",
    "unsure": "UNSURE",
    "unsure_of_good": "UNSURE of the good ones",
    "unsure_of_bad": "UNSURE of the bad ones",
    "conformity_srcc": "conformity score, SRCC with violations",
    "five_class": "five classes",
    "binary": "defective or not",
    "auroc": "AUROC of the defect probability",
    "clean_alarms": "clean alarms at the bundle's limit",
    "defects_found": "defects found at the bundle's limit",
    "recall_normal": "recall normal",
    "recall_crack": "recall crack",
    "recall_cut": "recall cut",
    "recall_deformation": "recall deformation",
    "recall_dent": "recall dent",
    "grid_iou": "grid IoU, defective parts (3x16x16)",
    "grid_f1": "grid F1, pooled over all parts",
    "grid_clean_alarms": "clean parts with a marked cell",
    "score_srcc": "surface score, SRCC with the truth",
}
"""Figures with an interval, in the order of the table."""

BASELINES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "reading": (("nearest size", "baseline_reading_nearest_size"),),
    "decision": (
        ("nearest size", "baseline_letter_nearest_size"),
        ("always none", "baseline_letter_always_none"),
    ),
    "letter_direct": (
        ("majority", "baseline_letter_majority"),
        ("random", "baseline_letter_random"),
    ),
    "pass_fail_right": (
        ("always PASS", "baseline_pass_fail_always_pass"),
        ("majority", "baseline_pass_fail_majority"),
    ),
    "five_class": (
        ("always normal", "baseline_five_class_always_normal"),
        ("majority", "baseline_five_class_majority"),
        ("random", "baseline_five_class_random"),
    ),
    "auroc": (("random", "baseline_auroc_random"),),
    "grid_iou": (("whole part", "baseline_grid_iou_whole_part"),),
}

_PLAIN = ("reading_calibration_error", "class_calibration_error", "grid_precision", "grid_recall")


def table(figures: Mapping[str, Any]) -> str:
    """Plain text, one block a task."""
    lines: list[str] = []
    order: list[str] = [task for task in TASKS if task in figures]
    order += [key for key, value in figures.items() if isinstance(value, dict) and key not in order]
    for task in order:
        lines += _block(task, figures[task])
    return "\n".join(lines)


def _block(task: str, own: Mapping[str, Any]) -> list[str]:
    outcomes = ", ".join(f"{count} {name}" for name, count in own["outcomes"].items())
    lines = [
        "",
        f"{task or 'unknown task'}: {own['cases']} cases, {own['bad_files']} with a bad file "
        f"({outcomes})",
        f"  {'':<40}{'value':>8}   {'95 % interval':<18}{'n':>6}   baselines",
    ]
    for name, label in LABELS.items():
        if own.get(name, {}).get("value") is None:
            continue
        figure = own[name]
        low, high = figure["interval"]
        beside = [
            f"{word} {_short(own[key])}"
            for word, key in BASELINES.get(name, ())
            if own.get(key) is not None
        ]
        lines.append(
            f"  {label:<40}{figure['value']:>8.3f}   [{low:.3f}, {high:.3f}]    "
            f"{figure['n']:>6}   {', '.join(beside)}".rstrip()
        )
    lines += [
        f"  {name.replace('_', ' '):<40}{own[name]:>8.3f}"
        for name in _PLAIN
        if own.get(name) is not None
    ]
    for key, label in (
        ("latency_model_ms", "model"),
        ("latency_total_ms", "views, model and verdict"),
    ):
        if key in own:
            found = own[key]
            text = f"p50 {found['p50']:.0f} ms, p95 {found['p95']:.0f} ms"
            lines.append(f"  {'latency, ' + label:<40}{text}")
    return lines


def _short(value: Any) -> str:
    """A baseline's value, with an interval or without."""
    number = value["value"] if isinstance(value, Mapping) else value
    return "-" if number is None else f"{number:.3f}"
