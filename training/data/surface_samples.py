"""Surface pictures for training: one part, clean or with a defect made on its mesh, and its truth.

Knows the scanner surrogate and the station's own picture; no shards, no command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from forge_station.contract import grid as grids
from forge_station.contract import tasks
from forge_station.contract.catalogue import PartModel, of_workpiece
from forge_station.contract.views import AXES, NANO_LAYOUT, VIEWS
from forge_station.geometry import gauge, pose, render, surface
from forge_station.geometry.reference import Point
from forge_station.geometry.render import View
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
_FULL_WHITE = 230.0
LARGE_SHARE, LARGE = 0.5, 0.6
"""Share of defects drawn evenly from this scale to 1; the others log-uniformly below it."""


@dataclass(frozen=True)
class DefectSize:
    """How large a defect was made. `mm`, `extent_mm`: see `sim.defects`; `scale`: of its range;
    `closed`: a crack without depth.
    """

    mm: float = 0.0
    extent_mm: float = 0.0
    scale: float = 0.0
    closed: bool = False


@dataclass(frozen=True)
class SurfaceSample:
    """One surface picture with its truth.

    `image` uint8 [H, W, 5]: shade, relief, height, difference from the reference, white image.
    `grid` bool [3, 16, 16] over front, side, top. `pixel_mm`: camera pixel on the part. `closer`:
    a window of each view at twice the scale, see `geometry.surface`.
    """

    image: np.ndarray
    size: tuple[float, float, float]
    grid: np.ndarray
    score: int
    pixel_mm: float
    defect: DefectSize = DefectSize()
    closer: bool = False


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
    closed = defect == "crack" and rng.random() < vary.closed_cracks
    part = defects.apply_defect(mesh, defect, rng, scale, closed=closed)
    size = DefectSize(part.size_mm, part.extent_mm, scale, closed)
    return part.mesh, np.asarray(part.face_flag, bool), size


def truth_grid(
    part: pose.PartCloud, flagged: np.ndarray, mm_per_px: float, middles: Mapping[str, Point]
) -> np.ndarray:
    """Cells [3, 16, 16] whose seen surface is defective by more than a tenth of the cell.

    `middles`: the point in the middle of each view, mm in the part frame.
    """
    out = np.zeros((len(VIEWS), 16, 16), bool)
    if not flagged.any():
        return out
    side = NANO_LAYOUT.panel
    for i, view in enumerate(VIEWS):
        share = render.view_mean(part.points, flagged, view, mm_per_px, (side, side), middles[view])
        mask = np.nan_to_num(share, nan=0.0) > 0.5
        if mask.any():
            out[i] = grids.coverage(mask) > grids.STATION_COVERAGE
    return out


def make_surface(
    model: PartModel,
    defect: str,
    rng: np.random.Generator,
    vary: Variation = USUAL,
    *,
    closer: bool = False,
) -> SurfaceSample | None:
    """Surrogate scan of one part; None when its defect is not visible in any view."""
    scale = 0.0 if defect == tasks.NORMAL else random_scale(defect, rng)
    mesh, faces, made = damaged(model, defect, rng, scale, vary)
    rig = poses_for([mesh], rng, vary)
    found = surrogate.scan(
        mesh, rig, rng, vary.noise(rng),
        surface=vary.lit(rng).surface, stained=faces if made.closed else None,
    )  # fmt: skip
    pixel = float(np.mean([c.camera_pixel_mm or 0.0 for c in rig]))
    above = found.points[:, 2] > 0.5 * pixel
    points, flagged = found.points.compress(above, axis=0), faces[found.face[above]]
    white = np.clip(_FULL_WHITE * found.white[above], 0, 255).astype(np.uint8)
    part, flags = align_with(points, flagged, white, pixel, len(rig))
    return surface_sample(part, flags, model.id, made, rng if closer else None)


def surface_sample(
    part: pose.PartCloud,
    flags: np.ndarray,
    name: str,
    made: DefectSize,
    aim: np.random.Generator | None = None,
) -> SurfaceSample | None:
    """A part cloud with its defect flags [N] -> picture and truth; None: defect not seen.

    `aim`: draws the windows of a closer look, which lie over the defect where a view has it.
    """
    seen = surface.look(part.points, NANO_LAYOUT, REFERENCES[name])
    views, mm_per_px = seen.views, seen.picture.mm_per_px
    middles = dict.fromkeys(VIEWS, seen.picture.centre_mm)
    truth = truth_grid(part, flags, mm_per_px, middles)
    if made.scale > 0 and truth.sum() < 2:
        return None
    filled = sum(float((grids.coverage(view.filled) > 0.5).sum()) for view in views.values())
    score = tasks.surface_score(float(truth.sum()) / max(filled, 1.0))
    picture = seen.picture
    if aim is not None:
        windows = surface.suspicious(_aimed(truth, views, aim))
        middles = {name: seen.middle(name, windows[name]) for name in VIEWS}
        picture, views = seen.closer(windows)
        truth = truth_grid(part, flags, picture.mm_per_px, middles)
        if made.scale > 0 and truth.sum() < 2:
            return None
    others = [_height_and_white(part, views[view], view, middles[view]) for view in VIEWS]
    height, white = (np.concatenate(channel, axis=1) for channel in zip(*others, strict=True))
    size = gauge.measure(part)
    return SurfaceSample(
        np.dstack([picture.image[..., :2], height, picture.image[..., 2], white]),
        (size.length_mm, size.width_mm, size.height_mm),
        truth,
        score,
        part.camera_pixel_mm,
        made,
        aim is not None,
    )


def _aimed(truth: np.ndarray, views: Mapping[str, View], rng: np.random.Generator) -> np.ndarray:
    """What draws a window [3, 16, 16]: the defect, or some surface where a view shows none.

    Here and there a little off, as a station's suspicion is.
    """
    out = np.zeros(truth.shape)
    for i, name in enumerate(VIEWS):
        cells = np.argwhere(truth[i] if truth[i].any() else grids.coverage(views[name].filled) > 0)
        if len(cells):
            row, column = cells[int(rng.integers(len(cells)))] + rng.integers(-2, 3, 2)
            out[i, min(max(row, 0), 15), min(max(column, 0), 15)] = 1.0
    return out


def _height_and_white(
    part: pose.PartCloud, view: View, name: str, middle: Point
) -> tuple[np.ndarray, np.ndarray]:
    axes = AXES[name]
    height = render.height(view, axes.sign * middle[axes.towards])
    if part.white is None:
        return height, np.zeros_like(height)
    bright = render.view_mean(
        part.points, part.white.astype(np.float32), name, view.mm_per_px, view.depth.shape, middle
    )
    return height, render.white(view, bright)


def align_with(
    points: np.ndarray, flagged: np.ndarray, white: np.ndarray, pixel: float, poses: int
) -> tuple[pose.PartCloud, np.ndarray]:
    """`pose.align` and the flags of the points it kept (it drops flying points)."""
    part = pose.align(points, pixel, white=white, poses=poses)
    if not flagged.any():
        return part, np.zeros(len(part.points), np.float32)
    if len(points) == len(part.points):
        return part, flagged.astype(np.float32)
    kept = pose.solid(np.ascontiguousarray(points, np.float32), pixel)
    return part, np.asarray(flagged[kept], np.float32)
