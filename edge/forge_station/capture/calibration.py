"""Calibration of one scan head pose: camera, projector, their relation, the tray, and the pattern they were calibrated with.

Does not know how images are decoded. Lengths are mm, matrices are named target_from_source, image sizes are (width, height).
The code step and the transform direction are part of the calibration: a file that leaves them out cannot be decoded safely
(seen on a real capture: the wrong code step leaves no usable point).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import yaml
from numpy.typing import NDArray

from forge_station.errors import CalibrationError

Float = NDArray[np.float64]
SCHEMA = 1
KINDS = ("gray_phase", "gray_pairs")
AXES = ("column", "both")


@dataclass(frozen=True)
class PatternSpec:
    """What the projector shows, in which order.

    gray_phase: white, black, `column_bits` Gray bits (MSB first) of the HALF-period index, `steps` phase-shifted cosines.
    gray_pairs: for each Gray bit (column bits, then row bits, MSB first) the pattern and its inverse, then white, black.
    `code_step` is the number of projector pixels per code (gray_pairs) or per pattern pixel (gray_phase).
    """

    kind: str = "gray_phase"
    axis: str = "column"
    period_px: float = 16.0
    steps: int = 8
    column_bits: int = 7
    row_bits: int = 0
    code_step: int = 1

    @property
    def image_count(self) -> int:
        """Images per exposure."""
        if self.kind == "gray_phase":
            return 2 + self.column_bits + self.steps
        return 2 * (self.column_bits + self.row_bits) + 2

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
    """Pinhole with OpenCV's five distortion coefficients k1 k2 p1 p2 k3, for a camera or a projector.

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

    def undistort(self, x: Float, y: Float, iterations: int = 12) -> tuple[Float, Float]:
        """Inverse of `distort` by fixed point iteration to 1e-8 (under 1e-4 px); NaN or huge where the lens has no inverse."""
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
        """Points [N, 3] mm in this device's frame -> pixel coordinates [N, 2] (principal point convention of the matrix)."""
        x, y = self.distort(points[:, 0] / points[:, 2], points[:, 1] / points[:, 2])
        return np.stack([self.matrix[0, 0] * x + self.matrix[0, 2], self.matrix[1, 1] * y + self.matrix[1, 2]], axis=1)

    def _key(self) -> tuple[tuple[int, int], bytes, bytes]:
        return self.image_size, self.matrix.tobytes(), self.distortion.tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Optics) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


@dataclass(frozen=True, eq=False)
class Calibration:
    """One calibrated head pose.

    projector_from_camera, tray_from_camera: float64 [4, 4], mm. tray_from_camera None: the tray is not known, scans stay in
    the camera frame. pixel_centre: coordinate of the centre of pixel index 0 in both matrices (0 OpenCV, 0.5 others).
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
        """Distance from the camera to the tray plane along the optical axis; None where the tray is not known."""
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


def save(calibration: Calibration, path: Path) -> None:
    """Write YAML with its digest."""
    content = {**to_dict(calibration), "digest": calibration.digest}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=100), encoding="utf-8")


def load(path: Path) -> Calibration:
    """Read the YAML written by `save`.

    Raises CalibrationError listing every problem with its YAML path, and when the digest does not fit the content.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CalibrationError(f"calibration {path}: no such file; export it or correct the path") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise CalibrationError(
            f"calibration {path}: not plain YAML ({error}); OpenCV FileStorage files need import_opencv()"
        ) from None
    return from_dict(raw, str(path))


