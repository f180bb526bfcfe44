"""Figures of surfaces: class, defect probability, grid, score. Measures of rows; no files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from forge_station.contract import tasks
from forge_station.contract.grid_metrics import rank_correlation
from training.evaluation import reliability
from training.evaluation.measures import (
    Items,
    Measure,
    mean_of,
    pooled_of,
    ranking_of,
    share_of,
    wilson,
)
from training.evaluation.rows import CELL_VIEWS, Cell, Row
from training.evaluation.tray_figures import confusion, figures_of

UNREAD = "not read"
_SIZE_BINS, _SMALLEST_BIN = 8, 8


def grid_counts(row: Row, view: int | None = None) -> tuple[int, int, int]:
    """(hits, false cells, missed cells) over the cells of all views, or of one."""
    found, truth = (
        {cell for cell in cells or () if view is None or cell[0] == view}
        for cells in (row.cells, row.cells_true)
    )
    return len(found & truth), len(found - truth), len(truth - found)


def iou(found: Sequence[Cell], truth: Sequence[Cell]) -> float:
    """Over the cells of all views of one part; 1 when both are empty."""
    union = set(found) | set(truth)
    return len(set(found) & set(truth)) / len(union) if union else 1.0


def classes_of(rows: Sequence[Row]) -> tuple[str, ...]:
    """The five classes of the scan checks, and those of photo lines as they occur."""
    seen = {row.defect_true for row in rows} | {row.defect for row in rows}
    seen |= {name for row in rows for name in row.probabilities}
    other = sorted(name for name in seen if name and name not in tasks.SURFACE_CLASSES)
    if not other:
        return tasks.SURFACE_CLASSES
    return (*(name for name in tasks.SURFACE_CLASSES if name in seen), *other)


def _told(function: Callable[[Row], bool]) -> Callable[[Row], bool | None]:
    return lambda row: None if row.defect_true is None else function(row)


def _binary(name: str | None) -> str:
    """normal, defective, or "" where no class was read."""
    return "defective" if name and name != tasks.NORMAL else name or ""


def _odds(row: Row) -> Items | None:
    p = row.defect_probability
    if row.defect_true is None or p is None:
        return None
    return [(p, float(row.defect_true != tasks.NORMAL))]


def _best(row: Row) -> Items | None:
    if row.defect_true is None or not row.probabilities:
        return None
    return [(max(row.probabilities.values()), float(row.defect == row.defect_true))]


def _alarmed(defect_fail: float, *, defective: bool) -> Callable[[Row], bool | None]:
    """Whether the surface would be objected to, of the defective or of the normal cases.

    Where a model gives no probabilities its class decides.
    """

    def alarmed(row: Row) -> bool | None:
        if row.defect_true is None or (row.defect_true != tasks.NORMAL) is not defective:
            return None
        p = row.defect_probability
        if p is None:
            return None if not row.exchanges else _binary(row.defect) == "defective"
        return p >= defect_fail

    return alarmed


def _scores(row: Row) -> Items | None:
    if row.score is None or row.score_true is None:
        return None
    return [(row.score, row.score_true)]


def _iou_of(row: Row) -> float | None:
    return iou(row.cells or (), row.cells_true) if row.cells_true else None


def _f1(row: Row) -> tuple[float, float] | None:
    if row.cells_true is None:
        return None
    hit, false, missed = grid_counts(row)
    return 2 * hit, 2 * hit + false + missed


def _precision(row: Row) -> tuple[float, float] | None:
    if row.cells_true is None:
        return None
    hit, false, _ = grid_counts(row)
    return hit, hit + false


def _recall(row: Row) -> tuple[float, float] | None:
    if row.cells_true is None:
        return None
    hit, _, missed = grid_counts(row)
    return hit, hit + missed


def headline(defect_fail: float) -> tuple[Measure, ...]:
    """Shown for all cases and again for each of their subsets."""
    return (
        share_of("five_class", _told(lambda row: row.defect == row.defect_true)),
        share_of("binary", _told(lambda row: _binary(row.defect) == _binary(row.defect_true))),
        ranking_of(
            "auroc",
            _odds,
            lambda items: reliability.auroc(items[:, 0], items[:, 1] > 0.5),
            weakest=lambda items: int(min((items[:, 1] > 0.5).sum(), (items[:, 1] < 0.5).sum())),
        ),
        share_of("clean_alarms", _alarmed(defect_fail, defective=False), lower=True),
        share_of("defects_found", _alarmed(defect_fail, defective=True)),
        mean_of("grid_iou", _iou_of),
        pooled_of("grid_f1", _f1, of_cases=True, nothing=1.0),
        share_of(
            "grid_clean_alarms",
            lambda row: bool(row.cells) if row.cells_true == () else None,
            lower=True,
        ),
    )


def measures(defect_fail: float, classes: Sequence[str]) -> tuple[Measure, ...]:
    """All figures of surfaces. `defect_fail`: probability from which a surface fails."""
    found = list(headline(defect_fail))
    for name in classes:
        found += class_measures(name)
    found += [
        mean_of(
            "grid_iou_all",
            lambda row: None if row.cells_true is None else iou(row.cells or (), row.cells_true),
        ),
        share_of(
            "grid_vanished", lambda row: not row.cells if row.cells_true else None, lower=True
        ),
        ranking_of(
            "score_srcc",
            _scores,
            lambda items: rank_correlation(items[:, 0].tolist(), items[:, 1].tolist()),
        ),
        *_calibration(classes),
    ]
    return tuple(found)


def class_measures(name: str) -> tuple[Measure, Measure, Measure]:
    """Precision, recall and F1 of one class."""
    return (
        pooled_of(
            f"precision_{name}",
            lambda row: (
                None
                if row.defect_true is None or row.defect != name
                else (float(row.defect_true == name), 1.0)
            ),
        ),
        share_of(
            f"recall_{name}", lambda row: row.defect == name if row.defect_true == name else None
        ),
        pooled_of(
            f"f1_{name}",
            lambda row: (
                None
                if row.defect_true is None
                else (
                    2.0 * (row.defect == row.defect_true == name),
                    (row.defect == name) + (row.defect_true == name),
                )
            ),
            of_cases=True,
        ),
    )


def _calibration(classes: Sequence[str]) -> tuple[Measure, ...]:
    width = len(classes)

    def both(row: Row) -> Items | None:
        """Probabilities of all classes, then the truth as ones and zeros."""
        if row.defect_true is None or not row.probabilities:
            return None
        odds = [row.probabilities.get(name, 0.0) for name in classes]
        return [(*odds, *(float(row.defect_true == name) for name in classes))]

    return (
        ranking_of(
            "class_ece_equal_mass",
            _best,
            lambda items: reliability.equal_mass_error(items[:, 0], items[:, 1]),
            lower=True,
        ),
        ranking_of(
            "class_ece2_debiased",
            _best,
            lambda items: reliability.debiased_error(items[:, 0], items[:, 1]),
            lower=True,
        ),
        ranking_of(
            "class_brier",
            both,
            lambda items: reliability.brier(items[:, :width], items[:, width:]),
            lower=True,
        ),
        ranking_of(
            "class_brier_skill",
            both,
            lambda items: reliability.brier_skill(items[:, :width], items[:, width:]),
        ),
    )


def plain(rows: Sequence[Row]) -> dict[str, Any]:
    """Figures without an interval, and trivial baselines."""
    told = [row for row in rows if row.defect_true is not None]
    classes = classes_of(rows)
    times = {name: sum(row.defect_true == name for row in told) for name in classes}
    best = [item for row in rows for item in _best(row) or ()]
    counts = [grid_counts(row) for row in rows if row.cells_true is not None]
    hit, false, missed = (sum(item[k] for item in counts) for k in range(3))
    marked = [row for row in rows if row.cells_true]
    whole = [iou(row.cells_part, row.cells_true or ()) for row in marked]
    return {
        "class_calibration_error": _rounded(
            reliability.calibration_error([p for p, _ in best], [right for _, right in best])
        ),
        "grid_precision": _part(hit, hit + false),
        "grid_recall": _part(hit, hit + missed),
        "baseline_five_class_always_normal": _part(times.get(tasks.NORMAL, 0), len(told)),
        "baseline_five_class_majority": _part(max(times.values(), default=0), len(told)),
        "baseline_five_class_random": 1 / len(classes),
        "baseline_auroc_random": 0.5,
        "baseline_grid_iou_whole_part": _rounded(float(np.mean(whole)) if whole else None),
    }


def detail(rows: Sequence[Row], defect_fail: float) -> dict[str, Any]:
    """Confusion, calibration diagram, views, recall over size."""
    told = [row for row in rows if row.defect_true is not None]
    out: dict[str, Any] = {}
    if told:
        out["confusion"] = confusion(
            [(row.defect_true or "", row.defect or UNREAD) for row in told], classes_of(rows)
        )
    best = [item for row in rows for item in _best(row) or ()]
    if best:
        out["calibration"] = reliability.bins_of([p for p, _ in best], [r > 0 for _, r in best])
    views = sorted({cell[0] for row in rows for cell in (row.cells_true or ())})
    if views:
        out["views"] = {CELL_VIEWS[view]: figures_of(_view_measures(view), rows) for view in views}
    sizes = recall_over_size(rows, defect_fail)
    if sizes:
        out["recall_over_size"] = sizes
    return out


def _view_measures(view: int) -> tuple[Measure, ...]:
    def of(row: Row, part: Callable[[int, int, int], tuple[float, float]]) -> Items | None:
        return None if row.cells_true is None else [part(*grid_counts(row, view))]

    def own(cells: Sequence[Cell] | None) -> list[Cell]:
        return [cell for cell in cells or () if cell[0] == view]

    return (
        mean_of(
            "grid_iou",
            lambda row: iou(own(row.cells), own(row.cells_true)) if own(row.cells_true) else None,
        ),
        Measure("grid_precision", lambda row: of(row, lambda h, f, m: (h, h + f)), "pooled"),
        Measure("grid_recall", lambda row: of(row, lambda h, f, m: (h, h + m)), "pooled"),
        Measure("grid_f1", lambda row: of(row, lambda h, f, m: (2 * h, 2 * h + f + m)), "pooled"),
        share_of(
            "grid_clean_alarms",
            lambda row: bool(own(row.cells)) if row.cells_true == () else None,
            lower=True,
        ),
    )


def recall_over_size(rows: Sequence[Row], defect_fail: float) -> dict[str, Any]:
    """Measure (mm, px, extent_mm) -> class or `all` -> bins of about equal numbers of defects.

    A bin: smallest and largest size, n, share found (the defect probability reaches the limit) with
    Wilson's interval, share of the right class.
    """
    out: dict[str, Any] = {}
    for unit in ("size_px", "size_mm", "extent_mm"):
        found = _alarmed(defect_fail, defective=True)
        sized = [
            (size, row)
            for row in rows
            if (size := getattr(row, f"defect_{unit}")) is not None
            and row.defect_true not in (None, tasks.NORMAL)
            and found(row) is not None
        ]
        classes = sorted({row.defect_true or "" for _, row in sized})
        blocks = {"all": sized}
        blocks |= {
            name: [item for item in sized if item[1].defect_true == name] for name in classes
        }
        curves = {
            name: [_bin(part, found) for part in _by_size(own)]
            for name, own in blocks.items()
            if own
        }
        if curves:
            out[unit] = curves
    return out


def _by_size(sized: Sequence[tuple[float, Row]]) -> list[list[tuple[float, Row]]]:
    ordered = sorted(sized, key=lambda item: item[0])
    bins = max(1, min(_SIZE_BINS, len(ordered) // _SMALLEST_BIN))
    edges = [round(k * len(ordered) / bins) for k in range(bins + 1)]
    return [ordered[a:b] for a, b in pairwise(edges)]


def _bin(sized: Sequence[tuple[float, Row]], found: Callable[[Row], bool | None]) -> dict[str, Any]:
    hits = sum(found(row) is True for _, row in sized)
    named = sum(row.defect == row.defect_true for _, row in sized)
    sizes = [size for size, _ in sized]
    low, high = wilson(hits, len(sized))
    return {
        "from": round(sizes[0], 4),
        "to": round(sizes[-1], 4),
        "middle": round(float(np.median(sizes)), 4),
        "n": len(sized),
        "found": round(hits / len(sized), 4),
        "interval": [round(low, 4), round(high, 4)],
        "class_right": round(named / len(sized), 4),
    }


def _part(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
