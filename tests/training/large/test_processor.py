"""Pictures and text reach the model as the station sends them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer

from forge_station.contract import tasks
from forge_station.contract.error import ContractError
from forge_station.vlm.preprocess import VisionGeometry, normalised_patches
from tests.training.large.small import surface_example
from training.data import examples
from training.large.branches import pixels
from training.large.processor import (
    load_processor,
    open_pictures,
    require_left_padding,
    suppressed_tokens,
    token_grid,
)


@pytest.mark.parametrize("size", [(56, 56), (84, 56), (112, 168)])
def test_pixels_are_those_of_the_station(processor, size) -> None:
    rgb = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    values, grid = pixels(processor, [Image.fromarray(rgb)])
    expected = normalised_patches(rgb, VisionGeometry())
    assert grid.tolist() == [[1, size[1] // 14, size[0] // 14]]
    np.testing.assert_allclose(values.numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("size", [(56, 56), (100, 75), (30, 31), (4000, 3000)])
def test_the_number_of_picture_tokens_is_known_before_the_picture_is_read(processor, size) -> None:
    rows, columns = token_grid(processor, size)
    if max(size) < 1000:
        _, grid = pixels(processor, [Image.new("RGB", size)])
        assert grid.tolist() == [[1, 2 * rows, 2 * columns]]
    assert 4 <= rows * columns <= 1280


def test_the_chat_template_writes_the_text_of_the_contract(processor) -> None:
    row = examples.to_trl(surface_example("s0"), Path())
    text = processor.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
    picture = tasks.IMAGE_OPEN + tasks.IMAGE_TOKEN + tasks.IMAGE_CLOSE
    facts = tasks.surface_facts("hex_nut M8", (13.0, 13.0, 6.8))
    assert text == tasks.TRUNK_OPEN + picture + facts + tasks.ASSISTANT


def test_token_ids_are_those_of_the_tokenizer_file(processor, checkpoint) -> None:
    plain = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    text = tasks.TRUNK_OPEN + "front r5: 5,6\n<|im_end|>\nhex_bolt M8x30"
    expected = plain.encode(text, add_special_tokens=False).ids
    assert processor.tokenizer(text, add_special_tokens=False)["input_ids"] == expected


def test_one_row_of_trl_has_a_token_for_every_merged_patch(processor) -> None:
    row = examples.to_trl(surface_example("s0"), Path())
    text = processor.apply_chat_template(row["prompt"], tokenize=False)
    made = processor(text=[text], images=[[Image.new("RGB", (84, 56))]], return_tensors="pt")
    assert int((made["input_ids"] == processor.image_token_id).sum()) == 6
    assert int(made["mm_token_type_ids"].sum()) == 6


def test_padding_on_the_right_is_refused(checkpoint) -> None:
    processor = load_processor(str(checkpoint))
    require_left_padding(processor)
    processor.tokenizer.padding_side = "right"
    with pytest.raises(ContractError, match="expected left, got right"):
        require_left_padding(processor)


def test_no_picture_token_may_be_sampled(processor) -> None:
    names = processor.tokenizer.convert_ids_to_tokens(suppressed_tokens(processor))
    assert names == ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]


def test_a_picture_that_is_none_is_named(tmp_path) -> None:
    (tmp_path / "a.png").write_bytes(b"nothing")
    with pytest.raises(ContractError, match=r"a\.png"):
        open_pictures([tmp_path / "a.png"])


def test_a_tokenizer_without_picture_tokens_is_refused(tmp_path) -> None:
    from tokenizers import models

    Tokenizer(models.WordLevel({"a": 0}, "a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ContractError, match="vision_start"):
        load_processor(str(tmp_path))
