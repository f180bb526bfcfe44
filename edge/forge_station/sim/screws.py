"""Meshes of parts with a shank: screws, bolts, pins and rivets, own frame, mm.

Axis along z; the bearing face of the head is at z = 0, the head above, the tip at z = -l
(countersunk and set screws: top at z = 0; pins reach from z = -l to 0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from forge_station.sim.lathe import angles, ring, skin, square
from forge_station.sim.make import Make
from forge_station.sim.mesh import Mesh
from forge_station.sim.turned import hex_side, neck, shank, socket


def hex_bolt(d: Mapping[str, float], make: Make) -> Mesh:
    n, k = make.columns, d["k"] * make.height
    across = d["s"] * make.across
    face = min(make.washer_face * d["P"], 0.12 * k)
    disc = across * 0.47
    if make.fully_threaded is None:
        make = replace(make, fully_threaded=True)  # ISO 4017; ISO 4014 is the one with a shank
    rings = shank(d, make, -d["l"] * make.length, -0.5 * d["P"], 0.40 * d["d"])
    rings += neck(make, d, disc)
    if face > 0.0:
        rings.append(ring(n, disc, face))
    rings += hex_side(make, across, face, k, lower=False)
    dish = make.dish * k  # a forged recess in the top
    recess = [ring(n, 0.38 * across, k), ring(n, 0.33 * across, k - dish)] if dish > 0.0 else []
    return skin([*rings, *recess, ring(n, 0.0, k - dish)])


def cap_screw(d: Mapping[str, float], make: Make) -> Mesh:
    n, k = make.columns, d["k"] * make.height
    radius = d["dk"] * 0.5 * make.across
    edge = make.edge * k
    rings = shank(d, make, -d["l"] * make.length, -0.5 * d["P"], 0.40 * d["d"])
    rings += neck(make, d, radius - 0.3 * edge)
    side = radius + 0.0 * angles(n)
    side[::2] -= make.knurl * d["dk"]
    rings += [
        ring(n, radius, 0.3 * edge),
        ring(n, side, 0.06 * k + 0.3 * edge),
        ring(n, side, 0.85 * k),
        ring(n, radius, 0.88 * k),
        ring(n, radius, k - edge),
        ring(n, radius - 0.3 * edge, k - 0.3 * edge),
        ring(n, radius - edge, k),
    ]
    return skin([*rings, *socket(make, d["s"], d["t"], k, 0.9 * radius)])


def button_head(d: Mapping[str, float], make: Make) -> Mesh:
    n, k, radius = make.columns, d["k"] * make.height, d["dk"] * 0.5 * make.across
    flat = max(0.62 * d["s"], 0.36 * radius)
    rim = 0.06 * k
    # circle through (radius, rim) and (flat, k) with its centre on the axis
    centre = (radius**2 + rim**2 - flat**2 - k**2) / (2.0 * (rim - k))
    ball = float(np.hypot(radius, rim - centre))
    rings = shank(d, make, -d["l"] * make.length, -0.5 * d["P"], 0.40 * d["d"])
    rings += neck(make, d, radius)
    for share in np.linspace(0.0, 1.0, 7):
        r = radius + (flat - radius) * share
        rings.append(ring(n, r, centre + float(np.sqrt(max(ball**2 - r**2, 0.0)))))
    return skin([*rings, *socket(make, d["s"], d["t"], k, flat)])


def countersunk(d: Mapping[str, float], make: Make) -> Mesh:
    n, radius, core = make.columns, d["dk"] * 0.5 * make.across, d["d"] * 0.5 * make.thick
    land = max(d["k"] * make.height - (radius - core), 0.04 * d["d"])
    cone = -(land + radius - core)
    edge = make.edge * land
    rings = shank(d, make, -d["l"] * make.length, cone - 0.1 * d["P"], 0.40 * d["d"])
    rings += [ring(n, core, cone), ring(n, radius, -land), ring(n, radius, -edge)]
    rings.append(ring(n, radius - edge, 0.0))
    return skin([*rings, *socket(make, d["s"], d["t"], 0.0, 0.9 * radius)])


def set_screw(d: Mapping[str, float], make: Make) -> Mesh:
    n, radius, length = make.columns, d["d"] * 0.5 * make.thick, d["l"] * make.length
    chamfer = min(0.7 * d["P"], 0.2 * length)
    rings = shank(d, replace(make, fully_threaded=True), -length, -chamfer, d["dp"] * 0.5)
    rings.append(ring(n, radius - chamfer, 0.0))
    depth = min(d["t"], 0.55 * length)
    return skin([*rings, *socket(make, d["s"], depth, 0.0, 0.95 * (radius - chamfer))])


def t_slot_bolt(d: Mapping[str, float], make: Make) -> Mesh:
    """Square head of thickness k above z = 0; square neck of height h - k below it."""
    n, k = make.columns, d["k"] * make.height
    head, neck = square(n, d["e1"] * make.across), square(n, d["a"] * make.across)
    below, radius = d["h"] - d["k"], d["d"] * 0.5 * make.thick
    cut = make.edge * k
    rings = shank(d, make, -d["l"] * make.length, -below - 0.2 * d["P"], 0.40 * d["d"])
    rings += [ring(n, np.minimum(radius, neck), -below), ring(n, neck, -below), ring(n, neck, 0.0)]
    rings += [ring(n, head, 0.0), ring(n, head, k - cut), ring(n, head - cut, k), ring(n, 0.0, k)]
    return skin(rings)


def pin(d: Mapping[str, float], make: Make) -> Mesh:
    n, radius, length = make.columns, d["d"] * 0.5 * make.thick, d["l"] * make.length
    c = d["c"] * min(make.tip_chamfer, 1.3)
    slope = 0.27  # 15 degree chamfer
    dome = 0.35 * c if make.hex_chamfer else 0.0
    rings = [
        ring(n, 0.0, -length),
        ring(n, radius - slope * c, -length),
        ring(n, radius, -length + c),
        ring(n, radius, -c),
        ring(n, radius - slope * c, -dome),
        ring(n, 0.5 * radius, -0.25 * dome),
        ring(n, 0.0, 0.0),
    ]
    return skin(rings)


def rivet(d: Mapping[str, float], make: Make) -> Mesh:
    n, core, length = make.columns, d["d"] * 0.5 * make.thick, d["l"] * make.length
    radius, k = d["d2"] * 0.5 * make.across, d["k"] * make.height
    ball = (radius**2 + k**2) / (2.0 * k)
    tip = min(0.12 * make.tip_chamfer, 0.2) * d["d"]
    rings = [
        ring(n, 0.0, -length),
        ring(n, core - 0.6 * tip, -length),
        ring(n, core, -length + tip),
        ring(n, core, 0.0),
        ring(n, radius, 0.0),
    ]
    for turn in np.linspace(1.0, 0.0, 9)[1:-1]:
        r = radius * float(turn)
        rings.append(ring(n, r, k - ball + float(np.sqrt(max(ball**2 - r**2, 0.0)))))
    return skin([*rings, ring(n, 0.0, k)])
