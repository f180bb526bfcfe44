"""What the gate counts, and that it stops a bundle unless a person accepts it by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from export import drift, gate, verify
from export.bundle import Release, partial_of, write_bundle
from export.drift import Limits, compare, read_rows
from export.gate import Degraded, Gate
from forge_station.errors import InputError
from forge_station.vlm.bundle_files import read_manifest


def row(number: int, outcome: str = "PASS", **more) -> dict:
    blank = {"expected": "PASS", "marks": [], "defect": "", "score": None, "cells": None}
    return {"id": f"case-{number}", "outcome": outcome, **blank, **more}


def marks(*read: str) -> list[dict]:
    return [{"mark": "AB"[n], "true": "", "read": part} for n, part in enumerate(read)]


def test_the_same_answers_are_no_drift():
    rows = [row(1, marks=marks("a", "b")), row(2, "FAIL", defect="dent", cells=[[0, 1, 2]])]
    found = compare(rows, rows[::-1])
    assert found.faults() == [] and found.flips == () and found.unsure == 0
    assert (found.readings, found.classes, found.grid_iou) == ((0, 2), (0, 1), 1.0)


@pytest.mark.parametrize(
    ("before", "after", "flips", "unsure"),
    [
        ("PASS", "FAIL", 1, 0),
        ("FAIL", "PASS", 1, 0),
        ("PASS", "ERROR", 1, 0),
        ("ERROR", "UNSURE", 1, 0),
        ("PASS", "UNSURE", 0, 1),
        ("UNSURE", "FAIL", 0, 1),
        ("UNSURE", "UNSURE", 0, 0),
    ],
)
def test_a_flip_is_not_a_doubt(before, after, flips, unsure):
    found = compare([row(1, before)], [row(1, after)])
    assert (len(found.flips), found.unsure) == (flips, unsure)
    assert bool(found.faults()) is bool(flips or unsure)


def test_cases_that_neither_run_could_use_do_not_count():
    found = compare([row(1, "ERROR"), row(2)], [row(1, "ERROR"), row(2)])
    assert found.cases == 1


def test_a_gate_that_looked_at_nothing_is_no_gate():
    with pytest.raises(InputError, match=r"nothing was compared.*1 that ended in ERROR"):
        compare([row(1, "ERROR")], [row(1, "ERROR")])


def test_every_figure_by_hand():
    full = [
        row(1, marks=marks("a", "b"), score=8.0),
        row(2, "FAIL", defect="dent", score=4.0, cells=[[0, 0, 0], [0, 0, 1]], expected="FAIL"),
        row(3, defect="normal", score=9.0, cells=[]),
        row(4, defect="normal", cells=[], expected="FAIL"),
    ]
    own = [
        row(1, "UNSURE", marks=marks("a", "c"), score=8.5),
        row(2, "FAIL", defect="cut", score=4.1, cells=[[0, 0, 1], [1, 0, 0]], expected="FAIL"),
        row(3, defect="normal", score=9.0, cells=[]),
        row(4, "FAIL", defect="normal", cells=[[2, 3, 3]], expected="FAIL"),
    ]
    found = compare(full, own)
    assert found.readings == (1, 2)
    assert found.classes == (1, 3)
    assert (found.grid_iou, found.grids) == (round((1 / 3 + 0) / 2, 4), 2)
    assert (found.score, found.score_most, found.scores) == (0.2, 0.5, 3)
    assert (found.flips, found.unsure) == (("case-4",), 1)
    assert (found.lost, found.won) == (1, 1)
    text = "; ".join(found.faults())
    for part in ("1 verdicts flipped (case-4)", "1 of 4 cases", "1 of 2 readings", "grid IoU"):
        assert part in text
    loose = Limits(flips=1, unsure=1, readings=1, classes=1, grid_iou=0, score=1)
    assert compare(full, own, loose).faults() == []


@pytest.mark.parametrize("own", [[], [row(1)], [row(1), row(3)], [row(1), row(2), row(3)]])
def test_other_cases_cannot_be_compared(own):
    with pytest.raises(InputError, match="not over the same cases"):
        compare([row(1), row(2)], own)


@pytest.mark.parametrize("text", [None, "{", '{"id": "x"}', "3"])
def test_rows_that_cannot_be_read_are_named(tmp_path, text):
    path = tmp_path / "rows.jsonl"
    if text is not None:
        path.write_text(text + "\n")
    with pytest.raises(InputError, match=r"rows cannot be read.*rows\.jsonl"):
        read_rows(path)


@pytest.fixture
def evaluated(monkeypatch):
    """Evaluations answered by a script: bundle precision -> rows; the bundles seen."""
    seen: list[tuple[str, str]] = []
    answers = {"fp32": [row(1), row(2)], "int8": [row(1), row(2)]}

    def evaluate(bundle: Path, _cases: Path, rows: Path, _references: str) -> Path:
        manifest = read_manifest(bundle)
        seen.append((manifest.precision, manifest.sha256))
        rows.write_text("".join(json.dumps(one) + "\n" for one in answers[manifest.precision]))
        return rows

    monkeypatch.setattr(gate, "evaluate", evaluate)
    return answers, seen


def release(**more) -> Release:
    return Release("nano", "0.1.0", created="2026-11-30T00:00:00Z", **more)


def gated(nano: Path, tmp_path: Path, accepted: str = "") -> Gate:
    def full(folder: Path) -> None:
        write_bundle(nano, folder, release(precision="fp32"))

    return Gate(full, tmp_path / "cases", tmp_path / "b.gate", accepted=accepted)


def test_what_passes_the_gate_says_so_in_its_card(nano, tmp_path, evaluated):
    _, seen = evaluated
    out = tmp_path / "b"
    manifest = write_bundle(nano, out, release(), judge=gated(nano, tmp_path).judge)
    assert [precision for precision, _ in seen] == ["fp32", "int8"]
    assert manifest.training["drift"]["cases"] == 2
    assert manifest == read_manifest(out)
    card = (out / "MODEL_CARD.md").read_text()
    assert "## Against full precision" in card
    assert "| verdicts flipped between PASS and FAIL | 0 of 2" in card
    assert "Accepted" not in card


def test_what_flips_a_verdict_is_not_written(nano, tmp_path, evaluated):
    answers, seen = evaluated
    answers["int8"] = [row(1), row(2, "FAIL")]
    out = tmp_path / "b"
    with pytest.raises(Degraded, match=r"not written.*1 verdicts flipped \(case-2\).*accept"):
        write_bundle(nano, out, release(), judge=gated(nano, tmp_path).judge)
    assert not out.exists()
    # The work is not lost: the next run finds graphs and full bundle as they were.
    begun = (partial_of(out) / "decoder.onnx.data").stat().st_mtime_ns
    manifest = write_bundle(nano, out, release(), judge=gated(nano, tmp_path, "no line").judge)
    assert (out / "decoder.onnx.data").stat().st_mtime_ns == begun
    assert seen[:2] == seen[2:], "the same bundles, so that their rows can be kept"
    assert manifest.training["drift"]["accepted"] == "no line"
    card = (out / "MODEL_CARD.md").read_text()
    assert "1 verdicts flipped (case-2). Accepted all the same: no line" in card


def test_without_the_gate_the_card_says_so(nano, tmp_path):
    write_bundle(nano, tmp_path / "b", release())
    assert "written without the gate" in (tmp_path / "b" / "MODEL_CARD.md").read_text()
    write_bundle(nano, tmp_path / "full", release(precision="fp32"))
    assert "Against" not in (tmp_path / "full" / "MODEL_CARD.md").read_text()


def test_verify_compares_two_row_files(tmp_path, monkeypatch, capsys):
    for name, outcome in (("a", "PASS"), ("b", "PASS"), ("c", "FAIL")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row(1, outcome)) + "\n")
    for second, code in (("b", 0), ("c", 1)):
        files = [str(tmp_path / "a.jsonl"), str(tmp_path / f"{second}.jsonl")]
        monkeypatch.setattr("sys.argv", ["verify", "--rows", *files])
        assert verify.main() == code
        last = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
        assert last["ok"] is (code == 0)
        assert last["drift"]["cases"] == 1
    assert drift.LIMITS.flips == 0


@pytest.mark.slow
def test_the_gate_runs_the_evaluation_itself(nano, tmp_path):
    """Without a simulator: a line that is no case gives a row all the same."""
    write_bundle(nano, tmp_path / "b", release())
    folder, rows = tmp_path / "cases", tmp_path / "rows.jsonl"
    with pytest.raises(InputError, match=r"cannot be evaluated.*exit status 1"):
        gate.evaluate(tmp_path / "b", folder, rows, "bundle")
    folder.mkdir()
    (folder / "cases.jsonl").write_text('{"id": "x", "task": "surface"}\n')
    (found,) = read_rows(gate.evaluate(tmp_path / "b", folder, rows, "bundle"))
    assert (found["id"], found["outcome"]) == ("x", "ERROR")
