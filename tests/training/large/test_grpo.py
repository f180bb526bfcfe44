"""GRPO of a large model: one real step, and the checks before it."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.large import small
from training.data import conversations
from training.data.examples import Example
from training.large import checkpoint as checkpoints
from training.large import grpo, sft
from training.large.checkpoint import RunError
from training.large.rows import Placed
from training.rewards import read_target


def options(checkpoint: Path, example_file: Path, out: Path, *more: str) -> argparse.Namespace:
    """Two prompts a step, groups of two, one step."""
    parser = argparse.ArgumentParser()
    grpo.add_options(parser)
    given = f"--model {checkpoint} --examples {example_file} --out {out} --method full --lr 1e-3"
    given += " --micro 2 --group 2 --prompts 4 --prompts-a-step 2 --max-completion 64"
    return parser.parse_args([*given.split(), "--no-checkpointing", *more])


@pytest.fixture(scope="module")
def trained(checkpoint, example_file, tmp_path_factory) -> tuple[Path, dict]:
    """A run with rewards that depend on the text, so that there is something to learn from."""
    out = tmp_path_factory.mktemp("grpo") / "run"
    args = options(checkpoint, example_file, out)
    with pytest.MonkeyPatch.context() as patch:

        def many_e(completions, target, **_):
            assert all(isinstance(text, str) and text for text in target)
            return [float(one[-1]["content"].count("e")) for one in completions]

        patch.setattr(grpo, "trl_rewards", lambda recipe: ([many_e], [1.0]))
        return out, grpo.run(args)


def test_a_run_samples_learns_and_writes_a_checkpoint(checkpoint, trained) -> None:
    out, done = trained
    assert done["steps"] == 2 and done["prompts"] == 4
    before, after = small.weights(checkpoint), small.weights(out / "merged")
    assert before.keys() == after.keys()
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(moved) > len(before) // 2
    assert done["reward"]["last"] >= 0


def test_the_rewards_of_the_recipe_reach_the_trainer(checkpoint, example_file, tmp_path) -> None:
    trainer, _ = grpo.build(options(checkpoint, example_file, tmp_path))
    names = ["dice_reward", "score_reward", "format_reward", "choice_reward", "reading_reward"]
    assert trainer.reward_func_names == names
    assert trainer.reward_weights.tolist() == pytest.approx([1.0, 0.3, 0.1, 1.0, 1.0])
    config = trainer.args
    assert (config.beta, config.scale_rewards, config.loss_type) == (0.0, "group", "dapo")
    row = trainer.train_dataset[0]
    said = [[{"role": "assistant", "content": row["target"]}]]
    scores = [f(completions=said, target=[row["target"]])[0] for f in trainer.reward_funcs]
    assert {score for score in scores if score is not None} == {1.0}
    ids = trainer.generation_config.suppress_tokens
    table = trainer.processing_class.tokenizer.get_vocab()
    assert set(ids) == {
        table[f"<|{name}|>"] for name in ("vision_start", "vision_end", "image_pad")
    }


def test_no_dropout_is_active_while_sampling(
    checkpoint, example_file, tmp_path, monkeypatch
) -> None:
    """Trap: answers are sampled in training mode, where LoRA drops out."""
    real = checkpoints.lora_config
    monkeypatch.setattr(checkpoints, "lora_config", lambda rank, alpha, _: real(rank, alpha, 0.5))
    trainer, _ = grpo.build(options(checkpoint, example_file, tmp_path, "--method", "lora"))
    drops = [m for m in trainer.model.modules() if isinstance(m, torch.nn.Dropout)]
    assert drops and all(one.p == 0 for one in drops)


def test_right_padding_stops_a_run(checkpoint, example_file, tmp_path, monkeypatch) -> None:
    """Trap: token ids would be padded left and picture markers right."""
    real = grpo.load_processor

    def right(*given):
        processor = real(*given)
        processor.tokenizer.padding_side = "right"
        return processor

    monkeypatch.setattr(grpo, "load_processor", right)
    with pytest.raises(ValueError, match="pads on the wrong side"):
        grpo.build(options(checkpoint, example_file, tmp_path))


def test_a_cap_below_the_longest_target_stops_a_run(checkpoint, example_file, tmp_path) -> None:
    with pytest.raises(RunError, match=r"at most 20 tokens.*--max-completion \d+"):
        grpo.build(options(checkpoint, example_file, tmp_path, "--max-completion", "20"))


def test_vllm_is_asked_for_only_where_it_is(
    checkpoint, example_file, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(grpo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RunError, match="vLLM is not installed"):
        grpo.build(options(checkpoint, example_file, tmp_path, "--vllm"))


def placed(defect: bool, grid: bool = True) -> Placed:
    example = small.surface_example("one", defect=defect)
    if not grid:
        messages = conversations.surface("facts", "dent" if defect else "normal", 4, None)
        example = replace(example, messages=messages)
    return Placed(example, Path())


def test_unlabelled_is_not_clean() -> None:
    def of(one: Placed) -> tuple[str, bool]:
        wanted = read_target(grpo.target_of(one))
        return grpo.stratum(wanted), grpo.is_clean(wanted)

    assert of(placed(True)) == ("dent, 1", False)
    assert of(placed(False)) == ("normal, 0", True)
    assert of(placed(True, grid=False)) == ("dent, no grid", False)
    readings = Example("m", small.sheet_example("m").messages[:3], ("m.png",))
    assert of(Placed(readings, Path())) == ("readings, no grid", False)


def test_prompts_are_stratified_with_a_share_of_clean_ones() -> None:
    pool = [placed(n % 10 > 0) for n in range(40)]  # 4 of 40 are clean
    found = grpo.choose(pool, 20, 0.5, 0)
    clean = [grpo.is_clean(read_target(grpo.target_of(one))) for one in found]
    assert sum(clean) == 10
    as_they_come = grpo.choose(pool, 20, None, 0)
    assert sum(grpo.is_clean(read_target(grpo.target_of(one))) for one in as_they_come) == 2
    assert np.any(np.diff(clean))


def test_accumulation_counts_answers(checkpoint, example_file, tmp_path) -> None:
    args = options(checkpoint, example_file, tmp_path)
    assert sft.accumulation(args.prompts_a_step * args.group, args.micro) == 2
