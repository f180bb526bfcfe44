"""The decoder graph, written straight from safetensors layer by layer. No torch.

    inputs_embeds f32 [1, S, H], position_ids i64 [3, 1, S], attention_bias f32 [1, 1, S, P + S],
    logit_positions i64 [1, K], past.{i}.key / .value f32 [1, kv heads, P, D]
      -> logits f32 [1, K, V], present.{i}.key / .value f32 [1, kv heads, P + S, D]

One graph serves trunk prefill (causal bias), packed branches and decode steps: who sees whom is
said by `attention_bias` alone, never implied. Attention is plain MatMul and Softmax, which every
ONNX Runtime from 1.23.2 runs, and float32 in every precision, as are keys and values. lm_head is
applied at `logit_positions` only. Without `fused` all operators are standard ONNX.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from export.graph import GraphWriter
from export.network import TextNetwork
from export.quantize import Quantizer, Storage
from export.tensors import Checkpoint

PREFIX = "model.language_model."


def write_decoder(
    checkpoint: Checkpoint,
    network: TextNetwork,
    path: Path,
    storage: Storage,
    layer_done: Callable[[], object] = lambda: None,
    quantizer: Quantizer | None = None,
    *,
    fused: bool = True,
) -> None:
    """Write `path` and `path`.data; `layer_done` is called a layer. Raises InputError."""
    with GraphWriter(path, storage, quantizer, fused=fused) as writer:
        cos, sin = _angles(writer, network)
        ids = _row_numbers(writer)
        norm = writer.constant(
            "norm.0", _vector(checkpoint, network, f"{PREFIX}layers.0.input_layernorm.weight")
        )
        width = writer.constant("rows_shape", [-1, network.hidden_size])
        stream = writer.op("Reshape", ["inputs_embeds", width])  # [S, H]: all layers are 2-D
        hidden = writer.norm(stream, norm, network.rms_norm_eps)
        for layer in range(network.layers):
            attended = _attention(writer, checkpoint, network, layer, hidden, (ids, cos, sin))
            name = f"{PREFIX}layers.{layer}.post_attention_layernorm.weight"
            hidden, stream = _skip_norm(writer, checkpoint, network, name, stream, attended)
            fed = _feed_forward(writer, checkpoint, network, layer, hidden)
            last = layer + 1 == network.layers
            name = f"{PREFIX}norm.weight"
            if not last:
                name = f"{PREFIX}layers.{layer + 1}.input_layernorm.weight"
            hidden, stream = _skip_norm(writer, checkpoint, network, name, stream, fed)
            layer_done()
        picked = writer.op("Gather", [hidden, "logit_positions"], axis=0)  # [1, K, H]
        name = f"{PREFIX}embed_tokens.weight" if network.tied else "lm_head.weight"
        shape = (network.vocab_size, network.hidden_size)
        logits = writer.linear(picked, "lm_head", shape, partial(checkpoint.read, name, shape))
        writer.op("Identity", [logits], ["logits"])
        _save(writer, network)


def _angles(writer: GraphWriter, network: TextNetwork) -> tuple[str, str]:
    """cos and sin [S, D/2] of the three-part rotary embedding: positions x table [3, D/2]."""
    half = network.head_dim // 2
    steps = np.arange(0, network.head_dim, 2, dtype=np.float32) / network.head_dim
    inverse = (1.0 / network.rope_theta**steps).astype(np.float32)
    table = np.zeros((3, half), np.float32)
    table[np.repeat(np.arange(3), network.mrope_section), np.arange(half)] = inverse
    one = writer.constant("axis_one", [1])
    flat = writer.op("Squeeze", ["position_ids", one])
    rows = writer.op("Transpose", [writer.op("Cast", [flat], to=TensorProto.FLOAT)], perm=[1, 0])
    angles = writer.op("MatMul", [rows, writer.constant("rotary_table", table)])
    return writer.op("Cos", [angles]), writer.op("Sin", [angles])


def _row_numbers(writer: GraphWriter) -> str:
    """int64 [1, S]: token i takes row i of the cos and sin of this pass."""
    length = writer.op(
        "Gather", [writer.op("Shape", ["inputs_embeds"]), writer.constant("index_one", 1)]
    )
    numbers = writer.op(
        "Range", [writer.constant("zero", 0), length, writer.constant("step_one", 1)]
    )
    return writer.op("Unsqueeze", [numbers, writer.constant("axis_zero", [0])])


def _attention(
    writer: GraphWriter,
    checkpoint: Checkpoint,
    network: TextNetwork,
    layer: int,
    hidden: str,
    rotary: tuple[str, str, str],
) -> str:
    """Self-attention of one layer with its projections; writes present.{layer}.*"""
    base, size = f"{PREFIX}layers.{layer}.self_attn.", network.head_dim
    wide, narrow = network.heads * size, network.kv_heads * size
    ids, cos, sin = rotary
    projected = {}
    for part, rows in (("q", wide), ("k", narrow), ("v", narrow)):
        name = f"{base}{part}_proj."
        factor = np.float32(size**-0.5 if part == "q" else 1)  # the scale of the scores
        weight = partial(_scaled, checkpoint, f"{name}weight", (rows, network.hidden_size), factor)
        bias = checkpoint.read(f"{name}bias", (rows,)) * factor
        shape = (rows, network.hidden_size)
        flat = writer.linear(hidden, f"{base}{part}", shape, weight, bias)
        whole = writer.constant(f"batch_shape_{rows}", [1, -1, rows])
        projected[part] = writer.op("Reshape", [flat, whole])
    query = writer.rotary(projected["q"], ids, cos, sin, network.heads, size)
    key = writer.rotary(projected["k"], ids, cos, sin, network.kv_heads, size)
    value = projected["v"]
    split = writer.constant("heads_shape", [0, 0, -1, size])
    heads = [
        writer.op("Transpose", [writer.op("Reshape", [x, split])], perm=[0, 2, 1, 3])
        for x in (query, key, value)
    ]
    keys = writer.op("Concat", [f"past.{layer}.key", heads[1]], [f"present.{layer}.key"], axis=2)
    values = writer.op(
        "Concat", [f"past.{layer}.value", heads[2]], [f"present.{layer}.value"], axis=2
    )
    query = heads[0]
    grouped = network.heads != network.kv_heads
    if grouped:
        groups = network.heads // network.kv_heads
        group = writer.constant("group_shape", [0, network.kv_heads, groups, -1, size])
        axis = writer.constant("axis_two", [2])
        query = writer.op("Reshape", [query, group])
        keys = writer.op("Unsqueeze", [keys, axis])
        values = writer.op("Unsqueeze", [values, axis])
    order = [0, 1, 2, 4, 3] if grouped else [0, 1, 3, 2]
    scores = writer.op("MatMul", [query, writer.op("Transpose", [keys], perm=order)])
    weighted = writer.op("Softmax", [writer.op("Add", [scores, "attention_bias"])], axis=-1)
    mixed = writer.op("MatMul", [weighted, values])
    if grouped:
        back = writer.constant("ungroup_shape", [0, network.heads, -1, size])
        mixed = writer.op("Reshape", [mixed, back])
    merge = writer.constant("merge_shape", [-1, wide])
    mixed = writer.op("Reshape", [writer.op("Transpose", [mixed], perm=[0, 2, 1, 3]), merge])
    shape = (network.hidden_size, wide)
    weight = partial(checkpoint.read, f"{base}o_proj.weight", shape)
    return writer.linear(mixed, f"{base}o_proj", shape, weight)


def _scaled(
    checkpoint: Checkpoint, name: str, shape: tuple[int, int], factor: np.float32
) -> np.ndarray:
    return checkpoint.read(name, shape) * factor


def _feed_forward(
    writer: GraphWriter, checkpoint: Checkpoint, network: TextNetwork, layer: int, hidden: str
) -> str:
    """silu(gate) * up, then down."""
    base = f"{PREFIX}layers.{layer}.mlp."
    inner, outer = network.intermediate_size, network.hidden_size

    def product(source: str, name: str, shape: tuple[int, int]) -> str:
        weight = partial(checkpoint.read, f"{base}{name}.weight", shape)
        return writer.linear(source, f"{base}{name}", shape, weight, outliers=name == "down_proj")

    silu = writer.silu(product(hidden, "gate_proj", (inner, outer)))
    up = product(hidden, "up_proj", (inner, outer))
    return product(writer.op("Mul", [silu, up]), "down_proj", (outer, inner))


def _skip_norm(
    writer: GraphWriter,
    checkpoint: Checkpoint,
    network: TextNetwork,
    name: str,
    stream: str,
    added: str,
) -> tuple[str, str]:
    """(normalised, new residual stream) of stream + added."""
    weight = writer.constant(name, _vector(checkpoint, network, name))
    return writer.skip_norm(stream, added, weight, network.rms_norm_eps)


def _vector(checkpoint: Checkpoint, network: TextNetwork, name: str) -> np.ndarray:
    return checkpoint.read(name, (network.hidden_size,))


def _save(writer: GraphWriter, network: TextNetwork) -> None:
    info = helper.make_tensor_value_info
    real, whole = TensorProto.FLOAT, TensorProto.INT64
    inputs = [
        info("inputs_embeds", real, [1, "seq", network.hidden_size]),
        info("position_ids", whole, [3, 1, "seq"]),
        info("attention_bias", real, [1, 1, "seq", "total"]),
        info("logit_positions", whole, [1, "k"]),
    ]
    outputs = [info("logits", real, [1, "k", network.vocab_size])]
    for layer in range(network.layers):
        for part in ("key", "value"):
            heads, size = network.kv_heads, network.head_dim
            inputs.append(info(f"past.{layer}.{part}", real, [1, heads, "past", size]))
            outputs.append(info(f"present.{layer}.{part}", real, [1, heads, "total", size]))
    writer.save("qwen2_5_vl_decoder", inputs, outputs)
