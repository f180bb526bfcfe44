"""Packed branches: the station's layout, and the loss that every line has alone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from trl.trainer.utils import add_fused_lm_head

from forge_station.contract import tasks
from tests.training.large.small import sheet_example, surface_example
from training.data import conversations, examples
from training.data.examples import ExampleError, Message
from training.large import checkpoint as checkpoints
from training.large import rows
from training.large.branches import IGNORE, NONE_WEIGHT, BranchCollator, Layout, pad
from training.large.processor import load_processor, open_pictures
from training.large.trainers import BranchTrainer
from training.nano import model as nano
from training.nano import pack as nano_pack


@pytest.fixture(scope="module")
def model(checkpoint):
    found = checkpoints.load_model(str(checkpoint), torch.float32)
    add_fused_lm_head(found, outputs=("log_probs", "entropy", "is_top1"))
    return found.eval()


@pytest.fixture(scope="module")
def placed(example_file) -> dict[str, rows.Placed]:
    return {one.example.id: one for one in rows.read_split([example_file], "train")}


def batch_of(processor, *placed: rows.Placed) -> dict[str, torch.Tensor]:
    table = rows.branch_rows(placed)
    return BranchCollator(processor)([table[n] for n in range(len(placed))])


def loss_of(model, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The trainer's own loss of a batch, without a trainer."""
    alone = SimpleNamespace(_count=lambda *_: None)
    return BranchTrainer.compute_loss(alone, model, dict(batch))  # type: ignore[arg-type]


