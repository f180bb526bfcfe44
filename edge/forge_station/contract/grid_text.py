"""Grid and scores as the text that a model reads and writes (VIEScore2): writer and two parsers.

    pq: 4/10            request "axes": picture (surface) quality and conformity
    sc: 7/10
    artifact:           request "channels": two grids; "flat": rows without headers
    r5: 8,9!,10         row 5, columns 8, 9 (major) and 10; 1-based, row 1 on top
    misalign:
    none                an empty grid

`parse` is the station's: every deviation is a warning and what cannot be read exactly is None.
`parse_lenient` is the published one, holes included, for comparable figures. Knows no images.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from forge_station.contract.error import ContractError
from forge_station.contract.grid import EMPTY, SIDE, DefectGrid

CHANNELS: tuple[str, str] = ("artifact", "misalign")
NONE = "none"
ScoreName = Literal["score", "pq", "sc"]
SCORE_NAMES: tuple[ScoreName, ...] = ("score", "pq", "sc")


@dataclass(frozen=True)
class Request:
    """Which fields an answer must have. Never ask for what the label cannot supervise."""

    score: bool = False
    axes: bool = False
    grid: Literal["no", "flat", "channels"] = "flat"

    @property
    def scores(self) -> tuple[ScoreName, ...]:
        return (*(("score",) if self.score else ()), *(("pq", "sc") if self.axes else ()))


@dataclass(frozen=True)
class Answer:
    """Scores 0..10 and grids. `grid` None: not asked for, or not readable; EMPTY: no defect.

    With `channels`, `grid` is their union (a swapped channel is not punished twice).
    """

    scores: Mapping[ScoreName, int] = field(default_factory=dict)
    grid: DefectGrid | None = None
    channels: Mapping[str, DefectGrid] | None = None

    @property
    def overall(self) -> float | None:
        """The `score`, else the VIEScore convention sqrt(pq * sc), else None."""
        if "score" in self.scores:
            return float(self.scores["score"])
        if "pq" in self.scores and "sc" in self.scores:
            return math.sqrt(self.scores["pq"] * self.scores["sc"])
        return None


@dataclass(frozen=True)
class ParseWarning:
    """A deviation from the format. `fatal`: its field could not be read exactly and is None."""

    code: str
    line: int
    """1-based; 0: the whole text."""
    text: str
    fatal: bool

    def __str__(self) -> str:
        return f"{self.code} in line {self.line}: {self.text!r}" if self.line else self.code


@dataclass(frozen=True)
class Parsed:
    """What the strict parser read. `ok` only when the text kept the format to the letter."""

    answer: Answer
    warnings: tuple[ParseWarning, ...]

    @property
    def ok(self) -> bool:
        return not self.warnings


def score_of(value: float) -> int:
    """0..1 -> 0..10, with Python's rounding of halves to even as published."""
    if not 0.0 <= value <= 1.0:
        raise ContractError("score out of range", expected="0 to 1", got=value)
    return round(value * 10)


def rows_text(grid: DefectGrid) -> str:
    """`r5: 8,9!,10` lines, only rows with cells; `none` for an empty grid. No final newline."""
    lines = []
    for row in range(SIDE):
        columns = grid.columns(row)
        if columns:
            names = [f"{column + 1}{'!' if grid.major[row, column] else ''}" for column in columns]
            lines.append(f"r{row + 1}: {','.join(names)}")
    return "\n".join(lines) if lines else NONE


def write(answer: Answer) -> str:
    """The text of an answer: scores, then channels (artifact first) or the flat grid."""
    lines = [f"{name}: {answer.scores[name]}/10" for name in SCORE_NAMES if name in answer.scores]
    if answer.channels is not None:
        for channel in CHANNELS:
            lines += [f"{channel}:", rows_text(answer.channels.get(channel, EMPTY))]
    elif answer.grid is not None:
        lines.append(rows_text(answer.grid))
    return "\n".join(lines)


def channel_text(grid: DefectGrid, channel: str = "artifact") -> str:
    """One channel as published to applications: header line and rows."""
    return f"{channel}:\n{rows_text(grid)}"


_ROW = re.compile(r"r([1-9]|1[0-6]): ((?:[1-9]|1[0-6])!?(?:,(?:[1-9]|1[0-6])!?)*)")
_LOOSE_ROW = re.compile(
    r"r(?:ow)?\s*(\d{1,4})\s*:\s*(\d{1,4}(?:\s*!)?(?:\s*,\s*\d{1,4}(?:\s*!)?)*)", re.IGNORECASE
)
_ROW_WITHOUT_R = re.compile(r"\d+\s*:.*")
_ROW_START = re.compile(r"r(?:ow)?\s*\d+\s*:.*", re.IGNORECASE)
_SCORE = re.compile(r"(score|pq|sc)\s*:\s*(\d{1,4})\s*/\s*10", re.IGNORECASE)
_SCORE_START = re.compile(r"(score|pq|sc)\s*:.*", re.IGNORECASE)
_HEADER = re.compile(r"(artifact|misalign)(\s*:\s*)", re.IGNORECASE)


