"""The catalogue of part models: workpiece, model number, standard and nominal dimensions in mm.

It knows no meshes (see `forge_station.sim.fasteners`) and no product line (see `contract.spec`).

Values are NOMINAL sizes of the named standard, coarse pitch, written in the standard's letters
and entered by hand after cross-checking several published tables (2026-11-30). Where a standard
gives limits only, the value says which: ISO 10642 `dk` is the usual size of a real (rounded) head,
between actual minimum and theoretical maximum, `k` the maximum; ISO 7380-1 `s`, `t` are the key
size and the minimum depth; DIN 127 B `d1` is a minimum, `d2` a maximum and `h` the free height;
DIN 315 values are maxima. DIN and ISO hexagons differ at M10, M12 and M14: this catalogue is ISO
(bolts and nuts 16 and 18 mm; the M10 flange nut of ISO 4161 has 15 mm). Rivets are named by their
head, DIN 660 up to 8 mm and DIN 124 above; their shanks are sizes of ISO 1051. DIN 6314 and
DIN 6318 entries are simplified: they follow the series of outer sizes, details such as radii and
steps do not.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from forge_station.contract.error import ContractError

#: model numbers split into words such as "M8", "x30", "6", "x20"
MODEL_NUMBER = re.compile(r"(M\d+(x\d+)?|\d+x\d+)")

#: across corners of a sharp hexagon over across flats
HEX_CORNERS = 2.0 / math.sqrt(3.0)

#: ISO 261 coarse pitch by nominal thread diameter, mm
COARSE_PITCH: Mapping[int, float] = MappingProxyType(
    {3: 0.5, 4: 0.7, 5: 0.8, 6: 1.0, 8: 1.25, 10: 1.5, 12: 1.75, 16: 2.0, 20: 2.5}
)


class UnknownPartError(ContractError):
    """No such part id or workpiece in the catalogue."""


@dataclass(frozen=True)
class PartModel:
    """One catalogue entry; `dims` are nominal mm under the letters of `standard`."""

    workpiece: str
    model_number: str
    standard: str
    dims: Mapping[str, float]

    @property
    def id(self) -> str:
        """Name used in specifications, prompts and verdicts, such as "hex_bolt M8x30"."""
        return f"{self.workpiece} {self.model_number}"

    @property
    def extents(self) -> tuple[float, float, float]:
        """Nominal bounding box in the part's OWN frame, mm: (along z, along x, along y).

        z is the axis of the part (of the thread, the hole, the clamp's thickness); x is the wider
        direction across it (hexagon corners, wing span, clamp length), y the other one. This is
        not the box of a resting part: see `forge_station.sim.rest_pose`.
        """
        return _extents(self.workpiece, self.dims)

    def __hash__(self) -> int:
        return hash((self.workpiece, self.model_number))


def _extents(workpiece: str, d: Mapping[str, float]) -> tuple[float, float, float]:
    match workpiece:
        case "hex_bolt":
            return d["k"] + d["l"], d["s"] * HEX_CORNERS, d["s"]
        case "socket_cap_screw" | "button_head_screw":
            return d["k"] + d["l"], d["dk"], d["dk"]
        case "rivet":
            return d["k"] + d["l"], d["d2"], d["d2"]
        case "countersunk_screw":
            return d["l"], d["dk"], d["dk"]
        case "set_screw" | "pin":
            return d["l"], d["d"], d["d"]
        case "hex_nut":
            return d["m"], d["s"] * HEX_CORNERS, d["s"]
        case "flange_nut":
            return d["m"], d["dc"], d["dc"]
        case "cap_nut":
            return d["h"], d["s"] * HEX_CORNERS, d["s"]
        case "wing_nut":
            return d["h"], d["e"], d["d2"]
        case "flat_washer" | "spring_washer":
            return d["h"], d["d2"], d["d2"]
        case "step_block":
            return d["h"], d["l"], d["b"]
        case "strap_clamp":
            return d["a"], d["l"], d["b"]
        case "t_slot_bolt":
            return d["k"] + d["l"], d["e1"], d["e1"]
        case _:
            raise UnknownPartError("no extents are known for this workpiece", which=workpiece)


def _thread(size: int) -> dict[str, float]:
    return {"d": float(size), "P": COARSE_PITCH[size]}


def _table(letters: str, rows: Mapping[int, tuple[float, ...]]) -> dict[int, dict[str, float]]:
    names = letters.split()
    return {size: dict(zip(names, row, strict=True)) for size, row in rows.items()}


_ISO_4017 = _table(
    "s k",
    {
        3: (5.5, 2.0), 4: (7, 2.8), 5: (8, 3.5), 6: (10, 4.0), 8: (13, 5.3),
        10: (16, 6.4), 12: (18, 7.5), 16: (24, 10.0), 20: (30, 12.5),
    },
)  # fmt: skip
_ISO_4762 = _table(
    "dk k s t",
    {
        3: (5.5, 3, 2.5, 1.3), 4: (7, 4, 3, 2), 5: (8.5, 5, 4, 2.5), 6: (10, 6, 5, 3),
        8: (13, 8, 6, 4), 10: (16, 10, 8, 5), 12: (18, 12, 10, 6), 16: (24, 16, 14, 8),
        20: (30, 20, 17, 10),
    },
)  # fmt: skip
_ISO_7380 = _table(
    "dk k s t",
    {
        3: (5.7, 1.65, 2, 1.04), 4: (7.6, 2.2, 2.5, 1.3), 5: (9.5, 2.75, 3, 1.56),
        6: (10.5, 3.3, 4, 2.08), 8: (14, 4.4, 5, 2.6), 10: (17.5, 5.5, 6, 3.12),
        12: (21, 6.6, 8, 4.16), 16: (28, 8.8, 10, 5.2),
    },
)  # fmt: skip
_ISO_10642 = _table(
    "dk k s t",
    {
        3: (6, 1.86, 2, 1.1), 4: (8, 2.48, 2.5, 1.5), 5: (10, 3.1, 3, 1.9),
        6: (12, 3.72, 4, 2.2), 8: (16, 4.96, 5, 3.0), 10: (20, 6.2, 6, 3.6),
        12: (24, 7.44, 8, 4.3), 16: (30, 8.8, 10, 4.8), 20: (37, 10.16, 12, 5.6),
    },
)  # fmt: skip
_ISO_4026 = _table(
    "s t dp",
    {
        3: (1.5, 2, 2), 4: (2, 2.5, 2.5), 5: (2.5, 3, 3.5), 6: (3, 3.5, 4), 8: (4, 5, 5.5),
        10: (5, 6, 7), 12: (6, 8, 8.5), 16: (8, 10, 12), 20: (10, 12, 15),
    },
)  # fmt: skip
_ISO_4032 = _table(
    "s m",
    {
        3: (5.5, 2.4), 4: (7, 3.2), 5: (8, 4.7), 6: (10, 5.2), 8: (13, 6.8), 10: (16, 8.4),
        12: (18, 10.8), 16: (24, 14.8), 20: (30, 18),
    },
)  # fmt: skip
_ISO_4161 = _table(
    "s m dc c",
    {
        5: (8, 5, 11.8, 1.0), 6: (10, 6, 14.2, 1.1), 8: (13, 8, 17.9, 1.2),
        10: (15, 10, 21.8, 1.5), 12: (18, 12, 26, 1.8), 16: (24, 16, 34.5, 2.4),
        20: (30, 20, 42.8, 3.0),
    },
)  # fmt: skip
_DIN_1587 = _table(
    "s h m dk t",
    {
        4: (7, 8, 3.2, 6.5, 5.5), 5: (8, 10, 4, 7.5, 7.5), 6: (10, 12, 5, 9.5, 8),
        8: (13, 15, 6.5, 12.5, 11), 10: (16, 18, 8, 15, 13), 12: (18, 22, 10, 17, 16),
        16: (24, 28, 13, 23, 21), 20: (30, 34, 16, 28, 26),
    },
)  # fmt: skip
_DIN_315 = _table(
    "d2 d3 e g h m",
    {
        4: (8, 7, 20, 1.9, 10.5, 4.6), 5: (11, 9, 26, 2.3, 13, 6.5),
        6: (13, 11, 33, 2.3, 17, 8), 8: (16, 12.5, 39, 2.8, 20, 10),
        10: (20, 16.5, 51, 4.4, 25, 12), 12: (23, 19.5, 65, 4.9, 33.5, 14),
        16: (29, 23, 73, 6.4, 37.5, 17), 20: (35, 29, 90, 6.9, 46.5, 21),
    },
)  # fmt: skip
_ISO_7089 = _table(
    "d1 d2 h",
    {
        3: (3.2, 7, 0.5), 4: (4.3, 9, 0.8), 5: (5.3, 10, 1), 6: (6.4, 12, 1.6),
        8: (8.4, 16, 1.6), 10: (10.5, 20, 2), 12: (13, 24, 2.5), 16: (17, 30, 3),
        20: (21, 37, 3),
    },
)  # fmt: skip
_DIN_127 = _table(
    "d1 d2 b s h",
    {
        3: (3.1, 6.2, 1.3, 0.8, 1.6), 4: (4.1, 7.6, 1.5, 0.9, 1.8),
        5: (5.1, 9.2, 1.8, 1.2, 2.4), 6: (6.1, 11.8, 2.5, 1.6, 3.2),
        8: (8.1, 14.8, 3, 2, 4), 10: (10.2, 18.1, 3.5, 2.2, 4.4),
        12: (12.2, 21.1, 4, 2.5, 5), 16: (16.2, 27.4, 5, 3.5, 7),
        20: (20.2, 33.6, 6, 4, 8),
    },
)  # fmt: skip
_ISO_2338 = _table(
    "c",
    {
        3: (0.5,), 4: (0.63,), 5: (0.8,), 6: (1.2,), 8: (1.6,), 10: (2,), 12: (2.5,),
    },
)  # fmt: skip
_DIN_660 = _table(
    "d2 k",
    {3: (5.2, 1.8), 4: (7, 2.4), 5: (8.8, 3), 6: (10.5, 3.6), 8: (14, 4.8)},
)
_DIN_124 = _table("d2 k", {10: (16, 6.5), 12: (19, 7.5), 16: (25, 10)})
_DIN_787 = _table(
    "a e1 k h",
    {
        6: (6, 10, 4, 8), 8: (8, 13, 6, 12), 10: (10, 15, 6, 14), 12: (14, 22, 8, 20),
        16: (18, 28, 10, 24), 20: (22, 35, 14, 32),
    },
)  # fmt: skip
_DIN_6314 = _table(
    "d1 a b l",
    {
        6: (6.6, 10, 20, 50), 8: (9, 12, 25, 60), 10: (11, 15, 30, 80), 12: (14, 20, 40, 100),
        16: (18, 25, 50, 125), 20: (22, 30, 60, 160),
    },
)  # fmt: skip
#: height h by width b, with base length l and number of steps n
_DIN_6318 = {
    (20, 20): {"h": 20.0, "b": 20.0, "l": 26.0, "n": 4.0},
    (30, 25): {"h": 30.0, "b": 25.0, "l": 38.0, "n": 5.0},
    (40, 30): {"h": 40.0, "b": 30.0, "l": 50.0, "n": 6.0},
    (50, 30): {"h": 50.0, "b": 30.0, "l": 62.0, "n": 8.0},
    (65, 35): {"h": 65.0, "b": 35.0, "l": 80.0, "n": 10.0},
}

_LENGTHS: Mapping[str, Mapping[int, tuple[int, ...]]] = {
    "hex_bolt": {
        3: (10, 20), 4: (12, 25), 5: (16, 30), 6: (16, 30), 8: (20, 30, 40), 10: (25, 50),
        12: (30, 60), 16: (40, 70), 20: (50, 80),
    },
    "socket_cap_screw": {
        3: (8, 16), 4: (10, 20), 5: (12, 25), 6: (12, 25), 8: (16, 20, 30), 10: (20, 40),
        12: (25, 45), 16: (25, 40, 60), 20: (40, 70),
    },
    "button_head_screw": {
        3: (6, 12), 4: (8, 16), 5: (10, 20), 6: (12, 25), 8: (16, 30), 10: (20, 40),
        12: (25, 45), 16: (30, 60),
    },
    "countersunk_screw": {
        3: (8, 16), 4: (10, 20), 5: (12, 25), 6: (16, 30), 8: (20, 40), 10: (25, 50),
        12: (30, 60), 16: (40, 70), 20: (50, 80),
    },
    "set_screw": {
        3: (4, 8), 4: (6, 12), 5: (6, 12), 6: (8, 16), 8: (10, 20), 10: (12, 25), 12: (16, 30),
        16: (20, 40), 20: (25, 50),
    },
    "pin": {
        3: (12, 24), 4: (16, 30), 5: (16, 35), 6: (20, 40), 8: (24, 50), 10: (30, 60),
        12: (35, 70),
    },
    "rivet": {
        3: (6, 12), 4: (8, 16), 5: (10, 20), 6: (12, 24), 8: (16, 30), 10: (20, 40),
        12: (24, 50), 16: (32, 60),
    },
    "t_slot_bolt": {6: (25,), 8: (32,), 10: (40,), 12: (50,), 16: (63,), 20: (80,)},
}  # fmt: skip


def _sized(
    workpiece: str, standard: str, rows: Mapping[int, Mapping[str, float]], *, thread: bool = True
) -> Iterable[PartModel]:
    """Entries named by thread size alone, such as "M8"."""
    for size, row in rows.items():
        dims = dict(row) | (_thread(size) if thread else {"d": float(size)})
        yield PartModel(workpiece, f"M{size}", standard, MappingProxyType(dims))


def _long(
    workpiece: str,
    standard: str,
    rows: Mapping[int, Mapping[str, float]],
    *,
    thread: bool = True,
) -> Iterable[PartModel]:
    """Entries named by size and length, "M8x30" with a thread, "8x30" without."""
    for size, row in rows.items():
        for length in _LENGTHS[workpiece][size]:
            dims = dict(row) | (_thread(size) if thread else {"d": float(size)})
            dims["l"] = float(length)
            number = f"M{size}x{length}" if thread else f"{size}x{length}"
            yield PartModel(workpiece, number, standard, MappingProxyType(dims))


def _fixture() -> Iterable[PartModel]:
    """Clamping parts: step blocks "height x width", strap clamps "thread x length"."""
    for (height, width), row in _DIN_6318.items():
        dims = MappingProxyType(dict(row))
        yield PartModel("step_block", f"{height}x{width}", "DIN 6318", dims)
    for size, row in _DIN_6314.items():
        dims = MappingProxyType(dict(row) | {"d": float(size)})
        yield PartModel("strap_clamp", f"M{size}x{row['l']:.0f}", "DIN 6314", dims)


CATALOGUE: tuple[PartModel, ...] = (
    *_long("hex_bolt", "ISO 4017", _ISO_4017),
    *_long("socket_cap_screw", "ISO 4762", _ISO_4762),
    *_long("button_head_screw", "ISO 7380-1", _ISO_7380),
    *_long("countersunk_screw", "ISO 10642", _ISO_10642),
    *_long("set_screw", "ISO 4026", _ISO_4026),
    *_sized("hex_nut", "ISO 4032", _ISO_4032),
    *_sized("flange_nut", "ISO 4161", _ISO_4161),
    *_sized("cap_nut", "DIN 1587", _DIN_1587),
    *_sized("wing_nut", "DIN 315", _DIN_315),
    *_sized("flat_washer", "ISO 7089", _ISO_7089, thread=False),
    *_sized("spring_washer", "DIN 127 B", _DIN_127, thread=False),
    *_long("pin", "ISO 2338", _ISO_2338, thread=False),
    *_long("rivet", "DIN 660", _DIN_660, thread=False),
    *_long("rivet", "DIN 124", _DIN_124, thread=False),
    *_long("t_slot_bolt", "DIN 787", _DIN_787),
    *_fixture(),
)

#: workpiece names in catalogue order
WORKPIECES: tuple[str, ...] = tuple(dict.fromkeys(model.workpiece for model in CATALOGUE))

_BY_ID: Mapping[str, PartModel] = {model.id: model for model in CATALOGUE}


def by_id(part_id: str) -> PartModel:
    """The entry called `part_id` ("hex_nut M8"); UnknownPartError names the nearest ids."""
    model = _BY_ID.get(part_id)
    if model is None:
        near = difflib.get_close_matches(str(part_id), list(_BY_ID), n=3, cutoff=0.4)
        raise UnknownPartError(
            "no such part in the catalogue",
            expected='one of its ids, "<workpiece> <model number>"',
            got=repr(part_id),
            action=f"nearest ids: {', '.join(near)}" if near else _known_workpieces(),
        )
    return model


def of_workpiece(name: str) -> tuple[PartModel, ...]:
    """All models of one workpiece, smallest first; UnknownPartError for an unknown name."""
    if name not in WORKPIECES:
        raise UnknownPartError(
            "no such workpiece in the catalogue", got=repr(name), action=_known_workpieces()
        )
    return tuple(model for model in CATALOGUE if model.workpiece == name)


def _known_workpieces() -> str:
    return f"workpieces: {', '.join(WORKPIECES)}"
