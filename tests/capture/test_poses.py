"""Poses of a head on a turntable or a robot, against the geometry in closed form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forge_station.capture.calibration import Calibration, Float, Optics, PatternSpec
from forge_station.capture.poses import (
    hand_eye,
    robot,
    rotation_matrix,
    rotation_vector,
    turntable,
)
from forge_station.errors import CalibrationError


def pose(seed: int, turn: float = 0.8, reach: float = 300.0) -> Float:
    rng = np.random.default_rng(seed)
    found = np.eye(4)
    found[:3, :3] = rotation_matrix(turn * rng.normal(size=3))
    found[:3, 3] = reach * rng.normal(size=3)
    return found


def head(tray_from_camera: Float | None) -> Calibration:
    optics = Optics((32, 24), np.array([[50.0, 0, 15.5], [0, 50, 11.5], [0, 0, 1]]))
    spec = PatternSpec(column_bits=2, steps=3)
    return Calibration("h", optics, optics, np.eye(4), tray_from_camera, spec)


def test_a_turn_is_the_same_as_a_vector_and_as_a_matrix() -> None:
    for seed in range(5):
        vector = np.random.default_rng(seed).uniform(-1.7, 1.7, 3)
        np.testing.assert_allclose(rotation_vector(rotation_matrix(vector)), vector, atol=1e-9)
    assert np.array_equal(rotation_matrix(np.zeros(3)), np.eye(3))


def test_a_point_on_the_table_comes_back_to_its_place_in_every_pose() -> None:
    """The camera stands still: what it sees of a turned part must land where the part was."""
    first = pose(1)
    centre, axis = np.array([12.0, -7.0, 3.0]), np.array([0.1, -0.2, 2.0])
    part = np.array([30.0, 20.0, 5.0])
    angles = (0.0, 90.0, 137.5, -45.0)
    made = turntable(head(first), angles, axis=axis, point_mm=centre)
    assert [item.name for item in made] == ["h-0", "h-90", "h-137.5", "h--45"]
    for angle, item in zip(angles, made, strict=True):
        turn = rotation_matrix(np.radians(angle) * axis / np.linalg.norm(axis))
        now = centre + turn @ (part - centre)
        seen = np.linalg.inv(first) @ np.append(now, 1)
        assert item.tray_from_camera is not None
        np.testing.assert_allclose((item.tray_from_camera @ seen)[:3], part, atol=1e-9)
    assert len({item.digest for item in made}) == 4


def test_a_head_on_a_robot_sees_the_tray_in_one_place_from_every_pose() -> None:
    flange_from_camera, base_from_tray = pose(2), pose(3)
    flanges = {name: pose(k) for name, k in (("a", 4), ("b", 5), ("c", 6))}
    truth = {
        name: np.linalg.inv(base_from_tray) @ flange @ flange_from_camera
        for name, flange in flanges.items()
    }
    made = robot(
        head(truth["b"]), flanges, calibrated_at="b", flange_from_camera=flange_from_camera
    )
    for item, (name, expected) in zip(made, truth.items(), strict=True):
        assert item.name == f"h-{name}"
        assert item.tray_from_camera is not None
        np.testing.assert_allclose(item.tray_from_camera, expected, atol=1e-9)
    found = hand_eye(list(flanges.values()), list(truth.values()))
    np.testing.assert_allclose(found, flange_from_camera, atol=1e-6)


def test_hand_eye_stands_the_noise_of_a_calibration() -> None:
    flange_from_camera, base_from_tray = pose(2), pose(3)
    flanges = [pose(k) for k in range(10, 22)]
    seen = [
        np.linalg.inv(base_from_tray) @ flange @ flange_from_camera @ pose(k, 2e-4, 0.05)
        for k, flange in enumerate(flanges)
    ]
    found = hand_eye(flanges, seen)
    assert np.linalg.norm(found[:3, 3] - flange_from_camera[:3, 3]) < 0.3
    turn = rotation_vector(found[:3, :3].T @ flange_from_camera[:3, :3])
    assert np.degrees(np.linalg.norm(turn)) < 0.05


def test_poses_that_tell_nothing_are_refused() -> None:
    flat = [np.eye(4) for _ in range(4)]
    for number, item in enumerate(flat):
        item[:3, :3] = rotation_matrix(np.array([0, 0, 0.4 * number]))
    with pytest.raises(CalibrationError, match="about one axis"):
        hand_eye(flat, flat)
    with pytest.raises(CalibrationError, match="3 or more"):
        hand_eye(flat[:2], flat[:2])


@pytest.mark.parametrize(
    "bent", [np.eye(3), 2 * np.eye(4), np.full((4, 4), np.nan), np.diag([1.0, 1, -1, 1])]
)
def test_what_is_no_rigid_transform_is_named(bent: Float) -> None:
    with pytest.raises(CalibrationError, match=r"rigid transform \(b\)"):
        robot(
            head(pose(1)), {"a": pose(2), "b": bent}, calibrated_at="a", flange_from_camera=pose(3)
        )


def test_missing_trays_poses_and_axes_are_refused() -> None:
    with pytest.raises(CalibrationError, match="where the tray is"):
        turntable(head(None), [90.0])
    with pytest.raises(CalibrationError, match="axis of the turntable"):
        turntable(head(pose(1)), [90.0], axis=(0, 0, 0))
    with pytest.raises(CalibrationError, match="expected a, got z"):
        robot(replace(head(pose(1))), {"a": pose(2)}, calibrated_at="z", flange_from_camera=pose(3))
