"""`forge-station inspect`: every kind of bad input, each with one clear error."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml

from forge_station import cli, intake, offline, sources
from forge_station.capture import calibration_io, replay
from forge_station.capture.base import PatternStack
from forge_station.contract.verdict import unknown_reasons
from forge_station.errors import StationError
from forge_station.opening import open_inspector
from tests.station.offline_inputs import (
    cloud_files,
    command,
    draw_views,
    inspected,
    tray_points,
    write_npz,
)


def rewritten(recording: Path, folder: Path, value: int) -> Path:
    """The recording with every image of one grey value."""
    known = replay.read(recording)
    stacks = [replace(stack, images=np.full_like(stack.images, value)) for stack in known.stacks]
    replay.write(folder, stacks, known.calibrations)
    return folder


def edited_manifest(recording: Path, folder: Path, edit) -> Path:
    shutil.copytree(recording, folder)
    content = yaml.safe_load((folder / replay.MANIFEST).read_text())
    edit(content["stacks"][0], folder)
    (folder / replay.MANIFEST).write_text(yaml.safe_dump(content))
    return folder


def other_code_step(entry, folder: Path) -> None:
    path = folder / entry["calibration"]
    known = calibration_io.load(path)
    changed = replace(known, pattern=replace(known.pattern, code_step=2))
    calibration_io.save(changed, path)
    entry["calibration_digest"] = changed.digest


def small_image(entry, folder: Path) -> None:
    image = entry["images"][3]
    cv2.imwrite(str(folder / image["file"]), np.zeros((24, 32), np.uint8))
    del image["sha256"]


def cut_image(entry, folder: Path) -> None:
    path = folder / entry["images"][2]["file"]
    path.write_bytes(path.read_bytes()[:500])


def removed_image(entry, folder: Path) -> None:
    (folder / entry["images"][5]["file"]).unlink()


BAD_RECORDINGS = {
    "missing pattern": (removed_image, "INPUT_WRONG", r"e0_05\.png.*missing"),
    "one pattern less": (lambda e, f: e["images"].pop(), "INPUT_WRONG", r"stacks\[0\]\.images"),
    "digest": (
        lambda e, f: e.update(calibration_digest="0" * 64),
        "INPUT_WRONG",
        r"stacks\[0\]\.calibration_digest",
    ),
    "code step": (other_code_step, "INPUT_WRONG", r"stacks\[0\]\.pattern_digest.*code step 2"),
    "image size": (small_image, "INPUT_WRONG", r"e0_03\.png.*32x24.*320x240"),
    "truncated image": (cut_image, "INPUT_WRONG", r"e0_02\.png.*truncated"),
    "unknown key": (lambda e, f: e.update(gain=1), "INPUT_WRONG", r"stacks\[0\]\.gain: unknown"),
}


@pytest.mark.parametrize("fault", BAD_RECORDINGS)
def test_a_bad_recording_is_an_error(inspector, recording, tmp_path, fault):
    edit, code, text = BAD_RECORDINGS[fault]
    verdict = inspected(inspector, edited_manifest(recording, tmp_path / "edited", edit))
    assert verdict.outcome.value == "ERROR"
    assert [reason.code for reason in verdict.reasons] == [code]
    assert re.search(text, verdict.reasons[0].text), verdict.reasons[0].text


@pytest.mark.parametrize(("value", "code"), [(3, "TOO_DARK"), (255, "SATURATED")])
def test_a_dark_or_saturated_scan_is_an_error(inspector, recording, tmp_path, value, code):
    verdict = inspected(inspector, rewritten(recording, tmp_path / "flat", value))
    assert verdict.outcome.value == "ERROR"
    assert {code, "NO_DATA"} <= {reason.code for reason in verdict.reasons}
    assert not unknown_reasons(verdict.reasons)


def many(folder: Path) -> Path:
    return write_npz(folder / "seven.npz", tray_points(7), frame="tray", unit="mm")


def nothing(folder: Path) -> Path:
    points = tray_points()
    points[..., 2] *= points[..., 2] < 1
    return write_npz(folder / "empty.npz", points, frame="tray", unit="mm")


def not_a_number(folder: Path) -> Path:
    return write_npz(folder / "nan.npz", np.full((50, 50, 3), np.nan, np.float32))


def too_large(folder: Path) -> Path:
    return write_npz(folder / "large.npz", 60 * tray_points(), frame="tray", unit="mm")


def cut_ply(folder: Path) -> Path:
    path = cloud_files(folder, tray_points())["flat"]
    path.write_bytes(path.read_bytes()[:-1000])
    return path


def two_points(folder: Path) -> Path:
    return write_npz(folder / "two.npz", np.eye(3)[:2])


def flat_mesh(folder: Path) -> Path:
    path = folder / "flat.obj"
    path.write_text("v 0 0 0\nv 9 0 0\nv 9 9 0\nv 0 9 0\nf 1 2 3\nf 1 3 4\n")
    return path


def cut_mesh(folder: Path) -> Path:
    path = folder / "cut.stl"
    path.write_text("solid x\nfacet normal 0 0 1\nouter loop\nvertex 0 0 0\n")
    return path


def no_image(folder: Path) -> Path:
    path = folder / "note.png"
    path.write_text("not a picture")
    return path


def tiny_image(folder: Path) -> Path:
    path = folder / "tiny.png"
    cv2.imwrite(str(path), np.zeros((4, 4), np.uint8))
    return path


BAD_FILES = [
    (many, "TOO_MANY_PARTS", "7 separate parts"),
    (nothing, "EMPTY_SCENE", "no part"),
    (not_a_number, "NO_DATA", r"nan\.npz.*2500 points, none finite"),
    (too_large, "NOT_CHECKED", "check the unit"),
    (cut_ply, "INPUT_WRONG", r"flat\.ply.*vertex"),
    (two_points, "NO_DATA", "the cloud holds 2 points"),
    (flat_mesh, "INPUT_WRONG", r"flat.*flat\.obj"),
    (cut_mesh, "INPUT_WRONG", r"truncated.*cut\.stl"),
    (no_image, "INPUT_WRONG", r"not a readable image.*note\.png"),
    (tiny_image, "INPUT_WRONG", r"wrong size.*tiny\.png.*16 to 8192 px a side, got 4x4"),
    (lambda folder: folder / "away.obj", "INPUT_WRONG", r"no such file.*away\.obj"),
]


@pytest.mark.parametrize(("make", "code", "text"), BAD_FILES)
def test_a_bad_file_is_an_error(inspector, tmp_path, make, code, text):
    verdict = inspected(inspector, make(tmp_path))
    assert verdict.outcome.value == "ERROR"
    assert code in [reason.code for reason in verdict.reasons]
    assert re.search(text, " ".join(reason.text for reason in verdict.reasons))
    assert not unknown_reasons(verdict.reasons)
    assert not verdict.parts


def test_views_of_two_scales_are_an_error(inspector, tmp_path):
    options = sources.Options(mm_per_px=0.25)
    (item,) = sources.items_of(draw_views(tmp_path, top_scale=0.7), options)
    verdict = intake.inspect(inspector, item, intake.Request(options)).verdict
    assert verdict.outcome.value == "ERROR"
    assert "do not fit each other" in verdict.reasons[0].text
    assert "front 160 px, top 112 px" in verdict.reasons[0].text


def test_a_calibration_that_is_none_is_an_error(inspector, tmp_path):
    (tmp_path / "images").mkdir()
    cv2.imwrite(str(tmp_path / "images/p_00.png"), np.zeros((48, 64), np.uint8))
    calibration = tmp_path / "calibration.xml"
    calibration.write_text("<?xml version='1.0'?><opencv_storage></opencv_storage>")
    options = {"calibration": calibration, "code_step": 2, "codes": (64, 48)}
    verdict = inspected(inspector, tmp_path / "images", **options)
    assert [reason.code for reason in verdict.reasons] == ["CALIBRATION_MISMATCH"]
    assert "calibration.xml" in verdict.reasons[0].text


# ---------------------------------------------------------------- bad usage: stopped before


def without_decoder(bundle: Path, folder: Path) -> list[object]:
    shutil.copytree(bundle, folder / "bundle")
    (folder / "bundle/decoder.onnx").unlink()
    return [many(folder), "--bundle", folder / "bundle"]


def edited_bundle(bundle: Path, folder: Path) -> list[object]:
    shutil.copytree(bundle, folder / "bundle")
    path = folder / "bundle/vision.onnx"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return [many(folder), "--bundle", folder / "bundle"]


def truncated_bundle(bundle: Path, folder: Path) -> list[object]:
    shutil.copytree(bundle, folder / "bundle")
    path = folder / "bundle/embed.npy"
    path.write_bytes(path.read_bytes()[:-10])
    return [many(folder), "--bundle", folder / "bundle"]


def line_file(folder: Path, **more: object) -> Path:
    product = {"part_number": "P", "kind": "single", "parts": {"hex_nut M8": 1}}
    path = folder / "line.yaml"
    path.write_text(
        yaml.safe_dump({"line": "x", "products": [{**product, "checks": ["surface"], **more}]})
    )
    return path


def pattern_folder(folder: Path) -> Path:
    (folder / "patterns").mkdir()
    cv2.imwrite(str(folder / "patterns/p_00.png"), np.zeros((48, 64), np.uint8))
    return folder / "patterns"


def opencv_file(folder: Path) -> list[object]:
    (folder / "c.xml").write_text("<opencv_storage/>")
    return [pattern_folder(folder), "--calibration", folder / "c.xml"]


BAD_USAGE = {
    "no bundle": (lambda b, f: [many(f), "--bundle", f], r"manifest\.json"),
    "bundle without a file": (without_decoder, r"decoder\.onnx"),
    "edited bundle": (edited_bundle, r"vision\.onnx"),
    "truncated bundle": (truncated_bundle, r"embed\.npy"),
    "unknown key": (
        lambda b, f: [many(f), "--line", line_file(f, colour="red"), "--part-number", "P"],
        r"line\.yaml.*(?s:.)*products\[0\]\.colour",
    ),
    "unknown part number": (
        lambda b, f: [many(f), "--line", line_file(f), "--part-number", "Q"],
        "no such product.*expected P, got Q",
    ),
    "part number alone": (lambda b, f: [many(f), "--part-number", "P"], "--line FILE"),
    "line alone": (lambda b, f: [many(f), "--line", line_file(f)], "--part-number, one of P"),
    "images without calibration": (lambda b, f: [pattern_folder(f)], "--calibration FILE"),
    "two views": (lambda b, f: [*draw_views(f)[:2], "--mm-per-px", 1], "no top"),
    "views without scale": (lambda b, f: draw_views(f), "--mm-per-px MM"),
    "unknown kind": (lambda b, f: [f / "part.step"], r"part\.step.*\.obj"),
    "empty folder": (lambda b, f: [f], "nothing to inspect"),
    "output is a file": (
        lambda b, f: [many(f), "--out", many(f)],
        r"output folder cannot be made.*seven\.npz",
    ),
}


@pytest.mark.parametrize("fault", BAD_USAGE)
def test_bad_usage_stops_before_anything_is_inspected(bundle, tmp_path, capsys, fault):
    make, text = BAD_USAGE[fault]
    words = [*make(bundle, tmp_path)]
    if "--bundle" not in words:
        words += ["--bundle", bundle]
    if "--out" not in words:
        words += ["--out", tmp_path / "out"]
    with pytest.raises(StationError, match=text):
        offline.run(command(*words))
    assert not capsys.readouterr().out


def test_an_opencv_calibration_needs_its_code(inspector, tmp_path):
    folder, _, calibration = opencv_file(tmp_path)
    verdict = inspected(inspector, folder, calibration=calibration)
    assert verdict.outcome.value == "ERROR"
    assert "--code-step N and --codes COLUMNSxROWS" in verdict.reasons[0].text


@pytest.mark.parametrize(
    "words",
    [["--codes", "1024"], ["--code-step", "0"], ["--mm-per-px", "-1"], ["--seed", "x"], []],
)
def test_malformed_options_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        command(*(["part.npz", *words] if words else []))
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("words", [["inspect"], ["inspect", "x.npz", "--seed", "-1"], ["look"]])
def test_wrong_usage_does_not_exit_as_an_outcome(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code == 64
    assert "error: " in capsys.readouterr().err


def test_a_refused_bundle_is_one_line_and_64(tmp_path, capsys):
    words = ["inspect", many(tmp_path), "--bundle", tmp_path, "--out", tmp_path / "out"]
    assert cli.main([str(word) for word in words]) == 64
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("forge-station: bundle has no readable manifest")
    assert err.count("\n") == 1


def test_a_second_look_needs_a_model_that_was_trained_for_it(bundle):
    with pytest.raises(StationError, match="not trained on closer looks"):
        open_inspector(bundle, overrides={"look_again": 0.05})


def test_a_stack_of_another_calibration_is_an_error(inspector, recording):
    known = replay.read(recording)
    first: PatternStack = known.stacks[0]
    given = sources.Stacks((replace(first, calibration_digest="f" * 64),), known.calibrations, "x")
    with pytest.raises(StationError, match="taken with calibration ffffffffffff"):
        intake.from_stacks(inspector, given, intake.job_of("x", intake.Request(sources.Options())))
