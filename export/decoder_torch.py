"""The decoder graph exported by torch.onnx (dynamo) from a wrapper round the published layers.

    inputs_embeds f32 [1, S, H], position_ids i64 [3, 1, S], attention_bias f32 [1, 1, S, P + S],
    logit_positions i64 [1, K], past.{i}.key / .value f32 [1, kv heads, P, D]
      -> logits f32 [1, K, V], present.{i}.key / .value f32 [1, kv heads, P + S, D]

The second, independent implementation of `export.decoder`: it needs the whole model in memory, and
is made of standard ONNX operators only. The published forward makes its own mask and cache; the
layers are called one by one instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn
from transformers import Qwen2_5_VLForConditionalGeneration

OPSET = 18


class _Cache:
    """Keys and values of all layers, longer by this pass."""

    def __init__(self, past: tuple[Tensor, ...]) -> None:
        self.past, self.present = past, list[Tensor]()

    def update(
        self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        longer = (
            torch.cat([self.past[2 * layer], key], 2),
            torch.cat([self.past[2 * layer + 1], value], 2),
        )
        self.present += longer
        return longer


class BiasedDecoder(nn.Module):
    """The language model under a given bias; weights are shared with the given model."""

    def __init__(self, model: Qwen2_5_VLForConditionalGeneration) -> None:
        super().__init__()
        self.language, self.head = model.model.language_model, model.lm_head

    def forward(
        self,
        inputs_embeds: Tensor,
        position_ids: Tensor,
        attention_bias: Tensor,
        logit_positions: Tensor,
        *past: Tensor,
    ) -> tuple[Tensor, ...]:
        cache = _Cache(past)
        x = inputs_embeds
        rotary = self.language.rotary_emb(x, position_ids)
        for layer in self.language.layers:
            given = {"attention_mask": attention_bias, "position_embeddings": rotary}
            x = layer(x, **given, cache=cache, use_cache=True)
            x = x[0] if isinstance(x, tuple) else x
        x = self.language.norm(x)
        wide = logit_positions[..., None].expand(-1, -1, x.shape[-1])
        return (self.head(torch.gather(x, 1, wide)), *cache.present)


def write_decoder(model: Qwen2_5_VLForConditionalGeneration, path: Path) -> None:
    """Write `path` in float32, in one file: for small models."""
    text: Any = model.config.text_config
    heads, size = text.num_key_value_heads, text.hidden_size // text.num_attention_heads
    count, tokens, before = text.num_hidden_layers, 5, 7
    example = (
        torch.randn(1, tokens, text.hidden_size),
        torch.arange(before, before + tokens).expand(3, 1, tokens).clone(),
        torch.zeros(1, 1, tokens, before + tokens),
        torch.tensor([[tokens - 1, 0, 1]]),
        *(torch.randn(1, heads, before, size) for _ in range(2 * count)),
    )
    seq, past, asked = (torch.export.Dim(name) for name in ("seq", "past", "asked"))
    total = torch.export.Dim("total")
    dynamic = (
        {1: seq},
        {2: seq},
        {2: seq, 3: total},
        {1: asked},
        tuple({2: past} for _ in range(2 * count)),
    )
    names = [f"{{}}.{layer}.{part}" for layer in range(count) for part in ("key", "value")]
    fixed = ["inputs_embeds", "position_ids", "attention_bias", "logit_positions"]
    with torch.no_grad():
        program = torch.onnx.export(
            BiasedDecoder(model).eval(),
            example,
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=dynamic,
            input_names=[*fixed, *(name.format("past") for name in names)],
            output_names=["logits", *(name.format("present") for name in names)],
            optimize=True,
            verbose=False,
        )
    assert program is not None
    onnx.save(program.model_proto, path)
