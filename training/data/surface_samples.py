"""Surface pictures for training: one part, clean or with a defect made on its mesh, and its truth.

Knows the scanner surrogate and the station's own picture; no shards, no command line.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forge_station.contract import grid as grids
from forge_station.contract import tasks
from forge_station.contract.catalogue import PartModel, of_workpiece
from forge_station.contract.views import NANO_LAYOUT, VIEWS
from forge_station.geometry import gauge, pose, render, sheet
from forge_station.sim import defects, surrogate
from forge_station.sim.mesh import Mesh
from training.data.sheet_samples import any_part, poses_for, resting

PROMISED_SURFACE = (
    "hex_bolt",
    "socket_cap_screw",
    "hex_nut",
    "flange_nut",
    "flat_washer",
    "pin",
)
"""Workpieces the surface check is promised for (FORGE evaluates 6 of 14 as well)."""


@dataclass(frozen=True)
class SurfaceSample:
    """One surface picture with its truth. grid bool [3, 16, 16] over front, side, top."""

    image: np.ndarray
    size: tuple[float, float, float]
    grid: np.ndarray
    score: int


def surface_part(rng: np.random.Generator) -> PartModel:
    """Mostly a workpiece that the surface check is promised for."""
    if rng.random() < 0.8:
        models = of_workpiece(PROMISED_SURFACE[int(rng.integers(len(PROMISED_SURFACE)))])
        return models[int(rng.integers(len(models)))]
    return any_part(rng)


def damaged(model: PartModel, defect: str, rng: np.random.Generator) -> tuple[Mesh, np.ndarray]:
    """A resting part with a defect made on the mesh, and the defective faces (bool)."""
    mesh = resting(model, rng)
    if defect == tasks.NORMAL:
        return mesh, np.zeros(len(mesh.faces), bool)
    part = defects.apply_defect(mesh, defect, rng)
    return part.mesh, np.asarray(part.face_flag, bool)


def truth_grid(
    part: pose.PartCloud, flagged: np.ndarray, mm_per_px: float, box: sheet.Box
) -> np.ndarray:
    """Cells [3, 16, 16] whose seen surface is defective by more than a tenth of the cell."""
    out = np.zeros((len(VIEWS), 16, 16), bool)
    if not flagged.any():
        return out
    side = NANO_LAYOUT.panel
    for i, view in enumerate(VIEWS):
        share = render.view_mean(part.points, flagged, view, mm_per_px, (side, side), box.centre)
        mask = np.nan_to_num(share, nan=0.0) > 0.5
        if mask.any():
            out[i] = grids.coverage(mask) > grids.STATION_COVERAGE
    return out


def make_surface(model: PartModel, defect: str, rng: np.random.Generator) -> SurfaceSample | None:
    """Surrogate scan of one part; None when its defect is not visible in any view."""
    mesh, faces = damaged(model, defect, rng)
    rig = poses_for([mesh], rng)
    found = surrogate.scan(mesh, rig, rng, surrogate.Noise.random(rng))
    pixel = float(np.mean([c.camera_pixel_mm or 0.0 for c in rig]))
    above = found.points[:, 2] > 0.5 * pixel
    return surface_sample(found.points[above], faces[found.face[above]], pixel, len(rig), defect)


def surface_sample(
    points: np.ndarray, flagged: np.ndarray, pixel: float, poses: int, defect: str
) -> SurfaceSample | None:
    """Points with their defect flags -> picture and truth; None when the defect is not seen."""
    part, flags = align_with(points, flagged, pixel, poses)
    picture, views = sheet.surface_picture(part.points, NANO_LAYOUT)
    box = sheet.robust_box(part.points)
    truth = truth_grid(part, flags, picture.mm_per_px, box)
    if defect != tasks.NORMAL and truth.sum() < 2:
        return None
    filled = sum(float((grids.coverage(view.filled) > 0.5).sum()) for view in views.values())
    size = gauge.measure(part)
    return SurfaceSample(
        picture.image,
        (size.length_mm, size.width_mm, size.height_mm),
        truth,
        tasks.surface_score(float(truth.sum()) / max(filled, 1.0)),
    )


def align_with(
    points: np.ndarray, flagged: np.ndarray, pixel: float, poses: int
) -> tuple[pose.PartCloud, np.ndarray]:
    """`pose.align` and the flags of the points it kept (it drops flying points)."""
    part = pose.align(points, pixel, poses=poses)
    if not flagged.any():
        return part, np.zeros(len(part.points), np.float32)
    if len(points) == len(part.points):
        return part, flagged.astype(np.float32)
    kept = pose.solid(np.ascontiguousarray(points, np.float32), pixel)
    return part, np.asarray(flagged[kept], np.float32)
