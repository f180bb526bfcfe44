"""The example format: round trip, what it refuses, its two layouts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from training.data import conversations, examples
from training.data.examples import Branch, Example, ExampleError, Message


def _example(**changed: object) -> Example:
    fields: dict = {
        "id": "one",
        "messages": (
            Message("system", "Inspect the parts."),
            Message("user", "<image>surface joint\nhex_nut M8"),
            Message("assistant", "class: crack\nscore: 6/10\nfront r5: 5,6\nside: none"),
        ),
        "images": ("one.png",),
        "group": "run-3",
    }
    return Example(**(fields | changed))


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / examples.FILE
    both = [_example(), _example(id="two", split="val", weight=0.5)]
    examples.write(path, both)
    assert list(examples.read(path)) == both
    assert [e.id for e in examples.read(path, "val")] == ["two"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"images": ()}, "<image> tags"),
        ({"images": ("a.png", "b.png")}, "2 tags"),
        ({"messages": (Message("user", "<image>"),)}, "alternate"),
        (
            {"messages": (Message("user", "<image>x"), Message("assistant", " "))},
            "assistant turn is empty",
        ),
        (
            {"messages": (Message("user", "x"), Message("assistant", "a: <image>")), "images": ()},
            "outside a user turn",
        ),
    ],
)
def test_an_example_no_trainer_can_use_is_refused(changed: dict, said: str) -> None:
    with pytest.raises(ExampleError, match=said):
        _example(**changed)


@pytest.mark.parametrize("line", ['{"id": 1}', "nonsense", '{"id": "a", "messages": []}'])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / examples.FILE
    path.write_text(examples.to_line(_example()) + "\n" + line + "\n")
    with pytest.raises(ExampleError, match=rf"{examples.FILE}:2"):
        list(examples.read(path))


def test_trl_and_qwen_rows(tmp_path: Path) -> None:
    row = examples.to_trl(_example(), tmp_path)
    assert row["images"] == [str(tmp_path / "one.png")]
    assert row["prompt"][1]["content"] == [
        {"type": "image"},
        {"type": "text", "text": "surface joint\nhex_nut M8"},
    ]
    assert row["completion"][0]["content"].startswith("class: crack")
    qwen = examples.to_qwen(_example())
    assert [turn["from"] for turn in qwen["conversations"]] == ["human", "gpt"]
    assert qwen["conversations"][0]["value"].count("<image>") == len(qwen["image"]) == 1
    json.dumps([row, qwen])


def test_lines_become_the_branches_of_the_station() -> None:
    lines = examples.branches(_example().messages[-1].content)
    assert lines[0] == Branch("class:", "crack")
    found = {branch.key: branch.answer for branch in conversations.expanded(lines)}
    assert len(found) == 2 + 2 * 16
    assert found["front r5:"] == "5,6" and found["front r6:"] == found["side r5:"] == "none"


def test_marks_and_decisions_are_no_views() -> None:
    lines = examples.branches("A: none\nanswer: none\nmissing: none")
    assert conversations.expanded(lines) == lines


def test_a_surface_conversation_writes_what_is_known() -> None:
    cells = np.zeros((16, 16), bool)
    cells[4, [4, 5]] = True
    both = conversations.surface(
        "surface joint", "crack", 6, {"front": cells, "top": cells & False}
    )
    assert both[-1].content == "class: crack\nscore: 6/10\nfront r5: 5,6\ntop: none"
    alone = conversations.surface("surface score", "crack", None, None)
    assert alone[-1].content == "class: crack"
    with pytest.raises(ValueError, match="16, 16"):
        conversations.grid_lines("front", cells[:8])


def test_an_answer_without_a_key_is_refused() -> None:
    with pytest.raises(ExampleError, match="no key"):
        examples.branches("class: crack\nsomething")
