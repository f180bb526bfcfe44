"""Known poses of one calibrated head: on a turntable, or carried by a robot.

From the calibration of one pose and what the machine says of the others to a calibration each, as
`fusion` and the station take them. Matrices are target_from_source, mm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from forge_station.capture.calibration import Calibration, Float
from forge_station.errors import CalibrationError

_LEAST_TURN = 0.05  # radians, of the second axis over all pairs


def turntable(
    head: Calibration,
    angles_deg: Sequence[float],
    *,
    axis: Sequence[float] = (0.0, 0.0, 1.0),
    point_mm: Sequence[float] = (0.0, 0.0, 0.0),
) -> list[Calibration]:
    """The fixed head as the parts on a turning table see it, one calibration an angle.

    angles: of the table against the pose that `head` was calibrated in, right-handed about `axis`
    through `point_mm`, both in the tray frame. Raises CalibrationError without a tray, or for an
    axis of no length.
    """
    tray_from_camera = _tray(head)
    direction = np.asarray(axis, np.float64)
    length = float(np.linalg.norm(direction)) if direction.shape == (3,) else 0.0
    if not (np.isfinite(direction).all() and length > 1e-9):
        raise CalibrationError("axis of the turntable", expected="a direction x, y, z", got=axis)
    point = np.asarray(point_mm, np.float64)
    made = []
    for angle in angles_deg:
        # The part frame turns with the table, so that the head turns the other way in it.
        turn = rotation_matrix(-math.radians(angle) * direction / length)
        about = np.eye(4)
        about[:3, :3] = turn
        about[:3, 3] = point - turn @ point
        made.append(_posed(head, f"{head.name}-{angle:g}", about @ tray_from_camera))
    return made


def robot(
    head: Calibration,
    base_from_flange: Mapping[str, Float],
    *,
    calibrated_at: str,
    flange_from_camera: Float,
) -> list[Calibration]:
    """A head on a robot's flange, one calibration a robot pose.

    base_from_flange: [4, 4] by name, as the controller reports them; `calibrated_at` names the one
    in which `head` saw the tray. flange_from_camera: see `hand_eye`. Raises CalibrationError for a
    pose that is missing or no rigid transform.
    """
    if calibrated_at not in base_from_flange:
        raise CalibrationError(
            "the robot pose of the calibration is not among the poses",
            which=head.name,
            expected=", ".join(base_from_flange) or "at least one pose",
            got=calibrated_at,
        )
    for name, pose in (*base_from_flange.items(), ("flange_from_camera", flange_from_camera)):
        _refuse_bent(name, pose)
    camera_from_base = np.linalg.inv(base_from_flange[calibrated_at] @ flange_from_camera)
    tray_from_base = _tray(head) @ camera_from_base
    return [
        _posed(head, f"{head.name}-{name}", tray_from_base @ pose @ flange_from_camera)
        for name, pose in base_from_flange.items()
    ]


def hand_eye(base_from_flange: Sequence[Float], tray_from_camera: Sequence[Float]) -> Float:
    """flange_from_camera [4, 4] from at least three poses in which the camera saw the same tray.

    Their turns must be about different axes. Least squares over all pairs of poses, turn first
    (Park and Martin, 1994; OpenCV 5 has no such function any more). Raises CalibrationError where
    the poses do not tell it.
    """
    if len(base_from_flange) != len(tray_from_camera) or len(base_from_flange) < 3:
        raise CalibrationError(
            "too few poses for the place of the camera on the robot",
            expected="3 or more, each with its robot pose",
            got=f"{len(tray_from_camera)} and {len(base_from_flange)}",
        )
    for number, pose in enumerate([*base_from_flange, *tray_from_camera]):
        _refuse_bent(f"matrix {number}", pose)
    moves = [
        (np.linalg.inv(base_from_flange[j]) @ base_from_flange[i],
         np.linalg.inv(tray_from_camera[j]) @ tray_from_camera[i])
        for i, j in combinations(range(len(base_from_flange)), 2)
    ]  # fmt: skip
    flange = np.array([rotation_vector(a[:3, :3]) for a, _ in moves])
    camera = np.array([rotation_vector(b[:3, :3]) for _, b in moves])
    left, sizes, right = np.linalg.svd(flange.T @ camera)
    if sizes[1] < _LEAST_TURN**2:
        raise CalibrationError(
            "the poses do not tell where the camera is on the robot",
            which="their turns are too small, or all about one axis",
            action="take poses that are turned about different axes, by 20 degrees and more",
        )
    found = np.eye(4)
    found[:3, :3] = left @ np.diag([1, 1, np.linalg.det(left @ right)]) @ right
    terms = np.concatenate([a[:3, :3] - np.eye(3) for a, _ in moves])
    known = np.concatenate([found[:3, :3] @ b[:3, 3] - a[:3, 3] for a, b in moves])
    found[:3, 3] = np.linalg.lstsq(terms, known, rcond=None)[0]
    return found


def rotation_vector(rotation: Float) -> Float:
    """Rotation matrix -> axis times angle, radians; angles below 180 degrees."""
    skew = 0.5 * (rotation - rotation.T)
    sine = np.array([skew[2, 1], skew[0, 2], skew[1, 0]])
    length = float(np.linalg.norm(sine))
    angle = float(np.arctan2(length, (np.trace(rotation) - 1) / 2))
    return np.asarray(sine if length < 1e-12 else sine * (angle / length))


def rotation_matrix(vector: Float) -> Float:
    """Axis times angle, radians -> rotation matrix (Rodrigues)."""
    angle = float(np.linalg.norm(vector))
    if angle < 1e-12:
        return np.eye(3)
    x, y, z = vector / angle
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    found = np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * (cross @ cross)
    return np.asarray(found, np.float64)


def _refuse_bent(name: str, pose: Float) -> None:
    matrix = np.asarray(pose, np.float64)
    rotation = matrix[:3, :3]
    if not (
        matrix.shape == (4, 4)
        and np.isfinite(matrix).all()
        and np.abs(rotation @ rotation.T - np.eye(3)).max() < 1e-4
        and np.linalg.det(rotation) > 0
        and np.array_equal(matrix[3], (0, 0, 0, 1))
    ):
        raise CalibrationError(
            "not a rigid transform",
            which=name,
            expected="4x4: rotation, shift in mm, last row 0 0 0 1",
        )


def _tray(head: Calibration) -> Float:
    if head.tray_from_camera is None:
        raise CalibrationError(
            "the calibration does not tell where the tray is",
            which=head.name,
            expected="tray_from_camera",
            action="calibrate the tray in one pose first",
        )
    return head.tray_from_camera


def _posed(head: Calibration, name: str, tray_from_camera: Float) -> Calibration:
    notes = {**head.notes, "posed_from": head.digest[:16]}
    return replace(head, name=name, tray_from_camera=tray_from_camera, notes=notes)
