"""Measured size of a part, and which catalogue models that size allows.

It does not know the model's answer. Sizes are of the part frame's box: what is measured depends
on how the part lies, so catalogue models are compared by the boxes of their rest poses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forge_station.geometry.pose import PartCloud, bounds

# Share of points a side that a horizontal extent ignores.
_SIDE_SHARE = 0.003
# The top is the median height of the highest cells that hold this share of the occupied cells.
_TOP_SHARE = 0.02


@dataclass(frozen=True)
class Size:
    """Box of the part frame, mm: length along x >= width along y, height above the tray.

    `uncertainty_mm`: about 95 % of true extents lie within it (simulated scans).
    """

    length_mm: float
    width_mm: float
    height_mm: float
    uncertainty_mm: float


def measure(part: PartCloud) -> Size:
    """Robust extents of a part cloud."""
    low, high = bounds(part.points, _SIDE_SHARE)
    length, width = float(high[0] - low[0]), float(high[1] - low[1])
    return Size(
        length_mm=max(length, width),
        width_mm=min(length, width),
        height_mm=_height(part),
        uncertainty_mm=2.0 * part.camera_pixel_mm,
    )


def _height(part: PartCloud) -> float:
    """Height of the top: high percentile of cell medians, so that single points cannot lift it."""
    cell = 2.0 * part.camera_pixel_mm
    xyz = np.asarray(part.points, np.float64)
    index = np.floor(xyz[:, :2] / cell).astype(np.int64)
    index -= index.min(axis=0)
    key = index[:, 1] * (int(index[:, 0].max()) + 1) + index[:, 0]
    order = np.lexsort((xyz[:, 2], key))
    key, z = key[order], xyz[order, 2]
    starts = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]]))
    counts = np.diff(np.concatenate([starts, [len(key)]]))
    # Upper quartile of a cell: beside its top a cell may hold a side face.
    upper = z[starts + (3 * (counts - 1)) // 4]
    full = counts >= np.minimum(3, np.median(counts))
    upper = np.sort(upper[full])
    top = upper[int((1.0 - 2 * _TOP_SHARE) * len(upper)) :]
    return float(np.median(top))
