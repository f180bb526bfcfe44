"""Poses refined on simulated scans: found again, reported, and refused where they must not be."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

pytest.importorskip("numba", reason="scans are simulated with the extra demo")
pytest.importorskip("small_gicp", reason="poses are refined with the extra pointcloud")

from forge_station.capture import base, fusion, structured_light
from forge_station.capture.base import Scan
from forge_station.capture.calibration import Float
from forge_station.capture.fusion import Fusion
from forge_station.capture.poses import rotation_matrix
from forge_station.contract.catalogue import by_id
from forge_station.errors import ConfigError
from forge_station.sim import fasteners, rest_pose, scanner

PARTS = ("hex_nut M8", "flat_washer M8", "hex_bolt M8x30")
REFINE = Fusion(refine=True)


@lru_cache(maxsize=2)
def scans(*names: str) -> tuple[Scan, ...]:
    """What four heads see whose poses are known exactly."""
    meshes = []
    for number, name in enumerate(names):
        mesh = fasteners.build(by_id(name), np.random.default_rng(number))
        mesh = rest_pose.settle(mesh.transformed(rest_pose.rest_poses(mesh)[0].rotation))
        shift = np.array([-35.0 + 35 * number, 5.0 * number, 0.0])
        meshes.append(mesh.transformed(np.eye(3), shift))
    rng = np.random.default_rng(0)
    return tuple(
        structured_light.decode(
            scanner.simulate(meshes, pose, rng, exposures=(1.0,), registration=(0.0, 0.0)), pose
        )
        for pose in scanner.rig(1.0)
    )


def error(shift_mm: float, turn_deg: float, seed: int) -> Float:
    """A rigid motion of that size, in a direction that the seed picks."""
    rng = np.random.default_rng(seed)
    way, axis = rng.normal(size=(2, 3))
    found = np.eye(4)
    found[:3, :3] = rotation_matrix(np.radians(turn_deg) * axis / np.linalg.norm(axis))
    found[:3, 3] = shift_mm * way / np.linalg.norm(way)
    return found


def moved(scan: Scan, by: Float) -> Scan:
    points = scan.points @ by[:3, :3].T + by[:3, 3]
    return replace(scan, points=points.astype(np.float32))


def left_over(fit: fusion.Fit, wrong: Float) -> float:
    """How far a point on a part is from where it belongs, worst of three parts, mm."""
    rest = fit.corrected_from_known @ wrong
    at = np.array([[-35.0, 0, 3], [0, 5, 3], [35, 10, 3]])
    return float(np.linalg.norm(at @ rest[:3, :3].T + rest[:3, 3] - at, axis=1).max())


def test_poses_off_by_a_third_of_a_millimetre_are_found_again() -> None:
    exact = scans(*PARTS)
    wrong = [np.eye(4)] + [error(0.3, 0.2, k) for k in (1, 2, 3)]
    seen = [moved(scan, by) for scan, by in zip(exact, wrong, strict=True)]
    together = [seen[0]]
    for scan, by in zip(seen[1:], wrong[1:], strict=True):
        fit = fusion.refined(scan, together)
        assert fit is not None
        assert left_over(fit, by) < 0.08
        together.append(moved(scan, fit.corrected_from_known))
    cloud = fusion.fuse(seen, REFINE)
    quality = cloud.quality
    assert quality.flags == ()
    assert quality.misfits == ()
    assert quality.residual_mm is not None and quality.residual_mm < 0.12
    assert quality.shift_mm is not None and 0.2 < quality.shift_mm < 0.6
    assert quality.turn_deg is not None and 0.1 < quality.turn_deg < 0.4
    truth, known = base.fuse(exact), base.fuse(seen)
    off = np.linalg.norm(cloud.points - truth.points, axis=1)
    assert np.percentile(off, 99) < 0.1
    assert np.percentile(np.linalg.norm(known.points - truth.points, axis=1), 50) > 0.2


def test_known_poses_are_used_as_they_are_unless_asked() -> None:
    exact = scans(*PARTS)
    for how in (None, Fusion()):
        cloud = fusion.fuse(exact, how)
        assert np.array_equal(cloud.points, base.fuse(exact).points)
        assert cloud.quality.residual_mm is None


def test_right_poses_are_left_where_they_are() -> None:
    cloud = fusion.fuse(scans(*PARTS), REFINE)
    assert cloud.quality.misfits == ()
    assert cloud.quality.shift_mm is not None and cloud.quality.shift_mm < 0.05
    assert cloud.quality.turn_deg is not None and cloud.quality.turn_deg < 0.06


@pytest.mark.parametrize(
    ("how", "by", "text"),
    [
        (Fusion(refine=True, max_shift_mm=0.1), error(0.4, 0.0, 1), "corrected by 0.4"),
        (Fusion(refine=True, max_turn_deg=0.1), error(0.0, 0.4, 1), "0.40 degrees (limits"),
        (Fusion(refine=True, max_residual_px=0.05), error(0.1, 0.0, 1), "limit 0.013 mm"),
        (REFINE, error(40.0, 0.0, 5), "pose 2 of 4"),
        (REFINE, error(0.0, 25.0, 2), "pose 2 of 4"),
    ],
)
def test_a_bad_fit_is_flagged_with_its_reason_and_never_used(
    how: Fusion, by: Float, text: str
) -> None:
    first, second, *others = scans(*PARTS)
    seen = [first, moved(second, by), *others]
    cloud = fusion.fuse(seen, how)
    assert base.POSE_MISFIT in cloud.quality.flags
    assert any(text in misfit for misfit in cloud.quality.misfits), cloud.quality.misfits
    assert np.array_equal(cloud.points, base.fuse(seen).points)


def test_an_empty_tray_has_nothing_to_hold_on_to() -> None:
    empty = [
        replace(scan, points=np.where(scan.points[..., 2:] < 0.3, scan.points, np.float32(np.nan)))
        for scan in scans(*PARTS)
    ]
    cloud = fusion.fuse(empty, REFINE)
    assert "too few points of parts" in cloud.quality.misfits[0]


def test_the_turn_of_a_washer_about_its_axis_is_not_made_up() -> None:
    first, second, *_ = scans("flat_washer M8")
    middle = np.eye(4)
    middle[:3, 3] = (-35.0, 0.0, 0.0)
    turn = np.eye(4)
    turn[:3, :3] = rotation_matrix(np.array([0.0, 0.0, np.radians(0.3)]))
    by = middle @ turn @ np.linalg.inv(middle)
    fit = fusion.refined(moved(second, by), [first])
    assert fit is not None
    assert fit.turn_deg < 0.05
    assert fit.shift_mm < 0.05


def test_without_the_extra_the_station_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "small_gicp", None)
    with pytest.raises(ConfigError, match=r"forge-station\[pointcloud\]"):
        fusion.fuse(scans(*PARTS), REFINE)
