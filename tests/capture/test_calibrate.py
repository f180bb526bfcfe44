"""Calibration of a simulated head from a noisy, distorted board, and what it then measures."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("numba", reason="the board is scanned by the simulated head (extra demo)")

from forge_station.capture import calibrate, patterns, structured_light
from forge_station.capture import calibrate_report as report
from forge_station.capture.base import Trigger, fuse
from forge_station.capture.board import Board
from forge_station.capture.calibrate import Solution, View
from forge_station.capture.calibration import Calibration, PatternSpec
from forge_station.capture.sim import SimulatedBoard
from forge_station.contract import catalogue
from forge_station.errors import CalibrationError, CaptureError
from forge_station.geometry import gauge, scene
from forge_station.sim import board as board_sim
from forge_station.sim import fasteners, scanner
from forge_station.sim.mesh import Mesh

BOARD = Board()
CAMERA, PROJECTOR = (640, 480), scanner.PROJECTOR_SIZE
BOTH = patterns.spec_for("columns+rows", PROJECTOR)
PHASE = patterns.spec_for("phase", PROJECTOR)
HEAD = scanner.rig(1.0, "overhead", pattern=BOTH)[0]


@dataclass(frozen=True)
class Calibrated:
    views: tuple[View, ...]
    solution: Solution

    @property
    def head(self) -> Calibration:
        return self.solution.calibration("found", PHASE, {"board": str(BOARD)})


@pytest.fixture(scope="module")
def calibrated() -> Calibrated:
    """Twelve poses: 8-bit images with noise, both lenses distorted."""
    source = SimulatedBoard(HEAD, BOARD, 12)
    views = []
    for number in range(12):
        (stack,) = source.capture(Trigger(f"pose-{number}"))
        views.append(calibrate.look(stack, BOARD))
    return Calibrated(tuple(views), calibrate.solve(views, BOARD, CAMERA, PROJECTOR))


def test_twelve_noisy_poses_calibrate_both_devices(calibrated: Calibrated) -> None:
    found = calibrated.solution
    assert 0.005 < found.camera_rms_px < 0.3
    assert 0.02 < found.projector_rms_px < 0.3
    assert found.camera.matrix[0, 0] == pytest.approx(HEAD.camera.matrix[0, 0], rel=1e-3)
    assert found.camera.distortion[0] == pytest.approx(HEAD.camera.distortion[0], abs=0.02)
    baseline = np.linalg.norm(HEAD.projector_from_camera[:3, 3])
    assert np.linalg.norm(found.projector_from_camera[:3, 3]) == pytest.approx(baseline, abs=0.3)
    measured = [calibrate.measure(view, BOARD, calibrated.head) for view in calibrated.views]
    findings = report.judge(found, calibrated.views, measured)
    assert report.worst(findings) == "pass", [str(f) for f in findings]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_in_full_with_the_pixels_of_a_real_camera() -> None:
    """1280x960: twelve poses, depth at 400 mm, the tray from a board, five nuts of known width."""
    size = (1280, 960)
    true_head = scanner.rig(1.0, "overhead", size, pattern=BOTH)[0]
    source = SimulatedBoard(true_head, BOARD, 12, seed=1)
    views = [calibrate.look(source.capture(Trigger("x"))[0], BOARD) for _ in range(12)]
    found = calibrate.solve(views, BOARD, size, PROJECTOR)
    assert found.camera_rms_px < 0.3 and found.projector_rms_px < 0.3
    head = found.calibration("found", PHASE, {})
    rng = np.random.default_rng(101)
    true = replace(true_head, pattern=PHASE, tray_from_camera=facing(400.0))
    plane = scanner.simulate([], true, rng, exposures=(1.0,), registration=(0.0, 0.0))
    scan = structured_light.decode(replace(plane, calibration_digest=head.digest), head)
    assert abs(float(np.nanmean(scan.points[..., 2])) - 400.0) < 0.1
    nuts = {"M5": (-52, 8.0), "M6": (-30, 10.0), "M8": (-5, 13.0), "M10": (22, 16.0)}
    nuts["M12"] = (50, 18.0)
    meshes = [nut(name, float(x), float(rng.uniform(0, 1))) for name, (x, _) in nuts.items()]
    widths = scanned_widths(meshes, head, size, rng)
    assert widths == pytest.approx([width for _, width in nuts.values()], abs=0.2)


def facing(distance: float) -> NDArray[np.float64]:
    """tray_from_camera of a plane that faces the camera."""
    pose = np.diag([1.0, -1.0, -1.0, 1.0])
    pose[2, 3] = distance
    return pose


@pytest.mark.parametrize("distance", [360.0, 400.0, 440.0])
def test_distances_are_right_to_a_tenth_of_a_millimetre(
    calibrated: Calibrated, distance: float
) -> None:
    true = replace(HEAD, pattern=PHASE, tray_from_camera=facing(distance))
    rng = np.random.default_rng(3)
    stack = scanner.simulate([], true, rng, exposures=(1.0,), registration=(0.0, 0.0))
    head = calibrated.head
    scan = structured_light.decode(replace(stack, calibration_digest=head.digest), head)
    error = scan.points[..., 2] - distance
    assert np.isfinite(error).mean() > 0.8
    assert abs(float(np.nanmean(error))) < 0.1
    assert float(np.nanstd(error)) < 0.1


def nut(size: str, x: float, angle: float) -> Mesh:
    """A hexagon nut that lies on the tray, mm and radians."""
    turn = scanner.rotation(np.array([0.0, 0.0, angle]))
    mesh = fasteners.build(catalogue.by_id(f"hex_nut {size}"))
    return mesh.transformed(turn, np.array([x, 0.0, 0.0]))


def scanned_widths(
    meshes: list[Mesh], found: Calibration, size: tuple[int, int], rng: np.random.Generator
) -> list[float]:
    """From four turns of the table, each tray found from a board that lies on it; left to right."""
    scans = []
    for true in scanner.rig(1.0, "turntable4", size, pattern=PHASE):
        lying = board_sim.simulate(BOARD, true, true.tray_from_camera, rng)
        fit = calibrate.measure(calibrate.look(lying, BOARD), BOARD, found)
        head = replace(found, tray_from_camera=calibrate.tray(fit, BOARD, 0.0))
        stack = scanner.simulate(meshes, true, rng, registration=(0.0, 0.0))
        scans.append(structured_light.decode(replace(stack, calibration_digest=head.digest), head))
    return [gauge.measure(part).width_mm for part in scene.separate(fuse(scans)).parts]


def test_nuts_measured_with_the_found_calibration_have_their_width(
    calibrated: Calibrated,
) -> None:
    """A pixel is 0.26 mm here, and an edge is known to 1.1 of them (geometry.gauge)."""
    meshes = [nut("M6", -30.0, 0.2), nut("M8", 0.0, 0.5), nut("M10", 32.0, 0.9)]
    rng = np.random.default_rng(11)
    widths = scanned_widths(meshes, calibrated.head, CAMERA, rng)
    assert widths == pytest.approx([10.0, 13.0, 16.0], abs=0.28)


def test_the_projected_code_is_found_between_codes_whatever_their_step() -> None:
    """Pairs of Gray code mean the middle of their pixels, not the first."""
    coarse = patterns.spec_for("columns+rows", PROJECTOR, code_step=3)
    head = replace(HEAD, pattern=coarse)
    pose = next(board_sim.poses(1, head))
    view = calibrate.look(board_sim.simulate(BOARD, head, pose, np.random.default_rng(0)), BOARD)
    at = (BOARD.corners_mm[view.ids] - BOARD.centre_mm) * (1, -1, -1)
    camera_from_board = np.linalg.inv(pose)
    seen = at @ camera_from_board[:3, :3].T + camera_from_board[:3, 3]
    m = head.projector_from_camera
    truth = head.projector.project(seen @ m[:3, :3].T + m[:3, 3])
    assert np.abs((view.projector - truth).mean(axis=0)).max() < 0.15  # half a step is 1 px
    assert np.abs(view.camera - head.camera.project(seen)).mean() < 0.1
    fit = calibrate.measure(view, BOARD, head)
    # `head` itself knows nothing of the rule that pairs are decoded to the first pixel of a code
    assert fit.projector_px > 0.8
    lens = head.projector.matrix.copy()
    lens[:2, 2] -= calibrate.half_code(coarse)
    fitting = replace(head, projector=replace(head.projector, matrix=lens))
    assert calibrate.measure(view, BOARD, fitting).projector_px < 0.4


def test_a_pose_that_was_bumped_is_named(calibrated: Calibrated) -> None:
    views = list(calibrated.views)
    down = views[4].projector + np.array([0.0, 3.0])
    views[4] = replace(views[4], name="bumped", projector=down)
    found = calibrate.solve(views, BOARD, CAMERA, PROJECTOR)
    assert calibrate.outliers(found.poses) == ("bumped",)
    measured = [calibrate.measure(v, BOARD, calibrated.head) for v in views]
    findings = report.judge(found, views, measured)
    assert report.worst(findings) == "warn"
    assert any("bumped" in f.what and "--without" in f.action for f in findings)
    assert "bumped" in next(line for line in report.table(found).splitlines() if "outlier" in line)


def test_few_flat_poses_are_not_good_enough(calibrated: Calibrated) -> None:
    few = calibrated.views[:4]
    found = calibrate.solve(few, BOARD, CAMERA, PROJECTOR)
    measured = [calibrate.measure(v, BOARD, calibrated.head) for v in few]
    failed = [f.what for f in report.judge(found, few, measured) if f.level == "fail"]
    assert "4 poses" in failed
    with pytest.raises(CalibrationError, match="too few poses"):
        calibrate.solve(few[:3], BOARD, CAMERA, PROJECTOR)


def test_progress_says_what_is_missing(calibrated: Calibrated) -> None:
    first = report.progress(calibrated.views[:1], BOARD, CAMERA)
    assert "70 of 70 corners" in first and "held flat" in first and "11 more poses" in first
    assert all(lean in first for lean in ("upper edge away", "left edge away"))
    last = report.progress(calibrated.views, BOARD, CAMERA)
    assert "nothing is missing" in last and "more pose" not in last
    one_side = [v for v in calibrated.views if v.camera[:, 0].max() < 480]
    assert "right" in report.missing_regions(one_side, CAMERA)


def test_the_tilt_is_told_by_the_edge_that_is_away() -> None:
    assert calibrate.tilt(np.eye(4)) == (0.0, 0.0)
    away = np.eye(4)
    away[:3, :3] = scanner.rotation(np.array([-0.3, 0.0, 0.0]))  # upper edge (-y) to larger z
    corner = away[:3, :3] @ [0.0, -10.0, 0.0]
    assert corner[2] > 0
    assert calibrate.tilt(away)[0] == pytest.approx(np.degrees(0.3))
    right = np.eye(4)
    right[:3, :3] = scanner.rotation(np.array([0.0, -0.3, 0.0]))
    assert (right[:3, :3] @ [10.0, 0.0, 0.0])[2] > 0
    assert calibrate.tilt(right)[1] == pytest.approx(np.degrees(0.3))


def test_a_check_passes_on_the_same_head_and_names_what_moved(calibrated: Calibrated) -> None:
    head, view = calibrated.head, calibrated.views[2]
    assert report.worst(report.drift(calibrate.measure(view, BOARD, head))) == "pass"
    lens = head.projector.matrix.copy()
    lens[0, 2] += 3.0
    moved = replace(head, projector=replace(head.projector, matrix=lens))
    findings = report.drift(calibrate.measure(view, BOARD, moved))
    bad = [f for f in findings if f.level != "pass"]
    assert any("projector reprojection" in f.what for f in bad)
    assert not any("camera reprojection" in f.what for f in bad)
    larger = replace(BOARD, square_mm=12.1, marker_mm=9.0)
    fit = calibrate.measure(view, larger, head)
    assert fit.scale_error == pytest.approx(12 / 12.1 - 1, abs=5e-4)
    assert report.worst(report.drift(fit)) == "fail"


def test_columns_alone_check_a_head_but_do_not_calibrate_it(calibrated: Calibrated) -> None:
    head = replace(HEAD, pattern=PHASE)
    pose = next(board_sim.poses(1, head))
    view = calibrate.look(board_sim.simulate(BOARD, head, pose, np.random.default_rng(0)), BOARD)
    assert not view.both_axes
    fit = calibrate.measure(view, BOARD, calibrated.head)
    assert report.worst(report.drift(fit)) == "pass"
    with pytest.raises(CalibrationError, match="columns alone"):
        calibrate.solve([*calibrated.views[:4], view], BOARD, CAMERA, PROJECTOR)


def test_a_scan_without_a_board_or_without_light_says_what_to_change() -> None:
    head = replace(HEAD, tray_from_camera=facing(400.0))
    empty = scanner.simulate([], head, np.random.default_rng(0), exposures=(1.0,))
    with pytest.raises(CaptureError, match="board not found"):
        calibrate.look(empty, BOARD)
    pose = next(board_sim.poses(1, head))
    lit = board_sim.simulate(BOARD, head, pose, np.random.default_rng(0))
    images = lit.images.copy()
    images[:, :-2] = images[:, -2:-1]  # the projector showed white all the time
    with pytest.raises(CaptureError, match="no projected code on the board"):
        calibrate.look(replace(lit, images=images), BOARD)
    with pytest.raises(CaptureError, match="turn the exposure up"):
        calibrate.look(replace(lit, images=lit.images // 40), BOARD)


def test_the_picture_shows_both_images(calibrated: Calibrated) -> None:
    picture = report.draw(calibrated.solution, calibrated.views, "title")
    assert picture.dtype == np.uint8 and picture.shape[2] == 3
    coloured = np.ptp(picture.astype(int), axis=2) > 60
    left, right = np.array_split(coloured, 2, axis=1)
    assert left.sum() > 300 and right.sum() > 300


def test_the_pattern_of_the_file_is_that_of_the_scans_to_come(calibrated: Calibrated) -> None:
    assert calibrated.head.pattern == PHASE
    step = replace(BOTH, code_step=2, column_bits=9, row_bits=9)
    pairs = calibrated.solution.calibration("pairs", step, {})
    assert isinstance(pairs.pattern, PatternSpec)
    shift = calibrated.head.projector.matrix - pairs.projector.matrix
    np.testing.assert_allclose(shift[:2, 2], 0.5)
