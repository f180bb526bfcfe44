"""Fine-tuning runs end to end on a tiny checkpoint: what they write, resume, refuse and leave."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import Qwen2_5_VLForConditionalGeneration

from export.network import read_network
from export.tensors import Checkpoint
from tests.training.large import small
from training.data import examples
from training.data.examples import ExampleError
from training.large import checkpoint as checkpoints
from training.large import rows, sft
from training.large.branches import BranchCollator
from training.large.checkpoint import RunError


@pytest.fixture(scope="module")
def whole(checkpoint, example_file, tmp_path_factory) -> Path:
    """An uninterrupted full run of four steps, validated and saved every two."""
    out = tmp_path_factory.mktemp("whole") / "run"
    sft_command(small.words(checkpoint, example_file, out))
    return out


def sft_command(arguments: list[str]) -> None:
    small.command.main(arguments)


def options(checkpoint: Path, example_file: Path, out: Path, *more: str):
    """Parsed options of a small run, defaults of the method filled in."""
    import argparse

    parser = argparse.ArgumentParser()
    sft.add_options(parser)
    args = parser.parse_args(small.words(checkpoint, example_file, out, *more))
    args.epochs = args.epochs or sft.METHODS[args.method].epochs
    return args


def test_a_run_writes_a_checkpoint_that_transformers_and_export_read(checkpoint, whole) -> None:
    merged = whole / "merged"
    assert {path.name for path in merged.iterdir()} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "training_card.json",
    }
    assert (merged / "tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()
    assert small.weights(merged).keys() == small.weights(checkpoint).keys()
    Qwen2_5_VLForConditionalGeneration.from_pretrained(merged)
    network = read_network(merged)
    stored = Checkpoint(merged)
    assert stored is not None and network.text.layers == 1
    card = json.loads((merged / "training_card.json").read_text())
    assert card["none_weight"] == 0.25
    assert card["steps"] == 4 and card["layout"] == "branches"
    assert not list(whole.glob("*.partial"))


def test_every_weight_learns_and_the_loss_falls(checkpoint, whole) -> None:
    before, after = small.weights(checkpoint), small.weights(whole / "merged")
    assert not [name for name in before if torch.equal(before[name], after[name])]
    curve = [json.loads(line) for line in (whole / "curve.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in curve if "loss" in row]
    held = [row["eval_loss"] for row in curve if "eval_loss" in row]
    assert len(losses) == 4 and len(held) == 2
    assert losses[-1] < 0.9 * losses[0]
    assert held[-1] < held[0]


def test_the_rate_warms_up_and_falls_as_a_cosine(whole) -> None:
    curve = [json.loads(line) for line in (whole / "curve.jsonl").read_text().splitlines()]
    rates = [row["learning_rate"] for row in curve if "learning_rate" in row]
    # 3 % of four steps is one step: 0, then 1, cos(pi / 3) and cos(2 pi / 3) raised to 0..1
    assert rates == pytest.approx([0, 1e-3, 0.75e-3, 0.25e-3])


def test_a_resumed_full_run_ends_in_the_weights_of_a_whole_one(
    checkpoint, example_file, whole, tmp_path
) -> None:
    """Trap: the Trainer resumes full runs without their weights, with a warning only."""
    out = tmp_path / "run"
    shutil.copytree(whole / "checkpoint-2", out / "checkpoint-2")
    (out / "checkpoint-3").mkdir()  # what a kill in the middle of writing leaves
    shutil.copy(whole / "checkpoint-4" / "model.safetensors", out / "checkpoint-3")
    shutil.copy(whole / "run.json", out)
    sft_command(small.words(checkpoint, example_file, out, "--resume"))
    small.assert_same(small.weights(out / "merged"), small.weights(whole / "merged"))


def test_a_run_is_not_resumed_with_other_settings(checkpoint, example_file, whole, tmp_path):
    args = options(checkpoint, example_file, whole, "--resume", "--seed", "5")
    with pytest.raises(RunError, match=r"--seed.*expected \[0\], got \[5\]"):
        sft.start(args)


def test_a_folder_with_a_run_is_not_written_over(checkpoint, example_file, whole) -> None:
    with pytest.raises(SystemExit, match="--resume"):
        sft_command(small.words(checkpoint, example_file, whole))


def test_the_best_weights_are_kept_not_the_last(checkpoint, example_file, tmp_path, capsys) -> None:
    """A rate that destroys: the run stops early, and ends in the weights of its best checkpoint."""
    more = ("--max-steps", "12", "--every", "1", "--patience", "2", "--lr", "0.3")
    done = small.run(capsys, small.words(checkpoint, example_file, tmp_path, *more))
    assert done["steps"] < 12
    curve = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    held = {row["step"]: row["eval_loss"] for row in curve if "eval_loss" in row}
    best = min(held, key=lambda step: held[step])
    assert best < max(held)
    kept = small.weights(tmp_path / f"checkpoint-{best}")
    small.assert_same(kept, small.weights(tmp_path / "merged"))


@pytest.mark.parametrize("layout", sft.LAYOUTS)
def test_micro_batches_and_one_batch_have_the_same_loss(
    checkpoint, example_file, tmp_path, layout
) -> None:
    """The loss is a mean over the tokens of a step, however they are divided."""
    losses = []
    for micro in ("1", "2", "4"):
        more = ("--micro", micro, "--batch", "4", "--max-steps", "1", "--layout", layout)
        trainer, _ = sft.build(options(checkpoint, example_file, tmp_path / micro, *more))
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[0] > 1
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)


def test_lora_learns_the_language_model_and_leaves_the_vision_tower(
    checkpoint, example_file, tmp_path, capsys
) -> None:
    """Trap: names of layers alone would adapt the vision tower as well."""
    more = ("--method", "lora", "--lr", "1e-2", "--rank", "4", "--max-steps", "2")
    done = small.run(capsys, small.words(checkpoint, example_file, tmp_path, *more))
    width, inner, kv = 192, 512, 192
    sides = 2 * (width + width) + 2 * (width + kv) + 3 * (width + inner)
    assert done["trainable"] == 4 * sides
    before, after = small.weights(checkpoint), small.weights(tmp_path / "merged")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    layer = "model.layers.0."
    assert moved == {
        *(f"{layer}self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"{layer}mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    }


def test_merged_weights_answer_as_the_adapted_model(
    checkpoint, example_file, processor, tmp_path
) -> None:
    more = ("--method", "lora", "--lr", "1e-2", "--max-steps", "2", "--rank", "4")
    args = options(checkpoint, example_file, tmp_path, *more)
    trainer, _ = sft.build(args)
    trainer.train()
    folder = checkpoints.write_merged(trainer, str(checkpoint), tmp_path, {})
    placed = rows.read_split([example_file], "val")
    batch = BranchCollator(processor)([rows.branch_rows(placed)[0]])
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "pixel_values")}
    inputs |= {"position_ids": batch["position_ids"].transpose(0, 1)}
    inputs |= {"image_grid_thw": batch["image_grid_thw"]}
    merged = checkpoints.load_model(str(folder), torch.float32)
    with torch.no_grad():
        found = merged.eval()(**inputs).logits
        expected = trainer.model.eval()(**inputs).logits
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def test_adapters_of_the_3b_model_are_in_the_language_model_only() -> None:
    from peft import get_peft_model

    from training.large.shapes import meta_model, shape_config

    model = get_peft_model(meta_model(shape_config("3b", 2)), checkpoints.lora_config(32, 16, 0.05))
    adapted = [name for name, _ in model.named_parameters() if "lora_A" in name]
    assert len(adapted) == 2 * 7
    assert not [name for name in adapted if "visual" in name]


def test_the_sequential_form_learns_every_turn_and_target_tokens_only(
    checkpoint, example_file, processor, tmp_path
) -> None:
    args = options(checkpoint, example_file, tmp_path, "--layout", "sequential")
    trainer, _ = sft.build(args)
    table = trainer.train_dataset
    assert len(table) == 4 + 2 * 2
    batch = trainer.data_collator([table[0], table[4], table[5]])
    learned = [processor.tokenizer.decode(row[row != -100]) for row in batch["labels"]]
    assert learned[0].startswith("class: dent\nscore: 4/10\nfront r5: 5,6<|im_end|>")
    assert learned[1].startswith("A: hex_bolt M8x30\nB: hex_nut M8<|im_end|>")
    assert learned[2].startswith("A: right\nB: wrong\nanswer: B")
    lengths = rows.sequential_length(processor)
    taken = list(rows.by_turn(rows.read_split([example_file], "train")))
    assert int(batch["attention_mask"][0].sum()) == lengths(taken[0])
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < losses[0]


def test_a_weight_is_not_silently_lost_in_the_sequential_form() -> None:
    one = rows.Placed(replace(small.surface_example("s0"), weight=0.5), Path())
    with pytest.raises(ExampleError, match=r"s0.*--layout branches"):
        rows.require_equal_weights([one])


def test_a_text_only_row_is_refused(tmp_path) -> None:
    """Trap: it stops the other processes of a sharded run for ever."""
    text = replace(
        small.surface_example("s0"),
        images=(),
        messages=tuple(
            replace(m, content=m.content.replace("<image>", ""))
            for m in small.surface_example("s0").messages
        ),
    )
    examples.write(tmp_path / "e.jsonl", [text])
    with pytest.raises(ExampleError, match="text-only"):
        rows.read_split([tmp_path / "e.jsonl"], "train")


def test_an_example_is_refused_rather_than_cut(checkpoint, example_file, tmp_path) -> None:
    with pytest.raises(SystemExit, match="at most 100 tokens"):
        sft_command(small.words(checkpoint, example_file, tmp_path, "--max-length", "100"))


def test_a_missing_picture_is_found_before_training(checkpoint, tmp_path) -> None:
    examples.write(tmp_path / "e.jsonl", [small.surface_example("s0")])
    with pytest.raises(SystemExit, match=r"s0\.png"):
        sft_command(small.words(checkpoint, tmp_path / "e.jsonl", tmp_path / "run"))


def test_a_file_without_training_examples_is_refused(checkpoint, tmp_path) -> None:
    examples.write(tmp_path / "e.jsonl", [small.surface_example("v0", "val")])
    Image.new("RGB", (56, 56)).save(tmp_path / "v0.png")
    with pytest.raises(SystemExit, match="nothing to learn from"):
        sft_command(small.words(checkpoint, tmp_path / "e.jsonl", tmp_path / "run"))


def test_a_batch_that_does_not_divide_is_refused(monkeypatch) -> None:
    assert sft.accumulation(32, 4) == 8
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert sft.accumulation(32, 4) == 1
    with pytest.raises(RunError, match="a multiple of --micro x processes = 3 x 8"):
        sft.accumulation(32, 3)


def test_another_architecture_is_refused(checkpoint, tmp_path) -> None:
    shutil.copytree(checkpoint, tmp_path / "other")
    config = json.loads((checkpoint / "config.json").read_text()) | {"model_type": "qwen3_vl"}
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    with pytest.raises(RunError, match="expected model_type qwen2_5_vl, got qwen3_vl"):
        checkpoints.load_model(str(tmp_path / "other"), torch.float32)


def test_a_name_that_is_nowhere_is_one_clear_error(monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RunError, match=r"checkpoint cannot be found \(no/such-model\)"):
        checkpoints.checkpoint_file("no/such-model", "tokenizer.json")


def test_only_a_complete_checkpoint_is_resumed(tmp_path) -> None:
    for step, state in ((2, '{"global_step": 2}'), (10, '{"global_step": 10}'), (12, '{"glob')):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(state)
    (tmp_path / "checkpoint-14").mkdir()
    assert checkpoints.last_complete(tmp_path) == tmp_path / "checkpoint-10"
    assert checkpoints.last_complete(tmp_path / "none") is None


def test_weights_are_stored_in_the_precision_of_the_source(checkpoint, tmp_path) -> None:
    assert checkpoints.stored_dtype(str(checkpoint)) == torch.float32
    shutil.copytree(checkpoint, tmp_path / "half")
    config = json.loads((checkpoint / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
    (tmp_path / "half" / "config.json").write_text(json.dumps(config))
    assert checkpoints.stored_dtype(str(tmp_path / "half")) == torch.bfloat16
