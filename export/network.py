"""The numbers of a Qwen2.5-VL checkpoint that export needs, from its config.json.

Reads the forms of transformers 4.5x (`rope_scaling`, flat text keys) and 5.x (`rope_parameters`,
`text_config`). It knows no weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_station.errors import InputError
from forge_station.vlm.preprocess import VisionGeometry

MODEL_TYPE = "qwen2_5_vl"


@dataclass(frozen=True)
class TextNetwork:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, int, int]
    tied: bool
    eos: int | None


@dataclass(frozen=True)
class VisionNetwork:
    hidden_size: int
    depth: int
    heads: int
    intermediate_size: int
    out_hidden_size: int
    full_attention_blocks: tuple[int, ...]
    rope_theta: float
    geometry: VisionGeometry


@dataclass(frozen=True)
class Network:
    text: TextNetwork
    vision: VisionNetwork
    image_token: int


def read_network(folder: Path) -> Network:
    """config.json of a checkpoint folder. Raises InputError naming the key that is wrong."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            "checkpoint has no readable config.json", which=path, got=error.strerror
        ) from error
    except ValueError as error:
        raise InputError("config.json is not JSON", which=path, got=error) from error
    if not isinstance(config, dict):
        raise InputError("config.json", which=path, expected="an object", got=type(config).__name__)
    if config.get("model_type") != MODEL_TYPE:
        raise InputError(
            "checkpoint is of another architecture",
            which=path,
            expected=f"model_type {MODEL_TYPE}",
            got=config.get("model_type"),
        )
    keys = _Keys(path)
    text, vision = config.get("text_config", config), config.get("vision_config", {})
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    hidden, heads = keys.whole(text, "hidden_size"), keys.whole(text, "num_attention_heads")
    section = rope.get("mrope_section")
    theta = rope.get("rope_theta", text.get("rope_theta"))
    head_dim = hidden // heads
    if not isinstance(section, list) or len(section) != 3 or sum(section) * 2 != head_dim:
        raise InputError(
            "mrope_section does not fit the head size",
            which=f"{path}: text_config.rope_parameters.mrope_section",
            expected=f"three numbers with sum {head_dim // 2}",
            got=section,
        )
    if not isinstance(theta, (int, float)):
        raise InputError("rope_theta is missing", which=f"{path}: text_config", got=theta)
    if text.get("use_sliding_window"):
        raise InputError("sliding-window attention is not supported", which=f"{path}: text_config")
    eos = text.get("eos_token_id", config.get("eos_token_id"))
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    vision_rope = vision.get("rope_parameters") or {}
    return Network(
        TextNetwork(
            vocab_size=keys.whole(text, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=keys.whole(text, "intermediate_size"),
            layers=keys.whole(text, "num_hidden_layers"),
            heads=heads,
            kv_heads=keys.whole(text, "num_key_value_heads"),
            head_dim=head_dim,
            rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
            rope_theta=float(theta),
            mrope_section=(section[0], section[1], section[2]),
            tied=bool(tied),
            eos=eos[0] if isinstance(eos, list) and eos else eos,
        ),
        VisionNetwork(
            hidden_size=keys.whole(vision, "hidden_size"),
            depth=keys.whole(vision, "depth"),
            heads=keys.whole(vision, "num_heads"),
            intermediate_size=keys.whole(vision, "intermediate_size"),
            out_hidden_size=keys.whole(vision, "out_hidden_size"),
            full_attention_blocks=tuple(vision.get("fullatt_block_indexes", ())),
            rope_theta=float(vision_rope.get("rope_theta", 10000.0)),
            geometry=VisionGeometry(
                patch=keys.whole(vision, "patch_size"),
                merge=keys.whole(vision, "spatial_merge_size"),
                temporal=keys.whole(vision, "temporal_patch_size"),
                window=keys.whole(vision, "window_size"),
            ),
        ),
        keys.whole(config, "image_token_id"),
    )


@dataclass(frozen=True)
class _Keys:
    path: Path

    def whole(self, table: Mapping[str, Any], key: str) -> int:
        value = table.get(key)
        if not isinstance(value, int) or value <= 0:
            raise InputError(
                "config.json lacks a number",
                which=f"{self.path}: {key}",
                expected="a positive whole number",
                got=value,
            )
        return value
