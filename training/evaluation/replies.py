"""Free text of a model -> answers, with a warning for everything that its format has not.

The parsers are the contract's. `VERSION` is stored with every row; raw replies are kept, so that
a change here can be replayed without asking anybody.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forge_station.contract import grid_text, tasks
from forge_station.contract.grid import DefectGrid
from forge_station.contract.grid_text import Request
from training.evaluation.prompts import Question
from training.evaluation.rows import CELL_VIEWS, Cell

VERSION = "replies 1"
NO_ANSWER, CUT_OFF, TWO_ANSWERS = "NO_ANSWER", "CUT_OFF", "TWO_ANSWERS"


@dataclass(frozen=True)
class Letter:
    """The chosen option, "" where none can be made out."""

    option: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Grids:
    """Cells of all views, None where they cannot be read; score 0..10 or None."""

    cells: tuple[Cell, ...] | None
    score: float | None
    warnings: tuple[str, ...] = ()


def letter(text: str, question: Question, *, strict_first_letter: bool = False) -> Letter:
    """Of several ways to answer: the last `Answer: X`, a sole bare letter, a sole option's text."""
    options = question.options
    found = tasks.parse_letter(text, options, strict_first_letter=strict_first_letter)
    if not found and not strict_first_letter:
        found = _sole_text(text, question)
    if not found:
        return Letter("", (f"{question.name}:{NO_ANSWER}",))
    said = re.findall(r"(?i)answer[\s*]*(?:is|:)[\s*:(]*(\w+)", text)
    several = len({word.lower() for word in said}) > 1
    meant = question.meanings[found] if question.meanings is not None else found
    return Letter(meant, (f"{question.name}:{TWO_ANSWERS}",) if several else ())


def _sole_text(text: str, question: Question) -> str:
    """The only option whose words stand in the text, such as `hex nut M8`."""
    words = question.meanings or {option: option for option in question.options if len(option) > 1}
    said = re.split(r"(?i)answer[\s*]*(?:is|:)", text)[-1]
    plain = said.lower().replace("_", " ")
    named = [
        key
        for key, value in words.items()
        if re.search(rf"\b{re.escape(value.lower().replace('_', ' '))}\b", plain)
    ]
    return named[0] if len(named) == 1 else ""


def surfinsp(text: str, classes: Sequence[str]) -> Letter:
    """Class of the two-part answer."""
    found, warnings = tasks.parse_surfinsp(text, classes)
    if not found:
        return Letter("", (f"SURFINSP:{NO_ANSWER}",))
    return Letter(found, tuple(f"SURFINSP:{_code(warning)}" for warning in warnings))


def _code(warning: str) -> str:
    return re.sub(r"\W+", "_", warning).strip("_").upper()


def grids(text: str, views: Sequence[str], request: str) -> Grids:
    """Score and cells. Each view's rows stand behind its name; a photo has no such headers."""
    wants_score, wants_grid = request != "grid", request != "score"
    head, sections = _sections(text, views if len(views) > 1 else ())
    if len(views) == 1:
        lines = head.splitlines()
        scored = [line for line in lines if re.match(r"\s*score\s*:", line, re.IGNORECASE)]
        head = "\n".join(scored)
        sections = {views[0]: "\n".join(line for line in lines if line not in scored).strip()}
    warnings: list[str] = []
    score = None
    if wants_score:
        parsed = grid_text.parse(head.strip(), Request(score=True, grid="no"))
        score = parsed.answer.overall
        warnings += [f"SCORE:{item.code}" for item in parsed.warnings]
    cells: list[Cell] | None = [] if wants_grid else None
    for view in views if wants_grid else ():
        if view not in sections:
            warnings.append("GRID:NO_VIEW")
            cells = None
            continue
        parsed = grid_text.parse(sections[view], Request(grid="flat"))
        warnings += [f"GRID:{item.code}" for item in parsed.warnings]
        if parsed.answer.grid is None:
            cells = None
        elif cells is not None:
            index = CELL_VIEWS.index(view)
            cells += [(index, row, column) for row, column in parsed.answer.grid.indices()]
    return Grids(None if cells is None else tuple(cells), score, tuple(warnings))


def _sections(text: str, views: Sequence[str]) -> tuple[str, Mapping[str, str]]:
    """(text before the first header, view -> text behind its header)."""
    if not views:
        return text, {}
    pieces = re.split(rf"(?im)^\s*({'|'.join(views)})\s*:[ \t]*\n?", text)
    names = [name.lower() for name in pieces[1::2]]
    return pieces[0], dict(zip(names, (piece.strip() for piece in pieces[2::2]), strict=True))


def rows_text(cells: Sequence[tuple[int, int]]) -> str:
    """Cells (row, column) as the rows that `grids` reads."""
    return grid_text.rows_text(DefectGrid.of(cells))