def from_dict(raw: Any, source: str) -> Calibration:
    """Inverse of `to_dict`, every field checked. `source` names the file in errors."""
    reader = _Reader(raw, source)
    schema = reader.take("schema", int)
    if schema is not None and schema != SCHEMA:
        reader.problems.append(f"schema: expected {SCHEMA}, got {schema}")
    units = reader.take("units", str)
    if units is not None and units != "mm":
        reader.problems.append(f"units: expected mm, got {units!r}")
    name = reader.take("name", str)
    camera, projector = reader.optics("camera"), reader.optics("projector")
    projector_from_camera = reader.rigid("projector_from_camera")
    tray_from_camera = reader.rigid("tray_from_camera", optional=True)
    pattern = reader.pattern()
    pixel_centre = reader.take("pixel_centre", float)
    if pixel_centre is not None and pixel_centre not in (0.0, 0.5):
        reader.problems.append(f"pixel_centre: expected 0 or 0.5, got {pixel_centre}")
    rms_px = reader.take("rms_px", float)
    notes = reader.take("notes", dict, default={})
    digest = reader.take("digest", str, default="")
    reader.finish()
    assert camera is not None and projector is not None and projector_from_camera is not None and pattern is not None
    result = Calibration(
        name=str(name),
        camera=camera,
        projector=projector,
        projector_from_camera=projector_from_camera,
        tray_from_camera=tray_from_camera,
        pattern=pattern,
        pixel_centre=float(pixel_centre or 0.0),
        rms_px=float(rms_px or 0.0),
        notes={str(k): str(v) for k, v in (notes or {}).items()},
    )
    if digest and digest != result.digest:
        raise CalibrationError(
            f"calibration {source}: digest {digest[:12]} does not fit the content ({result.digest[:12]}); "
            "the file was edited by hand: export it again, or remove the digest line if the edit is wanted"
        )
    return result


def import_opencv(
    path: Path,
    *,
    code_step: int,
    pattern_size: tuple[int, int],
    pattern: PatternSpec | None = None,
    tray_from_camera: Float | None = None,
) -> Calibration:
    """Read a camera-projector calibration in OpenCV FileStorage form (procam-calibration dialect).

    Nodes: img_shape (rows, columns), rms, cam_int, cam_dist, proj_int, proj_dist, rotation (also spelt `roration`) and
    translation of projector-from-camera. The file holds neither the code step nor the pattern, so both must be given:
    `pattern_size` is (columns, rows) in codes, `code_step` the projector pixels per code it was calibrated with.
    """
    if not path.is_file():
        raise CalibrationError(f"calibration {path}: no such file")
    try:
        storage = cv2.FileStorage(str(path), cv2.FILE_STORAGE_READ)
    except cv2.error as error:
        raise CalibrationError(f"calibration {path}: not an OpenCV FileStorage file ({str(error).strip()})") from None
    if not storage.isOpened():
        raise CalibrationError(f"calibration {path}: not an OpenCV FileStorage file")
    try:
        nodes: dict[str, Float] = {}
        missing = []
        for name, size, spellings in (
            ("img_shape", 2, ("img_shape",)),
            ("cam_int", 9, ("cam_int",)),
            ("cam_dist", 5, ("cam_dist",)),
            ("proj_int", 9, ("proj_int",)),
            ("proj_dist", 5, ("proj_dist",)),
            ("rotation", 9, ("rotation", "roration")),
            ("translation", 3, ("translation",)),
        ):
            found = [storage.getNode(s) for s in spellings]
            values = [n.mat() for n in found if not n.empty()]
            if not values or values[0] is None or values[0].size != size or not np.isfinite(values[0]).all():
                missing.append(f"{name} ({size} finite numbers)")
            else:
                nodes[name] = np.asarray(values[0], np.float64)
        if missing:
            raise CalibrationError(f"calibration {path}: missing or malformed node {', '.join(missing)}")
        rms = storage.getNode("rms").real() if not storage.getNode("rms").empty() else 0.0
    finally:
        storage.release()
    columns, rows = pattern_size
    spec = pattern or PatternSpec(
        kind="gray_pairs",
        axis="both",
        period_px=0.0,
        steps=0,
        column_bits=int(np.ceil(np.log2(columns))),
        row_bits=int(np.ceil(np.log2(rows))),
        code_step=code_step,
    )
    transform = np.eye(4)
    transform[:3, :3] = nodes["rotation"].reshape(3, 3)
    transform[:3, 3] = nodes["translation"].ravel()
    height, width = (int(v) for v in nodes["img_shape"].ravel())
    return Calibration(
        name=path.stem,
        camera=Optics((width, height), nodes["cam_int"].reshape(3, 3), nodes["cam_dist"].ravel()),
        projector=Optics(
            (columns * code_step, rows * code_step), nodes["proj_int"].reshape(3, 3), nodes["proj_dist"].ravel()
        ),
        projector_from_camera=transform,
        tray_from_camera=tray_from_camera,
        pattern=spec,
        rms_px=float(rms),
        notes={"imported_from": path.name},
    )


