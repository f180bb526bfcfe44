"""The whole loop on a tiny line: killed and resumed, run again, changed, refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="training needs the extra training")

from forge_station import private_key
from forge_station.bundles.trust import Trust
from forge_station.vlm.bundle_files import verify_folder
from tests.training.nano.tiny_pools import write_pools
from training import cases, line
from training.data import shards
from training.evaluation.rows import read_rows
from training.loop import folds, labelled, practice, recipe, state
from training.loop.error import LineError
from training.loop.steps import Loop

PART = "flange_nut M10"
STEPS = 4
LINE = f"""
line: nuts
products:
  - {{part_number: N, name: nut, kind: single, parts: {{{PART}: 1}}, checks: [workpiece, surface]}}
"""
RECIPE = f"""
golden: 1
threads: 1
data: [pools]
sft: {{steps: {STEPS}, batch: 1, surface: 1.0, labelled: 0.5, validate: 2, state_minutes: 0}}
grpo: {{prompts: 2, batch: 2, group: 2, validate: 2, alarm_gate: 1.0}}
parts: {{cases: cases, hold: 0.0}}
calibrate: {{folds: 2}}
"""
FOLDS = ["fold-1", "fold-2"]
STEP_NAMES = [*line.NAMES[:8], *FOLDS, *line.NAMES[8:]]


pytestmark = pytest.mark.timeout(300)


class Tiny:
    """A line whose station looked at two parts, and a person as well."""

    def __init__(self, folder: Path, repository: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        self.labels, self.key = folder / "labels.jsonl", folder / "key.pem"
        (folder / "line.yaml").write_text(LINE)
        (folder / recipe.FILE).write_text(RECIPE)
        write_pools(folder / "pools")
        draw = cases.Draw(parts=(PART,), clean=0.5)
        cases.write_cases(folder / "cases", ["surface"], 2, 4711, 1, draw, quiet=True)
        bundle = repository / "station_config" / "demo" / "bundle"
        words = ["--cases", folder / "cases", "--bundle", bundle, "--out", folder / "evidence"]
        assert practice.main([*map(str, words), "--labels", str(self.labels)]) == 0
        self.public = private_key.generate(self.key, folder / "key.pub.pem")

    def words(self, *more: object) -> list[str]:
        own = [self.folder, "--out", self.out, "--labels", self.labels, "--key", self.key]
        return [str(word) for word in (*own, "--evidence", self.folder / "evidence", *more)]

    def loop(self, **changed: Any) -> Loop:
        own = {"labels": (self.labels,), "evidence": self.folder / "evidence", "key": self.key}
        return Loop.of(self.folder, self.out, **{**own, **changed})

    def to_do(self, **changed: Any) -> dict[str, str]:
        """Steps that would be made, and why."""
        planned = line.plan(self.loop(**changed), state.read(self.out))
        return {step.name: why for step, why in planned if why is not None}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, repository) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("line"), repository)


def killed_in(tiny: Tiny, repository: Path, where: str) -> dict[str, Any]:
    """What SIGKILL in the middle of a training leaves: the state of the run."""
    paths = os.pathsep.join([str(repository / "edge"), str(repository)])
    command = [sys.executable, "-m", "training.line", *tiny.words()]
    with (tiny.folder / "killed.log").open("w") as log:
        run = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}, stderr=log)
        try:
            until = time.monotonic() + 300
            while not (tiny.out / where / "state.pt").exists():
                assert run.poll() is None, (tiny.folder / "killed.log").read_text()
                assert time.monotonic() < until
                time.sleep(0.01)
        finally:
            run.send_signal(signal.SIGKILL)
            run.wait()
    return json.loads((tiny.out / state.FILE).read_text())


@pytest.fixture(scope="module")
def killed(tiny: Tiny, repository) -> dict[str, Any]:
    """Killed in the fine-tuning."""
    return killed_in(tiny, repository, "sft")


@pytest.fixture(scope="module")
def killed_again(tiny: Tiny, repository, killed) -> dict[str, Any]:
    """The same command again, killed in the training of a fold."""
    return killed_in(tiny, repository, "fold-1/sft")


@pytest.fixture(scope="module")
def finished(tiny: Tiny, killed_again) -> dict[str, Any]:
    """The same command again, to the end; its last line."""
    return line.run(line.build_parser().parse_args(tiny.words()))


def test_a_kill_leaves_the_steps_before_and_the_training_that_was_begun(tiny, killed):
    assert set(killed["steps"]) == {"labels", "synth"} and set(killed["begun"]) == {"sft"}
    assert list(killed["begun"]) == ["sft"]


def test_a_kill_in_a_fold_leaves_the_steps_before(tiny, killed_again):
    assert set(killed_again["steps"]) == set(line.NAMES[:8])
    assert set(killed_again["begun"]) == {"fold-1"}
    assert not (tiny.out / "fold-1" / folds.ROWS).exists()


def test_the_training_of_a_fold_goes_on_where_it_was_killed(tiny, finished):
    for fold in FOLDS:
        curve = (tiny.out / fold / "sft" / "curve.jsonl").read_text().splitlines()
        steps = [json.loads(row)["step"] for row in curve]
        assert steps[0] == 1 and steps[-1] == STEPS and len(steps) <= STEPS + 1


def test_a_fold_judges_each_of_its_parts_and_trains_on_none_of_them(tiny, finished):
    def pictures(folder: Path) -> set[bytes]:
        pools = [(folder / "labels" / name) for name in (labelled.POOL, labelled.CLASSES)]
        return {
            image.tobytes()
            for pool in pools
            if pool.is_dir()
            for image in np.asarray(shards.images_of(pool, 0))
        }

    taught = [pictures(tiny.out / fold) for fold in FOLDS]
    assert all(taught) and not taught[0] & taught[1]
    assert taught[0] | taught[1] == pictures(tiny.out)
    judged = [read_rows(tiny.out / fold / folds.ROWS) for fold in FOLDS]
    assert sorted(row.part for rows in judged for row in rows) == sorted(
        one.part for one in tiny.loop().told().told
    )
    for number, rows in enumerate(judged, 1):
        trained = {one.part for one in folds.of(tiny.loop(), number).learned(tiny.loop().told())}
        assert trained and not trained & {row.part for row in rows}


def test_too_few_labelled_parts_leave_the_recipe_s_limits_and_say_why(tiny, finished):
    notes = state.read(tiny.out).steps["calibrate"].notes
    assert "as the recipe has them" in notes["limits"] and "too few" in notes["limits"]
    manifest = json.loads((tiny.out / "bundle" / "manifest.json").read_text())
    draft = json.loads((tiny.out / "draft" / "manifest.json").read_text())
    assert manifest["thresholds"] == draft["thresholds"]


def test_the_same_command_goes_on_to_a_signed_bundle_that_was_tried(tiny, finished):
    curve = (tiny.out / "sft" / "curve.jsonl").read_text().splitlines()
    steps = [json.loads(row)["step"] for row in curve]
    assert steps[0] == 1 and steps[-1] == STEPS and len(steps) <= STEPS + 1
    verify_folder(tiny.out / "bundle", Trust((tiny.public,)))
    assert finished["selftest"]["signed_by"] == tiny.public.id
    assert finished["selftest"]["golden"] == 1
    assert finished["labels"]["trained_on"]["parts"] == 2
    assert Path(finished["sign"]["file"]).stat().st_size > 1_000_000


def test_without_parts_enough_the_bundle_advises_and_says_why(tiny, finished):
    assert finished["certify"]["advisory"].startswith("no certificate: ")
    assert finished["selftest"]["permit"] == "the bundle has no certificate.json"
    assert not (tiny.out / "bundle" / "certificate.json").exists()


def test_nothing_is_made_twice(tiny, finished, capsys):
    before = (tiny.out / state.FILE).read_bytes()
    assert line.main(tiny.words()) == 0
    told = capsys.readouterr()
    assert told.err.count("done before") == len(STEP_NAMES)
    assert json.loads(told.out.splitlines()[-1]) == finished
    assert (tiny.out / state.FILE).read_bytes() == before


def test_what_changed_and_what_depends_on_it_is_made_again(tiny, finished, monkeypatch, tmp_path):
    assert tiny.to_do() == {}
    more = tmp_path / "labels.jsonl"
    more.write_text(tiny.labels.read_text() + "\n")
    changed = tiny.to_do(labels=(more,))
    assert changed["labels"] == "its inputs changed" and list(changed) == STEP_NAMES
    assert list(tiny.to_do(release=2)) == [
        "export", "verify", "certify", "sign", "selftest",
    ]  # fmt: skip
    old = (tiny.folder / recipe.FILE).read_text()
    try:
        (tiny.folder / recipe.FILE).write_text(old + "thresholds: {defect_fail: 0.9}\n")
        assert next(iter(tiny.to_do())) == "draft"
    finally:
        (tiny.folder / recipe.FILE).write_text(old)
    card = tiny.out / "sft" / "training_card.json"
    kept = card.read_bytes()
    try:
        card.write_bytes(kept + b" ")
        assert "sft is not as the step left it" in tiny.to_do()["sft"]
    finally:
        card.write_bytes(kept)


def test_the_plan_is_shown_and_nothing_done(tiny, finished, capsys):
    before = (tiny.out / state.FILE).read_bytes()
    assert line.main(tiny.words("--dry-run", "--from", "export")) == 0
    told = capsys.readouterr().out
    assert json.loads(told.splitlines()[-1])["to_do"] == list(line.NAMES[9:])
    assert "not done yet" in told and (tiny.out / state.FILE).read_bytes() == before
    assert line.main(tiny.words("--dry-run", "--from", "fold-2")) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["to_do"] == ["fold-2", *line.NAMES[8:]]
    assert line.main(tiny.words("--from", "fold-3")) == 1
    assert "no such step" in capsys.readouterr().err


def test_a_damaged_state_stops_the_run(tiny, finished, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / state.FILE).write_text("{")
    words = tiny.words()
    words[words.index(str(tiny.out))] = str(out)
    assert line.main(words) == 1
    assert "the state of this run is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"evidence": None}, "belong together"),
        ({"checkpoint": Path("/nowhere")}, "no checkpoint to start from"),
        ({"key": Path("/nowhere.pem")}, "nowhere.pem"),
        ({"labels": (Path("/nowhere.jsonl"),)}, "--labels.*nowhere.jsonl"),
        ({"evidence": Path("/nowhere")}, "--evidence.*nowhere"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(tiny, changed, why):
    with pytest.raises(Exception, match=why):
        tiny.loop(**changed)


def test_a_wrong_recipe_names_its_key(tiny, tmp_path):
    shutil.copy(tiny.folder / "line.yaml", tmp_path)
    (tmp_path / recipe.FILE).write_text("sft: {stepz: 3}")
    with pytest.raises(LineError, match="stepz"):
        Loop.of(tmp_path, tmp_path / "out")
    with pytest.raises(LineError, match="no line"):
        Loop.of(tmp_path / "elsewhere", tmp_path / "out")
