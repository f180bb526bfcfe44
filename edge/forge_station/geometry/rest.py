"""A bare part cloud stood on a tray that is not there: smallest extent up, wider side down.

It does not know gravity: a bolt comes to lie level, not tilted onto head and tip as on a tray
(a few degrees). For mesh samples and evaluation clouds; scans have their tray.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forge_station.geometry import plane
from forge_station.geometry.pose import Points, ends

Matrix = NDArray[np.float64]

_SAMPLE = 3000
_DIRECTIONS = 500
# Share of points a side that a width ignores.
_SHARE = 0.003


def rested(points: Points, spacing_mm: float) -> NDArray[np.float32]:
    """Turn points [N, 3] so that their smallest robust extent is up and stand them on z = 0."""
    xyz = np.asarray(points, np.float64)
    xyz = xyz - np.median(xyz, axis=0)
    some = np.asarray(plane.spread(xyz, _SAMPLE), np.float64)
    principal = np.linalg.eigh(np.cov(some.T))[1].T
    directions = np.concatenate([principal, _hemisphere(_DIRECTIONS)])
    up = directions[int(np.argmin(_widths(some, directions)))]
    half = _hemisphere(20)
    ball = np.concatenate([half, -half])
    for reach in (0.06, 0.02, 0.006):
        near = up + reach * ball
        near = np.concatenate([up[None], near / np.linalg.norm(near, axis=1)[:, None]])
        up = near[int(np.argmin(_widths(some, near)))]
    up = up * (1.0 if up[int(np.argmax(np.abs(up)))] > 0 else -1.0)
    turned = plane.moved(xyz, plane.frame(up, np.zeros(3))).astype(np.float64)
    low, high = ends(turned[:, 2], spacing_mm)
    if np.median(turned[:, 2]) > (low + high) / 2:
        turned[:, 1:] *= -1.0
        low, high = -high, -low
    turned[:, 2] -= low
    return turned.astype(np.float32)


def _hemisphere(count: int) -> Matrix:
    """Even directions over the upper half sphere (Fibonacci spiral), [count, 3]."""
    step = np.arange(count) + 0.5
    z = step / count
    turn = np.pi * (1.0 + 5.0**0.5) * step
    radius = np.sqrt(1.0 - z * z)
    return np.column_stack([radius * np.cos(turn), radius * np.sin(turn), z])


def _widths(points: Matrix, directions: Matrix) -> Matrix:
    along = np.sort(directions @ points.T, axis=1)
    skip = int(_SHARE * len(points))
    return np.asarray(along[:, len(points) - 1 - skip] - along[:, skip])
