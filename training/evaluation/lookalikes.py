"""Which catalogue parts are mixed up: flat washers, neighbouring sizes, one head in two lengths.

These are the pairs on which every published model fails. By the catalogue's dimensions only; it
knows no pictures and no cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from forge_station.contract.catalogue import PartModel, by_id, of_workpiece
from forge_station.sim.trays import size_rank

Kind = Literal["flat washer", "neighbouring size", "other length"]
KINDS: tuple[Kind, ...] = ("flat washer", "neighbouring size", "other length")
_LENGTH_RATIO = 1.35


def kind(first: str, second: str) -> Kind | None:
    """How two catalogue ids resemble each other; None where they do not, or are the same part.

    `flat washer`: two flat washers of neighbouring sizes. `neighbouring size`: one workpiece, sizes
    that follow each other in its series (M8, M10), lengths within a third of each other. `other
    length`: one workpiece and size, hence the same head, and another length.
    """
    a, b = by_id(first), by_id(second)
    if a.workpiece != b.workpiece or a.id == b.id:
        return None
    if size_rank(a) == size_rank(b):
        return "other length" if "l" in a.dims else None
    series = sorted({size_rank(model) for model in of_workpiece(a.workpiece)})
    if abs(series.index(size_rank(a)) - series.index(size_rank(b))) != 1:
        return None
    lengths = [model.dims.get("l", 1.0) for model in (a, b)]
    if max(lengths) / min(lengths) > _LENGTH_RATIO:
        return None
    return "flat washer" if a.workpiece == "flat_washer" else "neighbouring size"


def of(part: PartModel, wanted: Kind) -> list[PartModel]:
    """The parts that resemble `part` in the way `wanted`, in catalogue order."""
    return [m for m in of_workpiece(part.workpiece) if kind(part.id, m.id) == wanted]


def bases(wanted: Kind, workpieces: Sequence[str]) -> list[PartModel]:
    """The parts of these workpieces that have such a look-alike."""
    models = [model for name in workpieces for model in of_workpiece(name)]
    return [model for model in models if of(model, wanted)]
