"""PLY: ascii and binary, both byte orders, scalar and list properties.

Knows records, not clouds or meshes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_station.errors import InputError

_TYPES = {
    "char": "i1",
    "int8": "i1",
    "uchar": "u1",
    "uint8": "u1",
    "short": "i2",
    "int16": "i2",
    "ushort": "u2",
    "uint16": "u2",
    "int": "i4",
    "int32": "i4",
    "uint": "u4",
    "uint32": "u4",
    "float": "f4",
    "float32": "f4",
    "double": "f8",
    "float64": "f8",
}


@dataclass(frozen=True)
class Property:
    """dtype of a scalar, or of a list's entries with `count_dtype` set."""

    name: str
    dtype: str
    count_dtype: str | None = None


@dataclass(frozen=True)
class Element:
    name: str
    count: int
    properties: tuple[Property, ...]


@dataclass(frozen=True, eq=False)
class Ply:
    """scalars: per element and property an array [count]; lists: per element and list property one
    array per row.

    grid: (rows, columns) where the header states one (obj_info num_rows, num_cols).
    """

    scalars: dict[str, dict[str, NDArray[Any]]]
    lists: dict[str, dict[str, list[NDArray[Any]]]]
    grid: tuple[int, int] | None


def read(path: Path, data: bytes) -> Ply:
    """Parse the whole file. Raises InputError naming the element and how much of it is there."""
    form, elements, grid, start = _header(path, data)
    if form == "ascii":
        return _read_ascii(path, data[start:], elements, grid)
    return _read_binary(
        path, data, start, elements, grid, "<" if form == "binary_little_endian" else ">"
    )


def write(path: Path, columns: dict[str, NDArray[Any]]) -> None:
    """Vertices only, binary little endian; one equally long column per property."""
    names = {"f4": "float", "f8": "double", "u1": "uchar", "i4": "int"}
    count = len(next(iter(columns.values())))
    dtype = np.dtype([(name, column.dtype.newbyteorder("<")) for name, column in columns.items()])
    records = np.empty(count, dtype)
    for name, column in columns.items():
        records[name] = column
    header = ["ply", "format binary_little_endian 1.0", f"element vertex {count}"]
    header += [f"property {names[column.dtype.str[1:]]} {name}" for name, column in columns.items()]
    path.write_bytes("\n".join([*header, "end_header\n"]).encode() + records.tobytes())


def _header(path: Path, data: bytes) -> tuple[str, list[Element], tuple[int, int] | None, int]:
    end = data.find(b"end_header")
    if not data.startswith(b"ply") or end < 0 or end > 1 << 20:
        raise InputError(
            "not a PLY file, or its header is cut off", which=path, expected="ply ... end_header"
        )
    start = data.find(b"\n", end)
    if start < 0:
        start = len(data) - 1
    form, elements, grid = "", [], {}
    for number, line in enumerate(data[:end].decode("ascii", "replace").splitlines()[1:], start=2):
        words = line.split()
        try:
            match words:
                case [] | ["comment", *_]:
                    continue
                case ["obj_info", "num_rows" | "num_cols" as key, value]:
                    grid[key] = int(value)
                case ["obj_info", *_]:
                    continue
                case ["format", name, _]:
                    form = name
                case ["element", name, count]:
                    elements.append(Element(name, int(count), ()))
                case ["property", "list", count_type, dtype, name]:
                    elements[-1] = _with(
                        elements[-1], Property(name, _TYPES[dtype], _TYPES[count_type])
                    )
                case ["property", dtype, name]:
                    elements[-1] = _with(elements[-1], Property(name, _TYPES[dtype]))
                case _:
                    raise ValueError
        except (ValueError, KeyError, IndexError):
            raise InputError(
                "PLY header line not understood", which=f"{path}, line {number}", got=repr(line)
            ) from None
    if form not in ("ascii", "binary_little_endian", "binary_big_endian"):
        raise InputError(
            "PLY format unknown",
            which=path,
            expected="ascii or binary_*_endian",
            got=form or "none",
        )
    for element in elements:
        names = [p.name for p in element.properties]
        if len(set(names)) < len(names):
            raise InputError(f"PLY {element.name} has two properties of one name", which=path)
    if any(element.count < 0 for element in elements):
        raise InputError("PLY element count is negative", which=path)
    size = (grid["num_rows"], grid["num_cols"]) if len(grid) == 2 else None
    return form, elements, size, start + 1


def _with(element: Element, added: Property) -> Element:
    return Element(element.name, element.count, (*element.properties, added))


