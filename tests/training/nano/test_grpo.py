"""Groups, advantages and updates of the nano GRPO on tiny pools and a model of few weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="training needs the extra training")

import torch

from forge_station.contract import tasks
from forge_station.vlm.decode import corrected_nonempty
from tests.training.nano.tiny_pools import write_pools, write_surfaces
from training import grpo as command
from training.nano import answers, grpo, pack, sft, trial, validate
from training.nano import model as nano
from training.nano.pools import SurfacePool, write_shard
from training.rewards import Recipe, RewardError

SMALL = grpo.Settings(prompts=8, batch=2, group=3)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pools")
    write_pools(folder)
    return folder


@pytest.fixture(scope="module")
def pool(data) -> SurfacePool:
    return SurfacePool.open(data, "surface")


def tiny_trainer(seed: int) -> sft.Trainer:
    torch.manual_seed(seed)
    model = nano.build_model(vision_width=32, vision_depth=1, text_width=64, text_depth=2)
    with torch.no_grad():  # larger than a usual initialisation, so that differences show
        for weight in model.model.language_model.parameters():
            if weight.ndim == 2:
                weight.mul_(3.0)
    return sft.Trainer(model, sft.AuxiliaryHeads(64), 0.5, np.random.default_rng(seed))


@pytest.fixture(scope="module")
def init(tmp_path_factory) -> Path:
    """A checkpoint folder as training.sft leaves it."""
    folder = tmp_path_factory.mktemp("init")
    trainer = tiny_trainer(7)
    nano.save_checkpoint(trainer.model, folder, {"seed": 7})
    sft.save_state(folder / "state.pt", trainer, 0.0, 0)
    return folder


@pytest.fixture(scope="module")
def drawn(pool):
    """Two prompts, two answers each, with their trainer, in float32."""
    trainer = tiny_trainer(1)
    lengths = [len(p.tokens) for p in answers.prompts(pool, np.arange(8), None).trunks]
    index = np.array([np.argmin(lengths), np.argmax(lengths)])
    given = answers.prompts(pool, index, None)
    embeds = answers.Vision(trainer.forward, pool, frozen=False)(index).detach()
    found = answers.sample(trainer.model, given, embeds, 2, np.random.default_rng(0))
    return trainer, given, embeds, found


def line_text(found: answers.Answers, i: int, g: int, line: int) -> tuple[str, str]:
    if line == answers.CLASS_LINE:
        return tasks.CLASS_KEY, tasks.SURFACE_CLASSES[found.defect[i, g]]
    if line == answers.SCORE_LINE:
        return tasks.SCORE_KEY, f"{found.score[i, g]}/10"
    row = found.cells[i, g].reshape(answers.ROWS, 16)[line]
    return tasks.row_key(*tasks.ROW_KEYS[line]), tasks.row_text(np.flatnonzero(row).tolist())


def branch_logits(trainer, given, embeds, i: int, key: str, answer: str):
    """(logits [K, choices], choices made [K], grammar [K, choices]) of one branch.

    By the trainer's own forward, with the grammar written down here a second time.
    """
    one = pack.Packed()
    trunk = given.trunks[i]
    for name in ("tokens", "target", "weight", "position", "segment", "parent"):
        getattr(one, name).extend(getattr(trunk, name))
    one.add_branch(key, answer, given.start[i])
    batch = pack.collate([one])
    chosen = batch.target[0] != pack.IGNORE
    with torch.no_grad():
        logits = trainer.model.lm_head(trainer.hidden(batch, embeds[i : i + 1])[0, chosen])
    words = nano.vocabulary()
    allowed, bonus = [], np.log(1 / pack.NONE_WEIGHT)
    if key == tasks.CLASS_KEY:
        allowed = [dict.fromkeys(tasks.SURFACE_CLASSES, 0.0)]
    elif key == tasks.SCORE_KEY:
        allowed = [{str(score): 0.0 for score in range(11)}]
    else:
        allowed = [{"none": bonus, **{str(column): 0.0 for column in range(1, 17)}}]
        for column in [] if answer == tasks.NONE else answer.split(","):
            later = {f",{later}": 0.0 for later in range(int(column) + 1, 17)}
            allowed.append({"\n": 0.0, **later})
    grammar = torch.full((len(allowed), len(answers.TOKENS)), -torch.inf)
    places = {words[token]: place for place, token in enumerate(answers.TOKENS.tolist())}
    for k, following in enumerate(allowed):
        for word, value in following.items():
            grammar[k, places[word]] = value
    target = batch.target[0, chosen][: len(allowed)]
    made = torch.tensor([places[words[token]] for token in target.tolist()])
    return logits.float()[: len(allowed), answers.TOKENS] + grammar, made, grammar


def test_sampled_logprobs_are_those_of_a_forward_of_each_branch(drawn):
    """Padding of trunks and branches, the cache, shared prefixes and the grammar change nothing."""
    trainer, given, embeds, found = drawn
    assert len(given.trunks[0].tokens) != len(given.trunks[1].tokens)  # one of them is padded
    sums, counts = np.zeros((2, 2, answers.LINES)), np.zeros((2, 2, answers.LINES), int)
    made = tuple(found.made.numpy())
    np.add.at(sums, made, found.logprobs.detach().numpy())
    np.add.at(counts, made, 1)
    lengths = set()
    for i, g, line in np.ndindex(2, 2, answers.LINES):
        if line % 3 and line < answers.ROWS:
            continue
        key, text = line_text(found, i, g, line)
        logits, target, _ = branch_logits(trainer, given, embeds, i, key, text)
        expected = logits.log_softmax(-1).gather(1, target[:, None])
        assert sums[i, g, line] == pytest.approx(float(expected.sum()), abs=2e-4), (key, text)
        # behind column 16 only the newline may follow
        assert counts[i, g, line] == len(target)
        lengths.add(len(target))
    assert {1, 2, 3} <= lengths
    np.testing.assert_array_equal(counts.sum(-1), found.tokens)


def test_the_weight_of_none_is_undone_as_the_station_does(drawn):
    trainer, given, embeds, found = drawn
    key = tasks.row_key("side", 4)
    line = tasks.ROW_KEYS.index(("side", 4))
    logits, _, grammar = branch_logits(trainer, given, embeds, 0, key, tasks.NONE)
    allowed = torch.isfinite(grammar[0])
    raw = (logits[0, allowed] - grammar[0, allowed]).softmax(0)[0]  # `none` comes first
    expected = corrected_nonempty(np.array(float(raw)), pack.NONE_WEIGHT)
    assert found.nonempty[0, line] == pytest.approx(float(expected), abs=1e-5)


def test_rows_are_drawn_with_their_probability(drawn):
    trainer, given, embeds, found = drawn
    many = answers.sample(trainer.model, given, embeds, 150, np.random.default_rng(3))
    filled = many.cells.reshape(2, 150, answers.ROWS, 16).any(-1).mean(1)
    assert abs(filled - found.nonempty).max() < 5 * np.sqrt(0.25 / 150)
    assert abs((filled - found.nonempty).mean()) < 5 * np.sqrt(0.25 / 150 / 96)
    classes = np.stack([np.bincount(row, minlength=5) for row in many.defect]) / 150
    assert abs(classes - found.class_odds).max() < 5 * np.sqrt(0.25 / 150)


def test_the_row_threshold_is_the_stations(drawn):
    trainer, given, embeds, found = drawn
    with torch.no_grad():
        for threshold in (0.0, 0.8, 1.1):
            best = answers.best(trainer.model, given, embeds, threshold)
            filled = best.cells.reshape(2, answers.ROWS, 16).any(-1)
            np.testing.assert_array_equal(filled, found.nonempty >= threshold)
        best = answers.best(trainer.model, given, embeds, 0.0)
    for line in (3, 20, 40, answers.CLASS_LINE, answers.SCORE_LINE):
        key, text = line_text(best, 1, 0, line)
        logits, made, _ = branch_logits(trainer, given, embeds, 1, key, text)
        if line < answers.ROWS:
            logits[0, answers.NONE] = -torch.inf
        assert logits.argmax(-1).tolist() == made.tolist()


def test_figures_on_a_pool(data):
    trainer = tiny_trainer(1)
    held = SurfacePool.open(data, "surface-val")
    figures = validate.surface_figures(trainer.model, held)
    best = validate.surface_answers(trainer.model, held, 500, validate.SHIPPED.grid_row)
    truth = held.shards.meta["grid"]
    cells = best.cells[:, 0]
    both, either = (cells & truth).sum((1, 2, 3)), (cells | truth).sum((1, 2, 3))
    defective = held.shards.meta["defect"] > 0
    assert figures["samples"] == 3
    assert figures["grid_iou"] == pytest.approx((both / either)[defective].mean(), abs=1e-4)
    assert figures["clean_alarms_grid"] == float(cells[~defective].any())
    assert trainer.model.training


# Rewards and advantages


def test_advantages_by_hand():
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [0.3, 0.3, 0.3, 0.3]])
    scaled = grpo.advantages(rewards, "group")  # deviation with n - 1: sqrt(1 / 3)
    np.testing.assert_allclose(scaled[0], np.array([1, -1, -1, 1]) * 0.5 / (3**-0.5 + 1e-4))
    np.testing.assert_array_equal(scaled[1], 0)
    np.testing.assert_allclose(grpo.advantages(rewards, "none")[0], [0.5, -0.5, -0.5, 0.5])


def answered(cells: np.ndarray, defect=None, score=None, overrun=None) -> answers.Answers:
    """Answers with the given cells [B, G, 3, 16, 16]; what else is asked is right by default."""
    count, group = cells.shape[:2]
    zeros = np.zeros((count, group), int)
    cut = np.zeros((count, group, answers.ROWS), bool) if overrun is None else overrun
    return answers.Answers(
        cells,
        zeros if defect is None else defect,
        zeros if score is None else score,
        zeros + 50,
        cut,
        *(np.zeros((count, n)) for n in (5, 11, answers.ROWS)),
        logprobs=torch.zeros(0),
        made=torch.zeros(3, 0, dtype=torch.long),
    )


def asked(grid: np.ndarray, defect: int = 0, score: int = 0) -> answers.Prompts:
    """Prompts of the given truth [B, 3, 16, 16]."""
    full = np.full(len(grid), 1)
    return answers.Prompts([pack.Packed()] * len(grid), [0], grid, full * defect, full * score)


def some_cells(rng: np.random.Generator, group: int) -> tuple[np.ndarray, np.ndarray]:
    truth = rng.random((1, 3, 16, 16)) < 0.04
    cells = (truth[:, None] & (rng.random((1, group, 3, 16, 16)) < 0.7)) | (
        rng.random((1, group, 3, 16, 16)) < 0.01
    )
    return truth, cells


@pytest.mark.parametrize("clean", [False, True])
def test_the_credit_of_a_row_is_its_mean_reward_in_every_answer_of_the_group(clean):
    truth, cells = some_cells(np.random.default_rng(0), 3)
    truth &= not clean
    recipe = Recipe(clean_cells=40, score=0, choice=0, format=0)
    settings = replace(SMALL, credit="row", scale="none", recipe=recipe)
    earned = grpo.credit(answered(cells), asked(truth), settings)
    flat = cells[0].reshape(3, answers.ROWS, 16)

    def dice(grid: np.ndarray) -> float:
        hits = (grid & truth[0].reshape(answers.ROWS, 16)).sum()
        if clean:
            return 1 - min(40, grid.sum()) / 40
        return 2 * hits / (grid.sum() + truth.sum())

    means = np.zeros((3, answers.ROWS))
    for i, row in np.ndindex(3, answers.ROWS):
        for j in range(3):
            mixed = flat[j].copy()
            mixed[row] = flat[i, row]
            means[i, row] += dice(mixed) / 3
    expected = means - means.mean(0)
    np.testing.assert_allclose(earned.advantage[0, :, : answers.ROWS], expected, atol=1e-12)
    np.testing.assert_array_equal(earned.advantage[0, :, answers.ROWS :], 0)
    np.testing.assert_allclose(earned.rewards["dice"][0], [dice(grid) for grid in flat])


def test_where_one_row_differs_it_gets_the_advantage_of_the_answer():
    truth, cells = some_cells(np.random.default_rng(1), 1)
    group = np.repeat(cells, 4, axis=1)
    group[0, 1, 2, 5, 3:9] = True
    found, given = answered(group), asked(truth)
    by_row = grpo.credit(found, given, replace(SMALL, credit="row")).advantage[0]
    whole = grpo.credit(found, given, replace(SMALL, credit="answer")).advantage[0]
    changed = tasks.ROW_KEYS.index(("top", 5))
    np.testing.assert_allclose(by_row[:, changed], whole[:, 0], atol=1e-6)
    assert np.flatnonzero(by_row.any(0)).tolist() == [changed]
    assert (whole == whole[:, :1]).all() and whole[1, 0] != 0


@pytest.mark.parametrize("kind", ["row", "answer"])
def test_equal_answers_teach_nothing(kind):
    truth, cells = some_cells(np.random.default_rng(2), 1)
    found = answered(np.repeat(cells, 4, axis=1))
    earned = grpo.credit(found, asked(truth), replace(SMALL, credit=kind))
    assert not earned.advantage.any()


def test_rewards_of_class_score_and_rows_that_were_cut_off():
    truth = np.zeros((1, 3, 16, 16), bool)
    cells = np.zeros((1, 3, 3, 16, 16), bool)
    cut = np.zeros((1, 3, answers.ROWS), bool)
    cut[0, 2, 4] = True
    found = answered(cells, np.array([[0, 2, 0]]), np.array([[10, 7, 10]]), cut)
    earned = grpo.credit(found, asked(truth, 0, 10), replace(SMALL, scale="none"))
    assert earned.rewards["choice"].tolist() == [[1, 0, 1]]
    np.testing.assert_allclose(earned.rewards["score"], [[1, 0.7, 1]])
    assert earned.rewards["dice"].tolist() == earned.rewards["format"].tolist() == [[1, 1, 0]]
    np.testing.assert_allclose(earned.rewards["total"], [[2.4, 1 + 0.21 + 0.1, 1.3]])
    line = earned.advantage[0, :, answers.CLASS_LINE]
    np.testing.assert_allclose(line, [1 / 3, -2 / 3, 1 / 3])
    # cutting row 4 off costs dice and format in the two answers that were not cut off already
    assert earned.advantage[0, 2, 4] < 0 < earned.advantage[0, 0, 4]


# Prompts


def test_the_audit_refuses_targets_that_an_answer_cannot_reach(pool):
    index = np.arange(8)
    found = grpo.audit(pool, index, SMALL)  # rows of 3 cells and a newline
    assert found == {"longest_row": 4, "longest_target": 2 + 48 + 3, "prompts": 8}
    grpo.audit(pool, index, replace(SMALL, longest_row=4))
    with pytest.raises(RewardError, match=r"6 prompts.*at most 3 tokens, got 4 tokens"):
        grpo.audit(pool, index, replace(SMALL, longest_row=3))
    grpo.audit(pool, np.array([0, 5]), replace(SMALL, longest_row=1))  # clean ones are short


def test_the_audit_refuses_a_defect_without_cells(tmp_path):
    meta = write_surfaces(tmp_path / "surface", 0, 0)
    meta["grid"][3] = False
    write_shard(tmp_path / "surface", 0, np.zeros((8, 224, 672, 3), np.uint8), meta)
    with pytest.raises(RewardError, match=r"samples \[3\]"):
        grpo.audit(SurfacePool.open(tmp_path, "surface"), np.arange(8), SMALL)


def test_settings_need_a_group():
    with pytest.raises(RewardError, match="no group"):
        grpo.Settings(group=1)


# Runs


def test_the_reward_rises(pool):
    """Two samples of one class: the answer to learn is the same for both."""
    trainer = tiny_trainer(3)
    settings = replace(SMALL, group=4)
    vision = answers.Vision(trainer.forward, pool, frozen=True)
    trainer.model.model.visual.requires_grad_(False)
    before = {name: w.clone() for name, w in trainer.model.named_parameters()}
    index = np.array([1, 6, 1, 6])
    totals = []
    for _ in range(12):
        trainer.set_rate(1.0)
        totals.append(grpo.train_step(trainer, pool, index, vision, settings)["total"])
    assert np.mean(totals[-3:]) > np.mean(totals[:3]) + 0.3
    for name, weight in trainer.model.named_parameters():
        assert "visual" not in name or torch.equal(weight, before[name])


def state(trainer: sft.Trainer) -> dict[str, torch.Tensor]:
    return trainer.model.state_dict()


def test_a_killed_run_resumes_to_the_same_weights(pool, init, tmp_path, monkeypatch):
    whole = grpo.load(init, SMALL)
    last = grpo.run(whole, pool, tmp_path / "whole", SMALL, every=2)
    assert last["step"] == SMALL.steps == 4

    steps = iter(range(10))
    real = grpo.train_step

    def killed(*args):
        if next(steps) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(grpo, "train_step", killed)
    with pytest.raises(KeyboardInterrupt):
        grpo.run(grpo.load(init, SMALL), pool, tmp_path / "part", SMALL, every=2)
    monkeypatch.undo()
    again = grpo.load(init, SMALL)
    grpo.run(again, pool, tmp_path / "part", SMALL, every=2, resume=True)
    for name, weight in state(whole).items():
        assert torch.equal(weight, state(again)[name]), name
    curve = (tmp_path / "part" / "curve.jsonl").read_text()
    rows = [json.loads(line) for line in curve.splitlines()]
    assert [row["step"] for row in rows] == [2, 4]
    with pytest.raises(RewardError, match=r"rate.*expected 0\.3, got 0\.5"):
        grpo.run(again, pool, tmp_path / "part", replace(SMALL, rate=0.5), resume=True)


def test_a_run_writes_a_checkpoint_unless_clean_alarms_rose(data, init, tmp_path, capsys):
    words = ["--data", data, "--init", init, "--out", tmp_path / "a", "--prompts", 4, "--batch", 2]
    words = [str(word) for word in [*words, "--threads", 1, "--validate", 3]]
    command.main([*words, "--alarm-gate", "1"])
    done = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert done["after"]["steps"] == 2 and done["before"]["samples"] == 3
    assert done["settings"]["recipe"]["clean_cells"] == 16
    card = json.loads((tmp_path / "a" / "training_card.json").read_text())
    assert card["seed"] == 7 and card["grpo"]["after"] == done["after"]
    assert (tmp_path / "a" / "model.safetensors").exists()
    with pytest.raises(SystemExit, match=r"raised the alarms.*clean_alarms_grid"):
        command.main([*words, "--out", str(tmp_path / "b"), "--alarm-gate", "-2"])
    assert not (tmp_path / "b" / "model.safetensors").exists()
    with pytest.raises(SystemExit, match="no checkpoint to start from"):
        command.main([*words, "--init", str(tmp_path)])


def test_grpo_is_compared_with_sft_from_the_same_start(data, init, tmp_path):
    def compare() -> dict:
        return trial.trial(
            data, init, tmp_path, replace(SMALL, prompts=4), [1], sft_prompts=2, validate=3
        )

    done = compare()
    runs = json.loads((tmp_path / "trial.json").read_text())["runs"]
    assert [run["steps"] for run in runs["grpo"]] == [2]
    assert [run["steps"] for run in runs["sft"]] == [1]
    curve = json.loads((tmp_path / "sft-1" / "curve.jsonl").read_text())
    assert "tokens_right" in curve and "dice" not in curve
    for name, found in done["grpo_less_sft"].items():
        each = [a[name] - b[name] for a, b in zip(runs["grpo"], runs["sft"], strict=True)]
        assert found["mean"] == pytest.approx(np.mean(each), abs=1e-4)
    before = (tmp_path / "grpo-1" / "state.pt").stat().st_mtime_ns
    compare()
    assert (tmp_path / "grpo-1" / "state.pt").stat().st_mtime_ns == before


def test_paired_differences_by_hand():
    first, second = [{"iou": 0.5}, {"iou": 0.7}], [{"iou": 0.4}, {"iou": 0.4}]
    found = trial.paired(first, second)["iou"]
    assert found == {"mean": 0.2, "deviation": 0.1414, "each": [0.1, 0.3]}
