"""Block quantisation, and that ONNX Runtime computes with exactly these weights."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from export.graph import GraphWriter
from export.quantize import Storage, block_of, dequantize, quantize_blocks, storage
from forge_station.vlm.engine import Graph


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (5, 32), (7, 33), (4, 200)])
def test_no_weight_moves_by_more_than_a_step(bits, shape):
    weight = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    blocks = quantize_blocks(weight, bits)
    step = np.repeat(np.abs(blocks.scales), 32, axis=1)[:, : shape[1]]
    assert blocks.values.dtype == np.uint8
    assert (np.abs(dequantize(blocks) - weight) <= step * 1.001).all()


def test_zero_blocks_stay_zero():
    weight = np.zeros((2, 64), np.float32)
    weight[0, 40] = 3.0
    assert (dequantize(quantize_blocks(weight, 8)) == weight).all()


def test_many_rows_are_quantised_like_few():
    weight = np.random.default_rng(0).normal(size=(5000, 32)).astype(np.float32)
    whole, part = quantize_blocks(weight, 8), quantize_blocks(weight[4500:], 8)
    assert (whole.values[4500:] == part.values).all()
    assert (whole.scales[4500:] == part.scales).all()


@pytest.mark.parametrize(("columns", "block"), [(192, 32), (588, 28), (416, 32), (7, 7), (31, 31)])
def test_unpacked_blocks_divide_the_input(columns, block):
    assert block_of(columns) == block


def test_large_graphs_stay_packed():
    assert storage(8, 2_000_000).unpacked
    assert not storage(8, 3_000_000_000).unpacked
    assert not storage(4, 2_000_000).unpacked
    assert not storage(0, 2_000_000).unpacked


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("kept", "tolerance"),
    [
        (Storage(0), 1e-5),
        (Storage(8, unpacked=True), 1e-5),
        (Storage(8), 0.02),  # MatMulNBits also rounds the activations
        (Storage(4), 0.02),
    ],
)
def test_the_runtime_multiplies_with_the_dequantised_weights(tmp_path, kept, tolerance, bias):
    rng = np.random.default_rng(2)
    weight = rng.normal(size=(24, 96)).astype(np.float32)
    shift = rng.normal(size=24).astype(np.float32) if bias else None
    path = tmp_path / "linear.onnx"
    with GraphWriter(path, kept) as writer:
        writer.op("Identity", [writer.linear("x", "w", weight.shape, lambda: weight, shift)], ["y"])
        info = helper.make_tensor_value_info
        writer.save(
            "linear",
            [info("x", TensorProto.FLOAT, ["rows", 96])],
            [info("y", TensorProto.FLOAT, ["rows", 24])],
        )
    x = rng.normal(size=(5, 96)).astype(np.float32)
    (y,) = Graph(path).run({"x": x})
    used = weight
    if kept.bits:
        block = block_of(96) if kept.unpacked else 32
        used = dequantize(quantize_blocks(weight, kept.bits, block))
    expected = x @ used.T + (0 if shift is None else shift)
    assert np.linalg.norm(y - expected) / np.linalg.norm(expected) < tolerance
