"""Cases through the station's own code: separation, gate, views, model, specification.

One case to one row, never raising for what is wrong with the case or its files. Knows the station
and cases; prints nothing, writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station import checks, pipeline
from forge_station.checks import MarksRead, SurfaceRead
from forge_station.contract import spec, tasks
from forge_station.contract.spec import Product, Reading
from forge_station.contract.verdict import CheckResult, PartReading, Reason, combine
from forge_station.contract.views import DIFFERENCE, LARGE_LAYOUT, MARKS
from forge_station.errors import InputError, StationError
from forge_station.geometry import gauge, reference, reference_io, sheet, surface
from forge_station.geometry.gauge import Size
from forge_station.geometry.pose import PartCloud
from forge_station.geometry.reference import Reference
from forge_station.geometry.surface import Surface
from forge_station.opening import open_inspector
from forge_station.pipeline import Inspector, Job
from forge_station.sim.references import CadReferences
from forge_station.timing import Stopwatch
from forge_station.vlm.grid_readout import Readout
from training.evaluation import by_photo, case_input, probes
from training.evaluation.case_files import BadCase, Case, CaseInput, Setting
from training.evaluation.case_input import NO_SIZE, Pictures, Seen
from training.evaluation.case_row import bad_row, blank_row, failed_row, product_of
from training.evaluation.cells import true_cells
from training.evaluation.rows import CELL_VIEWS, Cell, MarkRow, Row
from training.evaluation.truth import wrong

_MODEL_STAGES = ("read", "judge", "surface")
BUNDLE, CAD, WITHOUT = "bundle", "cad", "none"
# What a damaged or absurd file can raise beyond the station's own errors.
BAD_DATA = (ValueError, ArithmeticError, LookupError, MemoryError, cv2.error)


@dataclass(frozen=True)
class Settings:
    """How answers are taken. `strict_first_letter`: the published protocol, holes included."""

    folder: Path
    strict_first_letter: bool = False
    request: str = "joint"
    """The VIEScore2 request of surface cases: score, grid or joint."""
    setting: Setting | None = None
    """None: each case's own."""
    sizes: bool = True
    """False: measured sizes are neither in the prompt nor weighed in."""
    probes: bool = False
    """Ask the grounding questions as well."""
    references: str = BUNDLE
    """Where the references of surfaces come from, for a bundle that is shown the difference from
    them: `bundle`, `cad` (the catalogue's modelled shapes), `none`, or a file of references."""
    thresholds: tuple[tuple[str, float], ...] = ()
    """Operating points in place of the bundle's."""
    grid: Readout = "rows"
    """How the defect grid is read."""


def opened(bundle: Path, threads: int, settings: Settings) -> Inspector:
    """The bundle as the station would open it, but judged by its checks alone."""
    own = dict(settings.thresholds)
    inspector = open_inspector(
        bundle, threads=threads, checks_alone=True, overrides=own, grid=settings.grid
    )
    if settings.setting == "zero-shot" or settings.references == WITHOUT:
        return replace(inspector, references={})
    if settings.references == CAD:
        return replace(inspector, references=CadReferences())
    if settings.references != BUNDLE:
        return replace(inspector, references=reference_io.load(Path(settings.references)))
    return inspector


def refuse(inspector: Inspector, settings: Settings, cases: Sequence[Case | BadCase]) -> None:
    """InputError for a setting that a station's model cannot be asked in."""
    asked = {settings.setting or case.setting for case in cases if isinstance(case, Case)}
    channels = inspector.model.manifest.surface_channels
    if "reference" in asked and not _differs(inspector):
        raise InputError(
            "this bundle cannot be evaluated with references",
            which="setting reference",
            expected=f"{DIFFERENCE} among the channels of its surface picture",
            got=", ".join(channels),
            action="train it with the reference channel, or ask in the setting zero-shot",
        )
    if "demonstration" in asked:
        raise InputError(
            "a bundle cannot be evaluated with solved examples",
            which="setting demonstration",
            expected="zero-shot or reference",
            got="demonstration",
            action="its model is given one picture a question and was never trained on several; "
            "ask a model behind --endpoint",
        )


def run_case(inspector: Inspector, case: Case | BadCase, settings: Settings) -> Row:
    """One case to one row. Never raises for what is wrong with the case or its files."""
    if isinstance(case, BadCase):
        return bad_row(case)
    # The model is shown one picture: only a surface can stand beside its reference, see below.
    setting = "zero-shot"
    try:
        limit = inspector.thresholds.defect_fail if case.task == "surface" else None
        row = replace(blank_row(case, setting), sizes=settings.sizes, defect_fail=limit)
        _check_class(inspector, case)
        if case.input.photo and inspector.model.manifest.photo is not None:
            return by_photo.run(inspector, case, row, settings.folder, settings.request)
        seen = case_input.look(case, settings.folder, inspector.layout)
        if case.task == "surface":
            return _surface_row(inspector, case, seen, row, settings)
        return _marks_row(inspector, case, seen, row, settings)
    except StationError as error:
        return failed_row(case, error.code, str(error), setting)
    except BAD_DATA as error:
        return failed_row(case, "INPUT_WRONG", f"{type(error).__name__}: {error}", setting)


