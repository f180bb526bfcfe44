"""`forge-station inspect`: every kind of input, every kind of bad input, exit codes and files."""

from __future__ import annotations

import argparse
import base64
import json
import re
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml

import forge_station.sim
from export.bundle import Release, write_bundle
from forge_station import cli, intake, offline, sources
from forge_station.capture import calibration_io, replay
from forge_station.capture.base import Cloud, PatternStack
from forge_station.contract.catalogue import CATALOGUE, by_id
from forge_station.contract.verdict import Verdict, unknown_reasons
from forge_station.errors import StationError
from forge_station.geometry import cloud_io
from forge_station.opening import open_inspector
from forge_station.sim import fasteners, scanner
from forge_station.vlm.bundle_files import read_manifest
from tests import nano_checkpoint
from tests.station import certificates


@pytest.fixture(scope="session")
def bundle(tmp_path_factory) -> Path:
    """A random model that knows the words of the catalogue and accepts every size."""
    folder = tmp_path_factory.mktemp("catalogue_nano")
    pieces = [piece for model in CATALOGUE for piece in re.findall(r"M\d+|x\d+|\d+|\w+", model.id)]
    extra = [*pieces, "batch", "majority", "assembly", "missing:", "right", "wrong"]
    known = list(nano_checkpoint.WORDS)
    try:
        nano_checkpoint.WORDS[:] = list(dict.fromkeys([*known, *extra]))
        nano_checkpoint.write_checkpoint(folder / "checkpoint", nano_checkpoint.word_tokenizer())
    finally:
        nano_checkpoint.WORDS[:] = known
    release = Release("nano", "0.1.0", 1, "fp32", thresholds={"size_tolerance": 100.0})
    write_bundle(folder / "checkpoint", folder / "bundle", release)
    return folder / "bundle"


@pytest.fixture(scope="session")
def inspector(bundle):
    opened = open_inspector(bundle, threads=1)
    with opened.model:
        yield opened


@pytest.fixture(scope="session")
def bolt_stl(tmp_path_factory) -> Path:
    """A nominal bolt M8x30 as ASCII STL, in mm."""
    path = tmp_path_factory.mktemp("mesh") / "bolt.stl"
    mesh = fasteners.build(by_id("hex_bolt M8x30"))
    lines = ["solid bolt"]
    for corners in mesh.vertices[mesh.faces]:
        lines += ["facet normal 0 0 0", "outer loop"]
        lines += [f"vertex {x:.5f} {y:.5f} {z:.5f}" for x, y, z in corners]
        lines += ["endloop", "endfacet"]
    path.write_text("\n".join([*lines, "endsolid bolt", ""]))
    return path


@pytest.fixture(scope="session")
def recording(tmp_path_factory) -> Path:
    """A small recorded scan of two nuts from three poses."""
    folder = tmp_path_factory.mktemp("recordings") / "two_nuts"
    rng = np.random.default_rng(0)
    nut = fasteners.build(by_id("hex_nut M8"))
    nut = nut.transformed(translation=[0, 0, -nut.bounds()[0][2]])
    nuts = [nut.transformed(translation=[x, 0, 0]) for x in (-13.0, 13.0)]
    rig = scanner.rig(scanner.scale_for(44, 20, 8), "overhead_front_side", (320, 240))
    stacks = [scanner.simulate(nuts, pose, rng, exposures=(1.0,)) for pose in rig]
    replay.write(folder, stacks, {pose.digest: pose for pose in rig})
    return folder


