"""Tensors of a checkpoint folder, read one at a time. It knows names and bytes, no network.

Reads safetensors itself (one file, or shards with an index), so that a 3B checkpoint costs the
memory of one tensor, bfloat16 needs no torch, and a truncated download is found before work starts.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_station.errors import InputError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
_MAX_HEADER = 100 * 2**20
_PIECE = 1 << 22


@dataclass(frozen=True)
class _Entry:
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


class Checkpoint:
    """All tensors of a folder under the names of the current transformers release."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._entries: dict[str, _Entry] = {}
        for path in _shards(folder):
            for name, entry in _read_header(path):
                self._entries[canonical(name)] = entry

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        return sorted(self._entries)

    @property
    def parameters(self) -> int:
        return sum(int(np.prod(entry.shape)) for entry in self._entries.values())

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    @property
    def identity(self) -> str:
        """Digest of names, types, shapes, and sizes and times of the files; not of the weights."""
        digest = hashlib.sha256()
        for name, entry in sorted(self._entries.items()):
            stat = entry.path.stat()
            place = (entry.path.name, stat.st_size, stat.st_mtime_ns, entry.offset)
            digest.update(repr((name, entry.dtype, entry.shape, place)).encode())
        return digest.hexdigest()

    def read(
        self, name: str, shape: tuple[int, ...] | None = None, rows: slice | None = None
    ) -> NDArray[np.float32]:
        """The tensor (or some of its first axis) as float32, converted piece by piece.

        Raises InputError when it is missing or has another shape.
        """
        entry = self._entry(name)
        if shape is not None and entry.shape != shape:
            raise InputError(
                "tensor has another shape than the config says",
                which=name,
                expected=list(shape),
                got=list(entry.shape),
                action="config.json and the weights are not of the same model",
            )
        width = int(np.prod(entry.shape[1:], dtype=np.int64))
        first, last, _ = (rows or slice(None)).indices(entry.shape[0] if entry.shape else 1)
        kind = _DTYPES[entry.dtype]
        result = np.empty((last - first) * width, np.float32)
        with entry.path.open("rb") as file:
            file.seek(entry.offset + first * width * kind.itemsize)
            for start in range(0, len(result), _PIECE):
                piece = result[start : start + _PIECE]
                raw = np.fromfile(file, kind, len(piece))
                if entry.dtype == "BF16":
                    np.left_shift(raw, 16, out=piece.view(np.uint32), dtype=np.uint32)
                else:
                    piece[:] = raw
        return result.reshape((last - first, *entry.shape[1:]) if entry.shape else ())

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise InputError(
                "checkpoint lacks a tensor",
                which=f"{self.folder}: {name}",
                got=f"{len(self._entries)} tensors, e.g. {', '.join(self.names()[:3])}",
                action="merge the adapter and save the whole model",
            )
        return self._entries[name]


def canonical(name: str) -> str:
    """Older names (`visual.`, `model.layers.`) as the current release writes them."""
    if name.startswith("visual."):
        return f"model.{name}"
    for old in ("language_model.model.", "model.language_model.model."):
        if name.startswith(old):
            return f"model.language_model.{name[len(old) :]}"
    if name.startswith("language_model.lm_head."):
        return name[len("language_model.") :]
    known = ("model.language_model.", "model.visual.", "lm_head.")
    if name.startswith("model.") and not name.startswith(known):
        return f"model.language_model.{name[len('model.') :]}"
    return name


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(weight_map.values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise InputError("shard index is malformed", which=index, got=repr(error)) from error
    else:
        names = [SINGLE]
    for name in names:
        if not (folder / name).is_file():
            raise InputError(
                "checkpoint lacks a weights file",
                which=folder / name,
                action=f"give a folder with {SINGLE}, or {INDEX} and all its shards",
            )
    return [folder / name for name in names]


def _read_header(path: Path) -> Iterator[tuple[str, _Entry]]:
    """Entries of one safetensors file, checked against its size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise InputError(
                "not a safetensors file, or truncated", which=path, got=f"{size} bytes"
            )
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise InputError("safetensors header is malformed", which=path, got=error) from error
    base = 8 + length
    for name, item in header.items():
        if name == "__metadata__":
            continue
        dtype, shape = item["dtype"], tuple(item["shape"])
        first, last = item["data_offsets"]
        if dtype not in _DTYPES:
            raise InputError(
                "tensor type is not supported",
                which=f"{path.name}: {name}",
                expected=", ".join(_DTYPES),
                got=dtype,
            )
        needed = int(np.prod(shape, dtype=np.int64)) * _DTYPES[dtype].itemsize
        if last - first != needed or base + last > size:
            raise InputError(
                "weights file is truncated",
                which=path,
                expected=f"at least {base + last} bytes (tensor {name})",
                got=f"{size} bytes",
                action="copy or download the file again",
            )
        yield name, _Entry(path, dtype, shape, base + first)
