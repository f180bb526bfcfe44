"""Marks sheets for training: which parts lie on a tray, how they lie, and the surrogate's scan.

Knows the scanner surrogate and the station's own pictures; no shards, no command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forge_station.capture.calibration import Calibration
from forge_station.contract.catalogue import CATALOGUE, WORKPIECES, PartModel, of_workpiece
from forge_station.contract.views import NANO_LAYOUT
from forge_station.geometry import gauge, pose, sheet
from forge_station.sim import fasteners, layout, rest_pose, scanner, surrogate, trays
from forge_station.sim.mesh import Mesh, concat
from training.data.variation import USUAL, Variation

_INDEX = {model.id: i for i, model in enumerate(CATALOGUE)}


@dataclass(frozen=True)
class ScenePlan:
    """Which parts lie on a tray, and why. kind: batch, kit or inventory."""

    kind: str
    parts: tuple[PartModel, ...]
    right: bool = True
    """Nothing on the tray that does not belong there."""


def plan_batch(rng: np.random.Generator, correct: float = 0.5) -> ScenePlan:
    """3..6 equal parts; in all but `correct` (a share) one is another model or workpiece."""
    base = any_part(rng)
    count = int(rng.integers(3, 7))
    parts = [base] * count
    right = bool(rng.random() < correct)
    if not right:
        parts[int(rng.integers(count))] = other_part(base, rng)
    return ScenePlan("batch", tuple(parts), right)


def plan_kit(rng: np.random.Generator, complete: float = 0.6) -> ScenePlan:
    """2..6 parts of one nominal size; in all but `complete` (a share) one does not belong."""
    base = any_part(rng)
    pool = trays.near_in_size(base, 1.05)
    count = int(rng.integers(2, 7))
    parts = [base]
    while len(parts) < count:
        repeat = rng.random() < 0.25
        parts.append(parts[-1] if repeat else trays.spread(pool, rng))
    right = bool(rng.random() < complete)
    if not right:
        chosen = int(rng.integers(count))
        parts[chosen] = other_part(parts[chosen], rng)
    return ScenePlan("kit", tuple(parts), right)


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


def resting(model: PartModel, rng: np.random.Generator, vary: Variation = USUAL) -> Mesh:
    """A part, built anew (dimensions in tolerance, chamfers, threads), in a stable pose."""
    return rest_pose.rest(fasteners.build(model, rng if vary.made else None), rng)


def poses_for(
    meshes: Sequence[Mesh], rng: np.random.Generator, vary: Variation = USUAL
) -> list[Calibration]:
    """The scan head's poses, its field filled by the parts; sometimes other poses, or one less."""
    low = np.min([mesh.vertices.min(axis=0) for mesh in meshes], axis=0)
    high = np.max([mesh.vertices.max(axis=0) for mesh in meshes], axis=0)
    scale = scanner.scale_for(*(high - low).tolist()) * float(rng.uniform(*vary.field_of_view))
    three = rng.random() < vary.three_poses_share
    rig = list(scanner.rig(scale, "overhead_front_side" if three else "turntable4"))
    if rng.random() < vary.lost_pose_share:
        rig.pop(int(rng.integers(len(rig))))
    return rig


def on_tray(plan: ScenePlan, rng: np.random.Generator, vary: Variation = USUAL) -> list[Mesh]:
    """The parts of a plan at rest on the tray, with gaps."""
    gap = vary.wide_gap if rng.random() < vary.wide_gap_share else vary.gap
    meshes = [resting(model, rng, vary) for model in plan.parts]
    tallest = max(float(np.ptp(mesh.vertices[:, 2])) for mesh in meshes)
    return layout.lay_out(meshes, rng, (gap[0] * tallest + 0.5, gap[1] * tallest + 0.5))


def make_sheet(
    plan: ScenePlan, rng: np.random.Generator, vary: Variation = USUAL
) -> tuple[sheet.Sheet, np.ndarray]:
    """Surrogate scan of a plan -> marks sheet (part i in column i) and sizes [n, 3] mm.

    Raises ValueError when a part cannot be seen.
    """
    placed = on_tray(plan, rng, vary)
    rig = poses_for(placed, rng, vary)
    owner = np.repeat(np.arange(len(placed)), [len(mesh.faces) for mesh in placed])
    step = 2 if rng.random() < vary.coarse_share else 1
    found = surrogate.scan(concat(placed), rig, rng, vary.noise(rng), step=step)
    pixel = step * float(np.mean([c.camera_pixel_mm or 0.0 for c in rig]))
    above = found.points[:, 2] > 0.5 * pixel
    points, source = found.points.compress(above, axis=0), owner[found.face[above]]
    return sheet_of(
        [
            pose.align(points.compress(source == i, axis=0), pixel, poses=len(rig))
            for i in range(len(placed))
        ]
    )


def sheet_of(parts: Sequence[pose.PartCloud]) -> tuple[sheet.Sheet, np.ndarray]:
    """Separated parts -> marks sheet (part i in column i) and measured sizes [n, 3] mm."""
    drawn = sheet.marks_sheet([part.points for part in parts], range(len(parts)), NANO_LAYOUT)
    return drawn, np.array([gauge.measure(part).box for part in parts], np.float32)
