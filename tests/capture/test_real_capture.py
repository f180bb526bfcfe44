"""One real Gray-code capture of a chessboard (procam-calibration, MIT), where it is available."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forge_station.capture import calibrate, calibration_io, foreign, replay, structured_light
from forge_station.capture.base import Scan
from forge_station.capture.board import Board
from forge_station.capture.health import plane_residual
from forge_station.errors import CalibrationError, CaptureError

DATA = Path(__file__).parents[2].parent / "shared" / "data" / "procam_capture"
pytestmark = [
    pytest.mark.realdata,
    pytest.mark.skipif(not DATA.is_dir(), reason="recorded capture not beside the checkout"),
]


def decoded(code_step: int) -> Scan:
    calibration = calibration_io.import_opencv(
        DATA / "calibration_result.xml", code_step=code_step, pattern_size=(1024, 768)
    )
    images = sorted((DATA / "capture_0").glob("*.png"))
    return structured_light.decode(replay.read_images(images, calibration), calibration)


def test_real_capture_gives_a_dense_flat_board() -> None:
    scan = decoded(code_step=2)
    assert np.isfinite(scan.points[..., 2]).sum() > 400_000
    assert scan.quality.reprojection_px is not None
    assert scan.quality.reprojection_px < 1.5
    assert scan.quality.flags == ()
    assert scan.frame == "camera"
    plane = plane_residual(scan, tolerance_mm=5.0)
    assert plane.points > 250_000
    assert 3000 < plane.distance_mm < 4200
    assert plane.std_mm < 5.5  # one code step is 10.9 mm of depth there: 3.1 mm rms at best
    assert "residual std" in str(plane)


def test_real_capture_with_the_wrong_code_step_says_so() -> None:
    with pytest.raises(CalibrationError, match=r"code_step 1.*code_step 2 gives 1\.\d px"):
        decoded(code_step=1)


def test_the_order_of_the_real_capture_is_read_from_its_images() -> None:
    calibration = calibration_io.import_opencv(
        DATA / "calibration_result.xml", code_step=2, pattern_size=(1024, 768)
    )
    found = foreign.read_folder(DATA / "capture_0", calibration)
    images = sorted((DATA / "capture_0").glob("*.png"))
    assert np.array_equal(found.stack.images, replay.read_images(images, calibration).images)
    assert found.calibration is calibration
    scan = structured_light.decode(found.stack, calibration)
    assert scan.quality.decoded_share is not None
    assert scan.quality.decoded_share > 0.45
    assert scan.quality.motion_px is not None
    assert scan.quality.motion_px < 0.5
    late = np.roll(found.stack.images, 3, axis=1)
    with pytest.raises(CaptureError, match="3 images late"):
        structured_light.decode(replace(found.stack, images=late), calibration)


def test_real_capture_checks_its_own_calibration_on_the_board_in_it() -> None:
    """A chessboard of 10 x 8 squares of 75 mm stands there, 3.7 m away."""
    calibration = calibration_io.import_opencv(
        DATA / "calibration_result.xml", code_step=2, pattern_size=(1024, 768)
    )
    images = sorted((DATA / "capture_0").glob("*.png"))
    board = Board("chessboard", (10, 8), 75.0)
    view = calibrate.look(replay.read_images(images, calibration), board)
    assert len(view.ids) == 63 and view.lost == 0 and view.both_axes
    fit = calibrate.measure(view, board, calibration)
    assert fit.camera_px < 0.4
    assert fit.projector_px < 2 * 2.0  # two codes
    assert abs(fit.scale_error) < 0.01
    assert fit.plane_mm < 4.0 and 3300 < fit.distance_mm < 4000
