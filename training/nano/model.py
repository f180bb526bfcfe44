"""The nano model: a small Qwen2.5-VL of the real architecture, its tokenizer, and a fast forward.

The shipped default bundle is this model trained from scratch on simulated data. Same class
(`Qwen2_5_VLForConditionalGeneration`), patch 14, merge 2, the same special tokens and the same
contract text as the 3B model; only widths, depths and the vocabulary are small.

Not here: data, losses, schedules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    get_vision_position_ids,
    get_vision_window_index,
)

from forge_station.contract import tasks
from forge_station.contract.catalogue import CATALOGUE, WORKPIECES
from forge_station.contract.views import MARKS, VIEWS

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
PATCH, MERGE, WINDOW = 14, 2, 56
LARGEST_NUMBER = 320

# One alternative a line, first match wins: special tokens, newline, row keys, sizes, words.
_PIECES = r"<\|[a-z_]+\|>|\n|r\d+:|M\d+|x\d+|/10|,\d+|\.\d+|\d+|[A-Za-z_]+:?|[^\sA-Za-z0-9_]"


def vocabulary(own: Iterable[str] = ()) -> list[str]:
    """Every token in id order: those that the contract's text needs, then a line's `own` words.

    A line's words come last, so that the ids of a checkpoint without them stay what they are.
    """
    words = [*SPECIAL, "\n", ".", "system", "user", "assistant"]
    words += tasks.SYSTEM_PROMPT.rstrip(".").split()
    words += ["marks", "scale", "surface", "batch", "majority", "assembly", *tasks.REQUESTS]
    words += [*tasks.SURFACE_CLASSES, tasks.NONE, *VIEWS]
    words += [tasks.CLASS_KEY, tasks.SCORE_KEY, tasks.ANSWER_KEY, tasks.MISSING_KEY, "/10"]
    words += [*MARKS, *(f"{mark}:" for mark in MARKS)]
    words += [f"r{row}:" for row in range(1, tasks.GRID_ROWS + 1)]
    words += [f",{column}" for column in range(1, tasks.GRID_ROWS + 1)]
    words += list(WORKPIECES)
    splitter = pre_tokenizers.Split(Regex(_PIECES), behavior="removed", invert=True)
    for model in CATALOGUE:
        words += [piece for piece, _ in splitter.pre_tokenize_str(model.model_number)]
    words += [f".{n}" for n in range(10)] + [f".{n:02d}" for n in range(100)]
    words += [str(n) for n in range(LARGEST_NUMBER + 1)]
    words += [tasks.RIGHT, tasks.WRONG]
    return list(dict.fromkeys([*words, *own]))


def own_words(texts: Iterable[str]) -> list[str]:
    """Words of a line's texts that the fixed vocabulary lacks, sorted."""
    pieces = {piece for text in texts for piece in re.findall(_PIECES, text)}
    return sorted(pieces - set(vocabulary()))


@dataclass(frozen=True, eq=False)
class Encoder:
    """Text -> token ids as the tokenizer of the checkpoint gives them. `words` in id order."""

    words: tuple[str, ...]

    @cached_property
    def ids(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}

    @cached_property
    def _known(self) -> dict[str, tuple[int, ...]]:
        return {}

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids; KeyError names a word the vocabulary lacks."""
        if text not in self._known:
            if len(self._known) >= 65536:
                self._known.clear()
            self._known[text] = tuple(self.ids[piece] for piece in re.findall(_PIECES, text))
        return self._known[text]


@lru_cache(maxsize=1)
def default_encoder() -> Encoder:
    """The encoder of a model without a line's own words."""
    return Encoder(tuple(vocabulary()))


