"""`forge-station inspect`: every kind of input, exit codes and files."""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections import Counter

import cv2
import numpy as np
import pytest
import yaml

import forge_station.sim
from forge_station import intake, offline, sources
from forge_station.contract.verdict import Verdict
from tests.station import certificates
from tests.station.offline_inputs import (
    cloud_files,
    command,
    draw_views,
    inspected,
    tray_points,
    write_npz,
)


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
