"""Examples -> rows for Qwen's script and for TRL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.training.data.pictures import Run
from training.data import examples
from training.data.examples import Example, Message
from training.data.loaders import exporting


def example(name: str, question: str, answer: str, **more: object) -> Example:
    turns = (
        Message("system", "Inspect the parts."),
        Message("user", f"<image>{question}"),
        Message("assistant", answer),
    )
    return Example(name, turns, (f"images/{name}.png",), **more)  # type: ignore[arg-type]


WHOLE = example("a", "surface joint\nnut", "class: dent\nscore: 6/10\nphoto: none", weight=0.9)
CLASS_ONLY = example("b", "surface joint\nnut", "class: dent")
SHEET = example("c", "positions\nA", "A: screw", split="val")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    examples.write(tmp_path / "in" / examples.FILE, [WHOLE, CLASS_ONLY, SHEET])
    return tmp_path / "in" / examples.FILE


def test_qwen_rows_are_one_list(file, tmp_path, run: Run):
    out = tmp_path / "rows" / "train.json"
    report = run("to-qwen", file, "--out", out, out=False)
    assert (report["rows"], report["partial_left_out"], report["weights_lost"]) == (1, 1, 1)
    (row,) = json.loads(out.read_text())
    assert row["image"] == ["images/a.png"]
    assert [turn["from"] for turn in row["conversations"]] == ["human", "gpt"]
    assert row["conversations"][1]["value"] == "class: dent\nscore: 6/10\nphoto: none"
    assert "something is there" in run("to-qwen", file, "--out", out, out=False)["error"]


def test_trl_rows_are_lines_of_one_split(file, tmp_path, run: Run):
    out = tmp_path / "val.jsonl"
    run("to-trl", file, "--out", out, "--split", "val", out=False)
    (row,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert row["images"] == [str(file.parent / "images" / "c.png")]
    assert row["prompt"][-1]["content"][0] == {"type": "image"}
    assert row["completion"] == [{"role": "assistant", "content": "A: screw"}]
    words = ("to-trl", file, "--out", out, "--split", "test", "--overwrite")
    assert "one or more of split test" in run(*words, out=False)["error"]


@pytest.mark.parametrize(
    ("question", "answer", "less"),
    [
        ("surface joint\nnut", "class: dent\nscore: 6/10\nfront r1: 2", False),
        ("surface joint\nnut", "class: dent\nscore: 6/10", True),
        ("surface joint\nnut", "class: dent\nphoto: none", True),
        ("surface score\nnut", "class: dent\nscore: 6/10", False),
        ("surface score\nnut", "class: dent", True),
        ("surface grid\nnut", "class: dent", True),
        ("surface grid\nnut", "class: dent\nphoto: none", False),
        ("positions\nA", "A: none", False),
    ],
)
def test_answers_that_say_less_than_they_are_asked(question, answer, less):
    assert exporting.answers_less(example("x", question, answer)) == less