def build_tokenizer(own: Iterable[str] = ()) -> Tokenizer:
    """A word-level tokenizer with the Qwen special tokens; encoding is concatenative."""
    words = vocabulary(own)
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<|endoftext|>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECES), behavior="removed", invert=True)
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def build_model(
    vision_width: int = 160,
    vision_depth: int = 4,
    text_width: int = 192,
    text_depth: int = 4,
    *,
    own: Iterable[str] = (),
    full_attention: Sequence[int] = (),
) -> Qwen2_5_VLForConditionalGeneration:
    """Randomly initialised nano model. Default 4.0 M parameters.

    `own`: a line's own words; `full_attention`: vision blocks that see the whole picture.
    """
    ids = {word: i for i, word in enumerate(vocabulary(own))}
    size = (len(ids) + 63) // 64 * 64
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": size,
            "hidden_size": text_width,
            "intermediate_size": text_width * 8 // 3 // 32 * 32,
            "num_hidden_layers": text_depth,
            "num_attention_heads": text_width // 64,
            "num_key_value_heads": text_width // 64,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [8, 12, 12],
            },
            "tie_word_embeddings": False,
            "use_cache": False,
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
        },
        vision_config={
            "depth": vision_depth,
            "hidden_size": vision_width,
            "intermediate_size": vision_width * 8 // 3 // 32 * 32,
            "num_heads": vision_width // 32,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "in_channels": 3,
            "window_size": WINDOW,
            "out_hidden_size": text_width,
            "fullatt_block_indexes": list(full_attention),
        },
        image_token_id=ids["<|image_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
        pad_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|im_end|>"],
    )
    # Eager attention trains almost twice as fast as the CPU flash backward (47 % of a step).
    config._attn_implementation = "eager"
    config.text_config._attn_implementation = "eager"
    return Qwen2_5_VLForConditionalGeneration(config)


@dataclass(frozen=True)
class _Geometry:
    """order: patches of an image by window; cos, sin [windows, slots, D]; inverse: raster order."""

    order: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    inverse: torch.Tensor


@lru_cache(maxsize=8)
def _window_geometry(visual: Any, height: int, width: int) -> _Geometry:
    grid = torch.tensor([[1, height // PATCH, width // PATCH]])
    positions = get_vision_position_ids(grid, MERGE)
    window_index, _ = get_vision_window_index(
        grid, spatial_merge_size=MERGE, window_size=WINDOW, patch_size=PATCH
    )
    unit = MERGE * MERGE
    order = (window_index[:, None] * unit + torch.arange(unit)).reshape(-1)
    cos, sin = visual.rotary_pos_emb(torch.zeros(1), positions)
    slots = (WINDOW // PATCH) ** 2
    shape = (-1, slots, cos.shape[-1])
    return _Geometry(
        order, cos[order].view(shape), sin[order].view(shape), torch.argsort(window_index)
    )


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return (x * cos + turned * sin).to(x.dtype)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2)).float()
    if bias is not None:
        scores = scores + bias
    return torch.matmul(scores.softmax(-1).to(v.dtype), v)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps) * weight


def _vision_block(
    block: Any, h: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int
) -> torch.Tensor:
    """h [N, slots, W] of N windows; cos, sin [N, 1, slots, D]."""
    windows, slots, width = h.shape
    qkv = block.attn.qkv(_norm(h, block.norm1.weight, 1e-6)).view(windows, slots, 3, heads, -1)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    mixed = _attend(_rotate(q, cos, sin), _rotate(k, cos, sin), v, None)
    h = h + block.attn.proj(mixed.transpose(1, 2).reshape(windows, slots, width))
    x = _norm(h, block.norm2.weight, 1e-6)
    mlp = block.mlp
    return h + mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))


def _text_layer(
    layer: Any,
    h: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    bias: torch.Tensor,
    heads: int,
    eps: float,
) -> torch.Tensor:
    """h [B, T, W]; cos, sin [B, 1, T, D]; bias [B, 1, T, T]."""
    batch, length, width = h.shape
    attention = layer.self_attn
    x = _norm(h, layer.input_layernorm.weight, eps)
    q, k, v = (
        projection(x).view(batch, length, heads, -1).transpose(1, 2)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    mixed = _attend(_rotate(q, cos, sin), _rotate(k, cos, sin), v, bias)
    h = h + attention.o_proj(mixed.transpose(1, 2).reshape(batch, length, width))
    x = _norm(h, layer.post_attention_layernorm.weight, eps)
    mlp = layer.mlp
    return h + mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))


