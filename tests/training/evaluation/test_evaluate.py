"""Cases through the station's code with a random bundle: every kind of input, good and bad."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from forge_station.capture import replay
from forge_station.capture.base import Cloud
from forge_station.contract.catalogue import by_id
from forge_station.contract.manifest import PhotoInput, Vocabulary
from forge_station.contract.views import SURFACE_CHANNELS
from forge_station.errors import InputError
from forge_station.geometry import cloud_io
from forge_station.pipeline import Inspector
from forge_station.sim import fasteners, rest_pose, scanner
from forge_station.sim.mesh import Mesh, sample_surface
from training import evaluate
from training.evaluation import by_station
from training.evaluation.by_station import Settings, run_case
from training.evaluation.case_files import FILE, BadCase, read_cases
from training.evaluation.rows import Row
from training.evaluation.run import one_by_one, selected
from training.evaluation.run import run as run_cases

NUT = "hex_nut M8"
SINGLE = {"part_number": "N", "kind": "single", "checks": ["workpiece"], "parts": {NUT: 1}}
SURFACE = {**SINGLE, "checks": ["surface"]}
KIT = {"part_number": "K", "kind": "assembly", "checks": ["assembly"], "parts": {NUT: 2}}


def nut() -> Mesh:
    return fasteners.build(by_id(NUT))


def run(folder: Path, inspector: Inspector, **fields: Any) -> Row:
    line = {"id": "x", "task": "workpiece", "product": SINGLE, "truth": {}, **fields}
    (folder / FILE).write_text(json.dumps(line))
    (case,) = read_cases(folder)
    return run_case(inspector, case, Settings(folder))


def write_obj(path: Path, mesh: Mesh) -> None:
    lines = [f"v {x:.5f} {y:.5f} {z:.5f}" for x, y, z in mesh.vertices]
    lines += [f"f {a + 1} {b + 1} {c + 1}" for a, b, c in mesh.faces]
    path.write_text("\n".join(lines) + "\n")


def write_cloud(path: Path, *offsets_mm: float, tray: bool = False) -> int:
    """Nuts at x offsets, sampled all around; returns the number of points."""
    rng = np.random.default_rng(0)
    points = [
        sample_surface(rest_pose.settle(nut()), 6000, rng)[0] + np.array([x, 0, 0])
        for x in offsets_mm
    ]
    if tray:
        flat = rng.uniform((-40, -30, 0), (40, 30, 0), (40000, 3))
        points.append(flat + rng.normal(0, 0.02, flat.shape))
    xyz = np.concatenate(points).astype(np.float32)
    cloud_io.write_cloud(path, Cloud(xyz, None, 0.25, frame="tray" if tray else "unknown"))
    return len(xyz)


def write_views(folder: Path, mark: str = "A") -> dict[str, Any]:
    """Three views of a block 40 x 20 x 10 mm at 0.5 mm a pixel."""
    files: dict[str, Any] = {"mm_per_px": 0.5}
    for view, (width, height) in {"front": (80, 20), "side": (40, 20), "top": (80, 40)}.items():
        image = np.zeros((100, 120), np.uint8)
        image[30 : 30 + height, 10 : 10 + width] = 150
        name = f"{mark}-{view}.png"
        cv2.imwrite(str(folder / name), image)
        files[view] = name
    return files


def test_simulated_cases_give_a_row_a_table_and_one_json_object(
    simulated: Path,
    inspector: Inspector,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(by_station, "opened", lambda *_: inspector)
    monkeypatch.setattr(type(inspector.model), "close", lambda self: None)
    arguments = ["evaluate", "--bundle", "b", "--cases", str(simulated), "--probes"]
    arguments += ["--out", str(tmp_path / "rows.jsonl"), "--figures", str(tmp_path / "f.json")]
    arguments += ["--html", str(tmp_path / "report.html"), "--by", "workpiece"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert evaluate.main() == 0
    printed = capsys.readouterr().out.strip().splitlines()
    figures = json.loads(printed[-1])
    assert figures == json.loads((tmp_path / "f.json").read_text())
    assert [figures[task]["cases"] for task in ("workpiece", "assembly", "surface")] == [1, 1, 1]
    assert figures["workpiece"]["count_right"]["value"] == 1.0
    assert figures["surface"]["grid_iou"]["n"] == 1
    assert any("reading: workpiece and model number" in line for line in printed)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 3 and all(row["model_ms"] > 0 and not row["error"] for row in rows)
    for row in rows:
        assert row["outcome"] in ("PASS", "FAIL", "UNSURE")
        if row["task"] != "surface":
            assert all(m["read"] and m["picture"] and m["nearest"] for m in row["marks"])
            assert row["direct"] in (*(mark["mark"] for mark in row["marks"]), "none")
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page and "http" not in page.replace("http://www.w3.org", "")
    assert all(f'id="row-{row["id"]}"' in page for row in rows)
    assert figures["surface"]["detail"]["confusion"]["truth"][0] == "normal"
    # A second run answers nothing again, and gives the same figures.
    monkeypatch.setattr(by_station, "run_case", lambda *_, **__: pytest.fail("asked again"))
    assert evaluate.main() == 0
    again = capsys.readouterr()
    assert "3 rows of the same run were kept" in again.err
    assert json.loads(again.out.strip().splitlines()[-1]) == figures


def test_stored_grids_and_stored_points_agree(simulated: Path, inspector: Inspector) -> None:
    for case in read_cases(simulated):
        if case.task != "surface":
            continue
        row = run_case(inspector, case, Settings(simulated))
        stored = [
            (view, r, c)
            for view, name in enumerate(("front", "side", "top"))
            for r, c in case.truth.grids[name]  # type: ignore[union-attr,index]
        ]
        # Rounding of the stored cloud may move a point across the border of a cell.
        assert len(set(stored) ^ set(row.cells_true or ())) <= 0.1 * len(stored)


def test_a_mesh_and_a_bare_cloud_a_mark(tmp_path: Path, inspector: Inspector) -> None:
    write_obj(tmp_path / "a.obj", nut())
    write_cloud(tmp_path / "b.ply", 0.0)
    row = run(
        tmp_path, inspector, task="assembly", product=KIT,
        input={"clouds": {"A": "a.obj", "B": "b.ply"}},
        truth={"readings": {"A": NUT, "B": NUT}, "answer": "none", "missing": [], "violations": 0},
    )  # fmt: skip
    assert row.error == "" and row.parts_seen == 2 and row.source == "clouds"
    assert [mark.nearest for mark in row.marks] == [NUT, NUT]
    assert row.gauge_answer == "none" and row.score is not None


def test_a_cloud_file_of_the_whole_tray(tmp_path: Path, inspector: Inspector) -> None:
    write_cloud(tmp_path / "t.ply", -20.0, 20.0, tray=True)
    row = run(tmp_path, inspector, task="assembly", product=KIT, input={"scene": "t.ply"})
    assert row.error == "" and row.parts_seen == 2


def test_a_folder_of_pattern_images(tmp_path: Path, inspector: Inspector) -> None:
    rng = np.random.default_rng(1)
    mesh = rest_pose.settle(nut())
    rig = scanner.rig(scanner.scale_for(20, 20, 10), "front_side", (320, 240))
    stacks = [scanner.simulate(mesh, pose, rng, exposures=(0.6,)) for pose in rig]
    replay.write(tmp_path / "scan", stacks, {pose.digest: pose for pose in rig})
    row = run(
        tmp_path, inspector, input={"scan": "scan"},
        truth={"readings": {"A": NUT}, "answer": "none"},
    )  # fmt: skip
    assert row.error == "" and row.parts_seen == 1 and row.expected == "PASS"


def test_views_are_read_and_left_unsure(tmp_path: Path, inspector: Inspector) -> None:
    views = {"A": write_views(tmp_path), "B": write_views(tmp_path, "B")}
    row = run(tmp_path, inspector, task="assembly", product=KIT, input={"views": views},
              truth={"readings": {"A": NUT, "B": NUT}, "answer": "none"})  # fmt: skip
    assert row.outcome == "UNSURE" and "NOT_CHECKED" in row.reasons
    assert all(mark.read and mark.nearest for mark in row.marks) and row.direct


def test_masks_are_placed_as_their_view_is(tmp_path: Path, inspector: Inspector) -> None:
    mask = np.zeros((100, 120), np.uint8)
    mask[30:40, 10:20] = 1  # the left upper corner of the part in its top view
    cv2.imwrite(str(tmp_path / "mask.png"), mask)
    row = run(
        tmp_path, inspector, task="surface", product=SURFACE,
        input={"views": {"A": write_views(tmp_path)}},
        truth={"defect": "dent", "masks": {"top": "mask.png"}},
    )  # fmt: skip
    assert row.error == "" and row.outcome in ("UNSURE", "FAIL")
    cells = row.cells_true or ()
    assert cells and {view for view, _, _ in cells} == {2}
    # The part fills 13/14 of the width and half of that in height: rows 4..11, columns 0..15.
    assert all(4 <= r <= 6 and c <= 2 for _, r, c in cells)


def test_a_photo_is_read_and_left_unsure(tmp_path: Path, inspector: Inspector) -> None:
    image = np.random.default_rng(0).integers(0, 255, (90, 120, 3), np.uint8)
    cv2.imwrite(str(tmp_path / "p.png"), image)
    row = run(
        tmp_path, inspector, task="assembly", product=KIT,
        input={"photo": "p.png", "marks": ["A", "B", "C"]},
        truth={"answer": "C", "readings": {"A": NUT, "B": NUT, "C": "pin 6x20"}},
    )  # fmt: skip
    assert row.outcome == "UNSURE" and row.parts_seen == 3 and row.expected == "FAIL"
    assert [mark.nearest for mark in row.marks] == ["", "", ""]


def _truncated(folder: Path) -> dict[str, Any]:
    write_cloud(folder / "t.npz", 0.0)
    (folder / "t.npz").write_bytes((folder / "t.npz").read_bytes()[:1000])
    return {"input": {"scene": "t.npz"}}


def _two_parts(folder: Path) -> dict[str, Any]:
    write_cloud(folder / "two.npz", -20.0, 20.0, tray=True)
    return {"input": {"clouds": {"A": "two.npz"}}}


def _flags_missing(folder: Path) -> dict[str, Any]:
    write_cloud(folder / "s.npz", 0.0, tray=True)
    truth = {"defect": "dent", "points": "s.npz"}
    return {"task": "surface", "product": SURFACE, "input": {"scene": "s.npz"}, "truth": truth}


def _flags_of_another(folder: Path) -> dict[str, Any]:
    np.savez(folder / "f.npz", defect=np.zeros(7, bool))
    return {**_flags_missing(folder), "truth": {"defect": "dent", "points": "f.npz"}}


def _views_disagree(folder: Path) -> dict[str, Any]:
    files = write_views(folder)
    cv2.imwrite(str(folder / files["top"]), np.pad(np.full((9, 9), 99, np.uint8), 20))
    return {"input": {"views": {"A": files}}}


def _mask_of_another_size(folder: Path) -> dict[str, Any]:
    cv2.imwrite(str(folder / "m.png"), np.ones((50, 50), np.uint8))
    truth = {"defect": "dent", "masks": {"top": "m.png"}}
    given = {"views": {"A": write_views(folder)}}
    return {"task": "surface", "product": SURFACE, "input": given, "truth": truth}


def _nan_everywhere(folder: Path) -> dict[str, Any]:
    np.savez(folder / "n.npz", points=np.full((500, 3), np.nan, np.float32))
    return {"input": {"scene": "n.npz"}}


def _no_photo(folder: Path) -> dict[str, Any]:
    (folder / "p.png").write_text("not a picture")
    return {"input": {"photo": "p.png", "marks": ["A"]}}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda _: {"input": {"scene": "none.npz"}}, ["input.scene", "none.npz", "no such file"]),
        (lambda _: {"input": {"scan": "none"}}, ["input.scan", "none", "no such file or folder"]),
        (_truncated, ["t.npz", "truncated or damaged"]),
        (_nan_everywhere, ["n.npz", "no valid point"]),
        (_two_parts, ["clouds.A", "two.npz", "1 part", "got 2"]),
        (_flags_missing, ["truth.points", "s.npz", "defect"]),
        (_flags_of_another, ["f.npz", "got [7]"]),
        (_views_disagree, ["views.A", "do not fit each other"]),
        (_mask_of_another_size, ["truth.masks.top", "m.png", "50x50"]),
        (_no_photo, ["input.photo", "p.png", "not a readable image"]),
    ],
)
def test_a_bad_file_is_one_clear_error_and_counts(
    tmp_path: Path,
    inspector: Inspector,
    make: Callable[[Path], dict[str, Any]],
    words: list[str],
) -> None:
    row = run(tmp_path, inspector, **make(tmp_path))
    assert row.outcome == "ERROR" and "case x" in row.error and "\n" not in row.error
    for word in words:
        assert word in row.error


def test_an_empty_tray_is_an_error_of_the_station_not_of_the_file(
    tmp_path: Path, inspector: Inspector
) -> None:
    write_cloud(tmp_path / "t.npz", tray=True)
    row = run(
        tmp_path, inspector, input={"scene": "t.npz"},
        truth={"readings": {"A": NUT}, "answer": "none"},
    )  # fmt: skip
    assert row.outcome == "ERROR" and "EMPTY_SCENE" in row.reasons and row.error == ""
    assert row.parts_seen == 0 and row.marks[0].read == ""


def test_bad_lines_are_named_and_the_run_goes_on(
    tmp_path: Path, inspector: Inspector, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"id": "x", "task": "workpiece", "product": SINGLE, "truth": {"answer": "none"},
            "input": {"scene": "t.npz"}}  # fmt: skip
    write_cloud(tmp_path / "t.npz", 0.0, tray=True)
    (tmp_path / FILE).write_text("rubbish\n" + json.dumps(good) + "\n")
    mapper = one_by_one(lambda case: run_case(inspector, case, Settings(tmp_path)))
    ran = run_cases(read_cases(tmp_path), mapper, tmp_path / "o.jsonl", "run", quiet=True)
    assert [row.outcome == "ERROR" for row in ran.rows] == [True, False]
    assert f"ERROR {tmp_path / FILE}, line 1: not a line of JSON" in capsys.readouterr().err


def test_the_published_protocol_reads_a_letter_into_none() -> None:
    from forge_station.contract import tasks

    options = ["A", "B", "C", "D", "E", "none"]
    assert tasks.parse_letter("none", options, strict_first_letter=True) == "E"
    assert tasks.parse_letter("none", options) == "none"


def test_limit_counts_by_task() -> None:
    tasks = ("surface", "surface", "workpiece", "surface", "workpiece")
    cases = [BadCase(str(n), task, "") for n, task in enumerate(tasks)]
    assert [case.id for case in selected(cases, 2)] == ["0", "1", "2", "4"]
    assert selected(cases, None) == cases


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--bundle", "b", "--limit", "0"], "--limit: expected 1 or more, got 0"),
        (["--endpoint", "u", "--model", "m", "--threshold", "look_again=1"], "it is for bundles"),
    ],
)
def test_what_would_measure_nothing_is_refused_and_kept_rows_stay(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    expected: str,
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("kept\n")
    arguments = ["evaluate", *words, "--cases", str(tmp_path), "--out", str(rows)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as stopped:
        evaluate.main()
    assert stopped.value.code == 2 and expected in capsys.readouterr().err
    assert rows.read_text() == "kept\n"


def test_sizes_can_be_left_out_of_prompt_and_reading(tmp_path: Path, inspector: Inspector) -> None:
    write_cloud(tmp_path / "t.ply", -20.0, 20.0, tray=True)
    line = {"id": "x", "task": "assembly", "product": KIT, "input": {"scene": "t.ply"},
            "truth": {"readings": {"A": NUT, "B": NUT}, "answer": "none"}}  # fmt: skip
    (tmp_path / FILE).write_text(json.dumps(line))
    (case,) = read_cases(tmp_path)
    on, off = (
        run_case(inspector, case, Settings(tmp_path, sizes=sizes)) for sizes in (True, False)
    )
    assert on.sizes and [mark.nearest for mark in on.marks] == [NUT, NUT]
    assert not off.sizes and off.error == ""
    assert [mark.nearest for mark in off.marks] == ["", ""]
    # Without a size nothing is weighed in: the reading is what the picture says.
    assert [mark.read for mark in off.marks] == [mark.picture for mark in off.marks]
    assert "SIZE_CONTRADICTS" not in off.reasons and off.missing_options == 2


def test_solved_examples_are_refused_with_the_reason(tmp_path: Path, inspector: Inspector) -> None:
    case = read_cases(write_line(tmp_path, {"task": "surface", "product": SURFACE,
                                            "input": {"scene": "s.npz"}, "truth": {}}))  # fmt: skip
    with pytest.raises(InputError, match="never trained on several"):
        by_station.refuse(inspector, Settings(tmp_path, setting="demonstration"), case)
    with pytest.raises(InputError, match="expected difference among the channels"):
        by_station.refuse(inspector, Settings(tmp_path, setting="reference"), case)


def write_line(folder: Path, fields: dict[str, Any]) -> Path:
    (folder / FILE).write_text(json.dumps({"id": "x", **fields}))
    return folder


def test_a_bundle_with_a_reference_channel_is_shown_the_case_s_own_reference(
    tmp_path: Path, inspector: Inspector, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = replace(inspector.model.manifest, surface_channels=SURFACE_CHANNELS)
    monkeypatch.setattr(inspector.model, "manifest", manifest)
    write_cloud(tmp_path / "s.npz", 0.0, tray=True)
    given = {"task": "surface", "product": SURFACE, "truth": {"defect": "normal"},
             "input": {"scene": "s.npz"}}  # fmt: skip
    alone = run(tmp_path, inspector, **given)
    assert alone.setting == "zero-shot" and "NO_REFERENCE" in alone.reasons
    given["input"] = {"scene": "s.npz", "references": ["s.npz"]}
    row = run(tmp_path, inspector, **given)
    assert row.setting == "reference" and "NO_REFERENCE" not in row.reasons and row.error == ""
    (case,) = read_cases(tmp_path)
    left_out = run_case(inspector, case, Settings(tmp_path, setting="zero-shot"))
    assert left_out.setting == "zero-shot" and "NO_REFERENCE" in left_out.reasons


def photo_bundle(inspector: Inspector, monkeypatch: pytest.MonkeyPatch) -> None:
    """The random bundle as if it had been trained on photos of a line with its own words."""
    words = Vocabulary(("normal", "blowhole", "fray"), ("screw", "none"))
    photo = PhotoInput(224, 224)
    manifest = replace(inspector.model.manifest, vocabulary=words, photo=photo)
    monkeypatch.setattr(inspector.model, "manifest", manifest)


TILE = {"part_number": "TILE", "kind": "single", "checks": ["surface"],
        "parts": {"magnetic_tile": 1}, "photo": True}  # fmt: skip
BLOCK = {"part_number": "BLOCK", "kind": "assembly", "checks": ["assembly"],
         "parts": {"screw": 3}, "photo": True}  # fmt: skip


def write_photo(folder: Path) -> None:
    image = np.random.default_rng(0).integers(0, 255, (160, 320, 3), np.uint8)
    cv2.imwrite(str(folder / "p.png"), image)
    mask = np.zeros((160, 320), np.uint8)
    mask[0:20, 300:320] = 255  # rows 0 and 1 of 10 px, the last column of 20 px
    cv2.imwrite(str(folder / "m.png"), mask)


def test_a_photo_of_a_photo_line_has_one_grid_and_counts(
    tmp_path: Path, inspector: Inspector, monkeypatch: pytest.MonkeyPatch
) -> None:
    photo_bundle(inspector, monkeypatch)
    write_photo(tmp_path)
    row = run(tmp_path, inspector, task="surface", product=TILE, input={"photo": "p.png"},
              truth={"defect": "blowhole", "masks": {"photo": "m.png"}})  # fmt: skip
    assert row.error == "" and set(row.probabilities) == {"normal", "blowhole", "fray"}
    assert row.cells_true == ((3, 0, 15), (3, 1, 15)) and row.defect in row.probabilities
    assert row.outcome in ("PASS", "FAIL", "UNSURE") and row.families == ("magnetic_tile",)
    assert not {"NOT_CHECKED", "CHECK_MISSING"} & set(row.reasons)
    assert all(view == 3 for view, _, _ in row.cells or ())


def test_places_of_a_photo_line_are_read_one_by_one(
    tmp_path: Path, inspector: Inspector, monkeypatch: pytest.MonkeyPatch
) -> None:
    photo_bundle(inspector, monkeypatch)
    write_photo(tmp_path)
    row = run(
        tmp_path, inspector, task="assembly", product=BLOCK,
        input={"photo": "p.png", "marks": ["A", "B", "C"]},
        truth={"readings": {"A": "screw", "B": "none", "C": "screw"}, "missing": ["screw"],
               "violations": 1},
    )  # fmt: skip
    assert row.error == "" and row.expected == "FAIL" and row.parts_seen == 3
    assert {mark.read for mark in row.marks} <= {"screw", "none"}
    absent = sum(mark.read == "none" for mark in row.marks)
    assert row.missing == ("screw",) * absent and row.fault == ""
    assert row.outcome == "FAIL" if absent else row.outcome in ("PASS", "UNSURE")


def test_a_photo_line_s_case_needs_a_bundle_that_knows_its_words(
    tmp_path: Path, inspector: Inspector
) -> None:
    write_photo(tmp_path)
    row = run(tmp_path, inspector, task="surface", product=TILE, input={"photo": "p.png"},
              truth={"defect": "blowhole"})  # fmt: skip
    assert row.outcome == "ERROR" and "truth.defect" in row.error and "got blowhole" in row.error


def test_a_photo_before_a_bundle_that_was_not_trained_on_any_is_unsure(
    tmp_path: Path, inspector: Inspector
) -> None:
    write_photo(tmp_path)
    row = run(tmp_path, inspector, task="surface", product=SURFACE, input={"photo": "p.png"},
              truth={"defect": "dent", "masks": {"photo": "m.png"}})  # fmt: skip
    assert row.outcome in ("UNSURE", "FAIL") and "NOT_CHECKED" in row.reasons
    # Drawn as a top view: 13/14 of the panel wide, half of that high, in its middle.
    cells = row.cells_true or ()
    assert cells and {view for view, _, _ in cells} == {2}
    assert all(r in (4, 5) and c in (14, 15) for _, r, c in cells)


def test_readings_follow_their_letters_or_are_counted(tmp_path: Path, inspector: Inspector) -> None:
    write_cloud(tmp_path / "t.ply", -20.0, 20.0, tray=True)
    line = {"id": "x", "task": "assembly", "product": KIT, "input": {"scene": "t.ply"},
            "truth": {"readings": {"A": NUT, "B": "pin 6x20"}, "answer": "B"}}  # fmt: skip
    (tmp_path / FILE).write_text(json.dumps(line))
    (case,) = read_cases(tmp_path)
    row = run_case(inspector, case, Settings(tmp_path, probes=True))
    kinds = sorted((probe.kind, probe.asked) for probe in row.probes)
    assert kinds == [(kind, mark) for kind in ("moved_columns", "moved_letters") for mark in "AB"]
    before = {mark.mark: mark.picture for mark in row.marks}
    moved = {probe.asked: probe.true for probe in row.probes if probe.kind == "moved_letters"}
    assert moved == {"A": before["B"], "B": before["A"]}
    same = {**line, "truth": {"readings": {"A": NUT, "B": NUT}, "answer": "none"}}
    (tmp_path / FILE).write_text(json.dumps(same))
    (case,) = read_cases(tmp_path)
    assert run_case(inspector, case, Settings(tmp_path, probes=True)).probes == ()