def _check_class(inspector: Inspector, case: Case) -> None:
    known = inspector.model.manifest.vocabulary.classes
    if case.task == "surface" and case.truth.defect not in (None, *known):
        raise InputError(
            "the bundle does not know this class",
            which="truth.defect",
            expected=", ".join(known),
            got=case.truth.defect,
        )


def _marks_row(inspector: Inspector, case: Case, seen: Seen, row: Row, settings: Settings) -> Row:
    product, watch = product_of(case), Stopwatch()
    job = Job(case.id, case.id, product, serial_source="none", source=seen.summary.source)
    found = inspector.inspect_parts(job, seen.parts, seen.summary, seen.problems, watch)
    readings, direct, missing_direct = found.verdict.parts, "", None
    outcome, reasons = found.verdict.outcome.value, found.verdict.reasons
    result = found.verdict.check("assembly" if product.kind == "assembly" else "workpiece")
    score = None if result is None else result.score
    alone: dict[str, str] = {}
    if readings:
        alone, missing_direct = _picture_alone(inspector, seen.parts, product)
        direct = "" if result is None else result.answer or ""
    pictures = seen.pictures
    if pictures is None and readings and not settings.sizes:
        pictures = _without_sizes(inspector, seen.parts)
    if pictures is not None:
        watch = watch if seen.pictures is not None else Stopwatch()
        read, opinion = _read_pictures(inspector, pictures, product, watch)
        readings, alone = read.parts, _likeliest(read)
        direct, score = ("", None) if opinion is None else (opinion.letter, opinion.score)
        score = score if product.kind == "assembly" else None
        missing_direct = None if opinion is None else opinion.missing
        if seen.pictures is None:
            outcome, reasons = _outcome_of(inspector, read, pictures, product, seen)
    timings = watch.timings_ms()
    row = replace(
        row,
        outcome=outcome,
        reasons=codes_of(reason.code for reason in reasons),
        parts_seen=len(readings) if seen.pictures is not None else len(seen.parts),
        marks=_mark_rows(row.marks, readings, alone),
        missing=_missing(product, readings),
        score=score,
        model_ms=model_ms(timings),
        total_ms=timings["total"],
        log_odds=log_odds_of(found.verdict.checks),
    )
    if product.kind == "assembly" and missing_direct is not None:
        options = len(product.parts) + 1
        row = replace(row, missing_direct=missing_direct, missing_options=options)
    if not readings:
        return replace(row, missing=None)
    if settings.probes and len(seen.parts) > 1:
        row = replace(row, probes=probes.of_station(inspector, seen.parts, row.marks))
    by_mark = {part.mark: (part.part, part.probability) for part in readings}
    letters, answer = judged(product, by_mark)
    by_size = {part.mark: (_nearest(part.size_mm), 1.0) for part in readings}
    if settings.strict_first_letter:
        options_of = [*sorted(by_size), tasks.NONE]
        direct = tasks.parse_letter(direct, options_of, strict_first_letter=True)
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


def _picture_alone(
    inspector: Inspector, parts: Sequence[PartCloud], product: Product
) -> tuple[dict[str, str], str | None]:
    """Mark -> what the model reads before the measured size is weighed in; its own missing part.

    Not timed: the station does not need it.
    """
    columns = checks.columns_of(len(parts), inspector.layout)
    picture = sheet.marks_sheet([part.points for part in parts], columns, inspector.layout)
    read = checks.read_marks(inspector.model, picture, checks.measured(parts), {})
    if product.kind != "assembly":
        return _likeliest(read), None
    return _likeliest(read), checks.judge_marks(inspector.model, read, product).missing


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


def _without_sizes(inspector: Inspector, parts: Sequence[PartCloud]) -> Pictures:
    """The same pictures with unknown sizes, as of a photo."""
    columns = checks.columns_of(len(parts), inspector.layout)
    clouds = [part.points for part in parts]
    marks = sheet.marks_sheet(clouds, columns, inspector.layout)
    drawn, _ = sheet.surface_picture(clouds[0], inspector.layout)
    return Pictures(marks, drawn, {MARKS[i]: NO_SIZE for i in range(len(parts))})


def _outcome_of(
    inspector: Inspector, read: MarksRead, pictures: Pictures, product: Product, seen: Seen
) -> tuple[str, tuple[Reason, ...]]:
    """What the checks say of readings that were taken without sizes."""
    by_mark = {part.mark: Reading(part.part, part.probability) for part in read.parts}
    judgement = spec.evaluate(product, by_mark)
    limits = inspector.thresholds
    result = checks.workpiece_result(judgement, read, pictures.sizes, product, limits)
    outcome, reasons = combine((result.check,), [pipeline.gate_result(seen.problems), result])
    return outcome.value, reasons


def _read_pictures(
    inspector: Inspector, pictures: Pictures, product: Product, watch: Stopwatch
) -> tuple[MarksRead, checks.Judged | None]:
    """Readings and the model's own opinion (not of a single part), without a cloud."""
    with watch.stage("read"):
        read = checks.read_marks(inspector.model, pictures.marks, pictures.sizes, {})
    if product.kind == "single":
        return read, None
    with watch.stage("judge"):
        return read, checks.judge_marks(inspector.model, read, product)


