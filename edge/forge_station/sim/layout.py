"""Resting parts placed side by side on the tray, without overlap. It knows no scanner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forge_station.sim.mesh import Mesh


def lay_out(
    meshes: Sequence[Mesh],
    rng: np.random.Generator,
    gap_mm: tuple[float, float],
    *,
    rows: int | None = None,
) -> list[Mesh]:
    """The resting `meshes` in a row or in two staggered rows, all together centred at x = y = 0.

    Gaps between the footprints (boxes in x and y) of neighbours are uniform in `gap_mm`; heights
    stay as they are. `rows` 1 or 2; None: two rows for four parts or more in half of the cases.
    The order of the list is the order given. ValueError for negative or disordered gaps.
    """
    low, high = gap_mm
    if not 0.0 <= low <= high:
        raise ValueError(f"gap_mm: expected 0 <= low <= high, got {gap_mm!r}")
    if rows not in (None, 1, 2):
        raise ValueError(f"rows: expected 1, 2 or None, got {rows!r}")
    if not meshes:
        return []
    if rows is None:
        rows = 2 if len(meshes) >= 4 and rng.random() < 0.5 else 1
    placed: list[Mesh | None] = [None] * len(meshes)
    front = 0.0
    for row in range(rows):
        indices = list(range(row, len(meshes), rows))
        if not indices:
            continue
        depth = max(float(meshes[i].extents()[1]) for i in indices)
        x = 0.0
        for place, i in enumerate(indices):
            box_low, box_high = meshes[i].bounds()
            size = box_high - box_low
            if place:
                x += rng.uniform(low, high)
            slack = depth - size[1]
            y = front + slack * rng.uniform(0.35, 0.65)
            placed[i] = meshes[i].transformed(
                translation=np.array([x - box_low[0], y - box_low[1], 0.0])
            )
            x += float(size[0])
        front += depth + rng.uniform(low, high)
    done = [mesh for mesh in placed if mesh is not None]
    if rows == 2:
        done = _stagger(done, rng, rows)
    lows, highs = zip(*(mesh.bounds() for mesh in done), strict=True)
    middle = (np.min(lows, axis=0) + np.max(highs, axis=0)) * 0.5
    return [mesh.transformed(translation=[-middle[0], -middle[1], 0.0]) for mesh in done]


def _stagger(meshes: list[Mesh], rng: np.random.Generator, rows: int) -> list[Mesh]:
    """Moves the shorter row along x, somewhere within the length of the longer one."""
    spans = [max(float(mesh.bounds()[1][0]) for mesh in meshes[row::rows]) for row in range(rows)]
    out = list(meshes)
    for row in range(rows):
        shift = (max(spans) - spans[row]) * rng.random()
        for i in range(row, len(meshes), rows):
            out[i] = meshes[i].transformed(translation=[shift, 0.0, 0.0])
    return out
