"""The 16 x 16 defect grid of one view: cells, masks and boxes -> cells, cell -> box.

It knows nothing of text (`grid_text`), of explanations or of metrics. Arrays count rows and columns
from 0, row 0 on top; text counts them from 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from forge_station.contract import lanczos
from forge_station.contract.error import ContractError

SIDE = 16
"""Rows and columns of a grid (VIEScore2; its ablation found 16 better than 12 and 32)."""
STATION_COVERAGE = 0.1
"""Station mode: a cell is defective when more than this share of it is; a measured thin crack
through a 32 px cell covers 0.1 to 0.4 of it."""

Cells: TypeAlias = npt.NDArray[np.bool_]
Mask: TypeAlias = npt.NDArray[np.bool_] | npt.NDArray[np.uint8] | npt.NDArray[np.floating]


def _no_cells() -> Cells:
    return np.zeros((SIDE, SIDE), np.bool_)


@dataclass(frozen=True, eq=False)
class DefectGrid:
    """bool [16, 16] `cells` that are defective and, of these, the `major` ones (`!` in text)."""

    cells: Cells = field(default_factory=_no_cells)
    major: Cells = field(default_factory=_no_cells)

    def __post_init__(self) -> None:
        for name in ("cells", "major"):
            array = np.asarray(getattr(self, name))
            if array.shape != (SIDE, SIDE) or array.dtype != np.bool_:
                raise ContractError(
                    "not a defect grid",
                    which=name,
                    expected=f"bool [{SIDE}, {SIDE}]",
                    got=f"{array.dtype} {list(array.shape)}",
                )
            own = array.copy()
            own.setflags(write=False)
            object.__setattr__(self, name, own)
        if np.any(self.major & ~self.cells):
            raise ContractError("a major cell must be a defective cell", which="grid")

    @classmethod
    def of(
        cls, cells: Iterable[tuple[int, int]], major: Iterable[tuple[int, int]] = ()
    ) -> DefectGrid:
        """From (row, column) pairs, 0-based; `major` cells are defective without being repeated."""
        worst = _marked(major)
        return cls(_marked(cells) | worst, worst)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DefectGrid):
            return NotImplemented
        return bool(
            np.array_equal(self.cells, other.cells) and np.array_equal(self.major, other.major)
        )

    def __hash__(self) -> int:
        return hash((self.cells.tobytes(), self.major.tobytes()))

    def __or__(self, other: DefectGrid) -> DefectGrid:
        return DefectGrid(self.cells | other.cells, self.major | other.major)

    @property
    def count(self) -> int:
        return int(self.cells.sum())

    def indices(self) -> tuple[tuple[int, int], ...]:
        """(row, column) of every defective cell, 0-based, row-major."""
        return tuple((int(row), int(column)) for row, column in np.argwhere(self.cells))

    def columns(self, row: int) -> tuple[int, ...]:
        """0-based columns of the defective cells of one 0-based row, ascending."""
        return tuple(int(column) for column in np.flatnonzero(self.cells[row]))


EMPTY = DefectGrid()


def _marked(cells: Iterable[tuple[int, int]]) -> Cells:
    grid = _no_cells()
    for row, column in cells:
        if not (0 <= row < SIDE and 0 <= column < SIDE):
            raise ContractError(
                "cell outside the grid",
                expected=f"row and column 0..{SIDE - 1}",
                got=f"row {row}, column {column}",
            )
        grid[row, column] = True
    return grid


def coverage(mask: Mask) -> npt.NDArray[np.float64]:
    """float [16, 16]: which share of each cell the mask covers, exact for any mask size."""
    values = _unit_values(mask)
    covered = _overlap(values.shape[0]) @ values @ _overlap(values.shape[1]).T
    shares: npt.NDArray[np.float64] = covered / values.size
    return shares


def from_mask(mask: Mask, *, threshold: float = STATION_COVERAGE, min_cells: int = 1) -> DefectGrid:
    """Station mode: cells of which more than `threshold` is covered.

    A mask that is not empty but covers no cell enough marks its `min_cells` best cells, so a thin
    crack never vanishes (in paper mode 6.4 % of non-empty masks do).
    """
    shares = coverage(mask)
    cells = shares > threshold
    if not cells.any() and shares.max() > 0:
        best = np.argsort(-shares, axis=None, kind="stable")[:min_cells]
        cells.flat[[index for index in best if shares.flat[index] > 0]] = True
    return DefectGrid(cells)


def from_mask_paper(mask: Mask, *, kind: Literal["mask", "heatmap"] = "mask") -> DefectGrid:
    """Paper mode, exact: 8 bit, LANCZOS to 16 x 16, > 0.5 (mask) or > 0.25 (heatmap)."""
    small = _paper_values(_unit_values(mask))
    return DefectGrid(small / 255 > (0.5 if kind == "mask" else 0.25))


def from_response_paper(
    response: npt.NDArray[np.floating], *, major: Literal["lanczos", "area"] = "lanczos"
) -> DefectGrid:
    """Paper mode for a response map 0..1 of one channel: defective cells and major cells.

    Problem: LANCZOS of (response > 0.5) is > 0.5. Major: the cell's own response is >= 0.9, by
    LANCZOS as published (where a fully covered lone cell reaches 0.745 and so is never major), or
    by the cell's mean ("area"), which has no such hole.
    """
    values = _unit_values(response)
    cells = _paper_values((values > 0.5).astype(np.float64)) / 255 > 0.5
    level = _paper_values(values) / 255 if major == "lanczos" else coverage(response)
    return DefectGrid(cells, cells & (level >= 0.9))


def from_boxes_paper(boxes: Sequence[tuple[float, float, float, float]]) -> DefectGrid:
    """Paper mode for boxes (x, y, width, height) on a 1000 x 1000 canvas; borders included."""
    canvas = np.zeros((1000, 1000), np.uint8)
    for x, y, width, height in boxes:
        canvas[_span(y, height), _span(x, width)] = 255
    return DefectGrid(lanczos.resize(canvas, (SIDE, SIDE)) > 127)


def from_boxes(
    boxes: Sequence[tuple[float, float, float, float]],
    image_size: tuple[int, int],
    *,
    threshold: float = STATION_COVERAGE,
) -> DefectGrid:
    """Station mode for boxes (x0, y0, x1, y1) in pixels of an image (height, width)."""
    height, width = image_size
    cells = _no_cells()
    for x0, y0, x1, y1 in boxes:
        if not (x0 < x1 and y0 < y1):
            raise ContractError("empty box", expected="x0 < x1 and y0 < y1", got=(x0, y0, x1, y1))
        down = _shares(y0 * SIDE / height, y1 * SIDE / height)
        across = _shares(x0 * SIDE / width, x1 * SIDE / width)
        shares = np.outer(down, across)
        own = shares > threshold
        if not own.any() and shares.max() > 0:
            own.flat[int(np.argmax(shares))] = True
        cells |= own
    return DefectGrid(cells)


def cell_box_px(
    row: int, column: int, image_size: tuple[int, int]
) -> tuple[float, float, float, float]:
    """(x0, y0, x1, y1) in pixels of the 0-based cell, in an image (height, width)."""
    _marked([(row, column)])
    down, across = image_size[0] / SIDE, image_size[1] / SIDE
    return column * across, row * down, (column + 1) * across, (row + 1) * down


def cell_box_mm(
    row: int, column: int, origin_mm: tuple[float, float], mm_per_cell: float
) -> tuple[float, float, float, float]:
    """(right0, up0, right1, up1) in mm of the view; `origin_mm` is the grid's top-left corner."""
    _marked([(row, column)])
    right, up = origin_mm
    left, top = right + column * mm_per_cell, up - row * mm_per_cell
    return left, top - mm_per_cell, left + mm_per_cell, top


