"""One real Gray-code capture of a chessboard (procam-calibration, MIT), where it is available."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forge_station.capture import calibration_io, replay, structured_light
from forge_station.capture.base import Scan
from forge_station.capture.health import plane_residual
from forge_station.errors import CalibrationError

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
