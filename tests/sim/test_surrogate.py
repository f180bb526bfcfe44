"""The stand-in of the scanner: closed forms, and statistics against the decoded simulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("numba", reason="the simulator needs the extra demo")

from scipy.spatial import cKDTree

from forge_station.capture import base, structured_light
from forge_station.contract.catalogue import PartModel, by_id, of_workpiece
from forge_station.contract.views import NANO_LAYOUT, VIEWS
from forge_station.geometry import pose, render, scene
from forge_station.geometry.pose import PartCloud
from forge_station.sim import fasteners, rest_pose, scanner, surrogate
from forge_station.sim.mesh import Mesh, concat, sample_surface

EXACT = surrogate.Noise(depth=0.0, grazing_keep=1.0, flying=0.0, edge_drop=0.0, registration=0.0)
PARTS = (
    "hex_bolt M8x30",
    "hex_nut M10",
    "flat_washer M8",
    "pin 6x20",
    "flange_nut M8",
    "strap_clamp",
)


def box(low: tuple[float, float, float], high: tuple[float, float, float]) -> Mesh:
    corners = np.array([[(low, high)[(k >> a) & 1][a] for a in range(3)] for k in range(8)], float)
    quads = [(0, 2, 3, 1), (4, 5, 7, 6), (0, 1, 5, 4), (2, 6, 7, 3), (0, 4, 6, 2), (1, 3, 7, 5)]
    faces = [t for a, b, c, d in quads for t in ((a, b, c), (a, c, d))]
    return Mesh(corners, np.array(faces, np.int32))


BOX = box((-12.0, -8.0, 0.0), (12.0, 8.0, 6.0))
SCALE = scanner.scale_for(24.0, 16.0, 6.0)


def test_a_head_that_does_not_know_the_tray_is_refused():
    blind = replace(scanner.rig(SCALE)[0], tray_from_camera=None)
    with pytest.raises(ValueError, match="front: the surrogate needs tray_from_camera"):
        surrogate.scan(BOX, [blind], np.random.default_rng(0))


def test_nothing_in_the_field_gives_no_points():
    far = BOX.transformed(translation=np.array([500.0, 0.0, 0.0]))
    found = surrogate.scan(far, scanner.rig(SCALE)[:1], np.random.default_rng(0))
    assert found.points.shape == (0, 3)
    assert found.face.shape == (0,)


def test_without_noise_every_point_lies_on_the_face_it_names():
    rig = scanner.rig(SCALE)
    found = surrogate.scan(BOX, rig, np.random.default_rng(1), replace(EXACT))
    turned = 6.0 * np.radians(0.03) * 15  # what six sigma of the pose's turn move at a corner
    corner = BOX.vertices[BOX.faces[found.face, 0]]
    off = ((found.points - corner) * BOX.face_normals()[found.face]).sum(1)
    assert np.abs(off).max() < turned
    assert len(found.points) > 20_000


def test_one_pose_sees_only_what_faces_camera_and_projector():
    front = scanner.rig(SCALE)[0]
    found = surrogate.scan(BOX, [front], np.random.default_rng(1), EXACT)
    normals = BOX.face_normals()[found.face]
    assert normals[:, 1].max() < 0.5, "the back of the part"
    assert normals[:, 2].min() > -0.5, "the underside"
    assert (normals[:, 2] > 0.9).mean() > 0.3
    assert (normals[:, 1] < -0.9).mean() > 0.1


def test_the_projector_throws_shadows():
    """A wall between projector (right of the camera) and the part takes points of the part."""
    rig = [scanner.rig(SCALE, "overhead")[0]]
    wall = box((9.0, -8.0, 6.0), (9.5, 8.0, 12.0))
    free = surrogate.scan(BOX, rig, np.random.default_rng(1), EXACT)
    shaded = surrogate.scan(concat([BOX, wall]), rig, np.random.default_rng(1), EXACT)
    of_box = shaded.points[shaded.face < len(BOX.faces)]
    lost = 1.0 - len(of_box) / len(free.points)
    assert 0.02 < lost < 0.3
    beside = (of_box[:, 0] > 7.8) & (of_box[:, 0] < 8.9)
    assert beside.sum() < 0.05 * ((free.points[:, 0] > 7.8) & (free.points[:, 0] < 8.9)).sum()


def test_the_same_seed_gives_the_same_points():
    rig = scanner.rig(SCALE)[:2]
    first, again, other = (
        surrogate.scan(BOX, rig, np.random.default_rng(seed)).points for seed in (4, 4, 5)
    )
    assert np.array_equal(first, again)
    assert len(first) != len(other) or not np.array_equal(first, other)


def test_a_coarser_camera_gives_a_quarter_of_the_points_and_the_same_noise():
    rig = scanner.rig(SCALE)
    fine, coarse = (
        surrogate.scan(BOX, rig, np.random.default_rng(3), step=step) for step in (1, 2)
    )
    assert len(coarse.points) == pytest.approx(len(fine.points) / 4, rel=0.1)
    top = [found.points[np.abs(found.points[:, 2] - 6.0) < 0.5, 2] for found in (fine, coarse)]
    assert top[1].std() == pytest.approx(top[0].std(), rel=0.4)


def test_a_blinded_pose_sees_nothing_within_a_ball():
    rig, radius = scanner.rig(SCALE)[:1], 20.0
    blind = replace(EXACT, blind_share=1.0, blind_radius=(radius, radius))
    free = surrogate.scan(BOX, rig, np.random.default_rng(1), EXACT).points
    found = surrogate.scan(BOX, rig, np.random.default_rng(1), blind).points
    pixel = float(rig[0].camera_pixel_mm or 0.0)
    kept = cKDTree(found).query(free)[0] < 1e-6
    middle = free[~kept].mean(axis=0)
    assert 0.2 * np.pi * radius**2 < (~kept).sum() < 2 * np.pi * radius**2
    assert np.linalg.norm(free[~kept] - middle, axis=1).max() < 1.5 * radius * pixel


def in_tray_frame(part: PartCloud) -> np.ndarray:
    rotation, shift = part.tray_from_part[:3, :3], part.tray_from_part[:3, 3]
    return (part.points @ rotation.T + shift).astype(np.float32)


def fills(points: np.ndarray, mesh: Mesh) -> np.ndarray:
    """Share of the panel that each view of a cloud fills, at the scale of a surface picture."""
    low, high = mesh.bounds()
    mm_per_px = float((high - low).max()) / (NANO_LAYOUT.panel * 13 / 14)
    centre = tuple(((low + high) / 2).tolist())
    size = (NANO_LAYOUT.panel, NANO_LAYOUT.panel)
    return np.array(
        [render.view_depth(points, view, mm_per_px, size, centre).filled.mean() for view in VIEWS]
    )


def robust_noise(points: np.ndarray, mesh: Mesh) -> float:
    """1.48 x median distance of a sample of points from the planes of the nearest surface."""
    rng = np.random.default_rng(0)
    surface, normals, _ = sample_surface(mesh, 60_000, rng)
    some = points[rng.integers(len(points), size=2000)].astype(float)
    _, nearest = cKDTree(surface).query(some)
    off = ((some - surface[nearest]) * normals[nearest]).sum(1)
    return float(1.4826 * np.median(np.abs(off)))


def model_of(name: str) -> PartModel:
    """A catalogue id, or the first model of a workpiece."""
    return by_id(name) if " " in name else of_workpiece(name)[0]


def test_statistics_agree_with_the_decoded_simulation():
    """The same meshes through images, decoder and separation, and through the stand-in.

    Measured: fills within 0.02, noise 0.8 to 1.3 times, points 1.0 to 1.05 times those of the
    simulation.
    """
    rng = np.random.default_rng(11)
    fill_gaps, noise_ratios, count_ratios = [], [], []
    for name in PARTS:
        mesh = rest_pose.rest(fasteners.build(model_of(name), rng), rng)
        rig = scanner.rig(scanner.scale_for(*mesh.extents().tolist()))
        pixel = float(rig[0].camera_pixel_mm or 0.0)
        stacks = [scanner.simulate(mesh, pose, rng) for pose in rig]
        scans = [structured_light.decode(s, p) for s, p in zip(stacks, rig, strict=True)]
        (part,) = scene.separate(base.fuse(scans)).parts
        real = in_tray_frame(part)
        found = surrogate.scan(mesh, rig, rng).points
        fake = in_tray_frame(pose.align(found[found[:, 2] > 0.5 * pixel], pixel, poses=len(rig)))
        fill_gaps.append(fills(fake, mesh) - fills(real, mesh))
        noise_ratios.append(robust_noise(fake, mesh) / robust_noise(real, mesh))
        count_ratios.append(len(fake) / len(real))
    assert np.abs(fill_gaps).max() < 0.05
    assert min(noise_ratios) > 0.5
    assert max(noise_ratios) < 2.0
    assert min(count_ratios) > 0.9
    assert max(count_ratios) < 1.15
