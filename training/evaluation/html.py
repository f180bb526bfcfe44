"""The report of an evaluation: one file to look at, without scripts and without anything elsewhere.

Tables with intervals, confusion matrices, calibration and recall over size, the worst cases with
what the model was shown, and every row. Fills `report.html.j2`; computes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from forge_station.contract import tasks
from training.evaluation import surface_figures, svg, tray_figures
from training.evaluation.case_files import TASKS, BadCase, Case
from training.evaluation.published import Published
from training.evaluation.report import BASELINES, LABELS
from training.evaluation.rows import CELL_VIEWS, Cell, Row
from training.evaluation.worst import Drawer, Drawn, worst

WORST = 12
_TITLES = {
    "faults": "By what is wrong (the level of the error)",
    "lookalikes": "Look-alikes: flat washers, neighbouring sizes, one head in two lengths",
    "missing_part": "One part missing, by workpiece",
    "subsets": "Subsets of the cases",
    "workpieces": "By workpiece",
    "views": "Grid by view",
    "classes": "Precision, recall and F1 of every workpiece",
}
_UNITS = {
    "size_px": "defect size, camera pixels",
    "size_mm": "defect size, mm",
    "extent_mm": "extent of the changed surface, mm",
}


def page(
    figures: Mapping[str, Any],
    rows: Sequence[Row],
    cases: Sequence[Case | BadCase],
    drawer: Drawer,
    beside: Sequence[Published],
    rows_file: Path,
) -> str:
    """The whole report. `rows_file`: the row file as seen from the report."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    by_id = {case.id: case for case in cases if isinstance(case, Case)}
    order: list[str] = [task for task in TASKS if task in figures]
    order += [k for k, v in figures.items() if isinstance(v, dict) and "outcomes" in v
              and k not in order]  # fmt: skip
    head = {k: v for k, v in figures.items() if not isinstance(v, (dict, list))}
    blocks = [
        _task(task, figures[task], rows, by_id, drawer, [p for p in beside if p.task == task])
        for task in order
    ]
    return environment.get_template("report.html.j2").render(
        head=head,
        tasks=blocks,
        certified=figures.get("certified"),
        without_sizes=_without_sizes(figures.get("without_sizes", {})),
        rows=[_listed(row) for row in rows],
        errors=[row for row in rows if row.error],
        rows_file=rows_file.as_posix(),
    )


def _task(
    task: str,
    own: Mapping[str, Any],
    rows: Sequence[Row],
    cases: Mapping[str, Case],
    drawer: Drawer,
    beside: Sequence[Published],
) -> dict[str, Any]:
    detail = own.get("detail", {})
    lines = [
        {
            "label": label,
            **own[name],
            "beside": [
                f"{word} {_short(own[key])}"
                for word, key in BASELINES.get(name, ())
                if own.get(key) is not None
            ],
        }
        for name, label in LABELS.items()
        if own.get(name, {}).get("value") is not None
    ]
    tables = [
        {"title": _TITLES[name], **_matrix(detail[name])} for name in _TITLES if detail.get(name)
    ]
    curves = [
        {"unit": _UNITS[unit], "svg": Markup(svg.over_size(found, _UNITS[unit]))}
        for unit, found in detail.get("recall_over_size", {}).items()
    ]
    calibration = detail.get("calibration")
    mine = [row for row in rows if row.task == task]
    published = [
        {"item": item, "ours": own[item.figure]}
        for item in beside
        if own.get(item.figure, {}).get("value") is not None
    ]
    return {
        "name": task or "unknown task",
        "cases": own["cases"],
        "bad_files": own["bad_files"],
        "outcomes": own["outcomes"],
        "lines": lines,
        "tables": tables,
        "confusion": _confusion(detail.get("confusion")),
        "calibration": Markup(svg.calibration(calibration)) if calibration else None,
        "curves": curves,
        "warnings": detail.get("warnings", {}),
        "published": published,
        "worst": [_case(row, cases.get(row.id), drawer) for row in worst(mine, task, WORST)],
    }


def _matrix(blocks: Mapping[str, Any]) -> dict[str, Any]:
    """Blocks of figures as one table: a row a block, a column a figure."""
    names: list[str] = []
    for block in blocks.values():
        names += [k for k, v in block.items() if isinstance(v, dict) and k not in names]
    return {
        "counted": all("cases" in block for block in blocks.values()),
        "columns": [LABELS.get(name, name.replace("_", " ")) for name in names],
        "rows": [
            {"name": name, "cases": block.get("cases"), "cells": [block.get(k) for k in names]}
            for name, block in blocks.items()
        ],
    }


