"""Figures and table of `training.readouts`: cost, agreement, calibration and the soft knob.

Pure functions of its rows. Cells are numbers of [views * 16, 16] in reading order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_station.contract.grid import SIDE
from forge_station.timing import percentile
from training.evaluation import reliability

WAYS = ("rows", "soft", "text", "rows, truth", "text, truth")
THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8)
Row = Mapping[str, Any]
Cells = NDArray[np.bool_]


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """All figures as plain data. Agreement needs rows whose truth is told."""
    told = [row for row in rows if row["truth"] is not None]
    found: dict[str, Any] = {
        "told": len(told),
        "defective": sum(bool(row["truth"]) for row in told),
        "cost": {way: cost([row[way] for row in rows]) for way in WAYS},
        "ratio": _ratios(rows),
    }
    if not told:
        return found
    truths = [_cells(row["truth"], row) for row in told]
    for way in ("rows", "soft", "text"):
        found[way] = agreement([_cells(row[way]["cells"], row) for row in told], truths)
        found[way]["overruns"] = sum(row[way]["overrun"] for row in told)
    soft = np.array([row["soft"]["p"] for row in told])
    found["calibration"] = calibration(soft, np.stack(truths).reshape(len(told), -1), told)
    found["curve"] = curve(soft, truths)
    return found


def cost(spent: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Mean, p50, p95 and max of passes, tokens and CPU milliseconds."""
    found = {}
    for name in ("passes", "tokens", "ms"):
        values = sorted(float(item[name]) for item in spent)
        found[name] = {
            "mean": round(sum(values) / len(values), 2),
            "p50": percentile(values, 50),
            "p95": percentile(values, 95),
            "max": values[-1],
        }
    return found


def _ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Text over rows on the same true grids: of the p95, and the median over filled grids."""
    found = {}
    for name in ("passes", "ms"):
        text, parallel = (
            [float(row[f"{way}, truth"][name]) for row in rows] for way in ("text", "rows")
        )
        found[f"{name} p95"] = percentile(sorted(text), 95) / percentile(sorted(parallel), 95)
        own = [a / b for a, b, row in zip(text, parallel, rows, strict=True) if row["truth"]]
        if own:
            found[f"{name} median, defective"] = float(np.median(own))
    return {name: round(value, 2) for name, value in found.items()}


def agreement(read: Sequence[Cells], truths: Sequence[Cells]) -> dict[str, Any]:
    """IoU, F1, false alarms on clean parts and empty grids on defects; the views side by side."""
    ious, alarms, empty = [], [], []
    hits = false = missed = 0
    for a, b in zip(read, truths, strict=True):
        hits += int((a & b).sum())
        false += int((a & ~b).sum())
        missed += int((b & ~a).sum())
        if b.any():
            ious.append(float((a & b).sum() / (a | b).sum()))
            empty.append(not a.any())
        else:
            alarms.append(bool(a.any()))
    return {
        "iou": _mean(ious),
        "f1": round(2 * hits / max(1, 2 * hits + false + missed), 4),
        "clean_alarms": _mean(alarms),
        "empty_on_defect": _mean(empty),
    }


def calibration(soft: NDArray[np.float64], truth: Cells, rows: Sequence[Row]) -> dict[str, Any]:
    """Calibration errors of the cell probabilities [n, cells]: all cells, and those on the part."""
    on_part = np.zeros(truth.shape, np.bool_)
    for place, row in enumerate(rows):
        on_part[place, row["part"]] = True
    found: dict[str, float | None] = {"base_rate": round(float(truth.mean()), 5)}
    for name, mask in (("all", np.ones_like(on_part)), ("on_part", on_part | truth)):
        found[f"ece_{name}"] = _rounded(reliability.calibration_error(soft[mask], truth[mask]))
        found[f"ece_equal_mass_{name}"] = _rounded(
            reliability.equal_mass_error(soft[mask], truth[mask])
        )
    return found


def curve(soft: NDArray[np.float64], truths: Sequence[Cells]) -> list[dict[str, Any]]:
    """Agreement by threshold: the knob between alarms on clean parts and empty grids on defects."""
    points = []
    for threshold in THRESHOLDS:
        read = [(p >= threshold).reshape(truths[0].shape) for p in soft]
        points.append({"threshold": threshold, **agreement(read, truths)})
    return points


def table(found: Mapping[str, Any]) -> str:
    """For people."""
    lines = [f"{'read as':<14}{'passes p50':>11}{'p95':>7}{'max':>7}{'CPU ms p50':>12}{'p95':>9}"]
    for way in WAYS:
        own = found["cost"][way]
        lines.append(
            f"{way:<14}{own['passes']['p50']:>11.0f}{own['passes']['p95']:>7.0f}"
            f"{own['passes']['max']:>7.0f}{own['ms']['p50']:>12.1f}{own['ms']['p95']:>9.1f}"
        )
    ratios = ", ".join(f"{name} {value:g}" for name, value in found["ratio"].items())
    lines.append(f"text over rows on the same true grids: {ratios}")
    if not found["told"]:
        return "\n".join(lines)
    head = f"{'':<14}{'IoU':>11}{'F1':>7}{'clean alarms':>14}{'empty on defect':>17}"
    lines += [f"\n{found['told']} with a known grid, {found['defective']} of them defective", head]
    points = [(way, found[way]) for way in ("rows", "soft", "text")]
    points += [(f"soft >= {point['threshold']:g}", point) for point in found["curve"]]
    for name, own in points:
        lines.append(
            f"{name:<14}{_text(own['iou']):>11}{own['f1']:>7.3f}"
            f"{_text(own['clean_alarms']):>14}{_text(own['empty_on_defect']):>17}"
        )
    errors = found["calibration"]
    lines.append(
        f"soft cells: ECE {errors['ece_all']} of all cells (base rate {errors['base_rate']}), "
        f"{errors['ece_on_part']} of those on the part"
    )
    return "\n".join(lines)


def _cells(numbers: Sequence[int], row: Row) -> Cells:
    grid = np.zeros(len(row["soft"]["p"]), np.bool_)
    grid[list(numbers)] = True
    return grid.reshape(-1, SIDE)


def _mean(values: Sequence[float]) -> float | None:
    return round(float(np.mean(values)), 4) if values else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
