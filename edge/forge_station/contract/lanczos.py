"""LANCZOS down-scaling of 8-bit images exactly as Pillow does it, in numpy.

VIEScore2 makes its grids with Pillow's LANCZOS; the station has no Pillow. Fixed-point arithmetic,
support and rounding follow Pillow's libImaging/Resample.c (8 bits per channel), so results agree
to the bit; a test compares them. The horizontal pass comes first, as in every Pillow up to 12;
Pillow 13 (seen 2026-11) starts with the vertical pass for images about twice as tall as wide,
which differs by rounding between the passes.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_PRECISION_BITS = 22
_LOBES = 3.0


def resize(image: npt.NDArray[np.uint8], size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """uint8 [H, W] -> uint8 `size` = (height, width); horizontal pass first, as Pillow."""
    height, width = size
    narrowed = image if image.shape[1] == width else _pass(image, width)
    if narrowed.shape[0] == height:
        return narrowed.copy()
    return _pass(narrowed.T, height).T.copy()


def _pass(image: npt.NDArray[np.uint8], size: int) -> npt.NDArray[np.uint8]:
    weights = _coefficients(image.shape[1], size)
    total = image.astype(np.int64) @ weights.T + (1 << (_PRECISION_BITS - 1))
    result: npt.NDArray[np.uint8] = np.clip(total >> _PRECISION_BITS, 0, 255).astype(np.uint8)
    return result


def _coefficients(old: int, new: int) -> npt.NDArray[np.int64]:
    """Fixed-point weights [new, old], each row summing to about 2**22."""
    scale = old / new
    filter_scale = max(scale, 1.0)
    support = _LOBES * filter_scale
    weights = np.zeros((new, old), np.int64)
    for index in range(new):
        centre = (index + 0.5) * scale
        low = max(int(centre - support + 0.5), 0)
        high = min(int(centre + support + 0.5), old)
        row = [_kernel((x - centre + 0.5) / filter_scale) for x in range(low, high)]
        total = sum(row)
        for x, value in zip(range(low, high), row, strict=True):
            scaled = value / total * (1 << _PRECISION_BITS)
            weights[index, x] = int(scaled + 0.5) if scaled >= 0 else int(scaled - 0.5)
    return weights


def _kernel(x: float) -> float:
    return _sinc(x) * _sinc(x / _LOBES) if -_LOBES <= x < _LOBES else 0.0


def _sinc(x: float) -> float:
    return 1.0 if x == 0.0 else math.sin(math.pi * x) / (math.pi * x)
