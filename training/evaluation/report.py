"""Figures of an evaluation as a table for people: value, 95 % interval, n, baselines beside them.

Knows the names of figures, not how they come about (see `training.evaluation.scoring`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from training.evaluation.case_files import TASKS

LABELS: Mapping[str, str] = {
    "count_right": "number of parts right",
    "reading": "reading: workpiece and model number",
    "reading_workpiece": "reading: workpiece",
    "reading_model_number": "reading: model number",
    "reading_picture_alone": "reading without the measured size",
    "all_marks": "all marks of a case read right",
    "decision": "decision by the specification",
    "letter": "letter or none by the specification",
    "letter_direct": "letter or none by the model itself",
    "missing": "missing parts exactly right",
    "missing_part": "the one missing part named",
    "missing_part_direct": "the one missing part, by the model itself",
    "pass_fail_right": "PASS/FAIL as it should be",
    "overkill": "overkill: good, but FAIL",
    "escape": "escape: bad, but PASS",
    "unsure": "UNSURE",
    "unsure_of_good": "UNSURE of the good ones",
    "unsure_of_bad": "UNSURE of the bad ones",
    "parse_rate": "replies that can be read",
    "conformity_srcc": "conformity score, SRCC with violations",
    "five_class": "class right (normal and four defects)",
    "binary": "defective or not",
    "auroc": "AUROC of the defect probability",
    "clean_alarms": "clean alarms at the bundle's limit",
    "defects_found": "defects found at the bundle's limit",
    "recall_normal": "recall normal",
    "recall_crack": "recall crack",
    "recall_cut": "recall cut",
    "recall_deformation": "recall deformation",
    "recall_dent": "recall dent",
    "precision_normal": "precision normal",
    "precision_crack": "precision crack",
    "precision_cut": "precision cut",
    "precision_deformation": "precision deformation",
    "precision_dent": "precision dent",
    "f1_normal": "F1 normal",
    "f1_crack": "F1 crack",
    "f1_cut": "F1 cut",
    "f1_deformation": "F1 deformation",
    "f1_dent": "F1 dent",
    "grid_iou": "grid IoU, defective parts",
    "grid_f1": "grid F1, pooled over all parts",
    "grid_vanished": "defective parts without a marked cell",
    "grid_clean_alarms": "clean parts with a marked cell",
    "score_srcc": "surface score, SRCC with the truth",
    "reading_ece_equal_mass": "calibration error of readings, 15 bins",
    "reading_ece2_debiased": "calibration error of readings, debiased",
    "reading_brier": "Brier score of readings",
    "reading_brier_skill": "Brier skill of readings",
    "class_ece_equal_mass": "calibration error of the class, 15 bins",
    "class_ece2_debiased": "calibration error of the class, debiased",
    "class_brier": "Brier score of the class",
    "class_brier_skill": "Brier skill of the class",
    "probe_moved_letters": "grounding: reading follows its letter",
    "probe_moved_columns": "grounding: reading keeps its column's part",
    "probe_mark_to_place": "grounding: mark to place",
    "probe_place_to_mark": "grounding: place to mark",
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
    "missing_part_direct": (("random", "baseline_missing_part_random"),),
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
_DETAILS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "faults": (
        "by what is wrong",
        ("decision", "letter", "letter_direct", "reading", "reading_model_number"),
    ),
    "lookalikes": ("look-alikes", ("decision", "letter", "letter_direct", "reading")),
    "missing_part": ("one part missing", ("missing_part", "missing_part_direct")),
    "subsets": ("subset", ()),
    "workpieces": ("workpiece", ()),
    "views": ("view", ("grid_iou", "grid_f1", "grid_clean_alarms")),
}
_HEADLINE = ("decision", "letter_direct", "reading", "five_class", "auroc", "grid_iou")
"""Of subsets and workpieces, those that the task has."""
_SHORT_LABELS: Mapping[str, str] = {
    "decision": "decision",
    "letter": "letter",
    "letter_direct": "direct letter",
    "reading": "reading",
    "reading_model_number": "model number",
    "missing_part": "by readings",
    "missing_part_direct": "direct",
    "five_class": "class",
    "auroc": "AUROC",
    "grid_iou": "grid IoU",
    "grid_f1": "grid F1",
    "grid_clean_alarms": "clean alarms",
}


def table(figures: Mapping[str, Any]) -> str:
    """Plain text, one block a task."""
    lines: list[str] = []
    order: list[str] = [task for task in TASKS if task in figures]
    order += [
        key
        for key, value in figures.items()
        if isinstance(value, dict) and "outcomes" in value and key not in order
    ]
    for task in order:
        lines += _block(task, figures[task])
    return "\n".join(lines)


def _block(task: str, own: Mapping[str, Any]) -> list[str]:
    outcomes = ", ".join(f"{count} {name}" for name, count in own["outcomes"].items())
    lines = [
        "",
        f"{task or 'unknown task'}: {own['cases']} cases, {own['bad_files']} with a bad file "
        f"({outcomes})",
        f"  {'':<44}{'value':>8}   {'95 % interval':<18}{'n':>6}   baselines",
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
            f"  {label:<44}{figure['value']:>8.3f}   [{low:.3f}, {high:.3f}]    "
            f"{figure['n']:>6}   {', '.join(beside)}".rstrip()
        )
    lines += [
        f"  {name.replace('_', ' '):<44}{own[name]:>8.3f}"
        for name in _PLAIN
        if own.get(name) is not None
    ]
    lines += _details(own.get("detail", {}))
    for key, label in (
        ("latency_model_ms", "model"),
        ("latency_total_ms", "views, model and verdict"),
    ):
        if key in own:
            found = own[key]
            text = f"p50 {found['p50']:.0f} ms, p95 {found['p95']:.0f} ms"
            lines.append(f"  {'latency, ' + label:<44}{text}")
    return lines


def _details(detail: Mapping[str, Any]) -> Iterator[str]:
    """One line a block: its name, its cases, value and interval of its figures."""
    for key, (title, names) in _DETAILS.items():
        for block, own in detail.get(key, {}).items():
            cells = [
                f"{_SHORT_LABELS[name]} {own[name]['value']:.3f} "
                f"[{own[name]['interval'][0]:.3f}, {own[name]['interval'][1]:.3f}]"
                for name in names or _HEADLINE
                if name in own
            ]
            count = f" ({own['cases']})" if "cases" in own else ""
            yield f"  {f'{title}: {block}{count}':<44}  {', '.join(cells)}".rstrip()
    for code, count in detail.get("warnings", {}).items():
        yield f"  {f'warning: {code}':<44}{count:>8}"


def _short(value: Any) -> str:
    """A baseline's value, with an interval or without."""
    number = value["value"] if isinstance(value, Mapping) else value
    return "-" if number is None else f"{number:.3f}"
