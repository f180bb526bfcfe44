"""The golden set: the same device agrees with itself, and every difference is found."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="parts are simulated")
pytest.importorskip("torch", reason="the bundle is exported here")

from export import golden as golden_export
from forge_station import cli, golden
from forge_station.bundles import archive
from forge_station.capture.base import Cloud
from forge_station.contract.manifest import MANIFEST_NAME, FileEntry
from forge_station.errors import BundleError, InputError
from forge_station.golden import Report, Tolerance
from forge_station.opening import open_inspector
from forge_station.vlm.bundle_files import read_manifest
from tests.station.fake_model import PIXEL_MM, part_cloud, tray_points

NUT, BOLT = "hex_nut M8", "hex_bolt M8x30"
EXACT = Tolerance(1.0, 600_000.0)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two scans that can be used, and a case that cannot."""
    folder = tmp_path_factory.mktemp("cases")
    lines: list[dict[str, Any]] = [{"id": "views-only", "input": {"views": {}}}]
    for part, checks in ((NUT, ["workpiece", "surface"]), (BOLT, ["workpiece"])):
        name = f"{part.split()[0]}.npz"
        points = tray_points([part_cloud(part)])
        facts = {"unit": "mm", "frame": "tray", "camera_pixel_mm": PIXEL_MM, "poses": 4}
        np.savez(folder / name, points=points, **facts)  # type: ignore[arg-type]
        product = {"part_number": part.split()[0], "kind": "single", "checks": checks,
                   "parts": {part: 1}}  # fmt: skip
        lines.append({"id": name, "input": {"scene": name}, "product": product})
    text = "\n".join(json.dumps(line) for line in lines)
    (folder / "cases.jsonl").write_text(text)
    return folder


@pytest.fixture(scope="module")
def golden_bundle(bundle: Path, cases: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden") / "bundle"
    shutil.copytree(bundle, folder)
    golden_export.write(folder, cases, 5)
    return folder


def judged(folder: Path, change: Any = None, tolerance: Tolerance = EXACT) -> Report:
    found = golden.read(folder)
    assert found is not None
    known, arrays = found
    if change is not None:
        first = change(known.cases[0])
        known = replace(known, cases=(first, *known.cases[1:]))
    inspector = open_inspector(folder)
    with inspector.model:
        return golden.run(inspector, known, arrays, tolerance)


def test_the_device_that_made_it_agrees_though_it_has_no_certificate(golden_bundle: Path) -> None:
    report = judged(golden_bundle)
    assert (report.cases, report.different, report.grid_iou, report.fault) == (2, (), 1.0, None)
    assert report.p99_ms > 0


def expecting(**changes: Any) -> Any:
    return lambda case: replace(case, expected=replace(case.expected, **changes))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (expecting(outcome="ERROR"), "outcome, expected ERROR"),
        (expecting(parts={"A": "washer M99"}), "parts, expected"),
        (expecting(classes={"A": "rust"}), "classes, expected"),
        (expecting(grids={"A/front": tuple((r, c) for r in range(16) for c in range(16))}), "grid"),
    ],
)
def test_a_device_that_says_something_else_is_found(
    golden_bundle: Path, change: Any, said: str
) -> None:
    fault = judged(golden_bundle, change).fault
    assert fault is not None and said in fault


def test_a_device_that_is_too_slow_is_found(golden_bundle: Path) -> None:
    assert "p99" in (judged(golden_bundle, tolerance=Tolerance(1.0, 0.001)).fault or "")


def packed(golden_bundle: Path, folder: Path, edit: Any = None) -> Path:
    """A whole bundle with its golden set, or with what `edit` makes of that."""
    shutil.copytree(golden_bundle, folder)
    if edit is not None:
        content = json.loads((folder / golden.NOTE).read_text())
        edit(content)
        (folder / golden.NOTE).write_text(json.dumps(content))
    plain = read_manifest(folder)
    names = (golden.NOTE, golden.ARRAYS)
    entries = {name: FileEntry.of((folder / name).read_bytes()) for name in names}
    manifest = replace(plain, files={**plain.files, **entries})
    (folder / MANIFEST_NAME).write_bytes(manifest.to_json())
    return folder


def test_the_command_verify_runs_the_self_test_where_it_is_asked_for(
    golden_bundle: Path, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verify = ["bundle", "verify", "--unsigned", "--self-test"]
    whole = packed(golden_bundle, tmp_path / "whole")
    archive.pack(whole, tmp_path / "whole.fsb")
    for path in (whole, tmp_path / "whole.fsb"):
        assert cli.main([*verify, str(path)]) == 0
        assert "self-test: 2 golden parts, 0 differences" in capsys.readouterr().out

    def expect_an_error(content: Any) -> None:
        content["cases"][0]["expected"]["outcome"] = "ERROR"

    other = packed(golden_bundle, tmp_path / "other", expect_an_error)
    assert cli.main([*verify, str(other)]) == 1
    assert "1 of 2 golden parts judged otherwise" in capsys.readouterr().err
    assert cli.main([*verify, str(bundle)]) == 1
    assert "has no golden set" in capsys.readouterr().err


def test_the_set_is_no_part_of_what_a_certificate_is_for(golden_bundle: Path) -> None:
    plain = read_manifest(golden_bundle)
    entry = FileEntry.of(b"x")
    more = replace(plain, files={**plain.files, "golden.npz": entry, "golden.json": entry})
    assert more.model_sha256 == plain.model_sha256 and more.sha256 != plain.sha256


@pytest.mark.parametrize("content", ["", "{}", '{"cases": []}', "[]"])
def test_a_damaged_set_is_one_clear_error(
    golden_bundle: Path, tmp_path: Path, content: str
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(golden_bundle, folder)
    (folder / golden.NOTE).write_text(content)
    with pytest.raises(BundleError, match="golden set cannot be read"):
        golden.read(folder)
    (folder / golden.NOTE).unlink()
    assert golden.read(folder) is None


def test_cases_without_a_scan_are_no_golden_set(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "cases.jsonl").write_text('{"id": "x", "input": {}}\n')
    with pytest.raises(InputError, match="no case for the golden set"):
        golden_export.write(bundle, tmp_path, 3)


def test_a_large_scan_is_thinned_and_says_that_it_is_coarser() -> None:
    cloud = Cloud(np.zeros((900, 3), np.float32), None, 0.1)
    found = golden_export.thinned(cloud, 100)
    assert len(found.points) == 100 and found.camera_pixel_mm == pytest.approx(0.3)
