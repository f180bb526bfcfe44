"""Did anything move while the patterns were shown? The first and the last view of white, compared.

Where the projector shows no second white, the code itself has one: the mean of all phase shifts,
and a bit with its inverse, are what white looks like at their moment. numpy and OpenCV; does not
know codes.

A tile of the image moved by as much as its own gradients say best explains the difference (one
step of Lucas and Kanade, along the strongest gradient, because an edge tells nothing of a move
along itself). Simulated parts (2026-11-30, 1.0 px = 0.26 mm): at rest 0.01 px, moved by 0.2 px
0.2 to 0.8 px are found, moved by 0.8 px 0.9 px; moves of many pixels are found as 1 to 2.
"""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]

BIN = 2
"""Camera pixels a side that `binned` takes together: less noise, a quarter of the work."""
_TILE = 16
# A tile counts where noise alone would move it by less than this (binned pixels, one sigma).
_SIGMA = 0.03
# Lit so little that nothing can be compared, grey levels.
_LEAST_LIGHT = 10.0


def binned(image: NDArray[np.unsignedinteger]) -> Float32:
    """Means of BIN x BIN pixels, float32 [H // BIN, W // BIN]; an odd last row or column is cut."""
    height, width = (side // BIN * BIN for side in image.shape)
    cut = image[:height, :width]
    total = cut[0::2, 0::2].astype(np.float32)
    for dy, dx in ((0, 1), (1, 0), (1, 1)):
        total += cut[dy::2, dx::2].astype(np.float32)
    return np.asarray(total * np.float32(1 / BIN**2), np.float32)


def moved_px(first: Float32, last: Float32, usable: Bool) -> float | None:
    """How far the part of the image that moved most did, in camera pixels.

    first, last: binned light of the projector alone, early and late; a common factor between them
    does not count. usable: binned pixels that are not overexposed. None where no tile has enough
    contrast to tell.
    """
    usable = usable & (np.maximum(first, last) > _LEAST_LIGHT)
    usable = cv2.erode(usable.view(np.uint8), np.ones((3, 3), np.uint8)).view(np.bool_)
    some = usable[::4, ::4]
    if not some.any():
        return None
    before, after = first[::4, ::4][some], last[::4, ::4][some]
    gain = float(np.median(after)) / max(float(np.median(before)), 1e-6)
    if not 0.01 < gain < 100:
        return None
    light = np.float32(0.5) * (first + last / np.float32(gain))
    change = (last / np.float32(gain) - first) * usable
    noise = 1.4826 * float(np.median(np.abs(change[::4, ::4][some])))
    across = cv2.Sobel(light, cv2.CV_32F, 1, 0, ksize=3, scale=1 / 8) * usable
    down = cv2.Sobel(light, cv2.CV_32F, 0, 1, ksize=3, scale=1 / 8) * usable
    xx, xy, yy = _tiles(across * across), _tiles(across * down), _tiles(down * down)
    tx, ty = _tiles(across * change), _tiles(down * change)
    # The strongest direction of the gradients, its strength, and the difference along it.
    angle = 0.5 * np.arctan2(2 * xy, xx - yy)
    strength = 0.5 * (xx + yy) + np.hypot(0.5 * (xx - yy), xy)
    along = np.abs(np.cos(angle) * tx + np.sin(angle) * ty)
    known = strength > max(noise / _SIGMA, 1.0) ** 2
    if not known.any():
        return None
    return float(BIN * (along[known] / strength[known]).max())


def _tiles(values: Float32) -> NDArray[np.float64]:
    """Sums over square tiles; what does not fill one is left."""
    height, width = (side // _TILE * _TILE for side in values.shape)
    if not height or not width:
        return np.asarray(values.sum(dtype=np.float64)).reshape(1, 1)
    shape = (height // _TILE, _TILE, width // _TILE, _TILE)
    cut = values[:height, :width].reshape(shape)
    return np.asarray(cut.sum(axis=(1, 3), dtype=np.float64))
