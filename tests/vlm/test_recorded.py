"""Recorded questions: what was asked comes back whole, and a damaged file says so."""

from __future__ import annotations

import json
import zipfile

import numpy as np
import pytest

from forge_station.contract import tasks
from forge_station.errors import InputError
from forge_station.vlm import recorded
from forge_station.vlm.decode import Branch, Limits
from forge_station.vlm.recorded import Line, Question, Recorder

PICTURE = tasks.IMAGE_OPEN + tasks.IMAGE_TOKEN + tasks.IMAGE_CLOSE
TEXT = tasks.TRUNK_OPEN + PICTURE + "marks scale 0.35" + tasks.ASSISTANT


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (56, 84, 3), np.uint8)


def test_every_question_is_remembered_with_its_answers(model):
    recorder = Recorder(model)
    trunk = recorder.trunk([picture(0)], TEXT)
    odds = recorder.score_lines(trunk, {"A:": ["hex_nut M8", "pin M5x20"]})["A:"]
    rows = recorder.decode_branches(trunk, [Branch("front r1:", model.columns_grammar())])
    more = "A: hex_nut M8\n" + tasks.NEXT_USER
    longer = recorder.extend(trunk, more)
    recorder.extend(trunk, "B")  # asked nothing
    recorder.score_lines(longer, {"answer:": ["A", "none"]})
    recorder.score_lines(trunk, {"answer:": ["A", "none"]}, behind=more)
    first, second, third = recorder.questions()
    assert first.text == TEXT and np.array_equal(first.images[0], picture(0))
    best = max(odds, key=lambda text: odds[text])
    assert first.lines == (Line("A:", f" {best}\n"), Line("front r1:", f" {rows[0].text}\n"))
    assert second.text == f"{TEXT}A: hex_nut M8\n{tasks.NEXT_USER}"
    assert len(second.images) == 1 and second.lines[0].key == "answer:"
    assert third == second
    assert recorder.questions() == []


def test_a_line_that_overran_is_no_answer(model):
    recorder = Recorder(model)
    trunk = recorder.trunk([picture(0)], TEXT)
    bolts = [f"hex_bolt {size}{length}" for size in ("M8", "M10") for length in ("x20", "x30")]
    branches = [Branch("A:", model.options_grammar(bolts))]
    assert recorder.decode_branches(trunk, branches, Limits(time_budget_s=0))[0].overrun
    assert recorder.questions() == []


def test_what_is_saved_is_read_and_pictures_are_stored_once(tmp_path):
    lines = (Line("A:", " hex_nut M8\n"),)
    given = [Question(TEXT, (picture(0),), lines), Question(f"{TEXT}x", (picture(0),), lines)]
    recorded.save(tmp_path / "q.npz", given)
    read = recorded.load(tmp_path / "q.npz")
    assert [(q.text, q.lines) for q in read] == [(q.text, q.lines) for q in given]
    assert all(np.array_equal(q.images[0], picture(0)) for q in read)
    with zipfile.ZipFile(tmp_path / "q.npz") as archive:
        assert sorted(archive.namelist()) == ["0.npy", "questions.json"]


def entries(tmp_path, index: object, **files: bytes):
    path = tmp_path / "q.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("questions.json", json.dumps(index))
        for name, content in files.items():
            archive.writestr(f"{name}.npy", content)
    return path


@pytest.mark.parametrize(
    "index",
    [{}, [], [{"text": "x"}], [{"text": "x", "images": [0], "lines": []}]],
    ids=["no list", "empty", "no lines", "no picture"],
)
def test_a_malformed_file_is_named(tmp_path, index):
    index = {"questions": index} if index != {} else index
    with pytest.raises(InputError, match=r"recorded questions.*q\.npz"):
        recorded.load(entries(tmp_path, index))


def test_no_file_and_no_zip_are_named(tmp_path):
    with pytest.raises(InputError, match=r"cannot be read.*q\.npz"):
        recorded.load(tmp_path / "q.npz")
    (tmp_path / "q.npz").write_bytes(b"PK nothing")
    with pytest.raises(InputError, match=r"cannot be read.*training\.questions"):
        recorded.load(tmp_path / "q.npz")
