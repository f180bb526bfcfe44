"""What the station decides about one part or tray: outcome, checks, verdict, and how they combine.

It knows nothing of how a check was made, nor of MQTT: `mes/` maps this record to its payload.
`Verdict.to_dict` is what `forge-station inspect` prints; verdict.schema.json describes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, Literal

from forge_station.contract import record
from forge_station.contract.error import ContractError, Fault
from forge_station.contract.record import Count, Limit, NotNegative, Probability, Score

SCHEMA = "forge-station.verdict/1.0"

CheckName = Literal["scan", "workpiece", "surface", "assembly", "certificate"]
"""`scan` is the gate on the data itself: required of every verdict, before the three checks.
`certificate` is the last: whether what passed all others may be called PASS (permit.py)."""

GATE: CheckName = "scan"
CERTIFICATE: CheckName = "certificate"
CHECKS: tuple[CheckName, ...] = ("workpiece", "surface", "assembly")


class Outcome(str, Enum):
    """Of a check and of a verdict. UNSURE: a person must look. ERROR: the station could not."""

    PASS = "PASS"
    FAIL = "FAIL"
    UNSURE = "UNSURE"
    ERROR = "ERROR"

    def __str__(self) -> str:
        return self.value


_SEVERITY = {Outcome.PASS: 0, Outcome.UNSURE: 1, Outcome.FAIL: 2, Outcome.ERROR: 3}

REASONS: Mapping[str, str] = {
    # the scan and the scene
    "NO_DATA": "the scan has no valid point",
    "SATURATED": "too much of the image is overexposed",
    "MOTION": "something moved while the patterns were shown",
    "OUT_OF_FOCUS": "camera or projector is out of focus",
    "POSE_MISFIT": "the head poses do not fit together",
    "TOO_DARK": "too much of the image is underexposed",
    "LOW_COVERAGE": "too few pixels could be measured",
    "INCONSISTENT_CODE": "the patterns contradict each other",
    "NO_TRAY": "the plane of the tray was not found",
    "UNSEEN_AREA": "an area of the tray was not seen",
    "TOO_FEW_POINTS": "a part has too few points to be read",
    "EMPTY_SCENE": "there is no part on the tray",
    "TOO_MANY_PARTS": "there are more parts than marks",
    "PART_OUT_OF_FIELD": "a part is cut by the edge of the field",
    "TOUCHING_PARTS": "parts touch each other and cannot be told apart",
    "CAPTURE_FAILED": "the scanner delivered no usable pattern stack",
    "CAMERA_NOT_FOUND": "there is no such camera, or its driver or library is missing",
    "CAMERA_BUSY": "another process holds the camera",
    "CAMERA_TIMEOUT": "the camera sent no frame in time",
    "CAMERA_LOST": "the camera is gone or did not answer in time",
    "CAMERA_SETTINGS": "the camera refuses a setting",
    "FRAME_INCOMPLETE": "a frame arrived with data missing",
    "PROJECTOR_NOT_FOUND": "there is no such projector, or its library is missing",
    "PROJECTOR_LOST": "the projector is gone or did not answer in time",
    "PROJECTOR_SETTINGS": "the projector cannot show what it was asked to",
    "CALIBRATION_MISMATCH": "the patterns were taken with another calibration",
    "INPUT_WRONG": "the input file is malformed",
    # the specification (workpiece and assembly checks)
    "WRONG_WORKPIECE": "a part of another kind",
    "WRONG_MODEL": "a part of the right kind in another size or type",
    "MISSING_PART": "a required part is absent",
    "EXTRA_PART": "a part that is not called for",
    "WRONG_COUNT": "the number of parts is not the specified one",
    "NO_MAJORITY": "no kind of part is in the majority, so none can be called odd",
    "LOW_PROBABILITY": "the model is not certain enough of a reading",
    "SIZE_CONTRADICTS": "the measured size does not fit what the model read",
    "ANSWERS_DISAGREE": "the model's direct answer contradicts its readings",
    "LOW_CONFORMITY": "the model scores the assembly below the limit",
    # the surface check
    "SURFACE_CRACK": "a crack",
    "SURFACE_CUT": "a cut",
    "SURFACE_DEFORMATION": "a deformation",
    "SURFACE_DENT": "a dent",
    "SURFACE_DEFECT": "a defect of the line's own classes, see the reading",
    "LOW_SURFACE_SCORE": "the model scores the surface below the limit",
    "GRID_CONTRADICTS": "the defect grid and the class contradict each other",
    # the certificate
    "NO_CERTIFICATE": "no valid certificate, so the station only advises and never says PASS",
    "NOT_COVERED": "the certificate does not cover this product or this kind of scan",
    "ABOVE_LIMIT": "the part's score is not below the certified limit",
    # the model and the station
    "CHECK_MISSING": "a required check has no result",
    "NOT_CHECKED": "a check was left out on purpose, see its text",
    "MODEL_MALFORMED": "the model's text breaks the format",
    "NO_REFERENCE": "the surface was judged without the reference that the model counts on",
    "REFERENCE_MISFIT": "the surface does not lie on its reference, so the comparison says nothing",
    "MODEL_OVERRUN": "the model exceeded its token or time budget",
    "MODEL_FAILED": "the model could not run",
    "BUNDLE_REFUSED": "the model bundle is incomplete, altered or of another contract",
    "UNKNOWN_PRODUCT": "the line has no product of this part number, or none was named",
    "CONTRACT_BROKEN": "data broke the contract between parts of the station",
    "OUTBOX_FULL": "the result could not be stored in time, so the line was told to hold the part",
    "INTERRUPTED": "the station was stopped or crashed while it inspected the part",
    "STATION_ERROR": "the station failed, see its log",
}
"""The published reason codes. Codes may be added in a minor version, never renamed."""


LogOdds = Annotated[float, Limit(-1000.0, 1000.0)]
Code = Annotated[str, Limit(pattern=r"[A-Z][A-Z0-9_]{1,39}", meaning="a code like EMPTY_SCENE")]


@dataclass(frozen=True)
class Reason:
    """Why an outcome is not PASS. `text` is for a person; `code` is for a machine (`REASONS`)."""

    code: Code
    text: str
    mark: str | None = None
    """The mark in the views that it is about; None: the whole tray."""
    score: float | None = None
    """The figure that decided: a probability 0..1, a score 0..10 or a share, as `text` says."""

    def __post_init__(self) -> None:
        record.check(self)


@dataclass(frozen=True)
class CheckResult:
    """What one check says. A PASS has no reasons, every other outcome has at least one."""

    check: CheckName
    outcome: Outcome
    reasons: tuple[Reason, ...] = ()
    score: Score | None = None
    """VIEScore2 score 0..10 of surface (pq) or conformity (sc); None when not asked for."""
    confidence: Probability | None = None
    """The model's probability of what it read (the least certain reading counts), 0..1."""
    threshold: float | None = None
    """The limit that `confidence` or `score` was held against; None: no limit applied."""
    answer: str | None = None
    """The benchmark's direct answer (letter or "none"), when it was asked for."""
    log_odds: LogOdds | None = None
    """That the part is defective by this check, natural logarithm; None where it has no score."""

    def __post_init__(self) -> None:
        record.check(self)
        if (self.outcome is Outcome.PASS) == bool(self.reasons):
            raise ContractError(
                "a PASS has no reasons and every other outcome has at least one",
                which=f"check {self.check}",
                got=f"{self.outcome} with {len(self.reasons)} reasons",
            )


