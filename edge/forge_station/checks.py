"""The three checks: pictures and measurements -> prompts -> model -> what was read.

The model reads, the specification rules: nothing here decides whether a part is right, except for
the surface, where the limit on the defect probability is the decision. Knows the contract's text
and the model's interface; no files, no cameras, no MQTT.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from forge_station.contract import explanation, grid_text, record, tasks
from forge_station.contract.catalogue import CATALOGUE
from forge_station.contract.error import ContractError, Fault
from forge_station.contract.grid import DefectGrid
from forge_station.contract.record import Limit, Probability
from forge_station.contract.spec import Judgement, Product
from forge_station.contract.verdict import (
    Alternative,
    CheckResult,
    GridReading,
    Outcome,
    PartReading,
    Reason,
    SurfaceReading,
)
from forge_station.contract.views import AXES, MARKS, PHOTO, VIEWS, Layout
from forge_station.geometry import gauge, sheet, surface
from forge_station.geometry.gauge import Size
from forge_station.geometry.pose import PartCloud
from forge_station.geometry.surface import CloserLook
from forge_station.vlm.decode import Limits
from forge_station.vlm.grid_readout import Readout, read_grid
from forge_station.vlm.model import Trunk, VisionLanguageModel

PARTS: tuple[str, ...] = tuple(model.id for model in CATALOGUE)
GRID_SIDE = 16
SIZE_SHARPNESS = 4.0
NEGLIGIBLE = 1e-4
"""Parts of the catalogue that begin less probably are not told apart."""
"""How fast a catalogue entry loses weight as its box misses the measured one, see `weigh`."""
SCORE_VERSION = 1
"""Of the definition of `violation_log_odds` and `defect_log_odds`; a certificate holds for one."""
CERTAIN = 1000.0
"""Log-odds of what is certain, such as a missing piece: beyond what float64 probabilities give."""


Closer = Callable[[Mapping[str, surface.Window]], CloserLook]
"""Draws a window of each view at twice the scale, see `geometry.surface`."""


@dataclass(frozen=True)
class Thresholds:
    """Operating points; a bundle's manifest sets them, a station file may replace them."""

    defect_fail: Probability = 0.5
    """Probability of any defect from which the surface fails."""
    defect_unsure: Probability = 0.35
    """Probability of any defect from which a person must look."""
    grid_row: Probability = 0.5
    """Probability from which a grid row is written."""
    grid_cell: Probability = 0.35
    """Probability from which a cell is marked, where the grid is read soft."""
    look_again: Probability = 1.0
    """Probability of any defect from which a surface gets a closer look; 1: never. Only for bundles
    whose model was trained on closer looks."""
    closer_weight: Probability = 0.5
    """Of the closer look beside the first: weight of its log-probabilities."""
    size_tolerance: Annotated[float, Limit(0.01, 100.0)] = 1.0
    """Scale of the allowed difference between measured and nominal size of a reading."""
    answer_disagree: Probability = 0.9
    """Probability of the model's direct letter from which its contradiction makes UNSURE."""
    token_budget: Annotated[float, Limit(1.0, 10_000.0)] = 48.0
    """Tokens of one answer line; a line that needs more is UNSURE."""

    def __post_init__(self) -> None:
        record.check(self)
        if self.defect_unsure > self.defect_fail:
            allowed = f"at most defect_fail, {self.defect_fail:g}"
            faults = [Fault("defect_unsure", f"{self.defect_unsure:g}", allowed)]
            raise ContractError("Thresholds is not valid", faults=faults)

    @classmethod
    def read(cls, *sources: Mapping[str, float]) -> Thresholds:
        """Later sources win. Raises ContractError for an unknown name or a value out of bounds."""
        known = {field.name for field in fields(cls)}
        merged: dict[str, float] = {}
        for source in sources:
            merged.update(source)
        faults = [
            Fault(f"thresholds.{name}", str(merged[name]), f"one of {', '.join(sorted(known))}")
            for name in sorted(set(merged) - known)
        ]
        if faults:
            raise ContractError("unknown thresholds", faults=faults)
        return cls(**merged)


