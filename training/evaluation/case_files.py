"""Case files of the evaluation: `cases.jsonl`, one case a line, described in CASES.md.

Reads and writes the lines; opens no cloud, no picture and no model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import yaml

from forge_station.contract import catalogue, record, tasks
from forge_station.contract.error import ContractError, Fault
from forge_station.contract.record import Count, Limit, NotNegative, Score
from forge_station.contract.spec import Product, parse_line
from forge_station.contract.views import MARKS, VIEWS
from forge_station.errors import InputError

FILE = "cases.jsonl"
Task = Literal["workpiece", "assembly", "surface"]
TASKS: tuple[Task, ...] = ("workpiece", "assembly", "surface")
Unit = Literal["auto", "mm", "cm", "m", "inch"]
Setting = Literal["zero-shot", "reference", "demonstration"]
SETTINGS: tuple[Setting, ...] = ("zero-shot", "reference", "demonstration")
PHOTO = "photo"
"""The name of a photo's one view, in `truth.masks` and `truth.grids`."""
_SOURCES = ("scene", "clouds", "scan", "views", "photo")
_KINDS: Mapping[str, tuple[str, ...]] = {
    "workpiece": ("batch", "single"),
    "assembly": ("assembly",),
    "surface": ("single",),
}


@dataclass(frozen=True)
class ViewFiles:
    """Ready views of one part: PNG files, one scale for all three."""

    front: str
    side: str
    top: str
    mm_per_px: Annotated[float, Limit(1e-4, 100.0)]


@dataclass(frozen=True)
class CaseInput:
    """What the station is given: exactly one of scene, clouds, scan, views and photo.

    Paths are relative to the folder of cases.jsonl. `clouds` and `views` are by mark, A first.
    """

    scene: str | None = None
    """One cloud of the whole tray; marks are given from left to right."""
    clouds: Mapping[str, str] = field(default_factory=dict)
    """Mark -> cloud or mesh of one part."""
    scan: str | None = None
    """Folder of a recorded pattern stack."""
    views: Mapping[str, ViewFiles] = field(default_factory=dict)
    photo: str | None = None
    marks: tuple[str, ...] = ()
    """Only with `photo`: the letters that are drawn on it, or that name its places. A photo of one
    surface needs none."""
    references: tuple[str, ...] = ()
    """Clouds, or photos with `photo`, of what is right: for the setting `reference`."""
    unit: Unit = "auto"
    """Length unit of clouds and meshes."""

    def __post_init__(self) -> None:
        record.check(self)
        faults = []
        given = [name for name in _SOURCES if getattr(self, name)]
        if len(given) != 1:
            got = ", ".join(given) or "none"
            faults.append(Fault("", got, f"exactly one of {', '.join(_SOURCES)}"))
        for name in ("clouds", "views", "marks"):
            marks = sorted(getattr(self, name))
            if marks and marks != list(MARKS[: len(marks)]):
                allowed = f"marks A, B, ... up to {MARKS[-1]} without a gap"
                faults.append(Fault(name, ", ".join(marks), allowed))
        if self.marks and not self.photo:
            faults.append(Fault("marks", ", ".join(self.marks), "with photo, and only then"))
        if faults:
            raise ContractError("the input is not valid", faults=faults)

    @property
    def source(self) -> str:
        """Which of the five it is."""
        return next(name for name in _SOURCES if getattr(self, name))


