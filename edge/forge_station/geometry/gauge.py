"""Measured size of a part, and which catalogue models that size allows.

It does not know the model's answer. Sizes are of the part frame's box: what is measured depends
on how the part lies, so catalogue models are compared by the boxes of their rest poses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forge_station.geometry.pose import PartCloud, ends, top


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
        uncertainty_mm=2.0 * part.camera_pixel_mm,
    )
