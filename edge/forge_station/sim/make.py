"""How one real part was made: what its standard leaves open or tolerates, drawn at random.

It knows no shapes; the builders in `screws`, `nuts` and `fixtures` read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from forge_station.contract.catalogue import PartModel

#: nut height of DIN 934 (superseded by ISO 4032, still common), mm
_DIN_934: Mapping[int, float] = {
    3: 2.4, 4: 3.2, 5: 4.0, 6: 5.0, 8: 6.5, 10: 8.0, 12: 10.0, 16: 13.0, 20: 16.0,
}  # fmt: skip


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
    dish: float = 0.0  # depth of a recess in a hexagon head's top, of the head's height
    knurl: float = 0.0  # depth, of the head's diameter
    socket: float = 1.0  # depth of the socket, of its nominal depth; 0: none or filled
    countersink: float = 1.06  # opening of a threaded hole, of the thread's diameter
    across: float = 1.0  # factors of the widths and heights of heads, nuts and washers
    height: float = 1.0
    length: float = 1.0
    thick: float = 1.0  # shank and hole diameters
    wing_lean: float = 0.22  # how far a wing nut's ear leans out, of half its width
    wing_round: float = 0.8  # 1: elliptic ear; less: squarer
    gap_turn: float = 0.0  # where a spring washer is open, rad


def nominal(model: PartModel) -> Make:
    """The part as its standard draws it."""
    return Make(columns=36 if model.workpiece == "set_screw" else 48)


def draw(model: PartModel, rng: np.random.Generator) -> Make:
    """One real part of `model`: dimensions inside the tolerance band, and the maker's choices."""
    d = model.dims
    uniform = rng.uniform
    # square parts need a multiple of 24 columns, hexagons one of 6
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
        dish=0.0 if rng.random() < 0.75 else float(uniform(0.03, 0.12)),
        knurl=float(uniform(0.006, 0.02)) if rng.random() < 0.4 else 0.0,
        socket=0.0 if rng.random() < 0.14 else float(uniform(0.6, 1.15)),
        countersink=1.0 if rng.random() < 0.15 else float(uniform(1.02, 1.12)),
        across=float(uniform(0.965, 1.0)),
        height=_DIN_934[int(d["d"])] / d["m"] if low_nut else float(uniform(0.955, 1.015)),
        length=float(uniform(0.985, 1.01)),
        thick=float(uniform(0.97, 1.0)),
        wing_lean=float(uniform(-0.05, 0.4)),
        wing_round=float(uniform(0.6, 1.0)),
        gap_turn=float(uniform(0.0, 2.0 * np.pi)),
    )