def _surface_row(inspector: Inspector, case: Case, seen: Seen, row: Row, settings: Settings) -> Row:
    """The surface check with the part number known and the grid always decoded."""
    product, watch = product_of(case), Stopwatch()
    gate = pipeline.gate_result(seen.problems)
    row = replace(row, parts_seen=1 if seen.pictures is not None else len(seen.parts))
    stopped = any(problem.level == "ERROR" for problem in seen.problems)
    if stopped or (seen.pictures is None and not seen.parts):
        outcome, reasons = combine(("surface",), [gate])
        return replace(row, outcome=outcome.value, reasons=codes_of(r.code for r in reasons))
    part = max(seen.parts, key=lambda item: len(item.points)) if seen.parts else None
    shown, closer, doubts = False, None, list[Reason]()
    with watch.stage("views"):
        if part is not None:
            looked, shown = surface_of(inspector, part, case, settings)
            picture, closer = looked.picture, looked.closer_look
            doubts = pipeline.misfit_reasons(MARKS[0], product.part or "", looked)
            size = gauge.measure(part)
        else:
            picture, size = _surface_of(seen)
    with watch.stage("surface"):
        read = checks.read_surface(
            inspector.model,
            picture,
            MARKS[0],
            product.part or "",
            size if settings.sizes else NO_SIZE,
            inspector.thresholds,
            inspector.time_budget_s,
            closer=closer,
            always_grid=True,
            request=settings.request,
            grid=inspector.grid,
        )
    result = checks.surface_result([] if doubts else [read], product, inspector.thresholds)
    if part is not None and not shown and _differs(inspector):
        text = f"{MARKS[0]}: there is no reference of {product.part}"
        doubts.append(Reason("NO_REFERENCE", text, MARKS[0]))
    result = checks.with_doubts(result, doubts)
    outcome, reasons = combine(("surface",), [gate, result])
    timings = watch.timings_ms()
    truth, whole = true_cells(case, seen, part, settings.folder, inspector.layout)
    return replace(
        row,
        setting="reference" if shown else "zero-shot",
        outcome=outcome.value,
        reasons=codes_of(reason.code for reason in reasons),
        defect=read.reading.defect_class,
        probabilities={name: round(p, 5) for name, p in read.probabilities.items()},
        score=read.reading.score,
        cells=cells_read(read),
        cells_true=truth,
        cells_part=whole if truth else (),
        model_ms=model_ms(timings),
        total_ms=timings["total"],
        log_odds=log_odds_of([result]),
    )


def _differs(inspector: Inspector) -> bool:
    """Whether the model is shown a surface's difference from a reference."""
    return DIFFERENCE in inspector.model.manifest.surface_channels


def surface_of(
    inspector: Inspector, part: PartCloud, case: Case, settings: Settings
) -> tuple[Surface, bool]:
    """What the surface check is shown, and whether a reference is in it.

    The references of a case go before those of the inspector.
    """
    name = product_of(case).part or ""
    own = None
    if _differs(inspector) and settings.setting != "zero-shot" and settings.references != WITHOUT:
        own = _own_reference(case, settings.folder)
    if own is not None:
        return surface.look(part.points, inspector.layout, own), True
    seen = inspector.surface(part, name)
    return seen, _differs(inspector) and name in inspector.references


def _own_reference(case: Case, folder: Path) -> Reference | None:
    """From the clouds that come with a case."""
    if not case.input.references:
        return None
    clouds = []
    for file in case.input.references:
        own = replace(case, input=CaseInput(scene=file, unit=case.input.unit))
        parts = case_input.look(own, folder, LARGE_LAYOUT).parts
        if len(parts) != 1:
            raise InputError(
                "a reference holds one part",
                which=f"input.references: {folder / file}",
                expected="1 part",
                got=len(parts),
            )
        clouds.append(parts[0].points)
    return reference.build(clouds)


def _surface_of(seen: Seen) -> tuple[sheet.Sheet, Size]:
    if seen.pictures is None:
        raise InputError("a surface case needs a part", got="none")
    return seen.pictures.surface, seen.pictures.sizes[MARKS[0]]


def cells_read(read: SurfaceRead) -> tuple[Cell, ...]:
    return tuple(
        (CELL_VIEWS.index(grid.view), row, column)
        for grid in read.grids
        for row, column in grid.cells
    )


def codes_of(codes: Iterable[str]) -> tuple[str, ...]:
    """Each once, in order."""
    return tuple(dict.fromkeys(codes))


def log_odds_of(results: Sequence[CheckResult]) -> dict[str, float]:
    return {item.check: item.log_odds for item in results if item.log_odds is not None}


def model_ms(timings: Mapping[str, float]) -> float | None:
    """The model's share of the time, ms; None where it was not asked."""
    spent = [timings[stage] for stage in _MODEL_STAGES if stage in timings]
    return round(sum(spent), 2) if spent else None
