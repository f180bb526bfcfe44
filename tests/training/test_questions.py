"""Recording questions: what the station asks over cases, spread over the tasks."""

from __future__ import annotations

import json

import pytest

from forge_station.contract import tasks
from forge_station.vlm import recorded
from training import questions
from training.evaluation.case_files import BadCase

TASKS = ("workpiece", "surface", "assembly")


def bad(number: int, task: str) -> BadCase:
    return BadCase(f"{task}-{number}", task, "")


@pytest.mark.parametrize(("count", "each"), [(3, 1), (6, 2), (30, 5), (4, 2)])
def test_cases_are_spread_over_the_tasks(count, each):
    cases = [bad(number, task) for task in TASKS for number in range(5)]
    chosen = questions.spread(cases, count)
    assert len(chosen) == min(count, 15) and len(set(chosen)) == len(chosen)
    assert max(sum(case.task == task for case in chosen) for task in TASKS) == each


def test_few_cases_of_a_task_are_all_taken():
    cases = [bad(0, "surface"), *(bad(number, "workpiece") for number in range(9))]
    assert sum(case.task == "surface" for case in questions.spread(cases, 6)) == 1


def test_the_command_records_what_the_station_asks(
    inspector, simulated, tmp_path, monkeypatch, capsys
):
    bundle = inspector.model._vision.path.parent
    out = tmp_path / "questions.npz"
    arguments = ["questions", "--bundle", str(bundle), "--cases", str(simulated)]
    monkeypatch.setattr("sys.argv", [*arguments, "--out", str(out)])
    assert questions.main() == 0
    last = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    found = recorded.load(out)
    assert last["questions"] == len(found) >= 3 and last["cases"] == 3
    keys = {line.key for question in found for line in question.lines}
    assert {"A:", tasks.CLASS_KEY, tasks.SCORE_KEY, tasks.ANSWER_KEY, "front r1:"} <= keys
    assert all(question.text.startswith(tasks.TRUNK_OPEN) for question in found)
    assert all(line.answer.endswith("\n") for question in found for line in question.lines)


def test_a_folder_without_cases_is_named(inspector, tmp_path, monkeypatch, capsys):
    bundle = inspector.model._vision.path.parent
    arguments = ["questions", "--bundle", str(bundle), "--cases", str(tmp_path)]
    monkeypatch.setattr("sys.argv", [*arguments, "--out", str(tmp_path / "q.npz")])
    assert questions.main() == 1
    assert "cannot read the cases" in capsys.readouterr().err
    assert not (tmp_path / "q.npz").exists()
