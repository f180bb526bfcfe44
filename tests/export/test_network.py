"""config.json in its two written forms, and what is wrong with a bad one."""

from __future__ import annotations

import copy
import json

import pytest

from export.network import read_network
from forge_station.errors import InputError

OLD = {  # the flat form that the published 3B checkpoint has
    "model_type": "qwen2_5_vl",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "eos_token_id": 151645,
    "image_token_id": 151655,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}


def read(tmp_path, config) -> object:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_network(tmp_path)


def changed(path: str, value: object) -> dict:
    config = copy.deepcopy(OLD)
    *tables, key = path.split(".")
    table = config
    for name in tables:
        table = table[name]
    table[key] = value
    return config


@pytest.mark.parametrize(
    ("path", "value", "pattern"),
    [
        ("model_type", "qwen2_vl", "model_type qwen2_5_vl"),
        ("hidden_size", None, "hidden_size"),
        ("vocab_size", "many", "vocab_size"),
        ("num_hidden_layers", 0, "num_hidden_layers"),
        ("rope_scaling.mrope_section", [16, 24, 25], "sum 64"),
        ("rope_scaling", None, "mrope_section"),
        ("rope_theta", None, "rope_theta"),
        ("use_sliding_window", True, "sliding-window"),
        ("vision_config.window_size", None, "window_size"),
        ("image_token_id", -1, "image_token_id"),
    ],
)
def test_a_wrong_config_names_the_key(tmp_path, path, value, pattern):
    with pytest.raises(InputError, match=pattern):
        read(tmp_path, changed(path, value))


@pytest.mark.parametrize("text", [None, "", "{", "[]"])
def test_what_is_no_config_is_an_error(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"config\.json"):
        read_network(tmp_path)


def test_the_flat_form_of_the_3b_checkpoint(tmp_path):
    network = read(tmp_path, OLD)
    assert (network.text.layers, network.text.kv_heads, network.text.head_dim) == (36, 2, 128)
    assert network.text.tied
    assert network.text.mrope_section == (16, 24, 24)
    assert network.vision.full_attention_blocks == (7, 15, 23, 31)
    assert network.vision.geometry.slots == 64


def test_the_nested_form_that_training_writes(nano):
    network = read_network(nano)
    assert (network.text.layers, network.text.rope_theta) == (2, 10000.0)
    assert not network.text.tied
    assert network.vision.full_attention_blocks == ()
    assert network.vision.geometry.slots == 16
    assert network.image_token == 5