def _unit_values(mask: Mask) -> npt.NDArray[np.float64]:
    """float64 [H, W] in 0..1. As published: values are divided by 255 only if any exceeds 1."""
    array = np.asarray(mask)
    if array.ndim != 2 or 0 in array.shape:
        raise ContractError("not a mask", expected="[H, W], not empty", got=list(array.shape))
    values = array.astype(np.float64)
    if not np.isfinite(values).all():
        raise ContractError("mask with NaN or infinity", expected="finite values 0..1 or 0..255")
    if values.max() > 1:
        values = values / 255
    if values.min() < 0 or values.max() > 1:
        got = f"{array.min()} to {array.max()}"
        raise ContractError("mask out of range", expected="0..1 or 0..255", got=got)
    return values


def _paper_values(values: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    return lanczos.resize((values * 255).astype(np.uint8), (SIDE, SIDE))


def _overlap(length: int) -> npt.NDArray[np.float64]:
    """[16, length]: how much of each cell each of `length` pixels covers; a row sums to `length`.

    In units of 1/16 pixel a cell is `length` long and a pixel 16: whole numbers, so a coverage
    that is exactly at a threshold is not lifted over it by rounding.
    """
    pixels, cells = np.arange(length), np.arange(SIDE)[:, None]
    end = np.minimum((pixels + 1) * SIDE, (cells + 1) * length)
    part = np.clip(end - np.maximum(pixels * SIDE, cells * length), 0, None)
    return np.asarray(part, np.float64)


def _shares(low: float, high: float) -> npt.NDArray[np.float64]:
    """[16]: share of each unit cell that the interval low..high (in cells) covers."""
    cells = np.arange(SIDE)
    part = np.minimum(high, cells + 1) - np.maximum(low, cells)
    shares: npt.NDArray[np.float64] = np.clip(part, 0.0, 1.0)
    return shares


def _span(start: float, length: float) -> slice:
    """Pixels that a rectangle from `start` of `length` paints, its last border included."""
    return slice(max(0, int(start)), max(0, int(start + length) + 1))