Cells = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Truth:
    """What is right. Figures that need a field which a case leaves out skip that case.

    Where the defect is: `points` counts before `masks`, and `masks` before `grids`.
    """

    answer: str | tuple[str, ...] | None = None
    """The letter of the part that is wrong, or "none"; a list: each of these letters is right."""
    readings: Mapping[str, str] = field(default_factory=dict)
    """Mark -> catalogue id of the part, for every part on the tray. On a photo with fixed places:
    mark -> the line's own name of what is there, or "none"."""
    missing: tuple[str, ...] | None = None
    """Catalogue ids of required parts that are absent; a part missing twice stands twice."""
    defect: Annotated[str, Limit(pattern="[a-z][a-z_]{0,31}", meaning="a class name")] | None = None
    """`normal`, crack, cut, deformation or dent; of a photo any class that the bundle knows."""
    points: str | None = None
    """NPZ file whose array `defect` says of every point of the scene whether it is defective."""
    masks: Mapping[str, str] | None = None
    """View -> PNG mask of the size of that view (with `views`) or of the photo (view `photo`); not
    0 is defective."""
    grids: Mapping[str, Cells] | None = None
    """View -> defective cells (row, column), 0-based from the upper left."""
    score: Score | None = None
    """Surface score 0..10; 10 is a perfect surface."""
    defect_size_mm: NotNegative | None = None
    """Size as made or measured: width of a crack, depth of a cut or dent, bend of a deformation."""
    defect_size_px: NotNegative | None = None
    """`defect_size_mm` in camera pixels of the scan."""
    defect_extent_mm: NotNegative | None = None
    """How far it reaches: length of a crack, half width of a cut, bent length, radius of a dent."""
    violations: Count | None = None
    """Number of parts that are wrong, extra or missing."""
    outcome: Literal["PASS", "FAIL"] | None = None

    def __post_init__(self) -> None:
        record.check(self)
        faults = [
            *self._faults_of_parts(),
            *(
                Fault("answer", letter or "empty", f"one of {', '.join(tasks.LETTER_OPTIONS)}")
                for letter in self.answers or ()
                if letter not in tasks.LETTER_OPTIONS
            ),
        ]
        for name in ("masks", "grids"):
            for view in getattr(self, name) or {}:
                if view not in (*VIEWS, PHOTO):
                    allowed = ", ".join((*VIEWS, PHOTO))
                    faults.append(Fault(f"{name}.{view}", "unknown view", allowed))
        for view, cells in (self.grids or {}).items():
            outside = [cell for cell in cells if not all(0 <= i < tasks.GRID_ROWS for i in cell)]
            if outside:
                got, allowed = str(outside[0]), f"rows and columns 0..{tasks.GRID_ROWS - 1}"
                faults.append(Fault(f"grids.{view}", got, allowed))
        if faults:
            raise ContractError("the truth is not valid", faults=faults)

    def _faults_of_parts(self) -> list[Fault]:
        faults = []
        marks = sorted(self.readings)
        if marks != list(MARKS[: len(marks)]):
            allowed = f"marks A, B, ... up to {MARKS[-1]} without a gap"
            faults.append(Fault("readings", ", ".join(marks), allowed))
        return faults

    def unknown_words(self) -> list[Fault]:
        """Parts that the catalogue lacks and defects that the scan checks do not have."""
        faults = []
        named = [(f"readings.{mark}", part) for mark, part in self.readings.items()]
        named += [(f"missing[{n}]", part) for n, part in enumerate(self.missing or ())]
        for path, part in named:
            try:
                catalogue.by_id(part)
            except ContractError as error:
                faults.append(Fault(f"truth.{path}", str(error), "an id of the catalogue"))
        if self.defect is not None and self.defect not in tasks.SURFACE_CLASSES:
            allowed = ", ".join(tasks.SURFACE_CLASSES)
            faults.append(Fault("truth.defect", repr(self.defect), allowed))
        return faults

    @property
    def answers(self) -> tuple[str, ...] | None:
        """Every right letter; ("none",) when nothing is wrong; None when it is not known."""
        if self.answer is None:
            return None
        return (self.answer,) if isinstance(self.answer, str) else self.answer

    @property
    def expected(self) -> str | None:
        """PASS or FAIL: as given, else what answer, missing, violations and defect imply."""
        if self.outcome is not None:
            return self.outcome
        known = [
            None if self.answers is None else self.answers != (tasks.NONE,),
            None if self.missing is None else bool(self.missing),
            None if self.violations is None else self.violations > 0,
            None if self.defect is None else self.defect != tasks.NORMAL,
        ]
        if any(known):
            return "FAIL"
        return None if all(item is None for item in known) else "PASS"