class Forward:
    """The model's forward, laid out for speed on a CPU; equal to the library's to rounding.

    Where vision blocks attend inside windows only, windows that are all background give one and
    the same answer: they are computed once a batch. `compiled` fuses the layers with torch.compile
    (needs a C++ compiler; about a third faster after half a minute of compiling).
    """

    def __init__(
        self, model: Qwen2_5_VLForConditionalGeneration, *, compiled: bool = False
    ) -> None:
        self.model = model
        self.full_attention = frozenset(model.config.vision_config.fullatt_block_indexes)
        self.vision_block = (
            torch.compile(_vision_block, dynamic=True) if compiled else _vision_block
        )
        self.text_layer = torch.compile(_text_layer, dynamic=True) if compiled else _text_layer

    def vision(self, images: torch.Tensor) -> torch.Tensor:
        """images uint8 [B, H, W, 3], H and W multiples of the window -> [B, T, width]."""
        visual = self.model.model.visual
        batch, height, width, _ = images.shape
        if height % WINDOW or width % WINDOW:
            raise ValueError(f"picture {height}x{width}: expected multiples of {WINDOW} px")
        geometry = _window_geometry(visual, height, width)
        per_image, slots = geometry.cos.shape[:2]
        tiles = images.view(
            batch, height // 28, MERGE, PATCH, width // 28, MERGE, PATCH, 3
        ).permute(0, 1, 4, 2, 5, 7, 3, 6)
        tiles = tiles.reshape(batch, per_image * slots, -1)[:, geometry.order]
        tiles = tiles.view(batch * per_image, slots, -1)
        filled = tiles.amax((1, 2)) > 0
        if self.full_attention:
            filled[:] = True  # no window is like another once it sees the whole picture
        filled[(~filled).nonzero()[:1]] = True  # one empty window stands for all of them
        kept = filled.nonzero()[:, 0]
        where = filled.cumsum(0) - 1
        empty = (tiles[kept].amax((1, 2)) == 0).nonzero()
        if len(empty):
            where[~filled] = empty[0, 0]
        mean = torch.tensor(CLIP_MEAN).repeat_interleave(PATCH * PATCH)
        std = torch.tensor(CLIP_STD).repeat_interleave(PATCH * PATCH)
        x = (tiles[kept].float() / 255 - mean) / std
        weight = visual.patch_embed.proj.weight.sum(2).flatten(1)
        h = F.linear(x, weight)
        position = kept % per_image
        cos, sin = geometry.cos[position][:, None], geometry.sin[position][:, None]
        whole = (batch, per_image * slots)
        for number, block in enumerate(visual.blocks):
            if number in self.full_attention:
                turn = [c.view(1, 1, whole[1], -1) for c in (geometry.cos, geometry.sin)]
                one = h.view(*whole, -1)
                h = self.vision_block(block, one, turn[0], turn[1], visual.config.num_heads)
                h = h.view(batch * per_image, slots, -1)
            else:
                h = self.vision_block(block, h, cos, sin, visual.config.num_heads)
        tokens = visual.merger(h.flatten(0, 1)).view(len(kept), slots // (MERGE * MERGE), -1)
        tokens = tokens[where].view(batch, -1, tokens.shape[-1])
        return tokens[:, geometry.inverse]

    def text(
        self, inputs: torch.Tensor, position: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """inputs [B, T, W], position [3, B, T], mask bool [B, 1, T, T], True: sees -> [B, T, W]."""
        language = self.model.model.language_model
        bias = torch.zeros(mask.shape).masked_fill_(~mask, -1e4)
        cos, sin = language.rotary_emb(inputs, position)
        cos, sin = cos[:, None], sin[:, None]
        heads = self.model.config.text_config.num_attention_heads
        eps = self.model.config.text_config.rms_norm_eps
        h = inputs
        for layer in language.layers:
            h = self.text_layer(layer, h, cos, sin, bias, heads, eps)
        return _norm(h, language.norm.weight, eps)


def image_tokens(height: int, width: int) -> int:
    return (height // (PATCH * MERGE)) * (width // (PATCH * MERGE))


def trunk_positions(ids: np.ndarray, image_id: int, height: int, width: int) -> np.ndarray:
    """M-RoPE positions [3, S] of a trunk with at most one image; text continues after it."""
    rows, columns = height // (PATCH * MERGE), width // (PATCH * MERGE)
    is_image = ids == image_id
    positions = np.zeros((3, len(ids)), np.int64)
    current, i = 0, 0
    while i < len(ids):
        if is_image[i]:
            count = rows * columns
            positions[0, i : i + count] = current
            positions[1, i : i + count] = current + np.repeat(np.arange(rows), columns)
            positions[2, i : i + count] = current + np.tile(np.arange(columns), rows)
            current, i = current + max(rows, columns), i + count
        else:
            positions[:, i] = current
            current, i = current + 1, i + 1
    return positions


def save_checkpoint(
    model: Qwen2_5_VLForConditionalGeneration,
    folder: Path,
    card: dict[str, object],
    own: Iterable[str] = (),
) -> None:
    """Write a Hugging Face folder with the tokenizer and the training card."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    build_tokenizer(own).save(str(folder / "tokenizer.json"))
    (folder / "training_card.json").write_text(json.dumps(card, indent=1, sort_keys=True))
