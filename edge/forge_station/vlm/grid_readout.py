"""The defect grid of a picture, read in one of three ways through one interface.

* `rows`: every row of every view is a short branch behind the picture, all in parallel under the
  grammar of a row. A row is written from a probability on.
* `soft`: the probability of every cell in two forward passes, no decoding. A cell is marked from a
  probability on: one threshold that trades false alarms against missed defects.
* `text`: the rows that are not empty as one text, one token after the other. Slow, and only for a
  model that was trained to write it: for comparison.

It knows keys, tokens and budgets; what a view is called stands in the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from forge_station.contract.grid_text import parse_columns
from forge_station.contract.tasks import GRID_KEY
from forge_station.vlm.decode import Branch, Limits
from forge_station.vlm.grammar import COLUMNS, Grammar, Tokens
from forge_station.vlm.model import Trunk, VisionLanguageModel

Readout = Literal["rows", "soft", "text"]
READOUTS: tuple[Readout, ...] = get_args(Readout)


@dataclass(frozen=True)
class GridRead:
    """`cells` bool [rows, 16] in the order of the keys. `overrun`: a budget was exceeded.

    `probabilities` float32 [rows, 16]: of each cell (`soft` only).
    """

    cells: NDArray[np.bool_]
    overrun: bool = False
    probabilities: NDArray[np.float32] | None = None


def read_grid(
    model: VisionLanguageModel,
    trunk: Trunk,
    keys: Sequence[str],
    how: Readout,
    threshold: float,
    limits: Limits,
) -> GridRead:
    """Read the grid rows named by `keys` behind the trunk.

    `threshold`: of a row's probability (`rows`) or a cell's (`soft`); `text` has none. The token
    budget of `limits` is that of one row; the text of all rows may take as much as all of them.
    """
    match how:
        case "soft":
            soft = model.soft_rows(trunk, keys)
            return GridRead(soft.cells >= threshold, probabilities=soft.cells)
        case "rows":
            grammar = model.columns_grammar()
            branches = [Branch(key, grammar, row_threshold=threshold) for key in keys]
            rows = model.decode_branches(trunk, branches, limits)
            cells = np.zeros((len(keys), COLUMNS), np.bool_)
            for row, result in enumerate(rows):
                if not result.overrun:
                    cells[row, list(parse_columns(result.text))] = True
            return GridRead(cells, any(result.overrun for result in rows))
        case "text":
            whole = model.rows_grammar(keys)
            limits = replace(limits, max_tokens=limits.max_tokens * len(keys))
            (result,) = model.decode_branches(trunk, [Branch(GRID_KEY, whole)], limits)
            found = cells_of(whole, result.tokens, len(keys))
            return GridRead(found, result.overrun)


def text_tokens(grammar: Grammar, cells: NDArray[np.bool_]) -> Tokens:
    """The tokens of a grid bool [rows, 16] as one text (`VisionLanguageModel.rows_grammar`)."""
    tokens: Tokens = ()
    for row in np.flatnonzero(cells.any(axis=1)):
        tokens += grammar.row_keys[row] + row_tokens(grammar, cells[row])
    return tokens + grammar.closing


def row_tokens(grammar: Grammar, row: NDArray[np.bool_]) -> Tokens:
    """The tokens of one row bool [16] that is not empty, its end included."""
    first, *later = np.flatnonzero(row).tolist()
    tokens = grammar.first[first]
    for column in later:
        tokens += grammar.following[column]
    return tokens + grammar.ending


def cells_of(grammar: Grammar, tokens: Tokens, rows: int) -> NDArray[np.bool_]:
    """The complete rows of a text, also of one that was broken off -> bool [rows, 16]."""
    cells = np.zeros((rows, COLUMNS), np.bool_)
    while tokens:
        found = [(key, row) for row, key in enumerate(grammar.row_keys) if _starts(tokens, key)]
        if not found:
            break  # the closing, or a key that was broken off
        key, row = max(found, key=lambda item: len(item[0]))
        columns = grammar.columns(tokens[len(key) :])
        length = len(key) + len(grammar.first[columns[0]]) if columns else len(tokens)
        length += sum(len(grammar.following[column]) for column in columns[1:])
        if not _starts(tokens[length:], grammar.ending):
            break
        cells[row, list(columns)] = True
        tokens = tokens[length + len(grammar.ending) :]
    return cells


def _starts(tokens: Tokens, beginning: Tokens) -> bool:
    return tokens[: len(beginning)] == beginning
