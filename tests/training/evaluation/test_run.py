"""Runs that stop and go on, and checkpoints that become bundles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge_station.errors import InputError
from tests import nano_checkpoint
from training.evaluation.case_files import BadCase, Case
from training.evaluation.case_row import digest_of as case_digest
from training.evaluation.checkpoint import bundle_of, digest_of
from training.evaluation.rows import Row, read_rows, write_row
from training.evaluation.run import in_threads, one_by_one, run, run_digest

CASES = [BadCase(name, "surface", name) for name in "abcde"]


class Model:
    """Answers cases and remembers which; breaks at one of them."""

    def __init__(self, breaks_at: str = "") -> None:
        self.asked: list[str] = []
        self.breaks_at = breaks_at

    def __call__(self, case: Case | BadCase) -> Row:
        if case.id == self.breaks_at:
            raise KeyboardInterrupt
        self.asked.append(case.id)
        return Row(case.id, case.task, "zero-shot", "PASS", case=case_digest(case))


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    first = Model(breaks_at="c")
    with pytest.raises(KeyboardInterrupt):
        run(CASES, one_by_one(first), out, "r1", quiet=True)
    with out.open("a") as file:
        file.write('{"id": "c", "ta')  # killed while writing
    second = Model()
    ran = run(CASES, one_by_one(second), out, "r1", quiet=True)
    assert second.asked == ["c", "d", "e"] and ran.kept == 2
    assert [row.id for row in ran.rows] == list("abcde") == [row.id for row in read_rows(out)]


def test_rows_of_another_model_or_of_a_changed_case_are_not_kept(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    run(CASES, one_by_one(Model()), out, "r1", quiet=True)
    other = Model()
    assert run(CASES, one_by_one(other), out, "r2", quiet=True).kept == 0
    assert other.asked == list("abcde")
    changed = [*CASES[:4], BadCase("e", "surface", "another line")]
    again = Model()
    ran = run(changed, one_by_one(again), out, "r2", quiet=True)
    assert again.asked == ["e"] and ran.kept == 4
    assert run(changed, one_by_one(Model()), out, "r2", fresh=True, quiet=True).kept == 0


def test_rows_with_an_error_are_tried_again(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    failed = Row("a", "surface", "", "ERROR", error="no reply", case=case_digest(CASES[0]), run="r")
    out.write_text(f"{write_row(failed)}\n")
    model = Model()
    run(CASES[:1], one_by_one(model), out, "r", quiet=True)
    assert model.asked == ["a"] and [row.outcome for row in read_rows(out)] == ["PASS"]


def test_a_file_of_an_older_format_is_written_anew(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    out.write_text('{"id": "a", "colour": "red"}\n{}\n')
    assert run(CASES, one_by_one(Model()), out, "r", quiet=True).kept == 0
    assert len(read_rows(out)) == 5


def test_threads_keep_the_order_and_pass_errors_on(tmp_path: Path) -> None:
    ran = run(CASES, in_threads(Model(), 3), tmp_path / "r.jsonl", "r", quiet=True)
    assert [row.id for row in ran.rows] == list("abcde")
    with pytest.raises(KeyboardInterrupt):
        run(CASES, in_threads(Model("b"), 3), tmp_path / "s.jsonl", "r", quiet=True)


def test_the_digest_of_a_run_names_model_and_settings() -> None:
    assert run_digest({"bundle": "x"}) == run_digest({"bundle": "x"})
    assert run_digest({"bundle": "x"}) != run_digest({"bundle": "x", "sizes": False})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"id": "a"}\n{}\n', ["line 1", "task: missing"]),
        ("rubbish\n{}\n", ["line 1"]),
    ],
)
def test_a_file_that_holds_no_rows_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(InputError) as raised:
        read_rows(path)
    assert all(word in str(raised.value) for word in [*words, str(path)])


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"not a checkpoint folder.*config\.json"):
        bundle_of(tmp_path, tmp_path / "cache")


def test_a_checkpoint_is_exported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs"
    nano_checkpoint.write_checkpoint(folder, nano_checkpoint.byte_tokenizer(), depth=1)
    found = bundle_of(folder, tmp_path / "cache")
    manifest = json.loads((found / "manifest.json").read_text())
    assert manifest["precision"] == "fp32" and manifest["name"] == "runs"
    monkeypatch.setattr("subprocess.run", None)
    assert bundle_of(folder, tmp_path / "cache") == found
    before = digest_of(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "_remark": "changed"}))
    assert digest_of(folder) != before


def test_what_the_export_says_reaches_the_user(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"cannot be exported.*export\.bundle"):
        bundle_of(tmp_path, tmp_path / "cache")