@dataclass(frozen=True)
class MarksRead:
    """Turn one of a marks sheet. `trunk` carries the picture for turn two."""

    parts: tuple[PartReading, ...]
    trunk: Trunk
    seen: Mapping[str, Mapping[str, float]]
    """Mark -> catalogue id -> the model's own probability, before the size was weighed in."""
    ranked: Mapping[str, Mapping[str, float]]
    """Mark -> every catalogue id with its probability after that (`weigh`), the likeliest first."""


@dataclass(frozen=True)
class Judged:
    """The model's own opinion of turn two: letter, missing part, conformity score 0..10."""

    letter: str
    letter_probability: float
    missing: str
    score: float


@dataclass(frozen=True)
class SurfaceRead:
    """What the surface check saw of one part. `probabilities`: class -> probability. `closer`: what
    it looked at a second time."""

    reading: SurfaceReading
    grids: tuple[GridReading, ...]
    probabilities: Mapping[str, float]
    overrun: bool
    closer: CloserLook | None = None

    @property
    def defect_probability(self) -> float:
        return 1.0 - self.probabilities[tasks.NORMAL]


def columns_of(count: int, layout: Layout) -> tuple[int, ...]:
    """In which column each mark stands: not in order, so that the letter is what tells them apart.

    The same for every tray of `count` parts, so that pictures are bit-identical on every run.
    """
    order = [*range(0, layout.columns, 2), *range(1, layout.columns, 2)]
    order = order[::-1] if count % 2 else order
    return tuple(order[:count])


def read_marks(
    model: VisionLanguageModel,
    picture: sheet.Sheet,
    sizes: Mapping[str, Size],
    points: Mapping[str, int],
) -> MarksRead:
    """Read workpiece and model number at every mark of a sheet.

    The model scores the whole catalogue at every mark, all marks in the same passes; its
    distribution is then weighted with how well each entry fits the measured box (`weigh`).
    """
    facts = tasks.sheet_facts({m: size.box for m, size in sizes.items()}, picture.mm_per_px)
    trunk = model.trunk([picture.image], trunk_text(facts))
    marks = sorted(sizes)
    lines = {tasks.mark_key(mark): PARTS for mark in marks}
    scored = model.score_lines(trunk, lines, floor=NEGLIGIBLE)
    parts, own, weighed = [], {}, {}
    for mark in marks:
        own[mark] = scored[tasks.mark_key(mark)]
        weighed[mark] = weigh(own[mark], sizes[mark])
        ranked = [Alternative(*item) for item in itertools.islice(weighed[mark].items(), 4)]
        workpiece, _, number = ranked[0].part.partition(" ")
        parts.append(
            PartReading(
                mark=mark,
                workpiece=workpiece,
                model_number=number,
                probability=ranked[0].probability,
                alternatives=tuple(sorted(ranked[1:], key=lambda item: -item.probability)),
                size_mm=sizes[mark].box,
                points=points.get(mark),
            )
        )
    return MarksRead(tuple(parts), trunk, own, weighed)


def weigh(seen: Mapping[str, float], size: Size) -> dict[str, float]:
    """What the model sees, weighted with what the gauge measures; the likeliest part first.

    Part -> probability.
    A part whose box misses the measured one by the share m of the allowed difference counts
    exp(-(4 m)^2 / 2). The order follows the product of both. The probability is cautious: that of
    the workpiece is the model's alone, only the model number within it profits from the gauge. So
    a stranger that happens to have the size of a catalogue part does not become certain by it.
    Where nothing that the model deems possible fits (less than a thousandth of its belief), its
    own odds stay, and the size check objects to them.
    """
    misfits = gauge.misfits(size)
    fits = {}
    for part, probability in seen.items():
        misfit = misfits.get(part, 0.0)
        fits[part] = probability * math.exp(-0.5 * (SIZE_SHARPNESS * misfit) ** 2)
    if sum(fits.values()) < 1e-3:
        fits = dict(seen)
    looks: dict[str, float] = {}
    both: dict[str, float] = {}
    for part in seen:
        workpiece = part.partition(" ")[0]
        looks[workpiece] = looks.get(workpiece, 0.0) + seen[part]
        both[workpiece] = both.get(workpiece, 0.0) + fits[part]
    ranked = {}
    for part in sorted(fits, key=lambda name: -fits[name]):
        workpiece = part.partition(" ")[0]
        share = fits[part] / both[workpiece] if both[workpiece] > 0 else 0.0
        ranked[part] = min(1.0, looks[workpiece] * share)
    return ranked


