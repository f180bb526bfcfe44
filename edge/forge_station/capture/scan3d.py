"""GenICam 3D data -> organised points: the arithmetic of SFNC's 3D Scan Control, without a device.

Coordinates come scaled (value = raw x scale + offset) in the device's unit, as all three of each
pixel (CalibratedABC_Grid), or as the depth alone (ProjectedC): then x and y come from the pinhole
of the device, along the pixel grid or along its coordinate maps A and B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_station.capture.cameras import pixels
from forge_station.errors import CameraSettingsError

Float32 = NDArray[np.float32]

GRID, PROJECTED = "CalibratedABC_Grid", "ProjectedC"
UNITS_MM = {"Millimeter": 1.0, "Inch": 25.4}


@dataclass(frozen=True)
class Axis:
    """Scan3dCoordinateScale, -Offset and, where its flag is set, -InvalidDataValue (raw)."""

    scale: float = 1.0
    offset: float = 0.0
    invalid: float | None = None


@dataclass(frozen=True)
class Pinhole:
    """Scan3dFocalLength (px), -AspectRatio, -PrincipalPointU and V (px)."""

    focal: float
    aspect: float
    u: float
    v: float


@dataclass(frozen=True)
class Geometry:
    """What turns one device's numbers into mm. axes: A, B and C."""

    mode: str
    axes: tuple[Axis, Axis, Axis]
    unit_mm: float = 1.0
    pinhole: Pinhole | None = None


def values(data: pixels.Bytes, pixel_format: str, width: int, height: int, padding: int) -> Float32:
    """Raw values of one part, float32 [H, W], or [H, W, 3] where it has three coordinates.

    Raises CameraSettingsError for a format that has none.
    """
    if not pixel_format.startswith(("Coord3D_", "Confidence", "Mono")):
        raise CameraSettingsError(
            "pixel format that has no 3D values",
            which=pixel_format,
            expected="Coord3D_*, Confidence* or Mono*",
        )
    if pixel_format.startswith("Mono"):
        return pixels.image(data, pixel_format, width, height, padding).astype(np.float32)
    planes = 3 if pixel_format.endswith("_Planar") else 1
    row = pixels.row_bytes(pixel_format, width) // planes
    flat = pixels.unpadded(data, row, height * planes, padding)
    kind: Any = "<f4" if "32f" in pixel_format else "<u2" if "16" in pixel_format else np.uint8
    numbers: Float32 = flat.view(kind).astype(np.float32, copy=False)
    if planes == 3:
        return np.ascontiguousarray(numbers.reshape(3, height, width).transpose(1, 2, 0))
    if "_ABC" in pixel_format:
        numbers = numbers.reshape(height, width, 3)
    else:
        numbers = numbers.reshape(height, width)
    return numbers


def grid_points(raw: Float32, geometry: Geometry) -> Float32:
    """All three raw coordinates [H, W, 3] -> points [H, W, 3] mm, NaN where invalid.

    Invalid is what carries an axis' invalid value; where no axis has one, what is not finite or
    lies exactly in the device's origin.
    """
    marked = [axis.invalid is not None for axis in geometry.axes]
    invalid = ~np.isfinite(raw).all(axis=2)
    for k, axis in enumerate(geometry.axes):
        if axis.invalid is not None:
            invalid |= raw[..., k] == np.float32(axis.invalid)
    if not any(marked):
        invalid |= (raw == 0).all(axis=2)
    points = np.empty(raw.shape, np.float32)
    for k, axis in enumerate(geometry.axes):
        points[..., k] = raw[..., k] * np.float32(axis.scale * geometry.unit_mm)
        points[..., k] += np.float32(axis.offset * geometry.unit_mm)
    points[invalid | ~np.isfinite(points).all(axis=2)] = np.nan
    return points


