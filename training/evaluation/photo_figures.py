"""Figures of a photo line from answers and truth, with 95 % intervals that resample whole groups.

Pictures of one group (capture run) are near copies of each other, so the interval is a bootstrap
over groups, not pictures. Knows no model and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_station.contract import tasks
from training.evaluation.measures import wilson

RESAMPLES = 1000
Cells = frozenset[tuple[int, int]]


@dataclass(frozen=True)
class SurfaceAnswer:
    """What a method says of one photo, beside the truth. `odds`: class -> probability."""

    id: str
    group: str
    truth: str
    odds: Mapping[str, float]
    cells: Cells
    cells_true: Cells


@dataclass(frozen=True)
class PlacesAnswer:
    """What a method says stands at each mark, beside the truth."""

    id: str
    read: Mapping[str, str]
    truth: Mapping[str, str] = field(default_factory=dict)


def surface_figures(answers: Sequence[SurfaceAnswer], seed: int = 0) -> dict[str, Any]:
    """All figures, each {value, low, high, n}; `n` counts photos."""
    table = _Table.of(answers)
    measures: dict[str, tuple[Callable[[_Table], float], int]] = {
        "auroc": (_Table.auroc, len(answers)),
        "class_accuracy": (_Table.accuracy, len(answers)),
        "defect_class_accuracy": (_Table.defect_accuracy, int((table.truth > 0).sum())),
        "macro_f1": (_Table.macro_f1, len(answers)),
        "grid_iou": (_Table.iou, int(table.filled.sum())),
        "grid_f1": (_Table.grid_f1, len(answers)),
        "clean_alarms": (_Table.clean_alarms, int((table.truth == 0).sum())),
        "defects_found": (_Table.found, int((table.truth > 0).sum())),
        "grid_clean_alarms": (_Table.grid_alarms, int((table.truth == 0).sum())),
    }
    for number, name in enumerate(table.classes):
        measures[f"f1_{name}"] = (
            lambda t, number=number: t.f1(number),  # type: ignore[misc]
            int((table.truth == number).sum()),
        )
    rng = np.random.default_rng(seed)
    names = np.unique(table.group)
    members = [np.flatnonzero(table.group == name) for name in names]
    drawn = [
        table.taken(np.concatenate([members[i] for i in rng.integers(len(names), size=len(names))]))
        for _ in range(RESAMPLES)
    ]
    figures = {"photos": len(answers), "groups": len(names)}
    return figures | {
        name: _figure(measure(table), [measure(part) for part in drawn], count)
        for name, (measure, count) in measures.items()
    }


def _figure(value: float, resampled: Sequence[float], count: int) -> dict[str, Any]:
    known = [item for item in resampled if not np.isnan(item)]
    low, high = np.percentile(known, [2.5, 97.5]) if known else (np.nan, np.nan)
    return {
        "value": round(float(value), 4),
        "low": round(float(low), 4),
        "high": round(float(high), 4),
        "n": count,
    }


@dataclass(frozen=True)
class _Table:
    """Columns over photos. Class 0 is `normal`."""

    classes: tuple[str, ...]
    group: NDArray[np.str_]
    truth: NDArray[np.int64]
    odds: NDArray[np.float64]
    both: NDArray[np.float64]
    either: NDArray[np.float64]
    marked: NDArray[np.float64]
    filled: NDArray[np.bool_]

    @classmethod
    def of(cls, answers: Sequence[SurfaceAnswer]) -> _Table:
        names = sorted({name for answer in answers for name in answer.odds} - {tasks.NORMAL})
        classes = (tasks.NORMAL, *names)
        return cls(
            classes,
            np.array([answer.group for answer in answers]),
            np.array([classes.index(answer.truth) for answer in answers]),
            np.array([[answer.odds.get(name, 0.0) for name in classes] for answer in answers]),
            np.array([len(answer.cells & answer.cells_true) for answer in answers], float),
            np.array([len(answer.cells | answer.cells_true) for answer in answers], float),
            np.array([len(answer.cells) for answer in answers], float),
            np.array([bool(answer.cells_true) for answer in answers]),
        )

    def taken(self, index: NDArray[np.int64]) -> _Table:
        return _Table(
            self.classes,
            self.group[index],
            self.truth[index],
            self.odds[index],
            self.both[index],
            self.either[index],
            self.marked[index],
            self.filled[index],
        )

    @property
    def best(self) -> NDArray[np.int64]:
        return np.asarray(self.odds.argmax(1))

    def auroc(self) -> float:
        score, positive = 1 - self.odds[:, 0], self.truth > 0
        if positive.all() or not positive.any():
            return float("nan")
        levels, rank, count = np.unique(score, return_inverse=True, return_counts=True)
        middle = np.cumsum(count) - (count - 1) / 2
        above, below = int(positive.sum()), int((~positive).sum())
        total = middle[rank][positive].sum() - above * (above + 1) / 2
        return float(total / (above * below)) if len(levels) else float("nan")

    def accuracy(self) -> float:
        return float((self.best == self.truth).mean())

    def defect_accuracy(self) -> float:
        """Among the defective: is the likeliest defect class the right one?"""
        bad = self.truth > 0
        return _mean(self.odds[bad, 1:].argmax(1) + 1 == self.truth[bad])

    def f1(self, number: int) -> float:
        read, true = self.best == number, self.truth == number
        if not read.any() and not true.any():
            return float("nan")
        return float(2 * (read & true).sum() / (read.sum() + true.sum()))

    def macro_f1(self) -> float:
        return float(np.nanmean([self.f1(number) for number in range(len(self.classes))]))

    def iou(self) -> float:
        return _mean(self.both[self.filled] / self.either[self.filled])

    def grid_f1(self) -> float:
        total = (self.both + self.either).sum()
        return float(2 * self.both.sum() / total) if total else float("nan")

    def clean_alarms(self) -> float:
        return _mean(self.odds[self.truth == 0, 0] <= 0.5)

    def found(self) -> float:
        return _mean(self.odds[self.truth > 0, 0] <= 0.5)

    def grid_alarms(self) -> float:
        return _mean(self.marked[self.truth == 0] > 0)


def _mean(values: NDArray[Any]) -> float:
    return float(values.mean()) if len(values) else float("nan")


def places_figures(answers: Sequence[PlacesAnswer]) -> dict[str, Any]:
    """Exact set of all places, every place, and the missing-part decision, Wilson's intervals."""
    exact = [dict(answer.read) == dict(answer.truth) for answer in answers]
    places = [
        answer.read.get(mark) == what for answer in answers for mark, what in answer.truth.items()
    ]
    complete = [
        (tasks.NONE in answer.read.values()) == (tasks.NONE in answer.truth.values())
        for answer in answers
    ]
    return {
        "photos": len(answers),
        "exact_set": _share(exact),
        "place": _share(places),
        "missing_part_decision": _share(complete),
    }


def _share(right: Sequence[bool]) -> dict[str, Any]:
    low, high = wilson(sum(right), len(right))
    value = sum(right) / max(1, len(right))
    return {
        "value": round(value, 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "n": len(right),
    }
