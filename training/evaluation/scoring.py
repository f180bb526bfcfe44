"""Rows of an evaluation -> figures: accuracies with intervals, and trivial baselines beside them.

Pure functions of rows; no files, no model. An interval is 95 %. Of a share of cases it is
Wilson's; of a share of marks or cells, of a mean and of a ranking it is a bootstrap over whole
cases (2000 resamples, fixed seed), since the parts of one tray are not independent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_station.contract import tasks
from forge_station.contract.grid_metrics import rank_correlation
from forge_station.timing import percentile

RESAMPLES = 2000
_Z = 1.959964
_BINS = 10
Cell = tuple[int, int, int]
"""View (0 front, 1 side, 2 top), row, column."""
Array = NDArray[np.float64]


@dataclass(frozen=True)
class MarkRow:
    """One mark: what lies there, what was read, and what picture and size alone say.

    `read` is the station's reading, "" where the tray had no part at this mark; `picture` what the
    model reads before the measured size is weighed in; `nearest` the part of the nearest size.
    """

    mark: str
    true: str
    read: str = ""
    probability: float = 0.0
    picture: str = ""
    nearest: str = ""


@dataclass(frozen=True)
class Row:
    """One case as it came out. A truth that the case does not tell is None.

    `answer` is the letter that follows from readings and specification, or "none", or "" where
    they give no answer; `letters` all marks objected to. `direct` is what the model answers itself.
    """

    id: str
    task: str
    setting: str
    outcome: str
    expected: str | None = None
    reasons: tuple[str, ...] = ()
    error: str = ""
    source: str = ""
    parts_seen: int | None = None
    parts_true: int | None = None
    marks: tuple[MarkRow, ...] = ()
    answer: str = ""
    letters: tuple[str, ...] = ()
    direct: str = ""
    gauge_answer: str = ""
    answers_true: tuple[str, ...] | None = None
    missing: tuple[str, ...] | None = None
    missing_true: tuple[str, ...] | None = None
    violations_true: int | None = None
    defect: str = ""
    defect_true: str | None = None
    probabilities: Mapping[str, float] = field(default_factory=dict)
    score: float | None = None
    score_true: float | None = None
    cells: tuple[Cell, ...] | None = None
    cells_true: tuple[Cell, ...] | None = None
    cells_part: tuple[Cell, ...] = ()
    """Every cell of the part: the grid baseline "all of it"."""
    model_ms: float | None = None
    total_ms: float | None = None
    log_odds: Mapping[str, float] = field(default_factory=dict)
    """Check -> log-odds that the part is defective, as `forge_station.checks` defines them."""
    families: tuple[str, ...] = ()
    """Workpieces that the product asks for (of a majority batch: those on the tray)."""
    rules: Mapping[str, float] = field(default_factory=dict)
    """Limits of the product that were applied, by name."""
    part: str = ""
    """Id of the physical part or tray; empty: every case is another one, named by `id`."""
    provenance: str = ""
    """How the part came into the set, see training/CALIBRATION.md; empty: not told."""

    @property
    def defect_probability(self) -> float | None:
        if tasks.NORMAL not in self.probabilities:
            return None
        return 1.0 - self.probabilities[tasks.NORMAL]


def wilson(right: int, count: int) -> tuple[float, float]:
    """95 % interval of a share; (0, 1) of nothing."""
    if count == 0:
        return 0.0, 1.0
    share, z2 = right / count, _Z * _Z
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = _Z * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2)) / (1 + z2 / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def share(values: Sequence[bool]) -> dict[str, Any]:
    """A share of cases with Wilson's interval."""
    right = sum(values)
    if not values:
        return _figure(None, (0.0, 1.0), 0)
    return _figure(right / len(values), wilson(right, len(values)), len(values))