def _confusion(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if found is None:
        return None
    rows = []
    for name, counts in zip(found["truth"], found["counts"], strict=True):
        total = sum(counts)
        cells = [
            {
                "n": n,
                "share": n / total if total else 0.0,
                "right": read == name,
            }
            for read, n in zip(found["read"], counts, strict=True)
        ]
        rows.append({"name": name, "total": total, "cells": cells})
    return {"read": found["read"], "rows": rows}


def _case(row: Row, case: Case | None, drawer: Drawer) -> dict[str, Any]:
    """A worst case: words and pictures with outlined cells."""
    drawn = drawer.draw(case) if case is not None else None
    return {
        "row": row,
        "truth": _truth(row),
        "said": _said(row),
        "pictures": [] if drawn is None else [_outlined(drawn, p, row) for p in drawn.addresses],
        "odds": sorted(row.probabilities.items(), key=lambda item: -item[1]),
        "iou": surface_figures.iou(row.cells or (), row.cells_true) if row.cells_true else None,
    }


def _outlined(drawn: Drawn, address: str, row: Row) -> Markup:
    """The picture with the cells of the truth and those that were found."""
    scale = max(1, round(900 / drawn.width))
    marks = []
    for cells, name, inset in ((row.cells_true, "true", 0.0), (row.cells, "found", 0.12)):
        boxes = [_box(cell, drawn, inset) for cell in cells or () if cell[0] in drawn.panels]
        marks.append(f'<g class="{name}">{"".join(boxes)}</g>')
    lines = [
        f'<line x1="{x}" y1="0" x2="{x}" y2="{drawn.height}" class="seam"/>'
        for x, *_ in list(drawn.panels.values())[1:]
    ]
    return Markup(
        f'<svg class="shot" viewBox="0 0 {drawn.width} {drawn.height}" '
        f'width="{min(980, drawn.width * scale)}"><image href="{address}" width="{drawn.width}" '
        f'height="{drawn.height}" style="image-rendering:pixelated"/>{"".join(lines + marks)}</svg>'
    )


def _box(cell: Cell, drawn: Drawn, inset: float) -> str:
    x, y, width, height = drawn.panels[cell[0]]
    w, h = width / 16, height / 16
    left, top = x + (cell[2] + inset) * w, y + (cell[1] + inset) * h
    return (
        f'<rect x="{left:.2f}" y="{top:.2f}" width="{w * (1 - 2 * inset):.2f}" '
        f'height="{h * (1 - 2 * inset):.2f}"><title>{CELL_VIEWS[cell[0]]} row {cell[1] + 1}, '
        f"column {cell[2] + 1}</title></rect>"
    )


def _truth(row: Row) -> str:
    if row.task == "surface":
        return row.defect_true or "not told"
    words = [] if row.answers_true is None else [" or ".join(row.answers_true)]
    if row.missing_true:
        words.append(f"missing {', '.join(row.missing_true)}")
    return "; ".join(words) or "not told"


def _said(row: Row) -> str:
    if row.task == "surface":
        return row.defect or "nothing that can be read"
    words = [", ".join(row.letters) or row.answer or "no answer"]
    if row.missing and row.missing_true is not None:
        words.append(f"missing {', '.join(row.missing)}")
    return "; ".join(words)


def _right(row: Row) -> bool | None:
    if row.task == "surface":
        return None if row.defect_true is None else row.defect == row.defect_true
    if row.answers_true is not None:
        return tray_figures.decision_right(row)
    return all(m.read == m.true for m in row.marks) if row.marks else None


def _listed(row: Row) -> dict[str, Any]:
    p = row.defect_probability
    return {
        "row": row,
        "truth": _truth(row),
        "said": _said(row) if row.outcome != "ERROR" else tasks.NONE,
        "right": _right(row),
        "p": None if p is None else f"{p:.2f}",
    }


def _without_sizes(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    lines = []
    for task, own in found.items():
        for name, figure in own["figures"].items():
            if name in LABELS:
                lines.append({"task": task, "label": LABELS[name], **figure})
    return lines


def _short(value: Any) -> str:
    number = value["value"] if isinstance(value, Mapping) else value
    return "-" if number is None else f"{number:.3f}"
