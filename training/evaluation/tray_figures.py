"""Figures of trays: workpiece and assembly. Measures of rows; no files, no model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forge_station.contract import tasks
from forge_station.contract.grid_metrics import rank_correlation
from training.evaluation import reliability
from training.evaluation.lookalikes import KINDS
from training.evaluation.measures import (
    Array,
    Items,
    Measure,
    pooled_of,
    ranking_of,
    share_of,
)
from training.evaluation.rows import MarkRow, Row
from training.evaluation.truth import FAULTS

UNREAD = "not read"


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
    return letters_right(row) and missing_right(row) is not False


def missing_right(row: Row) -> bool | None:
    """Exactly the missing parts are missing; None where the truth does not say."""
    if row.missing_true is None:
        return None
    return row.missing is not None and sorted(row.missing) == sorted(row.missing_true)


def _told(function: Callable[[Row], bool]) -> Callable[[Row], bool | None]:
    return lambda row: None if row.answers_true is None else function(row)


def _per_mark(name: str, right: Callable[[MarkRow], bool]) -> Measure:
    return pooled_of(
        name,
        lambda row: (sum(map(right, row.marks)), len(row.marks)) if row.marks else None,
    )


def _word(part: str, place: int) -> str:
    return ([*part.split(" "), "", ""])[place]


def _sure(row: Row) -> Items:
    """(probability of what was read, whether it is right) of every mark that was read."""
    return [(m.probability, float(m.read == m.true)) for m in row.marks if m.read]


def _pairs(function: Callable[[Array, Array], float | None]) -> Callable[[Array], float | None]:
    return lambda items: function(items[:, 0], items[:, 1])


def _conformity(row: Row) -> Items | None:
    if row.score is None or row.violations_true is None:
        return None
    return [(-float(row.violations_true), row.score)]


def _brier(items: Array) -> float | None:
    return reliability.brier(*map(reliability.two_sided, (items[:, 0], items[:, 1])))


def _brier_skill(items: Array) -> float | None:
    return reliability.brier_skill(*map(reliability.two_sided, (items[:, 0], items[:, 1])))


HEADLINE: tuple[Measure, ...] = (
    _per_mark("reading", lambda mark: mark.read == mark.true),
    _per_mark("reading_workpiece", lambda mark: _word(mark.read, 0) == _word(mark.true, 0)),
    _per_mark("reading_model_number", lambda mark: _word(mark.read, 1) == _word(mark.true, 1)),
    _per_mark("reading_picture_alone", lambda mark: mark.picture == mark.true),
    share_of(
        "all_marks",
        lambda row: all(m.read == m.true for m in row.marks) if row.marks else None,
    ),
    share_of("decision", _told(decision_right)),
    share_of("letter", _told(letters_right)),
    share_of("letter_direct", _told(lambda row: row.direct in (row.answers_true or ()))),
    share_of("missing", missing_right),
)
"""Shown for all cases and again for each of their subsets."""

MEASURES: tuple[Measure, ...] = (
    *HEADLINE,
    ranking_of(
        "conformity_srcc",
        _conformity,
        _pairs(lambda v, s: rank_correlation(v.tolist(), s.tolist())),
    ),
    ranking_of("reading_ece_equal_mass", _sure, _pairs(reliability.equal_mass_error), lower=True),
    ranking_of("reading_ece2_debiased", _sure, _pairs(reliability.debiased_error), lower=True),
    ranking_of("reading_brier", _sure, _brier, lower=True),
    ranking_of("reading_brier_skill", _sure, _brier_skill),
    _per_mark("baseline_reading_nearest_size", lambda mark: mark.nearest == mark.true),
    share_of(
        "baseline_letter_nearest_size",
        _told(lambda row: row.gauge_answer in (row.answers_true or ())),
    ),
)


def single_missing(row: Row) -> bool:
    """Exactly one part is absent and none is wrong: the missing-part question."""
    return row.fault == "missing" and len(row.missing_true or ()) == 1


MISSING_PART: tuple[Measure, ...] = (
    share_of("missing_part", lambda row: missing_right(row) if single_missing(row) else None),
    share_of(
        "missing_part_direct",
        lambda row: (
            (row.missing_direct,) == row.missing_true
            if single_missing(row) and row.missing_direct is not None
            else None
        ),
    ),
)


def class_measures(name: str) -> tuple[Measure, Measure, Measure]:
    """Precision, recall and F1 of reading the workpiece `name`, marks pooled."""

    def counts(row: Row) -> tuple[int, int, int]:
        true = [_word(mark.true, 0) == name for mark in row.marks]
        read = [_word(mark.read, 0) == name for mark in row.marks]
        return sum(a and b for a, b in zip(true, read, strict=True)), sum(read), sum(true)

    def precision(row: Row) -> tuple[float, float]:
        both, read, _ = counts(row)
        return both, read

    def recall(row: Row) -> tuple[float, float]:
        both, _, true = counts(row)
        return both, true

    def f1(row: Row) -> tuple[float, float]:
        both, read, true = counts(row)
        return 2 * both, read + true

    return (
        pooled_of(f"precision_{name}", precision),
        pooled_of(f"recall_{name}", recall),
        pooled_of(f"f1_{name}", f1),
    )


def probe_measures(rows: Sequence[Row]) -> tuple[Measure, ...]:
    """The share of grounding questions answered right, by kind."""
    return tuple(map(_probed, sorted({probe.kind for row in rows for probe in row.probes})))


def _probed(kind: str) -> Measure:
    def hits(row: Row) -> tuple[float, float] | None:
        right = [probe.right for probe in row.probes if probe.kind == kind]
        return (sum(right), len(right)) if right else None

    return pooled_of(f"probe_{kind}", hits)


def baselines(rows: Sequence[Row]) -> dict[str, Any]:
    """What always saying none, the commonest letter and chance would reach."""
    told = [row for row in rows if row.answers_true is not None]
    truth = [row.answers_true or () for row in told]
    none = sum(answers == (tasks.NONE,) for answers in truth)
    single = Counter(answers[0] for answers in truth if len(answers) == 1)
    options = [max(row.parts_true or row.parts_seen or 1, 1) + 1 for row in told]
    chance = [len(a) / n for a, n in zip(truth, options, strict=True)]
    sure = [item for row in rows for item in _sure(row)]
    asked = [1 / row.missing_options for row in rows if single_missing(row) and row.missing_options]
    out: dict[str, Any] = {
        "reading_calibration_error": _rounded(
            reliability.calibration_error([p for p, _ in sure], [hit for _, hit in sure])
        ),
        "baseline_letter_always_none": _rounded(none / len(told) if told else None),
        "baseline_letter_majority": _rounded(
            max(single.values(), default=0) / len(told) if told else None
        ),
        "baseline_letter_random": _rounded(sum(chance) / len(chance) if chance else None),
    }
    if asked:
        out["baseline_missing_part_random"] = _rounded(sum(asked) / len(asked))
    return out


def detail(rows: Sequence[Row]) -> dict[str, Any]:
    """Classes, confusion, error levels, look-alikes, missing parts, calibration."""
    marks = [mark for row in rows for mark in row.marks]
    out: dict[str, Any] = {}
    if marks:
        names = sorted({_word(mark.true, 0) for mark in marks})
        out["classes"] = {
            name: {m.name.partition("_")[0]: m.figure(rows) for m in class_measures(name)}
            for name in names
        }
        out["confusion"] = confusion(
            [(_word(m.true, 0), _word(m.read, 0) or UNREAD) for m in marks], names
        )
    sure = [item for row in rows for item in _sure(row)]
    if sure:
        out["calibration"] = reliability.bins_of([p for p, _ in sure], [hit > 0 for _, hit in sure])
    right = [row for row in rows if row.answers_true == (tasks.NONE,) and not row.fault]
    levels = {"nothing wrong": right}
    levels |= {str(fault): [row for row in rows if row.fault == fault] for fault in FAULTS}
    out["faults"] = _blocks(levels)
    alike = {"all": [row for row in rows if row.lookalike]}
    alike |= {str(kind): [row for row in rows if row.lookalike == kind] for kind in KINDS}
    out["lookalikes"] = _blocks(alike)
    absent = [row for row in rows if single_missing(row)]
    if absent:
        kinds = sorted({_word((row.missing_true or ("",))[0], 0) for row in absent})
        out["missing_part"] = {
            "all": figures_of(MISSING_PART, absent),
            **{
                name: figures_of(
                    MISSING_PART,
                    [row for row in absent if _word((row.missing_true or ("",))[0], 0) == name],
                )
                for name in kinds
            },
        }
    probes = probe_measures(rows)
    if probes:
        out["probes"] = figures_of(probes, rows)
    return {name: value for name, value in out.items() if value}


def figures_of(measures: Sequence[Measure], rows: Sequence[Row]) -> dict[str, Any]:
    """The figures that have something to measure."""
    found = {measure.name: measure.figure(rows) for measure in measures}
    return {name: figure for name, figure in found.items() if figure["value"] is not None}


def _blocks(groups: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    return {
        name: {"cases": len(own), **figures_of(HEADLINE, own)}
        for name, own in groups.items()
        if own
    }


def confusion(pairs: Sequence[tuple[str, str]], order: Sequence[str]) -> dict[str, Any]:
    """Counts [truth][read]: rows as in `order`, columns the same and then what else was read."""
    read = [*order, *sorted({b for _, b in pairs} - set(order))]
    times = Counter(pairs)
    return {
        "truth": list(order),
        "read": read,
        "counts": [[times[a, b] for b in read] for a in order],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
