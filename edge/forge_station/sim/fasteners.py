"""Meshes of catalogue parts: turned bodies, hexagons, sockets, threads and fixture clamps.

It knows one part in its own frame and nothing of trays, poses or defects. Axis along z; screws
have their bearing face at z = 0, the head above and the tip at z = -l (countersunk and set screws:
top at z = 0); nuts, washers, blocks and clamps stand on z = 0; pins reach from z = -l to 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from forge_station.contract.catalogue import PartModel
from forge_station.sim.fixtures import step_block, strap_clamp
from forge_station.sim.lathe import (
    Ring,
    angles,
    hexagon,
    reverse,
    ring,
    skin,
    square,
    thread,
)
from forge_station.sim.mesh import Floats, Mesh, concat

#: depth of an external and of an internal ISO 68-1 thread over its pitch
_EXTERNAL, _INTERNAL = 0.6134, 0.5413
_TAN_30 = float(np.tan(np.pi / 6.0))


@dataclass(frozen=True)
class Make:
    """How one real part was made: everything that its standard leaves open or tolerates."""

    columns: int = 48
    thread: str = "helix"  # or "smooth": a plain cylinder; "grooves": rings without lead
    thread_depth: float = 1.0
    thread_phase: float = 0.0
    fully_threaded: bool | None = None  # None: as usual for the length
    tip_chamfer: float = 1.0  # in pitches
    hex_chamfer: bool = True
    hex_chamfer_circle: float = 0.95  # of across flats
    hex_both_ends: bool = True
    corner: float = 1.0  # of the sharp corner radius
    washer_face: float = 0.4  # height of the bearing disc, of the pitch
    fillet: float = 0.5  # radius under the head, in pitches
    edge: float = 0.08  # rounding of a head's upper edge, of the head's height
    knurl: float = 0.0  # depth, of the head's diameter
    socket: float = 1.0  # depth of the socket, of its nominal depth; 0: none or filled
    countersink: float = 1.06  # opening of a threaded hole, of the thread's diameter
    across: float = 1.0  # factors of the widths and heights of heads, nuts and washers
    height: float = 1.0
    length: float = 1.0
    thick: float = 1.0  # shank and hole diameters
    gap_turn: float = 0.0  # where a spring washer is open, rad


def build(model: PartModel, rng: np.random.Generator | None = None) -> Mesh:
    """Mesh of one part of `model`, mm, own frame.

    Without `rng`: the nominal part, equal on every call. With `rng`: one real part, with dimensions
    inside (for nut heights: of ISO 4032 or of the lower DIN 934) the tolerance band, and the choices
    that standards leave to the maker: chamfers, fillets, knurls, washer faces, dome shapes, thread
    ends, worn or unresolved threads, shallow or filled sockets, and the facet count.
    """
    make = Make(columns=_COLUMNS.get(model.workpiece, 48)) if rng is None else _draw(model, rng)
    return _BUILDERS[model.workpiece](model.dims, make)


#: square parts need a multiple of 24, hexagons a multiple of 6
_COLUMNS: Mapping[str, int] = {"t_slot_bolt": 48, "set_screw": 36}


def _draw(model: PartModel, rng: np.random.Generator) -> Make:
    d = model.dims
    uniform = rng.uniform
    columns = (48, 72) if model.workpiece == "t_slot_bolt" else (36, 48, 48, 60)
    low_nut = model.workpiece == "hex_nut" and rng.random() < 0.35
    roll = rng.random()
    return Make(
        columns=int(rng.choice(columns)),
        thread="helix" if roll < 0.72 else "grooves" if roll < 0.84 else "smooth",
        thread_depth=float(uniform(0.75, 1.05)),
        thread_phase=float(rng.random()),
        fully_threaded=None if rng.random() < 0.6 else bool(rng.random() < 0.6),
        tip_chamfer=float(uniform(0.5, 1.5)),
        hex_chamfer=bool(rng.random() < 0.8),
        hex_chamfer_circle=float(uniform(0.88, 0.99)),
        hex_both_ends=bool(rng.random() < 0.7),
        corner=1.0 if rng.random() < 0.5 else float(uniform(0.975, 1.0)),
        washer_face=0.0 if rng.random() < 0.35 else float(uniform(0.1, 0.5)),
        fillet=0.0 if rng.random() < 0.25 else float(uniform(0.2, 0.8)),
        edge=0.0 if rng.random() < 0.2 else float(uniform(0.03, 0.14)),
        knurl=float(uniform(0.006, 0.02)) if rng.random() < 0.4 else 0.0,
        socket=0.0 if rng.random() < 0.14 else float(uniform(0.6, 1.15)),
        countersink=1.0 if rng.random() < 0.15 else float(uniform(1.02, 1.12)),
        across=float(uniform(0.965, 1.0)),
        height=_DIN_934[int(d["d"])] / d["m"] if low_nut else float(uniform(0.955, 1.015)),
        length=float(uniform(0.985, 1.01)),
        thick=float(uniform(0.97, 1.0)),
        gap_turn=float(uniform(0.0, 2.0 * np.pi)),
    )


#: nut height of DIN 934 (superseded by ISO 4032, still common), mm
_DIN_934: Mapping[int, float] = {
    3: 2.4, 4: 3.2, 5: 4.0, 6: 5.0, 8: 6.5, 10: 8.0, 12: 10.0, 16: 13.0, 20: 16.0,
}  # fmt: skip


# ---------------------------------------------------------------- shared pieces, rings upwards


def _shank(d: Mapping[str, float], make: Make, low: float, high: float, tip: float) -> list[Ring]:
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


def _neck(make: Make, d: Mapping[str, float], bearing: float) -> list[Ring]:
    """Fillet from the shank to the bearing face at z = 0, then out to the radius `bearing`."""
    n, radius, fillet = make.columns, d["d"] * 0.5 * make.thick, make.fillet * d["P"] * 0.5
    fillet = min(fillet, 0.4 * (bearing - radius))
    rounding = (
        []
        if fillet <= 0.0
        else [ring(n, radius, -fillet), ring(n, radius + 0.3 * fillet, -0.3 * fillet)]
    )
    return [*rounding, ring(n, radius + max(fillet, 0.0), 0.0), ring(n, bearing, 0.0)]


def _hex_side(make: Make, across: float, low: float, high: float, *, lower: bool) -> list[Ring]:
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


def _socket(make: Make, across: float, depth: float, top: float, rim: float) -> list[Ring]:
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


def _hole(d: Mapping[str, float], make: Make, low: float, high: float) -> list[Ring]:
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


# ---------------------------------------------------------------- one function per workpiece


def _hex_bolt(d: Mapping[str, float], make: Make) -> Mesh:
    n, k = make.columns, d["k"] * make.height
    across = d["s"] * make.across
    face = min(make.washer_face * d["P"], 0.12 * k)
    disc = across * 0.47
    if make.fully_threaded is None:
        make = replace(make, fully_threaded=True)  # ISO 4017; ISO 4014 is the one with a shank
    rings = _shank(d, make, -d["l"] * make.length, -0.5 * d["P"], 0.40 * d["d"])
    rings += _neck(make, d, disc)
    if face > 0.0:
        rings.append(ring(n, disc, face))
    rings += _hex_side(make, across, face, k, lower=False)
    return skin([*rings, ring(n, 0.0, k)])


def _cap_screw(d: Mapping[str, float], make: Make) -> Mesh:
    n, k = make.columns, d["k"] * make.height
    radius = d["dk"] * 0.5 * make.across
    edge = make.edge * k
    rings = _shank(d, make, -d["l"] * make.length, -0.5 * d["P"], 0.40 * d["d"])
    rings += _neck(make, d, radius - 0.3 * edge)
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
    return skin([*rings, *_socket(make, d["s"], d["t"], k, 0.9 * radius)])


def _button_head(d: Mapping[str, float], make: Make) -> Mesh:
    n, k, radius = make.columns, d["k"] * make.height, d["dk"] * 0.5 * make.across
    flat = max(0.62 * d["s"], 0.36 * radius)
    rim = 0.06 * k
    # circle through (radius, rim) and (flat, k) with its centre on the axis
    centre = (radius**2 + rim**2 - flat**2 - k**2) / (2.0 * (rim - k))
    ball = float(np.hypot(radius, rim - centre))
    rings = _shank(d, make, -d["l"] * make.length, -0.5 * d["P"], 0.40 * d["d"])
    rings += _neck(make, d, radius)
    for share in np.linspace(0.0, 1.0, 7):
        r = radius + (flat - radius) * share
        rings.append(ring(n, r, centre + float(np.sqrt(max(ball**2 - r**2, 0.0)))))
    return skin([*rings, *_socket(make, d["s"], d["t"], k, flat)])


def _countersunk(d: Mapping[str, float], make: Make) -> Mesh:
    n, radius, shank = make.columns, d["dk"] * 0.5 * make.across, d["d"] * 0.5 * make.thick
    land = max(d["k"] * make.height - (radius - shank), 0.04 * d["d"])
    cone = -(land + radius - shank)
    edge = make.edge * land
    rings = _shank(d, make, -d["l"] * make.length, cone - 0.1 * d["P"], 0.40 * d["d"])
    rings += [ring(n, shank, cone), ring(n, radius, -land), ring(n, radius, -edge)]
    rings.append(ring(n, radius - edge, 0.0))
    return skin([*rings, *_socket(make, d["s"], d["t"], 0.0, 0.9 * radius)])


def _set_screw(d: Mapping[str, float], make: Make) -> Mesh:
    n, radius, length = make.columns, d["d"] * 0.5 * make.thick, d["l"] * make.length
    chamfer = min(0.7 * d["P"], 0.2 * length)
    rings = _shank(d, replace(make, fully_threaded=True), -length, -chamfer, d["dp"] * 0.5)
    rings.append(ring(n, radius - chamfer, 0.0))
    depth = min(d["t"], 0.55 * length)
    return skin([*rings, *_socket(make, d["s"], depth, 0.0, 0.95 * (radius - chamfer))])


def _hex_nut(d: Mapping[str, float], make: Make) -> Mesh:
    high = d["m"] * make.height
    side = _hex_side(make, d["s"] * make.across, 0.0, high, lower=make.hex_both_ends)
    return skin([*side, *_hole(d, make, 0.0, high)], closed=True)


def _flange_nut(d: Mapping[str, float], make: Make) -> Mesh:
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
    upper = _hex_side(make, across, 0.0, high, lower=False)[1:]
    return skin([*rings, *upper, *_hole(d, make, 0.0, high)], closed=True)


def _cap_nut(d: Mapping[str, float], make: Make) -> Mesh:
    n, across = make.columns, d["s"] * make.across
    shoulder, top = d["m"] * make.height, d["h"] * make.height
    ball = min(d["dk"] * 0.5 * make.across, 0.49 * across)
    depth = min(d["t"], top - 0.12 * d["d"])
    inside = [ring(n, 0.0, depth), *_hole(d, make, 0.0, depth)]
    side = _hex_side(make, across, 0.0, shoulder, lower=make.hex_both_ends)
    centre = max(top - ball, shoulder + 0.02 * ball)
    rise = top - centre
    dome = [ring(n, ball, shoulder)]
    for turn in np.linspace(0.0, np.pi / 2.0, 9)[:-1]:
        dome.append(ring(n, ball * float(np.cos(turn)), centre + rise * float(np.sin(turn))))
    return skin([*inside, *side, *dome, ring(n, 0.0, top)])


def _wing_nut(d: Mapping[str, float], make: Make) -> Mesh:
    n, high = make.columns, d["m"] * make.height
    low_r, top_r = d["d2"] * 0.5 * make.across, d["d3"] * 0.5 * make.across
    hub = [
        ring(n, low_r, 0.0),
        ring(n, low_r, 0.25 * high),
        ring(n, top_r, 0.95 * high),
        ring(n, top_r - 0.05 * high, high),
    ]
    body = skin([*hub, *_hole(d, make, 0.0, high)], closed=True)
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
    x = half_width * (0.78 * np.sign(x) * np.abs(x) ** 0.8 + 0.22 * z)
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


def _flat_washer(d: Mapping[str, float], make: Make) -> Mesh:
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


def _spring_washer(d: Mapping[str, float], make: Make) -> Mesh:
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


def _pin(d: Mapping[str, float], make: Make) -> Mesh:
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


def _rivet(d: Mapping[str, float], make: Make) -> Mesh:
    n, shank, length = make.columns, d["d"] * 0.5 * make.thick, d["l"] * make.length
    radius, k = d["d2"] * 0.5 * make.across, d["k"] * make.height
    ball = (radius**2 + k**2) / (2.0 * k)
    tip = min(0.12 * make.tip_chamfer, 0.2) * d["d"]
    rings = [
        ring(n, 0.0, -length),
        ring(n, shank - 0.6 * tip, -length),
        ring(n, shank, -length + tip),
        ring(n, shank, 0.0),
        ring(n, radius, 0.0),
    ]
    for turn in np.linspace(1.0, 0.0, 9)[1:-1]:
        r = radius * float(turn)
        rings.append(ring(n, r, k - ball + float(np.sqrt(max(ball**2 - r**2, 0.0)))))
    return skin([*rings, ring(n, 0.0, k)])


def _t_slot_bolt(d: Mapping[str, float], make: Make) -> Mesh:
    """Square head of thickness k above z = 0; square neck of height h - k below it."""
    n, k = make.columns, d["k"] * make.height
    head, neck = square(n, d["e1"] * make.across), square(n, d["a"] * make.across)
    below, radius = d["h"] - d["k"], d["d"] * 0.5 * make.thick
    cut = make.edge * k
    rings = _shank(d, make, -d["l"] * make.length, -below - 0.2 * d["P"], 0.40 * d["d"])
    rings += [ring(n, np.minimum(radius, neck), -below), ring(n, neck, -below), ring(n, neck, 0.0)]
    rings += [ring(n, head, 0.0), ring(n, head, k - cut), ring(n, head - cut, k), ring(n, 0.0, k)]
    return skin(rings)


def _step_block(d: Mapping[str, float], make: Make) -> Mesh:
    return step_block(
        d["h"] * make.height, d["l"] * make.length, d["b"] * make.across, int(d["n"]),
        lip=0.04 + 0.5 * make.edge,
    )  # fmt: skip


def _strap_clamp(d: Mapping[str, float], make: Make) -> Mesh:
    return strap_clamp(
        d["l"] * make.length, d["b"] * make.across, d["a"] * make.height, d["d1"],
        nose=0.2 + make.edge, slot=2.0 + make.fillet,
    )  # fmt: skip


_BUILDERS: Mapping[str, Callable[[Mapping[str, float], Make], Mesh]] = {
    "hex_bolt": _hex_bolt,
    "socket_cap_screw": _cap_screw,
    "button_head_screw": _button_head,
    "countersunk_screw": _countersunk,
    "set_screw": _set_screw,
    "hex_nut": _hex_nut,
    "flange_nut": _flange_nut,
    "cap_nut": _cap_nut,
    "wing_nut": _wing_nut,
    "flat_washer": _flat_washer,
    "spring_washer": _spring_washer,
    "pin": _pin,
    "rivet": _rivet,
    "step_block": _step_block,
    "strap_clamp": _strap_clamp,
    "t_slot_bolt": _t_slot_bolt,
}
