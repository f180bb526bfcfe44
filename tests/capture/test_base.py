"""Fusing scans: order, quality of all poses, frames that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from forge_station.capture.base import Frame, Scan, ScanQuality, assemble, fuse
from forge_station.capture.calibration import Calibration, Optics, PatternSpec
from forge_station.errors import CaptureError


def scan(value: float, frame: str = "tray", valid: int = 2, **quality: object) -> Scan:
    points = np.full((2, 2, 3), np.nan, np.float32)
    points.reshape(-1, 3)[:valid] = value
    return Scan(
        points,
        np.arange(4, dtype=np.uint8).reshape(2, 2),
        np.ones((2, 2), np.float32),
        ScanQuality(valid / 4, **quality),  # type: ignore[arg-type]
        0.25,
        frame,
    )


def test_valid_points_of_all_poses_are_kept_in_order() -> None:
    cloud = fuse([scan(1.0), scan(2.0, valid=3)])
    assert cloud.points[:, 0].tolist() == [1, 1, 2, 2, 2]
    assert cloud.intensity is not None
    assert cloud.intensity.tolist() == [0, 1, 0, 1, 2]
    assert (cloud.poses, cloud.camera_pixel_mm, cloud.frame) == (2, 0.25, "tray")
    assert cloud.organised is None


def test_quality_averages_shares_and_keeps_every_flag_once() -> None:
    cloud = fuse(
        [
            scan(1.0, flags=("TOO_DARK",), reprojection_px=0.5),
            scan(1.0, valid=4, flags=("TOO_DARK", "SATURATED"), reprojection_px=1.5),
        ]
    )
    assert cloud.quality.valid_share == 0.75
    assert cloud.quality.flags == ("TOO_DARK", "SATURATED")
    assert cloud.quality.reprojection_px == 1.5


def test_scan_without_a_point_gives_an_empty_cloud_that_says_so() -> None:
    cloud = fuse([scan(1.0, valid=0, flags=("NO_DATA",))])
    assert cloud.points.shape == (0, 3)
    assert cloud.quality.flags == ("NO_DATA",)


@pytest.mark.parametrize(
    ("scans", "text"),
    [
        ([], "no scan"),
        ([scan(1.0), scan(1.0, "camera")], "camera, tray"),
        ([scan(1.0, "camera"), scan(1.0, "camera")], "only scans in the tray frame"),
    ],
)
def test_scans_that_cannot_be_fused_are_refused(scans: list[Scan], text: str) -> None:
    with pytest.raises(CaptureError, match=text):
        fuse(scans)


def test_a_single_scan_keeps_its_grid_in_any_frame() -> None:
    cloud = fuse([scan(1.0, "camera")])
    assert cloud.frame == "camera"
    assert cloud.organised is not None
    assert cloud.organised.shape == (2, 2, 3)


HEAD = Calibration(
    "h",
    Optics((4, 3), np.eye(3)),
    Optics((32, 4), np.eye(3)),
    np.eye(4),
    None,
    PatternSpec(column_bits=2, steps=3),
)


def burst(count: int = 14) -> list[Frame]:
    return [Frame(np.full((3, 4), k, np.uint8), 100 + k, source="cam0") for k in range(count)]


def test_frames_become_a_stack_exposure_by_exposure() -> None:
    stack = assemble(burst(), (1.0, 0.35), HEAD, "front")
    assert stack.images[:, :, 0, 0].tolist() == [list(range(7)), list(range(7, 14))]
    assert (stack.calibration_digest, stack.name) == (HEAD.digest, "front")


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda f: f[:-1], "13 frames: expected 7 patterns x 2"),
        (lambda f: [*f[:5], replace(f[5], complete=False), *f[6:]], "incomplete .*frame 5 of cam0"),
        (lambda f: [*f[:5], replace(f[5], sequence=104), *f[6:]], "expected number 105, got 104"),
        (lambda f: [f[1], f[0], *f[2:]], "frame 1 .*expected number 102, got 100"),
        (
            lambda f: [*f[:2], replace(f[2], image=f[2].image[:2]), *f[3:]],
            "expected uint8 4x3, got uint8 4x2",
        ),
        (
            lambda f: [*f[:2], replace(f[2], image=f[2].image.astype(np.uint16)), *f[3:]],
            "got uint16 4x3",
        ),
    ],
)
def test_burst_with_a_hole_is_refused(
    damage: Callable[[list[Frame]], list[Frame]], text: str
) -> None:
    with pytest.raises(CaptureError, match=text):
        assemble(damage(burst()), (1.0, 0.35), HEAD, "front")