@dataclass(frozen=True)
class Case:
    """One question with its right answer. Checked is `product`, or `part_number` of `line`."""

    id: Annotated[str, Limit(pattern=r"[\w.-]{1,80}", meaning="1 to 80 letters, digits, _ . -")]
    task: Task
    input: CaseInput
    truth: Truth
    setting: Setting = "zero-shot"
    """With pictures of what is right (`reference`), or with two solved examples (`demonstration`).
    The evaluation's own `--setting` goes first."""
    subset: Annotated[str, Limit(pattern=r"[\w-]{0,40}", meaning="letters, digits, _ -")] = ""
    """A name under which figures are shown apart, such as `lookalike`."""
    part: str = ""
    """Id of the physical part or tray, where several cases show the same; empty: another each."""
    provenance: str = ""
    """How the part came into the set: see training/CALIBRATION.md."""
    product: Product | None = None
    line: str | None = None
    """Path of a line file (YAML)."""
    part_number: str | None = None
    """With `line`: which product of it."""

    def __post_init__(self) -> None:
        record.check(self)
        if (self.product is None) == (self.line is None):
            got = "neither" if self.product is None else "both"
            faults = [Fault("", got, "product, or line and part_number")]
        elif (self.line is None) != (self.part_number is None):
            got = "none" if self.part_number is None else self.part_number
            faults = [Fault("part_number", got, "with line, and only then")]
        else:
            faults = []
        if self.product is not None and self.product.kind not in _KINDS[self.task]:
            allowed = f"{' or '.join(_KINDS[self.task])} for the task {self.task}"
            faults.append(Fault("product.kind", self.product.kind, allowed))
        if self.input.photo and not self.input.marks and self.task != "surface":
            faults.append(Fault("input.marks", "none", "with photo: the letters drawn on it"))
        for name in ("masks", "grids"):
            if PHOTO in (getattr(self.truth, name) or {}) and not self.input.photo:
                faults.append(Fault(f"truth.{name}.{PHOTO}", "no photo", "with input.photo"))
        if self.product is not None and not self.product.photo:
            faults += self.truth.unknown_words()
        if faults:
            raise ContractError("the case is not valid", faults=faults)


@dataclass(frozen=True)
class BadCase:
    """A line that is no case, and why."""

    id: str
    task: str
    message: str


def read_cases(folder: Path) -> list[Case | BadCase]:
    """All lines of `folder`/cases.jsonl in order, products of line files filled in.

    A bad line gives a BadCase that names file, line and every field; InputError only when the file
    itself cannot be read or is empty.
    """
    path = folder / FILE
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError("cannot read the cases", which=path, got=error.strerror) from error
    found: list[Case | BadCase] = []
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        case = _read_line(line, where, folder)
        if isinstance(case, Case) and case.id in seen:
            case = BadCase(case.id, case.task, f"{where}: id {case.id} is used twice")
        if isinstance(case, Case):
            seen.add(case.id)
        found.append(case)
    if not found:
        raise InputError("no cases", which=path, expected="one JSON object a line")
    return found


def write_line(case: Case) -> str:
    """The case as one line of JSON; fields at their default are left out."""
    data = record.write(case)
    for name in ("marks", "references"):
        if not getattr(case.input, name):
            del data["input"][name]
    return json.dumps(_short(data), ensure_ascii=False)


def _read_line(line: bytes, where: str, folder: Path) -> Case | BadCase:
    name = task = ""
    try:
        data = json.loads(line.decode("utf-8"), parse_constant=_refused)
        if isinstance(data, dict):
            name, task = str(data.get("id", "")), str(data.get("task", ""))
        case = record.read(Case, data)
        if case.line is None:
            return case
        product = _product(folder / case.line, case.part_number or "")
        return replace(case, product=product, line=None, part_number=None)
    except ContractError as error:
        text = "; ".join(str(fault) for fault in error.faults) or str(error)
        return BadCase(name, task, f"{where}: {text}")
    except (ValueError, RecursionError) as error:
        return BadCase(name, task, f"{where}: not a line of JSON: {error}")


def _refused(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _product(path: Path, part_number: str) -> Product:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ContractError("line file cannot be read", which=path, got=error) from error
    return parse_line(data, str(path)).product(part_number)


def _short(data: object) -> object:
    if isinstance(data, Mapping):
        kept = {key: _short(value) for key, value in data.items()}
        return {key: value for key, value in kept.items() if value not in (None, {}, "", "auto")}
    if isinstance(data, Sequence) and not isinstance(data, str):
        return [_short(item) for item in data]
    return data
