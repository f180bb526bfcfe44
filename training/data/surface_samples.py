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
from forge_station.geometry import gauge, pose, reference, render, sheet
from forge_station.sim import defects, surrogate
from forge_station.sim.mesh import Mesh
from forge_station.sim.references import CadReferences
from training.data.sheet_samples import any_part, poses_for, resting
from training.data.variation import USUAL, Variation

PROMISED_SURFACE = (
    "hex_bolt",
    "socket_cap_screw",
    "hex_nut",
    "flange_nut",
    "flat_washer",
    "pin",
)
"""Workpieces the surface check is promised for (FORGE evaluates 6 of 14 as well)."""


REFERENCES = CadReferences()
"""What a scanned part is compared with: nominal shapes, built when first asked for."""
SMALLEST = {"crack": 0.25, "cut": 0.15, "deformation": 0.10, "dent": 0.15}
"""Smallest `size_scale` of each class: about the size that half of all scans show at all."""
LARGE_SHARE, LARGE = 0.5, 0.6
"""Share of defects drawn evenly from this scale to 1; the others log-uniformly below it."""


@dataclass(frozen=True)
class DefectSize:
    """How large a defect was made. `mm`, `extent_mm`: see `sim.defects`; `scale`: of its range."""

    mm: float = 0.0
    extent_mm: float = 0.0
    scale: float = 0.0


@dataclass(frozen=True)
class SurfaceSample:
    """One surface picture with its truth.

    `image` uint8 [H, W, 4]: shade, relief, height, and difference from the reference. `grid` bool
    [3, 16, 16] over front, side, top. `pixel_mm`: camera pixel on the part.
    """

    image: np.ndarray
    size: tuple[float, float, float]
    grid: np.ndarray
    score: int
    pixel_mm: float
    defect: DefectSize = DefectSize()


def surface_part(rng: np.random.Generator, promised: float = 0.8) -> PartModel:
    """Mostly (`promised`, a share) a workpiece that the surface check is promised for."""
    if rng.random() < promised:
        models = of_workpiece(PROMISED_SURFACE[int(rng.integers(len(PROMISED_SURFACE)))])
        return models[int(rng.integers(len(models)))]
    return any_part(rng)


def random_scale(defect: str, rng: np.random.Generator) -> float:
    """A `size_scale`: half of them large, the others down to what a scan barely shows."""
    if rng.random() < LARGE_SHARE:
        return float(rng.uniform(LARGE, 1.0))
    return float(np.exp(rng.uniform(np.log(SMALLEST[defect]), np.log(LARGE))))


def damaged(
    model: PartModel,
    defect: str,
    rng: np.random.Generator,
    scale: float = 1.0,
    vary: Variation = USUAL,
) -> tuple[Mesh, np.ndarray, DefectSize]:
    """A resting part with a defect made on the mesh, the defective faces (bool), and its size."""
    mesh = resting(model, rng, vary)
    if defect == tasks.NORMAL:
        return mesh, np.zeros(len(mesh.faces), bool), DefectSize()
    part = defects.apply_defect(mesh, defect, rng, scale)
    size = DefectSize(part.size_mm, part.extent_mm, scale)
    return part.mesh, np.asarray(part.face_flag, bool), size


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


def make_surface(
    model: PartModel, defect: str, rng: np.random.Generator, vary: Variation = USUAL
) -> SurfaceSample | None:
    """Surrogate scan of one part; None when its defect is not visible in any view."""
    scale = 0.0 if defect == tasks.NORMAL else random_scale(defect, rng)
    mesh, faces, made = damaged(model, defect, rng, scale, vary)
    rig = poses_for([mesh], rng, vary)
    found = surrogate.scan(mesh, rig, rng, vary.noise(rng))
    pixel = float(np.mean([c.camera_pixel_mm or 0.0 for c in rig]))
    above = found.points[:, 2] > 0.5 * pixel
    points, flagged = found.points.compress(above, axis=0), faces[found.face[above]]
    part, flags = align_with(points, flagged, pixel, len(rig))
    return surface_sample(part, flags, model.id, made)


def surface_sample(
    part: pose.PartCloud, flags: np.ndarray, name: str, made: DefectSize
) -> SurfaceSample | None:
    """A part cloud with its defect flags [N] -> picture and truth; None: defect not seen."""
    picture, views = sheet.surface_picture(part.points, NANO_LAYOUT)
    box = sheet.robust_box(part.points)
    truth = truth_grid(part, flags, picture.mm_per_px, box)
    if made.scale > 0 and truth.sum() < 2:
        return None
    compared = reference.compare(views, box.centre, REFERENCES[name])
    difference = np.concatenate([compared.channel[view] for view in VIEWS], axis=1)
    filled = sum(float((grids.coverage(view.filled) > 0.5).sum()) for view in views.values())
    size = gauge.measure(part)
    return SurfaceSample(
        np.dstack([picture.image, difference]),
        (size.length_mm, size.width_mm, size.height_mm),
        truth,
        tasks.surface_score(float(truth.sum()) / max(filled, 1.0)),
        part.camera_pixel_mm,
        made,
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