@dataclass(frozen=True)
class Alternative:
    """A catalogue id that the model also considered, with its probability."""

    part: str
    probability: Probability

    def __post_init__(self) -> None:
        record.check(self)


@dataclass(frozen=True)
class PartReading:
    """What was read and measured at one mark. Sizes in mm, of the resting part's bounding box."""

    mark: str
    workpiece: str
    model_number: str
    probability: Probability
    alternatives: tuple[Alternative, ...] = ()
    size_mm: tuple[float, float, float] | None = None
    """Length, width, height, measured on the cloud."""
    points: Count | None = None
    outcome: Outcome = Outcome.PASS
    """FAIL when the specification objects to this very part."""

    def __post_init__(self) -> None:
        record.check(self)

    @property
    def part(self) -> str:
        """The catalogue id, "hex_bolt M8x30"."""
        return f"{self.workpiece} {self.model_number}".strip()


@dataclass(frozen=True)
class SurfaceReading:
    """What the surface check read at one mark."""

    mark: str
    defect_class: Annotated[str, Limit(pattern="[a-z][a-z_]{0,31}", meaning="a class name")]
    """`normal` or a defect class of the bundle: crack, cut, deformation, dent or a line's own."""
    probability: Probability
    probabilities: Mapping[str, float] = field(default_factory=dict)
    """Of every defect class; empty when the class was parsed from text."""
    score: Score | None = None
    explanation: str = ""
    """Text by rule from score and grids (contract/grid.py), no model involved."""

    def __post_init__(self) -> None:
        record.check(self)


