"""Calibration files: our YAML, and OpenCV FileStorage calibrations in and out.

Does not know optics beyond their shape. All problems of a file are reported in one error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import yaml

from forge_station.capture import files
from forge_station.capture.calibration import (
    SCHEMA,
    Calibration,
    Float,
    Optics,
    PatternSpec,
    to_dict,
)
from forge_station.errors import CalibrationError


def save(calibration: Calibration, path: Path) -> None:
    """Write YAML with its digest. Raises InputError when it cannot be written."""
    content = {**to_dict(calibration), "digest": calibration.digest}
    text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=100)
    files.write(path, text.encode())


def load(path: Path) -> Calibration:
    """Read the YAML written by `save`.

    Raises CalibrationError listing every problem with its YAML path, and when the digest does not
    fit the content.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CalibrationError(
            f"calibration {path}: no such file; export it or correct the path"
        ) from None
    except OSError as error:
        raise CalibrationError(f"calibration {path}: cannot be read ({error.strerror})") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise CalibrationError(
            f"calibration {path}: not plain YAML ({error}); OpenCV FileStorage files need "
            "import_opencv()"
        ) from None
    return from_dict(raw, str(path))


def from_dict(raw: Any, source: str) -> Calibration:
    """Inverse of `to_dict`, every field checked. `source` names the file in errors."""
    reader = _Reader(raw)
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
    reader.refuse_unknown()
    if (
        reader.problems
        or camera is None
        or projector is None
        or projector_from_camera is None
        or pattern is None
    ):
        raise CalibrationError(f"calibration {source}: " + "; ".join(reader.problems))
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
            f"calibration {source}: digest {digest[:12]} does not fit the content "
            f"({result.digest[:12]}); "
            "the file was edited by hand: export it again, or remove the digest line if the edit "
            "is wanted"
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

    Nodes: img_shape (rows, columns), rms, cam_int, cam_dist, proj_int, proj_dist, rotation (also
    spelt `roration`) and translation of projector-from-camera. The file holds neither the code step
    nor the pattern, so both must be given: `pattern_size` is (columns, rows) in codes, `code_step`
    the projector pixels per code it was calibrated with.
    """
    if not path.is_file():
        raise CalibrationError(f"calibration {path}: no such file")
    try:
        storage = cv2.FileStorage(str(path), cv2.FILE_STORAGE_READ)
    except (cv2.error, SystemError) as error:  # cv2 5.0 raises SystemError on malformed text
        raise CalibrationError(
            f"calibration {path}: not an OpenCV FileStorage file ({str(error).strip()})"
        ) from None
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
            values = _node(storage, spellings)
            if values is None or values.size != size or not np.isfinite(values).all():
                missing.append(f"{name} ({size} finite numbers)")
            else:
                nodes[name] = values
        if missing:
            raise CalibrationError(
                f"calibration {path}: missing or malformed node {', '.join(missing)}"
            )
        rms = storage.getNode("rms").real() if storage.getNode("rms").isReal() else 0.0
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
    if not (0 < width <= 32768 and 0 < height <= 32768):
        raise CalibrationError(
            f"calibration {path}: img_shape must be rows and columns of the camera image, got "
            f"{height} and {width}"
        )
    return Calibration(
        name=path.stem,
        camera=Optics((width, height), nodes["cam_int"].reshape(3, 3), nodes["cam_dist"].ravel()),
        projector=Optics(
            (columns * code_step, rows * code_step),
            nodes["proj_int"].reshape(3, 3),
            nodes["proj_dist"].ravel(),
        ),
        projector_from_camera=transform,
        tray_from_camera=tray_from_camera,
        pattern=spec,
        rms_px=float(rms),
        notes={"imported_from": path.name},
    )


def export_opencv(calibration: Calibration, path: Path) -> None:
    """Write the nodes that `import_opencv` reads, as .xml, .yml or .json by the suffix.

    More nodes say what such files leave out: code_step, projector_size (width, height),
    transform_direction, pattern and digest. The principal points are moved to OpenCV's convention
    (the centre of pixel 0 is 0).
    """
    if path.suffix.lower() not in (".xml", ".yml", ".yaml", ".json"):
        raise CalibrationError(
            "file of unknown kind", which=path, expected=".xml, .yml or .json", got=path.suffix
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".part-{path.name}")
    camera, projector = calibration.camera, calibration.projector
    origin = np.zeros((3, 3))
    origin[:2, 2] = calibration.pixel_centre
    transform = calibration.projector_from_camera
    storage = cv2.FileStorage(str(partial), cv2.FILE_STORAGE_WRITE)
    if not storage.isOpened():
        raise CalibrationError("cannot write", which=path)
    try:
        for name, values in (
            ("img_shape", np.array([camera.image_size[::-1]], np.int32)),
            ("projector_size", np.array([projector.image_size], np.int32)),
            ("cam_int", camera.matrix - origin),
            ("cam_dist", camera.distortion.reshape(1, 5)),
            ("proj_int", projector.matrix - origin),
            ("proj_dist", projector.distortion.reshape(1, 5)),
            ("rotation", transform[:3, :3]),
            ("translation", transform[:3, 3:]),
        ):
            storage.write(name, np.ascontiguousarray(values))
        storage.write("rms", float(calibration.rms_px))
        storage.write("code_step", calibration.pattern.code_step)
        storage.write("transform_direction", "projector_from_camera")
        storage.write("pattern", f"{calibration.pattern.kind} {calibration.pattern.axis}")
        storage.write("digest", calibration.digest)
    finally:
        storage.release()
    partial.replace(path)


def _node(storage: cv2.FileStorage, spellings: tuple[str, ...]) -> Float | None:
    """The matrix of the first spelling that the file has; None where there is none to read."""
    for spelling in spellings:
        node = storage.getNode(spelling)
        if not node.empty():
            try:
                values = node.mat()
            except (cv2.error, SystemError, MemoryError):
                return None
            return None if values is None else np.asarray(values, np.float64)
    return None


class _Reader:
    """Takes keys out of a mapping and collects every problem before raising one error."""

    def __init__(self, raw: Any) -> None:
        self.problems: list[str] = [] if isinstance(raw, dict) else ["the file is not a mapping"]
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
        if (
            not isinstance(value, kind)
            or isinstance(value, bool)
            or (isinstance(value, float) and not np.isfinite(value))
        ):
            self.problems.append(f"{where}: expected {kind.__name__}, got {value!r}")
            return None
        return value

    def _array(self, value: Any, where: str, shape: tuple[int, ...]) -> Float | None:
        try:
            array = np.asarray(value, np.float64)
        except (TypeError, ValueError):
            array = np.empty(0)
        if array.shape != shape or not np.isfinite(array).all():
            self.problems.append(
                f"{where}: expected {'x'.join(map(str, shape))} finite numbers, got {value!r}"
            )
            return None
        return array

    def optics(self, key: str) -> Optics | None:
        raw = self.take(key, dict)
        if raw is None:
            return None
        raw = dict(raw)
        size = raw.pop("image_size", None)
        good_size = (
            isinstance(size, list)
            and len(size) == 2
            and all(type(v) is int and 0 < v <= 32768 for v in size)
        )
        if not good_size:
            self.problems.append(
                f"{key}.image_size: expected [width, height] in pixels, got {size!r}"
            )
        matrix = self._array(raw.pop("matrix", None), f"{key}.matrix", (3, 3))
        distortion = self._array(
            raw.pop("distortion_k1_k2_p1_p2_k3", None), f"{key}.distortion_k1_k2_p1_p2_k3", (5,)
        )
        if matrix is not None and (
            matrix[0, 0] <= 0 or matrix[1, 1] <= 0 or matrix[2, 2] != 1 or matrix[0, 1] != 0
        ):
            self.problems.append(
                f"{key}.matrix: expected [[fx, 0, cx], [0, fy, cy], [0, 0, 1]] with positive fx, fy"
            )
        self.problems += [f"{key}.{k}: unknown key" for k in raw]
        if not good_size or matrix is None or distortion is None:
            return None
        return Optics((size[0], size[1]), matrix, distortion)

    def rigid(self, key: str, optional: bool = False) -> Float | None:
        if optional and self.left.get(key, 0) is None:
            self.left.pop(key)
            return None
        if key not in self.left:
            self.problems.append(
                f"{key}: missing (4x4, mm{'; null where not known' if optional else ''})"
            )
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
        again = raw.pop("white_last", False)
        if not isinstance(again, bool):
            self.problems.append(f"pattern.white_last: expected true or false, got {again!r}")
        self.problems += [f"pattern.{k}: unknown key" for k in raw]
        if len(values) < 7 or None in values.values():
            return None
        spec = PatternSpec(**values, white_last=again is True)
        self.problems += spec.problems()
        return spec

    def refuse_unknown(self) -> None:
        self.problems += [f"{k}: unknown key" for k in self.left]
