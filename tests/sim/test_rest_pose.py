"""Rest poses: what gravity does with bolts, nuts and washers, and nothing that would fall over."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial import ConvexHull

from forge_station.contract.catalogue import WORKPIECES, by_id, of_workpiece
from forge_station.sim.fasteners import build
from forge_station.sim.lathe import ring, skin
from forge_station.sim.mesh import Mesh
from forge_station.sim.rest_pose import RestPose, rest, rest_poses


def axis_up(pose: RestPose) -> float:
    """z of the part's own axis in the tray frame."""
    return float(pose.rotation[2, 2])


def test_a_mesh_without_a_hull_is_refused() -> None:
    with pytest.raises(ValueError, match="solid"):
        rest_poses(Mesh(np.eye(3), np.array([[0, 1, 2]])))


@pytest.mark.parametrize("name", WORKPIECES)
def test_every_pose_is_a_rotation_and_carries_the_centre_of_mass_over_its_support(
    name: str,
) -> None:
    mesh = build(of_workpiece(name)[0], np.random.default_rng(0))
    _, centre = mesh.volume_and_centroid()
    poses = rest_poses(mesh)
    assert sum(pose.probability for pose in poses) == pytest.approx(1.0)
    for pose in poses:
        assert pose.rotation @ pose.rotation.T == pytest.approx(np.eye(3), abs=1e-9)
        assert np.linalg.det(pose.rotation) == pytest.approx(1.0)
        turned = mesh.vertices @ pose.rotation.T
        low = turned[turned[:, 2] < turned[:, 2].min() + 0.02 * np.ptp(turned[:, 2]), :2]
        support = ConvexHull(low)
        foot = (pose.rotation @ centre)[:2]
        assert (support.equations[:, :2] @ foot + support.equations[:, 2] < 1e-6).all()


@pytest.mark.parametrize(
    "part",
    ["hex_bolt M8x40", "socket_cap_screw M8x30", "pin 6x20", "rivet 5x20", "set_screw M5x12"],
)
def test_long_parts_lie_and_never_stand(part: str) -> None:
    assert max(abs(axis_up(pose)) for pose in rest_poses(build(by_id(part)))) < 0.3


def test_a_lying_bolt_touches_the_tray_with_a_head_edge_and_its_tip() -> None:
    mesh = build(by_id("hex_bolt M8x40"))
    for pose in rest_poses(mesh):
        turned = mesh.vertices @ pose.rotation.T
        touching = mesh.vertices[turned[:, 2] < turned[:, 2].min() + 0.05, 2]
        assert touching.min() < -35.0
        assert touching.max() >= 0.0


@pytest.mark.parametrize(
    "part", ["hex_bolt M8x20", "socket_cap_screw M8x16", "button_head_screw M8x16"]
)
def test_no_screw_stands_on_its_tip(part: str) -> None:
    rng = np.random.default_rng(4)
    for _ in range(5):
        assert max(axis_up(pose) for pose in rest_poses(build(by_id(part), rng))) < 0.5


@pytest.mark.parametrize("part", ["flat_washer M3", "flat_washer M8", "spring_washer M8"])
def test_washers_lie_flat(part: str) -> None:
    assert min(abs(axis_up(pose)) for pose in rest_poses(build(by_id(part)))) > 0.95


def test_a_nut_lies_flat_or_on_one_of_its_six_flats() -> None:
    poses = rest_poses(build(by_id("hex_nut M8")))
    assert all(abs(axis_up(pose)) < 0.01 or abs(axis_up(pose)) > 0.99 for pose in poses)
    flat = sum(pose.probability for pose in poses if abs(axis_up(pose)) > 0.99)
    assert 0.4 < flat < 0.8
    assert sum(abs(axis_up(pose)) < 0.01 for pose in poses) >= 6


def test_a_short_button_head_does_not_balance_on_its_dome() -> None:
    # found 2026-11-30: facets of the dome passed as poses of their own
    poses = rest_poses(build(by_id("button_head_screw M4x8")))
    assert not [pose for pose in poses if -0.95 < axis_up(pose) < -0.3]


def test_a_head_heavy_screw_lies_although_its_centre_is_barely_over_the_support() -> None:
    # found 2026-11-30 on a strangers' M16x25 mesh with a full head: only head-down was left
    columns = 300
    profile = [(0, 0), (12, 0), (12, 16), (7.8, 16), (7.8, 40), (7, 41), (0, 41)]
    poses = rest_poses(skin([ring(columns, float(r), float(z)) for r, z in profile]))
    lying = sum(pose.probability for pose in poses if abs(axis_up(pose)) < 0.3)
    assert lying > 0.7


def test_rest_puts_the_part_on_the_tray_with_any_yaw() -> None:
    rng = np.random.default_rng(5)
    mesh = build(by_id("hex_bolt M8x30"))
    directions = []
    for _ in range(40):
        low, high = rest(mesh, rng).bounds()
        assert low[2] == pytest.approx(0.0, abs=1e-9)
        assert (low + high)[:2] == pytest.approx([0.0, 0.0], abs=1e-9)
        turned = rest(mesh, rng).vertices
        head, tip = (
            turned[mesh.vertices[:, 2] > 0].mean(0),
            turned[mesh.vertices[:, 2] < -29].mean(0),
        )
        directions.append(np.arctan2(*(head - tip)[1::-1]))
    assert np.histogram(directions, bins=4, range=(-np.pi, np.pi))[0].min() >= 3


def test_poses_are_found_once_a_mesh() -> None:
    mesh = build(by_id("hex_nut M8"))
    assert rest_poses(mesh) is rest_poses(mesh)
