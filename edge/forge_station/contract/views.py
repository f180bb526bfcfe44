"""The three orthographic views and the two pictures that the model is given.

Knows names, axes and pixel layout only; drawing is `geometry.render` and `geometry.sheet`.

Every picture is metric: one millimetre-per-pixel for all panels of one picture. The channels of a
picture are RGB = (shade, relief, height), background 0 (see `geometry.render`); a bundle can be
trained to see the difference from a reference in place of the height. The layout is the same at
every model size; only `cell` and `panel` change (nano 56 and 224 px, 3B 196 and 448 px), always
multiples of the vision token side (patch 14 x merge 2 = 28 px).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

VISION_TOKEN_PX = 28
VIEWS: tuple[str, str, str] = ("front", "side", "top")
PHOTO: Literal["photo"] = "photo"
"""View name of a grid on a photo: 16 x 16 cells over the whole photo, whatever its aspect."""
MARKS = "ABCDEF"
CHANNELS: tuple[str, str, str] = ("shade", "relief", "height")
DIFFERENCE, WHITE = "difference", "white"
SURFACE_CHANNELS: tuple[str, str, str] = ("shade", "relief", DIFFERENCE)
"""Of a surface picture where the part has a reference (`geometry.reference`) to differ from."""


@dataclass(frozen=True)
class ViewAxes:
    """Which coordinate runs right, which up, and which (with sign) towards the viewer."""

    right: int
    up: int
    towards: int
    sign: float


AXES: dict[str, ViewAxes] = {
    "front": ViewAxes(right=0, up=2, towards=1, sign=-1.0),
    "side": ViewAxes(right=1, up=2, towards=0, sign=1.0),
    "top": ViewAxes(right=0, up=1, towards=2, sign=1.0),
}


@dataclass(frozen=True)
class Layout:
    """Pixel layout of both pictures.

    marks sheet: rows front, side, top; one column per mark; the upper `strip` pixels of every cell
    hold the letter, so that a letter never sits on a part. surface picture: three panels in a row.
    """

    cell: int = 56
    columns: int = len(MARKS)
    panel: int = 224

    def __post_init__(self) -> None:
        for name, value in (("cell", self.cell), ("panel", self.panel)):
            if value <= 0 or value % VISION_TOKEN_PX:
                raise ValueError(
                    f"layout {name}: expected a positive multiple of {VISION_TOKEN_PX} px, "
                    f"got {value}"
                )
        if self.panel % 16:
            raise ValueError(f"layout panel: expected a multiple of 16 px, got {self.panel}")

    @property
    def strip(self) -> int:
        return 10 * self.cell // 56

    @property
    def margin(self) -> int:
        return 2 * self.cell // 56

    @property
    def sheet_size(self) -> tuple[int, int]:
        """(height, width) in pixels of the marks sheet."""
        return len(VIEWS) * self.cell, self.columns * self.cell

    @property
    def surface_size(self) -> tuple[int, int]:
        """(height, width) in pixels of the surface picture."""
        return self.panel, len(VIEWS) * self.panel


NANO_LAYOUT = Layout()
LARGE_LAYOUT = Layout(cell=196, panel=448)
