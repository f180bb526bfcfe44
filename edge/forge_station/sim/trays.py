"""What lies on the demo's tray: right and wrong trays of a product, with the truth beside them.

Knows catalogue, products and meshes; no scanner, no model. The station never sees the truth: it
is kept for the summary at the end of a demo.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forge_station.contract.catalogue import CATALOGUE, PartModel, by_id, of_workpiece
from forge_station.contract.spec import Product
from forge_station.sim import defects, fasteners, layout, rest_pose
from forge_station.sim.mesh import Mesh

RIGHT = "right"
WRONG_MODEL, WRONG_WORKPIECE, MISSING, EXTRA = "wrong model", "wrong workpiece", "missing", "extra"


@dataclass(frozen=True)
class Tray:
    """Parts placed on the tray. `fault` is RIGHT, a fault of the list above, or a defect class."""

    product: str
    parts: tuple[str, ...]
    fault: str
    meshes: tuple[Mesh, ...]

    @property
    def good(self) -> bool:
        return self.fault == RIGHT


def make(product: Product, rng: np.random.Generator, *, wrong: bool) -> Tray:
    """A tray of `product`, right or with one fault that its checks should find."""
    parts, fault = choose(product, rng, wrong=wrong)
    meshes = [rest_pose.rest(fasteners.build(by_id(part), rng), rng) for part in parts]
    if fault in defects.DEFECTS:
        meshes[0] = _damaged(meshes[0], fault, rng)
    return Tray(product.part_number, parts, fault, tuple(place(meshes, rng)))


def _damaged(mesh: Mesh, defect: str, rng: np.random.Generator) -> Mesh:
    """The part with a defect on its upper side, which the top view shows; the best of twelve.

    The three views show neither the back nor the underside: there a defect cannot be read.
    """
    best, best_share = mesh, -1.0
    for _ in range(12):
        part = defects.apply_defect(mesh, defect, rng)
        area = part.mesh.face_areas() * part.face_flag
        upwards = part.mesh.face_normals()[:, 2] > 0.3
        share = float(area[upwards].sum() / max(float(area.sum()), 1e-9))
        if share > best_share:
            best, best_share = part.mesh, share
        if share > 0.5:
            break
    return best


def choose(
    product: Product, rng: np.random.Generator, *, wrong: bool
) -> tuple[tuple[str, ...], str]:
    """Which parts lie on a tray, in which order, and its fault: see `Tray`."""
    parts = [part for part, count in product.parts.items() for _ in range(count)]
    if not parts:  # a majority batch: any part of the catalogue
        parts = [CATALOGUE[int(rng.integers(len(CATALOGUE)))].id] * (product.count or 5)
    fault = RIGHT
    if wrong:
        fault = _choose_fault(product, rng)
        if fault == MISSING:
            parts.pop(int(rng.integers(len(parts))))
        elif fault == EXTRA:
            parts.append(parts[int(rng.integers(len(parts)))])
        elif fault in (WRONG_MODEL, WRONG_WORKPIECE):
            chosen = int(rng.integers(len(parts)))
            same = fault == WRONG_MODEL
            parts[chosen] = other_part(by_id(parts[chosen]), rng, same_workpiece=same).id
    order = rng.permutation(len(parts))
    return tuple(parts[i] for i in order), fault


def place(meshes: Sequence[Mesh], rng: np.random.Generator) -> list[Mesh]:
    """Lay the parts out with gaps of a quarter to four fifths of the tallest part."""
    tallest = max(float(np.ptp(mesh.vertices[:, 2])) for mesh in meshes)
    return layout.lay_out(meshes, rng, (0.25 * tallest + 0.5, 0.8 * tallest + 0.5))


def field_mm(meshes: Sequence[Mesh]) -> tuple[float, float, float]:
    """Width, depth, height of a box on the tray centre that holds the parts, mm."""
    low = np.min([mesh.vertices.min(axis=0) for mesh in meshes], axis=0)
    high = np.max([mesh.vertices.max(axis=0) for mesh in meshes], axis=0)
    reach = 2 * np.maximum(np.abs(low), np.abs(high))
    return float(reach[0]), float(reach[1]), float(high[2])


def other_part(base: PartModel, rng: np.random.Generator, *, same_workpiece: bool) -> PartModel:
    """A part that could be mixed up with `base`: a neighbouring model number, or another kind."""
    if same_workpiece:
        same = [m for m in of_workpiece(base.workpiece) if m.id != base.id]
        close = [m for m in same if 1 / 1.45 < size_rank(m) / size_rank(base) < 1.45]
        return _any_of(close or same, rng)
    pool = near_in_size(base, 1.3)
    return spread(
        [m for m in pool if m.workpiece != base.workpiece]
        or [m for m in CATALOGUE if m.workpiece != base.workpiece],
        rng,
    )


def size_rank(model: PartModel) -> float:
    """Nominal size that orders a workpiece's models: thread diameter or the largest dimension."""
    return float(model.dims.get("d", max(model.extents)))


def near_in_size(model: PartModel, ratio: float = 1.7) -> list[PartModel]:
    """Catalogue parts of about the same nominal size."""
    rank = size_rank(model)
    return [m for m in CATALOGUE if 1 / ratio < size_rank(m) / rank < ratio]


def spread(pool: Sequence[PartModel], rng: np.random.Generator) -> PartModel:
    """One of a pool, workpieces equally likely."""
    kinds = sorted({m.workpiece for m in pool})
    kind = kinds[int(rng.integers(len(kinds)))]
    return _any_of([m for m in pool if m.workpiece == kind], rng)


def _any_of(pool: Sequence[PartModel], rng: np.random.Generator) -> PartModel:
    return pool[int(rng.integers(len(pool)))]


def _choose_fault(product: Product, rng: np.random.Generator) -> str:
    if product.kind == "assembly":
        faults = [MISSING, EXTRA, WRONG_MODEL, WRONG_WORKPIECE]
        pieces = product.pieces or 0
        if pieces >= 6:
            faults.remove(EXTRA)
    elif product.kind == "batch":
        faults = [WRONG_MODEL, WRONG_MODEL, WRONG_WORKPIECE]
    else:
        faults = [WRONG_MODEL] if "workpiece" in product.checks else []
        if "surface" in product.checks:
            faults += list(defects.DEFECTS)
    return faults[int(rng.integers(len(faults)))]
