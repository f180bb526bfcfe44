"""Random Qwen2.5-VL checkpoints of nano size for tests: two tokenizers, several shapes.

torch and transformers are imported only where a model is made.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def make_model(
    tokenizer: Tokenizer,
    *,
    window: int = 56,
    full_blocks: tuple[int, ...] = (),
    kv_heads: int = 3,
    tied: bool = False,
    seed: int = 0,
    depth: int = 2,
) -> Any:
    """Random weights, larger than the usual initialisation so that differences mean something."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(seed)
    size = -(-tokenizer.get_vocab_size() // 64) * 64
    token = tokenizer.token_to_id
    config = Qwen2_5_VLConfig(
        text_config={
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
        },
        vision_config={
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
        },
        image_token_id=token("<|image_pad|>"),
        video_token_id=size - 1,
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=tied,
    )
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(3.0)
        else:
            parameter.data.add_(torch.randn_like(parameter) * 0.05)
    return model


def write_checkpoint(
    folder: Path,
    model: Any,
    tokenizer: Tokenizer,
    shard_size: str = "1GB",
) -> None:
    """The folder that training writes: config, weights, tokenizer, training card."""
    model.save_pretrained(folder, max_shard_size=shard_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    card = {"minutes": 0.0, "none_weight": 0.25, "parameters": model.num_parameters()}
    (folder / "training_card.json").write_text(json.dumps(card))
