"""Calibration of one scan head pose: camera, projector, tray, and the pattern it was made with.

Does not know how images are decoded. Lengths are mm, matrices are named target_from_source, image
sizes are (width, height). The code step and the transform direction are part of the calibration: a
file that leaves them out cannot be decoded safely (seen on a real capture: the wrong code step
leaves no usable point).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]
Float32 = NDArray[np.float32]
SCHEMA = 1
KINDS = ("gray_phase", "gray_pairs")
AXES = ("column", "both")


@dataclass(frozen=True)
class PatternSpec:
    """What the projector shows, in which order.

    gray_phase: white, black, `column_bits` Gray bits (MSB first) of the HALF-period index, `steps`
    phase-shifted cosines. gray_pairs: for each Gray bit (column bits, then row bits, MSB first) the
    pattern and its inverse, then white, black. `code_step` is the number of projector pixels per
    code (gray_pairs) or per pattern pixel (gray_phase). `white_last`: white once more at the very
    end, to see whether anything moved.
    """

    kind: str = "gray_phase"
    axis: str = "column"
    period_px: float = 16.0
    steps: int = 8
    column_bits: int = 7
    row_bits: int = 0
    code_step: int = 1
    white_last: bool = False

    @property
    def image_count(self) -> int:
        """Images per exposure."""
        again = int(self.white_last)
        if self.kind == "gray_phase":
            return 2 + self.column_bits + self.steps + again
        return 2 * (self.column_bits + self.row_bits) + 2 + again

    @property
    def white_at(self) -> int:
        """Number of the white image; black is the next one."""
        return 0 if self.kind == "gray_phase" else 2 * (self.column_bits + self.row_bits)

    @property
    def digest(self) -> str:
        """sha256 over every field."""
        return _sha256(_pattern_dict(self))

    def problems(self, where: str = "pattern") -> list[str]:
        """What is wrong with the fields, one text each; empty when usable."""
        found = []
        if self.kind not in KINDS:
            found.append(f"{where}.kind: {self.kind!r} is not one of {', '.join(KINDS)}")
        if self.axis not in AXES:
            found.append(f"{where}.axis: {self.axis!r} is not one of {', '.join(AXES)}")
        if self.code_step < 1:
            found.append(f"{where}.code_step: {self.code_step} must be at least 1")
        if not 1 <= self.column_bits <= 14:
            found.append(f"{where}.column_bits: {self.column_bits} must be 1..14")
        if self.kind == "gray_phase":
            if self.axis != "column" or self.row_bits != 0:
                found.append(f"{where}: gray_phase codes columns only (axis: column, row_bits: 0)")
            if self.steps < 3:
                found.append(f"{where}.steps: {self.steps} must be at least 3")
            if not self.period_px >= 4:
                found.append(f"{where}.period_px: {self.period_px} must be at least 4")
        elif (self.axis == "both") != (1 <= self.row_bits <= 14):
            found.append(f"{where}.row_bits: {self.row_bits} does not fit axis {self.axis!r}")
        return found


@dataclass(frozen=True, eq=False)
class Optics:
    """A camera's or projector's pinhole with OpenCV's five distortion coefficients.

    image_size (width, height) px; matrix float64 [3, 3] px; distortion float64 [5].
    """

    image_size: tuple[int, int]
    matrix: Float
    distortion: Float = field(default_factory=lambda: np.zeros(5))

    def distort(self, x: NDArray[Any], y: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Normalised undistorted coordinates -> normalised distorted, any shape, dtype kept."""
        k1, k2, p1, p2, k3 = (x.dtype.type(c) for c in self.distortion)
        two = x.dtype.type(2)
        xx, yy, xy = x * x, y * y, x * y
        r2 = xx + yy
        radial = 1 + r2 * (k1 + r2 * (k2 + r2 * k3))
        return (
            x * radial + two * p1 * xy + p2 * (r2 + two * xx),
            y * radial + p1 * (r2 + two * yy) + two * p2 * xy,
        )

    def distort_x(self, x: Float32, y: Float32) -> Float32:
        """The first coordinate of `distort`, in half its time."""
        k1, k2, p1, p2, k3 = (np.float32(c) for c in self.distortion)
        two = np.float32(2)
        xx = x * x
        r2 = y * y
        r2 += xx
        bent = r2 * k3
        bent += k2
        bent *= r2
        bent += k1
        bent *= r2
        bent += np.float32(1)
        bent *= x
        xx *= two
        xx += r2
        xx *= p2
        np.multiply(x, y, out=r2)
        r2 *= two * p1
        bent += r2
        bent += xx
        return bent

    def undistort(self, x: Float, y: Float, iterations: int = 12) -> tuple[Float, Float]:
        """Inverse of `distort` by fixed point iteration to 1e-8 (under 1e-4 px).

        NaN or huge where the lens has no inverse.
        """
        if not self.distortion.any():
            return x, y
        ux, uy = x, y
        with np.errstate(over="ignore", invalid="ignore"):
            for _ in range(iterations):
                dx, dy = self.distort(ux, uy)
                ex, ey = x - dx, y - dy
                ux, uy = ux + ex, uy + ey
                if max(float(np.abs(ex).max(initial=0)), float(np.abs(ey).max(initial=0))) < 1e-8:
                    break
        return ux, uy

    def project(self, points: Float) -> Float:
        """Points [N, 3] mm in this device's frame -> pixel coordinates [N, 2].

        Their origin is that of the matrix: see Calibration.pixel_centre.
        """
        x, y = self.distort(points[:, 0] / points[:, 2], points[:, 1] / points[:, 2])
        return np.stack(
            [self.matrix[0, 0] * x + self.matrix[0, 2], self.matrix[1, 1] * y + self.matrix[1, 2]],
            axis=1,
        )

    def _key(self) -> tuple[tuple[int, int], bytes, bytes]:
        return self.image_size, self.matrix.tobytes(), self.distortion.tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Optics) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


