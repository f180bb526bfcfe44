"""Boxes of every catalogue model in its rest poses -> edge/forge_station/geometry/rest_boxes.json.

The edge has no convex hulls, so it reads this table (`geometry.gauge`). Run again after a change
of the catalogue, of `sim.fasteners` or of `sim.rest_pose`, about three minutes on one core:

    python -m training.rest_boxes

A box is (length, width, height) mm of the resting part, length and width from the least-area
rectangle. Each row is the range over the nominal part and VARIANTS parts of real-world variety:
low and high length, width, height. Rectangles within 4 % of the least area count too: which of
them a noisy cloud shows is chance.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station.contract.catalogue import CATALOGUE, PartModel
from forge_station.sim import fasteners, rest_pose
from forge_station.sim.mesh import Mesh

TABLE = Path(__file__).parent.parent / "edge/forge_station/geometry/rest_boxes.json"
VARIANTS = 40
# Boxes closer than this (share, and mm) are one row.
_MERGE_SHARE, _MERGE_MM = 0.05, 0.25
_AREA_SLACK = 1.04


def rows_of(model: PartModel) -> list[list[float]]:
    """[low length, high length, low width, high width, low height, high height] of each pose."""
    seed = zlib.crc32(model.id.encode())
    boxes: list[NDArray[np.float64]] = []
    for variant in range(VARIANTS + 1):
        rng = None if variant == 0 else np.random.default_rng((seed, variant))
        boxes += boxes_of(fasteners.build(model, rng))
    groups: list[list[NDArray[np.float64]]] = []
    for box in sorted(boxes, key=lambda b: (b[2], b[0], b[1])):
        for group in groups:
            reach = np.maximum(_MERGE_SHARE * box, _MERGE_MM)
            if (np.abs(box - group[0]) <= reach).all():
                group.append(box)
                break
        else:
            groups.append([box])
    rows = []
    for group in groups:
        low, high = np.min(group, axis=0), np.max(group, axis=0)
        rows.append([round(float(v), 2) for pair in zip(low, high, strict=True) for v in pair])
    return rows


def boxes_of(mesh: Mesh) -> list[NDArray[np.float64]]:
    """(length, width, height) mm of a mesh in all its rest poses."""
    found = []
    for pose in rest_pose.rest_poses(mesh):
        turned = mesh.vertices @ pose.rotation.T
        height = float(np.ptp(turned[:, 2]))
        hull = cv2.convexHull(turned[:, :2].astype(np.float32))[:, 0].astype(np.float64)
        for length, width in rectangles(hull):
            found.append(np.array([length, width, height]))
    return found


def rectangles(hull: NDArray[np.float64]) -> list[tuple[float, float]]:
    """(length, width) of the least-area rectangle and of local minima almost as small."""
    angles = np.deg2rad(np.arange(0.0, 90.0, 0.5))
    along = np.cos(angles)[:, None] * hull[:, 0] + np.sin(angles)[:, None] * hull[:, 1]
    across = np.cos(angles)[:, None] * hull[:, 1] - np.sin(angles)[:, None] * hull[:, 0]
    spans = np.stack([np.ptp(along, axis=1), np.ptp(across, axis=1)])
    area = spans[0] * spans[1]
    lowest = (area <= np.roll(area, 1)) & (area <= np.roll(area, -1))
    chosen = np.flatnonzero(lowest & (area <= _AREA_SLACK * area.min()))
    return [(float(spans[:, k].max()), float(spans[:, k].min())) for k in chosen]


def main() -> None:
    table = {}
    for model in CATALOGUE:
        table[model.id] = rows_of(model)
        print(f"{model.id}: {len(table[model.id])} rows", file=sys.stderr)
    lines = [f"{json.dumps(key)}: {json.dumps(rows)}" for key, rows in table.items()]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
