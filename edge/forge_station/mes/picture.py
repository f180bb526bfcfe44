"""A message turned back into a picture of its defect grids: SVG text, or pixels.

It knows the messages only, so an MES may use it as it is: `picture.svg(body)` for a page,
`picture.png(body)` for a file. Row 1 is at the top, column 1 at the left, as in the message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station.contract.error import ContractError
from forge_station.contract.grid import DefectGrid
from forge_station.mes.payloads import grids_of

CELL_PX = 16
MARGIN_PX = 12
HEAD_PX = 26
FOOT_PX = 20
DEFECT, LINE, INK = (220, 50, 47), (205, 210, 216), (40, 46, 54)


@dataclass(frozen=True)
class View:
    """One grid of a message and its place on the part, where the message says it."""

    mark: str
    name: str
    grid: DefectGrid
    mm_per_cell: float | None
    origin_mm: tuple[float, float] | None

    @property
    def title(self) -> str:
        return f"{self.mark} {self.name}"

    @property
    def frame(self) -> str:
        """The mm frame in words: the size of a cell, and where the top-left corner lies."""
        size = "" if self.mm_per_cell is None else f"{self.mm_per_cell:.2f} mm a cell"
        if self.origin_mm is None:
            return size
        right, up = self.origin_mm
        return f"{size}, corner {right:.1f}, {up:.1f}".strip(", ")


def views(message: Mapping[str, Any] | bytes) -> tuple[View, ...]:
    """The views of a verdict or grid message, in its order; empty without grids.

    Raises ContractError as `payloads.grids_of`: for a verdict that only counts its cells, the
    message `grid.ref` has them.
    """
    try:
        content = json.loads(message) if isinstance(message, bytes) else message
    except ValueError as error:
        raise ContractError("the message is no JSON", got=error) from error
    grids = grids_of(content)
    holder = content if content.get("schema") == "grid/1.0" else content.get("grid") or {}
    found = []
    for item in holder.get("views", ()):
        origin = item.get("originMm")
        found.append(
            View(
                item["mark"],
                item["view"],
                grids[item["mark"], item["view"]],
                item.get("mmPerCell", holder.get("mmPerCell")),
                None if origin is None else (origin[0], origin[1]),
            )
        )
    return tuple(found)


def svg(message: Mapping[str, Any] | bytes) -> str:
    """All views side by side as one `<svg>` element; needs nothing from anywhere else."""
    side = 16 * CELL_PX
    parts = []
    found = views(message)
    for number, view in enumerate(found):
        left = MARGIN_PX + number * (side + MARGIN_PX)
        text = f'font-family="sans-serif" fill="{_hex(INK)}"'
        parts.append(
            f'<text x="{left}" y="{HEAD_PX - 9}" {text} font-size="13">{escape(view.title)}</text>'
        )
        parts += [
            f'<rect x="{left + column * CELL_PX}" y="{HEAD_PX + row * CELL_PX}"'
            f' width="{CELL_PX}" height="{CELL_PX}" stroke="{_hex(LINE)}"'
            f' fill="{_hex(DEFECT) if view.grid.cells[row, column] else "#ffffff"}"/>'
            for row in range(16)
            for column in range(16)
        ]
        parts.append(
            f'<text x="{left}" y="{HEAD_PX + side + 15}" {text} font-size="11">'
            f"{escape(view.frame)}</text>"
        )
    width, height = _size(len(found))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}" role="img" aria-label="defect grids">'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>{"".join(parts)}</svg>'
    )


def pixels(message: Mapping[str, Any] | bytes) -> NDArray[np.uint8]:
    """All views side by side, height x width x 3, RGB."""
    found = views(message)
    width, height = _size(len(found))
    image = np.full((height, width, 3), 255, np.uint8)
    side = 16 * CELL_PX
    for number, view in enumerate(found):
        left = MARGIN_PX + number * (side + MARGIN_PX)
        area = image[HEAD_PX : HEAD_PX + side + 1, left : left + side + 1]
        marked = np.kron(view.grid.cells, np.ones((CELL_PX, CELL_PX), bool))
        area[:side, :side][marked] = DEFECT
        area[::CELL_PX, :] = LINE
        area[:, ::CELL_PX] = LINE
        for text, y in ((view.title, HEAD_PX - 9), (view.frame, HEAD_PX + side + 15)):
            cv2.putText(image, text, (left, y), cv2.FONT_HERSHEY_SIMPLEX, 0.4, INK, 1, cv2.LINE_AA)
    return image


def png(message: Mapping[str, Any] | bytes) -> bytes:
    """The same as the bytes of a PNG file."""
    _, data = cv2.imencode(".png", cv2.cvtColor(pixels(message), cv2.COLOR_RGB2BGR))
    return data.tobytes()


def _size(count: int) -> tuple[int, int]:
    side = 16 * CELL_PX
    return MARGIN_PX + max(1, count) * (side + MARGIN_PX), HEAD_PX + side + FOOT_PX


def _hex(colour: tuple[int, int, int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)
