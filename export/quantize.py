"""Weight-only block quantisation in the layout of ONNX Runtime's MatMulNBits, numpy only.

Symmetric per block of 32 weights along the input. int8 for nano and for every vision tower; int4
only for a 3B decoder and behind an accuracy gate (error about ten times that of int8).
It knows no graph and no model.

Three ways to choose the 4-bit values, one layout: `rtn` rounds each weight to the nearest level,
`hqq` first fits the scale of each block (`hqq_scales`), `gptq` also lets later weights make up for
the error of earlier ones, on calibration inputs (`export.gptq`).

Two ways to compute with them. Packed: MatMulNBits, memory stays small; for 3B. Unpacked: the graph
turns them into float32 when it is loaded. Measured 2026-11-30, one thread of an AVX512 CPU, 768 x
192 x 1024: float32 1.7 ms, MatMulNBits 8 bit 3.3 ms (it also quantises activations, error .0075
against .0053); from 5 rows on float32 is never slower. Dynamic quantisation took 0.5 ms but its
error is .012 and depends on the CPU (without VNNI products saturate), so it is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
_ROWS_AT_ONCE = 4096
UNPACK_BELOW = 64_000_000
"""Graphs with fewer weights are unpacked to float32 at load (256 MB)."""


@dataclass(frozen=True)
class Storage:
    """How a graph keeps its linear weights: `bits` 0 is float32, 16 is float16.

    `half`: products of 4-bit and 8-bit weights are in float16 (CUDA). Whatever is no linear layer
    stays in float32: norms, residual, attention, keys and values.
    """

    bits: int
    unpacked: bool = False
    half: bool = False


def storage(bits: int, weights: int, *, half: bool = False) -> Storage:
    """Storage of a graph with `weights` linear weights."""
    unpacked = bits == 8 and weights < UNPACK_BELOW
    return Storage(bits, unpacked, half and bits in (4, 8) and not unpacked)


def block_of(columns: int) -> int:
    """The largest block of at most 32 that divides the input width."""
    return next(size for size in range(min(BLOCK, columns), 0, -1) if columns % size == 0)


@dataclass(frozen=True)
class BlockWeight:
    """W [N, K]: `values` uint8 [N, blocks, block * bits / 8], `scales` float32 [N, blocks].

    A stored value v stands for (v - 2^(bits - 1)) * scale; K is padded with zeros to whole blocks.
    """

    values: NDArray[np.uint8]
    scales: NDArray[np.float32]
    bits: int
    columns: int


Scales = Callable[[NDArray[np.float32], int], NDArray[np.float32]]
"""(blocks [..., block], bits) -> signed scale of each block [..., 1]."""


def peak_scales(blocks: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    """The weight of largest magnitude becomes -2^(bits - 1): one level more than +-(2^.. - 1)."""
    peak = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
    return (peak / np.float32(-(1 << (bits - 1)))).astype(np.float32)


def hqq_scales(
    blocks: NDArray[np.float32], bits: int, power: float = 0.7, rounds: int = 20
) -> NDArray[np.float32]:
    """Scales that minimise the sum of |W - s Q|^power, from `peak_scales` on.

    Half-quadratic splitting as published for HQQ (Badri and Shaji, 2023), with the shrinkage of a
    generalised soft threshold; solved for the scale where HQQ solves for a fractional zero point:
    ONNX Runtime's kernels take a float zero point ten times slower (measured 2026-11-30).
    """
    scales = peak_scales(blocks, bits)
    best, least = scales, np.full(scales.shape, np.inf, np.float32)
    beta, norm = 10.0, np.abs(blocks).max(-1, keepdims=True) + np.float32(1e-12)
    unit = blocks / norm  # one beta fits blocks of any size
    scales = scales / norm
    for _ in range(rounds):
        levels = _levels(unit, scales, bits)
        gap = unit - levels * scales
        loss = (np.abs(gap) ** power).sum(-1, keepdims=True)
        better = loss < least
        best, least = np.where(better, scales * norm, best), np.where(better, loss, least)
        size = np.abs(gap)
        shrunk = np.maximum(size - (size + 1e-9) ** (power - 1) / beta, 0) * np.sign(gap)
        square = (levels * levels).sum(-1, keepdims=True)
        dot = ((unit - shrunk) * levels).sum(-1, keepdims=True)
        scales = np.divide(dot, square, out=scales.copy(), where=square > 0)
        beta *= 1.05
    return best.astype(np.float32)


class Quantizer(Protocol):
    """Chooses the stored values of one linear layer, by its name in the checkpoint's decoder."""

    def __call__(
        self,
        name: str,
        weight: NDArray[np.float32],
        bias: NDArray[np.float32] | None,
        bits: int,
        block: int,
    ) -> BlockWeight: ...

    def kept(self, name: str, stored: BlockWeight, bias: NDArray[np.float32] | None) -> None:
        """Told instead of asked for a layer that an earlier, killed run has written."""