def pooled(parts: Sequence[int], wholes: Sequence[int], count: int | None = None) -> dict[str, Any]:
    """Sum of `parts` over sum of `wholes`, one of each a case. Bootstrap over cases.

    The interval is at least as wide as Wilson's on the pooled counts, so that it does not shrink
    to a point where everything is right.
    """
    whole = sum(wholes)
    if not whole:
        return _figure(None, (0.0, 1.0), 0)
    part_of, whole_of = np.array(parts, float), np.array(wholes, float)
    drawn = _drawn(len(parts))
    sums = whole_of[drawn].sum(axis=1)
    ratios = part_of[drawn].sum(axis=1)[sums > 0] / sums[sums > 0]
    low, high = np.percentile(ratios, (2.5, 97.5))
    narrow = wilson(sum(parts), whole)
    interval = (min(float(low), narrow[0]), max(float(high), narrow[1]))
    return _figure(sum(parts) / whole, interval, whole if count is None else count)


def mean(values: Sequence[float]) -> dict[str, Any]:
    """Mean over cases with a bootstrap interval."""
    if not values:
        return _figure(None, (0.0, 1.0), 0)
    array = np.array(values, float)
    low, high = np.percentile(array[_drawn(len(array))].mean(axis=1), (2.5, 97.5))
    return _figure(float(array.mean()), (float(low), float(high)), len(values))


def auroc(scores: Sequence[float], positive: Sequence[bool]) -> float | None:
    """Probability that a positive scores above a negative, ties count half; None without both."""
    values, truth = np.asarray(scores, float), np.asarray(positive, bool)
    count = int(truth.sum())
    if not 0 < count < len(truth):
        return None
    _, place, times = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(times) - (times - 1) / 2)[place]
    above = float(ranks[truth].sum()) - count * (count + 1) / 2
    return above / (count * (len(truth) - count))


def calibration_error(probabilities: Sequence[float], right: Sequence[bool]) -> float | None:
    """Expected calibration error: ten equal bins, |mean probability - share right| by bin size."""
    if not probabilities:
        return None
    values, hits = np.asarray(probabilities, float), np.asarray(right, float)
    number = np.minimum((values * _BINS).astype(int), _BINS - 1)
    total = 0.0
    for k in range(_BINS):
        own = number == k
        if own.any():
            total += own.sum() * abs(float(values[own].mean()) - float(hits[own].mean()))
    return total / len(values)


def statistic(
    pairs: Sequence[tuple[float, float]],
    function: Callable[[Sequence[float], Sequence[float]], float | None],
) -> dict[str, Any]:
    """A figure of paired values, one pair a case, with a bootstrap interval."""
    value = function([a for a, _ in pairs], [b for _, b in pairs]) if pairs else None
    if value is None:
        return _figure(None, (0.0, 1.0), len(pairs))
    array = np.array(pairs, float)
    found = [function(array[i, 0].tolist(), array[i, 1].tolist()) for i in _drawn(len(array), 500)]
    low, high = np.percentile([item for item in found if item is not None], (2.5, 97.5))
    return _figure(value, (float(low), float(high)), len(pairs))


def letters_right(row: Row) -> bool:
    """Exactly the wrong part is objected to, or none where none is wrong.

    Of several right answers (alike parts, one too many) one must be objected to; of several wrong
    parts at most as many as there are, and no other.
    """
    truth = row.answers_true or ()
    if truth == (tasks.NONE,):
        return row.answer == tasks.NONE
    most = max(1, row.violations_true or 1)
    return 0 < len(row.letters) <= most and set(row.letters) <= set(truth)


def decision_right(row: Row) -> bool:
    """The letters are right and, where the truth says what is missing, exactly that is."""
    if not letters_right(row):
        return False
    return row.missing_true is None or sorted(row.missing or ()) == sorted(row.missing_true)


def grid_counts(row: Row) -> tuple[int, int, int]:
    """(hits, false cells, missed cells) over the 3 x 16 x 16 cells of all views."""
    found, truth = set(row.cells or ()), set(row.cells_true or ())
    return len(found & truth), len(found - truth), len(truth - found)


def iou(found: Sequence[Cell], truth: Sequence[Cell]) -> float:
    """Over the 3 x 16 x 16 cells of one part; 1 when both are empty."""
    union = set(found) | set(truth)
    return len(set(found) & set(truth)) / len(union) if union else 1.0