def judge_marks(model: VisionLanguageModel, read: MarksRead, product: Product) -> Judged:
    """Turn two: given its readings and the specification, what does the model itself answer?"""
    kind = "assembly" if product.kind == "assembly" else "batch"
    readings = {part.mark: part.part for part in read.parts}
    text = tasks.readings_text(readings) + tasks.NEXT_USER
    text += tasks.judge_text(kind, dict(product.parts) or None) + tasks.ASSISTANT
    lines = {tasks.ANSWER_KEY: [*sorted(readings), tasks.NONE], tasks.SCORE_KEY: tasks.SCORES}
    if product.kind == "assembly":
        lines[tasks.MISSING_KEY] = [*product.parts, tasks.NONE]
    scored = model.score_lines(read.trunk, lines, behind=text)
    letter, probability = _likeliest(scored[tasks.ANSWER_KEY])
    missing, _ = _likeliest(scored.get(tasks.MISSING_KEY, {tasks.NONE: 1.0}))
    return Judged(letter, probability, missing, _expected_score(scored[tasks.SCORE_KEY]))


def read_surface(
    model: VisionLanguageModel,
    picture: sheet.Sheet,
    mark: str,
    part: str,
    size: Size,
    thresholds: Thresholds,
    time_budget_s: float,
    *,
    closer: Closer | None = None,
    always_grid: bool = False,
    request: str = "joint",
    grid: Readout = "rows",
) -> SurfaceRead:
    """Class and score of one part from one forward pass; the grid only where it looks defective.

    `closer` draws a window of each view larger: from `thresholds.look_again` on the model looks
    there a second time, and both looks decide the class. `always_grid` decodes the grid in any case
    (evaluation). `request` is one of the three VIEScore2 requests (`tasks.REQUESTS`): `score` gives
    no grid, `grid` no score, `joint` both. `grid`: how the grid is read (`vlm.grid_readout`).
    """
    facts = tasks.surface_facts(part, size.box, request)
    look = _Look(thresholds, time_budget_s, always_grid, request, closer, grid)
    return _read_views(model, picture, mark, facts, VIEWS, look)


def read_photo(
    model: VisionLanguageModel,
    picture: sheet.Sheet,
    mark: str,
    part: str,
    thresholds: Thresholds,
    time_budget_s: float,
    *,
    always_grid: bool = False,
    request: str = "joint",
) -> SurfaceRead:
    """`read_surface` of a photo: nothing is measured, and one grid lies over the whole of it."""
    facts = tasks.photo_facts(part, request)
    look = _Look(thresholds, time_budget_s, always_grid, request)
    return _read_views(model, picture, mark, facts, (PHOTO,), look)


def read_positions(
    model: VisionLanguageModel, picture: sheet.Sheet, marks: Sequence[str]
) -> tuple[PartReading, ...]:
    """What stands at each fixed place of a photo: a part of the bundle's vocabulary, or `none`."""
    trunk = model.trunk([picture.image], trunk_text(tasks.positions_facts(marks)))
    options = model.manifest.vocabulary.parts or (*PARTS, tasks.NONE)
    scored = model.score_lines(trunk, {tasks.mark_key(mark): options for mark in marks})
    found = []
    for mark, odds in zip(marks, scored.values(), strict=True):
        first, *others = sorted(odds, key=lambda part: -odds[part])
        workpiece, _, number = first.partition(" ")
        alternatives = tuple(Alternative(part, odds[part]) for part in others[:3])
        found.append(PartReading(mark, workpiece, number, odds[first], alternatives))
    return tuple(found)


def present(parts: Sequence[PartReading]) -> tuple[PartReading, ...]:
    """The readings without those of empty places: what the specification counts."""
    return tuple(part for part in parts if part.part != tasks.NONE)


@dataclass(frozen=True)
class _Look:
    """How a surface is looked at, see `read_surface`."""

    thresholds: Thresholds
    time_budget_s: float
    always_grid: bool
    request: str
    closer: Closer | None = None
    grid: Readout = "rows"