@dataclass(frozen=True)
class GridReading:
    """The 16x16 defect grid of one view of one part. Row 0 is the top, column 0 the left."""

    mark: str
    view: Literal["front", "side", "top", "photo"]
    text: str
    """As the papers write it: `artifact:`, then `r5: 8,9` (1-based) or `none`."""
    cells: tuple[tuple[int, int], ...] = ()
    """Defective cells, (row, column), 0-based, row-major."""
    mm_per_cell: NotNegative | None = None
    origin_mm: tuple[float, float] | None = None
    """View coordinates (right, up) of the grid's top-left corner, in mm."""
    rows: int = 16
    columns: int = 16

    def __post_init__(self) -> None:
        record.check(self)
        for row, column in self.cells:
            if not (0 <= row < self.rows and 0 <= column < self.columns):
                raise ContractError(
                    "cell outside the grid",
                    which=f"grid of mark {self.mark}, view {self.view}",
                    expected=f"row 0..{self.rows - 1}, column 0..{self.columns - 1}",
                    got=(row, column),
                )


@dataclass(frozen=True)
class ScanSummary:
    """What was seen: number of valid points and figures of quality (shares 0..1, mm, counts)."""

    points: Count
    quality: Mapping[str, float | None] = field(default_factory=dict)
    """Figure by name; None where this scanner cannot give it."""
    flags: tuple[str, ...] = ()
    """Reason codes that the decoder raised about the data, whether or not they decided."""
    source: str = ""
    """Where it came from: the scanner's driver, or the file that was inspected."""
    poses: Count = 1
    camera_pixel_mm: NotNegative | None = None
    """Size of a camera pixel on the tray; the resolution of the measurement."""
    calibration: str | None = None
    """Digest of the camera calibration; None for clouds and meshes."""

    def __post_init__(self) -> None:
        record.check(self)


@dataclass(frozen=True)
class Certification:
    """Whether the station may say PASS, and the part's score beside the certified limits.

    `checks_alone`: an evaluation, where the checks decide and nothing is held against a limit.
    """

    mode: Literal["certified", "advisory", "checks_alone"]
    text: str
    """What is certified, or why nothing is."""
    score: float | None = None
    """Of the whole part: the largest of the checks' log-odds, each divided by its temperature."""
    limit_pass: float | None = None
    """Below it a part that passes every check is PASS."""
    limit_fail: float | None = None
    """From it on a part scores as the worst of the good ones do."""
    certificate: str = ""
    """Digest that names the certificate."""


@dataclass(frozen=True)
class ModelUsed:
    """Which model decided, as the bundle's manifest and the runtime report it."""

    name: str
    version: str
    release_counter: int
    sha256: str
    precision: str
    provider: str
    """The ONNX Runtime execution provider that really ran."""