def figures(rows: Sequence[Row], defect_fail: float) -> dict[str, Any]:
    """All figures by task. `defect_fail`: the bundle's probability from which a surface fails."""
    out: dict[str, Any] = {}
    for task in dict.fromkeys(row.task for row in rows):
        own = [row for row in rows if row.task == task]
        common = _common(own)
        special = _surface(own, defect_fail) if task == "surface" else _marks(own)
        out[task] = {**common, **special, **_latency(own)}
    return out


def _common(rows: Sequence[Row]) -> dict[str, Any]:
    judged = [row for row in rows if row.expected is not None]
    good = [row for row in judged if row.expected == "PASS"]
    bad = [row for row in judged if row.expected == "FAIL"]
    counted = [row for row in rows if row.parts_true is not None]
    outcomes = Counter(row.outcome for row in rows)
    return {
        "cases": len(rows),
        "bad_files": sum(bool(row.error) for row in rows),
        "outcomes": {name: outcomes[name] for name in ("PASS", "FAIL", "UNSURE", "ERROR")},
        "count_right": share([row.parts_seen == row.parts_true for row in counted]),
        "pass_fail_right": share([row.outcome == row.expected for row in judged]),
        "overkill": share([row.outcome == "FAIL" for row in good]),
        "escape": share([row.outcome == "PASS" for row in bad]),
        "unsure": share([row.outcome == "UNSURE" for row in rows]),
        "unsure_of_good": share([row.outcome == "UNSURE" for row in good]),
        "unsure_of_bad": share([row.outcome == "UNSURE" for row in bad]),
        "baseline_pass_fail_always_pass": _part(len(good), len(judged)),
        "baseline_pass_fail_majority": _part(max(len(good), len(bad)), len(judged)),
    }


def _marks(rows: Sequence[Row]) -> dict[str, Any]:
    read = [row for row in rows if row.marks]
    sizes = [len(row.marks) for row in read]

    def per_mark(right: Callable[[MarkRow], bool]) -> dict[str, Any]:
        return pooled([sum(map(right, row.marks)) for row in read], sizes)

    told = [row for row in rows if row.answers_true is not None]
    truth = [row.answers_true or () for row in told]
    marks = [mark for row in rows for mark in row.marks if mark.read]
    scored = [
        (row.score, float(row.violations_true))
        for row in rows
        if row.score is not None and row.violations_true is not None
    ]
    none = sum(answers == (tasks.NONE,) for answers in truth)
    single = Counter(answers[0] for answers in truth if len(answers) == 1)
    options = [max(row.parts_true or row.parts_seen or 1, 1) + 1 for row in told]
    chance = [len(a) / n for a, n in zip(truth, options, strict=True)]
    hits = [mark.read == mark.true for mark in marks]
    return {
        "reading": per_mark(lambda mark: mark.read == mark.true),
        "reading_workpiece": per_mark(lambda mark: _word(mark.read, 0) == _word(mark.true, 0)),
        "reading_model_number": per_mark(lambda mark: _word(mark.read, 1) == _word(mark.true, 1)),
        "reading_picture_alone": per_mark(lambda mark: mark.picture == mark.true),
        "reading_calibration_error": _rounded(
            calibration_error([mark.probability for mark in marks], hits)
        ),
        "decision": share([decision_right(row) for row in told]),
        "letter": share([letters_right(row) for row in told]),
        "letter_direct": share([row.direct in (row.answers_true or ()) for row in told]),
        "missing": share(
            [
                sorted(row.missing or ()) == sorted(row.missing_true) and row.missing is not None
                for row in rows
                if row.missing_true is not None
            ]
        ),
        "conformity_srcc": statistic([(-v, s) for s, v in scored], rank_correlation),
        "baseline_reading_nearest_size": per_mark(lambda mark: mark.nearest == mark.true),
        "baseline_letter_nearest_size": share(
            [row.gauge_answer in (row.answers_true or ()) for row in told]
        ),
        "baseline_letter_always_none": _part(none, len(told)),
        "baseline_letter_majority": _part(max(single.values(), default=0), len(told)),
        "baseline_letter_random": _rounded(sum(chance) / len(chance) if chance else None),
    }