def command(*words: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    offline.add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


def inspected(inspector, path: Path, **options: object) -> Verdict:
    (item,) = sources.items_of([path], sources.Options(**options))
    return intake.inspect(inspector, item, intake.Request(sources.Options(**options))).verdict


def tray_points(parts: int = 1, pixel_mm: float = 0.25, turn_deg: float = 20.0) -> np.ndarray:
    """Height map [H, W, 3] mm of a tray z = 0 with blocks of 16 x 6 x 5 mm, 24 mm apart.

    The blocks are turned against the rows of the map, as parts lie on a real tray.
    """
    x, y = np.meshgrid(np.arange(-20, 24 * parts - 4, pixel_mm), np.arange(-14, 14, pixel_mm))
    cos, sin = np.cos(np.deg2rad(turn_deg)), np.sin(np.deg2rad(turn_deg))
    z = np.random.default_rng(1).normal(0, 0.01, x.shape)
    for k in range(parts):
        along, across = cos * (x - 24 * k) + sin * y, cos * y - sin * (x - 24 * k)
        z[(np.abs(along) < 8) & (np.abs(across) < 3)] += 5.0
    return np.stack([x, y, z], -1).astype(np.float32)


def write_npz(path: Path, points: np.ndarray, **fields: object) -> Path:
    np.savez(path, points=points, **fields)
    return path


# ---------------------------------------------------------------- what it does


def test_help_teaches_inputs_exit_codes_and_examples():
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter)
    offline.add_arguments(parser)
    text = parser.format_help()
    for word in (
        *("manifest.yaml", ".ply .pcd .npz .xyz", ".obj .stl", "--mm-per-px", "photo"),
        *("--code-step 2 --codes 1024x768", "0 PASS, 1 FAIL, 2 UNSURE, 3 ERROR", "64"),
    ):
        assert word in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_recording_is_decoded_read_and_stored(bundle, recording, tmp_path, capsys):
    code = offline.run(command(recording, "--bundle", bundle, "--out", tmp_path / "out"))
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    verdict = Verdict.from_dict(json.loads(line))
    assert (code, verdict.outcome.value) == (2, "UNSURE")
    assert [reason.code for reason in verdict.reasons] == ["NOT_CHECKED"]
    assert [part.mark for part in verdict.parts] == ["A", "B"]
    assert all(part.part and part.size_mm for part in verdict.parts)
    for part in verdict.parts:
        assert part.size_mm == pytest.approx((15.0, 13.0, 6.7), abs=0.8)
    assert verdict.scan.points > 50_000
    assert verdict.scan.poses == 3
    assert 0 < verdict.scan.quality["plane_residual_std_mm"] < 0.1
    assert verdict.scan.source == f"{recording}: recorded scan"
    assert [reading.mark for reading in verdict.surface] == ["A", "B"]
    assert json.loads((tmp_path / "out/two_nuts.verdict.json").read_text()) == json.loads(line)
    picture = cv2.imread(str(tmp_path / "out/two_nuts.png"))
    assert picture.shape == (900, 1280, 3)
    assert "two_nuts: UNSURE" in err


@pytest.fixture(scope="session")
def certified_bundle(bundle, tmp_path_factory) -> Path:
    """A copy of the bundle with a certificate for real scans and any score, see `certificates`."""
    folder = tmp_path_factory.mktemp("certified") / "bundle"
    shutil.copytree(bundle, folder)
    window = {"valid_from": "2020-01-01T00:00:00Z", "expires": "2999-01-01T00:00:00Z"}
    digest = read_manifest(folder).model_sha256
    found = certificates.certificate(999.0, simulated=False, model_sha256=digest, **window)
    certificates.write(folder, found)
    return folder


def test_without_a_certificate_or_its_key_what_would_pass_is_unsure(
    bundle, certified_bundle, recording, inspector, tmp_path, capsys
):
    line = tmp_path / "line.yaml"
    read = dict(Counter(part.part for part in inspected(inspector, recording).parts))
    line.write_text(yaml.safe_dump({"line": "test", "products": [kit_of(read)]}))
    key = base64.b64encode(certificates.public(certificates.OTHER_KEY).raw).decode()
    for folder, more, said in (
        (bundle, [], "has no certificate.json"),
        (certified_bundle, [], "trusts no key"),
        (certified_bundle, ["--trusted-key", key], "does not trust"),
    ):
        words = [recording, "--bundle", folder, "--line", line, "--part-number", "P", *more]
        code = offline.run(command(*words, "--out", tmp_path))
        out, err = capsys.readouterr()
        (reason,) = json.loads(out)["reasons"]
        assert (code, reason["code"]) == (2, "NO_CERTIFICATE")
        assert said in reason["text"] and err.startswith("ADVISORY, no part will be called PASS")


