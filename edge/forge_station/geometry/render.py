"""Points -> orthographic view images: shade, relief and height, without normals.

Does not know marks, parts or models. Shading comes from the view's own depth, so a cloud from any
scanner or file renders alike. Deterministic: the same points give the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station.contract.views import AXES

FloatImage = NDArray[np.float32]
ByteImage = NDArray[np.uint8]

# Grey levels of relief for one pixel of height difference. Relief brought small
# dents and cuts out of the noise on simulated scans, where shading alone lost them.
RELIEF_GAIN = 12.0
WHITE_GAIN = 120.0
# A pixel this much behind most of its neighbours (in pixels) is the far side shining through.
SEEN_THROUGH_PX = 6.0
# Window of the local mean that relief is measured against, as a share of the view side.
RELIEF_SIGMA = 0.06


@dataclass(frozen=True)
class View:
    """One rendered view. `depth` [H, W] float32, mm towards the viewer, NaN where empty."""

    depth: FloatImage
    mm_per_px: float

    @property
    def filled(self) -> NDArray[np.bool_]:
        return np.isfinite(self.depth)


def view_depth(
    points: NDArray[np.floating],
    view: str,
    mm_per_px: float,
    size: tuple[int, int],
    centre: tuple[float, float, float],
) -> View:
    """Project points [N, 3] (mm, part frame) to a depth map of `size` (height, width).

    `centre` (mm) lands in the middle of the image. A pixel holds the mean of the points within
    1.5 px of its frontmost point: the z-buffer decides what is seen, the mean removes noise.
    Where a thin cloud lets the far side shine through, those pixels are dropped; holes of a pixel
    or two inside a surface are filled; larger holes stay holes.
    """
    axes = AXES[view]
    towards = np.asarray(points, np.float32)[:, axes.towards] * np.float32(axes.sign)
    mean = view_mean(points, towards, view, mm_per_px, size, centre)
    solid = _drop_seen_through(mean, SEEN_THROUGH_PX * mm_per_px)
    return View(_fill_pinholes(_fill_pinholes(solid)), mm_per_px)


def view_mean(
    points: NDArray[np.floating],
    values: NDArray[np.floating],
    view: str,
    mm_per_px: float,
    size: tuple[int, int],
    centre: tuple[float, float, float],
) -> FloatImage:
    """Mean of a value [N] per point over the points each pixel sees; NaN where there are none."""
    axes = AXES[view]
    height, width = size
    xyz = np.asarray(points, np.float32)
    u = (xyz[:, axes.right] - np.float32(centre[axes.right])) / np.float32(mm_per_px)
    v = (np.float32(centre[axes.up]) - xyz[:, axes.up]) / np.float32(mm_per_px)
    column = np.floor(u + np.float32(width / 2)).astype(np.int32)
    row = np.floor(v + np.float32(height / 2)).astype(np.int32)
    cell = row.astype(np.intp) * width + column
    outside = (column < 0) | (column >= width) | (row < 0) | (row >= height)
    cell[outside] = height * width  # one cell more, for all that the image does not show
    depth = xyz[:, axes.towards] * np.float32(axes.sign)
    nearest = np.full(height * width + 1, -np.inf, np.float32)
    np.maximum.at(nearest, cell, depth)
    front = depth >= (nearest - np.float32(1.5 * mm_per_px))[cell]
    # Weights of 0 and 1 are quicker than copies of what they would leave.
    count = np.bincount(cell, front, height * width + 1)
    total = np.bincount(cell, np.where(front, values, np.float32(0)), height * width + 1)
    with np.errstate(invalid="ignore"):
        return (total / count)[:-1].astype(np.float32).reshape(height, width)


def _drop_seen_through(depth: FloatImage, behind_mm: float) -> FloatImage:
    """Empty the pixels that lie far behind a surface which fills most of their 5 x 5 window."""
    mask = np.isfinite(depth)
    values = np.where(mask, depth, np.float32(-1e9))
    nearest = cv2.dilate(values, np.ones((5, 5), np.uint8))
    front = mask & (values >= nearest - np.float32(behind_mm))
    fronts = _count(front)
    filled = _count(mask)
    out = depth.copy()
    out[mask & ~front & (fronts > 0.5 * filled)] = np.nan
    return out


def _fill_pinholes(depth: FloatImage) -> FloatImage:
    """Fill empty pixels of which half of the 5 x 5 window is surface: more than at any edge."""
    mask = np.isfinite(depth)
    values = np.where(mask, depth, np.float32(0))
    neighbours = _count(mask)
    fill = ~mask & (neighbours > 11.5)
    weight = cv2.GaussianBlur(mask.astype(np.float32), (5, 5), 1.0)
    total = cv2.GaussianBlur(values, (5, 5), 1.0)
    out = depth.copy()
    out[fill] = total[fill] / weight[fill]
    return out


def _count(mask: NDArray[np.bool_]) -> FloatImage:
    """How many pixels of each 5 x 5 window are set; beyond the border there are none."""
    ones = mask.astype(np.float32)
    border = cv2.BORDER_CONSTANT
    return np.asarray(cv2.boxFilter(ones, -1, (5, 5), normalize=False, borderType=border))


def _masked_blur(values: FloatImage, mask: FloatImage, sigma: float) -> FloatImage:
    weight = cv2.GaussianBlur(mask, (0, 0), sigma)
    total = cv2.GaussianBlur(values, (0, 0), sigma)
    return np.asarray(total / np.maximum(weight, np.float32(1e-4)), np.float32)


def slope(depth: FloatImage, axis: int) -> FloatImage:
    """Depth change per pixel along an axis; one-sided where a neighbour is empty, else 0."""
    ahead = np.roll(depth, -1, axis) - depth
    behind = depth - np.roll(depth, 1, axis)
    if axis == 0:
        ahead[-1], behind[0] = np.nan, np.nan
    else:
        ahead[:, -1], behind[:, 0] = np.nan, np.nan
    both = np.float32(0.5) * (ahead + behind)
    slope = np.where(np.isnan(both), np.where(np.isnan(ahead), behind, ahead), both)
    return np.nan_to_num(slope, nan=0.0).astype(np.float32)


def shade(view: View) -> ByteImage:
    """Lambert shading, light from the upper left. Surface 40..240, background 0."""
    filled = view.filled
    mask = filled.astype(np.float32)
    smooth = _masked_blur(np.where(filled, view.depth, np.float32(0)), mask, 0.7)
    depth: FloatImage = np.where(filled, smooth, np.float32(np.nan))
    depth = depth / np.float32(view.mm_per_px)
    right, down = slope(depth, 1), slope(depth, 0)
    inverse = 1.0 / np.sqrt(1.0 + right * right + down * down)
    light = 0.30 + 0.55 * inverse + 0.18 * inverse * (0.6 * down + 0.4 * right)
    grey = np.clip(light, 0.0, 1.0) * 200.0 + 40.0
    return np.where(filled, np.rint(grey), 0).astype(np.uint8)


def relief(view: View) -> ByteImage:
    """Height above the local mean surface, `RELIEF_GAIN` grey levels a pixel around 128.

    Without it dents and shallow cuts vanish in the shading. Surface 1..255, background 0.
    """
    filled = view.filled
    mask = filled.astype(np.float32)
    values: FloatImage = np.where(filled, view.depth, np.float32(0))
    values = values / np.float32(view.mm_per_px)
    local = _masked_blur(values, mask, RELIEF_SIGMA * max(view.depth.shape))
    grey = np.clip(128.0 + RELIEF_GAIN * (values - local), 1.0, 255.0)
    return np.where(filled, np.rint(grey), 0).astype(np.uint8)


def white(view: View, brightness: FloatImage) -> ByteImage:
    """Brightness [H, W] (see `view_mean`) over its local mean, `WHITE_GAIN` grey levels for 100 %.

    A closed crack has no depth; only its colour shows. Surface 1..255 around 128, background 0.
    """
    known = view.filled & np.isfinite(brightness)
    mask = known.astype(np.float32)
    values: FloatImage = np.where(known, brightness, np.float32(0))
    local = _masked_blur(values, mask, RELIEF_SIGMA * max(view.depth.shape))
    ratio = np.where(known, values / np.maximum(local, np.float32(1e-3)), 1.0)
    grey = np.clip(128.0 + WHITE_GAIN * (ratio - 1.0), 1.0, 255.0)
    return np.where(view.filled, np.rint(grey), 0).astype(np.uint8)


def height(view: View, centre_mm: float) -> ByteImage:
    """Absolute depth around the part's centre: 128 at the centre, one grey level = side / 200."""
    filled = view.filled
    side_mm = max(view.depth.shape) * view.mm_per_px
    grey = 128.0 + 200.0 * (np.where(filled, view.depth, 0) - centre_mm) / side_mm
    return np.where(filled, np.clip(np.rint(grey), 1, 255), 0).astype(np.uint8)


def channels(view: View, centre_mm: float) -> ByteImage:
    """[H, W, 3] uint8: shade, relief, height."""
    return np.stack([shade(view), relief(view), height(view, centre_mm)], -1)
