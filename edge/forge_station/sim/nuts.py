"""Meshes of nuts and washers, own frame, mm: axis along z, standing on z = 0."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from forge_station.sim.lathe import angles, hexagon, ring, skin
from forge_station.sim.make import Make
from forge_station.sim.mesh import Mesh, concat
from forge_station.sim.turned import hex_side, hole


def hex_nut(d: Mapping[str, float], make: Make) -> Mesh:
    high = d["m"] * make.height
    side = hex_side(make, d["s"] * make.across, 0.0, high, lower=make.hex_both_ends)
    return skin([*side, *hole(d, make, 0.0, high)], closed=True)


def flange_nut(d: Mapping[str, float], make: Make) -> Mesh:
    n, high, across = make.columns, d["m"] * make.height, d["s"] * make.across
    flange, rim = d["dc"] * 0.5 * make.across, d["c"]
    foot = hexagon(n, across) + 0.02 * across
    lift = rim + (flange - foot) * 0.36
    rings = [
        ring(n, flange - 0.1 * rim, 0.0),
        ring(n, flange, 0.4 * rim),
        ring(n, flange - 0.05 * rim, rim),
        ring(n, foot, np.minimum(lift, 0.7 * high)),
    ]
    upper = hex_side(make, across, 0.0, high, lower=False)[1:]
    return skin([*rings, *upper, *hole(d, make, 0.0, high)], closed=True)


def cap_nut(d: Mapping[str, float], make: Make) -> Mesh:
    n, across = make.columns, d["s"] * make.across
    shoulder, top = d["m"] * make.height, d["h"] * make.height
    ball = min(d["dk"] * 0.5 * make.across, 0.49 * across)
    depth = min(d["t"], top - 0.12 * d["d"])
    inside = [ring(n, 0.0, depth), *hole(d, make, 0.0, depth)]
    side = hex_side(make, across, 0.0, shoulder, lower=make.hex_both_ends)
    centre = max(top - ball, shoulder + 0.02 * ball)
    rise = top - centre
    dome = [ring(n, ball, shoulder)]
    for turn in np.linspace(0.0, np.pi / 2.0, 9)[:-1]:
        dome.append(ring(n, ball * float(np.cos(turn)), centre + rise * float(np.sin(turn))))
    return skin([*inside, *side, *dome, ring(n, 0.0, top)])


def wing_nut(d: Mapping[str, float], make: Make) -> Mesh:
    n, high = make.columns, d["m"] * make.height
    low_r, top_r = d["d2"] * 0.5 * make.across, d["d3"] * 0.5 * make.across
    hub = [
        ring(n, low_r, 0.0),
        ring(n, low_r, 0.25 * high),
        ring(n, top_r, 0.95 * high),
        ring(n, top_r - 0.05 * high, high),
    ]
    body = skin([*hub, *hole(d, make, 0.0, high)], closed=True)
    return concat([body, _wing(d, make, 1.0), _wing(d, make, -1.0)])


def _wing(d: Mapping[str, float], make: Make, side: float) -> Mesh:
    """One rounded ear: a pillow of thickness g in the x-z plane, rooted in the hub's wall."""
    n = 36
    root = 0.5 * (d["d"] * 0.5 + d["d3"] * 0.5)
    reach, top, foot = d["e"] * 0.5, d["h"] * make.height, 0.16 * d["m"]
    half_width, half_height = 0.5 * (reach - root), 0.5 * (top - foot)
    theta = angles(n)
    x, z = np.cos(theta), np.sin(theta)
    # an ellipse sheared outwards with its height: the ear leans away from the axis
    lean = make.wing_lean
    x = half_width * ((1.0 - lean) * np.sign(x) * np.abs(x) ** make.wing_round + lean * z)
    x = x * half_width / np.abs(x).max()
    z = half_height * np.sign(z) * np.abs(z) ** 0.9
    thick = d["g"] * (0.9 + 0.2 * make.thread_depth)
    layers = [(0.0, -0.5), (0.85, -0.5), (1.0, -0.25), (1.0, 0.25), (0.85, 0.5), (0.0, 0.5)]
    radius = np.hypot(x, z)
    flat = skin([ring(n, radius * share, thick * up) for share, up in layers])
    turn = np.arctan2(z, x)
    # skin() put each ring on equal angles: move the columns to the outline's own directions
    column = np.round(np.arctan2(flat.vertices[:, 1], flat.vertices[:, 0]) / (2 * np.pi) * n)
    own = turn[column.astype(int) % n]
    reach_of = np.hypot(flat.vertices[:, 0], flat.vertices[:, 1])
    ear = np.stack(
        [reach_of * np.cos(own) + 0.5 * (reach + root), flat.vertices[:, 2],
         reach_of * np.sin(own) + 0.5 * (top + foot)], axis=1,
    )  # fmt: skip
    ear[:, 0] *= side
    mesh = Mesh(ear, flat.faces)
    return mesh if mesh.volume_and_centroid()[0] > 0.0 else Mesh(ear, flat.faces[:, ::-1])


def flat_washer(d: Mapping[str, float], make: Make) -> Mesh:
    n, high = make.columns, d["h"] * make.height
    outer, inner = d["d2"] * 0.5 * make.across, d["d1"] * 0.5 * (2.0 - make.thick)
    edge = make.edge * 2.0 * high
    rings = [
        ring(n, outer - 0.3 * edge, 0.0),
        ring(n, outer, 0.5 * edge),
        ring(n, outer, high - edge),
        ring(n, outer - edge, high),
        ring(n, inner, high),
        ring(n, inner, 0.0),
    ]
    return skin(rings, closed=True)


def spring_washer(d: Mapping[str, float], make: Make) -> Mesh:
    """One turn of square wire whose ends stand h - s apart (DIN 127 B: cut square)."""
    n = make.columns
    outer, wire, thick = d["d2"] * 0.5 * make.across, d["b"], d["s"] * make.height
    inner = outer - wire
    lead = d["h"] * make.height - thick
    gap = 0.35 * thick / outer
    turn = np.linspace(gap, 2.0 * np.pi - gap, n)
    lift = lead * turn / (2.0 * np.pi)
    taper = 0.06 * thick  # the wire is thicker inside after coiling
    corners = [
        (inner, -0.0), (outer, taper), (outer, thick - taper), (inner, thick),
    ]  # fmt: skip
    radius = np.array([r for r, _ in corners])
    height = np.array([z for _, z in corners])
    place = turn + make.gap_turn
    vertices = np.stack(
        [
            np.cos(place)[:, None] * radius,
            np.sin(place)[:, None] * radius,
            lift[:, None] + height,
        ],
        axis=-1,
    ).reshape(-1, 3)
    step = np.arange(n - 1)[:, None] * 4
    a, b = step + np.arange(4), step + (np.arange(4) + 1) % 4
    sides = np.concatenate(
        [
            np.stack([a, a + 4, b], axis=-1).reshape(-1, 3),
            np.stack([b, a + 4, b + 4], axis=-1).reshape(-1, 3),
        ]
    )
    last = 4 * (n - 1)
    ends = np.array([[0, 1, 2], [0, 2, 3], [last, last + 2, last + 1], [last, last + 3, last + 2]])
    mesh = Mesh(vertices, np.concatenate([sides, ends]))
    low = float(mesh.vertices[:, 2].min())
    faces = mesh.faces if mesh.volume_and_centroid()[0] > 0.0 else mesh.faces[:, ::-1]
    return Mesh(mesh.vertices - np.array([0.0, 0.0, low]), faces)
