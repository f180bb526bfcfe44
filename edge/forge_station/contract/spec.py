"""The specification of a product line, and the rule engine that judges readings against it.

The model reads, the specification rules: nothing here looks at pictures or knows a model. Reading
files is `forge_station.config`'s; turning the judgement into a verdict is `verdict`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from forge_station.contract import catalogue, record
from forge_station.contract.error import ContractError, Fault, ProductError
from forge_station.contract.record import Limit, Probability, Score
from forge_station.contract.verdict import CheckName, CheckResult, Outcome, Reason
from forge_station.contract.views import MARKS

Kind = Literal["batch", "assembly", "single"]
PartNumber = Annotated[
    str, Limit(pattern=r"[A-Za-z0-9_-]{1,32}", meaning="1 to 32 letters, digits, - or _")
]

_CHECKS_OF: Mapping[Kind, tuple[CheckName, ...]] = {
    "batch": ("workpiece",),
    "assembly": ("assembly",),
    "single": ("workpiece", "surface"),
}
_SMALLEST_MAJORITY = 3


@dataclass(frozen=True)
class Rules:
    """Limits of one product. `None`: the limit is not applied."""

    min_reading_probability: Probability = 0.6
    """A reading less probable than this makes the outcome UNSURE, whatever it says."""
    min_surface_score: Score | None = None
    """Surface score 0..10 below which the surface check fails."""
    min_conformity_score: Score | None = None
    """Conformity score 0..10 below which an assembly that reads correct is UNSURE."""

    def __post_init__(self) -> None:
        record.check(self)


@dataclass(frozen=True)
class Product:
    """One part_number: what lies on the tray and what is checked.

    `batch`: several pieces of one part (`parts` has one id; without it the majority rules and
    `count` says how many lie there). `assembly`: a kit of parts with counts. `single`: one piece.
    """

    part_number: PartNumber
    kind: Kind
    checks: tuple[CheckName, ...]
    parts: Mapping[str, Annotated[int, Limit(1, len(MARKS))]] = field(default_factory=dict)
    """Catalogue id ("hex_bolt M8x30") -> number of pieces."""
    name: str = ""
    """For people."""
    count: Annotated[int, Limit(1, len(MARKS))] | None = None
    """Only for a batch without `parts`: number of pieces; None: any number."""
    field_mm: tuple[float, float, float] | None = None
    """Width, depth, height that the parts take on the tray: the field the scanner is set to.
    None: the station's own field."""
    rules: Rules = Rules()
    photo: bool = False
    """Checked on a photo: its parts are the line's own names, which the bundle knows, and not ids
    of the catalogue."""

    def __post_init__(self) -> None:
        record.check(self)
        faults = [*self._faults_of_parts(), *self._faults_of_checks()]
        if self.field_mm is not None and min(self.field_mm) <= 0:
            faults.append(Fault("field_mm", str(self.field_mm), "three lengths above 0"))
        if faults:
            raise ContractError("the product is not valid", which=self.part_number, faults=faults)

    def _faults_of_parts(self) -> list[Fault]:
        faults = []
        for part in () if self.photo else self.parts:
            try:
                catalogue.by_id(part)
            except ContractError as error:
                faults.append(Fault(f"parts.{part}", str(error), "an id of the catalogue"))
        kinds, pieces = len(self.parts), self.pieces
        if pieces is not None and pieces > len(MARKS):
            faults.append(Fault("parts", f"{pieces} pieces", f"at most {len(MARKS)} pieces"))
        if self.kind == "single" and (kinds, pieces) != (1, 1):
            faults.append(Fault("parts", f"{pieces or 0} pieces", "one part with count 1"))
        if self.kind == "batch" and kinds > 1:
            faults.append(Fault("parts", f"{kinds} parts", "one part, or none: the majority rules"))
        if self.kind == "assembly" and (pieces or 0) < 2:
            faults.append(Fault("parts", f"{pieces or 0} pieces", "two pieces or more"))
        if self.count is not None and (self.parts or self.kind != "batch"):
            allowed = "left out: `parts` gives the number"
            faults.append(Fault("count", str(self.count), allowed))
        elif self.count is not None and self.count < _SMALLEST_MAJORITY:
            allowed = f"{_SMALLEST_MAJORITY} or more, for a majority"
            faults.append(Fault("count", str(self.count), allowed))
        return faults

    def _faults_of_checks(self) -> list[Fault]:
        allowed = _CHECKS_OF[self.kind]
        faults = [
            Fault("checks", name, f"{', '.join(allowed)} for kind {self.kind}")
            for name in self.checks
            if name not in allowed
        ]
        if not self.checks:
            faults.append(Fault("checks", "none", f"at least one of {', '.join(allowed)}"))
        if len(set(self.checks)) != len(self.checks):
            faults.append(Fault("checks", ", ".join(self.checks), "each check once"))
        return faults

    @property
    def pieces(self) -> int | None:
        """How many pieces lie on the tray; None: any number."""
        return sum(self.parts.values()) if self.parts else self.count

    @property
    def part(self) -> str | None:
        """The one part of a batch or single; None for an assembly and for a majority batch."""
        return next(iter(self.parts)) if self.kind != "assembly" and self.parts else None


