"""Weight-only block quantisation in the layout of ONNX Runtime's MatMulNBits, numpy only.

Symmetric per block of 32 weights along the input. int8 for nano and for every vision tower; int4
only for a 3B decoder and behind an accuracy gate (error about ten times that of int8).
It knows no graph and no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
BITS = {"fp32": (0, 0), "int8": (8, 8), "w4a16": (4, 8)}
"""Precision of a bundle -> bits of (decoder, vision); 0 is float32."""


@dataclass(frozen=True)
class BlockWeight:
    """W [N, K]: `values` uint8 [N, blocks, block * bits / 8], `scales` float32 [N, blocks].

    A stored value v stands for (v - 2^(bits - 1)) * scale; K is padded with zeros to whole blocks.
    """

    values: NDArray[np.uint8]
    scales: NDArray[np.float32]
    bits: int
    columns: int


def quantize_blocks(weight: NDArray[np.float32], bits: int, block: int = BLOCK) -> BlockWeight:
    """float32 [N, K] (torch layout of a linear layer) -> blocks of `bits` 4 or 8."""
    rows, columns = weight.shape
    count = -(-columns // block)
    padded = np.zeros((rows, count * block), np.float32)
    padded[:, :columns] = weight
    blocks = padded.reshape(rows, count, block)
    zero = 1 << (bits - 1)
    # The value of largest magnitude is mapped to -2^(bits - 1): one more level than +-(2^.. - 1).
    peak = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
    scales = peak / np.float32(-zero)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    levels = np.clip(np.rint(blocks * inverse) + zero, 0, 2 * zero - 1).astype(np.uint8)
    if bits == 4:
        levels = levels[..., 0::2] | (levels[..., 1::2] << 4)
    return BlockWeight(levels, scales[..., 0], bits, columns)


def dequantize(weight: BlockWeight) -> NDArray[np.float32]:
    """The float32 [N, K] that MatMulNBits computes with."""
    values = weight.values
    if weight.bits == 4:
        values = np.stack([values & 15, values >> 4], -1).reshape(*values.shape[:2], -1)
    centred = values.astype(np.float32) - np.float32(1 << (weight.bits - 1))
    full = (centred * weight.scales[..., None]).reshape(len(values), -1)
    return np.ascontiguousarray(full[:, : weight.columns])
