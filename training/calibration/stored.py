"""Stored, labelled parts of a station -> rows of an evaluation, as a bundle judges them.

Each part is judged again from its stored case (docs/EVIDENCE.md), which needs no camera.
Certificate and thresholds of the station do not count here, nor does a drift watch: rows are what
the bundle's checks say.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from forge_station.contract import record
from forge_station.contract.verdict import Verdict
from forge_station.errors import StationError
from forge_station.evidence import rejudge
from forge_station.opening import open_inspector
from forge_station.pipeline import Inspector
from training.evaluation.rows import Row
from training.loop.labelled import Told

SIMULATED = "simulated"


@dataclass(frozen=True)
class Judged:
    """Rows of labelled parts, and how many parts could not be judged, by reason."""

    rows: tuple[Row, ...]
    left_out: Mapping[str, int]


@contextmanager
def judge(bundle: Path, threads: int = 1) -> Iterator[Inspector]:
    """The bundle, judged by its checks alone."""
    inspector = open_inspector(bundle, threads=threads, checks_alone=True)
    with inspector.model:
        yield inspector


def rows_of(told: Sequence[Told], inspector: Inspector, *, quiet: bool = False) -> Judged:
    """One row a labelled inspection. A part whose case was not kept is left out and counted."""
    rows: list[Row] = []
    left_out: Counter[str] = Counter()
    for one in tqdm(told, unit="part", desc="labelled parts", disable=quiet, mininterval=2):
        if one.label.mark is not None and len(one.seen.verdict.parts) > 1:
            left_out["one part of a tray, which has a verdict as a whole"] += 1
            continue
        try:
            stored = rejudge.load(one.file)
        except StationError:
            left_out["its case was not kept"] += 1
            continue
        verdict = rejudge.by_another(stored, replace(inspector, time_budget_s=math.inf))
        rows.append(row_of(one, verdict, stored))
    return Judged(tuple(rows), dict(left_out))


def row_of(one: Told, verdict: Verdict, stored: rejudge.StoredPart) -> Row:
    """The row of a verdict whose truth is a label. Its task is the check that the truth is about:
    the surface where it was inspected and nobody named wrong parts, else the marks."""
    product = stored.case.job.product
    checks = {result.check: result for result in verdict.checks}
    marks = "assembly" if product is not None and product.kind == "assembly" else "workpiece"
    wrong = one.label.label == "NG" and one.label.defect is None
    task = "surface" if "surface" in checks and not wrong else marks
    surface = verdict.surface[0] if verdict.surface else None
    named = product.parts if product is not None and product.parts else {}
    return Row(
        id=verdict.result_id,
        task=task,
        setting="stored",
        outcome=verdict.outcome.value,
        expected="PASS" if one.label.label == "OK" else "FAIL",
        reasons=tuple(dict.fromkeys(reason.code for reason in verdict.reasons)),
        defect="" if surface is None else surface.defect_class,
        defect_true=(one.label.defect or "normal") if task == "surface" else None,
        probabilities=dict(surface.probabilities) if surface is not None else {},
        log_odds={name: one.log_odds for name, one in checks.items() if one.log_odds is not None},
        families=tuple(sorted({part.partition(" ")[0] for part in named})),
        rules={
            name: limit
            for name, limit in (record.write(product.rules) if product else {}).items()
            if limit is not None
        },
        part=one.part,
        provenance=SIMULATED if stored.case.job.simulated else one.origin,
    )
