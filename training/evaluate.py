"""Run case files through the station's own code and print how well a bundle does.

    python -m training.evaluate --bundle station_config/demo/bundle --cases .work/cases
    python -m training.evaluate --bundle B --cases DIR --out rows.jsonl --figures figures.json

Every case takes the path of the station: separation, gate, views, model, specification. Writes one
JSON row a case, prints a table a task with 95 % intervals and trivial baselines, and as the last
line one JSON object of all figures (also written to --figures, for `export.bundle --evaluation`).
A case that cannot be used gives one message and counts as ERROR. CASES.md describes the files.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from forge_station import checks, pipeline
from forge_station.checks import MarksRead, SurfaceRead
from forge_station.contract import grid as grids
from forge_station.contract import record, spec, tasks
from forge_station.contract.spec import Product, Reading
from forge_station.contract.verdict import CheckResult, PartReading, combine
from forge_station.contract.views import MARKS, VIEWS, Layout
from forge_station.errors import InputError, StationError
from forge_station.geometry import gauge, sheet, view_images
from forge_station.geometry.gauge import Size
from forge_station.geometry.pose import PartCloud
from forge_station.opening import open_inspector
from forge_station.pipeline import Inspector, Job
from forge_station.timing import Stopwatch
from training.evaluation import case_input, report, scoring
from training.evaluation.case_files import BadCase, Case, read_cases
from training.evaluation.case_input import Seen
from training.evaluation.scoring import Cell, MarkRow, Row
from training.evaluation.truth import defect_flags, surface_truth, wrong

_MODEL_STAGES = ("read", "judge", "surface")
# What a damaged or absurd file can raise beyond the station's own errors.
_BAD_DATA = (ValueError, ArithmeticError, LookupError, MemoryError, cv2.error)


@dataclass(frozen=True)
class Settings:
    """How answers are taken. `strict_first_letter`: the published protocol, holes included."""

    folder: Path
    strict_first_letter: bool = False
    request: str = "joint"
    """The VIEScore2 request of surface cases: score, grid or joint."""


def run_case(inspector: Inspector, case: Case | BadCase, settings: Settings) -> Row:
    """One case to one row. Never raises for what is wrong with the case or its files."""
    if isinstance(case, BadCase):
        return Row(case.id, case.task, "", "ERROR", reasons=("INPUT_WRONG",), error=case.message)
    try:
        seen = case_input.look(case, settings.folder, inspector.layout)
        row = _blank(case)
        if case.task == "surface":
            return _surface_row(inspector, case, seen, row, settings)
        return _marks_row(inspector, case, seen, row, settings)
    except StationError as error:
        return _failed(case, error.code, str(error))
    except _BAD_DATA as error:
        return _failed(case, "INPUT_WRONG", f"{type(error).__name__}: {error}")


def _product(case: Case) -> Product:
    if case.product is None:
        raise InputError("the case has no product", which=case.id)
    return case.product


def _blank(case: Case) -> Row:
    """The row of a case of which nothing is known yet but the truth."""
    truth = case.truth
    return Row(
        id=case.id,
        task=case.task,
        setting=case.setting,
        outcome="ERROR",
        expected=truth.expected,
        source=case.input.source,
        parts_true=len(truth.readings) or None,
        # On a surface case the part number is given, so its reading is no result.
        marks=()
        if case.task == "surface"
        else tuple(MarkRow(mark, part) for mark, part in sorted(truth.readings.items())),
        answers_true=None if case.task == "surface" else truth.answers,
        missing_true=truth.missing if case.task == "assembly" else None,
        violations_true=truth.violations,
        defect_true=truth.defect,
        score_true=truth.score,
        families=_families(case),
        rules=_rules(case.product),
    )


def _families(case: Case) -> tuple[str, ...]:
    """Workpieces that are asked for; of a batch without parts those that lie on the tray."""
    asked = case.product.parts if case.product is not None else {}
    named = asked or case.truth.readings.values()
    return tuple(sorted({part.partition(" ")[0] for part in named}))


def _rules(product: Product | None) -> dict[str, float]:
    limits = record.write(product.rules) if product is not None else {}
    return {name: limit for name, limit in limits.items() if limit is not None}


def _failed(case: Case, code: str, text: str) -> Row:
    message = f"case {case.id}, input.{case.input.source}: {text}"
    return replace(_blank(case), reasons=(code,), error=message)


def _marks_row(inspector: Inspector, case: Case, seen: Seen, row: Row, settings: Settings) -> Row:
    product, watch = _product(case), Stopwatch()
    job = Job(case.id, case.id, product, serial_source="none", source=seen.summary.source)
    found = inspector.inspect_parts(job, seen.parts, seen.summary, seen.problems, watch)
    readings, direct = found.verdict.parts, ""
    alone = _picture_alone(inspector, seen.parts) if readings else {}
    result = found.verdict.check("assembly" if product.kind == "assembly" else "workpiece")
    score = None if result is None else result.score
    if result is not None:
        direct = result.answer or ""
    if seen.pictures is not None:
        readings, alone, direct, score = _read_pictures(inspector, seen.pictures, product, watch)
    timings = watch.timings_ms()
    row = replace(
        row,
        outcome=found.verdict.outcome.value,
        reasons=_codes(reason.code for reason in found.verdict.reasons),
        parts_seen=len(readings) if seen.pictures is not None else len(seen.parts),
        marks=_mark_rows(row.marks, readings, alone),
        missing=_missing(product, readings),
        score=score,
        model_ms=_model_ms(timings),
        total_ms=timings["total"],
        log_odds=_log_odds(found.verdict.checks),
    )
    if not readings:
        return replace(row, missing=None)
    by_mark = {part.mark: (part.part, part.probability) for part in readings}
    letters, answer = judged(product, by_mark)
    by_size = {part.mark: (_nearest(part.size_mm), 1.0) for part in readings}
    if settings.strict_first_letter:
        options = [*sorted(by_size), tasks.NONE]
        direct = tasks.parse_letter(direct, options, strict_first_letter=True)
    return replace(
        row,
        letters=letters,
        answer=answer,
        direct=direct,
        gauge_answer=judged(product, by_size)[1],
    )


def judged(
    product: Product, readings: Mapping[str, tuple[str, float]]
) -> tuple[tuple[str, ...], str]:
    """What the specification makes of readings: (marks objected to, letter, "none" or "").

    No answer where no part is in the majority, or where the number of pieces is wrong.
    """
    judgement = spec.evaluate(product, {m: Reading(*item) for m, item in readings.items()})
    if judgement.marks:
        return judgement.marks, judgement.marks[0]
    open_ends = [item for item in judgement.violations if item.code != "MISSING_PART"]
    return (), "" if open_ends else tasks.NONE


def _missing(product: Product, readings: Sequence[PartReading]) -> tuple[str, ...]:
    return wrong(product.parts, {part.mark: part.part for part in readings}).missing


def _mark_rows(
    truth: Sequence[MarkRow], readings: Sequence[PartReading], alone: Mapping[str, str]
) -> tuple[MarkRow, ...]:
    """Readings beside the truth of the same mark; marks that do not exist are left out."""
    read = {part.mark: part for part in readings}
    rows = []
    for row in truth:
        part = read.get(row.mark)
        if part is not None:
            row = replace(
                row,
                read=part.part,
                probability=part.probability,
                picture=alone.get(row.mark, ""),
                nearest=_nearest(part.size_mm),
            )
        rows.append(row)
    return tuple(rows)


def _picture_alone(inspector: Inspector, parts: Sequence[PartCloud]) -> dict[str, str]:
    """Mark -> what the model reads before the measured size is weighed in (not timed)."""
    columns = checks.columns_of(len(parts), inspector.layout)
    picture = sheet.marks_sheet([part.points for part in parts], columns, inspector.layout)
    return _likeliest(checks.read_marks(inspector.model, picture, checks.measured(parts), {}))


def _likeliest(read: MarksRead) -> dict[str, str]:
    return {mark: max(odds, key=lambda part: odds[part]) for mark, odds in read.seen.items()}


def _nearest(box: tuple[float, float, float] | None) -> str:
    """The part whose rest box is nearest to a measured (length, width, height), mm."""
    if box is None or not any(box):
        return ""
    names, middles = _rest_boxes()
    return names[int(np.argmin(np.linalg.norm(middles - np.array(box), axis=1)))]


@lru_cache(maxsize=1)
def _rest_boxes() -> tuple[list[str], NDArray[np.float64]]:
    table = gauge.rest_boxes()
    names = [name for name, rows in table.items() for _ in rows]
    rows = np.concatenate(list(table.values()))
    return names, (rows[:, 0::2] + rows[:, 1::2]) / 2


def _read_pictures(
    inspector: Inspector, pictures: case_input.Pictures, product: Product, watch: Stopwatch
) -> tuple[tuple[PartReading, ...], dict[str, str], str, float | None]:
    """Readings, those of the picture alone, direct letter and conformity score, without a cloud."""
    with watch.stage("read"):
        read = checks.read_marks(inspector.model, pictures.marks, pictures.sizes, {})
    if product.kind == "single":
        return read.parts, _likeliest(read), "", None
    with watch.stage("judge"):
        opinion = checks.judge_marks(inspector.model, read, product)
    score = opinion.score if product.kind == "assembly" else None
    return read.parts, _likeliest(read), opinion.letter, score


def _surface_row(inspector: Inspector, case: Case, seen: Seen, row: Row, settings: Settings) -> Row:
    """The surface check with the part number known and the grid always decoded."""
    product, watch = _product(case), Stopwatch()
    gate = pipeline.gate_result(seen.problems)
    row = replace(row, parts_seen=1 if seen.pictures is not None else len(seen.parts))
    stopped = any(problem.level == "ERROR" for problem in seen.problems)
    if stopped or (seen.pictures is None and not seen.parts):
        outcome, reasons = combine(("surface",), [gate])
        codes = _codes(reason.code for reason in reasons)
        return replace(row, outcome=outcome.value, reasons=codes)
    part = max(seen.parts, key=lambda item: len(item.points)) if seen.parts else None
    with watch.stage("views"):
        if part is not None:
            picture, _ = sheet.surface_picture(part.points, inspector.layout)
            size = gauge.measure(part)
        else:
            picture, size = _surface_of(seen)
    with watch.stage("surface"):
        read = checks.read_surface(
            inspector.model,
            picture,
            MARKS[0],
            product.part or "",
            size,
            inspector.thresholds,
            inspector.time_budget_s,
            always_grid=True,
            request=settings.request,
        )
    result = checks.surface_result([read], product, inspector.thresholds)
    outcome, reasons = combine(("surface",), [gate, result])
    timings = watch.timings_ms()
    truth, whole = _true_cells(case, seen, part, settings.folder, inspector.layout)
    return replace(
        row,
        outcome=outcome.value,
        reasons=_codes(reason.code for reason in reasons),
        defect=read.reading.defect_class,
        probabilities={name: round(p, 5) for name, p in read.probabilities.items()},
        score=read.reading.score,
        cells=_cells_read(read),
        cells_true=truth,
        cells_part=whole if truth else (),
        model_ms=_model_ms(timings),
        total_ms=timings["total"],
        log_odds=_log_odds([result]),
    )


def _surface_of(seen: Seen) -> tuple[sheet.Sheet, Size]:
    if seen.pictures is None:
        raise InputError("a surface case needs a part", got="none")
    return seen.pictures.surface, seen.pictures.sizes[MARKS[0]]


def _cells_read(read: SurfaceRead) -> tuple[Cell, ...]:
    return tuple(
        (VIEWS.index(grid.view), row, column) for grid in read.grids for row, column in grid.cells
    )


def _true_cells(
    case: Case, seen: Seen, part: PartCloud | None, folder: Path, layout: Layout
) -> tuple[tuple[Cell, ...] | None, tuple[Cell, ...]]:
    """(defective cells or None where they are not told, all cells of the part)."""
    truth = case.truth
    if part is not None:
        flags = np.zeros(len(part.points), np.float32)
        if truth.points is not None:
            flags = _flags(folder / truth.points, seen, part)
        found = surface_truth(part, flags)
        whole = _listed(found.filled)
        if truth.points is not None:
            return _listed(found.cells), whole
    else:
        whole = ()
    if truth.masks is not None:
        return _masked(truth.masks, seen, folder, layout), whole
    if truth.grids is not None:
        cells = tuple(
            (VIEWS.index(view), row, column)
            for view, listed in truth.grids.items()
            for row, column in listed
        )
        return cells, whole
    return (() if truth.defect == tasks.NORMAL else None), whole


def _flags(path: Path, seen: Seen, part: PartCloud) -> NDArray[np.float32]:
    where = f"truth.points: {path}, array defect"
    if seen.cloud is None:
        raise InputError("defective points need a scene in the tray frame", which=where)
    try:
        with np.load(path, allow_pickle=False) as stored:
            defect = np.asarray(stored["defect"], bool).ravel()
    except (OSError, KeyError, ValueError) as error:
        raise InputError("defective points cannot be read", which=where, got=error) from error
    if len(defect) != len(seen.cloud.points):
        raise InputError(
            "not one flag for every point of the scene",
            which=where,
            expected=f"bool [{len(seen.cloud.points)}]",
            got=f"[{len(defect)}]",
        )
    return defect_flags(part, seen.cloud.points, defect)


def _masked(masks: Mapping[str, str], seen: Seen, folder: Path, layout: Layout) -> tuple[Cell, ...]:
    """Cells of masks that have the size of their views; they are placed as the views are."""
    views = seen.views.get(MARKS[0])
    if views is None:
        raise InputError("masks need views", which="truth.masks", expected="input.views")
    placed = np.zeros((len(VIEWS), grids.SIDE, grids.SIDE), bool)
    for view, name in masks.items():
        path = folder / name
        mask = view_images.read_image(path) > 0
        if mask.shape != views[view].shape:
            raise InputError(
                "mask and view differ in size",
                which=f"truth.masks.{view}: {path}",
                expected=f"{views[view].shape[1]}x{views[view].shape[0]}",
                got=f"{mask.shape[1]}x{mask.shape[0]}",
            )
        # Drawn as the view is, but bright where the mask is: the same box, the same place.
        grey = np.where(views[view] > 0, np.where(mask, 255, 1), 0).astype(np.uint8)
        drawn = view_images.surface_picture({**views, view: grey}, 1.0, layout)
        index = VIEWS.index(view)
        panel = drawn.image[:, index * layout.panel : (index + 1) * layout.panel, 0]
        placed[index] = grids.from_mask(panel > 127).cells
    return _listed(placed)


def _listed(cells: NDArray[np.bool_]) -> tuple[Cell, ...]:
    return tuple((int(v), int(r), int(c)) for v, r, c in np.argwhere(cells))


def _codes(codes: Iterator[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(codes))


def _log_odds(results: Sequence[CheckResult]) -> dict[str, float]:
    return {item.check: item.log_odds for item in results if item.log_odds is not None}


def _model_ms(timings: Mapping[str, float]) -> float | None:
    spent = [timings[stage] for stage in _MODEL_STAGES if stage in timings]
    return round(sum(spent), 2) if spent else None


def selected(cases: Sequence[Case | BadCase], limit: int | None) -> list[Case | BadCase]:
    """At most `limit` cases of every task, in file order."""
    taken: Counter[str] = Counter()
    chosen = []
    for case in cases:
        taken[case.task] += 1
        if limit is None or taken[case.task] <= limit:
            chosen.append(case)
    return chosen


def evaluate(
    inspector: Inspector,
    cases: Sequence[Case | BadCase],
    settings: Settings,
    out: Path,
    *,
    quiet: bool = False,
) -> list[Row]:
    """Run the cases; every row is written to `out` as soon as it is there."""
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    with out.open("w", encoding="utf-8") as file:
        for case in tqdm(cases, desc="evaluate", unit="case", disable=quiet):
            row = run_case(inspector, case, settings)
            if row.error:
                tqdm.write(f"ERROR {row.error}", file=sys.stderr)
            file.write(json.dumps(record.write(row), ensure_ascii=False) + "\n")
            file.flush()
            rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, required=True, help="bundle folder")
    parser.add_argument("--cases", type=Path, required=True, help="folder with cases.jsonl")
    parser.add_argument(
        "--out", type=Path, default=Path("out/evaluation.jsonl"), help="rows, one a case"
    )
    parser.add_argument("--figures", type=Path, help="also write the JSON of the last line here")
    parser.add_argument("--threads", type=int, default=1, help="of ONNX Runtime")
    parser.add_argument("--limit", type=int, help="at most so many cases a task")
    parser.add_argument(
        "--request",
        choices=tasks.REQUESTS,
        default="joint",
        help="what surface cases are asked: score, grid or both (default joint)",
    )
    parser.add_argument(
        "--strict-first-letter",
        action="store_true",
        help="take the first capital letter of the direct answer, as published",
    )
    args = parser.parse_args()
    cv2.setNumThreads(max(1, args.threads))
    try:
        cases = selected(read_cases(args.cases), args.limit)
        inspector = open_inspector(args.bundle, threads=args.threads, checks_alone=True)
    except StationError as error:
        print(f"training.evaluate: {error}", file=sys.stderr)
        return 1
    with inspector.model as model:
        settings = Settings(args.cases, args.strict_first_letter, args.request)
        rows = evaluate(inspector, cases, settings, args.out)
        manifest = model.manifest
        head = {
            "bundle": f"{manifest.name} {manifest.version}",
            "bundle_sha256": manifest.sha256,
            "precision": manifest.precision,
            "provider": model.provider,
            "cases": str(args.cases),
        }
    figures = {**head, **scoring.figures(rows, inspector.thresholds.defect_fail)}
    print(report.table(figures))
    line = json.dumps(figures)
    if args.figures is not None:
        args.figures.parent.mkdir(parents=True, exist_ok=True)
        args.figures.write_text(f"{line}\n", encoding="utf-8")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