def projected_points(
    depth: Float32, geometry: Geometry, map_a: Float32 | None = None, map_b: Float32 | None = None
) -> Float32:
    """Raw depth [H, W] -> points [H, W, 3] mm, NaN where invalid or not in front of the device.

    map_a, map_b: raw coordinate maps [H, W] in pixels; None: column and row. Raises
    CameraSettingsError for a device that does not tell its pinhole.
    """
    pinhole = geometry.pinhole
    if pinhole is None or not pinhole.focal > 0 or not pinhole.aspect > 0:
        raise CameraSettingsError(
            "a depth map without the device's focal length",
            expected="Scan3dFocalLength above 0",
            action=f"set Scan3dOutputMode: {GRID} in the options",
        )
    a, b, c = geometry.axes
    rows, columns = np.indices(depth.shape, np.float32)
    u = (columns if map_a is None else map_a) * np.float32(a.scale) + np.float32(a.offset)
    v = (rows if map_b is None else map_b) * np.float32(b.scale) + np.float32(b.offset)
    z = depth * np.float32(c.scale * geometry.unit_mm) + np.float32(c.offset * geometry.unit_mm)
    bad = ~np.isfinite(z) | (z <= 0)
    if c.invalid is not None:
        bad |= depth == np.float32(c.invalid)
    x = (u - np.float32(pinhole.u)) * z / np.float32(pinhole.focal)
    y = (v - np.float32(pinhole.v)) * z / np.float32(pinhole.focal * pinhole.aspect)
    points = np.stack([x, y, z], axis=2).astype(np.float32, copy=False)
    points[bad | ~np.isfinite(points).all(axis=2)] = np.nan  # a hole in a map is one in all three
    return points


def confidence_of(raw: Float32, pixel_format: str) -> Float32:
    """Raw confidence -> 0..1; 0 is invalid."""
    full = {"Confidence8": 255.0, "Mono8": 255.0, "Confidence16": 65535.0, "Mono16": 65535.0}
    found: Float32 = np.clip(raw / np.float32(full.get(pixel_format, 1.0)), 0, 1)
    return found


def grey_of(image: pixels.Image, pixel_format: str) -> NDArray[np.uint8]:
    """An intensity image of any format -> uint8 [H, W]."""
    if image.ndim == 3:
        image = image.astype(np.float32).mean(axis=2).astype(image.dtype)
    if image.dtype == np.uint8:
        return image  # type: ignore[return-value]
    bits = next((b for b in (10, 12, 14) if str(b) in pixel_format), 16)
    grey: NDArray[np.uint8] = np.minimum(image >> (bits - 8), 255).astype(np.uint8)
    return grey


# A scan as one image of bytes, as a camera hands it on: W wide, 17 H high. Rows 0 to 12 H are the
# points (float32), then 4 H rows of confidence (float32), then H rows of intensity (uint8).
PACKED_ROWS = 17
PACKED = "forge_station.Scan"


def pack(points: Float32, confidence: Float32, intensity: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """-> uint8 [17 H, W]."""
    height, width = intensity.shape
    found = np.empty((PACKED_ROWS * height, width), np.uint8)
    found[: 12 * height] = np.ascontiguousarray(points, "<f4").view(np.uint8).reshape(-1, width)
    found[12 * height : 16 * height] = (
        np.ascontiguousarray(confidence, "<f4").view(np.uint8).reshape(-1, width)
    )
    found[16 * height :] = intensity
    return found


def unpack(image: NDArray[np.uint8]) -> tuple[Float32, Float32, NDArray[np.uint8]]:
    """(points [H, W, 3], confidence [H, W], intensity [H, W]) of what `pack` made."""
    height, width = image.shape[0] // PACKED_ROWS, image.shape[1]
    points = image[: 12 * height].reshape(-1).view("<f4").reshape(height, width, 3)
    confidence = image[12 * height : 16 * height].reshape(-1).view("<f4").reshape(height, width)
    return points.astype(np.float32), confidence.astype(np.float32), image[16 * height :].copy()
