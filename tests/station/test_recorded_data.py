"""The shipped bundle on data that nobody here made: a real capture and foreign meshes."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="meshes are scanned with the extra demo")

from forge_station import offline
from forge_station.contract.verdict import Verdict

DATA = Path(__file__).parents[2].parent / "shared" / "data"
SHIPPED = Path(__file__).parents[2] / "station_config" / "demo" / "bundle"
pytestmark = [
    pytest.mark.realdata,
    pytest.mark.skipif(not DATA.is_dir(), reason="recorded data not beside the checkout"),
]


def run(*words: object) -> int:
    parser = argparse.ArgumentParser()
    offline.add_arguments(parser)
    return offline.run(parser.parse_args([str(w) for w in (*words, "--bundle", SHIPPED)]))


def test_the_real_capture_is_decoded_and_never_passes(tmp_path, capsys):
    folder = DATA / "procam_capture"
    words = [folder / "capture_0", "--calibration", folder / "calibration_result.xml"]
    assert run(*words, "--code-step", 2, "--codes", "1024x768", "--out", tmp_path) in (2, 3)
    verdict = Verdict.from_dict(json.loads(capsys.readouterr().out))
    assert verdict.outcome.value in ("UNSURE", "ERROR")
    assert verdict.reasons
    assert verdict.scan.points > 300_000
    assert verdict.scan.quality["plane_points"] > 200_000
    assert 1.0 < verdict.scan.quality["plane_residual_std_mm"] < 5.5
    assert verdict.scan.quality["reprojection_px"] < 1.5
    assert (tmp_path / "capture_0.png").is_file()


@pytest.mark.parametrize(("name", "length_mm"), [("bolt_m8_loose", 27.2), ("bolt_m16_loose", 43.7)])
def test_foreign_meshes_are_measured_in_views_of_a_decoded_scan(name, length_mm, tmp_path, capsys):
    run(DATA / "factory_meshes" / f"factory_{name}.obj", "--out", tmp_path)
    verdict = Verdict.from_dict(json.loads(capsys.readouterr().out))
    assert "taken as metre" in verdict.scan.source
    assert "scanned by the simulated head from 4 poses and decoded" in verdict.scan.source
    assert verdict.parts[0].size_mm[0] == pytest.approx(length_mm, abs=0.6)


def test_the_size_of_foreign_meshes_is_read_right(tmp_path, capsys):
    meshes = sorted((DATA / "factory_meshes").glob("*.obj"))
    run(*meshes, "--out", tmp_path)
    for line, mesh in zip(capsys.readouterr().out.splitlines(), meshes, strict=True):
        size = re.search(r"_(m\d+)_", mesh.name)[1].upper()
        (part,) = json.loads(line)["parts"]
        assert part["model_number"].split("x")[0] == size, (mesh.name, part)
