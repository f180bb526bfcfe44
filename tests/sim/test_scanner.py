"""The simulated head against closed forms, and decoded against its own truth."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("numba", reason="the simulator needs the extra demo")

from forge_station.capture import base, structured_light
from forge_station.capture.base import Scanner, Trigger, fuse
from forge_station.capture.calibration import PatternSpec
from forge_station.capture.sim import SimulatedScanner
from forge_station.errors import CaptureError
from forge_station.sim import scanner


@dataclass(frozen=True)
class Box:
    vertices: NDArray[np.float64]
    faces: NDArray[np.int32]


def box(low: tuple[float, float, float], high: tuple[float, float, float]) -> Box:
    corners = np.array(
        [[(low, high)[(k >> a) & 1][a] for a in range(3)] for k in range(8)], np.float64
    )
    quads = [(0, 2, 3, 1), (4, 5, 7, 6), (0, 1, 5, 4), (2, 6, 7, 3), (0, 4, 6, 2), (1, 3, 7, 5)]
    faces = [t for a, b, c, d in quads for t in ((a, b, c), (a, c, d))]
    return Box(corners, np.array(faces, np.int32))


BOX = box((-15.0, -10.0, 0.0), (15.0, 10.0, 12.0))


def test_front_pose_looks_along_y_and_every_pose_at_the_tray_centre() -> None:
    for pose in scanner.rig(0.5):
        assert pose.tray_from_camera is not None
        assert pose.range_mm == pytest.approx(385 * 0.5)
        assert pose.camera_pixel_mm == pytest.approx(0.2567 * 0.5, rel=1e-3)
        centre = np.linalg.inv(pose.tray_from_camera) @ [0, 0, 0, 1]
        np.testing.assert_allclose(centre[:2], 0, atol=1e-9)
    front = scanner.rig(1.0)[0].tray_from_camera
    assert front is not None
    s = np.sqrt(0.5)
    np.testing.assert_allclose(front[:3, 2], (0, s, -s), atol=1e-12)
    np.testing.assert_allclose(front[:3, 0], (1, 0, 0), atol=1e-12)
    np.testing.assert_allclose(front[:3, 3], (0, -385 * s, 385 * s), atol=1e-9)


@pytest.mark.parametrize("poses", sorted(scanner.POSES))
def test_scale_for_is_the_smallest_rig_that_sees_the_box(poses: str) -> None:
    size = (120.0, 50.0, 30.0)
    scale = scanner.scale_for(*size, poses=poses)
    part = box((-60, -25, 0), (60, 25, 30))
    for factor, inside in ((1.0, True), (0.85, False)):
        at_border = False
        for pose in scanner.rig(scale * factor, poses):
            _, mesh, _ = scanner.true_depth(part, pose)
            edge = np.concatenate([mesh[0], mesh[-1], mesh[:, 0], mesh[:, -1]])
            at_border |= bool((edge == 0).any())
        assert at_border != inside


def test_true_depth_of_a_box_is_exact_and_names_mesh_and_face() -> None:
    pose = scanner.rig(0.4, "overhead", distorted=False)[0]
    depth, mesh, face = scanner.true_depth([box((90, 90, 0), (91, 91, 1)), BOX], pose)
    assert pose.tray_from_camera is not None
    height = pose.tray_from_camera[2, 3] - depth
    np.testing.assert_allclose(height[mesh == 1], 12.0, atol=1e-9)
    np.testing.assert_allclose(height[mesh == scanner.TRAY_FACE], 0.0, atol=1e-9)
    assert set(np.unique(face[mesh == 1])) <= set(range(12))
    pixel = 0.2567 * 0.4
    width = (mesh == 1).any(axis=0).sum() * pixel * (154 - 12) / 154
    assert width == pytest.approx(30, abs=2 * pixel)


def test_two_meshes_are_told_apart() -> None:
    pose = scanner.rig(1.0, "overhead")[0]
    parts = [box((-40, -5, 0), (-20, 5, 5)), box((10, -5, 0), (40, 5, 8))]
    _, mesh, face = scanner.true_depth(parts, pose)
    assert 1.3 < (mesh == 1).sum() / (mesh == 0).sum() < 1.7
    assert face[mesh >= 0].min() >= 0
    assert face.max() < 12


def test_decoded_scan_has_the_stated_noise_and_few_flying_points() -> None:
    rng = np.random.default_rng(2)
    for scale in (0.4, 2.0):
        part = box(
            tuple(np.multiply((-38, -25, 0), scale)), tuple(np.multiply((38, 25, 30), scale))
        )
        for pose in scanner.rig(scale):
            stack = scanner.simulate(part, pose, rng, registration=(0.0, 0.0))
            scan = structured_light.decode(stack, pose)
            depth, mesh, _ = scanner.true_depth(part, pose)
            assert pose.tray_from_camera is not None
            from_tray = np.linalg.inv(pose.tray_from_camera)
            error = (scan.points @ from_tray[2, :3] + from_tray[2, 3] - depth) / scale
            error = error[np.isfinite(error) & (mesh == 0)]
            assert error.size > 5000
            assert abs(np.median(error)) < 0.005
            assert 1.4826 * np.median(np.abs(error)) < 0.045
            assert (np.abs(error) > 0.3).mean() < 0.02
            assert scan.quality.flags == ()


def test_fused_turntable_gives_the_box_in_the_tray_frame() -> None:
    rng = np.random.default_rng(3)
    rig = scanner.rig(scanner.scale_for(40, 30, 12))
    stacks = [scanner.simulate(BOX, pose, rng) for pose in rig]
    cloud = fuse(structured_light.decode_all(stacks, {pose.digest: pose for pose in rig}))
    assert cloud.poses == 4
    above = cloud.points[cloud.points[:, 2] > 2]
    size = np.percentile(above, 99.5, axis=0) - np.percentile(above, 0.5, axis=0)
    pixel = cloud.camera_pixel_mm
    np.testing.assert_allclose(size[:2], (30, 20), atol=1.5 * pixel)
    top = above[above[:, 2] > 10, 2]
    assert np.median(top) == pytest.approx(12, abs=0.05)


def test_shadow_of_the_projector_hides_tray_beside_the_part() -> None:
    pose = scanner.rig(0.4, "overhead")[0]
    scan = structured_light.decode(
        scanner.simulate(BOX, pose, np.random.default_rng(0), registration=(0, 0)), pose
    )
    _, mesh, _ = scanner.true_depth(BOX, pose)
    hidden = ~np.isfinite(scan.points[..., 2]) & (mesh == scanner.TRAY_FACE)
    # The projector stands to the right at 52 mm and 154 mm up: the shadow falls to the left.
    # The camera, above the middle, does not see the 1.3 mm of it behind the upper edge.
    expected = 12 * (130 * 0.4 + 15) / (154 - 12) - 12 * 15 / (154 - 12)
    row = 240
    shadow_mm = hidden[row].sum() * pose.camera_pixel_mm if pose.camera_pixel_mm else 0
    assert shadow_mm == pytest.approx(expected, abs=0.3)
    left_edge = np.flatnonzero(mesh[row] == 0)[0]
    beside = hidden[row, left_edge - hidden[row].sum() - 3 : left_edge]
    assert beside.sum() > 0.9 * hidden[row].sum()


def test_same_seed_same_images_and_registration_moves_the_cloud() -> None:
    pose = scanner.rig(0.4)[0]
    first, again, other = (
        scanner.simulate(BOX, pose, np.random.default_rng(seed)) for seed in (1, 1, 2)
    )
    assert np.array_equal(first.images, again.images)
    assert not np.array_equal(first.images, other.images)
    heights = []
    for seed in range(12):
        stack = scanner.simulate([], pose, np.random.default_rng(seed), registration=(0.5, 0.0))
        heights.append(float(np.nanmedian(structured_light.decode(stack, pose).points[..., 2])))
    assert 0.25 < np.std(heights) < 0.9


def test_highlight_saturates_the_long_exposure_only() -> None:
    pose = scanner.rig(0.4, "overhead", distorted=False)[0]
    shiny = scanner.Surface(albedo=0.9, specular=0.8, shininess=4.0)
    stack = scanner.simulate(BOX, pose, np.random.default_rng(0), surfaces=shiny)
    _, mesh, _ = scanner.true_depth(BOX, pose)
    assert (stack.images[0, 0][mesh == 0] == 255).mean() > 0.5
    scan = structured_light.decode(stack, pose)
    assert np.isfinite(scan.points[..., 2])[mesh == 0].mean() > 0.9
    longest = replace(stack, images=stack.images[:1], exposures=(1.0,))
    lost = structured_light.decode(longest, pose)
    assert np.isfinite(lost.points[..., 2])[mesh == 0].mean() < 0.5
    assert base.SATURATED in lost.quality.flags


def test_two_axis_gray_code_is_simulated_too() -> None:
    spec = PatternSpec(
        kind="gray_pairs", axis="both", period_px=0.0, steps=0, column_bits=10, row_bits=10
    )
    pose = scanner.rig(0.4, "overhead", pattern=spec)[0]
    stack = scanner.simulate(BOX, pose, np.random.default_rng(0), registration=(0, 0))
    scan = structured_light.decode(stack, pose, structured_light.Limits(pair_white_minus_black=20))
    depth, mesh, _ = scanner.true_depth(BOX, pose)
    assert pose.tray_from_camera is not None
    error = (pose.tray_from_camera[2, 3] - depth - scan.points[..., 2])[mesh == 0]
    assert np.isfinite(error).mean() > 0.85
    assert abs(np.nanmedian(error)) < 0.05
    assert np.nanstd(error) < 0.2  # one projector pixel is 0.29 mm of depth here


def test_bad_requests_are_refused() -> None:
    pose, rng = scanner.rig(1.0)[0], np.random.default_rng(0)
    with pytest.raises(CaptureError, match="turntable4"):
        scanner.rig(1.0, "turntable5")
    with pytest.raises(CaptureError, match="scale"):
        scanner.rig(0.0)
    with pytest.raises(CaptureError, match="2 surfaces for 1 meshes"):
        scanner.simulate(BOX, pose, rng, surfaces=[scanner.Surface()] * 2)
    with pytest.raises(CaptureError, match="tray_from_camera"):
        scanner.simulate(BOX, replace(pose, tray_from_camera=None), rng)
    with pytest.raises(CaptureError, match="tray_from_camera"):
        scanner.true_depth(BOX, replace(pose, tray_from_camera=None))


def test_driver_scans_what_the_tray_holds_for_the_trigger() -> None:
    asked = []

    def tray(trigger: Trigger) -> list[Box]:
        asked.append(trigger.serial)
        return [BOX]

    rig = scanner.rig(0.4, "front_side")
    with closing(SimulatedScanner(tray, rig, seed=4)) as driver:
        assert isinstance(driver, Scanner)
        stacks = driver.capture(Trigger("S1"))
        assert asked == ["S1"]
        assert [stack.name for stack in stacks] == ["front", "right"]
        assert all(stack.calibration_digest in driver.calibrations for stack in stacks)
        twin = SimulatedScanner(tray, rig, seed=4).capture(Trigger("S1"))
        assert np.array_equal(stacks[1].images, twin[1].images)
    with pytest.raises(CaptureError, match="closed"):
        driver.capture(Trigger("S2"))
    with pytest.raises(CaptureError, match="no head pose"):
        SimulatedScanner(tray, [])