@dataclass(frozen=True)
class Verdict:
    """The decision about one part or tray. Build it with `decide`; it cannot contradict itself."""

    result_id: str
    """Unique for ever; the same on every repeat of the message."""
    serial: str
    """The part's or tray's id; from the scanner, MES or a counter, see `serial_source`."""
    product: str
    """part_number of the product in the line's specification."""
    outcome: Outcome
    reasons: tuple[Reason, ...]
    required: tuple[CheckName, ...]
    checks: tuple[CheckResult, ...]
    scan: ScanSummary
    parts: tuple[PartReading, ...] = ()
    surface: tuple[SurfaceReading, ...] = ()
    grids: tuple[GridReading, ...] = ()
    notes: tuple[Reason, ...] = ()
    """Remarks that decided nothing, e.g. a parse warning."""
    model: ModelUsed | None = None
    certification: Certification | None = None
    line: str = ""
    station: str = ""
    serial_source: Literal["scanner", "counter", "mes", "none"] = "counter"
    simulated: bool = False
    begin_time: str = ""
    """RFC 3339, UTC, with milliseconds: when the trigger came."""
    end_time: str = ""
    timings_ms: Mapping[str, float] = field(default_factory=dict)
    """Stage -> milliseconds of wall clock."""
    schema: str = SCHEMA

    def __post_init__(self) -> None:
        outcome, reasons = combine(self.required, self.checks)
        if (self.outcome, self.reasons) != (outcome, reasons):
            raise ContractError(
                "the verdict contradicts its checks",
                which=f"result {self.result_id}",
                expected=f"{outcome} with reasons {[item.code for item in reasons]}",
                got=f"{self.outcome} with reasons {[item.code for item in self.reasons]}",
            )
        if self.schema.rsplit(".", 1)[0] != SCHEMA.rsplit(".", 1)[0]:
            raise ContractError("verdict of another schema", expected=SCHEMA, got=self.schema)

    def check(self, name: CheckName) -> CheckResult | None:
        """The result of one check, None when it was not made."""
        return next((item for item in self.checks if item.check == name), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; `from_dict` gives back an equal verdict."""
        data: dict[str, Any] = record.write(self)
        return data

    @classmethod
    def from_dict(cls, data: object) -> Verdict:
        """Raises ContractError with every problem, also when outcome and checks disagree."""
        return record.read(cls, data, "verdict")


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """ERROR > FAIL > UNSURE > PASS. Of nothing: ERROR, since nothing was decided."""
    found = list(outcomes)
    return max(found, key=_SEVERITY.__getitem__) if found else Outcome.ERROR


def combine(
    required: Sequence[CheckName], results: Sequence[CheckResult]
) -> tuple[Outcome, tuple[Reason, ...]]:
    """The outcome of all checks together, with the reasons of the worst first.

    `scan` is always required. A required check without a result is an ERROR with CHECK_MISSING,
    never a PASS; when the scan gate itself did not pass, checks that were therefore not made add
    no reason of their own. A check that nobody required counts all the same.
    """
    names = [item.check for item in results]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ContractError("a check has two results", which=", ".join(twice), expected="one each")
    wanted: list[CheckName] = [GATE, *(name for name in required if name != GATE)]
    if len(wanted) == 1:
        raise ContractError(
            "nothing to check", expected=f"at least one of {', '.join(CHECKS)}", got="no check"
        )
    gate = next((item for item in results if item.check == GATE), None)
    judged = sorted(results, key=lambda item: (-_SEVERITY[item.outcome], _order(item.check)))
    outcomes = [item.outcome for item in judged]
    reasons = [reason for item in judged for reason in item.reasons]
    if gate is None or gate.outcome is Outcome.PASS:
        for name in wanted:
            if name not in names:
                outcomes.append(Outcome.ERROR)
                text = f"the {name} check is required and has no result"
                reasons.append(Reason("CHECK_MISSING", text))
    return worst(outcomes), tuple(reasons)


def _order(name: CheckName) -> int:
    return (GATE, *CHECKS, CERTIFICATE).index(name)


def decide(
    *,
    required: Sequence[CheckName],
    checks: Sequence[CheckResult],
    scan: ScanSummary,
    result_id: str,
    serial: str,
    product: str,
    **rest: Any,
) -> Verdict:
    """The verdict that follows from the checks. `rest` are further fields of `Verdict`."""
    outcome, reasons = combine(required, checks)
    return Verdict(
        result_id=result_id,
        serial=serial,
        product=product,
        outcome=outcome,
        reasons=reasons,
        required=tuple(required),
        checks=tuple(checks),
        scan=scan,
        **rest,
    )


def unknown_reasons(reasons: Iterable[Reason]) -> tuple[Fault, ...]:
    """Reasons whose code is not published in `REASONS`; tests hold every module against it."""
    return tuple(
        Fault(f"reason {item.code}", item.text, "a code of REASONS")
        for item in reasons
        if item.code not in REASONS
    )
