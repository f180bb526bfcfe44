"""`forge-station calibrate`: poses from folders and from a scanner, its files, its exit codes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

pytest.importorskip("numba", reason="the board is scanned by the simulated head (extra demo)")

from forge_station import calibrate_command, calibrate_poses, cli
from forge_station.capture import calibration_io, replay
from forge_station.capture.base import PatternStack, Trigger
from forge_station.capture.board import Board
from forge_station.capture.sim import SimulatedBoard
from forge_station.errors import CaptureError, ConfigError
from forge_station.sim import board as board_sim
from forge_station.sim import scanner

# Small images, so that recording them takes little; the board has large squares for it.
CAMERA = (320, 240)
BOARD = Board("charuco", (7, 5), 18.0, 14.0, "DICT_4X4_50")
FLAGS = ["--squares", "7x5", "--square", "18", "--marker", "14", "--dictionary", "DICT_4X4_50"]
BOTH = calibrate_poses.patterns.spec_for("columns+rows", scanner.PROJECTOR_SIZE)
HEAD = scanner.rig(1.0, "overhead", CAMERA, pattern=BOTH)[0]


@pytest.fixture(scope="module")
def poses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine recorded poses: eight good ones and one without a board."""
    folder = tmp_path_factory.mktemp("poses")
    source = SimulatedBoard(HEAD, BOARD, 8, seed=1)
    for number in range(1, 9):
        (stack,) = source.capture(Trigger(f"p{number}"))
        replay.write(folder / stack.name, [stack], source.calibrations)
    rng = np.random.default_rng(0)
    bare = scanner.simulate([], HEAD, rng, exposures=(1.0,))
    bare = replace(bare, name="pose09", calibration_digest=source.nominal.digest)
    replay.write(folder / "pose09", [bare], source.calibrations)
    return folder


