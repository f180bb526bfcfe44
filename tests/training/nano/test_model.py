"""The nano model: its vocabulary holds the contract's text, its fast forward is the library's."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

pytest.importorskip("torch", reason="training needs the extra training")

import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from forge_station.contract import tasks
from forge_station.contract.catalogue import CATALOGUE, WORKPIECES
from forge_station.contract.views import MARKS, NANO_LAYOUT
from forge_station.vlm.preprocess import VisionGeometry, mrope_positions, normalised_patches
from training.nano import model as nano
from training.nano import pack

GEOMETRY = VisionGeometry(nano.PATCH, nano.MERGE, 2, nano.WINDOW)


@pytest.fixture(scope="module")
def model() -> Qwen2_5_VLForConditionalGeneration:
    """Small, with weights and biases large enough that a slip shows."""
    torch.manual_seed(0)
    small = nano.build_model(vision_width=64, vision_depth=2, text_width=128, text_depth=2).eval()
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return small


def contract_texts() -> list[str]:
    """Every kind of text that the checks send or expect, with extreme figures."""
    part = CATALOGUE[-1].id
    sizes = {mark: (320.94, 0.06, 99.95 - n) for n, mark in enumerate(MARKS)}
    readings = {mark: CATALOGUE[7 * n].id for n, mark in enumerate(MARKS)}
    texts = [tasks.TRUNK_OPEN, tasks.ASSISTANT, tasks.NEXT_USER, tasks.IMAGE_OPEN]
    texts += [tasks.sheet_facts(sizes, scale) for scale in (0.01, 1.0, 7.94)]
    texts += [tasks.surface_facts(part, (1.0, 22.2, 0.5), request) for request in tasks.REQUESTS]
    texts += [tasks.readings_text(readings), tasks.judge_text("batch", None)]
    texts += [
        tasks.judge_text("batch", {part: 5}),
        tasks.judge_text("assembly", {part: 1, "pin 6x20": 6}),
    ]
    texts += [tasks.row_key(view, row) for view, row in tasks.ROW_KEYS]
    texts += [tasks.row_text(range(n)) for n in range(17)]
    texts += [tasks.mark_key(mark) for mark in MARKS]
    texts += [tasks.CLASS_KEY, tasks.SCORE_KEY, tasks.ANSWER_KEY, tasks.MISSING_KEY]
    texts += [
        *tasks.SURFACE_CLASSES,
        *tasks.SCORES,
        *tasks.LETTER_OPTIONS,
        tasks.RIGHT,
        tasks.WRONG,
    ]
    return [*texts, *(model.id for model in CATALOGUE), *WORKPIECES]


def test_a_word_the_vocabulary_lacks_is_named():
    with pytest.raises(KeyError, match="gearbox"):
        pack.encode("gearbox M8")


def test_the_vocabulary_is_unique_and_begins_with_the_special_tokens():
    words = nano.vocabulary()
    assert len(words) == len(set(words))
    assert tuple(words[: len(nano.SPECIAL)]) == nano.SPECIAL


def test_old_checkpoints_keep_their_ids():
    """Words are only ever added at the end: with moved ids an older checkpoint reads nonsense."""
    words = nano.vocabulary()
    known = {6: "\n", 7: ".", 20: "score", 40: "D", 60: "r12:", 100: "M4", 150: ".9", 300: "61"}
    assert {number: words[number] for number in known} == known
    assert words[559:561] == [tasks.RIGHT, tasks.WRONG]


def test_catalogue_and_contract_need_no_unknown_token():
    tokenizer = nano.build_tokenizer()
    unknown = tokenizer.token_to_id("<|endoftext|>")
    for text in contract_texts():
        ids = tokenizer.encode(text).ids
        assert unknown not in ids, text
        assert tuple(ids) == pack.encode(text), "training and station read the same tokens"


def test_no_character_of_the_contract_is_skipped():
    """The splitter drops what matches nothing: that must be spaces only."""
    words = nano.vocabulary()
    for text in contract_texts():
        joined = "".join(words[token] for token in pack.encode(text))
        assert joined == text.replace(" ", "")


def test_encoding_is_concatenative_at_line_ends():
    lines = ["A: hex_bolt M8x30\n", "front r5:", " 5,6", "class:", " dent\n", "score:", " 4/10\n"]
    lines += [tasks.TRUNK_OPEN, tasks.ASSISTANT, "marks scale 0.50\n", "B: 10.5 3.0 2.2\n"]
    for one, other in itertools.product(lines, lines):
        assert pack.encode(one) + pack.encode(other) == pack.encode(one + other)


def test_the_default_model_has_four_million_parameters_and_room_for_the_vocabulary():
    default = nano.build_model()
    assert 3.8e6 < sum(p.numel() for p in default.parameters()) < 4.2e6
    text = default.config.text_config
    assert text.vocab_size % 64 == 0
    assert len(nano.vocabulary()) <= text.vocab_size
    assert default.config.image_token_id == nano.vocabulary().index(tasks.IMAGE_TOKEN)


def library_vision(model: Qwen2_5_VLForConditionalGeneration, image: np.ndarray) -> torch.Tensor:
    rows, columns = GEOMETRY.grid(*image.shape[:2])
    patches = torch.from_numpy(normalised_patches(image, GEOMETRY))
    grid = torch.tensor([[1, rows, columns]])
    return model.model.visual(patches, grid_thw=grid).pooler_output


@torch.no_grad()
@pytest.mark.parametrize("size", [(56, 56), (112, 168), NANO_LAYOUT.sheet_size])
def test_fast_vision_equals_the_library(model, size):
    """Three pictures of a batch: all filled, some windows empty, nothing at all."""
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (3, *size, 3)).astype(np.uint8)
    images[1, :56, :56] = 0
    images[1, -28:] = 0
    images[2] = 0
    found = nano.Forward(model).vision(torch.from_numpy(images))
    assert found.shape == (3, nano.image_tokens(*size), 128)
    for image, tokens in zip(images, found, strict=True):
        torch.testing.assert_close(tokens, library_vision(model, image), rtol=0, atol=1e-4)


@torch.no_grad()
def test_a_batch_without_any_empty_window_is_right_too(model):
    images = np.random.default_rng(2).integers(1, 256, (2, 56, 112, 3)).astype(np.uint8)
    found = nano.Forward(model).vision(torch.from_numpy(images))
    for image, tokens in zip(images, found, strict=True):
        torch.testing.assert_close(tokens, library_vision(model, image), rtol=0, atol=1e-4)


@torch.no_grad()
def test_fast_text_equals_the_library_under_the_branch_mask(model):
    rng = np.random.default_rng(3)
    readings = {"A": "hex_nut M8", "B": "hex_nut M8", "C": "pin 6x20"}
    sizes = dict.fromkeys(readings, (14.9, 13.0, 6.5))
    batch = pack.collate(
        [
            pack.pack_sheet(readings, sizes, 0.5, (56, 112), rng),
            pack.pack_judgement(readings, rng),
        ]
    )
    language = model.model.language_model
    inputs = language.embed_tokens(batch.tokens)
    inputs = inputs + torch.randn(inputs.shape, generator=torch.Generator().manual_seed(4))
    found = nano.Forward(model).text(inputs, batch.position, batch.mask)
    bias = torch.zeros(batch.mask.shape).masked_fill(~batch.mask, -1e4)
    expected = language(
        inputs_embeds=inputs,
        position_ids=batch.position,
        attention_mask={"full_attention": bias},
    ).last_hidden_state
    real = batch.segment != pack.PAD
    torch.testing.assert_close(found[real], expected[real], rtol=0, atol=1e-4)


@torch.no_grad()
def test_a_branch_gives_the_same_answer_alone_as_among_others(model):
    """What the mask promises: other branches do not exist for it."""

    def packed(keys: list[str]) -> pack.Packed:
        sequence = pack.Packed()
        start = sequence.add_trunk(tasks.TRUNK_OPEN, None, tasks.ASSISTANT)
        for key in keys:
            sequence.add_branch(key, "hex_nut M8", start)
        return sequence

    def hidden(sequence: pack.Packed, key: str) -> torch.Tensor:
        batch = pack.collate([sequence])
        inputs = model.model.language_model.embed_tokens(batch.tokens)
        states = nano.Forward(model).text(inputs, batch.position, batch.mask)
        return states[batch.tokens == pack.encode(key)[0]]

    alone, among = packed(["B:"]), packed(["A:", "B:", "C:"])
    torch.testing.assert_close(hidden(alone, "B:"), hidden(among, "B:"), rtol=0, atol=1e-5)


def test_pictures_that_windows_do_not_fill_are_refused(model):
    with pytest.raises(ValueError, match="84x56: expected multiples of 56"):
        nano.Forward(model).vision(torch.zeros(1, 84, 56, 3, dtype=torch.uint8))


@torch.no_grad()
@pytest.mark.parametrize("blocks", [(1,), (0, 1)])
def test_full_attention_blocks_equal_the_library(blocks):
    torch.manual_seed(1)
    sizes = {"vision_width": 64, "vision_depth": 2, "text_width": 64, "text_depth": 1}
    model = nano.build_model(**sizes, full_attention=blocks).eval()
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    images = np.random.default_rng(6).integers(1, 256, (2, 112, 168, 3)).astype(np.uint8)
    images[1, :56, :56] = 0
    found = nano.Forward(model).vision(torch.from_numpy(images))
    for image, tokens in zip(images, found, strict=True):
        torch.testing.assert_close(tokens, library_vision(model, image), rtol=0, atol=1e-4)


def test_a_lines_own_words_come_behind_the_fixed_ones(tmp_path):
    fixed = nano.vocabulary()
    own = nano.own_words(["surface joint\nmagnetic_tile", "class: blowhole", "photo r5: 5,6"])
    assert own == ["blowhole", "magnetic_tile", "photo"]
    words = nano.vocabulary(own)
    assert words == [*fixed, *own]
    encoder = nano.Encoder(tuple(words))
    assert encoder.encode("hex_nut M8") == pack.encode("hex_nut M8"), "old text keeps its ids"
    text = f"{tasks.TRUNK_OPEN}surface joint\nmagnetic_tile"
    assert tuple(nano.build_tokenizer(own).encode(text).ids) == encoder.encode(text)
    with pytest.raises(KeyError, match="blowhole"):
        pack.encode("class: blowhole")
    sizes = {"vision_width": 32, "vision_depth": 1, "text_width": 64, "text_depth": 1}
    model = nano.build_model(**sizes, own=[f"word_{n}" for n in "abcdefghijklmnopqrst"])
    assert model.config.text_config.vocab_size >= len(fixed) + 20
    nano.save_checkpoint(model, tmp_path, {}, own)
    stored = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert stored["photo"] == len(fixed) + 2


@pytest.mark.parametrize("size", [(56, 168), (168, 336), (224, 672)])
def test_trunk_positions_are_those_of_the_station(size):
    rows, columns = size[0] // 28, size[1] // 28
    ids = np.array([3, 3, *[5] * (rows * columns), 9, 9, 9])
    expected, following = mrope_positions(ids, 5, [(rows, columns)], 0)
    found = nano.trunk_positions(ids, 5, *size)
    assert np.array_equal(found, expected)
    assert following == found.max() + 1


def test_a_checkpoint_is_a_folder_that_the_library_loads(model, tmp_path):
    nano.save_checkpoint(model, tmp_path / "deep" / "nano", {"steps": 3, "none_weight": 0.25})
    folder = tmp_path / "deep" / "nano"
    loaded = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder)
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert json.loads((folder / "training_card.json").read_text())["steps"] == 3
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    assert tokenizer["model"]["vocab"]["hex_bolt"] == nano.vocabulary().index("hex_bolt")
