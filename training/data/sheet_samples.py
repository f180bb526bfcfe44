"""Marks sheets for training: which parts lie on a tray, how they lie, and the surrogate's scan.

Knows the scanner surrogate and the station's own pictures; no shards, no command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from forge_station.capture.calibration import Calibration
from forge_station.contract.catalogue import CATALOGUE, WORKPIECES, PartModel, by_id, of_workpiece
from forge_station.contract.views import NANO_LAYOUT
from forge_station.geometry import gauge, pose, sheet
from forge_station.sim import fasteners, layout, rest_pose, scanner, surrogate, trays
from forge_station.sim.mesh import Mesh, concat

_INDEX = {model.id: i for i, model in enumerate(CATALOGUE)}
_VARIANTS = 4


@dataclass(frozen=True)
class ScenePlan:
    """Which parts lie on a tray, and why. kind: batch, kit or inventory."""

    kind: str
    parts: tuple[PartModel, ...]


def plan_batch(rng: np.random.Generator, odd: bool | None = None) -> ScenePlan:
    """3..6 equal parts; half of the time one is another model number or another workpiece."""
    base = any_part(rng)
    count = int(rng.integers(3, 7))
    parts = [base] * count
    if rng.random() < 0.5 if odd is None else odd:
        parts[int(rng.integers(count))] = other_part(base, rng)
    return ScenePlan("batch", tuple(parts))


def plan_kit(rng: np.random.Generator) -> ScenePlan:
    """2..6 parts of one nominal size, as an assembly needs them; sometimes one does not belong."""
    base = any_part(rng)
    pool = trays.near_in_size(base, 1.05)
    count = int(rng.integers(2, 7))
    parts = [base]
    while len(parts) < count:
        repeat = rng.random() < 0.25
        parts.append(parts[-1] if repeat else trays.spread(pool, rng))
    if rng.random() < 0.4:
        chosen = int(rng.integers(count))
        parts[chosen] = other_part(parts[chosen], rng)
    return ScenePlan("kit", tuple(parts))


def plan_inventory(rng: np.random.Generator) -> ScenePlan:
    """Any parts of similar size: every letter must be bound to its own part."""
    base = any_part(rng)
    pool = trays.near_in_size(base)
    count = int(rng.integers(1, 7))
    return ScenePlan("inventory", (base, *(trays.spread(pool, rng) for _ in range(count - 1))))


def other_part(base: PartModel, rng: np.random.Generator) -> PartModel:
    """60 % the same workpiece in a neighbouring model number, else another workpiece."""
    return trays.other_part(base, rng, same_workpiece=rng.random() < 0.6)


def any_part(rng: np.random.Generator) -> PartModel:
    workpiece = WORKPIECES[int(rng.integers(len(WORKPIECES)))]
    models = of_workpiece(workpiece)
    return models[int(rng.integers(len(models)))]


@lru_cache(maxsize=1024)
def _variant(part: str, number: int) -> Mesh:
    """One of a few built variants of a model (dimensions in tolerance, chamfers, threads)."""
    rng = np.random.default_rng([_INDEX[part], number])
    return fasteners.build(by_id(part), None if number == 0 else rng)


def resting(model: PartModel, rng: np.random.Generator) -> Mesh:
    """A built part in a stable pose on the tray."""
    return rest_pose.rest(_variant(model.id, int(rng.integers(_VARIANTS))), rng)


def poses_for(
    meshes: Sequence[Mesh], rng: np.random.Generator, *, randomise: bool = True
) -> list[Calibration]:
    """The scan head's poses, its field filled by the parts. Randomised: other sets, lost poses."""
    low = np.min([mesh.vertices.min(axis=0) for mesh in meshes], axis=0)
    high = np.max([mesh.vertices.max(axis=0) for mesh in meshes], axis=0)
    scale = scanner.scale_for(*(high - low).tolist())
    if not randomise:
        return list(scanner.rig(scale))
    scale *= float(rng.uniform(0.95, 1.3))
    name = "turntable4" if rng.random() < 0.8 else "overhead_front_side"
    rig = list(scanner.rig(scale, name))
    if rng.random() < 0.1:
        rig.pop(int(rng.integers(len(rig))))
    return rig


def make_sheet(plan: ScenePlan, rng: np.random.Generator) -> tuple[sheet.Sheet, np.ndarray]:
    """Surrogate scan of a plan -> marks sheet (part i in column i) and sizes [n, 3] mm.

    Raises ValueError when a part cannot be seen.
    """
    gap = (0.15, 0.8) if rng.random() < 0.8 else (0.8, 1.5)
    meshes = [resting(model, rng) for model in plan.parts]
    tallest = max(float(np.ptp(mesh.vertices[:, 2])) for mesh in meshes)
    placed = layout.lay_out(meshes, rng, (gap[0] * tallest + 0.5, gap[1] * tallest + 0.5))
    rig = poses_for(placed, rng)
    owner = np.repeat(np.arange(len(placed)), [len(mesh.faces) for mesh in placed])
    step = 2 if rng.random() < 0.75 else 1  # mostly a coarser camera: four times faster
    found = surrogate.scan(concat(placed), rig, rng, surrogate.Noise.random(rng), step=step)
    pixel = step * float(np.mean([c.camera_pixel_mm or 0.0 for c in rig]))
    above = found.points[:, 2] > 0.5 * pixel
    points, source = found.points[above], owner[found.face[above]]
    clouds, sizes = [], []
    for i in range(len(placed)):
        part = pose.align(points[source == i], pixel, poses=len(rig))
        size = gauge.measure(part)
        clouds.append(part.points)
        sizes.append((size.length_mm, size.width_mm, size.height_mm))
    drawn = sheet.marks_sheet(clouds, list(range(len(clouds))), NANO_LAYOUT)
    return drawn, np.array(sizes, np.float32)
