"""GPTQ: 4-bit weights of the decoder, each layer calibrated with what the station really asks.

Frantar et al., "GPTQ" (2022): the columns of a weight W [N, K] are rounded one after the other, and
the columns behind make up for the error of each, weighted by the Hessian X^T X of the layer's
calibration inputs X [tokens, K]. Scales are symmetric and belong to blocks of 32 columns, chosen
when the block is reached, so the result packs like any other (`export.quantize`). The scales of
`hqq` in place of the plain ones were no better (measured on the nano model).

`Gptq` follows the decoder's own forward: the writer hands it one weight after the other, it returns
the stored values and goes on with those, so later layers calibrate on the errors of earlier ones,
and no more than one layer is in memory.

Of our own: optimum's quantizer wraps GPTQModel, whose current release pins numpy to 2.2.6 and
comes as source only, and feeds a transformers model held in memory as a whole; it has no place for
branches behind a trunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from export.network import TextNetwork
from export.quantize import BlockWeight, dequantize, packed, peak_scales
from export.sequences import Sequence as TokenSequence
from export.tensors import Checkpoint
from forge_station.errors import InputError

PREFIX = "model.language_model."
DAMPING = 0.01
"""Share of the Hessian's mean diagonal that is added to it, as published."""
_ROWS_AT_ONCE = 8192


def quantize(
    weight: NDArray[np.float32],
    hessian: Tensor,
    bits: int,
    block: int,
) -> BlockWeight:
    """W [N, K] under the Hessian [K, K] (float64) -> stored blocks. Raises InputError."""
    rows, columns = weight.shape
    if columns % block:
        raise InputError("width is not a multiple of the block", expected=block, got=columns)
    inverse = _inverse_factor(hessian)
    count = columns // block
    levels = np.empty((rows, columns), np.float32)
    chosen = np.empty((rows, count), np.float32)
    zero = 1 << (bits - 1)
    for first in range(0, rows, _ROWS_AT_ONCE):  # rows do not depend on each other
        part = slice(first, first + _ROWS_AT_ONCE)
        left = torch.from_numpy(weight[part].copy())
        for number in range(count):
            span = slice(number * block, (number + 1) * block)
            own = torch.from_numpy(peak_scales(left[:, span].numpy(), bits))
            safe = torch.where(own == 0, 1.0, own)[:, 0]
            factor = inverse[span, span]
            error = torch.empty(len(left), block)
            here = left[:, span]
            for column in range(block):
                value = here[:, column]
                level = (value / safe).round().clamp(-zero, zero - 1)
                error[:, column] = (value - level * own[:, 0]) / factor[column, column]
                here[:, column:] -= error[:, column, None] * factor[column, column:]
                levels[part, number * block + column] = level.numpy()
            left[:, span.stop :] -= error @ inverse[span, span.stop :]
            chosen[part, number] = own[:, 0].numpy()
    blocks = levels.reshape(rows, count, block)
    return BlockWeight(packed(blocks, bits), chosen, bits, columns)


def _inverse_factor(hessian: Tensor) -> Tensor:
    """Upper U [K, K] with U^T U = H^-1, of the damped Hessian, float32.

    H = R R^T with R upper (a Cholesky of the reversed matrix) gives U = R^-1 without inverting H.
    Inputs that are always zero get a unit on the diagonal: their weights do not matter.
    """
    damped = hessian.clone()
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1.0
    diagonal += DAMPING * diagonal.mean()
    root = torch.linalg.cholesky(damped.flip(0, 1)).flip(0, 1)
    unit = torch.eye(len(root), dtype=root.dtype)
    return torch.linalg.solve_triangular(root, unit, upper=True).float()


