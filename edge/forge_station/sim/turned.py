"""Pieces that turned parts share: threaded shank, neck, hexagon, socket, threaded hole.

Each returns rings for `lathe.skin`, upwards unless stated. d: dimensions of the part's standard,
mm. It knows no whole parts.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from forge_station.sim.lathe import Ring, hexagon, reverse, ring, thread
from forge_station.sim.make import Make
from forge_station.sim.mesh import Floats

#: depth of an external and of an internal ISO 68-1 thread over its pitch
_EXTERNAL, _INTERNAL = 0.6134, 0.5413
_TAN_30 = float(np.tan(np.pi / 6.0))


def shank(d: Mapping[str, float], make: Make, low: float, high: float, tip: float) -> list[Ring]:
    """Threaded shank from the axis at its tip to its full diameter at height `high`.

    `tip` is the radius of the flat end. Long shanks are threaded over 2 d + 6 mm at the tip only,
    unless `make` says otherwise.
    """
    n, radius, pitch = make.columns, d["d"] * 0.5 * make.thick, d["P"]
    depth = _EXTERNAL * pitch * make.thread_depth
    tip = min(tip, radius - 0.2 * depth)
    slope = (radius - tip) / max(pitch * make.tip_chamfer, 1e-6)
    usual = high - low <= 2.0 * d["d"] + 12.0
    full = usual if make.fully_threaded is None else make.fully_threaded
    runout = 0.6 * pitch
    top = high - 0.8 * pitch if full else min(low + 2.0 * d["d"] + 6.0, high - 0.8 * pitch)
    start = [ring(n, 0.0, low), ring(n, tip, low)]
    if make.thread == "smooth" or top - low < 1.5 * pitch:
        return [*start, ring(n, radius, low + (radius - tip) / slope), ring(n, radius, high)]

    def profile(share: Floats, height: Floats) -> Floats:
        fade = np.clip((top - height) / runout, 0.0, 1.0)
        cut = radius - depth * (1.0 - share) * fade
        return np.asarray(np.minimum(cut, tip + slope * (height - low)))

    if make.thread == "grooves":
        turns = max(2, round((top - low) / pitch))
        flat = [
            ring(n, profile(np.array([s]), np.array([z]))[0], z)
            for z, s in _groove_rows(low, top, turns)
        ]
        return [*start, *flat, ring(n, radius, top), ring(n, radius, high)]
    helix = thread(n, low, top, pitch, profile, make.thread_phase)
    return [*start, *helix, ring(n, radius, top), ring(n, radius, high)]


def _groove_rows(low: float, high: float, turns: int) -> list[tuple[float, float]]:
    step = (high - low) / turns
    shape = ((0.0, 1.0), (0.12, 1.0), (0.45, 0.0), (0.67, 0.0))
    return [(low + (k + u) * step, share) for k in range(turns) for u, share in shape]


def neck(make: Make, d: Mapping[str, float], bearing: float) -> list[Ring]:
    """Fillet from the shank to the bearing face at z = 0, then out to the radius `bearing`."""
    n, radius, fillet = make.columns, d["d"] * 0.5 * make.thick, make.fillet * d["P"] * 0.5
    fillet = min(fillet, 0.4 * (bearing - radius))
    rounding = (
        []
        if fillet <= 0.0
        else [ring(n, radius, -fillet), ring(n, radius + 0.3 * fillet, -0.3 * fillet)]
    )
    return [*rounding, ring(n, radius + max(fillet, 0.0), 0.0), ring(n, bearing, 0.0)]


def hex_side(make: Make, across: float, low: float, high: float, *, lower: bool) -> list[Ring]:
    """The six flats from `low` to `high`, with the 30 degree chamfer above (and below)."""
    n = make.columns
    radius = np.minimum(hexagon(n, across), across * 0.5774 * make.corner)
    if not make.hex_chamfer:
        return [ring(n, radius, low), ring(n, radius, high)]
    circle = across * 0.5 * make.hex_chamfer_circle
    drop = np.minimum((radius - circle) * _TAN_30, 0.45 * (high - low))
    upper = [ring(n, radius, high - drop), ring(n, circle, high)]
    if not lower:
        return [ring(n, radius, low), *upper]
    return [ring(n, circle, low), ring(n, radius, low + drop), *upper]


def socket(make: Make, across: float, depth: float, top: float, rim: float) -> list[Ring]:
    """Hexagon socket sunk from `top`, ending on the axis; `rim` is the radius of the flat top."""
    n, deep = make.columns, depth * make.socket
    if deep <= 0.0:
        return [ring(n, 0.0, top)]
    wall = hexagon(n, across)
    mouth = min(across * 0.6, rim)
    bottom = top - deep
    return [
        ring(n, mouth, top),
        ring(n, wall, top - (mouth - wall) * 0.8),
        ring(n, wall, bottom),
        ring(n, across * 0.35, bottom - 0.04 * across),
        ring(n, 0.0, bottom - 0.16 * across),
    ]


def hole(d: Mapping[str, float], make: Make, low: float, high: float) -> list[Ring]:
    """Threaded hole from `low` to `high`, rings downwards, countersunk at both ends."""
    n, major, pitch = make.columns, d["d"] * 0.5, d["P"]
    depth = _INTERNAL * pitch * make.thread_depth
    minor = (major - _INTERNAL * pitch) * (2.0 - make.thick)
    mouth = max(major * make.countersink, minor + 0.02 * pitch)
    cone = 0.6  # 120 degree countersink, height per radius

    def profile(share: Floats, height: Floats) -> Floats:
        sink = mouth - np.minimum(height - low, high - height) / cone
        return np.asarray(np.maximum(minor + depth * (1.0 - share), sink))

    if make.thread == "smooth":
        sink = (mouth - minor) * cone
        return [
            ring(n, mouth, high),
            ring(n, minor, high - sink),
            ring(n, minor, low + sink),
            ring(n, mouth, low),
        ]
    return reverse(thread(n, low, high, pitch, profile, make.thread_phase))
