"""Random Qwen2.5-VL checkpoints of nano size for tests: two tokenizers, several shapes.

Written with numpy only, so that most tests need no torch; transformers loads them as they are.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
)
WORDS = [
    *("\n", "system", "user", "assistant", "Inspect", "the", "parts", ".", "marks", "scale"),
    *("surface", "joint", "class:", "score:", "none", "normal", "crack", "cut", "deformation"),
    *("dent", "front", "side", "top", "A:", "B:", "C:", "D:", "E:", "F:", "answer:"),
    *("A", "B", "C", "D", "E", "F", "hex_bolt", "hex_nut", "flat_washer", "pin"),
    *("M5", "M6", "M8", "M10", "M12", "x16", "x20", "x30", "x40", "/10"),
]
_PIECES = r"<\|[a-z_]+\|>|\n|r\d+:|M\d+|x\d+|/10|,\d+|\.\d+|\d+|[A-Za-z_]+:?|[^\sA-Za-z0-9_]"
_QWEN_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def word_tokenizer() -> Tokenizer:
    """One token a word, as the nano model has it: `5` and `,6` are tokens, spaces are none."""
    words = [*SPECIAL, *WORDS, *(f"r{n}:" for n in range(1, 17)), *(f",{n}" for n in range(1, 17))]
    words += [str(n) for n in range(100)] + [f".{n}" for n in range(10)]
    words += [f".{n:02d}" for n in range(100)]
    words = list(dict.fromkeys(words))
    vocabulary = {word: n for n, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECES), behavior="removed", invert=True)
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """A byte-level BPE that splits as Qwen2.5 does: digits alone, spaces lead a word."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    return tokenizer


def write_checkpoint(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    window: int = 56,
    full_blocks: tuple[int, ...] = (),
    kv_heads: int = 3,
    tied: bool = False,
    seed: int = 0,
    depth: int = 2,
    dtype: str = "F32",
    shards: int = 1,
) -> None:
    """The folder that training writes: config, weights, tokenizer, training card. No torch.

    Weights are larger than a usual initialisation, so that differences mean something.
    """
    folder.mkdir(parents=True, exist_ok=True)
    size = -(-tokenizer.get_vocab_size() // 64) * 64
    token = tokenizer.token_to_id
    text = {
        "model_type": "qwen2_5_vl_text",
        "vocab_size": size,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": depth,
        "num_attention_heads": 3,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [8, 12, 12],
        },
        "tie_word_embeddings": tied,
        "bos_token_id": token("<|endoftext|>"),
        "eos_token_id": token("<|im_end|>"),
        "pad_token_id": token("<|endoftext|>"),
    }
    vision = {
        "model_type": "qwen2_5_vl_vision",
        "depth": depth,
        "hidden_size": 160,
        "intermediate_size": 416,
        "num_heads": 5,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": window,
        "out_hidden_size": 192,
        "fullatt_block_indexes": list(full_blocks),
    }
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "text_config": text,
        "vision_config": vision,
        "image_token_id": token("<|image_pad|>"),
        "video_token_id": size - 1,
        "vision_start_token_id": token("<|vision_start|>"),
        "vision_end_token_id": token("<|vision_end|>"),
        "tie_word_embeddings": tied,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _write_weights(folder, _shapes(size, depth, kv_heads, tied), seed, dtype, shards)
    tokenizer.save(str(folder / "tokenizer.json"))
    card = {"minutes": 0.0, "none_weight": 0.25}
    (folder / "training_card.json").write_text(json.dumps(card))


def _shapes(vocab: int, depth: int, kv_heads: int, tied: bool) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint under the names that are published on the hub."""
    wide, narrow, inner = 192, 64 * kv_heads, 512
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, wide)}
    if not tied:
        shapes["lm_head.weight"] = (vocab, wide)
    for layer in range(depth):
        base = f"model.layers.{layer}."
        for part, rows in (("q", wide), ("k", narrow), ("v", narrow)):
            shapes[f"{base}self_attn.{part}_proj.weight"] = (rows, wide)
            shapes[f"{base}self_attn.{part}_proj.bias"] = (rows,)
        shapes[f"{base}self_attn.o_proj.weight"] = (wide, wide)
        shapes[f"{base}mlp.gate_proj.weight"] = shapes[f"{base}mlp.up_proj.weight"] = (inner, wide)
        shapes[f"{base}mlp.down_proj.weight"] = (wide, inner)
        shapes[f"{base}input_layernorm.weight"] = (wide,)
        shapes[f"{base}post_attention_layernorm.weight"] = (wide,)
    shapes["model.norm.weight"] = (wide,)
    patch, inner = 160, 416
    shapes["visual.patch_embed.proj.weight"] = (patch, 3, 2, 14, 14)
    for block in range(depth):
        base = f"visual.blocks.{block}."
        linear = {
            "attn.qkv": (3 * patch, patch),
            "attn.proj": (patch, patch),
            "mlp.gate_proj": (inner, patch),
            "mlp.up_proj": (inner, patch),
            "mlp.down_proj": (patch, inner),
        }
        for name, shape in linear.items():
            shapes[f"{base}{name}.weight"], shapes[f"{base}{name}.bias"] = shape, shape[:1]
        shapes[f"{base}norm1.weight"] = shapes[f"{base}norm2.weight"] = (patch,)
    shapes["visual.merger.ln_q.weight"] = (patch,)
    for number, rows in ((0, 4 * patch), (2, wide)):
        shapes[f"visual.merger.mlp.{number}.weight"] = (rows, 4 * patch)
        shapes[f"visual.merger.mlp.{number}.bias"] = (rows,)
    return shapes


def _write_weights(
    folder: Path, shapes: dict[str, tuple[int, ...]], seed: int, dtype: str, shards: int
) -> None:
    rng = np.random.default_rng(seed)
    tensors: dict[str, tuple[str, list[int], bytes]] = {}
    for name, shape in shapes.items():
        value = rng.normal(0, 0.06 if len(shape) > 1 else 0.05, shape).astype(np.float32)
        if "norm" in name or "ln_q" in name:
            value += 1
        tensors[name] = (dtype, list(shape), encoded(value, dtype))
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors(tensors))
        return
    weight_map = {name: f"model-{n % shards}.safetensors" for n, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        part = {name: tensors[name] for name in tensors if weight_map[name] == file}
        (folder / file).write_bytes(safetensors(part))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def encoded(value: NDArray[np.float32], dtype: str) -> bytes:
    """Bytes of a tensor as `F32`, `F16` or `BF16` (truncated)."""
    if dtype == "BF16":
        return (value.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return value.astype({"F32": np.float32, "F16": np.float16}[dtype]).tobytes()


def safetensors(tensors: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    """A safetensors file by its published layout: header length, JSON header, data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, (dtype, shape, data) in tensors.items():
        span = [len(body), len(body) + len(data)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": span}
        body += data
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body
