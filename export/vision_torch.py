"""The vision graph exported by torch.onnx (dynamo) from a wrapper round the published modules.

    pixel_values u8 [B, L, 3 * patch^2] in the padded window layout, valid f32 [L],
    pos_hw i64 [L, 2], out_index i64 [T] -> image_embeds f32 [B, T, H]

The second, independent implementation of `export.vision`: slower to export (10 s and torch), made
of standard ONNX operators only, for other runtimes. The published forward loops over windows in
Python and cannot be exported; see `forge_station.vlm.preprocess.vision_layout` for the layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)

from export.network import VisionNetwork
from export.tensors import Checkpoint
from forge_station.vlm.preprocess import CLIP_MEAN, CLIP_STD

PREFIX = "model.visual."
OPSET = 18
_INLINE_LIMIT = 1 << 30


class WindowedTower(nn.Module):
    """The tower over window-ordered patches; weights are shared with the given module."""

    def __init__(
        self, tower: Qwen2_5_VisionTransformerPretrainedModel, network: VisionNetwork
    ) -> None:
        super().__init__()
        self.tower, self.slots = tower, network.geometry.slots
        self.unit = network.geometry.merge**2
        self.heads, self.size = network.heads, network.hidden_size // network.heads
        self.full = frozenset(network.full_attention_blocks)
        kernel = tower.patch_embed.proj.weight.detach().sum(2)
        side = network.geometry.patch**2
        self.patch_weight = nn.Buffer(kernel.reshape(network.hidden_size, -1))
        self.mean = nn.Buffer(torch.from_numpy(CLIP_MEAN.repeat(side)))
        self.std = nn.Buffer(torch.from_numpy(CLIP_STD.repeat(side)))
        steps = torch.arange(0, self.size // 2, 2).float() / (self.size // 2)
        self.inverse = nn.Buffer(1.0 / network.rope_theta**steps)

    def forward(
        self, pixel_values: Tensor, valid: Tensor, pos_hw: Tensor, out_index: Tensor
    ) -> Tensor:
        batch, length, _ = pixel_values.shape
        pixels = (pixel_values.float() / 255.0 - self.mean) / self.std
        x = functional.linear(pixels, self.patch_weight)
        angles = (pos_hw[..., None].float() * self.inverse).reshape(length, -1)
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        over_all = (valid - 1.0)[None, None, None] * 1e9
        in_window = ((valid - 1.0) * 1e9).reshape(-1, 1, 1, self.slots).repeat(batch, 1, 1, 1)
        block: Any
        for number, block in enumerate(self.tower.blocks):
            qkv = block.attn.qkv(block.norm1(x)).reshape(batch, length, 3, self.heads, self.size)
            query, key, value = qkv.unbind(2)
            query = query * cos + self._rotated(query) * sin
            key = key * cos + self._rotated(key) * sin
            full = number in self.full
            shape = (batch, length) if full else (-1, self.slots)
            query, key, value = (
                t.reshape(*shape, self.heads, self.size).transpose(1, 2)
                for t in (query, key, value)
            )
            mixed = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=over_all if full else in_window
            )
            x = x + block.attn.proj(mixed.transpose(1, 2).reshape(batch, length, -1))
            x = x + block.mlp(block.norm2(x))
        merged = self.tower.merger.ln_q(x).reshape(batch, length // self.unit, -1)
        return self.tower.merger.mlp(merged)[:, out_index]

    def _rotated(self, x: Tensor) -> Tensor:
        half = self.size // 2
        return torch.cat([-x[..., half:], x[..., :half]], -1)


def load_tower(
    checkpoint: Checkpoint, network: VisionNetwork
) -> Qwen2_5_VisionTransformerPretrainedModel:
    """Only the vision tensors, in float32, with the modules of transformers."""
    config: Any = Qwen2_5_VLConfig.from_pretrained(checkpoint.folder).vision_config
    with torch.device("meta"):
        tower = Qwen2_5_VisionTransformerPretrainedModel(config)
    state = {
        name: torch.from_numpy(checkpoint.read(PREFIX + name, tuple(tensor.shape)))
        for name, tensor in tower.state_dict().items()
    }
    tower.load_state_dict(state, strict=True, assign=True)
    return tower.eval()


def write_vision(checkpoint: Checkpoint, network: VisionNetwork, path: Path) -> None:
    """Write `path` in float32 (with `path`.data when large). Raises InputError."""
    wrapper = WindowedTower(load_tower(checkpoint, network), network).eval()
    geometry = network.geometry
    slots, unit = geometry.slots, geometry.merge**2
    width = 3 * geometry.patch**2
    length = slots * 6
    # An example batch of 1 would be baked in as a constant.
    example = (
        torch.randint(0, 256, (2, length, width), dtype=torch.uint8),
        torch.ones(length),
        torch.zeros(length, 2, dtype=torch.long),
        torch.arange(length // unit - 3),
    )
    windows, batch, tokens = (torch.export.Dim(name) for name in ("windows", "batch", "tokens"))
    slot = slots * windows
    dynamic = ({0: batch, 1: slot}, {0: slot}, {0: slot}, {0: tokens})
    with torch.no_grad():
        program = torch.onnx.export(
            wrapper,
            example,
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=dynamic,
            input_names=["pixel_values", "valid", "pos_hw", "out_index"],
            output_names=["image_embeds"],
            optimize=True,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    size = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    if size > _INLINE_LIMIT:
        data = path.name + ".data"
        onnx.save(model, path, save_as_external_data=True, location=data, size_threshold=1024)
    else:
        onnx.save(model, path)