def parse_columns(text: str) -> tuple[int, ...]:
    """One row's answer (`5,6,9` or `none`) -> 0-based ascending columns; ContractError else."""
    if text == NONE:
        return ()
    match = _ROW.fullmatch(f"r1: {text}")
    columns = [int(item.rstrip("!")) - 1 for item in text.split(",")] if match else []
    if not columns or sorted(set(columns)) != columns:
        raise ContractError(
            "not a grid row", expected=f"ascending columns 1..{SIDE} like 5,6,9, or none", got=text
        )
    return tuple(columns)


def parse(text: str, request: Request) -> Parsed:
    """Strict: read what keeps the format, warn of everything else, None for what was lost.

    Any unreadable line makes the grid None, since cells may be missing from it; a harmless
    deviation (spacing, order, a repeated column) is a warning only.
    """
    return _Strict(request).run(text)


class _Strict:
    """State of one strict parse: which section the next row belongs to, and what was found."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.warnings: list[ParseWarning] = []
        self.scores: dict[ScoreName, int] = {}
        self.lost_scores: set[str] = set()
        self.sections: dict[str, list[tuple[int, int, bool]]] = {}
        self.nones: dict[str, int] = {}
        self.last_row: dict[str, int] = {}
        self.section = ""
        self.grid_lost = False

    def warn(self, code: str, line: int, text: str, *, fatal: bool = False) -> None:
        self.warnings.append(ParseWarning(code, line, text, fatal))

    def lose_grid(self, code: str, line: int, text: str) -> None:
        self.warn(code, line, text, fatal=True)
        self.grid_lost = True

    def run(self, text: str) -> Parsed:
        for number, raw in enumerate(text.split("\n"), start=1):
            line = raw.strip()
            if line != raw:
                self.warn("SPACING", number, raw)
            if line:
                self.line(number, line)
            elif number <= text.rstrip("\n").count("\n") + 1 and text.strip():
                self.warn("EMPTY_LINE", number, raw)
        self.finish_scores()
        grid, channels = self.finish_grid()
        return Parsed(Answer(self.scores, grid, channels), tuple(self.warnings))

    def line(self, number: int, line: str) -> None:
        if _ROW_START.fullmatch(line):
            self.row(number, line)
        elif _SCORE_START.fullmatch(line):
            self.score(number, line)
        elif header := _HEADER.fullmatch(line):
            self.header(number, line, header)
        elif line.lower() == NONE:
            if line != NONE:
                self.warn("CASE", number, line)
            if self.section in self.nones:
                self.warn("NONE_TWICE", number, line)
            self.nones[self.section] = number
            self.sections.setdefault(self.section, [])
        elif _ROW_WITHOUT_R.fullmatch(line):
            self.lose_grid("ROW_WITHOUT_R", number, line)
        else:
            self.lose_grid("UNKNOWN_TEXT", number, line)

    def score(self, number: int, line: str) -> None:
        name = next(item for item in SCORE_NAMES if line.lower().startswith(item))
        match = _SCORE.fullmatch(line)
        if match is None or int(match.group(2)) > 10:
            self.warn("SCORE_MALFORMED", number, line, fatal=True)
            self.lost_scores.add(name)
            return
        value = int(match.group(2))
        if line != f"{name}: {value}/10":
            self.warn("SPACING", number, line)
        if self.sections or self.section:
            self.warn("SCORE_AFTER_GRID", number, line)
        if self.scores.get(name, value) != value:
            self.warn("SCORE_TWICE", number, line, fatal=True)
            self.lost_scores.add(name)
        self.scores[name] = value

    def header(self, number: int, line: str, match: re.Match[str]) -> None:
        name = match.group(1).lower()
        if line != f"{name}:":
            self.warn("SPACING", number, line)
        if self.request.grid != "channels":
            self.warn("CHANNEL_NOT_REQUESTED", number, line)
        if name in self.sections:
            self.warn("CHANNEL_TWICE", number, line)
        elif name == CHANNELS[0] and CHANNELS[1] in self.sections:
            self.warn("CHANNEL_ORDER", number, line)
        self.section = name
        self.sections.setdefault(name, [])

    def row(self, number: int, line: str) -> None:
        match = _LOOSE_ROW.fullmatch(line)
        if match is None:
            self.lose_grid("ROW_MALFORMED", number, line)
            return
        row = int(match.group(1))
        items = [item.strip() for item in match.group(2).split(",")]
        columns = [int(item.rstrip("!").rstrip()) for item in items]
        if not 1 <= row <= SIDE or not all(1 <= column <= SIDE for column in columns):
            self.lose_grid("OUT_OF_GRID", number, line)
            return
        exact = _ROW.fullmatch(line)
        if exact is None:
            self.warn("SPACING", number, line)
        if len(set(columns)) < len(columns):
            self.warn("COLUMN_TWICE", number, line)
        elif sorted(columns) != columns:
            self.warn("COLUMN_ORDER", number, line)
        last = self.last_row.get(self.section, 0)
        if row <= last:
            self.warn("ROW_ORDER", number, line)
        self.last_row[self.section] = max(row, last)
        cells = self.sections.setdefault(self.section, [])
        cells += [
            (row - 1, column - 1, item.endswith("!"))
            for column, item in zip(columns, items, strict=True)
        ]

    def finish_scores(self) -> None:
        for name in self.lost_scores:
            self.scores.pop(name, None)  # type: ignore[call-overload]
        for name in self.request.scores:
            if name not in self.scores and name not in self.lost_scores:
                self.warn("SCORE_MISSING", 0, name, fatal=True)
        for name in self.scores:
            if name not in self.request.scores:
                self.warn("SCORE_NOT_REQUESTED", 0, name)

    def finish_grid(self) -> tuple[DefectGrid | None, dict[str, DefectGrid] | None]:
        if self.request.grid == "no":
            if self.sections:
                self.warn("GRID_NOT_REQUESTED", 0, "")
            return None, None
        if not self.sections and not self.grid_lost:
            self.lose_grid("GRID_MISSING", 0, "")
        if self.request.grid == "channels":
            self.finish_channels()
        for name, cells in self.sections.items():
            if cells and name in self.nones:
                self.lose_grid("NONE_WITH_CELLS", self.nones[name], NONE)
            if not cells and name not in self.nones:
                self.lose_grid("GRID_EMPTY_WITHOUT_NONE", 0, name)
        if self.grid_lost:
            return None, None
        grids = {name: _grid(cells) for name, cells in self.sections.items()}
        union = EMPTY
        for grid in grids.values():
            union = union | grid
        return union, (grids if self.request.grid == "channels" else None)

    def finish_channels(self) -> None:
        if "" in self.sections:
            self.lose_grid("ROWS_BEFORE_CHANNEL", 0, "")
        for channel in CHANNELS:
            if channel not in self.sections and not self.grid_lost:
                self.lose_grid("CHANNEL_MISSING", 0, channel)


def _grid(cells: list[tuple[int, int, bool]]) -> DefectGrid:
    return DefectGrid.of(
        ((row, column) for row, column, _ in cells),
        ((row, column) for row, column, major in cells if major),
    )


_LENIENT_ROW = re.compile(r"(?:r|row)?\s*(\d{1,2})\s*:\s*([0-9][0-9,\s]*)", re.IGNORECASE)
_LENIENT_SCORES: Mapping[ScoreName, re.Pattern[str]] = {
    "score": re.compile(r"score\s*:\s*(\d{1,2})\s*/\s*10", re.IGNORECASE),
    "pq": re.compile(r"\bpq\s*:\s*(\d{1,2})\s*/\s*10", re.IGNORECASE),
    "sc": re.compile(r"\bsc\s*:\s*(\d{1,2})\s*/\s*10", re.IGNORECASE),
}
_LENIENT_HEADER = re.compile(
    r"^[ \t]*(artifact|misalign)[ \t]*:[ \t]*$", re.IGNORECASE | re.MULTILINE
)


def parse_lenient(text: str) -> Answer:
    """The published parser, holes included: `5: 8,9\\n6: 8` loses row 6, "ratio 3:4" is a cell,
    "none of the cells" is a clean part. For figures that compare with the paper, never to decide.
    """
    scores: dict[ScoreName, int] = {}
    for name, pattern in _LENIENT_SCORES.items():
        match = pattern.search(text)
        if match and int(match.group(1)) <= 10:
            scores[name] = int(match.group(1))
    headers = list(_LENIENT_HEADER.finditer(text))
    if not headers:
        return Answer(scores, _lenient_grid(text))
    ends = [*(header.start() for header in headers[1:]), len(text)]
    channels = {}
    for header, end in zip(headers, ends, strict=True):
        grid = _lenient_grid(text[header.end() : end])
        if grid is not None:
            channels[header.group(1).lower()] = grid
    union = None
    for grid in channels.values():
        union = grid if union is None else union | grid
    return Answer(scores, union, channels)


def _lenient_grid(text: str) -> DefectGrid | None:
    stripped = re.sub(r"\[[^\]]*\]", "", text).replace("!", "")
    cells = [
        (int(match.group(1)) - 1, int(column) - 1)
        for match in _LENIENT_ROW.finditer(stripped)
        for column in re.findall(r"\d{1,2}", match.group(2))
    ]
    inside = [(row, column) for row, column in cells if 0 <= row < SIDE and 0 <= column < SIDE]
    if inside:
        return DefectGrid.of(inside)
    return EMPTY if re.search(r"\bnone\b", stripped, re.IGNORECASE) else None
