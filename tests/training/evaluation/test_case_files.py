"""Lines of cases.jsonl: what is refused, with which words, and what is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forge_station.errors import InputError
from training.evaluation.case_files import FILE, BadCase, Case, read_cases, write_line

PRODUCT = {"part_number": "B", "kind": "batch", "checks": ["workpiece"], "parts": {"hex_nut M8": 3}}
GOOD: dict[str, Any] = {
    "id": "one",
    "task": "workpiece",
    "input": {"scene": "a.npz"},
    "product": PRODUCT,
    "truth": {"answer": "none", "readings": {"A": "hex_nut M8"}},
}


def read(folder: Path, *lines: str) -> list[Case | BadCase]:
    (folder / FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return read_cases(folder)


def changed(**fields: Any) -> str:
    return json.dumps({**GOOD, **fields})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"id": "x"', ["line 1", "not a line of JSON"]),
        ("[1, 2]", ["document", "table"]),
        ('{"id": NaN}', ["NaN"]),
        ("[" * 100_000, ["not a line of JSON"]),
        (changed(id="a b"), ["id: 'a b'"]),
        (changed(task="weld"), ["task: 'weld'", "workpiece, assembly, surface"]),
        (changed(setting="few-shot"), ["setting", "zero-shot"]),
        (changed(colour=1), ["colour: unknown key"]),
        (changed(input={}), ["input: none", "exactly one of scene"]),
        (changed(input={"scene": "a.npz", "scan": "b"}), ["input: scene, scan"]),
        (changed(input={"clouds": {"A": "a.ply", "C": "c.ply"}}), ["input.clouds: A, C"]),
        (changed(input={"photo": "p.png"}), ["input.marks: none", "with photo"]),
        (changed(input={"scene": "a.npz", "unit": "mile"}), ["input.unit: 'mile'"]),
        (
            changed(input={"views": {"A": {"front": "f.png", "side": "s.png", "mm_per_px": 0.1}}}),
            ["input.views.A.top: missing"],
        ),
        (changed(product=None), ["neither", "product, or line and part_number"]),
        (changed(part_number="B"), ["part_number: B"]),
        (changed(product={**PRODUCT, "parts": {"hex_nut M7": 3}}), ["product.parts.hex_nut M7"]),
        (changed(task="surface"), ["product.kind: batch", "single for the task surface"]),
        (changed(truth={"answer": "G"}), ["truth.answer: G"]),
        (changed(truth={"answer": "AB"}), ["truth.answer: AB"]),
        (changed(truth={"readings": {"A": "hex_nut M7"}}), ["truth.readings.A"]),
        (changed(truth={"readings": {"B": "hex_nut M8"}}), ["truth.readings: B"]),
        (changed(truth={"grids": {"front": [[16, 0]]}}), ["truth.grids.front: (16, 0)"]),
        (changed(truth={"masks": {"below": "m.png"}}), ["truth.masks.below: unknown view"]),
        (changed(truth={"defect": "rust"}), ["truth.defect: 'rust'"]),
        (changed(truth={"score": 11}), ["truth.score: 11", "0.0 to 10.0"]),
    ],
)
def test_a_bad_line_says_file_line_and_field(tmp_path: Path, line: str, words: list[str]) -> None:
    (bad,) = read(tmp_path, line)
    assert isinstance(bad, BadCase)
    assert str(tmp_path / FILE) in bad.message
    for word in words:
        assert word in bad.message


def test_all_problems_of_a_line_are_in_one_message(tmp_path: Path) -> None:
    (bad,) = read(tmp_path, changed(task="weld", truth={"answer": "G", "score": 11}))
    assert isinstance(bad, BadCase) and bad.id == "one"
    assert "task" in bad.message and "truth.score" in bad.message


def test_good_lines_around_a_bad_one_are_read(tmp_path: Path) -> None:
    found = read(tmp_path, changed(), "", "rubbish", changed(id="two"), changed(id="one"))
    assert [type(item) for item in found] == [Case, BadCase, Case, BadCase]
    assert isinstance(found[3], BadCase) and "line 5: id one is used twice" in found[3].message


def test_a_folder_without_cases_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read the cases .*cases\.jsonl"):
        read_cases(tmp_path)
    (tmp_path / FILE).write_text("\n\n")
    with pytest.raises(InputError, match="no cases"):
        read_cases(tmp_path)


def test_a_line_file_gives_the_product(tmp_path: Path) -> None:
    (tmp_path / "line.yaml").write_text(json.dumps({"line": "l", "products": [PRODUCT]}))
    line = changed(product=None, line="line.yaml", part_number="B")
    (case,) = read(tmp_path, line)
    assert isinstance(case, Case) and case.product is not None
    assert case.product.parts == {"hex_nut M8": 3}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"line": "none.yaml", "part_number": "B"}, "none.yaml"),
        ({"line": "line.yaml", "part_number": "X"}, "no such product"),
        ({"line": "bad.yaml", "part_number": "B"}, "bad.yaml"),
    ],
)
def test_a_wrong_line_file_is_named(tmp_path: Path, fields: dict[str, str], words: str) -> None:
    (tmp_path / "line.yaml").write_text(json.dumps({"line": "l", "products": [PRODUCT]}))
    (tmp_path / "bad.yaml").write_text("line: [")
    (bad,) = read(tmp_path, changed(product=None, **fields))
    assert isinstance(bad, BadCase) and words in bad.message


def test_a_case_reads_back_as_it_was_written(tmp_path: Path) -> None:
    truth = {
        "answer": ["A", "C"],
        "missing": [],
        "violations": 0,
        "readings": {"A": "hex_nut M8", "B": "pin 6x20", "C": "hex_nut M8"},
        "grids": {"front": [[0, 15]], "side": [], "top": []},
    }
    (case,) = read(tmp_path, changed(truth=truth))
    assert isinstance(case, Case)
    assert read(tmp_path, write_line(case)) == [case]
    assert case.truth.grids == {"front": ((0, 15),), "side": (), "top": ()}


@pytest.mark.parametrize(
    ("truth", "expected"),
    [
        ({}, None),
        ({"answer": "none"}, "PASS"),
        ({"answer": "none", "missing": ["pin 6x20"]}, "FAIL"),
        ({"answer": "B"}, "FAIL"),
        ({"defect": "normal"}, "PASS"),
        ({"defect": "cut"}, "FAIL"),
        ({"defect": "cut", "outcome": "PASS"}, "PASS"),
    ],
)
def test_the_expected_outcome_follows_from_the_truth(
    tmp_path: Path, truth: dict[str, Any], expected: str | None
) -> None:
    (case,) = read(tmp_path, changed(truth=truth))
    assert isinstance(case, Case) and case.truth.expected == expected