def _surface(rows: Sequence[Row], defect_fail: float) -> dict[str, Any]:
    told = [row for row in rows if row.defect_true is not None]
    classes = Counter(row.defect_true for row in told)
    odds = [
        (p, float(row.defect_true != tasks.NORMAL))
        for row in told
        if (p := row.defect_probability) is not None
    ]
    gridded = [row for row in rows if row.cells_true is not None]
    marked = [row for row in gridded if row.cells_true]
    clean = [row for row in gridded if not row.cells_true]
    counts = [grid_counts(row) for row in gridded]
    scored = [
        (row.score, row.score_true)
        for row in rows
        if row.score is not None and row.score_true is not None
    ]
    best = [max(row.probabilities.values()) for row in told if row.probabilities]
    hits = [row.defect == row.defect_true for row in told if row.probabilities]
    out: dict[str, Any] = {
        "five_class": share([row.defect == row.defect_true for row in told]),
        "binary": share([_binary(row.defect) == _binary(row.defect_true) for row in told]),
        "auroc": statistic(odds, lambda p, t: auroc(p, [value > 0.5 for value in t])),
        "clean_alarms": share([p >= defect_fail for p, defective in odds if not defective]),
        "defects_found": share([p >= defect_fail for p, defective in odds if defective]),
        "class_calibration_error": _rounded(calibration_error(best, hits)),
    }
    for name in tasks.SURFACE_CLASSES:
        own = [row.defect == name for row in told if row.defect_true == name]
        out[f"recall_{name}"] = share(own)
    hit, false, missed = (sum(item[k] for item in counts) for k in range(3))
    out |= {
        "grid_iou": mean([iou(row.cells or (), row.cells_true or ()) for row in marked]),
        "grid_f1": pooled(
            [2 * h for h, _, _ in counts], [2 * h + f + m for h, f, m in counts], len(counts)
        ),
        "grid_precision": _part(hit, hit + false),
        "grid_recall": _part(hit, hit + missed),
        "grid_clean_alarms": share([bool(row.cells) for row in clean]),
        "score_srcc": statistic(scored, rank_correlation),
        "baseline_five_class_always_normal": _part(classes[tasks.NORMAL], len(told)),
        "baseline_five_class_majority": _part(max(classes.values(), default=0), len(told)),
        "baseline_five_class_random": 1 / len(tasks.SURFACE_CLASSES),
        "baseline_auroc_random": 0.5,
        "baseline_grid_iou_whole_part": _rounded(
            float(np.mean([iou(row.cells_part, row.cells_true or ()) for row in marked]))
            if marked
            else None
        ),
    }
    return out


def _binary(name: str | None) -> str:
    """normal, defective, or "" where no class was read."""
    return "defective" if name in tasks.DEFECT_CLASSES else name or ""


def _latency(rows: Sequence[Row]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in ("model_ms", "total_ms"):
        values = sorted(v for row in rows if (v := getattr(row, name)) is not None)
        if values:
            found = {"p50": percentile(values, 50), "p95": percentile(values, 95)}
            out[f"latency_{name}"] = {key: round(value, 2) for key, value in found.items()}
    return out


def _drawn(count: int, resamples: int = RESAMPLES) -> NDArray[np.int64]:
    """Indices [resamples, count] of cases drawn with replacement; the same on every call."""
    return np.random.default_rng(0).integers(0, count, (resamples, count))


def _figure(value: float | None, interval: tuple[float, float], count: int) -> dict[str, Any]:
    if value is None:
        return {"value": None, "interval": None, "n": count}
    low, high = (round(x, 4) for x in interval)
    return {"value": round(value, 4), "interval": [low, high], "n": count}


def _part(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _word(part: str, place: int) -> str:
    return ([*part.split(" "), "", ""])[place]