@dataclass(frozen=True)
class Nearest:
    """Every weight to its nearest level; a `Quantizer`."""

    scales: Scales = peak_scales

    def __call__(
        self,
        name: str,
        weight: NDArray[np.float32],
        bias: NDArray[np.float32] | None,
        bits: int,
        block: int,
    ) -> BlockWeight:
        return quantize_blocks(weight, bits, block, self.scales)

    def kept(self, name: str, stored: BlockWeight, bias: NDArray[np.float32] | None) -> None:
        pass


def quantize_blocks(
    weight: NDArray[np.float32], bits: int, block: int = BLOCK, scales: Scales = peak_scales
) -> BlockWeight:
    """float32 [N, K] (torch layout of a linear layer) -> blocks of `bits` 4 or 8."""
    rows, columns = weight.shape
    count = -(-columns // block)
    values = np.empty((rows, count, block * bits // 8), np.uint8)
    chosen = np.empty((rows, count), np.float32)
    for first in range(0, rows, _ROWS_AT_ONCE):  # an lm_head of 3B has 152k rows
        part = slice(first, first + _ROWS_AT_ONCE)
        blocks = np.zeros((len(weight[part]), count * block), np.float32)
        blocks[:, :columns] = weight[part]
        blocks = blocks.reshape(-1, count, block)
        own = scales(blocks, bits)
        values[part] = packed(_levels(blocks, own, bits), bits)
        chosen[part] = own[..., 0]
    return BlockWeight(values, chosen, bits, columns)


def _levels(
    blocks: NDArray[np.float32], scales: NDArray[np.float32], bits: int
) -> NDArray[np.float32]:
    """Nearest whole numbers -2^(bits - 1) .. 2^(bits - 1) - 1."""
    zero = np.float32(1 << (bits - 1))
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    return np.clip(np.rint(blocks * inverse), -zero, zero - 1)


def packed(levels: NDArray[np.float32], bits: int) -> NDArray[np.uint8]:
    """Levels -2^(bits - 1) .. as stored: moved up by 2^(bits - 1), two to a byte for 4 bits."""
    stored = (levels + np.float32(1 << (bits - 1))).astype(np.uint8)
    if bits == 4:
        stored = stored[..., 0::2] | (stored[..., 1::2] << np.uint8(4))
    return stored


def dequantize(weight: BlockWeight) -> NDArray[np.float32]:
    """The float32 [N, K] that MatMulNBits computes with."""
    values = weight.values
    if weight.bits == 4:
        values = np.stack([values & 15, values >> 4], -1).reshape(*values.shape[:2], -1)
    centred = values.astype(np.float32) - np.float32(1 << (weight.bits - 1))
    full = (centred * weight.scales[..., None]).reshape(len(values), -1)
    return np.ascontiguousarray(full[:, : weight.columns])
