"""Synthetic training pools: catalogue parts -> scanner surrogate -> the station's own pictures.

    python -m training.synth sheet       --out .work/data --count 30000 --jobs 2
    python -m training.synth surface     --out .work/data --count 15000 --jobs 2
    python -m training.synth sheet-val   --out .work/data --count 500 --seed 900000

Resumable: shards that exist are kept, every shard has its own seed. `--contact-sheet FILE.png`
draws a page of samples to look at. Evaluation never uses this path (see `training.cases`).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import cv2
import numpy as np
from tqdm import tqdm

from forge_station.capture.calibration import Calibration
from forge_station.contract import grid as grids
from forge_station.contract import tasks
from forge_station.contract.catalogue import CATALOGUE, WORKPIECES, PartModel, by_id, of_workpiece
from forge_station.contract.views import NANO_LAYOUT, VIEWS
from forge_station.geometry import gauge, pose, render, sheet
from forge_station.sim import defects, fasteners, layout, rest_pose, scanner, surrogate, trays
from forge_station.sim.mesh import Mesh, concat
from training.nano.pools import write_shard

SHARD = 250
PROMISED_SURFACE = (
    "hex_bolt",
    "socket_cap_screw",
    "hex_nut",
    "flange_nut",
    "flat_washer",
    "pin",
)
"""Workpieces the surface check is promised for (FORGE evaluates 6 of 14 as well)."""
_INDEX = {model.id: i for i, model in enumerate(CATALOGUE)}
_VARIANTS = 4


@dataclass(frozen=True)
class ScenePlan:
    """Which parts lie on a tray, and why. kind: batch, kit or inventory."""

    kind: str
    parts: tuple[PartModel, ...]


def plan_batch(rng: np.random.Generator, odd: bool | None = None) -> ScenePlan:
    """3..6 equal parts; half of the time one is another model number or another workpiece."""
    base = _any_part(rng)
    count = int(rng.integers(3, 7))
    parts = [base] * count
    if rng.random() < 0.5 if odd is None else odd:
        parts[int(rng.integers(count))] = other_part(base, rng)
    return ScenePlan("batch", tuple(parts))


def plan_kit(rng: np.random.Generator) -> ScenePlan:
    """2..6 parts of one nominal size, as an assembly needs them; sometimes one does not belong."""
    base = _any_part(rng)
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
    base = _any_part(rng)
    pool = trays.near_in_size(base)
    count = int(rng.integers(1, 7))
    return ScenePlan("inventory", (base, *(trays.spread(pool, rng) for _ in range(count - 1))))


def other_part(base: PartModel, rng: np.random.Generator) -> PartModel:
    """60 % the same workpiece in a neighbouring model number, else another workpiece."""
    return trays.other_part(base, rng, same_workpiece=rng.random() < 0.6)


def _any_part(rng: np.random.Generator) -> PartModel:
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
    return _any_part(rng)


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


def write_sheets(folder: Path, number: int, seed: int, samples: int = SHARD) -> None:
    """One shard of marks sheets; the same seed and number give the same bytes."""
    rng = np.random.default_rng([seed, number])
    height, width = NANO_LAYOUT.sheet_size
    images = np.zeros((samples, height, width, 3), np.uint8)
    part = np.full((samples, NANO_LAYOUT.columns), -1, np.int16)
    size = np.zeros((samples, NANO_LAYOUT.columns, 3), np.float32)
    count, scale = np.zeros(samples, np.int8), np.zeros(samples, np.float32)
    done = 0
    while done < samples:
        draw = rng.random()
        plan = (
            plan_batch(rng) if draw < 0.3 else plan_kit(rng) if draw < 0.6 else plan_inventory(rng)
        )
        try:
            drawn, sizes = make_sheet(plan, rng)
        except ValueError:
            continue
        n = len(plan.parts)
        images[done], scale[done], count[done] = drawn.image, drawn.mm_per_px, n
        part[done, :n] = [_INDEX[model.id] for model in plan.parts]
        size[done, :n] = sizes
        done += 1
    meta: dict[str, np.ndarray] = {"count": count, "part": part, "size": size, "mm_per_px": scale}
    write_shard(folder, number, images, meta)


def write_surfaces(folder: Path, number: int, seed: int, samples: int = SHARD) -> None:
    """One shard of surface pictures; the same seed and number give the same bytes."""
    rng = np.random.default_rng([seed, number, 7])
    images = np.zeros((samples, *NANO_LAYOUT.surface_size, 3), np.uint8)
    meta: dict[str, np.ndarray] = {
        "part": np.zeros(samples, np.int16),
        "size": np.zeros((samples, 3), np.float32),
        "defect": np.zeros(samples, np.uint8),
        "grid": np.zeros((samples, 3, 16, 16), bool),
        "score": np.zeros(samples, np.int8),
    }
    for done in range(samples):
        # The class is drawn before the retries, so that classes hard to see are not thinned out.
        kind = 0 if rng.random() < 0.3 else int(rng.integers(1, len(tasks.SURFACE_CLASSES)))
        sample = None
        while sample is None:
            model = surface_part(rng)
            try:
                sample = make_surface(model, tasks.SURFACE_CLASSES[kind], rng)
            except ValueError:
                continue
        images[done] = sample.image
        meta["part"][done], meta["defect"][done] = _INDEX[model.id], kind
        meta["size"][done], meta["grid"][done] = sample.size, sample.grid
        meta["score"][done] = sample.score
    write_shard(folder, number, images, meta)


def _work(job: tuple[str, Path, int, int]) -> int:
    name, folder, number, seed = job
    cv2.setNumThreads(1)
    if name.startswith("sheet"):
        write_sheets(folder, number, seed)
    else:
        write_surfaces(folder, number, seed)
    return number


def contact_sheet(folder: Path, path: Path, count: int = 24) -> None:
    """A page of the first samples, shade channel."""
    images = np.load(next(iter(sorted(folder.glob("*.images.npy")))), mmap_mode="r")[:count]
    rows = [np.concatenate(list(images[i : i + 4, ..., 0]), 1) for i in range(0, len(images), 4)]
    cv2.imwrite(str(path), np.concatenate(rows, 0))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pool", choices=["sheet", "surface", "sheet-val", "surface-val"])
    parser.add_argument("--out", type=Path, required=True, help="data folder (git-ignored)")
    parser.add_argument("--count", type=int, default=1000, help="samples in all")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--contact-sheet", type=Path, help="PNG page of samples to look at")
    args = parser.parse_args()
    folder = args.out / args.pool
    wanted = range(-(-args.count // SHARD))
    missing = [n for n in wanted if not (folder / f"{n:05d}.meta.npz").exists()]
    jobs = [(args.pool, folder, number, args.seed) for number in missing]
    context = multiprocessing.get_context("spawn")
    with (
        context.Pool(args.jobs) as pool,
        tqdm(
            total=len(wanted) * SHARD, initial=(len(wanted) - len(missing)) * SHARD, unit="sample"
        ) as bar,
    ):
        for _ in pool.imap_unordered(_work, jobs):
            bar.update(SHARD)
    if args.contact_sheet:
        contact_sheet(folder, args.contact_sheet)


if __name__ == "__main__":
    main()
