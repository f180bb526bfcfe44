"""Boards: printed files, detection, text form; calibrations in OpenCV's form."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

from forge_station.capture import calibration_io
from forge_station.capture.board import Board
from forge_station.capture.calibration import Calibration, Optics, PatternSpec
from forge_station.errors import CalibrationError, InputError

CHARUCO = Board()
CHESS = Board("chessboard", (8, 6), 20.0)


@pytest.mark.parametrize("board", [CHARUCO, CHESS, replace(CHARUCO, legacy=True)])
def test_the_text_of_a_board_is_read_back(board: Board) -> None:
    assert Board.parse(str(board)) == board


@pytest.mark.parametrize(
    "text", ["", "charuco", "charuco 11x8 12", "chessboard 8x6 20 legacy", "circles 3x3 5", "a b c"]
)
def test_a_board_that_is_not_understood_says_how_to_write_it(text: str) -> None:
    with pytest.raises(CalibrationError, match="COLSxROWS"):
        Board.parse(text)


def test_a_board_that_cannot_be_names_every_problem() -> None:
    with pytest.raises(CalibrationError) as caught:
        Board("charuco", (2, 8), 12.0, 13.0, "DICT_NONE")
    for word in ("squares", "marker", "DICT_NONE"):
        assert word in str(caught.value)
    with pytest.raises(CalibrationError, match="too few"):
        Board("charuco", (40, 30), 12.0, 9.0, "DICT_4X4_50")


@pytest.mark.parametrize("board", [CHARUCO, CHESS, replace(CHARUCO, squares=(10, 7))])
def test_corners_are_found_where_they_are_printed(board: Board) -> None:
    image, scale = board.picture(4)
    framed = np.pad(image, 40, constant_values=255)
    found = board.find(framed)
    assert len(found.ids) == len(board.corners_mm)
    printed = board.corners_mm[found.ids, :2] * scale + 40 - 0.5
    if board.kind == "chessboard":  # may be found turned by 180 degrees
        turned = printed[::-1]
        printed = min(printed, turned, key=lambda p: np.abs(p - found.pixels).max())
    np.testing.assert_allclose(found.pixels, printed, atol=0.12)


def test_an_empty_image_has_no_corners() -> None:
    for board in (CHARUCO, CHESS):
        assert len(board.find(np.zeros((100, 120), np.uint8)).ids) == 0


def test_the_legacy_layout_is_another_board() -> None:
    """Even rows: the old layout starts with the other colour. Read as new, nothing is found."""
    old = replace(CHARUCO, legacy=True)
    image, _ = old.picture(4)
    framed = np.pad(image, 40, constant_values=255)
    assert len(old.find(framed).ids) == 70
    assert len(CHARUCO.find(framed).ids) == 0


def test_the_png_to_print_knows_its_resolution(tmp_path: Path) -> None:
    path = tmp_path / "board.png"
    assert CHARUCO.write(path) == "page of 297 x 210 mm"
    data = path.read_bytes()
    at = data.index(b"pHYs")
    per_metre_x, per_metre_y, unit = struct.unpack(">IIB", data[at + 4 : at + 13])
    (check,) = struct.unpack(">I", data[at + 13 : at + 17])
    assert check == zlib.crc32(data[at : at + 13])
    page = cv2.imread(str(path), cv2.IMREAD_GRAYSCALE)
    assert (per_metre_x, unit) == (per_metre_y, 1)
    assert page.shape[1] / per_metre_x * 1000 == pytest.approx(297, abs=0.1)
    small = cv2.resize(page, None, fx=0.25, fy=0.25, interpolation=cv2.INTER_AREA)
    found = CHARUCO.find(small)
    per_metre_x //= 4
    side = (found.pixels[1] - found.pixels[0])[0] / per_metre_x * 1000
    assert side == pytest.approx(12.0, abs=0.05)


def test_the_pdf_to_print_is_a_page_of_exact_size(tmp_path: Path) -> None:
    path = tmp_path / "board.pdf"
    wide = Board("charuco", (9, 6), 30.0, 22.0, "DICT_5X5_100")
    assert wide.write(path) == "page of 420 x 297 mm"
    data = path.read_bytes()
    assert data.startswith(b"%PDF-1.4") and data.endswith(b"%%EOF\n")
    box = data.split(b"/MediaBox [0 0 ", 1)[1].split(b"]")[0].split()
    assert [float(v) * 25.4 / 72 for v in box] == pytest.approx([420, 297], abs=0.01)
    start = int(data.rsplit(b"startxref\n", 1)[1].split()[0])
    assert data[start : start + 4] == b"xref"
    offset = int(data[start:].splitlines()[3].split()[0])
    assert data[offset:].startswith(b"1 0 obj")
    head, body = data.split(b"/Subtype /Image", 1)[1].split(b"stream\n", 1)
    size = [int(head.split(b"/" + key + b" ")[1].split()[0]) for key in (b"Width", b"Height")]
    pixels = zlib.decompress(body.split(b"\nendstream")[0])
    page = np.frombuffer(pixels, np.uint8).reshape(size[1], size[0])
    small = cv2.resize(page, None, fx=0.2, fy=0.2, interpolation=cv2.INTER_AREA)
    assert len(wide.find(small).ids) == 8 * 5


def test_a_board_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="pdf or"):
        CHARUCO.write(tmp_path / "board.svg")


def head(pixel_centre: float = 0.5) -> Calibration:
    camera = np.array([[700.0, 0, 319.5], [0, 701.0, 239.5], [0, 0, 1]])
    projector = np.array([[900.0, 0, 500.0], [0, 902.0, 380.0], [0, 0, 1]])
    pose = np.eye(4)
    pose[:3, :3] = cv2.Rodrigues(np.array([0.01, -0.3, 0.02]))[0]
    pose[:3, 3] = -120.0, 3.0, 20.0
    spec = PatternSpec("gray_pairs", "both", 0.0, 0, 10, 10, 2)
    return Calibration(
        "head",
        Optics((640, 480), camera, np.array([-0.1, 0.02, 1e-4, -2e-4, 0.01])),
        Optics((1024, 768), projector, np.array([-0.05, 0.01, 0.0, 1e-4, 0.0])),
        pose,
        None,
        spec,
        pixel_centre=pixel_centre,
        rms_px=0.21,
    )


@pytest.mark.parametrize("suffix", [".xml", ".yml", ".json"])
def test_a_calibration_goes_to_opencv_and_back(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"head{suffix}"
    made = head()
    calibration_io.export_opencv(made, path)
    back = calibration_io.import_opencv(path, code_step=2, pattern_size=(512, 384))
    assert back.pixel_centre == 0.0 and back.rms_px == pytest.approx(0.21)
    assert back.camera.image_size == (640, 480) and back.projector.image_size == (1024, 768)
    shift = np.zeros((3, 3))
    shift[:2, 2] = 0.5
    np.testing.assert_allclose(back.camera.matrix, made.camera.matrix - shift)
    np.testing.assert_allclose(back.projector.matrix, made.projector.matrix - shift)
    np.testing.assert_allclose(back.camera.distortion, made.camera.distortion)
    np.testing.assert_allclose(back.projector_from_camera, made.projector_from_camera)
    storage = cv2.FileStorage(str(path), cv2.FILE_STORAGE_READ)
    assert storage.getNode("transform_direction").string() == "projector_from_camera"
    assert int(storage.getNode("code_step").real()) == 2
    storage.release()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"\.xml"):
        calibration_io.export_opencv(head(), tmp_path / "head.txt")