def _read_views(
    model: VisionLanguageModel,
    picture: sheet.Sheet,
    mark: str,
    facts: str,
    views: Sequence[str],
    look: _Look,
) -> SurfaceRead:
    trunk = model.trunk([picture.image], trunk_text(facts))
    lines: dict[str, Sequence[str]] = {tasks.CLASS_KEY: model.manifest.vocabulary.classes}
    if look.request != "grid":
        lines[tasks.SCORE_KEY] = tasks.SCORES
    scored = model.score_lines(trunk, lines)
    odds = scored[tasks.CLASS_KEY]
    score = _expected_score(scored[tasks.SCORE_KEY]) if tasks.SCORE_KEY in scored else None
    near: CloserLook | None = None
    if look.closer is not None and 1.0 - odds[tasks.NORMAL] >= look.thresholds.look_again:
        near, found = _look_again(model, trunk, facts, look.closer)
        odds = _both(odds, found, look.thresholds.closer_weight)
    name, probability = _likeliest(odds)
    looked = look.always_grid or 1.0 - odds[tasks.NORMAL] >= look.thresholds.defect_unsure
    looked = looked and look.request != "score"
    cells = np.zeros((len(views), GRID_SIDE, GRID_SIDE), bool)
    overrun = False
    if looked:
        cells, overrun = _decode_grid(model, trunk, views, look)
    grids = {view: DefectGrid(cells[i]) for i, view in enumerate(views)}
    text = explanation.explain_views(score, grids if looked else {}, "surface")
    reading = SurfaceReading(
        mark=mark,
        defect_class=name,
        probability=probability,
        probabilities=dict(odds),
        score=score,
        explanation=text,
    )
    readings = [_grid_reading(mark, view, grids[view], picture) for view in views if looked]
    return SurfaceRead(reading, tuple(readings), odds, overrun, near)


def _look_again(
    model: VisionLanguageModel, trunk: Trunk, facts: str, closer: Closer
) -> tuple[CloserLook, dict[str, float]]:
    """Look at the most suspicious window of each view, by the first look's cell probabilities.

    Gives the look and the class probabilities. The grid stays the first look's: that of the closer
    one was worse (grid IoU .42 and .22 on 157 decoded defects).
    """
    keys = [tasks.row_key(view, row) for view in VIEWS for row in range(GRID_SIDE)]
    cells = model.soft_rows(trunk, keys).cells.reshape(len(VIEWS), GRID_SIDE, GRID_SIDE)
    look = closer(surface.suspicious(cells))
    near = model.trunk([look.picture.image], trunk_text(facts))
    classes = model.manifest.vocabulary.classes
    return look, model.score_lines(near, {tasks.CLASS_KEY: classes})[tasks.CLASS_KEY]


def _both(
    first: Mapping[str, float], closer: Mapping[str, float], weight: float
) -> dict[str, float]:
    """Class -> probability from two looks: weighted mean of the logarithms, made to sum to 1."""
    floor = 1e-12
    raw = {
        name: max(first[name], floor) ** (1.0 - weight) * max(closer[name], floor) ** weight
        for name in first
    }
    total = sum(raw.values())
    return {name: value / total for name, value in raw.items()}


def _decode_grid(
    model: VisionLanguageModel, trunk: Trunk, views: Sequence[str], look: _Look
) -> tuple[NDArray[np.bool_], bool]:
    """All grid rows behind the trunk -> (cells [views, 16, 16], any row overran)."""
    keys = [tasks.row_key(view, row) for view in views for row in range(GRID_SIDE)]
    limits = look.thresholds
    threshold = limits.grid_cell if look.grid == "soft" else limits.grid_row
    budget = _limits(limits, look.time_budget_s)
    read = read_grid(model, trunk, keys, look.grid, threshold, budget)
    return read.cells.reshape(len(views), GRID_SIDE, GRID_SIDE), read.overrun


def workpiece_result(
    judgement: Judgement,
    read: MarksRead,
    sizes: Mapping[str, Size],
    product: Product,
    thresholds: Thresholds,
) -> CheckResult:
    """The specification's opinion, made UNSURE where measured size contradicts a reading."""
    name = "assembly" if product.kind == "assembly" else "workpiece"
    result = judgement.result(name, product.rules.min_reading_probability)  # type: ignore[arg-type]
    result = replace(result, log_odds=violation_log_odds(read, judgement))
    return with_doubts(result, size_doubts(read.parts, sizes, thresholds))


