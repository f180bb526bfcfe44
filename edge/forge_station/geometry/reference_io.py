"""References on disk: one NPZ with every rest pose of every part (`references.npz` of a bundle).

Per pose `PART/N.depth` int16 [5, SIDE, SIDE], 64ths of a pixel towards the viewer with -32768 where
empty, and `PART/N.scale` float64 [2]: mm a pixel and the middle's height in mm. The same references
give the same bytes.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forge_station.errors import InputError
from forge_station.geometry.reference import SIDE, TURNS, Reference, RestView

FILE = "references.npz"
_STEP, _EMPTY = 64.0, -32768
_MAX_BYTES = 512 << 20


def save(path: Path, references: Mapping[str, Reference]) -> None:
    """Write all references; the file appears by rename."""
    partial = path.with_suffix(".partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        for part, reference in sorted(references.items()):
            for number, pose in enumerate(reference.poses):
                pixels = np.clip(pose.depth / pose.mm_per_px * _STEP, -32767, 32767)
                depth = np.where(np.isfinite(pixels), np.rint(pixels), _EMPTY).astype(np.int16)
                _write(archive, f"{part}/{number}.depth.npy", depth)
                scale = np.array([pose.mm_per_px, pose.middle_mm])
                _write(archive, f"{part}/{number}.scale.npy", scale)
    partial.replace(path)


def _write(archive: zipfile.ZipFile, name: str, array: NDArray[np.generic]) -> None:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=False)
    member = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
    archive.writestr(member, buffer.getvalue(), zipfile.ZIP_DEFLATED)


def load(path: Path) -> dict[str, Reference]:
    """Part id -> reference. InputError for a file that `save` did not write."""
    poses: dict[str, dict[int, RestView]] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(item.file_size for item in archive.infolist()) > _MAX_BYTES:
                raise ValueError(f"unpacks to more than {_MAX_BYTES >> 20} MB")
        with np.load(path, allow_pickle=False) as stored:
            for name in stored.files:
                key, dot, kind = name.rpartition(".")
                part, slash, number = key.rpartition("/")
                if not (dot and slash and number.isdigit() and kind in ("depth", "scale")):
                    raise ValueError(f"unknown entry {name}")
                if kind == "depth":
                    scale = stored[f"{key}.scale"]
                    poses.setdefault(part, {})[int(number)] = _pose(name, stored[name], scale)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise InputError(
            "references cannot be read",
            which=path,
            expected="a file written by python -m training.references",
            got=error,
        ) from error
    return {
        part: Reference(tuple(own[number] for number in sorted(own))) for part, own in poses.items()
    }


def _pose(name: str, stored: NDArray[np.int16], scale: NDArray[np.float64]) -> RestView:
    shape = (TURNS + 1, SIDE, SIDE)
    if stored.dtype != np.int16 or stored.shape != shape:
        raise ValueError(f"{name}: expected int16 {shape}, got {stored.dtype} {stored.shape}")
    if scale.shape != (2,) or not np.isfinite(scale).all() or scale[0] <= 0:
        raise ValueError(f"{name}: expected mm a pixel > 0 and a height, got {scale}")
    depth = stored.astype(np.float32) * np.float32(scale[0] / _STEP)
    depth[stored == _EMPTY] = np.nan
    return RestView(depth, float(scale[0]), float(scale[1]))
