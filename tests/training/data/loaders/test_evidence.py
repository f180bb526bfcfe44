"""A station's evidence and people's labels -> examples, from files that the station wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from forge_station import evidence as station
from forge_station.contract.verdict import (
    CheckResult,
    Outcome,
    PartReading,
    Reason,
    ScanSummary,
    decide,
)
from forge_station.geometry.sheet import Sheet
from forge_station.pipeline import Inspection
from tests.training.data.pictures import Run
from training.data import examples
from training.data.loaders import evidence
from training.data.loaders.sample import LoadError

ID = "01a22c2f-3f83-7e64-9cc4-cd44ef9b9b3"
SIZE = (30.06, 8.0, 6.0)


def blobs(seed: int, size: tuple[int, int], empty: int = 0) -> np.ndarray:
    """A picture [h, w, 3] of 40..240; the first `empty` columns of every third are background."""
    noise = np.random.default_rng(seed).integers(40, 240, (9, 9), np.uint8)
    grey = np.asarray(Image.fromarray(noise).resize(size[::-1], Image.Resampling.BICUBIC)).copy()
    grey = np.maximum(grey, 1)
    for panel in np.array_split(grey, 3, axis=1):
        panel[:, :empty] = 0
    return np.stack([grey] * 3, -1)


def store(folder: Path, number: int, parts: int = 1, good: bool = True, serial: str = "") -> str:
    """What a station keeps of an inspection; returns the result id."""
    marks = "ABCDEF"[:parts]
    reasons = () if good else (Reason("WRONG_MODEL", "A: wrong", "A"),)
    result = f"{ID}{number}"
    verdict = decide(
        required=("workpiece",),
        checks=[
            CheckResult("scan", Outcome.PASS),
            CheckResult("workpiece", Outcome.PASS if good else Outcome.FAIL, reasons),
        ],
        scan=ScanSummary(points=60_000),
        result_id=result,
        serial=serial or f"S{number}",
        product="P",
        parts=tuple(PartReading(mark, "pin", "6x30", 0.97, size_mm=SIZE) for mark in marks),
    )
    looked = {
        mark: Sheet(blobs(10 * number + k, (64, 192), 32), 0.2) for k, mark in enumerate(marks)
    }
    found = Inspection(verdict, (), looked, Sheet(blobs(900 + number, (96, 192)), 0.25))
    name = f"part{number}"
    files = station.inputs_of(found, name)
    stored = station.store_files(folder, name, verdict, b"picture for people", files)
    assert not stored.warnings and len(stored.inputs) == parts + 2
    return result


def label(result: str, said: str, reviewer: str = "anna", **more: Any) -> dict[str, Any]:
    return {"result_id": result, "label": said, "reviewer": reviewer, "blind": True, **more}


@pytest.fixture
def load(tmp_path: Path, run: Run):
    """Load labels of tmp_path/evidence; (report, examples by id)."""

    def call(*labels: dict[str, Any], **options: str):
        path = tmp_path / "labels.jsonl"
        path.write_text("".join(f"{json.dumps(item)}\n" for item in labels))
        words = [word for key, value in options.items() for word in (f"--{key}", value)]
        report = run("evidence", tmp_path / "evidence", "--labels", path, "--overwrite", *words)
        file = tmp_path / "out" / examples.FILE
        return report, {e.id: e for e in examples.read(file)} if report["code"] != 2 else {}

    return call


def test_an_ok_part_gives_clean_surface_and_confirmed_readings(tmp_path, load):
    result = store(tmp_path / "evidence", 1)
    _, found = load(label(result, "OK"))
    surface, sheet = found[f"{result}-surface-A"], found[f"{result}-sheet"]
    assert surface.messages[1].content == "<image>surface joint\npin 6x30\n30.1 8.0 6.0"
    assert surface.messages[2].content == (
        "class: normal\nscore: 10/10\nfront: none\nside: none\ntop: none"
    )
    assert sheet.messages[1].content == "<image>marks scale 0.25\nA: 30.1 8.0 6.0"
    assert sheet.messages[2].content == "A: pin 6x30"
    assert surface.weight == sheet.weight == 0.9
    assert surface.group == sheet.group == "serial S1"
    kept = np.asarray(Image.open(tmp_path / "out" / surface.images[0]))
    assert np.array_equal(kept, blobs(10, (64, 192), 32))


def test_a_defect_with_cells_gives_class_score_and_grid(tmp_path, load):
    result = store(tmp_path / "evidence", 1, good=False)
    cells = {"top": [[4, 12], [4, 13]], "side": [[0, 15]]}
    _, found = load(label(result, "NG", defect="dent", cells=cells))
    (surface,) = found.values()
    # Half of the 3 x 256 cells is covered by the part: 7 (1 - sqrt(4 * 3 / 384)) = 5.76
    assert surface.messages[2].content == (
        "class: dent\nscore: 6/10\nfront: none\nside r1: 16\ntop r5: 13,14"
    )


def test_a_defect_without_cells_supervises_the_class_alone(tmp_path, load, run: Run):
    result = store(tmp_path / "evidence", 1)
    _, found = load(label(result, "NG", defect="dent"))
    assert found[f"{result}-surface-A"].messages[2].content == "class: dent"
    file = tmp_path / "out" / examples.FILE
    refused = run("to-trl", file, "--out", tmp_path / "t.jsonl", out=False)
    assert "no examples" in refused["error"]
    words = ("to-trl", file, "--out", tmp_path / "t.jsonl", "--partial", "keep")
    assert run(*words, out=False)["rows"] == 1


def test_readings_correct_the_sheet_and_the_facts(tmp_path, load):
    result = store(tmp_path / "evidence", 1, parts=2, good=False)
    readings = {"A": "pin 6x35", "B": "pin 6x30"}
    _, found = load(label(result, "NG", mark="A", defect="cut", readings=readings))
    assert found[f"{result}-sheet"].messages[2].content == "A: pin 6x35\nB: pin 6x30"
    assert "\npin 6x35\n30.1" in found[f"{result}-surface-A"].messages[1].content
    assert f"{result}-surface-B" not in found


def test_an_ok_against_the_station_does_not_confirm_its_readings(tmp_path, load):
    result = store(tmp_path / "evidence", 1, good=False)
    _, found = load(label(result, "OK"))
    assert list(found) == [f"{result}-surface-A"]


def test_two_blind_reviewers_weigh_more_and_disagreement_waits(tmp_path, load):
    first, second, third = (store(tmp_path / "evidence", n) for n in (1, 2, 3))
    rows = [
        label(first, "NG", defect="dent", cells={"top": [[1, 1]]}),
        label(first, "NG", "bert", defect="dent", cells={"top": [[1, 2]]}),
        label(second, "NG", defect="dent"),
        label(second, "OK", "bert"),
        label(third, "cannot_tell"),
    ]
    report, found = load(*rows)
    (surface,) = found.values()
    assert surface.weight == 0.98 and surface.messages[2].content.endswith("top r2: 2,3")
    assert (report["disagree"], report["cannot_tell"], report["informed"]) == (2, 1, 0)
    report, found = load(*rows, label(second, "OK", "chief", adjudicates=True))
    assert found[f"{second}-surface-A"].weight == 0.98
    assert "class: normal" in found[f"{second}-surface-A"].messages[2].content


def test_the_last_word_of_a_reviewer_counts_and_informed_labels_do_not(tmp_path, load):
    first, second = store(tmp_path / "evidence", 1), store(tmp_path / "evidence", 2)
    rows = [label(first, "OK"), label(first, "NG", defect="cut")]
    report, found = load(*rows, {**label(second, "OK"), "blind": False})
    assert [e.messages[2].content for e in found.values()] == ["class: cut"]
    assert found[f"{first}-surface-A"].weight == 0.9 and report["informed"] == 1


def test_an_adjudication_by_whoever_saw_the_verdict_settles_nothing(tmp_path, load):
    result, other = store(tmp_path / "evidence", 1), store(tmp_path / "evidence", 2)
    rows = [label(result, "NG", defect="dent"), label(result, "OK", "bert"), label(other, "OK")]
    report, found = load(*rows, label(result, "OK", "chief", adjudicates=True, blind=False))
    assert f"{result}-surface-A" not in found and f"{other}-surface-A" in found
    assert (report["disagree"], report["informed"]) == (2, 1)


def test_a_look_at_gold_tests_the_reviewer_and_teaches_nothing(tmp_path, load):
    result = store(tmp_path / "evidence", 1)
    gold = label(result, "OK", "bert", more={"gold": True})
    report, found = load(label(result, "NG", defect="dent"), gold)
    (example,) = found.values()
    assert report["gold"] == 1 and example.weight == 0.9
    assert "class: dent" in example.messages[2].content


def test_who_skips_the_class_agrees_with_who_names_it_but_confirms_it_not(tmp_path, load):
    first, second = store(tmp_path / "evidence", 1), store(tmp_path / "evidence", 2)
    report, found = load(
        label(first, "NG", defect="dent"), label(first, "NG", "bert"),
        label(second, "NG", defect="dent"), label(second, "NG", "bert", defect="cut"),
    )  # fmt: skip
    (example,) = found.values()
    assert example.weight == 0.9 and "class: dent" in example.messages[2].content
    assert report["disagree"] == 2


def test_one_serial_number_is_one_group(tmp_path, load):
    folder = tmp_path / "evidence"
    results = [store(folder, n, serial=f"S{n // 2}") for n in range(8)]
    report, found = load(*(label(result, "OK") for result in results), split="0.5,0,0.5")
    by_group: dict[str, set[str]] = {}
    for example in found.values():
        by_group.setdefault(example.group, set()).add(example.split)
    assert len(by_group) == 4 and all(len(splits) == 1 for splits in by_group.values())
    assert report["leaks"] == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"result_id": "unknown"}, "result unknown: no evidence of this result"),
        ({"defect": "rust"}, "labels.jsonl:1: defect: unknown class, got rust; allowed: crack"),
        ({"mark": "C"}, "mark: no such mark, got C; allowed: A, B"),
        ({"mark": None}, "mark: defect of which part"),
        ({"readings": {"A": "pin 6x30"}}, "readings: readings of some marks, got A"),
        ({"cells": {"back": [[1, 1]]}}, "labels.jsonl:1: cells: unknown view, got back"),
        ({"cells": {"top": [[16, 0]]}}, "labels.jsonl:1: cells.top: cell outside the grid"),
        ({"label": "bad"}, "label: 'bad'; allowed: OK, NG, cannot_tell"),
        ({"label": "OK"}, "labels.jsonl:1: defect: a defect in a label that is not NG"),
        ({"defct": "dent"}, "did you mean defect?"),
        ({"reviewer": 5}, "reviewer: 5; allowed: a text"),
    ],
)
def test_a_fault_of_a_label_is_named(tmp_path, load, change, said):
    result = store(tmp_path / "evidence", 1, parts=2)
    report, _ = load(label(result, "NG", mark="A", defect="dent") | change)
    assert report["code"] == 2 and said in report["error"]
    assert not (tmp_path / "out").exists()


def test_evidence_without_the_models_input_says_so(tmp_path, load):
    result = store(tmp_path / "evidence", 1)
    (tmp_path / "evidence" / "part1.input.json").unlink()
    report, _ = load(label(result, "OK"))
    assert "part1.input.json: the model's input was not kept" in report["error"]


def test_evidence_that_names_files_elsewhere_is_refused(tmp_path, load):
    result = store(tmp_path / "evidence", 1)
    path = tmp_path / "evidence" / "part1.input.json"
    data = json.loads(path.read_text())
    data["pictures"][0]["file"] = "../../secret.png"
    path.write_text(json.dumps(data))
    report, _ = load(label(result, "OK"))
    assert "pictures[0]: path leaves the folder, got ../../secret.png" in report["error"]


@pytest.mark.parametrize("line", ["{", "[]", "null", '{"result_id": 1}', "[" * 100_000])
def test_a_line_that_is_no_label(line):
    with pytest.raises(LoadError):
        evidence.parse_label(line)


def test_a_folder_that_is_not_there_is_one_error(load):
    report, _ = load(label("unknown", "OK"))
    assert report["code"] == 2 and "no such folder" in report["error"]
    assert "no evidence of this result" not in report["error"]