@pytest.fixture(scope="module")
def found(poses: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("found") / "head.yaml"
    assert cli.main(["calibrate", str(poses), *FLAGS, "--out", str(out)]) == 1  # 8 poses: a warning
    return out


def test_poses_of_a_folder_give_a_calibration_and_a_picture(
    poses: Path, found: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = calibration_io.load(found)
    assert known.pattern.kind == "gray_phase" and known.tray_from_camera is None
    assert known.notes["board"] == str(BOARD) and known.notes["verdict"].startswith("USABLE")
    assert known.camera.matrix[0, 0] == pytest.approx(HEAD.camera.matrix[0, 0], rel=6e-3)
    picture = found.with_suffix(".png")
    assert cv2.imread(str(picture)).shape[1] > 800 and picture.stat().st_size < 200_000


def test_what_is_said_of_each_pose(
    poses: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "few.yaml"
    left_out = [w for k in (4, 5, 6, 7, 8) for w in ("--without", f"pose0{k}")]
    code = cli.main(["calibrate", str(poses), "--out", str(out), *FLAGS, *left_out])
    assert code == cli.USAGE_ERROR
    text = capsys.readouterr()
    assert "pose01: 24 of 24 corners" in text.out and "pose04: left out" in text.out
    assert "pose09: not used: board not found" in text.out
    assert "too few poses" in text.err and not out.exists()


def test_a_bad_calibration_is_written_only_on_demand(
    poses: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "few.yaml"
    words = ["calibrate", str(poses), "--out", str(out), *FLAGS]
    words += [w for k in (5, 6, 7, 8) for w in ("--without", f"pose0{k}")]
    assert cli.main(words) == 2
    text = capsys.readouterr().out
    assert "NOT GOOD ENOUGH" in text and "fail  4 poses: take 12 or more" in text
    assert not out.exists() and out.with_suffix(".png").exists()
    assert json.loads(text.splitlines()[-1])["file"] is None
    assert cli.main([*words, "--accept"]) == 2
    assert calibration_io.load(out).notes["verdict"] == "NOT GOOD ENOUGH"


def test_check_passes_on_the_head_and_fails_on_another(
    poses: Path, found: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = str(poses / "pose03")
    assert cli.main(["calibrate", one, "--check", "--calibration", str(found)]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["verdict"] == "pass" and abs(report["poses"][0]["scale_error"]) < 2e-3
    known = calibration_io.load(found)
    lens = known.projector.matrix.copy()
    lens[0, 2] += 4.0
    moved = replace(known, projector=replace(known.projector, matrix=lens))
    calibration_io.save(moved, tmp_path / "moved.yaml")
    words = ["calibrate", one, "--check", "--calibration", str(tmp_path / "moved.yaml")]
    assert cli.main(words) == 2
    out = capsys.readouterr().out
    assert "DRIFTED" in out and "projector has moved" in out


def test_the_tray_is_under_the_board(found: Path, tmp_path: Path) -> None:
    """A plate of 3 mm lies on the tray: z = 0 is 3 mm below the print, the origin in its middle."""
    true = replace(scanner.rig(1.0, "front_side", CAMERA, pattern=BOTH)[0])
    stack = board_sim.simulate(BOARD, true, true.tray_from_camera, np.random.default_rng(4))
    known = calibration_io.load(found)
    replay.write(tmp_path / "lying", [replace(stack, name="lying")], {true.digest: true})
    words = ["calibrate", str(tmp_path / "lying"), "--tray", "--calibration", str(found)]
    assert cli.main([*words, "--thickness", "3", "--out", str(tmp_path / "tray.yaml")]) == 0
    placed = calibration_io.load(tmp_path / "tray.yaml")
    assert placed.camera == known.camera and placed.digest != known.digest
    # The print is z = 3 of the new tray frame: each of its points is seen where it truly is.
    places = np.array([(0.0, 0.0, 0.0), (40.0, 0.0, 0.0), (0.0, 25.0, 0.0), (-40.0, -25.0, 0.0)])
    seen = []
    for head, height in ((true, 0.0), (placed, 3.0)):
        camera_from_tray = np.linalg.inv(head.tray_from_camera)
        lifted = places + np.array([0.0, 0.0, height])
        points = lifted @ camera_from_tray[:3, :3].T + camera_from_tray[:3, 3]
        seen.append(head.camera.project(points))
    np.testing.assert_allclose(seen[1], seen[0], atol=0.3)
    assert placed.range_mm == pytest.approx(true.range_mm + 3 / np.sin(np.pi / 4), rel=5e-3)
    chess = [*words, "--chessboard", "--out", str(tmp_path / "x.yaml")]
    assert cli.main(chess) == cli.USAGE_ERROR


def test_plain_pattern_images_need_the_size_of_the_projector(
    poses: Path, found: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tmp_path / "a"
    plain.mkdir()
    for image in (poses / "pose01" / "pose01").glob("e0_*.png"):
        (plain / image.name).write_bytes(image.read_bytes())
    words = ["calibrate", str(tmp_path), "--check", "--calibration", str(found)]
    assert cli.main(words) == cli.USAGE_ERROR
    assert "--projector" in capsys.readouterr().err
    assert cli.main([*words, "--projector", "912x570"]) == 0


def ask(answers: list[str]) -> Callable[[str], str]:
    left = iter(answers)

    def reply(prompt: str) -> str:
        assert prompt.startswith("pose ")
        return next(left)

    return reply


def test_live_poses_are_recorded_as_they_come(tmp_path: Path) -> None:
    source = SimulatedBoard(HEAD, BOARD, 2)
    taken = list(calibrate_poses.live(source, "", tmp_path, None, ask(["", "", "", "done"])))
    assert [stack.name for stack, _ in taken] == ["pose01", "pose02"]  # the third was refused
    for stack, nominal in taken:
        recording = replay.read(tmp_path / stack.name)
        assert np.array_equal(recording.stacks[0].images, stack.images)
        assert nominal.digest in recording.calibrations
    with pytest.raises(CaptureError):
        source.capture(Trigger("closed"))


class TwoHeads:
    """A scanner of two different heads."""

    def __init__(self) -> None:
        other = replace(HEAD, camera=replace(HEAD.camera, matrix=HEAD.camera.matrix * 1.0))
        lens = HEAD.camera.matrix.copy()
        lens[0, 0] *= 2
        other = replace(HEAD, name="right", camera=replace(HEAD.camera, matrix=lens))
        self.calibrations = {HEAD.digest: HEAD, other.digest: other}

    def capture(self, trigger: Trigger) -> list[PatternStack]:
        images = np.zeros((1, BOTH.image_count, 240, 320), np.uint8)
        return [
            PatternStack(images, (1.0,), BOTH, digest, f"head{k}")
            for k, digest in enumerate(self.calibrations)
        ]

    def close(self) -> None: ...


def test_one_of_several_heads_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--head head0 or head1"):
        next(calibrate_poses.live(TwoHeads(), "", tmp_path, None, ask([""])))
    with pytest.raises(ConfigError, match="no such head"):
        next(calibrate_poses.live(TwoHeads(), "", tmp_path, "head7", ask([""])))
    poses: Iterator[calibrate_poses.Pose]
    poses = calibrate_poses.live(TwoHeads(), "", tmp_path, "head1", ask(["", "d"]))
    assert next(poses)[1].name == "right"


def test_board_nominal_export_and_import(
    found: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    board = ["calibrate", "--board", str(tmp_path / "b.png"), "--squares", "9x6", "--square", "20"]
    assert cli.main(board) == 0
    assert "charuco 9x6 20 15 DICT_5X5_100" in capsys.readouterr().out
    nominal = tmp_path / "nominal.yaml"
    words = ["calibrate", "--nominal", str(nominal), "--camera", "1280x1024"]
    assert cli.main(words) == cli.USAGE_ERROR
    assert cli.main([*words, "--projector", "912x570"]) == 0
    assert calibration_io.load(nominal).pattern.axis == "both"
    xml, back = tmp_path / "head.xml", tmp_path / "back.yaml"
    assert cli.main(["calibrate", "--export", str(xml), "--calibration", str(found)]) == 0
    words = ["calibrate", "--import", str(xml), "--out", str(back)]
    assert cli.main(words) == cli.USAGE_ERROR
    assert cli.main([*words, "--codes", "912x570"]) == 0
    assert calibration_io.load(back).camera == calibration_io.load(found).camera


def test_the_simulated_camera_has_a_calibration_to_write(tmp_path: Path) -> None:
    """That of a station without hardware (docs/CAMERAS.md): the camera by itself has the same."""
    file = tmp_path / "sim.yaml"
    assert cli.main(["calibrate", "--practice", "--nominal", str(file)]) == 0
    written = calibration_io.load(file)
    assert written.digest == scanner.rig(1.0, "overhead")[0].digest
    assert written.tray_from_camera is not None


def test_where_poses_come_from_must_be_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["calibrate"]) == cli.USAGE_ERROR
    assert "one of POSES" in capsys.readouterr().err
    assert cli.main(["calibrate", "folder", "--practice"]) == cli.USAGE_ERROR


def test_help_teaches_the_steps_and_fits_a_terminal() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter)
    calibrate_command.add_arguments(parser)
    text = parser.format_help()
    for word in ("--tray", "--check", "--practice", "board.pdf", "Exit code", "64"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 100