def kit_of(parts: dict[str, int]) -> dict[str, object]:
    rules = {"min_reading_probability": 0.0}
    kit = {"part_number": "P", "kind": "assembly", "parts": parts, "rules": rules}
    return {**kit, "checks": ["assembly"]}


def test_pass_is_0_and_fail_is_1(certified_bundle, recording, inspector, tmp_path, capsys):
    key = base64.b64encode(certificates.public().raw).decode()
    read = dict(Counter(part.part for part in inspected(inspector, recording).parts))
    for parts, expected, codes in ((read, 0, []), ({**read, "pin 6x20": 1}, 1, ["MISSING_PART"])):
        line = tmp_path / "line.yaml"
        line.write_text(yaml.safe_dump({"line": "test", "products": [kit_of(parts)]}))
        words = [recording, "--bundle", certified_bundle, "--line", line, "--part-number", "P"]
        code = offline.run(command(*words, "--trusted-key", key, "--out", tmp_path))
        verdict = json.loads(capsys.readouterr().out)
        assert [reason["code"] for reason in verdict["reasons"]] == codes
        assert (code, verdict["product"], verdict["line"]) == (expected, "P", "test")


def test_the_exit_code_of_several_is_the_worst(bundle, recording, tmp_path, capsys):
    missing = tmp_path / "away.npz"
    words = [missing, recording, missing, "--bundle", bundle, "--out", tmp_path]
    assert offline.run(command(*words)) == 3
    outcomes = [json.loads(line)["outcome"] for line in capsys.readouterr().out.splitlines()]
    assert outcomes == ["ERROR", "UNSURE", "ERROR"]
    names = {path.name for path in tmp_path.iterdir()}
    assert {"away.png", "away-2.png", "two_nuts.png"} <= names


def test_a_mesh_is_scanned_and_decoded(inspector, bolt_stl):
    verdict = inspected(inspector, bolt_stl)
    assert "scanned by the simulated head from 4 poses and decoded" in verdict.scan.source
    assert verdict.simulated
    assert verdict.scan.calibration
    (part,) = verdict.parts
    assert part.size_mm is not None
    assert 34 < part.size_mm[0] < 37
    assert part.size_mm[1] == pytest.approx(14.5, abs=1.2)


def test_a_vertex_of_no_face_is_no_part_of_a_mesh(tmp_path):
    path = tmp_path / "tetra.obj"
    path.write_text(
        "v 900 900 900\nv 0 0 0\nv 9 0 0\nv 0 9 0\nv 0 0 9\nf 2 4 3\nf 2 3 5\nf 2 5 4\nf 3 4 5\n"
    )
    (item,) = sources.items_of([path], sources.Options())
    mesh = sources.read_mesh(item, sources.Options())
    assert mesh.vertices.max() == 9
    assert mesh.faces.tolist() == [[0, 2, 1], [0, 1, 3], [0, 3, 2], [1, 2, 3]]


def test_a_mesh_can_be_sampled_instead(inspector, bolt_stl):
    (item,) = sources.items_of([bolt_stl], sources.Options())
    request = intake.Request(sources.Options(), direct=True)
    verdict = intake.inspect(inspector, item, request).verdict
    assert "sampled, not scanned, as asked for" in verdict.scan.source
    assert not verdict.simulated
    assert verdict.parts[0].size_mm[0] == pytest.approx(35.3, abs=0.4)


def test_without_the_extra_a_mesh_is_sampled(inspector, bolt_stl, monkeypatch):
    monkeypatch.delattr(forge_station.sim, "scanner")
    monkeypatch.setitem(sys.modules, "forge_station.sim.scanner", None)
    verdict = inspected(inspector, bolt_stl)
    assert "sampled, not scanned, for want of" in verdict.scan.source
    assert verdict.outcome.value == "UNSURE"


