"""Images and token ids -> the index and position inputs of the two graphs, numpy only.

It knows the geometry of Qwen2.5-VL (patch, merge, window, mrope) and nothing of sessions or text.
Preprocessing never depends on the values of an image, and there is no resampling, on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from forge_station.errors import ModelError

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]

CLIP_MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
CLIP_STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)


@dataclass(frozen=True)
class VisionGeometry:
    """Patch side px, patches merged per token side, temporal copies, window side px."""

    patch: int = 14
    merge: int = 2
    temporal: int = 2
    window: int = 112

    @property
    def token_px(self) -> int:
        """Side of one language token in pixels; image sides are multiples of it."""
        return self.patch * self.merge

    @property
    def slots(self) -> int:
        """Patches in one attention window."""
        return (self.window // self.patch) ** 2

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Image side lengths in px -> (rows, columns) of patches."""
        if height <= 0 or width <= 0 or height % self.token_px or width % self.token_px:
            raise ModelError(
                "image size does not fit the vision model",
                which=f"{height} x {width} px",
                expected=f"sides that are positive multiples of {self.token_px} px",
                action="render the view at a multiple of the token size",
            )
        return height // self.patch, width // self.patch

    def token_grid(self, height: int, width: int) -> tuple[int, int]:
        """Image side lengths in px -> (rows, columns) of language tokens."""
        rows, columns = self.grid(height, width)
        return rows // self.merge, columns // self.merge


@dataclass(frozen=True)
class VisionLayout:
    """Where each patch goes in the padded window layout of vision.onnx (L slots, T tokens).

    `source` int64 [L]: patch in merge order of each slot, 0 for padding. `valid` float32 [L]: 1, or
    0 for padding. `position` int64 [L, 2]: patch row and column. `out_index` int64 [T]: for every
    token in reading order the merged slot that holds it.
    """

    source: IntArray
    valid: FloatArray
    position: IntArray
    out_index: IntArray


def patchify(rgb: NDArray[np.uint8], geometry: VisionGeometry) -> NDArray[np.uint8]:
    """uint8 [H, W, 3] -> uint8 [patches, 3 * patch^2], patches in merge order.

    Normalising is part of the vision graph; see `normalised_patches` for the published form.
    """
    if rgb.ndim != 3 or rgb.shape[2] != 3 or rgb.dtype != np.uint8:
        raise ModelError(
            "not an image for the model",
            expected="uint8 [H, W, 3]",
            got=f"{rgb.dtype} {list(rgb.shape)}",
        )
    rows, columns = geometry.grid(rgb.shape[0], rgb.shape[1])
    merge, patch = geometry.merge, geometry.patch
    pixels = rgb.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
    pixels = pixels.transpose(0, 3, 1, 4, 6, 2, 5)  # block row, block column, row, column, c, y, x
    return np.ascontiguousarray(pixels).reshape(rows * columns, -1)


def normalised_patches(rgb: NDArray[np.uint8], geometry: VisionGeometry) -> FloatArray:
    """float32 [patches, 3 * temporal * patch^2]: what the published image processor gives.

    Equal to it at sizes that are multiples of patch * merge. For torch, not for vision.onnx.
    """
    patches = patchify(rgb, geometry).reshape(-1, 3, 1, geometry.patch**2)
    scaled = patches.astype(np.float32) / np.float32(255.0)
    pixels = (scaled - CLIP_MEAN[:, None, None]) / CLIP_STD[:, None, None]
    return np.repeat(pixels, geometry.temporal, axis=2).reshape(len(pixels), -1)


@lru_cache(maxsize=32)
def vision_layout(rows: int, columns: int, geometry: VisionGeometry) -> VisionLayout:
    """Window layout of an image of rows x columns patches; windows at the rim are padded."""
    merge, unit = geometry.merge, geometry.merge**2
    high, wide = rows // merge, columns // merge
    side: int = geometry.window // geometry.token_px
    cells = np.arange(high * wide, dtype=np.int64).reshape(high, wide)
    cells = np.pad(cells, ((0, -high % side), (0, -wide % side)), constant_values=-1)
    windows = cells.reshape(cells.shape[0] // side, side, cells.shape[1] // side, side)
    index = windows.transpose(0, 2, 1, 3).reshape(-1, side * side)
    order = np.argsort(index < 0, axis=1, kind="stable")  # real cells first inside a window
    cell = np.take_along_axis(index, order, 1).reshape(-1)
    inner = np.arange(unit, dtype=np.int64)
    valid = np.repeat(cell >= 0, unit)
    source = np.where(valid, (cell[:, None] * unit + inner).reshape(-1), 0)
    cell_row, cell_column = np.divmod(np.maximum(cell, 0), wide)
    row = (cell_row[:, None] * merge + inner // merge).reshape(-1)
    column = (cell_column[:, None] * merge + inner % merge).reshape(-1)
    out_index = np.empty(high * wide, np.int64)
    slots = np.nonzero(cell >= 0)[0]
    out_index[cell[slots]] = slots
    layout = VisionLayout(source, valid.astype(np.float32), np.stack([row, column], -1), out_index)
    for array in (layout.source, layout.valid, layout.position, layout.out_index):
        array.setflags(write=False)
    return layout


def mrope_positions(
    ids: IntArray,
    image_token: int,
    token_grids: Sequence[tuple[int, int]],
    start: int = 0,
) -> tuple[IntArray, int]:
    """Token ids [S] -> (position ids int64 [3, S] for time, row, column; the next free position).

    Image tokens carry row and column of their token grid, text continues after the larger side.
    `token_grids` lists (rows, columns) in tokens of every image in order. Raises ModelError when
    the ids do not hold exactly these images.
    """
    positions = np.empty((3, len(ids)), np.int64)
    is_image = ids == image_token
    at, current = 0, start
    for rows, columns in token_grids:
        found = np.nonzero(is_image[at:])[0]
        first = at + int(found[0]) if found.size else len(ids)
        last = first + rows * columns
        if last > len(ids) or not is_image[first:last].all():
            raise ModelError(
                "image tokens do not match the images",
                expected=f"{rows * columns} image tokens in a row for a {rows} x {columns} grid",
                got=f"{int(is_image[at:].sum())} left",
            )
        positions[:, at:first] = current + np.arange(first - at)
        current += first - at
        positions[0, first:last] = current
        positions[1, first:last] = current + np.repeat(np.arange(rows), columns)
        positions[2, first:last] = current + np.tile(np.arange(columns), rows)
        current += max(rows, columns)
        at = last
    if is_image[at:].any():
        raise ModelError(
            "image tokens do not match the images",
            expected=f"{len(token_grids)} images",
            got="more image tokens than that",
        )
    positions[:, at:] = current + np.arange(len(ids) - at)
    return positions, current + len(ids) - at