def _read_binary(
    path: Path,
    data: bytes,
    start: int,
    elements: list[Element],
    grid: tuple[int, int] | None,
    order: str,
) -> Ply:
    scalars: dict[str, dict[str, NDArray[Any]]] = {}
    lists: dict[str, dict[str, list[NDArray[Any]]]] = {}
    for element in elements:
        if all(p.count_dtype is None for p in element.properties):
            dtype = np.dtype([(p.name, order + p.dtype) for p in element.properties])
            have = (len(data) - start) // dtype.itemsize if dtype.itemsize else element.count
            if have < element.count:
                raise _truncated(path, element, have)
            records = np.frombuffer(data, dtype, element.count, start)
            scalars[element.name] = {p.name: records[p.name] for p in element.properties}
            start += element.count * dtype.itemsize
        else:
            scalars[element.name], lists[element.name], start = _binary_rows(
                path, data, start, element, order
            )
    return Ply(scalars, lists, grid)


def _binary_rows(
    path: Path, data: bytes, start: int, element: Element, order: str
) -> tuple[dict[str, NDArray[Any]], dict[str, list[NDArray[Any]]], int]:
    values: dict[str, list[Any]] = {p.name: [] for p in element.properties}
    for row in range(element.count):
        for p in element.properties:
            count = 1
            if p.count_dtype is not None:
                head = np.dtype(order + p.count_dtype)
                if start + head.itemsize > len(data):
                    raise _truncated(path, element, row)
                count = int(np.frombuffer(data, head, 1, start)[0])
                start += head.itemsize
            body = np.dtype(order + p.dtype)
            if count < 0 or start + count * body.itemsize > len(data):
                raise _truncated(path, element, row)
            entries = np.frombuffer(data, body, count, start)
            values[p.name].append(entries if p.count_dtype is not None else entries[0])
            start += count * body.itemsize
    return _split(element, values, start)


def _read_ascii(
    path: Path, body: bytes, elements: list[Element], grid: tuple[int, int] | None
) -> Ply:
    lines = [line for line in body.decode("ascii", "replace").splitlines() if line.strip()]
    scalars: dict[str, dict[str, NDArray[Any]]] = {}
    lists: dict[str, dict[str, list[NDArray[Any]]]] = {}
    first = 0
    for element in elements:
        rows = lines[first : first + element.count]
        first += element.count
        if len(rows) < element.count:
            raise _truncated(path, element, len(rows))
        if all(p.count_dtype is None for p in element.properties):
            scalars[element.name] = _ascii_table(path, element, rows)
            continue
        values: dict[str, list[Any]] = {p.name: [] for p in element.properties}
        for number, row in enumerate(rows):
            words = row.split()
            try:
                for p in element.properties:
                    count = int(words.pop(0)) if p.count_dtype is not None else 1
                    entries = np.array(words[:count], np.float64).astype(p.dtype)
                    if len(entries) != count:
                        raise ValueError
                    del words[:count]
                    values[p.name].append(entries if p.count_dtype is not None else entries[0])
            except (ValueError, IndexError):
                raise InputError(
                    f"PLY {element.name} {number} malformed", which=path, got=repr(row[:60])
                ) from None
        scalars[element.name], lists[element.name], _ = _split(element, values, 0)
    return Ply(scalars, lists, grid)


def _ascii_table(path: Path, element: Element, rows: list[str]) -> dict[str, NDArray[Any]]:
    width = len(element.properties)
    words = " ".join(rows).split()
    if len(words) != width * len(rows):
        bad = next((k for k, row in enumerate(rows) if len(row.split()) != width), 0)
        raise InputError(
            f"PLY {element.name} {bad} malformed",
            which=path,
            expected=f"{width} numbers",
            got=repr(rows[bad][:60]),
        )
    try:
        table = np.array(words, np.float64).reshape(-1, width)
    except ValueError as error:
        raise InputError(
            f"PLY {element.name} holds a word that is no number", which=path, got=error
        ) from None
    return {p.name: table[:, k].astype(p.dtype) for k, p in enumerate(element.properties)}


def _split(
    element: Element, values: dict[str, list[Any]], start: int
) -> tuple[dict[str, NDArray[Any]], dict[str, list[NDArray[Any]]], int]:
    scalars = {
        p.name: np.array(values[p.name]) for p in element.properties if p.count_dtype is None
    }
    return (
        scalars,
        {p.name: values[p.name] for p in element.properties if p.count_dtype is not None},
        start,
    )


def _truncated(path: Path, element: Element, have: int) -> InputError:
    return InputError(
        "PLY file is truncated",
        which=f"{path}, element {element.name}",
        expected=f"{element.count} rows",
        got=have,
        action="copy or export it again",
    )