def violation_log_odds(read: MarksRead, judgement: Judgement) -> float:
    """Log-odds that the specification is violated, given the probabilities of the readings.

    The specification's own arrangement says which part belongs at each mark. With w/p the odds of
    any other part there, P(all right) = prod 1 / (1 + w/p), marks taken as independent. Computed
    from the small sums, so that it does not saturate where P(all right) rounds to 1. A wrong
    number of pieces and a batch without a majority are CERTAIN.
    """
    wrong = judgement.violations
    if any(item.mark is None or item.expected is None for item in wrong):
        return CERTAIN
    expected = {item.mark: item.expected or "" for item in wrong}
    against = 0.0
    for part in read.parts:
        wanted = expected.get(part.mark, part.part)
        workpiece = wanted.partition(" ")[0]
        own = read.ranked[part.mark]
        # Within the workpiece the size counts; the share of other workpieces is the model's alone.
        other = sum(p for name, p in own.items() if name != wanted and _is(workpiece, name))
        other += sum(p for name, p in read.seen[part.mark].items() if not _is(workpiece, name))
        against += math.log1p(other / own[wanted]) if own.get(wanted, 0.0) > 0 else CERTAIN
    if against <= 0.0:
        return -CERTAIN
    odds = against if against > 30.0 else math.log(math.expm1(against))
    return min(CERTAIN, max(-CERTAIN, odds))


def _is(workpiece: str, part: str) -> bool:
    return part.partition(" ")[0] == workpiece


def defect_log_odds(probabilities: Mapping[str, float]) -> float:
    """Log-odds of any defect from the probability of each class; does not saturate near 0 or 1."""
    defect = sum(p for name, p in probabilities.items() if name != tasks.NORMAL)
    normal = probabilities[tasks.NORMAL]
    if defect <= 0.0 or normal <= 0.0:
        return CERTAIN if normal <= 0.0 else -CERTAIN
    return math.log(defect) - math.log(normal)


def with_doubts(
    result: CheckResult,
    doubts: Sequence[Reason],
    score: float | None = None,
    answer: str | None = None,
) -> CheckResult:
    """The result with further reasons to be unsure; a FAIL stays a FAIL."""
    outcome = Outcome.UNSURE if doubts and result.outcome is Outcome.PASS else result.outcome
    return CheckResult(
        result.check,
        outcome,
        (*result.reasons, *doubts),
        score if score is not None else result.score,
        result.confidence,
        result.threshold,
        answer if answer is not None else result.answer,
        result.log_odds,
    )


def size_doubts(
    parts: Sequence[PartReading], sizes: Mapping[str, Size], thresholds: Thresholds
) -> list[Reason]:
    """Readings that the measured box cannot be, in any way the part can lie."""
    doubts = []
    for part in parts:
        size = sizes.get(part.mark)
        if size is None or not part.workpiece:
            continue
        if gauge.consistent(size, part.part, thresholds.size_tolerance) is False:
            measures = " x ".join(f"{value:.1f}" for value in size.box)
            text = f"{part.mark} reads {part.part}, but measures {measures} mm"
            doubts.append(Reason("SIZE_CONTRADICTS", text, part.mark))
    return doubts


def judged_doubts(
    judged: Judged, judgement: Judgement, product: Product, thresholds: Thresholds
) -> list[Reason]:
    """Where the model's own answer contradicts what the specification made of its readings."""
    doubts = []
    objected = judgement.marks
    agrees = judged.letter in objected or (judged.letter == tasks.NONE and not objected)
    if not agrees and judged.letter_probability >= thresholds.answer_disagree:
        said = ", ".join(objected) or tasks.NONE
        text = f"asked directly, the model answers {judged.letter}; its readings say {said}"
        doubts.append(Reason("ANSWERS_DISAGREE", text, score=judged.letter_probability))
    limit = product.rules.min_conformity_score
    if limit is not None and judged.score < limit:
        text = f"the model scores the conformity {judged.score:.1f}, the limit is {limit:g}"
        doubts.append(Reason("LOW_CONFORMITY", text, score=judged.score))
    return doubts


