"""Scenes through the full simulator and decoder: mesh -> patterns -> camera images -> decoded cloud
-> the station's own separation. About six times the work of the surrogate, and nothing left out.

Used for evaluation (`training.cases`) and for training pools (`training.synth --path decoded`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from forge_station.capture import base, structured_light
from forge_station.capture.base import Cloud
from forge_station.capture.calibration import Calibration
from forge_station.contract import tasks
from forge_station.contract.catalogue import PartModel
from forge_station.geometry import scene, sheet
from forge_station.geometry.pose import PartCloud
from forge_station.sim import rest_pose, scanner
from forge_station.sim.finish import SMOOTH, Finish, rough
from forge_station.sim.mesh import Mesh
from training.data.sheet_samples import ScenePlan, on_tray, poses_for, sheet_of
from training.data.surface_samples import SurfaceSample, damaged, random_scale, surface_sample
from training.data.variation import SIMULATED, USUAL, Light, Variation
from training.evaluation.truth import defect_flags


def scan(
    meshes: Sequence[Mesh],
    rig: Sequence[Calibration],
    rng: np.random.Generator,
    flagged: NDArray[np.bool_] | None = None,
    light: Light = SIMULATED,
    *,
    stained: bool = False,
    finish: Finish = SMOOTH,
) -> tuple[Cloud, NDArray[np.bool_]]:
    """Simulate, decode and fuse all poses. Also which points lie on faces of mesh 0 in `flagged`.

    A point belongs to the face that its camera pixel truly sees. `stained`: those faces are
    `scanner.STAIN`. `finish`: of all meshes; the tray stays smooth.
    """
    surface_seed = int(rng.integers(2**31)) if finish.height > 0 else 0
    shown, surfaces = list(meshes), [light.surface] * len(meshes)
    if stained and flagged is not None:
        first = meshes[0]
        shown[0] = Mesh(first.vertices, first.faces[~flagged])
        shown.append(Mesh(first.vertices, first.faces[flagged]))
        surfaces.append(scanner.STAIN)
    scans, hits = [], []
    for calibration in rig:
        stack = scanner.simulate(
            shown,
            calibration,
            rng,
            exposures=light.exposures,
            registration=light.registration(calibration),
            surfaces=surfaces,
            sensor=light.sensor,
        )
        decoded = structured_light.decode(stack, calibration)
        valid = np.isfinite(decoded.points[..., 2])
        hit = np.zeros(int(valid.sum()), bool)
        if finish.height > 0 or (flagged is not None and flagged.any()):
            _, mesh, face = scanner.true_depth(meshes, calibration)
        if finish.height > 0:
            pixel = calibration.camera_pixel_mm or 0.0
            decoded = replace(decoded, points=decoded.points.copy())
            for number, one in enumerate(meshes):
                on = valid & (mesh == number)
                normals = one.face_normals()[face[on]]
                seed = surface_seed + number
                decoded.points[on] = rough(decoded.points[on], normals, finish, pixel, seed)
        scans.append(decoded)
        if flagged is not None and flagged.any():
            on_part = mesh[valid] == 0
            hit[on_part] = flagged[face[valid][on_part]]
        hits.append(hit)
    return base.fuse(scans), np.concatenate(hits)


def decoded_sheet(
    plan: ScenePlan, rng: np.random.Generator, vary: Variation = USUAL
) -> tuple[sheet.Sheet, np.ndarray]:
    """As `sheet_samples.make_sheet`; ValueError when separation finds other than the parts."""
    placed = on_tray(plan, rng, vary)
    cloud, _ = scan(placed, poses_for(placed, rng, vary), rng, light=vary.lit(rng))
    return sheet_of(_in_order(scene.separate(cloud).parts, placed))


def decoded_surface(
    model: PartModel,
    defect: str,
    rng: np.random.Generator,
    vary: Variation = USUAL,
    *,
    closer: bool = False,
) -> SurfaceSample | None:
    """As `surface_samples.make_surface`; None when the scan does not show the defect."""
    scale = 0.0 if defect == tasks.NORMAL else random_scale(defect, rng)
    mesh, faces, made = damaged(model, defect, rng, scale, vary)
    mesh = rest_pose.settle(mesh)
    rig = poses_for([mesh], rng, vary)
    cloud, flags = scan([mesh], rig, rng, faces, vary.lit(rng), stained=made.closed)
    parts = scene.separate(cloud).parts
    if not parts:
        return None
    part = max(parts, key=lambda item: len(item.points))
    flags_of_part = defect_flags(part, cloud.points, flags)
    return surface_sample(part, flags_of_part, model.id, made, rng if closer else None)


def _in_order(parts: Sequence[PartCloud], placed: Sequence[Mesh]) -> list[PartCloud]:
    """The separated parts in the order of the meshes that they are."""
    if len(parts) != len(placed):
        raise ValueError(f"separation found {len(parts)} parts of {len(placed)}")
    found = []
    for mesh in placed:
        low, high = mesh.bounds()
        inside = [
            part
            for part in parts
            if (low[:2] <= part.tray_from_part[:2, 3]).all()
            and (part.tray_from_part[:2, 3] <= high[:2]).all()
        ]
        if len(inside) != 1:
            raise ValueError(f"{len(inside)} separated parts lie where one part is")
        found.append(inside[0])
    return found
