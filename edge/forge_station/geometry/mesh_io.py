"""Triangle meshes from OBJ, STL and PLY files, in mm. Knows no parts.

Polygons are cut into fans.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forge_station.errors import InputError
from forge_station.geometry import ply

METRE_BELOW = 1.0  # a part whose bounding box diagonal is smaller than this cannot be in mm


@dataclass(frozen=True, eq=False)
class TriangleMesh:
    """vertices float64 [V, 3] mm, faces int32 [F, 3]. notes: which unit was assumed and why."""

    vertices: NDArray[np.float64]
    faces: NDArray[np.int32]
    notes: tuple[str, ...] = ()


def read_mesh(path: Path, unit: str = "auto") -> TriangleMesh:
    """Read .obj, .stl (ascii or binary) or .ply.

    unit: "mm", "m", "inch" or "auto" (metre when the bounding box diagonal is under 1, else mm;
    said in `notes`). Raises InputError naming file and place.
    """
    data = read_bytes(path)
    match path.suffix.lower():
        case ".obj":
            vertices, faces = _obj(path, data)
        case ".stl":
            vertices, faces = _stl(path, data)
        case ".ply":
            vertices, faces = _ply(path, data)
        case other:
            raise InputError(
                "mesh format unknown",
                which=path,
                expected=".obj, .stl or .ply",
                got=other or "no suffix",
            )
    if len(faces) == 0:
        raise InputError("mesh has no faces", which=path)
    if not (np.abs(vertices) < 1e9).all():
        raise InputError("mesh has a vertex that is not finite, or absurdly far away", which=path)
    if faces.min() < 0 or faces.max() >= len(vertices):
        raise InputError(
            "face names a vertex that does not exist",
            which=path,
            expected=f"0..{len(vertices) - 1}",
            got=f"{faces.min()}..{faces.max()}",
        )
    factor, note = unit_factor(path, vertices, unit, METRE_BELOW)
    return TriangleMesh(vertices * factor, faces.astype(np.int32), (note,))


def unit_factor(
    path: Path, points: NDArray[np.float64], unit: str, metre_below: float
) -> tuple[float, str]:
    """(mm per file unit, what was assumed).

    `auto` judges the diagonal of the 1-99 % box, so a few far points do not matter.
    """
    factors = {"mm": 1.0, "m": 1000.0, "cm": 10.0, "inch": 25.4}
    if unit in factors:
        return factors[unit], f"unit {unit} as given"
    if unit != "auto":
        raise InputError(
            "unit unknown", which=path, expected=f"auto, {', '.join(factors)}", got=unit
        )
    sample = points[:: max(1, len(points) // 20000)]
    diagonal = float(
        np.linalg.norm(np.percentile(sample, 99, axis=0) - np.percentile(sample, 1, axis=0))
    )
    if diagonal < metre_below:
        return 1000.0, f"unit not stated: taken as metre (extent {diagonal:.3g} in file units)"
    return 1.0, f"unit not stated: taken as mm (extent {diagonal:.3g})"


_MOST_VERTICES = int(np.iinfo(np.int32).max)
"""Faces are kept as int32."""


def read_bytes(path: Path) -> bytes:
    """The file's content; InputError when it is missing, unreadable or empty."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise InputError("no such file", which=path) from None
    except OSError as error:
        raise InputError("file cannot be read", which=path, got=error.strerror) from None
    if not data:
        raise InputError("file is empty", which=path)
    return data


def _obj(path: Path, data: bytes) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    vertices: list[list[float]] = []
    faces: list[tuple[int, int, int]] = []
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), start=1):
        words = line.split()
        if not words or words[0] not in ("v", "f"):
            continue
        try:
            if words[0] == "v":
                vertices.append([float(words[1]), float(words[2]), float(words[3])])
                continue
            corners = [int(word.split("/", 1)[0]) for word in words[1:]]
            if len(corners) < 3 or 0 in corners or max(map(abs, corners)) > _MOST_VERTICES:
                raise ValueError
        except (ValueError, IndexError):
            raise InputError(
                "OBJ line malformed", which=f"{path}, line {number}", got=repr(line[:60])
            ) from None
        corners = [c - 1 if c > 0 else len(vertices) + c for c in corners]
        if min(corners) < 0:
            raise InputError(
                "OBJ face names a vertex before the first", which=f"{path}, line {number}"
            )
        faces += [(corners[0], corners[k], corners[k + 1]) for k in range(1, len(corners) - 1)]
    if not data.endswith(b"\n") and faces and max(max(f) for f in faces) >= len(vertices):
        raise InputError("OBJ file is truncated", which=path)
    return np.array(vertices, np.float64).reshape(-1, 3), np.array(faces, np.int64).reshape(-1, 3)


def _stl(path: Path, data: bytes) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    if len(data) >= 84:
        count = int(np.frombuffer(data, "<u4", 1, 80)[0])
        if len(data) == 84 + 50 * count:
            record = np.dtype(
                [("normal", "<f4", 3), ("corners", "<f4", (3, 3)), ("attribute", "<u2")]
            )
            return _welded(np.frombuffer(data, record, count, 84)["corners"].reshape(-1, 3))
    text = data[:512].decode("ascii", "replace")
    if text.lstrip().startswith("solid") and (b"facet" in data or b"endsolid" in data):
        return _stl_ascii(path, data)
    if len(data) < 84:
        raise InputError(
            "STL file is truncated", which=path, expected="at least 84 bytes", got=len(data)
        )
    raise InputError(
        "STL file is truncated, or not STL",
        which=path,
        expected=f"{84 + 50 * count} bytes for {count} triangles",
        got=len(data),
        action="copy or export it again",
    )


def _stl_ascii(path: Path, data: bytes) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    if b"endsolid" not in data:
        raise InputError("STL file is truncated", which=path, expected="endsolid at the end")
    lines = data.decode("ascii", "replace").splitlines()
    corners = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if words and words[0] == "vertex":
            try:
                corners.append([float(word) for word in words[1:4]])
                if len(words) < 4:
                    raise ValueError
            except ValueError:
                raise InputError(
                    "STL vertex malformed", which=f"{path}, line {number}", got=repr(line[:60])
                ) from None
    if len(corners) % 3:
        raise InputError(
            "STL has an unfinished triangle", which=path, got=f"{len(corners)} vertices"
        )
    return _welded(np.array(corners, np.float32).reshape(-1, 3))


def _welded(corners: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Triangle corners [3F, 3] -> shared vertices and faces.

    Triangles that collapse are dropped.
    """
    vertices, index = np.unique(corners, axis=0, return_inverse=True)
    faces = index.reshape(-1, 3).astype(np.int64)
    whole = (
        (faces[:, 0] != faces[:, 1]) & (faces[:, 1] != faces[:, 2]) & (faces[:, 0] != faces[:, 2])
    )
    return vertices.astype(np.float64), faces[whole]


def _ply(path: Path, data: bytes) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    content = ply.read(path, data)
    vertex = content.scalars.get("vertex", {})
    if not {"x", "y", "z"} <= set(vertex):
        raise InputError("PLY has no vertex element with x, y, z", which=path)
    rows = next(iter(content.lists.get("face", {}).values()), [])
    faces = [(row[0], row[k], row[k + 1]) for row in rows for k in range(1, len(row) - 1)]
    vertices = np.stack([vertex[axis].astype(np.float64) for axis in "xyz"], axis=1)
    return vertices, np.array(faces, np.int64).reshape(-1, 3)
