"""`forge-station poses`: files that a station can name, and wrong robot files named."""

from __future__ import annotations

import json

import numpy as np
import pytest
import yaml

from forge_station import cli
from forge_station.capture import calibration_io
from forge_station.capture.calibration import Calibration, Optics, PatternSpec
from forge_station.capture.poses import turntable


@pytest.fixture
def head(tmp_path):
    optics = Optics((32, 24), np.array([[50.0, 0, 15.5], [0, 50, 11.5], [0, 0, 1]]))
    pose = np.diag([1.0, -1.0, -1.0, 1.0])
    pose[2, 3] = 300.0
    spec = PatternSpec(column_bits=2, steps=3)
    made = Calibration("h", optics, optics, np.eye(4), pose, spec)
    calibration_io.save(made, tmp_path / "h.yaml")
    return made


def poses(*words) -> int:
    return cli.main(["poses", *map(str, words)])


def test_a_turntable_gives_a_file_a_pose(head, tmp_path, capsys):
    out = tmp_path / "poses"
    words = ["--calibration", tmp_path / "h.yaml", "--turntable", 0, 90, "--out", out]
    assert poses(*words) == 0
    told = json.loads(capsys.readouterr().out)
    for expected in turntable(head, [0.0, 90.0]):
        read = calibration_io.load(out / f"{expected.name}.yaml")
        assert read.digest == expected.digest == told[f"{expected.name}.yaml"]
    assert poses(*words) == cli.USAGE_ERROR
    assert "exists already" in capsys.readouterr().err


def test_a_robot_file_gives_its_poses(head, tmp_path, capsys):
    home, left = np.eye(4), np.eye(4)
    left[0, 3] = 50.0
    camera = np.diag([1.0, -1.0, -1.0, 1.0])
    content = {
        "calibrated_at": "home",
        "base_from_flange": {"home": home.tolist(), "left": left.tolist()},
        "flange_from_camera": camera.tolist(),
    }
    (tmp_path / "robot.yaml").write_text(yaml.safe_dump(content))
    words = ["--calibration", tmp_path / "h.yaml", "--robot", tmp_path / "robot.yaml"]
    assert poses(*words, "--out", tmp_path / "out") == 0
    assert calibration_io.load(tmp_path / "out/h-home.yaml").digest == head.digest
    moved = calibration_io.load(tmp_path / "out/h-left.yaml").tray_from_camera
    np.testing.assert_allclose(moved - head.tray_from_camera, left - home, atol=1e-9)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("[]", "expected calibrated_at"),
        ("calibrated_at: a", "expected calibrated_at, flange_from_camera"),
        ("{calibrated_at: a, flange_from_camera: [], base_from_flange: {}}", "name: matrix"),
        ("{calibrated_at: a, flange_from_camera: [], base_from_flange: {a: x}}", "robot.yaml: a"),
    ],
)
def test_a_wrong_robot_file_is_one_clear_error(head, content, text, tmp_path, capsys):
    (tmp_path / "robot.yaml").write_text(content)
    words = ["--calibration", tmp_path / "h.yaml", "--robot", tmp_path / "robot.yaml"]
    assert poses(*words, "--out", tmp_path / "out") == cli.USAGE_ERROR
    assert text in capsys.readouterr().err