def surface_result(
    reads: Sequence[SurfaceRead], product: Product, thresholds: Thresholds
) -> CheckResult:
    """The surface check over all parts that were looked at; the worst part decides."""
    fails: list[Reason] = []
    doubts: list[Reason] = []
    limit = product.rules.min_surface_score
    for read in reads:
        mark, odds = read.reading.mark, read.defect_probability
        defects = [name for name in read.probabilities if name != tasks.NORMAL]
        worst = max(defects, key=lambda name: read.probabilities[name])
        own = worst not in tasks.DEFECT_CLASSES
        code = "SURFACE_DEFECT" if own else f"SURFACE_{worst.upper()}"
        if odds >= thresholds.defect_fail:
            fails.append(Reason(code, f"{mark}: {read.reading.explanation}", mark, odds))
        elif odds >= thresholds.defect_unsure:
            text = f"{mark}: perhaps a {worst}, probability {odds:.2f}"
            doubts.append(Reason(code, text, mark, odds))
        if read.overrun:
            text = f"{mark}: a line of the defect grid exceeded its budget"
            doubts.append(Reason("MODEL_OVERRUN", text, mark))
        if odds >= thresholds.defect_fail and not any(grid.cells for grid in read.grids):
            text = f"{mark}: a {worst} was read, but no cell of the grid is marked"
            doubts.append(Reason("GRID_CONTRADICTS", text, mark))
        score = read.reading.score
        if limit is not None and score is not None and score < limit:
            text = f"{mark}: surface score {score:.1f}, the limit is {limit:g}"
            fails.append(Reason("LOW_SURFACE_SCORE", text, mark, score))
    outcome = Outcome.FAIL if fails else Outcome.UNSURE if doubts else Outcome.PASS
    scores = [read.reading.score for read in reads if read.reading.score is not None]
    return CheckResult(
        "surface",
        outcome,
        (*fails, *doubts),
        score=min(scores, default=None),
        confidence=min((1.0 - read.defect_probability for read in reads), default=None),
        threshold=thresholds.defect_fail,
        log_odds=max((defect_log_odds(read.probabilities) for read in reads), default=None),
    )


def measured(parts: Sequence[PartCloud]) -> dict[str, Size]:
    """Mark -> measured size, in the order of the scene."""
    return {MARKS[i]: gauge.measure(part) for i, part in enumerate(parts)}


def trunk_text(facts: str) -> str:
    """System text, one picture and the user's facts, up to where the model answers."""
    image = f"{tasks.IMAGE_OPEN}{tasks.IMAGE_TOKEN}{tasks.IMAGE_CLOSE}"
    return f"{tasks.TRUNK_OPEN}{image}{facts}{tasks.ASSISTANT}"


def _limits(thresholds: Thresholds, time_budget_s: float) -> Limits:
    return Limits(max_tokens=int(thresholds.token_budget), time_budget_s=time_budget_s)


def _likeliest(odds: Mapping[str, float]) -> tuple[str, float]:
    """The most probable option and its probability."""
    return max(odds.items(), key=lambda item: item[1])


def _expected_score(odds: Mapping[str, float]) -> float:
    """Mean of the score's distribution, one decimal: finer than its most probable whole number."""
    return round(sum(int(text.split("/")[0]) * p for text, p in odds.items()), 1)


def _grid_reading(mark: str, view: str, grid: DefectGrid, picture: sheet.Sheet) -> GridReading:
    text = grid_text.channel_text(grid)
    if view == PHOTO:
        return GridReading(mark=mark, view=PHOTO, text=text, cells=grid.indices())
    axes = AXES[view]
    side_mm = picture.image.shape[0] * picture.mm_per_px
    centre = picture.centre_mm
    return GridReading(
        mark=mark,
        view=view,  # type: ignore[arg-type]
        text=text,
        cells=grid.indices(),
        mm_per_cell=round(side_mm / GRID_SIDE, 5),
        origin_mm=(
            round(centre[axes.right] - side_mm / 2, 4),
            round(centre[axes.up] + side_mm / 2, 4),
        ),
    )
