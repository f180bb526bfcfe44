"""One case as it came out: the row of an evaluation file. Data and reading it back, no figures."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from forge_station.contract import record, tasks
from forge_station.contract.error import ContractError
from forge_station.contract.views import VIEWS
from forge_station.errors import InputError
from training.evaluation.case_files import PHOTO

Cell = tuple[int, int, int]
"""View (0 front, 1 side, 2 top, 3 photo), row, column."""
CELL_VIEWS: tuple[str, ...] = (*VIEWS, PHOTO)


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
class Probe:
    """One grounding question beside the case: what was asked, the right answer and the answer."""

    kind: str
    asked: str
    true: str
    answer: str

    @property
    def right(self) -> bool:
        return self.answer == self.true


@dataclass(frozen=True)
class Exchange:
    """One question to a model behind an endpoint, and its reply as it came."""

    question: str
    """WORKVERI, ASSYVERI, MISSING, SURFINSP, GRID or a probe."""
    prompt: str
    reply: str
    parser: str
    """Version of the parsers that read the reply."""
    latency_ms: float = 0.0


@dataclass(frozen=True)
class Row:
    """One case as it came out. A truth that the case does not tell is None.

    `answer` is the letter that follows from readings and specification, or "none", or "" where
    they give no answer; `letters` all marks objected to. `direct` is what the model answers itself.
    Of an endpoint, which is only asked for letters, `answer` is `direct`.
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
    rules: Mapping[str, float] = field(default_factory=dict)
    """Limits of the product that were applied, by name."""
    part: str = ""
    """Id of the physical part or tray; empty: every case is another one, named by `id`."""
    provenance: str = ""
    """How the part came into the set, see training/CALIBRATION.md; empty: not told."""
    missing_direct: str | None = None
    """The missing part as the model itself answers, or "none"; None: not asked."""
    missing_options: int | None = None
    """How many answers that question had."""
    fault: str = ""
    """What is wrong by the truth: see `truth.fault_of`."""
    lookalike: str = ""
    """How wrong and right part resemble each other: see `lookalikes.kind`."""
    subset: str = ""
    families: tuple[str, ...] = ()
    """Workpieces that the product asks for (of a majority batch: those on the tray)."""
    defect_size_mm: float | None = None
    defect_size_px: float | None = None
    defect_extent_mm: float | None = None
    defect_fail: float | None = None
    """The bundle's limit of the defect probability; surfaces only."""
    sizes: bool = True
    """Whether measured sizes were in the prompt."""
    probes: tuple[Probe, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    warnings: tuple[str, ...] = ()
    """Codes of what a reply had that its format has not."""
    case: str = ""
    """Digest of the case's line."""
    run: str = ""
    """Digest of model, settings and code: rows of one run share it."""

    @property
    def defect_probability(self) -> float | None:
        if tasks.NORMAL not in self.probabilities:
            return None
        return 1.0 - self.probabilities[tasks.NORMAL]


def write_row(row: Row) -> str:
    """One line of JSON, without a line end."""
    return json.dumps(record.write(row), ensure_ascii=False)


def read_rows(path: Path, without: Collection[str] = ()) -> list[Row]:
    """The rows of an evaluation file; half a line at its end (a killed run) is left out.

    `without`: fields to leave at their default, such as the long lists of cells. InputError, naming
    the line, for anything else that is no row.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("cannot read the rows", which=path, got=error) from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            if isinstance(data, dict):
                data = {name: value for name, value in data.items() if name not in without}
            rows.append(record.read(Row, data))
        except (ValueError, ContractError) as error:
            if number == len(lines) and isinstance(error, ValueError):
                break
            raise InputError(
                "not a row of an evaluation",
                which=f"{path}, line {number}",
                expected="a line that training.evaluate wrote",
                got=error,
            ) from error
    return rows
