"""Reading checkpoints: faults first, then every storage form."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from export.tensors import INDEX, SINGLE, Checkpoint, canonical
from forge_station.errors import InputError
from tests import nano_checkpoint
from tests.nano_checkpoint import encoded, safetensors

WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)
GOOD = safetensors({"lm_head.weight": ("F32", [2, 3], WEIGHT.tobytes())})


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (b"", "not a safetensors file, or truncated"),
        (GOOD[:20], "not a safetensors file, or truncated"),
        (struct.pack("<Q", 1 << 62) + GOOD[8:], "not a safetensors file, or truncated"),
        (GOOD[:-1], "weights file is truncated"),
        (struct.pack("<Q", 4) + b"nope", "header is malformed"),
        (safetensors({"x": ("I8", [4], b"1234")}), "type is not supported"),
        (safetensors({"x": ("F32", [3, 3], WEIGHT.tobytes())}), "weights file is truncated"),
    ],
)
def test_broken_files_name_themselves(tmp_path, content, pattern):
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(InputError, match=pattern) as error:
        Checkpoint(tmp_path)
    assert SINGLE in str(error.value)


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 3}'])
def test_a_malformed_index_is_named(tmp_path, index):
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(InputError, match=r"shard index is malformed.*index\.json"):
        Checkpoint(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "b.safetensors"}}))
    with pytest.raises(InputError, match=r"lacks a weights file.*b\.safetensors"):
        Checkpoint(tmp_path)


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(InputError, match=r"model\.safetensors"):
        Checkpoint(tmp_path)


def test_missing_and_misshapen_tensors_are_named(tmp_path):
    (tmp_path / SINGLE).write_bytes(GOOD)
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(InputError, match=r"lacks a tensor.*model\.norm"):
        checkpoint.read("model.norm.weight")
    with pytest.raises(InputError, match=r"lm_head.*expected \[3, 2\], got \[2, 3\]"):
        checkpoint.read("lm_head.weight", (3, 2))


def test_values_of_every_type_are_read_as_float32(tmp_path):
    tensors = {kind: (kind, [2, 3], encoded(WEIGHT, kind)) for kind in ("F32", "F16", "BF16")}
    (tmp_path / SINGLE).write_bytes(safetensors(tensors))
    checkpoint = Checkpoint(tmp_path)
    for name in tensors:
        read = checkpoint.read(name)
        assert read.dtype == np.float32
        assert (read == WEIGHT).all()
    assert checkpoint.parameters == 18


def test_shards_are_one_checkpoint(tmp_path):
    tokenizer = nano_checkpoint.word_tokenizer()
    nano_checkpoint.write_checkpoint(tmp_path / "one", tokenizer, dtype="F16")
    nano_checkpoint.write_checkpoint(tmp_path / "three", tokenizer, dtype="F16", shards=3)
    assert len(list((tmp_path / "three").glob("*.safetensors"))) == 3
    one, three = Checkpoint(tmp_path / "one"), Checkpoint(tmp_path / "three")
    assert one.names() == three.names()
    assert all((one.read(name) == three.read(name)).all() for name in one.names())
    assert one.parameters > 1_000_000


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("visual.blocks.0.norm1.weight", "model.visual.blocks.0.norm1.weight"),
        ("model.visual.merger.ln_q.weight", "model.visual.merger.ln_q.weight"),
        ("model.layers.3.mlp.up_proj.weight", "model.language_model.layers.3.mlp.up_proj.weight"),
        ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight"),
        ("model.norm.weight", "model.language_model.norm.weight"),
        ("language_model.model.norm.weight", "model.language_model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.language_model.norm.weight", "model.language_model.norm.weight"),
    ],
)
def test_older_names_are_understood(old, new):
    assert canonical(old) == new
