"""The station's three questions as training examples, in the text of `contract.tasks`.

    sheet(...)      a marks sheet: every part read; then, in turn two, judged by a specification
    surface(...)    one part or photo: class, score and the defect grid of every view

A grid is written as its filled rows (`front r5: 5,6`), an empty one as `front: none`: that is the
sequential form. `expanded` turns it into the station's branches, sixteen rows a view.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from forge_station.contract import tasks
from training.data.examples import IMAGE, Branch, Message

PHOTO = "photo"
"""View name of a grid on a photo; scans have front, side and top."""
_ROW = re.compile(r"(\w+) r(\d+):")
_EMPTY = re.compile(r"(\w+):")
_KEYS = frozenset({tasks.CLASS_KEY, tasks.SCORE_KEY, tasks.ANSWER_KEY, tasks.MISSING_KEY})


def surface(
    facts: str,
    defect: str,
    score: int | None,
    grids: Mapping[str, NDArray[np.bool_]] | None,
) -> tuple[Message, ...]:
    """A surface conversation. `grids`: view -> bool [16, 16]; None where no mask is known.

    Never asks for what the label cannot supervise: `facts` must request what is given here.
    """
    lines = [f"{tasks.CLASS_KEY} {defect}"]
    if score is not None:
        lines.append(f"{tasks.SCORE_KEY} {score}/10")
    for view, cells in (grids or {}).items():
        lines += grid_lines(view, cells)
    return _chat((f"{IMAGE}{facts}", "\n".join(lines)))


def sheet(
    facts: str,
    readings: Mapping[str, str],
    judge: tuple[str, str] | None = None,
) -> tuple[Message, ...]:
    """A marks sheet: readings by mark, then optionally (question, answer lines) of turn two."""
    turns = [(f"{IMAGE}{facts}", tasks.readings_text(readings).strip())]
    if judge is not None:
        turns.append(judge)
    return _chat(*turns)


def grid_lines(view: str, cells: NDArray[np.bool_]) -> list[str]:
    """Filled rows of a grid bool [16, 16] as `view r5: 5,6`, or `view: none`."""
    if cells.shape != (tasks.GRID_ROWS, tasks.GRID_ROWS):
        raise ValueError(f"grid of {view}: expected bool [16, 16], got {cells.shape}")
    rows = [
        f"{tasks.row_key(view, row)} {tasks.row_text(np.flatnonzero(cells[row]).tolist())}"
        for row in range(tasks.GRID_ROWS)
        if cells[row].any()
    ]
    return rows or [f"{view}: {tasks.NONE}"]


def expanded(lines: Iterable[Branch]) -> tuple[Branch, ...]:
    """Sequential lines -> the station's branches: every view in them gets all its sixteen rows."""
    out: list[Branch] = []
    rows: dict[str, dict[str, str]] = {}
    for line in lines:
        row, empty = _ROW.fullmatch(line.key), _EMPTY.fullmatch(line.key)
        if row:
            rows.setdefault(row[1], {})[line.key] = line.answer
        elif empty and line.answer == tasks.NONE and _is_view(line.key):
            rows.setdefault(empty[1], {})
        else:
            out.append(line)
    for view, filled in rows.items():
        keys = [tasks.row_key(view, row) for row in range(tasks.GRID_ROWS)]
        out += [Branch(key, filled.get(key, tasks.NONE)) for key in keys]
    return tuple(out)


def is_row(key: str) -> bool:
    """`front r5:` is a grid row."""
    return _ROW.fullmatch(key) is not None


def _is_view(key: str) -> bool:
    """`front:` is a view, `answer:` and the mark `A:` are not."""
    return key not in _KEYS and not re.fullmatch(r"[A-Z]:", key)


def _chat(*turns: tuple[str, str]) -> tuple[Message, ...]:
    messages = [Message("system", tasks.SYSTEM_PROMPT)]
    for question, answer in turns:
        messages += [Message("user", question), Message("assistant", answer)]
    return tuple(messages)