def cloud_files(folder: Path, points: np.ndarray) -> dict[str, Path]:
    flat = points.reshape(-1, 3)
    write_npz(folder / "organised.npz", points, unit="mm", frame="tray")
    write_npz(folder / "turned.npz", points @ np.array([[1, 0, 0], [0, 0, 1], [0, -1, 0.0]]))
    cloud_io.write_cloud(folder / "flat.ply", Cloud(flat, None, 0.25))
    np.savetxt(folder / "text.xyz", flat, fmt="%.4f")
    header = "VERSION .7\nFIELDS x y z\nSIZE 4 4 4\nTYPE F F F\nCOUNT 1 1 1\n"
    header += f"WIDTH {points.shape[1]}\nHEIGHT {points.shape[0]}\nPOINTS {len(flat)}\n"
    (folder / "bin.pcd").write_bytes(header.encode() + b"DATA binary\n" + flat.tobytes())
    return {path.stem: path for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["organised", "turned", "flat", "text", "bin"])
def test_a_cloud_on_a_tray_of_every_format(inspector, tmp_path, name):
    path = cloud_files(tmp_path, tray_points())[name]
    verdict = inspected(inspector, path)
    (part,) = verdict.parts
    assert part.size_mm == pytest.approx((16, 6, 5), abs=0.6)
    assert verdict.scan.points > 15_000
    assert str(path) in verdict.scan.source
    assert [reason.code for reason in verdict.reasons] == ["NOT_CHECKED"]


def test_a_bare_cloud_is_one_part(inspector, tmp_path):
    size = np.array([16.0, 6.0, 4.9])
    rng = np.random.default_rng(0)
    areas = size.prod() / size
    points = rng.random((30_000, 3)) * size
    face = rng.choice(3, len(points), p=areas / areas.sum())
    points[np.arange(len(points)), face] = rng.integers(0, 2, len(points)) * size[face]
    verdict = inspected(inspector, write_npz(tmp_path / "bare.npz", points))
    assert "one bare part without a tray" in verdict.scan.source
    assert verdict.parts[0].size_mm == pytest.approx(size, abs=0.3)


def draw_views(folder: Path, ground: int = 0, top_scale: float = 1.0) -> list[Path]:
    """A block of 40 x 16 x 12 mm at 0.25 mm a pixel, before a plain background."""
    paths = []
    for view, size in (("front", (48, 160)), ("side", (48, 64)), ("top", (64, 160))):
        image = np.full((200, 220), ground, np.uint8)
        rows, columns = (round(n * (top_scale if view == "top" else 1)) for n in size)
        image[20 : 20 + rows, 30 : 30 + columns] = 180
        paths.append(folder / f"block_{view}.png")
        cv2.imwrite(str(paths[-1]), image)
    return paths


@pytest.mark.parametrize("ground", [0, 255])
def test_ready_views_are_read_but_not_judged(bundle, tmp_path, capsys, ground, repository):
    line = repository / "station_config/demo/line.yaml"
    words = [*draw_views(tmp_path, ground), "--mm-per-px", 0.25, "--bundle", bundle]
    words += ["--line", line, "--part-number", "FNUT-M10", "--out", tmp_path / "out"]
    assert offline.run(command(*words)) == 2
    verdict = Verdict.from_dict(json.loads(capsys.readouterr().out))
    assert [reason.code for reason in verdict.reasons] == ["NOT_CHECKED"]
    assert verdict.parts[0].size_mm == pytest.approx((40, 16, 12))
    assert verdict.parts[0].part
    assert (tmp_path / "out/block.png").is_file()


def test_a_photo_is_read_but_not_judged(inspector, tmp_path):
    photo = tmp_path / "IMG_0001.jpg"
    cv2.imwrite(str(photo), np.random.default_rng(0).integers(0, 255, (90, 120, 3), np.uint8))
    verdict = inspected(inspector, photo)
    assert [reason.code for reason in verdict.reasons] == ["NOT_CHECKED"]
    assert verdict.outcome.value == "UNSURE"
    assert verdict.parts[0].part
    assert verdict.parts[0].size_mm is None
    assert verdict.scan.source == "IMG_0001.jpg: photo"


# ---------------------------------------------------------------- bad data: an ERROR or UNSURE


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


def test_a_stack_of_another_calibration_is_an_error(inspector, recording):
    known = replay.read(recording)
    first: PatternStack = known.stacks[0]
    given = sources.Stacks((replace(first, calibration_digest="f" * 64),), known.calibrations, "x")
    with pytest.raises(StationError, match="taken with calibration ffffffffffff"):
        intake.from_stacks(inspector, given, intake.job_of("x", intake.Request(sources.Options())))
