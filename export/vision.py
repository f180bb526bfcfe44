"""The vision graph, exported by torch.onnx (dynamo) from a wrapper round the checkpoint's tower.

    pixel_values f32 [B, L, 3 * temporal * patch^2] in the padded window layout, valid f32 [L],
    pos_hw i64 [L, 2], out_index i64 [T] -> image_embeds f32 [B, T, H]

The published forward loops over windows in Python and cannot be exported. Here the host lays the
patches out in whole windows (`forge_station.vlm.preprocess.vision_layout`): window attention is a
reshape, full attention one masked product, and `out_index` drops padding and restores the order.
Any grid and any number of images of one size.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)

from export.graph import MICROSOFT
from export.network import VisionNetwork
from export.quantize import BLOCK, quantize_blocks
from export.tensors import Checkpoint

PREFIX = "model.visual."
_OPSET = 18
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
        kernel = tower.patch_embed.proj.weight.detach()
        self.register_buffer("patch_weight", kernel.reshape(network.hidden_size, -1).clone())
        steps = torch.arange(0, self.size // 2, 2).float() / (self.size // 2)
        self.register_buffer("inverse", 1.0 / network.rope_theta**steps)

    def forward(self, pixel_values: Tensor, valid: Tensor, pos_hw: Tensor, out_index: Tensor):
        batch, length, _ = pixel_values.shape
        x = functional.linear(pixel_values, self.patch_weight)
        angles = (pos_hw[..., None].float() * self.inverse).reshape(length, -1)
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        over_all = (valid - 1.0)[None, None, None] * 1e9
        in_window = ((valid - 1.0) * 1e9).reshape(-1, 1, 1, self.slots).repeat(batch, 1, 1, 1)
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
    config = Qwen2_5_VLConfig.from_pretrained(checkpoint.folder).vision_config
    with torch.device("meta"):
        tower = Qwen2_5_VisionTransformerPretrainedModel(config)
    state = {
        name: torch.from_numpy(checkpoint.read(PREFIX + name, tuple(tensor.shape)))
        for name, tensor in tower.state_dict().items()
    }
    tower.load_state_dict(state, strict=True, assign=True)
    return tower.eval()


def write_vision(
    checkpoint: Checkpoint, network: VisionNetwork, path: Path, bits: int
) -> None:
    """Write `path` (with `path`.data when large). `bits` 0 (float32) or 8. Raises InputError."""
    wrapper = WindowedTower(load_tower(checkpoint, network), network).eval()
    geometry = network.geometry
    slots, unit = geometry.slots, geometry.merge**2
    width = 3 * geometry.temporal * geometry.patch**2
    length = slots * 6
    # An example batch of 1 would be baked in as a constant.
    example = (
        torch.randn(2, length, width),
        torch.ones(length),
        torch.zeros(length, 2, dtype=torch.long),
        torch.arange(length // unit - 3),
    )
    windows, batch, tokens = (torch.export.Dim(name) for name in ("windows", "batch", "tokens"))
    dynamic = ({0: batch, 1: slots * windows}, {0: slots * windows}, {0: slots * windows}, {0: tokens})
    with torch.no_grad():
        program = torch.onnx.export(
            wrapper,
            example,
            dynamo=True,
            opset_version=_OPSET,
            dynamic_shapes=dynamic,
            input_names=["pixel_values", "valid", "pos_hw", "out_index"],
            output_names=["image_embeds"],
            optimize=True,
            verbose=False,
        )
    model = program.model_proto
    if bits:
        quantize_matmuls(model, bits)
    size = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    if size > _INLINE_LIMIT:
        data = path.name + ".data"
        onnx.save(model, path, save_as_external_data=True, location=data, size_threshold=1024)
    else:
        onnx.save(model, path)


def quantize_matmuls(model: onnx.ModelProto, bits: int) -> int:
    """Replace every MatMul / Gemm with a constant weight by MatMulNBits; returns how many."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    added: list[onnx.TensorProto] = []
    nodes: list[onnx.NodeProto] = []
    used: set[str] = set()
    count = 0
    for node in model.graph.node:
        weight = constants.get(node.input[1]) if len(node.input) > 1 else None
        if node.op_type not in ("MatMul", "Gemm") or weight is None or len(weight.dims) != 2:
            nodes.append(node)
            continue
        array = numpy_helper.to_array(weight)
        transposed = any(a.name == "transB" and a.i for a in node.attribute)
        blocks = quantize_blocks(array if transposed else array.T.copy(), bits)
        name = f"{weight.name}.{count}"
        added.append(numpy_helper.from_array(blocks.values, f"{name}.values"))
        added.append(numpy_helper.from_array(blocks.scales.reshape(-1), f"{name}.scales"))
        bias = node.input[2] if len(node.input) > 2 else ""
        product = f"{name}.product" if bias else node.output[0]
        nodes.append(
            helper.make_node(
                "MatMulNBits",
                [node.input[0], f"{name}.values", f"{name}.scales"],
                [product],
                name=f"{name}.nbits",
                domain=MICROSOFT,
                K=blocks.columns,
                N=len(blocks.values),
                bits=bits,
                block_size=BLOCK,
                accuracy_level=4,
            )
        )
        if bias:
            nodes.append(helper.make_node("Add", [product, bias], [node.output[0]]))
        count += 1
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    for node in nodes:
        used.update(node.input)
    kept = [tensor for tensor in model.graph.initializer if tensor.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept + added)
    if MICROSOFT not in {entry.domain for entry in model.opset_import}:
        model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    return count
