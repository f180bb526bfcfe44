"""Calibration files: round trip, every malformed field named, OpenCV import with its traps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import yaml

from forge_station.capture import calibration_io
from forge_station.capture.calibration import Calibration, Optics, PatternSpec, to_dict
from forge_station.errors import CalibrationError


def head(**changes: Any) -> Calibration:
    turn = cv2.Rodrigues(np.array([0.1, -0.3, 0.05]))[0]
    projector_from_camera = np.eye(4)
    projector_from_camera[:3, :3] = turn
    projector_from_camera[:3, 3] = (-120.0, 3.0, 12.0)
    tray_from_camera = np.eye(4)
    tray_from_camera[:3, :3] = np.diag([1.0, -1.0, -1.0])
    tray_from_camera[2, 3] = 385.0
    values = {
        "name": "overhead",
        "camera": Optics(
            (160, 120),
            np.array([[400.0, 0, 79.5], [0, 402, 59.5], [0, 0, 1]]),
            np.array([-0.2, 0.1, 1e-3, -2e-3, 0.02]),
        ),
        "projector": Optics(
            (256, 160),
            np.array([[500.0, 0, 127.5], [0, 500, 79.5], [0, 0, 1]]),
            np.array([-0.1, 0.05, -1e-3, 1e-3, 0.0]),
        ),
        "projector_from_camera": projector_from_camera,
        "tray_from_camera": tray_from_camera,
        "pattern": PatternSpec(column_bits=5),
    }
    return Calibration(**{**values, **changes})


def test_saved_calibration_loads_with_the_same_digest(tmp_path: Path) -> None:
    for calibration in (head(), head(tray_from_camera=None, pixel_centre=0.5)):
        calibration_io.save(calibration, tmp_path / "head.yaml")
        loaded = calibration_io.load(tmp_path / "head.yaml")
        assert loaded.digest == calibration.digest
        assert to_dict(loaded) == to_dict(calibration)


def test_digest_follows_the_geometry_and_not_the_name() -> None:
    base = head()
    assert head(name="other", rms_px=0.5, notes={"date": "today"}).digest == base.digest
    assert head(pattern=replace(base.pattern, code_step=2)).digest != base.digest
    assert head(pixel_centre=0.5).digest != base.digest
    moved = base.projector_from_camera.copy()
    moved[0, 3] += 1e-9
    assert head(projector_from_camera=moved).digest != base.digest


NAN, INF = float("nan"), float("inf")
MALFORMED = [
    (lambda d: d.update(gain=3), "gain: unknown key"),
    (lambda d: d["camera"].update(fx=3), "camera.fx: unknown key"),
    (lambda d: d["pattern"].update(gamma=2.2), "pattern.gamma: unknown key"),
    (lambda d: d["pattern"].pop("code_step"), "pattern.code_step: missing"),
    (lambda d: d.pop("projector_from_camera"), "projector_from_camera: missing"),
    (lambda d: d.pop("tray_from_camera"), "tray_from_camera: missing"),
    (lambda d: d.update(schema=2), "schema: expected 1, got 2"),
    (lambda d: d.update(units="m"), "units: expected mm, got 'm'"),
    (lambda d: d.update(rms_px=NAN), "rms_px: expected float, got nan"),
    (lambda d: d.update(rms_px=True), "rms_px: expected float, got True"),
    (lambda d: d.update(pixel_centre=0.25), "pixel_centre: expected 0 or 0.5"),
    (lambda d: d["camera"].update(image_size=[640]), "camera.image_size"),
    (lambda d: d["camera"].update(image_size=[640.0, 480]), "camera.image_size"),
    (lambda d: d["projector"].update(matrix=[[1, 0], [0, 1]]), "projector.matrix: expected 3x3"),
    (lambda d: d["projector"]["matrix"][0].__setitem__(0, -5.0), "projector.matrix: expected [[fx"),
    (
        lambda d: d["camera"].update(distortion_k1_k2_p1_p2_k3=[0, 0, 0, 0]),
        "camera.distortion_k1_k2_p1_p2_k3: expected 5",
    ),
    (lambda d: d["projector_from_camera"][0].__setitem__(3, INF), "projector_from_camera"),
    (lambda d: d["projector_from_camera"][0].__setitem__(0, 2.0), "is not a rotation"),
    (lambda d: d["tray_from_camera"][3].__setitem__(0, 1.0), "the last row must be 0 0 0 1"),
    (lambda d: d["pattern"].update(kind="stripes"), "pattern.kind: 'stripes'"),
    (lambda d: d["pattern"].update(steps=2), "pattern.steps: 2"),
    (lambda d: d["pattern"].update(code_step=0), "pattern.code_step: 0"),
    (lambda d: d["pattern"].update(axis="both"), "gray_phase codes columns only"),
]


@pytest.mark.parametrize(("damage", "text"), MALFORMED)
def test_malformed_field_is_named_with_the_file(damage: Any, text: str, tmp_path: Path) -> None:
    content = to_dict(head())
    damage(content)
    path = tmp_path / "head.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(CalibrationError) as error:
        calibration_io.load(path)
    assert text in str(error.value)
    assert "head.yaml" in str(error.value)


def test_all_problems_come_in_one_message() -> None:
    content = to_dict(head())
    content["units"] = "m"
    content["camera"].pop("matrix")
    content["extra"] = 1
    with pytest.raises(CalibrationError) as error:
        calibration_io.from_dict(content, "x.yaml")
    assert all(text in str(error.value) for text in ("units", "camera.matrix", "extra"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "just words",
        "- 1\n- 2",
        "a: [",
        "%YAML:1.0\n--- !!x\na: 1",
        "[" * 20_000,
        "a: 2026-02-31",
    ],
)  # fmt: skip
def test_file_that_is_no_calibration_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "head.yaml").write_text(text)
    with pytest.raises(CalibrationError, match=r"head\.yaml"):
        calibration_io.load(tmp_path / "head.yaml")


def test_missing_file_and_edited_digest_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="no such file"):
        calibration_io.load(tmp_path / "none.yaml")
    path = tmp_path / "head.yaml"
    calibration_io.save(head(), path)
    path.write_text(path.read_text().replace("385.0", "386.0"))
    with pytest.raises(CalibrationError, match="does not fit the content"):
        calibration_io.load(path)


def test_distortion_is_that_of_opencv_and_is_inverted() -> None:
    optics = head().camera
    rng = np.random.default_rng(3)
    points = np.concatenate(
        [rng.uniform(-60, 60, (200, 2)), rng.uniform(350, 420, (200, 1))], axis=1
    )
    expected = cv2.projectPoints(points, np.zeros(3), np.zeros(3), optics.matrix, optics.distortion)
    uv = optics.project(points)
    np.testing.assert_allclose(uv, expected[0][:, 0], atol=1e-9)
    x, y = optics.undistort((uv[:, 0] - 79.5) / 400, (uv[:, 1] - 59.5) / 402)
    np.testing.assert_allclose(x, points[:, 0] / points[:, 2], atol=1e-7)
    np.testing.assert_allclose(y, points[:, 1] / points[:, 2], atol=1e-7)


def file_storage(path: Path, rotation: str = "roration", drop: str = "", size: int = 5) -> None:
    storage = cv2.FileStorage(str(path), cv2.FILE_STORAGE_WRITE)
    nodes = {
        "img_shape": np.array([[120.0], [160.0]]),
        "cam_int": head().camera.matrix,
        "cam_dist": np.zeros((1, size)),
        "proj_int": head().projector.matrix,
        "proj_dist": np.zeros((1, 5)),
        rotation: np.eye(3),
        "translation": np.array([[10.0], [20.0], [30.0]]),
    }
    storage.write("rms", 0.5)
    for name, value in nodes.items():
        if name != drop:
            storage.write(name, value)
    storage.release()


@pytest.mark.parametrize("rotation", ["rotation", "roration"])
def test_opencv_calibration_is_imported_with_the_given_code_step(
    rotation: str, tmp_path: Path
) -> None:
    path = tmp_path / "result.xml"
    file_storage(path, rotation)
    calibration = calibration_io.import_opencv(path, code_step=2, pattern_size=(1024, 768))
    assert calibration.camera.image_size == (160, 120)
    assert calibration.projector.image_size == (2048, 1536)
    assert (calibration.pattern.column_bits, calibration.pattern.row_bits) == (10, 10)
    assert calibration.pattern.code_step == 2
    assert calibration.pattern.image_count == 42
    assert calibration.projector_from_camera[:3, 3].tolist() == [10, 20, 30]
    assert calibration.rms_px == 0.5


@pytest.mark.parametrize(
    ("drop", "size", "text"),
    [("proj_int", 5, "proj_int"), ("translation", 5, "translation"), ("", 4, "cam_dist")],
)
def test_opencv_calibration_without_a_node_is_refused(
    drop: str, size: int, text: str, tmp_path: Path
) -> None:
    path = tmp_path / "result.xml"
    file_storage(path, drop=drop, size=size)
    with pytest.raises(CalibrationError, match=text):
        calibration_io.import_opencv(path, code_step=1, pattern_size=(64, 64))


@pytest.mark.parametrize("content", [b"", b"<?xml version", b"hello", b"\x00\xff" * 40])
def test_file_that_is_no_opencv_storage_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "result.xml"
    path.write_bytes(content)
    with pytest.raises(CalibrationError, match=r"result\.xml"):
        calibration_io.import_opencv(path, code_step=1, pattern_size=(64, 64))
    with pytest.raises(CalibrationError, match="no such file"):
        calibration_io.import_opencv(tmp_path / "no.xml", code_step=1, pattern_size=(64, 64))