@dataclass(frozen=True)
class LineSpec:
    """A product line: its products by part_number."""

    line: PartNumber
    products: tuple[Product, ...]
    description: str = ""

    def __post_init__(self) -> None:
        record.check(self)
        numbers = Counter(product.part_number for product in self.products)
        twice = [number for number, times in numbers.items() if times > 1]
        if twice or not self.products:
            got = f"twice: {', '.join(twice)}" if twice else "none"
            faults = [Fault("products", got, "one or more, each part_number once")]
            raise ContractError("the line is not valid", which=self.line, faults=faults)

    def product(self, part_number: str) -> Product:
        """Raises ProductError that names the known part numbers."""
        for product in self.products:
            if product.part_number == part_number:
                return product
        known = ", ".join(product.part_number for product in self.products)
        got = part_number or "no part number"
        raise ProductError("no such product in the line", which=self.line, expected=known, got=got)


def parse_line(data: object, which: str = "line") -> LineSpec:
    """A line's specification from plain data. Raises ContractError with every problem."""
    return record.read(LineSpec, data, which)


@dataclass(frozen=True)
class Reading:
    """What the model read at a mark. An unreadable mark has part "" and probability 0."""

    part: str
    probability: Probability

    def __post_init__(self) -> None:
        record.check(self)

    @property
    def workpiece(self) -> str:
        return self.part.split(" ")[0]


UNREAD = Reading("", 0.0)


@dataclass(frozen=True)
class Violation:
    """One departure from the specification. `decisive`: certain enough to fail the part."""

    code: Literal[
        "WRONG_WORKPIECE", "WRONG_MODEL", "MISSING_PART", "EXTRA_PART", "WRONG_COUNT", "NO_MAJORITY"
    ]
    text: str
    mark: str | None = None
    expected: str | None = None
    """Catalogue id that should be there; None for an extra part or a count."""
    read: str | None = None
    probability: Probability | None = None
    decisive: bool = True

    def reason(self) -> Reason:
        return Reason(self.code, self.text, self.mark, self.probability)


@dataclass(frozen=True)
class Judgement:
    """The specification's opinion of all readings of a tray."""

    violations: tuple[Violation, ...]
    doubts: tuple[Reason, ...]
    """Readings too improbable to decide on."""
    confidence: Probability | None
    """Of the least probable reading; None without readings."""
    expected: Mapping[str, int]
    """The parts that were held to be right (of a majority batch: the majority)."""

    @property
    def outcome(self) -> Outcome:
        if any(violation.decisive for violation in self.violations):
            return Outcome.FAIL
        return Outcome.UNSURE if self.violations or self.doubts else Outcome.PASS

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks that are objected to, in order: the benchmark's letter answer; empty: none."""
        return tuple(sorted({item.mark for item in self.violations if item.mark is not None}))

    def outcome_of(self, mark: str) -> Outcome:
        """Of the part at one mark: FAIL, UNSURE or PASS."""
        own = [item for item in self.violations if item.mark == mark]
        if any(item.decisive for item in own):
            return Outcome.FAIL
        doubted = any(reason.mark == mark for reason in self.doubts)
        return Outcome.UNSURE if own or doubted else Outcome.PASS

    def result(self, check: CheckName, threshold: float) -> CheckResult:
        """As the result of the workpiece or assembly check; decisive reasons first."""
        ordered = sorted(self.violations, key=lambda item: not item.decisive)
        reasons = (*(item.reason() for item in ordered), *self.doubts)
        return CheckResult(
            check, self.outcome, reasons, confidence=self.confidence, threshold=threshold
        )


def evaluate(product: Product, readings: Mapping[str, Reading]) -> Judgement:
    """Judge the readings (mark -> Reading) of one tray. No violation: nothing is wrong.

    A wrong part whose reading is less probable than the product's limit is not decisive (UNSURE).
    Missing and extra parts follow from the number of marks and are always decisive.
    """
    limit = product.rules.min_reading_probability
    doubts = tuple(
        Reason("LOW_PROBABILITY", _doubt(mark, reading, limit), mark, reading.probability)
        for mark, reading in sorted(readings.items())
        if reading.probability < limit or not reading.part
    )
    if product.kind == "assembly":
        expected = dict(product.parts)
        violations = _judge_assembly(expected, readings, limit)
    else:
        part = product.part or _majority(readings, limit)
        expected = {} if part is None else {part: product.pieces or len(readings)}
        violations = _judge_batch(product, part, readings, limit)
    confidence = min((reading.probability for reading in readings.values()), default=None)
    return Judgement(tuple(violations), doubts, confidence, expected)