class Gptq:
    """A `Quantizer` for `write_decoder`: must be called for its linear layers in their order."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        network: TextNetwork,
        sequences: Sequence[TokenSequence],
    ) -> None:
        self._checkpoint, self._network = checkpoint, network
        self._bias = [torch.from_numpy(s.bias) for s in sequences]
        self._rotary = [_rotary(network, s.positions) for s in sequences]
        self._answers = [torch.from_numpy(s.answers) for s in sequences]
        self._stream = [torch.from_numpy(s.embeds.copy()) for s in sequences]
        self._hidden = self._normed("layers.0.input_layernorm.weight")
        self._parts: dict[str, list[Tensor]] = {}

    def __call__(
        self,
        name: str,
        weight: NDArray[np.float32],
        bias: NDArray[np.float32] | None,
        bits: int,
        block: int,
    ) -> BlockWeight:
        inputs = self._inputs(_kind(name))
        stored = quantize(weight, _hessian(inputs), bits, block)
        self._follow(name, inputs, stored, bias)
        return stored

    def kept(self, name: str, stored: BlockWeight, bias: NDArray[np.float32] | None) -> None:
        self._follow(name, self._inputs(_kind(name)), stored, bias)

    def _follow(
        self,
        name: str,
        inputs: Sequence[Tensor],
        stored: BlockWeight,
        bias: NDArray[np.float32] | None,
    ) -> None:
        """Go on with what the quantised layer gives."""
        kind = _kind(name)
        if kind == "lm_head":
            return
        table = torch.from_numpy(dequantize(stored))
        shift = None if bias is None else torch.from_numpy(bias)
        outputs = [functional.linear(x, table, shift) for x in inputs]
        self._advance(kind, int(name.split("layers.")[1].split(".")[0]), outputs)

    def _inputs(self, kind: str) -> list[Tensor]:
        match kind:
            case "o_proj":
                return self._attended()
            case "down_proj":
                pairs = zip(self._parts.pop("gate_proj"), self._parts.pop("up_proj"), strict=True)
                return [functional.silu(gate) * up for gate, up in pairs]
            case "lm_head":
                pairs = zip(self._hidden, self._answers, strict=True)
                return [hidden[rows] for hidden, rows in pairs]
            case _:
                return self._hidden

    def _advance(self, kind: str, layer: int, outputs: list[Tensor]) -> None:
        if kind not in ("o_proj", "down_proj"):
            self._parts[kind] = outputs
            return
        self._stream = [s + o for s, o in zip(self._stream, outputs, strict=True)]
        if kind == "o_proj":
            name = f"layers.{layer}.post_attention_layernorm.weight"
        elif layer + 1 < self._network.layers:
            name = f"layers.{layer + 1}.input_layernorm.weight"
        else:
            name = "norm.weight"
        self._hidden = self._normed(name)

    def _normed(self, name: str) -> list[Tensor]:
        width = self._network.hidden_size
        weight = torch.from_numpy(self._checkpoint.read(f"{PREFIX}{name}", (width,)))
        epsilon = self._network.rms_norm_eps
        return [functional.rms_norm(s, (width,), weight, epsilon) for s in self._stream]

    def _attended(self) -> list[Tensor]:
        """Attention over each sequence; the scale of the scores is in q already."""
        size = self._network.head_dim
        groups = self._network.heads // self._network.kv_heads
        found = []
        parts = (self._parts.pop(kind) for kind in ("q", "k", "v"))
        for q, k, v, rotary, bias in zip(*parts, self._rotary, self._bias, strict=True):
            query, key, value = (x.reshape(len(x), -1, size).transpose(0, 1) for x in (q, k, v))
            key = _rotated(key, rotary).repeat_interleave(groups, 0)
            value = value.repeat_interleave(groups, 0)
            scores = _rotated(query, rotary) @ key.transpose(1, 2) + bias
            mixed = scores.softmax(-1) @ value
            found.append(mixed.transpose(0, 1).reshape(len(q), -1))
        return found


def _kind(name: str) -> str:
    """`q`, `k`, `v`, `o_proj`, `gate_proj`, `up_proj`, `down_proj` or `lm_head`."""
    return name.rsplit(".", 1)[-1]


def _hessian(inputs: Sequence[Tensor]) -> Tensor:
    """X^T X over all tokens, float64 [K, K]."""
    width = inputs[0].shape[1]
    total = torch.zeros(width, width, dtype=torch.float64)
    for x in inputs:
        total += (x.T @ x).double()
    return total


def _rotary(network: TextNetwork, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """cos and sin [S, D/2] of the three-part rotary embedding; positions [3, S]."""
    half = network.head_dim // 2
    inverse = 1.0 / network.rope_theta ** (torch.arange(half) * 2 / network.head_dim)
    part = torch.repeat_interleave(torch.arange(3), torch.tensor(network.mrope_section))
    angles = torch.from_numpy(positions).float()[part].T * inverse
    return angles.cos(), angles.sin()


def _rotated(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """x [heads, S, D] with its halves turned by the angles of each token."""
    cos, sin = rotary
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
