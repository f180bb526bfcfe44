"""Surfaces made of rings around the z axis: turned parts, hexagons, sockets and real threads.

A ring is one closed line around the axis: a radius and a height for each of `columns` equal
angles. Rings are skinned in order, so a part is a list of rings from tip to head (its first and
last ring have radius 0) or, for parts with a hole, a list that closes on itself. Radius and height
may depend on the angle, which makes hexagons, chamfers of hexagons and helical threads ordinary
rings. It knows no standards; see `forge_station.sim.fasteners`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forge_station.sim.mesh import Floats, Mesh

#: share of the pitch where an ISO 68-1 profile turns: root ends, crest starts, crest ends
_ROOT, _RISE, _CREST = 0.25, 0.5625, 0.6875
_ROWS = (0.0, _ROOT, _RISE, _CREST)


class Ring(NamedTuple):
    """radius, height: float64 [columns], mm; after one turn it continues in the ring `seam` on."""

    radius: Floats
    height: Floats
    seam: int = 0


def angles(columns: int) -> Floats:
    """The angles of the columns, float64 [columns], rad; column 0 lies on +x."""
    return np.arange(columns, dtype=np.float64) * (2.0 * np.pi / columns)


def ring(columns: int, radius: float | Floats, height: float | Floats) -> Ring:
    """A ring of constant or per-column radius and height."""
    blank = np.zeros(columns)
    return Ring(blank + radius, blank + height)


def hexagon(columns: int, across_flats: float) -> Floats:
    """Radius of a regular hexagon with a corner on +x; `columns` must be a multiple of 6."""
    if columns % 6:
        raise ValueError(f"hexagon: expected columns to be a multiple of 6, got {columns}")
    step = np.pi / 3.0
    return across_flats * 0.5 / np.cos(angles(columns) % step - step * 0.5)


def square(columns: int, across_flats: float) -> Floats:
    """Radius of a square with a flat on +x; `columns` must be a multiple of 8."""
    if columns % 8:
        raise ValueError(f"square: expected columns to be a multiple of 8, got {columns}")
    step = np.pi / 2.0
    return across_flats * 0.5 / np.cos((angles(columns) + step * 0.5) % step - step * 0.5)


def thread(
    columns: int,
    low: float,
    high: float,
    pitch: float,
    profile: Callable[[Floats, Floats], Floats],
    phase: float = 0.0,
) -> list[Ring]:
    """Right-hand helical thread from height `low` to `high`, rings upwards.

    profile(share of depth 0 root .. 1 crest [N], height [N]) -> radius [N]. Rings run along the
    helix, so crests are sharp lines whatever the number of columns; they are clamped at both ends.
    """
    turn = angles(columns) / (2.0 * np.pi) + phase
    first = int(np.floor(-turn.max())) - 1
    turns = int(np.ceil((high - low) / pitch + 1.0)) - first
    rows = np.array([t + u for t in range(first, first + turns + 1) for u in _ROWS])
    shares = np.tile([0.0, 0.0, 1.0, 1.0], turns + 1)
    free = low + (rows[:, None] + turn) * pitch
    height = np.clip(free, low, high)
    # the clamped part of the end rings lies inside a pitch: take the true profile there
    u = ((height - low) / pitch - turn) % 1.0
    cut = np.interp(u, [0.0, _ROOT, _RISE, _CREST, 1.0], [0.0, 0.0, 1.0, 1.0, 0.0])
    share = np.where(height == free, shares[:, None], cut)
    radius = profile(share, height)
    span = len(_ROWS)
    return [Ring(radius[i], height[i], min(span, len(rows) - 1 - i)) for i in range(len(rows))]


def reverse(rings: Sequence[Ring]) -> list[Ring]:
    """The same rings downwards (for the inside of a hole)."""
    return [Ring(item.radius, item.height, -item.seam) for item in reversed(rings)]


def skin(rings: Sequence[Ring], *, closed: bool = False) -> Mesh:
    """Mesh through all rings in order; `closed` joins the last ring to the first.

    Equal neighbouring rings and points on the axis are merged, faces without area dropped; faces
    are oriented outwards.
    """
    radius = np.stack([item.radius for item in rings])
    height = np.stack([item.height for item in rings])
    seam = np.array([item.seam for item in rings])
    if closed:
        radius = np.concatenate([radius, radius[:1]])
        height = np.concatenate([height, height[:1]])
        seam = np.append(seam, 0)
    count, columns = radius.shape
    theta = angles(columns)
    vertices = np.stack([radius * np.cos(theta), radius * np.sin(theta), height], axis=-1)
    index = _merged(radius, height)
    if closed:
        index = np.where(index >= (count - 1) * columns, index - (count - 1) * columns, index)
    first_after_turn = index[np.arange(count) + seam, 0]
    index = np.concatenate([index, first_after_turn[:, None]], axis=1)
    a, b = index[:-1, :-1].ravel(), index[:-1, 1:].ravel()
    c, d = index[1:, :-1].ravel(), index[1:, 1:].ravel()
    faces = np.concatenate([np.stack([a, b, d], axis=1), np.stack([a, d, c], axis=1)])
    real = (
        (faces[:, 0] != faces[:, 1]) & (faces[:, 1] != faces[:, 2]) & (faces[:, 2] != faces[:, 0])
    )
    return _outward(vertices.reshape(-1, 3), faces[real])


def _merged(radius: Floats, height: Floats) -> NDArray[np.int64]:
    """Vertex index [R, C] with repeated points of a column and all points of a pole as one."""
    count, columns = radius.shape
    row = np.arange(count)[:, None]
    same = np.zeros(radius.shape, dtype=bool)
    same[1:] = (np.abs(radius[1:] - radius[:-1]) < 1e-9) & (np.abs(height[1:] - height[:-1]) < 1e-9)
    start = np.maximum.accumulate(np.where(same, 0, row), axis=0)
    index = start * columns + np.arange(columns)
    pole = (radius < 1e-9).all(axis=1)
    index[pole] = index[pole][:, :1]
    return np.asarray(index)


def _outward(vertices: Floats, faces: NDArray[np.int64]) -> Mesh:
    used = np.zeros(len(vertices), dtype=bool)
    used[faces] = True
    compact = np.cumsum(used) - 1
    mesh = Mesh(vertices[used], compact[faces].astype(np.int32))
    if mesh.volume_and_centroid()[0] < 0.0:
        return Mesh(mesh.vertices, mesh.faces[:, ::-1])
    return mesh
