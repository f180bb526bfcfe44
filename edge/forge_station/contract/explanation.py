"""Why a score is what it is, said by rule from score and grid; no model and no parameter involved.

Rules of VIEScore2's verbalisation (regions, positions, coverage words), in the station's words:
pq with `artifact` is the surface, sc with `misalign` is conformity. A channel that was not asked
for is never said to be clean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from forge_station.contract.grid import SIDE, DefectGrid
from forge_station.contract.grid_text import Answer, ScoreName

_WHOLE = 192
_LARGE = 85
_DESCRIBED = 3
_LABELS: Mapping[ScoreName, str] = {
    "score": "overall",
    "pq": "surface condition",
    "sc": "conformity",
}
_DEFECTS = {"artifact": "surface defect", "misalign": "mismatch"}
_AXES: tuple[tuple[ScoreName, str], ...] = (("pq", "artifact"), ("sc", "misalign"))


@dataclass(frozen=True)
class Region:
    """Defective cells that touch by an edge. Rows and columns are 0-based and inclusive."""

    top: int
    bottom: int
    left: int
    right: int
    cells: int
    major_share: float

    @property
    def position(self) -> str:
        """One of nine names, from the centre of the bounding box."""
        down = (self.top + self.bottom) / 2 / (SIDE - 1)
        across = (self.left + self.right) / 2 / (SIDE - 1)
        row = "top" if down < 1 / 3 else "bottom" if down > 2 / 3 else "middle"
        column = "left" if across < 1 / 3 else "right" if across > 2 / 3 else "centre"
        return "centre" if (row, column) == ("middle", "centre") else f"{row} {column}"

    @property
    def coverage(self) -> str:
        """Word for the share of major cells."""
        if self.major_share > 0.5:
            return "extensive"
        return "substantial" if self.major_share > 0 else "localized"

    def __str__(self) -> str:
        if self.cells >= _WHOLE:
            where = "the whole image"
        elif self.cells >= _LARGE:
            where = f"a large region at {self.position}"
        else:
            where = self.position
        rows = f"rows {self.top + 1}-{self.bottom + 1}"
        return f"{self.coverage} at {where} ({rows}, columns {self.left + 1}-{self.right + 1})"


def regions(grid: DefectGrid) -> tuple[Region, ...]:
    """4-connected regions, largest first; equal sizes in the order of their first cell."""
    left = grid.cells.copy()
    found = []
    for row, column in grid.indices():
        if not left[row, column]:
            continue
        left[row, column] = False
        cells, open_cells = [(row, column)], [(row, column)]
        while open_cells:
            r, c = open_cells.pop()
            for r2, c2 in ((r - 1, c), (r + 1, c), (r, c - 1), (r, c + 1)):
                if 0 <= r2 < SIDE and 0 <= c2 < SIDE and left[r2, c2]:
                    left[r2, c2] = False
                    cells.append((r2, c2))
                    open_cells.append((r2, c2))
        rows, columns = zip(*cells, strict=True)
        share = float(np.mean([grid.major[cell] for cell in cells]))
        found.append(Region(min(rows), max(rows), min(columns), max(columns), len(cells), share))
    return tuple(sorted(found, key=lambda region: -region.cells))


def describe(grid: DefectGrid) -> str:
    """At most three regions in words, the rest counted; "" for an empty grid."""
    found = regions(grid)
    words = "; ".join(str(region) for region in found[:_DESCRIBED])
    rest = len(found) - _DESCRIBED
    return f"{words}; plus {rest} smaller region{'s' if rest > 1 else ''}" if rest > 0 else words


def level(score: float) -> str:
    """high (8 and more), moderate (5 and more) or low."""
    if score >= 8:
        return "high"
    return "moderate" if score >= 5 else "low"


def explain(answer: Answer) -> str:
    """One or more sentences on scores and grids of an answer in the published format."""
    sentences = []
    if answer.channels is not None:
        for name, channel in _AXES:
            score = answer.scores.get(name)
            sentences.append(
                _sentence(_LABELS[name], score, answer.channels.get(channel), _DEFECTS[channel])
            )
        overall = answer.scores.get("score")
        if overall is not None:
            sentences.insert(0, _sentence(_LABELS["score"], overall, None, ""))
    else:
        names = [name for name in _LABELS if name in answer.scores]
        scored = ", ".join(_scored(_LABELS[name], answer.scores[name]) for name in names)
        lowest = min((answer.scores[name] for name in names), default=None)
        sentences.append(_linked(scored, lowest, answer.grid, "defect"))
    return " ".join(sentence for sentence in sentences if sentence)


def explain_views(score: float | None, grids: Mapping[str, DefectGrid], label: str) -> str:
    """One sentence on one score and the grids of several views, e.g. of the surface check."""
    found = [f"{view}: {describe(grid)}" for view, grid in grids.items() if grid.count]
    scored = "" if score is None else _scored(label, score)
    if found:
        return f"{_joined(scored, score, 'a defect')} {' | '.join(found)}."
    return f"{scored or label}; no cell is marked in {', '.join(grids) or 'any view'}."


def _sentence(label: str, score: float | None, grid: DefectGrid | None, defect: str) -> str:
    return _linked("" if score is None else _scored(label, score), score, grid, defect)


def _linked(scored: str, score: float | None, grid: DefectGrid | None, defect: str) -> str:
    if grid is None:
        return f"{_capital(scored)}." if scored else ""
    if not grid.count:
        nothing = f"no {defect} is marked"
        return f"{_capital(scored)}; {nothing}." if scored else f"{_capital(nothing)}."
    return f"{_capital(_joined(scored, score, f'a {defect}'))} {describe(grid)}."


def _joined(scored: str, score: float | None, defect: str) -> str:
    if score is None:
        return f"the grid marks {defect}:"
    if score < 8:
        return f"{scored}, driven by {defect}:"
    return f"{scored}, the grid nevertheless flags {defect}:"


def _scored(label: str, score: float) -> str:
    return f"{label} {score:g}/10 ({level(score)})"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
