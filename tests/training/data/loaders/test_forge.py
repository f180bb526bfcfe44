"""FORGE rows -> the benchmark's text and ours; columns found, given and missing; a local copy."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.training.data.pictures import Run
from training.data import examples
from training.data.loaders import forge
from training.data.loaders.sample import LoadError, Problems

COLUMNS = {name: name for name in ("question", "answer", "image", "options", "part", "parts")}


def png(seed: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (30, 10), (seed, 40, 200 - seed)).save(buffer, "PNG")
    return buffer.getvalue()


def texts(row: dict[str, Any], task: forge.Task, text: str = "benchmark") -> list[str]:
    problems = Problems()
    row = {"question": "Which one?", "image": {"bytes": png(), "path": None}} | row
    found = forge.load(Path(), "task", task, COLUMNS, [row], problems, text=text)
    problems.finish()
    return [m.content for m in found.samples[0].messages[1:]]


@pytest.mark.parametrize(
    ("answer", "letter"),
    [("B", "B"), ("(b)", "B"), ("c.", "C"), ("Answer: D", "D"), ("The answer is E.", "E"),
     ("wing nut", "A"), ("none", "none")],
)  # fmt: skip
def test_letters_as_data_may_write_them(answer, letter):
    row = {"answer": answer, "options": ["wing nut", "hex nut"]}
    assert texts(row, "letter")[-1] == f"answer: {letter}"


@pytest.mark.parametrize(
    ("answer", "reply"),
    [
        ("Part 1: Yes", "Part 1: Yes"),
        ("Part 1: No\nPart 2: B", "Part 1: No\nPart 2: B"),
        ("No, C", "Part 1: No\nPart 2: C"),
        ("dent", "Part 1: No\nPart 2: D"),
        ("Normal", "Part 1: Yes"),
        ("a", "Part 1: No\nPart 2: A"),
    ],
)
def test_surface_answers_as_data_may_write_them(answer, reply):
    assert texts({"answer": answer}, "surface")[-1] == reply
    (key, *_) = examples.branches(reply)
    assert key.key == "Part 1:"


@pytest.mark.parametrize("answer", ["", None, "maybe", "G", "Part 1: No"])
@pytest.mark.parametrize("task", ["letter", "surface"])
def test_an_answer_that_is_none_is_refused(task, answer):
    with pytest.raises(LoadError, match="answer"):
        texts({"answer": answer}, task)


def test_options_of_a_column_join_the_question_once():
    row = {"answer": "B", "options": ["A. wing nut", "hex nut"]}
    assert texts(row, "letter")[0] == "<image>Which one?\nA. wing nut\nB. hex nut"
    row["question"] = "Which? A: wing nut, B: hex nut"
    assert texts(row, "letter")[0] == "<image>Which? A: wing nut, B: hex nut"


def test_pictures_of_a_list_come_in_order_and_tags_of_the_data_go():
    row = {"answer": "A", "image": [{"bytes": png(1)}, png(2)], "question": "<image> <image> Odd?"}
    assert texts(row, "letter")[0] == "<image><image>Odd?"


def test_our_text_where_the_label_allows():
    surface = texts({"answer": "No, C", "part": "hex_nut"}, "surface", "station")
    assert surface == ["<image>surface joint\nhex nut", "class: deformation"]
    row = {"answer": "B", "parts": ["hex nut M8", "hex nut M16", "hex nut M8"]}
    assert texts(row, "letter", "station") == [
        "<image>positions\nA B C",
        "A: hex nut M8\nB: hex nut M16\nC: hex nut M8",
        "batch majority",
        "answer: B",
    ]
    with pytest.raises(LoadError, match="which part stands at each mark"):
        texts({"answer": "B"}, "letter", "station")


def test_columns_are_guessed_given_or_listed():
    found = ["Question", "gt", "three_view", "category", "level"]
    assert forge.columns_of(found, {}) == {
        "question": "Question",
        "answer": "gt",
        "image": "three_view",
        "scenario": "category",
    }
    given = forge.columns_of([*found, "q2"], forge.parse_columns("question=q2,group=level"))
    assert given["question"] == "q2" and given["group"] == "level"
    with pytest.raises(LoadError) as error:
        forge.columns_of(["text", "x", "y"], {})
    for said in ("answer, image", "text, x, y", "--columns question=NAME"):
        assert said in str(error.value)
    with pytest.raises(LoadError, match=r"columns not found \(nope\)"):
        forge.columns_of(found, {"answer": "nope"})
    with pytest.raises(LoadError, match="role=column"):
        forge.parse_columns("colour=x")


def test_a_picture_outside_the_copy_is_refused(tmp_path):
    for value in ("../a.png", "/etc/passwd", {"bytes": None, "path": "/etc/passwd"}):
        with pytest.raises(LoadError, match="path leaves the folder"):
            forge.pictures_of(value, tmp_path, "row 0")
    for value in (None, 5, [], {"path": None}):
        with pytest.raises(LoadError, match="no picture"):
            forge.pictures_of(value, tmp_path, "row 0")


def parquet(folder: Path, config: str, answers: list[str]) -> None:
    import pyarrow
    from pyarrow import parquet as files

    rows = {
        "id": [f"{config[:5]}-{n}" for n in range(len(answers))],
        "prompt": ["Which part does not belong?"] * len(answers),
        "answer": answers,
        "image": [{"bytes": png(40 * n), "path": f"{n}.png"} for n in range(len(answers))],
    }
    (folder / config).mkdir(parents=True)
    files.write_table(pyarrow.table(rows), folder / config / "train-00000-of-00001.parquet")


@pytest.mark.parametrize("readme", [True, False])
def test_a_local_copy_is_read_without_a_network(tmp_path, run: Run, readme):
    pytest.importorskip("datasets")
    folder = tmp_path / "forge"
    parquet(folder, "task1_three_view", ["B", "Answer: A", "C"])
    parquet(folder, "task2_three_view", ["Part 1: Yes"])
    if readme:
        configs = "".join(
            f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}/train-*\n"
            for name in ("task1_three_view", "task2_three_view")
        )
        (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    report = run("forge", folder, "--config", "task1_three_view", "--leaks", "report")
    found = {e.id: e for e in examples.read(tmp_path / "out" / examples.FILE)}
    assert found["task1_three_view-task1_1"].messages[2].content == "answer: A"
    assert report["columns"]["question"] == "prompt" and report["examples"] == 3
    picture = tmp_path / "out" / found["task1_three_view-task1_1"].images[0]
    assert picture.read_bytes() == png(40)
    error = run("forge", folder, "--config", "task9", "--overwrite")["error"]
    assert "no such configuration" in error and "task1_three_view, task2_three_view" in error
    words = ("forge", folder, "--config", "task1_three_view", "--part-split", "test")
    assert "data set cannot be read" in run(*words, "--overwrite")["error"]