def _judge_batch(
    product: Product, part: str | None, readings: Mapping[str, Reading], limit: float
) -> list[Violation]:
    violations = []
    if product.pieces is not None and len(readings) != product.pieces:
        text = f"{len(readings)} pieces on the tray, {product.pieces} required"
        violations.append(Violation("WRONG_COUNT", text, expected=part))
    if not readings:
        if not violations:
            violations.append(Violation("WRONG_COUNT", "no piece on the tray", expected=part))
    elif part is None:
        read = ", ".join(f"{mark} {readings[mark].part or '?'}" for mark in sorted(readings))
        text = f"no part is in the majority: {read}"
        violations.append(Violation("NO_MAJORITY", text, decisive=False))
    else:
        for mark, reading in sorted(readings.items()):
            if reading.part != part:
                violations.append(_wrong(mark, reading, part, limit))
    return violations


def _majority(readings: Mapping[str, Reading], limit: float) -> str | None:
    """The part that more than half of all pieces read as with enough probability, or None."""
    certain = [reading.part for reading in readings.values() if reading.probability >= limit]
    counted = Counter(part for part in certain if part)
    if not counted or len(readings) < _SMALLEST_MAJORITY:
        return None
    part, times = counted.most_common(1)[0]
    return part if 2 * times > len(readings) else None


class _Pair(NamedTuple):
    """How badly a surplus piece stands for a missing part: the smaller the likelier the swap."""

    other_workpiece: bool
    other_size: bool
    is_repetition: bool
    mark: str
    part: str


def _judge_assembly(
    required: Mapping[str, int], readings: Mapping[str, Reading], limit: float
) -> list[Violation]:
    """Surplus pieces are paired with missing parts (a swap); what is left is extra or missing."""
    open_parts = Counter(required)
    surplus = dict(readings)
    for mark in sorted(readings, key=lambda mark: (-readings[mark].probability, mark)):
        if open_parts[readings[mark].part] > 0:
            open_parts[readings[mark].part] -= 1
            del surplus[mark]
    missing = sorted(open_parts.elements())
    violations = []
    while surplus and missing:
        best = min(
            _pair(mark, surplus[mark], part, required) for mark in surplus for part in missing
        )
        violations.append(_wrong(best.mark, surplus.pop(best.mark), best.part, limit))
        missing.remove(best.part)
    for mark, reading in sorted(surplus.items()):
        violations.append(_extra(mark, reading, required, readings))
    for part, times in Counter(missing).items():
        text = f"{times} of {required[part]} {part} missing"
        violations.append(Violation("MISSING_PART", text, expected=part))
    return violations


def _pair(mark: str, reading: Reading, part: str, required: Mapping[str, int]) -> _Pair:
    other_workpiece = reading.workpiece != part.split(" ")[0]
    return _Pair(
        other_workpiece, _size(reading.part) != _size(part), reading.part in required, mark, part
    )


def _size(part: str) -> str:
    """ "hex_bolt M8x30" -> "M8"."""
    return part.split(" ")[-1].split("x")[0]


def _wrong(mark: str, reading: Reading, expected: str, limit: float) -> Violation:
    same = reading.workpiece == expected.split(" ")[0]
    read = reading.part or "nothing readable"
    return Violation(
        "WRONG_MODEL" if same else "WRONG_WORKPIECE",
        f"{mark}: {read} instead of {expected}",
        mark=mark,
        expected=expected,
        read=reading.part or None,
        probability=reading.probability,
        decisive=bool(reading.part) and reading.probability >= limit,
    )


def _extra(
    mark: str, reading: Reading, required: Mapping[str, int], readings: Mapping[str, Reading]
) -> Violation:
    alike: Sequence[str] = [
        other for other in sorted(readings) if reading.part and readings[other].part == reading.part
    ]
    if reading.part in required:
        text = f"one {reading.part} too many among {', '.join(alike)}"
    else:
        text = f"{mark}: {reading.part or 'a part'} is not called for"
    return Violation(
        "EXTRA_PART", text, mark=mark, read=reading.part or None, probability=reading.probability
    )


def _doubt(mark: str, reading: Reading, limit: float) -> str:
    if not reading.part:
        return f"{mark} could not be read"
    return f"{mark} reads {reading.part} with probability {reading.probability:.2f} < {limit:g}"
