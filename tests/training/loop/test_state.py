"""The record of a run: what counts, what a damaged file does, one run at a time."""

from __future__ import annotations

import pytest

from training.loop import state
from training.loop.error import LineError
from training.loop.state import State


def done(folder, inputs: str = "i") -> State:
    out = folder / "step"
    out.mkdir()
    (out / "a").write_text("one")
    return State().with_done("step", state.finished(inputs, [out], folder, 1.5, {"n": 1}))


def test_a_step_counts_until_its_inputs_or_outputs_change(tmp_path):
    now = done(tmp_path)
    state.write(tmp_path, now)
    assert state.read(tmp_path) == now
    record = now.steps["step"]
    assert state.objection(record, "i", tmp_path) is None
    assert state.objection(None, "i", tmp_path) == "not done yet"
    assert state.objection(record, "j", tmp_path) == "its inputs changed"
    (tmp_path / "step" / "a").write_text("two")
    assert "step is not as the step left it" in str(state.objection(record, "i", tmp_path))
    (tmp_path / "step" / "a").write_text("one")
    (tmp_path / "step" / "b").write_text("")
    assert state.objection(record, "i", tmp_path) is not None


def test_a_begun_step_is_known_until_it_is_done_or_forgotten(tmp_path):
    now = State().with_begun("step", "i")
    assert now.begun == {"step": "i"} and now.without(["step"]).begun == {}
    assert now.with_done("step", state.finished("i", [], tmp_path, 0, {})).begun == {}
    assert done(tmp_path).with_begun("step", "i").steps == {}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"steps": {"sft": 3}}', '{"stepz": {}}'])
def test_a_damaged_state_is_one_clear_error(tmp_path, text):
    (tmp_path / state.FILE).write_text(text)
    with pytest.raises(LineError, match="damaged") as found:
        state.read(tmp_path)
    assert state.FILE in str(found.value)


def test_a_state_of_another_release_is_refused(tmp_path):
    (tmp_path / state.FILE).write_text('{"schema": "forge-station.line/9.0"}')
    with pytest.raises(LineError, match="another release"):
        state.read(tmp_path)


def test_one_run_at_a_time(tmp_path):
    with (
        state.held(tmp_path / "out"),
        pytest.raises(LineError, match="another run"),
        state.held(tmp_path / "out"),
    ):
        pass
    with state.held(tmp_path / "out"):
        pass
