"""PCD (point cloud library) 0.7: ascii, binary and binary_compressed.

Knows fields, not what they mean.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_station.errors import InputError


@dataclass(frozen=True, eq=False)
class Pcd:
    """Fields [N] each (first entry where COUNT > 1); height > 1 when organised, row by row.

    Viewpoint is left out.
    """

    fields: dict[str, NDArray[Any]]
    width: int
    height: int


def read(path: Path, data: bytes) -> Pcd:
    """Parse the whole file.

    Raises InputError naming the header line or how many points are there.
    """
    header, start = _header(path, data)
    try:
        names, sizes, types = header["FIELDS"], [int(x) for x in header["SIZE"]], header["TYPE"]
        counts = [int(x) for x in header.get("COUNT", ["1"] * len(names))]
        width, height = int(header["WIDTH"][0]), int(header["HEIGHT"][0])
        kind = header["DATA"][0]
        total = int(header.get("POINTS", [str(width * height)])[0])
        dtypes = [
            np.dtype("<" + {"F": "f", "I": "i", "U": "u"}[t] + str(s))
            for t, s in zip(types, sizes, strict=True)
        ]
        if (
            len(counts) != len(names)
            or len(dtypes) != len(names)
            or total != width * height
            or total < 0
        ):
            raise ValueError("counts disagree")
    except (KeyError, ValueError, IndexError, TypeError) as error:
        raise InputError("PCD header incomplete or inconsistent", which=path, got=error) from None
    row = np.dtype([(f"{k}", d, (c,)) for k, (d, c) in enumerate(zip(dtypes, counts, strict=True))])
    body = data[start:]
    if kind == "ascii":
        columns = _ascii(path, body, counts, total)
    elif kind == "binary":
        have = len(body) // row.itemsize
        if have < total:
            raise _truncated(path, total, have)
        records = np.frombuffer(body, row, total)
        columns = [records[f"{k}"][:, 0] for k in range(len(names))]
    elif kind == "binary_compressed":
        columns = _compressed(path, body, dtypes, counts, total)
    else:
        raise InputError(
            "PCD data kind unknown",
            which=path,
            expected="ascii, binary, binary_compressed",
            got=kind,
        )
    return Pcd(dict(zip(names, columns, strict=True)), width, height)


def _header(path: Path, data: bytes) -> tuple[dict[str, list[str]], int]:
    header: dict[str, list[str]] = {}
    start = 0
    while "DATA" not in header:
        end = data.find(b"\n", start)
        if end < 0 or end - start > 4096 or len(header) > 32:
            raise InputError(
                "not a PCD file, or its header is cut off",
                which=path,
                expected="... DATA ascii|binary",
            )
        words = data[start:end].decode("ascii", "replace").split()
        start = end + 1
        if words and not words[0].startswith("#"):
            header[words[0].upper()] = words[1:]
    return header, start


def _ascii(path: Path, body: bytes, counts: list[int], total: int) -> list[NDArray[Any]]:
    words = body.decode("ascii", "replace").split()
    width = sum(counts)
    if len(words) < total * width:
        raise _truncated(path, total, len(words) // max(width, 1))
    try:
        table = np.array(words[: total * width], np.float64).reshape(total, width)
    except ValueError as error:
        raise InputError("PCD holds a word that is no number", which=path, got=error) from None
    return [table[:, k] for k in np.cumsum([0, *counts[:-1]])]


def _compressed(
    path: Path, body: bytes, dtypes: list[np.dtype[Any]], counts: list[int], total: int
) -> list[NDArray[Any]]:
    if len(body) < 8:
        raise _truncated(path, total, 0)
    packed, unpacked = struct.unpack_from("<II", body)
    size = total * sum(d.itemsize * c for d, c in zip(dtypes, counts, strict=True))
    if unpacked != size:
        raise InputError(
            "PCD compressed size wrong", which=path, expected=f"{size} bytes", got=unpacked
        )
    if len(body) - 8 < packed:
        raise InputError(
            "PCD file is truncated",
            which=path,
            expected=f"{packed} compressed bytes",
            got=len(body) - 8,
            action="copy or export it again",
        )
    plain = _lzf(path, body[8 : 8 + packed], size)
    columns, start = [], 0
    for dtype, count in zip(dtypes, counts, strict=True):
        columns.append(
            np.frombuffer(plain, dtype, total * count, start).reshape(total, count)[:, 0]
        )
        start += total * count * dtype.itemsize
    return columns


def _lzf(path: Path, packed: bytes, size: int) -> bytes:
    """LZF: literal runs (control < 32), back references of 3 to 264 bytes within the last 8 kB."""
    out = bytearray()
    i, end = 0, len(packed)
    try:
        while i < end:
            control = packed[i]
            i += 1
            if control < 32:
                out += packed[i : i + control + 1]
                i += control + 1
                continue
            length = control >> 5
            if length == 7:
                length += packed[i]
                i += 1
            start = len(out) - ((control & 31) << 8) - packed[i] - 1
            i += 1
            length += 2
            if start < 0:
                raise IndexError
            if start + length <= len(out):
                out += out[start : start + length]
            else:
                seed = bytes(out[start:])
                out += (seed * (length // len(seed) + 1))[:length]
    except IndexError:
        out.clear()
    if len(out) != size:
        raise InputError(
            "PCD compressed data damaged", which=path, expected=f"{size} bytes", got=len(out)
        )
    return bytes(out)


def _truncated(path: Path, expected: int, have: int) -> InputError:
    return InputError(
        "PCD file is truncated",
        which=path,
        expected=f"{expected} points",
        got=have,
        action="copy or export it again",
    )
