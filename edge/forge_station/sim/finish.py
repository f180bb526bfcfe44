"""The finish of a surface: a height field along its normals, as blasting or casting leave it.

The simulator's meshes are smooth. `rough` moves scanned points along the normal of the face that
each lies on, by a band of waves that is fixed in space, so that every pose sees the same surface.
Not modelled: the shadows and highlights of the bumps themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_WAVES = 48
_BAND = (0.7, 1.4)
"""Wave numbers, of the one that belongs to the grain."""


@dataclass(frozen=True)
class Finish:
    """Roughness in camera pixels on the part. `height`: root mean square; `grain`: wave length."""

    height: float = 0.0
    grain: float = 12.0


SMOOTH = Finish()


def rough(
    points: NDArray[np.floating], normals: NDArray[np.floating], finish: Finish, pixel_mm: float,
    seed: int,
) -> NDArray[np.float64]:  # fmt: skip
    """Points [N, 3] mm, moved along their unit normals [N, 3]; the same seed is the same surface.

    `pixel_mm`: camera pixel on the part, which `finish` is measured in.
    """
    rng = np.random.default_rng(seed)
    directions = rng.normal(size=(_WAVES, 3))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    phases = rng.uniform(0.0, 2.0 * math.pi, _WAVES)
    numbers = rng.uniform(*_BAND, _WAVES) * (2.0 * math.pi / (finish.grain * pixel_mm))
    moved = np.asarray(points, np.float64)
    height = np.zeros(len(moved))
    for direction, phase, number in zip(directions, phases, numbers, strict=True):
        height += np.cos(moved @ direction * number + phase)
    height *= finish.height * pixel_mm * math.sqrt(2.0 / _WAVES)
    return moved + np.asarray(normals, np.float64) * height[:, None]
