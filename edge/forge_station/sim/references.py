"""References (`geometry.reference`) of catalogue parts from their modelled shape.

Every stable pose is scanned without noise from eight sides by the scanner surrogate, so a reference
shows what a scan can show. Where sound parts are at hand, scans of them make as good a reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from forge_station.contract.catalogue import CATALOGUE, by_id
from forge_station.contract.views import NANO_LAYOUT
from forge_station.geometry import pose, reference, sheet
from forge_station.geometry.reference import Reference
from forge_station.sim import fasteners, rest_pose, scanner, surrogate
from forge_station.sim.mesh import Floats, Mesh

_CLEAN = surrogate.Noise(depth=0.0, grazing_keep=1.0, flying=0.0, edge_drop=0.0, registration=0.0)
# A pose is left out where its surface is nearer than this (px) to one that is there already; and
# heights that differ by less than this share of the length count as equal.
_ALIKE_PX, _ALIKE = 1.0, 0.01
_MOST_POSES = 6


@dataclass
class CadReferences(Mapping[str, Reference]):
    """Part id -> reference, built when it is first asked for and kept."""

    _built: dict[str, Reference] = field(default_factory=dict)

    def __getitem__(self, part: str) -> Reference:
        if part not in self._built:
            self._built[part] = cad_reference(fasteners.build(by_id(part)))
        return self._built[part]

    def __iter__(self) -> Iterator[str]:
        return (model.id for model in CATALOGUE)

    def __len__(self) -> int:
        return len(CATALOGUE)


def cad_reference(mesh: Mesh) -> Reference:
    """The reference of a sound mesh (mm, own frame) in all its stable poses."""
    found: list[reference.RestView] = []
    heights: list[float] = []
    for rest in rest_pose.rest_poses(mesh):
        resting = rest_pose.settle(mesh.transformed(rest.rotation))
        low, high = resting.bounds()
        height, length = float(high[2]), float((high - low).max())
        # Equal heights are nearly always one pose turned: flats of a hexagon, a round side.
        if sum(abs(height - other) < _ALIKE * length for other in heights) >= 2:
            continue
        heights.append(height)
        points = clean_scan(resting)
        if found and _misfit(points, Reference(tuple(found))) < _ALIKE_PX:
            continue
        found.extend(reference.build([points]).poses)
        if len(found) == _MOST_POSES:
            break
    return Reference(tuple(found))


def clean_scan(mesh: Mesh) -> Floats:
    """Points [N, 3] mm in the part frame of a resting mesh, from eight sides, without noise."""
    low, high = mesh.bounds()
    scale = scanner.scale_for(*(high - low).tolist())
    rig = scanner.rig(scale)
    half = np.cos(np.pi / 4), np.sin(np.pi / 4)
    turn = np.array([[half[0], -half[1], 0.0], [half[1], half[0], 0.0], [0.0, 0.0, 1.0]])
    rng = np.random.default_rng(0)
    straight = surrogate.scan(mesh, rig, rng, _CLEAN).points.astype(np.float64)
    turned = surrogate.scan(mesh.transformed(turn), rig, rng, _CLEAN).points.astype(np.float64)
    pixel = float(np.mean([c.camera_pixel_mm or 0.0 for c in rig]))
    points = np.concatenate([straight, turned @ turn])
    points = points[points[:, 2] > 0.5 * pixel]
    return np.asarray(pose.align(points, pixel, poses=2 * len(rig)).points, np.float64)


def _misfit(points: Floats, known: Reference) -> float:
    _, views = sheet.surface_picture(points, NANO_LAYOUT)
    return reference.fit(views, sheet.robust_box(points).centre, known).misfit
