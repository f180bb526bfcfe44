"""Point clouds from and to files: PLY, PCD, NPZ, XYZ text; always mm inside. Meshes: see mesh_io.

Does not know the tray: the frame is "unknown" unless the file or the caller states it. What was
assumed is in Cloud.notes.
"""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_station.capture.base import Cloud, ScanQuality
from forge_station.errors import InputError, ScanError
from forge_station.geometry import pcd, ply
from forge_station.geometry.mesh_io import TriangleMesh, read_bytes, read_mesh, unit_factor
from forge_station.geometry.plane import typical_spacing

__all__ = ["TriangleMesh", "read_cloud", "read_mesh", "write_cloud"]

FARTHEST = 1e9  # no coordinate is this large in any unit; NaN and infinity are not below it either
METRE_BELOW = 2.0  # no station has a field of view with a diagonal of 2 mm, none is 2 m wide
SUFFIXES = (".ply", ".pcd", ".npz", ".xyz", ".txt", ".csv", ".asc")


@dataclass(frozen=True, eq=False)
class _Raw:
    """points float64 [N, 3] in file units with NaN kept; intensity [N] or None.

    Grid (rows, columns) or None.
    """

    points: NDArray[np.float64]
    intensity: NDArray[Any] | None = None
    grid: tuple[int, int] | None = None
    unit: str = ""
    frame: str = ""
    camera_pixel_mm: float = 0.0
    poses: int = 1


def read_cloud(
    path: Path,
    *,
    unit: str = "auto",
    frame: str | None = None,
    camera_pixel_mm: float | None = None,
) -> Cloud:
    """Read .ply, .pcd, .npz, .xyz, .txt, .csv or .asc.

    unit: "mm", "m", "cm", "inch" or "auto": the unit stated in the file (NPZ of this station), else
    metre when the extent is under 2, else mm. frame: "tray", "camera", "unknown"; default: what the
    file states, else "unknown". camera_pixel_mm: default what the file states, else estimated from
    the point density. Points that are not finite, and (0, 0, 0) where more than 1 % are that (many
    cameras' invalid mark), are left out; a grid is kept with NaN in their place.

    Raises InputError naming file and place; ScanError (NO_DATA) where no finite point is left.
    """
    data = read_bytes(path)
    match path.suffix.lower():
        case ".ply":
            raw = _from_ply(path, data)
        case ".pcd":
            raw = _from_pcd(path, data)
        case ".npz":
            raw = _from_npz(path, data)
        case ".xyz" | ".txt" | ".csv" | ".asc":
            raw = _from_text(path, data)
        case other:
            raise InputError(
                "cloud format unknown",
                which=path,
                expected=", ".join(SUFFIXES),
                got=other or "no suffix",
            )
    points = raw.points.copy()
    finite = (np.abs(points) < FARTHEST).all(axis=1)
    zero = finite & (points == 0).all(axis=1)
    notes = []
    if zero.sum() > 0.01 * len(points):
        notes.append(f"{int(zero.sum())} points at (0, 0, 0) taken as invalid")
        finite &= ~zero
    if not finite.any():
        raise ScanError(
            "the cloud has no valid point",
            which=path,
            got=f"{len(points)} points, none finite",
            action="scan again",
        )
    if not finite.all():
        notes.append(f"{int((~finite).sum())} of {len(points)} points invalid, left out")
    points[~finite] = np.nan
    factor, note = unit_factor(
        path, points[finite], raw.unit if unit == "auto" and raw.unit else unit, METRE_BELOW
    )
    valid = (points[finite] * factor).astype(np.float32)
    organised = None
    if raw.grid is not None and min(raw.grid) > 1:
        organised = (points * factor).astype(np.float32).reshape(*raw.grid, 3)
    pixel = camera_pixel_mm or raw.camera_pixel_mm
    if not pixel:
        pixel = typical_spacing(valid)
        notes.append(f"camera pixel estimated from the point density: {pixel:.3g} mm")
    return Cloud(
        points=valid,
        intensity=None if raw.intensity is None else _grey(raw.intensity)[finite],
        camera_pixel_mm=float(pixel),
        poses=raw.poses,
        quality=ScanQuality(valid_share=float(finite.mean())),
        frame=frame or raw.frame or "unknown",
        organised=organised,
        notes=(note, *notes),
    )


def write_cloud(path: Path, cloud: Cloud) -> None:
    """Write .npz (all the station knows) or .ply (points and intensity, binary), both in mm."""
    suffix = path.suffix.lower()
    if suffix == ".npz":
        content: dict[str, Any] = {
            "points": cloud.points,
            "unit": "mm",
            "frame": cloud.frame,
            "camera_pixel_mm": cloud.camera_pixel_mm,
            "poses": cloud.poses,
        }
        if cloud.intensity is not None:
            content["intensity"] = cloud.intensity
        buffer = io.BytesIO()
        np.savez(buffer, **content)
        path.write_bytes(buffer.getvalue())
    elif suffix == ".ply":
        columns: dict[str, NDArray[Any]] = {
            axis: cloud.points[:, k] for k, axis in enumerate("xyz")
        }
        if cloud.intensity is not None:
            columns["intensity"] = cloud.intensity
        ply.write(path, columns)
    else:
        raise InputError(
            "cloud format not written",
            which=path,
            expected=".npz or .ply",
            got=suffix or "no suffix",
        )