class _Reader:
    """Takes keys out of a mapping and collects every problem before raising one error."""

    def __init__(self, raw: Any, source: str) -> None:
        self.source, self.problems = source, [] if isinstance(raw, dict) else ["the file is not a mapping"]
        self.left: dict[Any, Any] = dict(raw) if isinstance(raw, dict) else {}

    def take(self, key: str, kind: type, default: Any = None) -> Any:
        if key not in self.left:
            if default is None:
                self.problems.append(f"{key}: missing")
            return default
        return self._checked(self.left.pop(key), key, kind)

    def _checked(self, value: Any, where: str, kind: type) -> Any:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool) or (kind is float and not np.isfinite(value)):
            self.problems.append(f"{where}: expected {kind.__name__}, got {value!r}")
            return None
        return value

    def _array(self, value: Any, where: str, shape: tuple[int, ...]) -> Float | None:
        try:
            array = np.asarray(value, np.float64)
        except (TypeError, ValueError):
            array = np.empty(0)
        if array.shape != shape or not np.isfinite(array).all():
            self.problems.append(f"{where}: expected {'x'.join(map(str, shape))} finite numbers, got {value!r}")
            return None
        return array

    def optics(self, key: str) -> Optics | None:
        raw = self.take(key, dict)
        if raw is None:
            return None
        raw = dict(raw)
        size = raw.pop("image_size", None)
        good_size = (
            isinstance(size, list) and len(size) == 2 and all(type(v) is int and 0 < v <= 32768 for v in size)
        )
        if not good_size:
            self.problems.append(f"{key}.image_size: expected [width, height] in pixels, got {size!r}")
        matrix = self._array(raw.pop("matrix", None), f"{key}.matrix", (3, 3))
        distortion = self._array(
            raw.pop("distortion_k1_k2_p1_p2_k3", None), f"{key}.distortion_k1_k2_p1_p2_k3", (5,)
        )
        if matrix is not None and (matrix[0, 0] <= 0 or matrix[1, 1] <= 0 or matrix[2, 2] != 1 or matrix[0, 1] != 0):
            self.problems.append(f"{key}.matrix: expected [[fx, 0, cx], [0, fy, cy], [0, 0, 1]] with positive fx, fy")
        self.problems += [f"{key}.{k}: unknown key" for k in raw]
        if not good_size or matrix is None or distortion is None:
            return None
        return Optics((size[0], size[1]), matrix, distortion)

    def rigid(self, key: str, optional: bool = False) -> Float | None:
        if optional and self.left.get(key, 0) is None:
            self.left.pop(key)
            return None
        if key not in self.left:
            self.problems.append(f"{key}: missing (4x4, mm{'; null where not known' if optional else ''})")
            return None
        matrix = self._array(self.left.pop(key), key, (4, 4))
        if matrix is None:
            return None
        rotation = matrix[:3, :3]
        if np.abs(rotation @ rotation.T - np.eye(3)).max() > 1e-4 or np.linalg.det(rotation) < 0:
            self.problems.append(f"{key}: the upper left 3x3 is not a rotation (tolerance 1e-4)")
        if np.abs(matrix[3] - (0, 0, 0, 1)).max() > 0:
            self.problems.append(f"{key}: the last row must be 0 0 0 1")
        return matrix

    def pattern(self) -> PatternSpec | None:
        raw = self.take("pattern", dict)
        if raw is None:
            return None
        raw, values = dict(raw), {}
        for key, kind in (
            ("kind", str),
            ("axis", str),
            ("period_px", float),
            ("steps", int),
            ("column_bits", int),
            ("row_bits", int),
            ("code_step", int),
        ):
            if key in raw:
                values[key] = self._checked(raw.pop(key), f"pattern.{key}", kind)
            else:
                self.problems.append(f"pattern.{key}: missing")
        self.problems += [f"pattern.{k}: unknown key" for k in raw]
        if len(values) < 7 or None in values.values():
            return None
        spec = PatternSpec(**values)
        self.problems += spec.problems()
        return spec

    def finish(self) -> None:
        self.problems += [f"{k}: unknown key" for k in self.left]
        if self.problems:
            raise CalibrationError(f"calibration {self.source}: " + "; ".join(self.problems))


def _pattern_dict(spec: PatternSpec) -> dict[str, Any]:
    return {
        "kind": spec.kind,
        "axis": spec.axis,
        "period_px": float(spec.period_px),
        "steps": spec.steps,
        "column_bits": spec.column_bits,
        "row_bits": spec.row_bits,
        "code_step": spec.code_step,
    }


def _sha256(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