def lines_alone(model, processor, one: rows.Placed) -> tuple[float, float]:
    """Weighted sum of losses and of weights, every line read alone behind its text by transformers.

    Written from the contract's text, not from the layout under test.
    """
    encode = processor.tokenizer.backend_tokenizer.encode
    example = one.example
    (shown,) = open_pictures(one.pictures)
    width, height = shown.size
    picture = tasks.IMAGE_TOKEN * ((width // 28) * (height // 28))
    made = processor.image_processor(images=[shown], return_tensors="pt")
    user = [m.content.replace(examples.IMAGE, "") for m in example.messages if m.role == "user"]
    said = [m.content for m in example.messages if m.role == "assistant"]
    context = tasks.TRUNK_OPEN + tasks.IMAGE_OPEN + picture + tasks.IMAGE_CLOSE + user[0]
    context += tasks.ASSISTANT
    total, weights = 0.0, 0.0
    for turn, answer in enumerate(said):
        for branch in conversations.expanded(examples.branches(answer)):
            empty = branch.answer == tasks.NONE and " r" in branch.key
            weight = (NONE_WEIGHT if empty else 1.0) * example.weight
            end = "" if branch.answer == tasks.NONE else "\n"
            target = encode(f" {branch.answer}{end}").ids
            ids = [*encode(context).ids, *encode(branch.key).ids, *target]
            tokens = torch.tensor([ids])
            with torch.no_grad():
                logits = model(
                    input_ids=tokens,
                    pixel_values=made["pixel_values"],
                    image_grid_thw=made["image_grid_thw"],
                    mm_token_type_ids=(tokens == processor.image_token_id).int(),
                    use_cache=False,
                ).logits[0]
            lost = F.cross_entropy(
                logits[-len(target) - 1 : -1], torch.tensor(target), reduction="sum"
            )
            total += weight * float(lost)
            weights += weight * len(target)
        if turn + 1 < len(said):
            context += f"{answer}\n" + tasks.NEXT_USER + user[turn + 1] + tasks.ASSISTANT
    return total, weights


@pytest.mark.parametrize("name", ["s0", "m0"])
def test_the_packed_loss_is_that_of_the_lines_one_by_one(model, processor, placed, name) -> None:
    total, weights = lines_alone(model, processor, placed[name])
    batch = batch_of(processor, placed[name])
    assert float(batch["weight"].sum()) == pytest.approx(weights)
    with torch.no_grad():
        assert float(loss_of(model, batch)) == pytest.approx(total / weights, rel=1e-5)


def test_padding_and_company_change_nothing(model, processor, placed) -> None:
    both = batch_of(processor, placed["s0"], placed["m0"])
    alone = [batch_of(processor, placed[name]) for name in ("s0", "m0")]
    with torch.no_grad():
        losses = [float(loss_of(model, one) * one["weight"].sum()) for one in alone]
        together = float(loss_of(model, both) * both["weight"].sum())
    assert both["input_ids"].shape[1] > min(one["input_ids"].shape[1] for one in alone)
    assert together == pytest.approx(sum(losses), rel=1e-5)


def test_what_a_line_says_does_not_change_another_line(model, processor, placed) -> None:
    """Through the forward pass: other tokens in one branch leave all other branches as they are."""
    batch = batch_of(processor, placed["s0"])
    changed = dict(batch, input_ids=batch["input_ids"].clone())
    last = int((batch["shift_labels"][0] != IGNORE).nonzero()[-1])
    changed["input_ids"][0, last] = 7

    def scores(one: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            return model(
                input_ids=one["input_ids"],
                attention_mask=one["attention_mask"],
                position_ids=one["position_ids"].transpose(0, 1),
                pixel_values=one["pixel_values"],
                image_grid_thw=one["image_grid_thw"],
            ).logits[0]

    before, after = scores(batch), scores(changed)
    sees = batch["attention_mask"][0, 0, :, last]
    assert torch.equal(before[~sees], after[~sees])
    assert not torch.equal(before[last], after[last])


def test_an_empty_row_weighs_a_quarter_and_the_example_its_weight(processor) -> None:
    layout = Layout(processor)
    packed = layout.pack(replace(surface_example("s0"), weight=2.0), [(2, 2)])
    chosen = packed.target != IGNORE
    none = processor.tokenizer.backend_tokenizer.encode(" none").ids
    assert set(packed.weight[chosen]) == {2.0, 2.0 * NONE_WEIGHT}
    assert (packed.weight == 2.0 * NONE_WEIGHT).sum() == 15 * len(none)
    assert not packed.weight[~chosen].any()


def test_the_layout_is_that_of_the_nano_trainer(tmp_path) -> None:
    """The nano packer was written apart: same tokens, positions, targets, weights and mask."""
    (tmp_path / "config.json").write_text("{}")
    nano.build_tokenizer().save(str(tmp_path / "tokenizer.json"))
    layout = Layout(load_processor(str(tmp_path)))
    example = surface_example("s0")
    found = layout.pack(example, [(2, 3)])
    packed = nano_pack.Packed()
    facts = tasks.surface_facts("hex_nut M8", (13.0, 13.0, 6.8))
    start = packed.add_trunk(tasks.TRUNK_OPEN, (56, 84), facts + tasks.ASSISTANT)
    for branch in conversations.expanded(examples.branches(example.messages[-1].content)):
        empty = branch.answer == tasks.NONE
        packed.add_branch(
            branch.key, branch.answer, start, weight=nano_pack.NONE_WEIGHT if empty else 1.0
        )
    expected = nano_pack.collate([packed])
    size = len(packed.tokens)
    assert found.ids.tolist() == packed.tokens
    assert found.target.tolist() == packed.target
    assert found.weight.tolist() == packed.weight
    assert found.positions.T.tolist() == [list(where) for where in packed.position]
    np.testing.assert_array_equal(found.sees, expected.mask[0, 0, :size, :size].numpy())


def test_no_row_of_the_mask_is_empty(processor) -> None:
    layout = Layout(processor)
    short = layout.pack(surface_example("s0", defect=False), [(2, 2)])
    long = layout.pack(sheet_example("m0"), [(2, 3)])
    made = pad([short, long], 0)
    assert bool(made["attention_mask"].any(-1).all())
    assert not made["attention_mask"][0, 0, : len(short.ids), len(short.ids) :].any()


def test_a_picture_in_a_later_turn_is_refused(processor) -> None:
    example = sheet_example("m0")
    late = [*example.messages]
    late[3] = Message("user", "<image>" + late[3].content)
    example = replace(example, messages=tuple(late), images=("a.png", "b.png"))
    with pytest.raises(ExampleError, match=r"later turn.*sequential"):
        Layout(processor).pack(example, [(2, 2), (2, 2)])


def test_a_word_the_tokenizer_lacks_is_named(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    nano.build_tokenizer().save(str(tmp_path / "tokenizer.json"))
    example = surface_example("s0")
    odd = [*example.messages]
    odd[-1] = Message("assistant", "class: scratch")
    with pytest.raises(ExampleError, match=r"s0.*scratch"):
        Layout(load_processor(str(tmp_path))).pack(replace(example, messages=tuple(odd)), [(2, 2)])
