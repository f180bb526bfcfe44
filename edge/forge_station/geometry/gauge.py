"""Measured size of a part, and which catalogue models that size allows.

It does not know the model's answer. A size is the box of the part frame, so it depends on how
the part lies: catalogue models are compared by the boxes of their rest poses (`rest_boxes.json`,
made by `training.rest_boxes`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from forge_station.contract.catalogue import PartModel
from forge_station.geometry.pose import PartCloud, ends, top

# Simulated scans (2026-11-30, 149 parts of 14 kinds, four poses, 0.06..0.6 mm a camera pixel):
# bias of length, width, height 0.02, -0.05, -0.08 px; 90 % within 0.66, 0.79 and 0.45 px.
_UNCERTAINTY_PX = 1.1
_HEIGHT_SHARE = 0.4
# With fewer than four poses a side may be unseen (285 parts, three poses: 5 % are short by more
# than 6 px, the worst by 15 px; heights as with four).
_FULL_VIEW_POSES = 4
_HIDDEN_PX = 5.0
# What `consistent` allows, in uncertainties; wide, so that a true model is never refused.
_ALLOWED, _ALLOWED_HEIGHT, _ALLOWED_HIDDEN = 3.6, 8.0, 2.0


@dataclass(frozen=True)
class Size:
    """Box of the part frame, mm: length along x >= width along y, height above the tray.

    `uncertainty_mm`: 95 % of lengths and widths are within it, of heights within 0.4 of it.
    `hidden_mm`: by how much more length and width may be short because a side was not seen.
    """

    length_mm: float
    width_mm: float
    height_mm: float
    uncertainty_mm: float
    hidden_mm: float = 0.0

    @property
    def box(self) -> tuple[float, float, float]:
        return self.length_mm, self.width_mm, self.height_mm


def measure(part: PartCloud) -> Size:
    """Extents of a part cloud that flying points do not stretch."""
    pixel, poses = part.camera_pixel_mm, part.poses
    spans = []
    for axis in (0, 1):
        low, high = ends(part.points[:, axis].astype(np.float64), pixel, poses)
        spans.append(high - low)
    return Size(
        length_mm=max(spans),
        width_mm=min(spans),
        height_mm=top(part.points[:, 2].astype(np.float64), pixel, poses),
        uncertainty_mm=_UNCERTAINTY_PX * pixel,
        hidden_mm=_HIDDEN_PX * pixel if poses < _FULL_VIEW_POSES else 0.0,
    )


def consistent(size: Size, model: PartModel | str, tolerance: float = 1.0) -> bool | None:
    """Whether the model can measure `size` in any rest pose; None when no box of it is known.

    `model`: a catalogue entry or its id. `tolerance` scales what is allowed. True says little
    (many models may fit); False contradicts a reading. On simulated scans 2 of 963 true models
    were refused (both in an earlier shape or pose than the table's) and none of the 149 newest;
    neighbour sizes of the same kind were refused in 98 to 100 %.
    """
    found = misfit(size, model)
    return None if found is None else found <= tolerance


def misfit(size: Size, model: PartModel | str) -> float | None:
    """Worst axis of the best rest pose, in shares of what `consistent` allows; None: unknown."""
    return misfits(size).get(model if isinstance(model, str) else model.id)


def misfits(size: Size) -> dict[str, float]:
    """`misfit` of every model whose boxes are known."""
    boxes = rest_boxes()
    rows = np.concatenate(list(boxes.values()))
    starts = np.cumsum([0, *map(len, boxes.values())])[:-1]
    measured = np.array(size.box)
    low, high = rows[:, 0::2], rows[:, 1::2]
    side = _ALLOWED * size.uncertainty_mm
    tall = _ALLOWED_HEIGHT * _HEIGHT_SHARE * size.uncertainty_mm
    short = side + _ALLOWED_HIDDEN * size.hidden_mm
    over = (measured - high) / np.array([side, side, tall])
    under = (low - measured) / np.array([short, short, tall])
    worst = np.maximum(np.maximum(over, under), 0.0).max(axis=1)
    return dict(zip(boxes, np.minimum.reduceat(worst, starts).tolist(), strict=True))


@lru_cache(maxsize=1)
def rest_boxes() -> Mapping[str, NDArray[np.float64]]:
    """Model id -> [poses, 6] mm: low and high length, low and high width, low and high height."""
    text = resources.files(__package__).joinpath("rest_boxes.json").read_text(encoding="utf-8")
    return {key: np.array(rows, np.float64) for key, rows in json.loads(text).items()}
