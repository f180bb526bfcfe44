"""A photo -> the picture that a model trained on photos is given.

Knows pixels only. Training draws its pictures with the same functions.
"""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station.contract.manifest import PhotoInput
from forge_station.geometry.sheet import Sheet
from forge_station.geometry.view_images import decode_image

ByteImage = NDArray[np.uint8]
# Neighbourhood of the local contrast and of the fine detail, as shares of the picture's height.
_WIDE, _NARROW = 1 / 12, 1 / 30
_NOISE_GREY = 6.0


def read_photo(path: Path) -> ByteImage:
    """RGB uint8 [H, W, 3] of an 8-bit image file. Raises InputError naming the file."""
    image = decode_image(path)
    if image.ndim == 2:
        return cv2.cvtColor(image, cv2.COLOR_GRAY2RGB).astype(np.uint8)
    code = cv2.COLOR_BGRA2RGB if image.shape[2] == 4 else cv2.COLOR_BGR2RGB
    return cv2.cvtColor(image, code).astype(np.uint8)


def photo_picture(photo: ByteImage, wanted: PhotoInput) -> Sheet:
    """The whole photo uint8 [H, W, 3] RGB, stretched to the size that the model takes.

    Its 16 x 16 grid lies over the photo whatever its aspect. There are no millimetres on it.
    """
    small = resized(photo, (wanted.height, wanted.width))
    return Sheet(with_channels(small, wanted), 1.0)


def resized(photo: ByteImage, size: tuple[int, int]) -> ByteImage:
    """[H, W, 3] stretched to `size` (height, width): averaged down, interpolated up."""
    shrinks = photo.shape[0] > size[0] or photo.shape[1] > size[1]
    method = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(photo, size[::-1], interpolation=method), np.uint8)


def with_channels(rgb: ByteImage, wanted: PhotoInput) -> ByteImage:
    """The channels that the model takes, uint8 [H, W, 3], from a picture of the right size."""
    if wanted.channels == "rgb":
        return rgb
    grey = cv2.cvtColor(rgb, cv2.COLOR_RGB2GRAY)
    if wanted.channels == "where":
        down, right = np.meshgrid(_ramp(grey.shape[0]), _ramp(grey.shape[1]), indexing="ij")
        return np.stack([grey, right, down], -1).astype(np.uint8)
    values = grey.astype(np.float32)
    wide = max(1.0, wanted.height * _WIDE)
    around = cv2.GaussianBlur(values, (0, 0), wide)
    spread = cv2.GaussianBlur((values - around) ** 2, (0, 0), wide)
    contrast = 128 + 40 * (values - around) / (np.sqrt(spread) + _NOISE_GREY)
    side = max(3, round(wanted.height * _NARROW) | 1)
    kernel = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (side, side))
    dark = cv2.morphologyEx(grey, cv2.MORPH_BLACKHAT, kernel).astype(np.float32)
    detail = 3 * dark
    channels = np.stack([values, contrast, detail], -1)
    return np.asarray(np.clip(channels, 0, 255), np.uint8)


def _ramp(length: int) -> NDArray[np.uint8]:
    """0 to 255 over `length` pixels."""
    return np.asarray(np.linspace(0, 255, length), np.uint8)
