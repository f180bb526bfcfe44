"""Meshes of clamping parts that are not turned: step block and strap clamp, own frame, mm.

Simplified from DIN 6318 and DIN 6314: true outer sizes, steps and slot, plain edges.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from forge_station.sim.make import Make
from forge_station.sim.mesh import Floats, Mesh


def step_block(d: Mapping[str, float], make: Make) -> Mesh:
    """Step block (DIN 6318): stair rising along +x."""
    height, length, width = d["h"] * make.height, d["l"] * make.length, d["b"] * make.across
    return _stair(height, length, width, int(d["n"]), lip=0.04 + 0.5 * make.edge)


def strap_clamp(d: Mapping[str, float], make: Make) -> Mesh:
    """Strap clamp (DIN 6314): flat, slotted, nose at +x."""
    length, width, thickness = d["l"] * make.length, d["b"] * make.across, d["a"] * make.height
    slot = 2.0 + make.fillet
    return _clamp(length, width, thickness, d["d1"], nose=0.2 + make.edge, slot=slot)


def _stair(height: float, length: float, width: float, steps: int, *, lip: float) -> Mesh:
    """Stair of `steps` treads, rising along +x; centred in x and y, standing on z = 0.

    `lip` is the height of the lowest tread as a share of the height; the wall at +x is flat.
    """
    first = lip * height
    rise, run = (height - first) / steps, length / (steps + 1)
    # columns of the side view: between x[i] and x[i + 1] the top is at z[i]
    x = np.arange(steps + 2) * run - 0.5 * length
    z = first + np.arange(steps + 1) * rise
    outline = [(x[0], 0.0)]
    for i in range(steps + 1):
        outline += [(x[i], z[i]), (x[i + 1], z[i])]
    outline.append((x[-1], 0.0))
    side = np.array(outline)
    count = len(side)
    near = np.column_stack([side[:, 0], np.full(count, -0.5 * width), side[:, 1]])
    far = near * np.array([1.0, -1.0, 1.0])
    # the bottom also has the inner step corners' feet, so that the side walls are plain quads
    feet_x = x[1:-1]
    feet_near = np.column_stack([feet_x, np.full(steps, -0.5 * width), np.zeros(steps)])
    feet_far = feet_near * np.array([1.0, -1.0, 1.0])
    vertices = np.concatenate([near, far, feet_near, feet_far])
    faces: list[tuple[int, int, int]] = []

    def quad(a: int, b: int, c: int, d: int) -> None:
        faces.extend([(a, b, c), (a, c, d)])

    for i in range(count - 1):  # end wall, risers, treads, back wall
        quad(i, i + count, i + 1 + count, i + 1)
    foot = [0, *(2 * count + i for i in range(steps)), count - 1]
    foot_far = [count, *(2 * count + steps + i for i in range(steps)), 2 * count - 1]
    for i in range(steps + 1):
        left, right = 1 + 2 * i, 2 + 2 * i
        quad(foot[i], left, right, foot[i + 1])
        quad(foot_far[i], foot_far[i + 1], right + count, left + count)
        if i:  # the riser's foot corner: a sliver between the lower tread and this column
            faces.append((foot[i], left - 1, left))
            faces.append((foot_far[i], left + count, left - 1 + count))
        quad(foot[i], foot[i + 1], foot_far[i + 1], foot_far[i])
    return _outward(vertices, np.array(faces))


def _clamp(
    length: float, width: float, thickness: float, hole: float, *, nose: float, slot: float
) -> Mesh:
    """Flat clamp with a slot and a nose tapered from above at +x; standing on z = 0.

    `hole` is the slot's width, `slot` its length over its width, `nose` the tapered share.
    """
    per_side = 12
    corner = _rectangle(length, width, per_side)
    bend = length * (0.5 - nose)
    inner = _stadium(corner, hole, slot * hole, centre=bend - 0.5 * slot * hole - 0.35 * hole)
    taper = 0.5 * thickness / (nose * length)
    top = thickness - np.clip(corner[:, 0] - bend, 0.0, None) * taper
    clipped = np.minimum(corner, [bend, np.inf])
    rings = [
        np.column_stack([corner, np.zeros(len(corner))]),
        np.column_stack([corner, top]),
        np.column_stack([clipped, np.full(len(corner), thickness)]),
        np.column_stack([inner, np.full(len(corner), thickness)]),
        np.column_stack([inner, np.zeros(len(corner))]),
    ]
    n, count = len(corner), len(rings)
    index = np.arange(count * n).reshape(count, n)
    same = np.all(np.abs(rings[2] - rings[1]) < 1e-9, axis=1)
    index[2, same] = index[1, same]
    faces = []
    for i in range(count):
        a, c = index[i], index[(i + 1) % count]
        b, d = np.roll(a, -1), np.roll(c, -1)
        faces += [np.stack([a, b, d], axis=1), np.stack([a, d, c], axis=1)]
    return _outward(np.concatenate(rings), np.concatenate(faces))


def _rectangle(length: float, width: float, per_side: int) -> Floats:
    """Counter-clockwise outline [4 * per_side, 2] that has the corners."""
    share = np.arange(per_side) / per_side
    corners = np.array([[1.0, -1.0], [1.0, 1.0], [-1.0, 1.0], [-1.0, -1.0]]) * 0.5
    sides = [
        a + share[:, None] * (b - a) for a, b in zip(corners, np.roll(corners, -1, 0), strict=True)
    ]
    return np.asarray(np.concatenate(sides) * np.array([length, width]))


def _stadium(outline: Floats, width: float, length: float, centre: float) -> Floats:
    """Slot outline along x with one point per outline point, in the same order, [N, 2]."""
    radius, half = 0.5 * width, 0.5 * (length - width)
    # walk the slot's boundary at the same share of its length as each side of the rectangle
    n = len(outline)
    quarter = n // 4
    side = np.arange(quarter) / quarter
    arc = np.pi * side
    right = np.column_stack([half + radius * np.sin(arc), -radius * np.cos(arc)])
    upper = np.column_stack([half - 2 * half * side, np.full(quarter, radius)])
    left = np.column_stack([-half - radius * np.sin(arc), radius * np.cos(arc)])
    lower = np.column_stack([-half + 2 * half * side, np.full(quarter, -radius)])
    return np.asarray(np.concatenate([right, upper, left, lower]) + np.array([centre, 0.0]))


def _outward(vertices: Floats, faces: NDArray[np.int64]) -> Mesh:
    distinct = (
        (faces[:, 0] != faces[:, 1]) & (faces[:, 1] != faces[:, 2]) & (faces[:, 2] != faces[:, 0])
    )
    mesh = Mesh(vertices, faces[distinct].astype(np.int32))
    return mesh if mesh.volume_and_centroid()[0] > 0.0 else Mesh(vertices, mesh.faces[:, ::-1])
