"""The vision graph, written straight from safetensors block by block. No torch.

    pixel_values u8 [B, L, 3 * patch^2] in the padded window layout, valid f32 [L],
    pos_hw i64 [L, 2], out_index i64 [T] -> image_embeds f32 [B, T, H]

The host lays the patches out in whole windows (`forge_station.vlm.preprocess.vision_layout`):
window attention is a reshape, full attention one masked product, and `out_index` drops padding and
restores the order. Any grid, any number of images of one size.

A still image fills both temporal slices with the same pixels, so their weights are summed; colour
normalisation is folded into the first product as well, so the host hands over bytes. `vision_torch`
is the independent second implementation that tests compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from export.graph import GraphWriter
from export.network import VisionNetwork
from export.quantize import Storage
from export.tensors import Checkpoint
from forge_station.vlm.preprocess import CLIP_MEAN, CLIP_STD

PREFIX = "model.visual."
EPSILON = 1e-6


def write_vision(
    checkpoint: Checkpoint,
    network: VisionNetwork,
    path: Path,
    storage: Storage,
    block_done: Callable[[], object] = lambda: None,
    *,
    fused: bool = True,
) -> None:
    """Write `path` and `path`.data; `block_done` is called a block. Raises InputError."""
    with GraphWriter(path, storage, fused=fused) as writer:
        shapes = _Shapes(writer, network)
        stream = _patch_embed(writer, checkpoint, network)
        norm = _vector(writer, checkpoint, network, "blocks.0.norm1.weight")
        hidden = writer.norm(stream, norm, EPSILON)
        for number in range(network.depth):
            block = f"blocks.{number}."
            full = number in network.full_attention_blocks
            mixed = _attention(writer, checkpoint, network, f"{block}attn.", hidden, shapes, full)
            hidden, stream = _skip_norm(
                writer, checkpoint, network, f"{block}norm2.weight", stream, mixed
            )
            fed = _feed_forward(writer, checkpoint, network, f"{block}mlp.", hidden)
            last = number + 1 == network.depth
            name = "merger.ln_q.weight" if last else f"blocks.{number + 1}.norm1.weight"
            hidden, stream = _skip_norm(writer, checkpoint, network, name, stream, fed)
            block_done()
        _merge(writer, checkpoint, network, hidden, shapes)
        _save(writer, network)


class _Shapes:
    """Rotary tables, masks and shapes that all blocks share."""

    def __init__(self, writer: GraphWriter, network: VisionNetwork) -> None:
        slots, width = network.geometry.slots, network.hidden_size
        size = width // network.heads
        self.slots = writer.constant("slots_shape", [-1, slots, width])
        self.flat = writer.constant("flat_shape", [-1, width])
        first = writer.constant("index_zero", 0)
        batch = writer.op("Gather", [writer.op("Shape", ["pixel_values"]), first])
        length = writer.op("Gather", [writer.op("Shape", ["valid"]), first])
        axis = writer.constant("axis_zero", [0])
        self.batch = writer.op("Unsqueeze", [batch, axis])
        ends = [writer.constant("shape_rest", [-1]), writer.constant("shape_width", [width])]
        self.whole = writer.op("Concat", [self.batch, *ends], axis=0)
        # Angles of row and column side by side: positions [L, 2] x table [2, size / 2].
        half = size // 4
        steps = np.arange(0, size // 2, 2, dtype=np.float32) / (size // 2)
        inverse = (1.0 / network.rope_theta**steps).astype(np.float32)
        table = np.zeros((2, 2 * half), np.float32)
        table[0, :half] = table[1, half:] = inverse
        place = writer.op("Cast", ["pos_hw"], to=TensorProto.FLOAT)
        angles = writer.op("MatMul", [place, writer.constant("rotary_table", table)])
        self.cos, self.sin = writer.op("Cos", [angles]), writer.op("Sin", [angles])
        one = writer.constant("step_one", 1)
        numbers = writer.op("Range", [first, length, one])
        tile = writer.op("Concat", [self.batch, writer.constant("tile_one", [1])], axis=0)
        rows = writer.op("Tile", [writer.op("Unsqueeze", [numbers, axis]), tile])
        self.rows_whole = rows  # [B, L]: slot i takes row i of cos and sin
        by_window = writer.constant("window_rows_shape", [-1, slots])
        self.rows_window = writer.op("Reshape", [rows, by_window])
        gap = writer.op("Sub", ["valid", writer.constant("one", np.float32(1))])
        bias = writer.op("Mul", [gap, writer.constant("far", np.float32(1e9))])
        mask = writer.constant("window_bias_shape", [-1, 1, 1, slots])
        tile = writer.op("Concat", [self.batch, writer.constant("tile_ones", [1, 1, 1])], axis=0)
        self.bias_window = writer.op("Tile", [writer.op("Reshape", [bias, mask]), tile])
        self.bias_whole = writer.op("Reshape", [bias, writer.constant("bias_shape", [1, 1, 1, -1])])


def _patch_embed(writer: GraphWriter, checkpoint: Checkpoint, network: VisionNetwork) -> str:
    """Bytes [B, L, 3 * patch^2] -> [B * L, hidden]; normalisation folded into the weights."""
    side, width = network.geometry.patch, network.hidden_size
    kernel = checkpoint.read(
        f"{PREFIX}patch_embed.proj.weight", (width, 3, network.geometry.temporal, side, side)
    )
    colour = kernel.sum(2, dtype=np.float64).reshape(width, 3, side * side)
    std = CLIP_STD.astype(np.float64)[:, None]
    weight = (colour / (255.0 * std)).reshape(width, -1).astype(np.float32)
    bias = -(colour * (CLIP_MEAN.astype(np.float64)[:, None] / std)).sum((1, 2))
    flat = writer.constant("pixels_shape", [-1, 3 * side * side])
    pixels = writer.op("Reshape", ["pixel_values", flat])
    pixels = writer.op("Cast", [pixels], to=TensorProto.FLOAT)
    bias = bias.astype(np.float32)
    return writer.linear(pixels, "patch_embed", weight.shape, lambda: weight, bias, exact=True)


def _attention(
    writer: GraphWriter,
    checkpoint: Checkpoint,
    network: VisionNetwork,
    base: str,
    hidden: str,
    shapes: _Shapes,
    full: bool,
) -> str:
    """Attention inside windows, or over all patches of an image."""
    width, heads = network.hidden_size, network.heads
    size = width // heads
    bias = checkpoint.read(f"{PREFIX}{base}qkv.bias", (3 * width,))
    shape = shapes.whole if full else shapes.slots
    rows = shapes.rows_whole if full else shapes.rows_window
    split = writer.constant("heads_shape", [0, 0, heads, size])
    parts = []
    for n, part in enumerate(("q", "k", "v")):
        factor = np.float32(size**-0.5 if part == "q" else 1)
        block = slice(n * width, (n + 1) * width)
        weight = partial(_projection, checkpoint, f"{PREFIX}{base}qkv.weight", width, block, factor)
        own = bias[block] * factor
        flat = writer.linear(hidden, f"{base}{part}", (width, width), weight, own)
        x = writer.op("Reshape", [flat, shape])
        if part != "v":
            x = writer.rotary(x, rows, shapes.cos, shapes.sin, heads, size)
        order = [0, 2, 3, 1] if part == "k" else [0, 2, 1, 3]
        parts.append(writer.op("Transpose", [writer.op("Reshape", [x, split])], perm=order))
    query, key, value = parts
    scores = writer.op("MatMul", [query, key])
    bias_name = shapes.bias_whole if full else shapes.bias_window
    shares = writer.op("Softmax", [writer.op("Add", [scores, bias_name])], axis=-1)
    mixed = writer.op("Transpose", [writer.op("MatMul", [shares, value])], perm=[0, 2, 1, 3])
    mixed = writer.op("Reshape", [mixed, shapes.flat])
    return _linear(writer, checkpoint, f"{base}proj", mixed, (width, width))


def _projection(
    checkpoint: Checkpoint, name: str, width: int, block: slice, factor: np.float32
) -> np.ndarray:
    """The rows of q, k or v out of their common weight."""
    return checkpoint.read(name, (3 * width, width))[block] * factor


def _linear(
    writer: GraphWriter, checkpoint: Checkpoint, name: str, source: str, shape: tuple[int, int]
) -> str:
    """A linear layer with a bias, as the checkpoint has it."""
    weight = partial(checkpoint.read, f"{PREFIX}{name}.weight", shape)
    bias = checkpoint.read(f"{PREFIX}{name}.bias", shape[:1])
    outliers = name.endswith("down_proj")
    return writer.linear(source, name, shape, weight, bias, outliers=outliers)


def _feed_forward(
    writer: GraphWriter, checkpoint: Checkpoint, network: VisionNetwork, base: str, hidden: str
) -> str:
    """silu(gate) * up, then down, all with a bias."""
    inner, outer = network.intermediate_size, network.hidden_size

    def product(source: str, name: str, shape: tuple[int, int]) -> str:
        return _linear(writer, checkpoint, f"{base}{name}", source, shape)

    silu = writer.silu(product(hidden, "gate_proj", (inner, outer)))
    up = product(hidden, "up_proj", (inner, outer))
    return product(writer.op("Mul", [silu, up]), "down_proj", (outer, inner))


def _merge(
    writer: GraphWriter,
    checkpoint: Checkpoint,
    network: VisionNetwork,
    hidden: str,
    shapes: _Shapes,
) -> None:
    """Join merge x merge patches to a token, project, and put the tokens into reading order."""
    joined = network.hidden_size * network.geometry.merge**2
    rows = writer.op("Reshape", [hidden, writer.constant("merge_shape", [-1, joined])])
    for number, width in ((0, joined), (2, network.out_hidden_size)):
        name = f"merger.mlp.{number}"
        rows = _linear(writer, checkpoint, name, rows, (width, joined))
        if number == 0:
            rows = writer.op("Gelu", [rows])
    ends = [writer.constant("out_rest", [-1]), writer.constant("out_width", [width])]
    shape = writer.op("Concat", [shapes.batch, *ends], axis=0)
    tokens = writer.op("Reshape", [rows, shape])
    writer.op("Gather", [tokens, "out_index"], ["image_embeds"], axis=1)


def _skip_norm(
    writer: GraphWriter,
    checkpoint: Checkpoint,
    network: VisionNetwork,
    name: str,
    stream: str,
    added: str,
) -> tuple[str, str]:
    """(normalised, new residual stream) of stream + added."""
    weight = _vector(writer, checkpoint, network, name)
    return writer.skip_norm(stream, added, weight, EPSILON)


def _vector(writer: GraphWriter, checkpoint: Checkpoint, network: VisionNetwork, name: str) -> str:
    return writer.constant(name, checkpoint.read(PREFIX + name, (network.hidden_size,)))


def _save(writer: GraphWriter, network: VisionNetwork) -> None:
    info = helper.make_tensor_value_info
    writer.save(
        "qwen2_5_vl_vision",
        [
            info(
                "pixel_values", TensorProto.UINT8, ["batch", "slots", 3 * network.geometry.patch**2]
            ),
            info("valid", TensorProto.FLOAT, ["slots"]),
            info("pos_hw", TensorProto.INT64, ["slots", 2]),
            info("out_index", TensorProto.INT64, ["tokens"]),
        ],
        [info("image_embeds", TensorProto.FLOAT, ["batch", "tokens", network.out_hidden_size])],
    )