@dataclass(frozen=True, eq=False)
class Calibration:
    """One calibrated head pose.

    projector_from_camera, tray_from_camera: float64 [4, 4], mm. tray_from_camera None: the tray is
    not known, scans stay in the camera frame. pixel_centre: coordinate of the centre of pixel index
    0 in both matrices (0 OpenCV, 0.5 others).
    """

    name: str
    camera: Optics
    projector: Optics
    projector_from_camera: Float
    tray_from_camera: Float | None
    pattern: PatternSpec
    pixel_centre: float = 0.0
    rms_px: float = 0.0
    notes: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """sha256 of everything that changes the geometry (name, rms and notes do not)."""
        content = to_dict(self)
        for key in ("name", "rms_px", "notes", "digest"):
            content.pop(key, None)
        return _sha256(content)

    @property
    def range_mm(self) -> float | None:
        """Distance from the camera to the tray plane along the optical axis.

        None where the tray is not known.
        """
        if self.tray_from_camera is None:
            return None
        height, drop = self.tray_from_camera[2, 3], -self.tray_from_camera[2, 2]
        return float(height / drop) if drop > 1e-3 else None

    @property
    def camera_pixel_mm(self) -> float | None:
        """Size of a camera pixel at the tray, across the line of sight."""
        return None if self.range_mm is None else self.range_mm / float(self.camera.matrix[0, 0])


def to_dict(calibration: Calibration) -> dict[str, Any]:
    """Plain nested lists and numbers, ready for YAML; without the digest."""

    def optics(o: Optics) -> dict[str, Any]:
        return {
            "image_size": list(o.image_size),
            "matrix": o.matrix.tolist(),
            "distortion_k1_k2_p1_p2_k3": o.distortion.tolist(),
        }

    tray = calibration.tray_from_camera
    return {
        "schema": SCHEMA,
        "units": "mm",
        "name": calibration.name,
        "camera": optics(calibration.camera),
        "projector": optics(calibration.projector),
        "projector_from_camera": calibration.projector_from_camera.tolist(),
        "tray_from_camera": None if tray is None else tray.tolist(),
        "pattern": _pattern_dict(calibration.pattern),
        "pixel_centre": float(calibration.pixel_centre),
        "rms_px": float(calibration.rms_px),
        "notes": dict(calibration.notes),
    }


def _pattern_dict(spec: PatternSpec) -> dict[str, Any]:
    # Left out where it is off: files and digests of before know nothing of it.
    again = {"white_last": True} if spec.white_last else {}
    return {
        "kind": spec.kind,
        "axis": spec.axis,
        "period_px": float(spec.period_px),
        "steps": spec.steps,
        "column_bits": spec.column_bits,
        "row_bits": spec.row_bits,
        "code_step": spec.code_step,
        **again,
    }


def _sha256(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()
