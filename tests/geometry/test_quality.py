"""Gates before the model: every bad scan ends in a problem with a figure and a limit."""

from __future__ import annotations

import numpy as np
import pytest

from forge_station.capture import base
from forge_station.capture.base import Cloud, ScanQuality
from forge_station.geometry import quality
from forge_station.geometry.pose import PartCloud
from forge_station.geometry.problem import Problem
from forge_station.geometry.scene import Scene

PIXEL = 0.2


def part(
    length: float = 15.0,
    width: float = 13.0,
    height: float = 6.8,
    *,
    points: int = 20000,
    unseen_share: float = 0.0,
    has_waist: bool = False,
) -> PartCloud:
    rng = np.random.default_rng(0)
    xyz = rng.uniform((-0.5, -0.5, 0.0), (0.5, 0.5, 1.0), (points, 3)) * (length, width, height)
    return PartCloud(
        points=xyz.astype(np.float32),
        tray_from_part=np.eye(4),
        footprint=np.zeros((4, 2), np.float32),
        touches_border=False,
        camera_pixel_mm=PIXEL,
        poses=4,
        unseen_share=unseen_share,
        has_waist=has_waist,
    )


def gate(
    parts: tuple[PartCloud, ...] = (),
    problems: tuple[Problem, ...] = (),
    scan: ScanQuality | None = None,
    points: int = 1000,
) -> tuple[Problem, ...]:
    scan = scan or ScanQuality(valid_share=0.9)
    cloud = Cloud(np.zeros((points, 3), np.float32), None, PIXEL, poses=4, quality=scan)
    return quality.gate(cloud, Scene(parts, problems, tray_share=0.8))


def test_a_good_scan_of_good_parts_has_no_problem() -> None:
    assert gate((part(), part())) == ()


@pytest.mark.parametrize(
    ("scan", "points", "code", "level", "figure"),
    [
        (ScanQuality(0.0, flags=(base.NO_DATA,)), 0, "NO_DATA", "ERROR", "0 points"),
        (
            ScanQuality(0.1, dark_share=0.8, flags=(base.TOO_DARK,)),
            900,
            "TOO_DARK",
            "UNSURE",
            "80%",
        ),
        (
            ScanQuality(0.6, saturated_share=0.125, flags=(base.SATURATED,)),
            900,
            "SATURATED",
            "UNSURE",
            "12.5%",
        ),
        (ScanQuality(0.2, flags=(base.LOW_COVERAGE,)), 900, "LOW_COVERAGE", "UNSURE", "20%"),
        (
            ScanQuality(0.6, inconsistent_share=0.034, flags=(base.INCONSISTENT_CODE,)),
            900,
            "INCONSISTENT_CODE",
            "UNSURE",
            "3.4%",
        ),
        (ScanQuality(0.6, reprojection_px=7.2), 900, "CALIBRATION_MISMATCH", "ERROR", "7.2 px"),
    ],
)
def test_each_flag_of_the_decoder_becomes_a_problem_with_its_figure(
    scan: ScanQuality, points: int, code: str, level: str, figure: str
) -> None:
    found = gate((part(),), scan=scan, points=points)
    assert [problem.code for problem in found] == [code]
    assert found[0].level == level
    assert figure in found[0].text


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (part(points=120), "TOO_FEW_POINTS"),
        (part(8.0, 2.0, 1.0), "TOO_FEW_POINTS"),
        (part(unseen_share=0.5), "LOW_COVERAGE"),
        (part(33.0, 14.0, 5.1, has_waist=True), "TOUCHING_PARTS"),
    ],
)
def test_a_bad_part_is_named_by_its_place_and_index(bad: PartCloud, code: str) -> None:
    (found,) = gate((part(), bad))
    assert (found.code, found.level, found.part) == (code, "UNSURE", 1)
    assert "part 2 from the left" in found.text


def test_a_waist_with_the_size_of_a_catalogue_part_is_one_part() -> None:
    assert gate((part(39.0, 21.2, 15.9, has_waist=True),)) == ()  # wing_nut M8


def test_errors_come_first_and_an_empty_scene_without_data_is_not_said_twice() -> None:
    empty = Problem("EMPTY_SCENE", "no part was found", "ERROR")
    border = Problem("PART_OUT_OF_FIELD", "part 1", "UNSURE", 0)
    dark = ScanQuality(0.0, dark_share=1.0, flags=(base.NO_DATA, base.TOO_DARK))
    few = Problem("NO_DATA", "the cloud holds 0 points", "ERROR")
    for said in ((empty,), (few,), (few, empty)):
        assert [p.code for p in gate((), said, dark, points=0)] == ["NO_DATA", "TOO_DARK"]
    assert [p.text for p in gate((), (few,), points=1)] == [few.text]
    assert [p.level for p in gate((), (border, empty))] == ["ERROR", "UNSURE"]
