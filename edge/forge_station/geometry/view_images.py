"""Views and photos that come as image files -> the pictures the model is given.

Knows pixels and millimetres per pixel, no clouds, models or lines. A part on an image file has no
depth: relief and height stay at their middle value, so what a model reads there is a hint only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station.contract.views import AXES, MARKS, VIEWS, Layout
from forge_station.errors import InputError
from forge_station.geometry.mesh_io import read_bytes
from forge_station.geometry.sheet import Sheet, draw_letter

ByteImage = NDArray[np.uint8]
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")
SMALLEST_PX, LARGEST_PX = 16, 8192
# A pixel is background if it differs from the border's usual grey by less than this.
_BACKGROUND_GREY = 12
_FIT_SHARE, _FIT_PX = 0.06, 3


def read_image(path: Path) -> ByteImage:
    """Grey uint8 [H, W] of an 8-bit image file. Raises InputError naming the file."""
    image = decode_image(path)
    if image.ndim == 3:
        code = cv2.COLOR_BGRA2GRAY if image.shape[2] == 4 else cv2.COLOR_BGR2GRAY
        return np.asarray(cv2.cvtColor(image, code), np.uint8)
    return image


def decode_image(path: Path) -> NDArray[np.uint8]:
    """uint8 [H, W] or [H, W, 3 or 4] in the file's order (BGR). InputError naming the file."""
    data = read_bytes(path)
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error:
        image = None
    if image is None:
        raise InputError(
            "not a readable image",
            which=path,
            expected="8-bit PNG, JPEG, BMP or TIFF",
            got=f"{len(data)} bytes",
            action="copy or export it again",
        )
    if image.dtype != np.uint8:
        raise InputError("image is not 8 bit", which=path, expected="uint8", got=image.dtype)
    height, width = image.shape[:2]
    if not SMALLEST_PX <= min(height, width) <= max(height, width) <= LARGEST_PX:
        raise InputError(
            "image of a wrong size",
            which=path,
            expected=f"{SMALLEST_PX} to {LARGEST_PX} px a side",
            got=f"{width}x{height}",
        )
    return np.asarray(image, np.uint8)


def read_views(paths: Mapping[str, Path]) -> dict[str, ByteImage]:
    """Grey views with the background set to 0. Raises InputError, also for an empty view."""
    views = {}
    for view, path in paths.items():
        image = read_image(path)
        border = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
        ground = int(np.median(border))
        part = np.abs(image.astype(np.int16) - ground) > _BACKGROUND_GREY
        if not part.any():
            raise InputError(
                "the view shows no part",
                which=path,
                expected="a part before a plain background",
                got=f"grey {ground} everywhere",
            )
        views[view] = np.where(part, np.maximum(image, 1), 0).astype(np.uint8)
    return views


def size_of(
    views: Mapping[str, ByteImage], mm_per_px: float, which: object
) -> tuple[float, float, float]:
    """(length, width, height) in mm of the part in front, side and top view.

    Raises InputError where two views disagree about an extent: they are not of one part, or not
    at one scale.
    """
    extents: dict[int, dict[str, int]] = {0: {}, 1: {}, 2: {}}
    for view, image in views.items():
        rows, columns = np.nonzero(image.any(axis=1))[0], np.nonzero(image.any(axis=0))[0]
        extents[AXES[view].up][view] = int(rows[-1] - rows[0]) + 1
        extents[AXES[view].right][view] = int(columns[-1] - columns[0]) + 1
    for axis, seen in extents.items():
        low, high = min(seen.values()), max(seen.values())
        if high - low > max(_FIT_PX, _FIT_SHARE * high):
            told = ", ".join(f"{view} {pixels} px" for view, pixels in seen.items())
            raise InputError(
                "the views do not fit each other",
                which=f"{which}, extent along {'xyz'[axis]}",
                expected="the same in both views",
                got=told,
                action="draw all views of one part at one scale",
            )
    length, width, height = (
        mm_per_px * float(np.mean(list(extents[axis].values()))) for axis in range(3)
    )
    return length, width, height


def marks_sheet(views: Mapping[str, ByteImage], mm_per_px: float, layout: Layout) -> Sheet:
    """The marks sheet of one part, mark A in column 0, from images instead of a cloud."""
    inner = (layout.cell - layout.strip - layout.margin, layout.cell - 2 * layout.margin)
    scale = _fitting(views, mm_per_px, inner)
    size = (layout.cell - layout.strip, layout.cell)
    image = np.zeros((*layout.sheet_size, 3), np.uint8)
    for row, view in enumerate(VIEWS):
        top = row * layout.cell
        if view in views:
            cell = _channels(_resampled(views[view], mm_per_px, scale, size))
            image[top + layout.strip : top + layout.cell, : layout.cell] = cell
        draw_letter(image, MARKS[0], 0, top, layout)
    return Sheet(image, scale, {MARKS[0]: 0})


def surface_picture(views: Mapping[str, ByteImage], mm_per_px: float, layout: Layout) -> Sheet:
    """The surface picture of one part from images instead of a cloud."""
    inner = round(layout.panel * (1 - 1 / 14))
    scale = _fitting(views, mm_per_px, (inner, inner))
    image = np.zeros((*layout.surface_size, 3), np.uint8)
    for index, view in enumerate(VIEWS):
        if view in views:
            panel = _resampled(views[view], mm_per_px, scale, (layout.panel, layout.panel))
            image[:, index * layout.panel : (index + 1) * layout.panel] = _channels(panel)
    return Sheet(image, scale)


def _fitting(views: Mapping[str, ByteImage], mm_per_px: float, inner: tuple[int, int]) -> float:
    """mm per pixel at which the part of every view fits into `inner` (height, width) pixels."""
    needed = [1e-4]
    for image in views.values():
        rows, columns = np.nonzero(image.any(axis=1))[0], np.nonzero(image.any(axis=0))[0]
        needed.append((rows[-1] - rows[0] + 1) * mm_per_px / inner[0])
        needed.append((columns[-1] - columns[0] + 1) * mm_per_px / inner[1])
    return float(max(needed))


def _resampled(
    image: ByteImage, mm_per_px: float, target_mm: float, size: tuple[int, int]
) -> ByteImage:
    """The part of an image, centred in `size` (height, width) at `target_mm` per pixel."""
    rows, columns = np.nonzero(image.any(axis=1))[0], np.nonzero(image.any(axis=0))[0]
    part = image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    factor = mm_per_px / target_mm
    wanted = [
        max(1, min(limit, round(n * factor))) for n, limit in zip(part.shape, size, strict=True)
    ]
    method = cv2.INTER_AREA if factor < 1 else cv2.INTER_LINEAR
    scaled = cv2.resize(part, (wanted[1], wanted[0]), interpolation=method)
    out = np.zeros(size, np.uint8)
    top, left = (size[0] - wanted[0]) // 2, (size[1] - wanted[1]) // 2
    out[top : top + wanted[0], left : left + wanted[1]] = scaled
    return out


def _channels(grey: ByteImage) -> ByteImage:
    """[H, W, 3] shade, relief, height; the last two in the middle wherever the part is."""
    middle = np.where(grey > 0, 128, 0).astype(np.uint8)
    return np.stack([grey, middle, middle], -1)
