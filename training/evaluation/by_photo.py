"""Photo cases of a bundle that was trained on photos: a surface, or fixed places.

Knows the station's photo checks; a bundle that was not trained on photos goes through
`case_input`, and what it reads there is left UNSURE.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from forge_station import checks, pipeline
from forge_station.contract import spec
from forge_station.contract.manifest import PhotoInput
from forge_station.contract.spec import Reading
from forge_station.contract.verdict import combine
from forge_station.contract.views import MARKS
from forge_station.errors import InputError
from forge_station.geometry import photo
from forge_station.geometry.sheet import Sheet
from forge_station.pipeline import Inspector
from forge_station.timing import Stopwatch
from training.evaluation.case_files import Case
from training.evaluation.case_row import product_of
from training.evaluation.cells import true_photo_cells
from training.evaluation.rows import CELL_VIEWS, Row
from training.evaluation.truth import wrong


def picture_of(case: Case, folder: Path, wanted: PhotoInput) -> Sheet:
    """The picture that the model is given."""
    path = folder / (case.input.photo or "")
    if not path.exists():
        raise InputError("no such file or folder", which=path)
    return photo.photo_picture(photo.read_photo(path), wanted)


def run(inspector: Inspector, case: Case, row: Row, folder: Path, request: str) -> Row:
    """One photo case to one row. StationError for what is wrong with its files."""
    wanted = inspector.model.manifest.photo
    assert wanted is not None
    watch = Stopwatch()
    with watch.stage("views"):
        picture = picture_of(case, folder, wanted)
    if case.task == "surface":
        return _surface(inspector, case, row, picture, folder, request, watch)
    return _places(inspector, case, row, picture, watch)


def _surface(
    inspector: Inspector,
    case: Case,
    row: Row,
    picture: Sheet,
    folder: Path,
    request: str,
    watch: Stopwatch,
) -> Row:
    product = product_of(case)
    with watch.stage("surface"):
        read = checks.read_photo(
            inspector.model,
            picture,
            MARKS[0],
            product.part or "",
            inspector.thresholds,
            inspector.time_budget_s,
            always_grid=True,
            request=request,
        )
    result = checks.surface_result([read], product, inspector.thresholds)
    outcome, reasons = combine(("surface",), [pipeline.gate_result(()), result])
    timings = watch.timings_ms()
    return replace(
        row,
        outcome=outcome.value,
        reasons=tuple(dict.fromkeys(reason.code for reason in reasons)),
        parts_seen=1,
        defect=read.reading.defect_class,
        probabilities={name: round(p, 5) for name, p in read.probabilities.items()},
        score=read.reading.score,
        cells=tuple((CELL_VIEWS.index(g.view), r, c) for g in read.grids for r, c in g.cells),
        cells_true=true_photo_cells(case, folder),
        model_ms=round(timings["surface"], 2),
        total_ms=timings["total"],
        log_odds={} if result.log_odds is None else {result.check: result.log_odds},
    )


def _places(inspector: Inspector, case: Case, row: Row, picture: Sheet, watch: Stopwatch) -> Row:
    """Fixed places: what is at each mark, and which required parts are absent."""
    product = product_of(case)
    with watch.stage("read"):
        readings = checks.read_positions(inspector.model, picture, case.input.marks)
    there = checks.present(readings)
    by_mark = {part.mark: Reading(part.part, part.probability) for part in there}
    judgement = spec.evaluate(product, by_mark)
    result = judgement.result("assembly", product.rules.min_reading_probability)
    outcome, reasons = combine(("assembly",), [pipeline.gate_result(()), result])
    read = {part.mark: part for part in readings}
    marks = tuple(
        replace(mark, read=read[mark.mark].part, probability=read[mark.mark].probability,
                picture=read[mark.mark].part)
        if mark.mark in read
        else mark
        for mark in row.marks
    )  # fmt: skip
    letters = judgement.marks
    timings = watch.timings_ms()
    return replace(
        row,
        outcome=outcome.value,
        reasons=tuple(dict.fromkeys(reason.code for reason in reasons)),
        parts_seen=len(readings),
        marks=marks,
        missing=wrong(product.parts, {part.mark: part.part for part in there}).missing,
        letters=letters,
        answer=letters[0] if letters else "none",
        score=result.score,
        model_ms=round(timings["read"], 2),
        total_ms=timings["total"],
    )