def _from_ply(path: Path, data: bytes) -> _Raw:
    content = ply.read(path, data)
    vertex = content.scalars.get("vertex", {})
    points = _columns(path, vertex)
    grid = content.grid
    return _Raw(
        points,
        _intensity_of(vertex),
        grid if grid is not None and grid[0] * grid[1] == len(points) else None,
    )


def _from_pcd(path: Path, data: bytes) -> _Raw:
    content = pcd.read(path, data)
    points = _columns(path, content.fields)
    return _Raw(points, _intensity_of(content.fields), (content.height, content.width))


def _columns(path: Path, fields: dict[str, NDArray[Any]]) -> NDArray[np.float64]:
    if not {"x", "y", "z"} <= set(fields):
        raise InputError("no fields x, y, z", which=path, got=", ".join(fields) or "none")
    with np.errstate(invalid="ignore"):  # a signalling NaN stays a NaN
        return np.stack([fields[axis].astype(np.float64) for axis in "xyz"], axis=1)


def _intensity_of(fields: dict[str, NDArray[Any]]) -> NDArray[Any] | None:
    for name in ("intensity", "scalar_intensity", "scalar_Intensity", "gray"):
        if name in fields:
            return fields[name]
    if {"red", "green", "blue"} <= set(fields):
        return 0.299 * fields["red"] + 0.587 * fields["green"] + 0.114 * fields["blue"]
    return None


def _from_npz(path: Path, data: bytes) -> _Raw:
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            content = {name: archive[name] for name in archive.files}
    except (zipfile.BadZipFile, ValueError, OSError, EOFError) as error:
        raise InputError(
            "NPZ file is truncated or damaged",
            which=path,
            got=error,
            action="copy or export it again",
        ) from None
    key = next((k for k in ("points", "xyz", "X", "cloud") if k in content), None)
    if key is None:
        raise InputError(
            "NPZ has no array of points",
            which=path,
            expected="points",
            got=", ".join(content) or "nothing",
        )
    array = content[key]
    if (
        array.ndim not in (2, 3)
        or array.shape[-1] != 3
        or array.dtype.kind not in "fiu"
        or array.size == 0
    ):
        raise InputError(
            "NPZ points have a wrong shape",
            which=f"{path}, {key}",
            expected="numbers [N, 3] or [H, W, 3]",
            got=f"{array.dtype} {list(array.shape)}",
        )
    points = array.reshape(-1, 3).astype(np.float64)
    intensity = content.get("intensity")
    if intensity is not None:
        if intensity.size != len(points):
            raise InputError(
                "NPZ intensity does not fit the points",
                which=f"{path}, intensity",
                expected=len(points),
                got=intensity.size,
            )
        intensity = intensity.reshape(-1)
    try:
        return _Raw(
            points,
            intensity,
            (array.shape[0], array.shape[1]) if array.ndim == 3 else None,
            unit=str(content["unit"]) if "unit" in content else "",
            frame=str(content["frame"]) if "frame" in content else "",
            camera_pixel_mm=float(content["camera_pixel_mm"])
            if "camera_pixel_mm" in content
            else 0.0,
            poses=int(content["poses"]) if "poses" in content else 1,
        )
    except (TypeError, ValueError) as error:
        raise InputError("NPZ field malformed", which=path, got=error) from None


def _from_text(path: Path, data: bytes) -> _Raw:
    """Numbers separated by blanks, commas or semicolons; # and // comments.

    One header line of words is allowed.
    """
    rows: list[list[str]] = []
    width = 0
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), start=1):
        words = line.split("#")[0].split("//")[0].replace(",", " ").replace(";", " ").split()
        if not words:
            continue
        if not rows and not _is_number(words[0]):
            continue
        width = width or len(words)
        if len(words) != width or width < 3:
            raise InputError(
                "text cloud line malformed",
                which=f"{path}, line {number}",
                expected=f"{max(width, 3)} numbers",
                got=repr(line[:60]),
                action="if this is the last line, the file is truncated",
            )
        rows.append(words)
    if not rows:
        raise InputError("text cloud has no point", which=path)
    try:
        table = np.array(rows, np.float64)
    except ValueError as error:
        raise InputError(
            "text cloud holds a word that is no number", which=path, got=error
        ) from None
    return _Raw(table[:, :3], table[:, 3] if width == 4 else None)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _grey(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Any intensity scale -> uint8: 0..1 floats and 16-bit values are rescaled."""
    numbers = np.nan_to_num(np.asarray(values, np.float64))
    top = float(numbers.max(initial=0.0))
    if values.dtype.kind == "f" and top <= 1.0:
        numbers = numbers * 255
    elif top > 255:
        numbers = numbers * (255 / top)
    return np.clip(numbers, 0, 255).astype(np.uint8)
