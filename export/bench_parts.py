"""The parts of `export.bench`: scanned by the surrogate of the simulator, drawn as a station draws.

Three trays of a kit (a bolt, a nut, a washer) that differ in the surface of the bolt: sound, cut,
and bent over much of its length, which makes the longest answers. Needs the extra
`demo` (scipy, numba).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forge_station import checks
from forge_station.contract.catalogue import by_id
from forge_station.contract.views import DIFFERENCE, Layout
from forge_station.geometry import pose, sheet, surface
from forge_station.geometry.pose import PartCloud
from forge_station.sim import defects, fasteners, rest_pose, scanner, surrogate
from forge_station.sim.mesh import Mesh
from forge_station.sim.references import CadReferences

KIT = ("hex_bolt M8x30", "hex_nut M8", "flat_washer M8")
"""What lies on the tray; the first one's surface is looked at."""
SURFACES = {"sound": None, "cut": ("cut", 0.8), "bent": ("deformation", 1.0)}
"""Name -> defect class and `size_scale` of the simulator."""


@dataclass(frozen=True)
class Part:
    """What one part shows: the marks sheet, the surface picture, and the clouds behind them."""

    clouds: tuple[PartCloud, ...]
    marks: sheet.Sheet
    surface: sheet.Sheet


def parts_of(layout: Layout, channels: Sequence[str], seed: int = 0) -> dict[str, Part]:
    """Name of the surface -> pictures. The same seed draws the same parts.

    A model that is shown the difference from a reference gets that of the nominal part.
    """
    rng = np.random.default_rng(seed)
    meshes = [rest_pose.rest(fasteners.build(by_id(part), rng), rng) for part in KIT]
    others = [_scanned(mesh, rng) for mesh in meshes[1:]]
    found = {}
    for name, defect in SURFACES.items():
        made = meshes[0] if defect is None else _damaged(meshes[0], *defect, rng)
        clouds = (_scanned(made, rng), *others)
        columns = checks.columns_of(len(clouds), layout)
        marks = sheet.marks_sheet([cloud.points for cloud in clouds], columns, layout)
        if DIFFERENCE in channels:
            sound = CadReferences()[KIT[0]]
            picture = surface.look(clouds[0].points, layout, sound).picture
        else:
            picture, _ = sheet.surface_picture(clouds[0].points, layout)
        found[name] = Part(clouds, marks, picture)
    return found


def _damaged(mesh: Mesh, kind: str, scale: float, rng: np.random.Generator) -> Mesh:
    return defects.apply_defect(mesh, kind, rng, scale).mesh


def _scanned(mesh: Mesh, rng: np.random.Generator) -> PartCloud:
    size = np.ptp(mesh.vertices, axis=0)
    rig = scanner.rig(scanner.scale_for(*size.tolist()), "turntable4")
    points = surrogate.scan(mesh, rig, rng).points
    pixel = float(np.mean([c.camera_pixel_mm or 0.0 for c in rig]))
    return pose.align(points.compress(points[:, 2] > 0.5 * pixel, axis=0), pixel, poses=len(rig))
