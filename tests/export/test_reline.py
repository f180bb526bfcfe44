"""A bundle for another line: the same graphs, other rules, a certificate as long as it holds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from export.reline import Relined, reline
from forge_station.config import load_line
from forge_station.contract import certificate
from forge_station.contract.catalogue import by_id
from forge_station.contract.certificate import CERTIFICATE_NAME
from forge_station.contract.error import StationError
from forge_station.contract.manifest import GOLDEN
from forge_station.contract.seal import SEAL_NAME
from forge_station.errors import InputError
from forge_station.geometry import reference_io
from forge_station.vlm.bundle_files import verify_folder

LINE = """\
line: clamping
products:
  - {part_number: C, kind: batch, parts: {cap_nut M10: 4}, checks: [workpiece]}
"""
SURFACE = LINE.replace("cap_nut M10: 4", "pin 8x24: 1").replace("batch", "single")


@pytest.fixture
def demo(repository: Path) -> Path:
    return repository / "station_config/demo/bundle"


def line_file(folder: Path, text: str = LINE) -> Path:
    path = folder / "line.yaml"
    path.write_text(text)
    return path


def test_other_rules_keep_graphs_and_certificate(demo: Path, tmp_path: Path) -> None:
    before = verify_folder(demo).manifest
    wanted = Relined(line_file(tmp_path), "clamping", "0.2.0", 7)
    seen: list[bool] = []
    manifest, kept = reline(
        demo, tmp_path / "b", wanted, lambda folder: seen.append(verify_folder(folder) is not None)
    )
    assert verify_folder(tmp_path / "b").manifest == manifest
    assert seen == [True], "the golden set is made by a bundle that is whole"
    assert (manifest.name, manifest.line, manifest.release_counter) == ("clamping", "clamping", 7)
    ours = (".md", ".yaml", *GOLDEN)
    graphs = [name for name in before.files if not name.endswith(ours)]
    assert not set(GOLDEN) & manifest.files.keys(), "that of the other line's parts"
    assert {name: manifest.files[name] for name in graphs} == {
        name: before.files[name] for name in graphs
    }
    assert kept and manifest.model_sha256 == before.model_sha256
    assert (tmp_path / "b" / CERTIFICATE_NAME).read_bytes() == (
        demo / CERTIFICATE_NAME
    ).read_bytes()
    assert not (tmp_path / "b" / SEAL_NAME).exists(), "whoever releases it signs it"
    assert before.sha256 in (tmp_path / "b" / "MODEL_CARD.md").read_text()


def test_the_line_of_the_example_is_covered_by_the_certificate_that_comes_along(
    repository: Path, demo: Path, tmp_path: Path
) -> None:
    file = repository / "examples/new_line/line.yaml"
    _, kept = reline(demo, tmp_path / "b", Relined(file, "clamping"))
    assert kept
    signed = certificate.parse((tmp_path / "b" / CERTIFICATE_NAME).read_bytes())
    for product in load_line(file).products:
        families = {by_id(part).workpiece for part in product.parts}
        assert certificate.uncovered(signed.certificate, product, families, True) is None


@pytest.mark.parametrize("change", ["thresholds", "references"])
def test_what_decides_otherwise_has_no_certificate(demo: Path, tmp_path: Path, change: str) -> None:
    wanted = Relined(line_file(tmp_path), "clamping", thresholds={"size_tolerance": 0.5})
    if change == "references":
        found = dict(list(reference_io.load(demo / reference_io.FILE).items())[:1])
        reference_io.save(tmp_path / "r.npz", found)
        wanted = Relined(line_file(tmp_path), "clamping", references=tmp_path / "r.npz")
    manifest, kept = reline(demo, tmp_path / "b", wanted)
    assert not kept and not (tmp_path / "b" / CERTIFICATE_NAME).exists()
    assert manifest.model_sha256 != verify_folder(demo).manifest.model_sha256


def test_a_surface_without_a_reference_and_a_damaged_bundle_are_refused(
    demo: Path, tmp_path: Path
) -> None:
    text = SURFACE.replace("[workpiece]", "[workpiece, surface]")
    with pytest.raises(InputError, match="parts without a reference"):
        reline(demo, tmp_path / "b", Relined(line_file(tmp_path, text), "pins"))
    copy = tmp_path / "copy"
    shutil.copytree(demo, copy)
    np.save(copy / "embed.npy", np.zeros(3, np.float32))
    with pytest.raises(StationError, match=r"embed\.npy"):
        reline(copy, tmp_path / "b", Relined(line_file(tmp_path), "clamping"))
    with pytest.raises(InputError, match="output folder exists"):
        reline(demo, copy, Relined(line_file(tmp_path), "clamping"))
    assert not (tmp_path / "b").exists() and not list(tmp_path.glob("*.partial"))
    assert json.loads((copy / "manifest.json").read_text())["name"] == "demo-nano"
