"""What a file of a bundle may be: weights and text, nothing that runs code when it is opened.

ONNX (the operators of ONNX and of ONNX Runtime, no custom library, external data in listed files
only), NumPy arrays without objects, safetensors, JSON, YAML, Markdown. Looks at headers, not at
the numbers: milliseconds for any size. Digests are `vlm/bundle_files.py`'s.
"""

from __future__ import annotations

import json
import mmap
import struct
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from forge_station.errors import BundleError

DATA_SUFFIX = ".onnx.data"
TEXT = (".json", ".yaml", ".md")
SUFFIXES = (".onnx", DATA_SUFFIX, ".npy", ".npz", ".safetensors", *TEXT)
DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc")
"""Operator sets that ONNX Runtime itself has."""

MAX_TEXT_BYTES = 64 << 20
MAX_ARRAYS_BYTES = 4 << 30
"""Of all arrays of one npz, unpacked."""
_MAX_ARRAYS = 4096
_MAX_HEADER = 64 << 20
_MAX_DEPTH = 32
_ARRAY_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def check(path: Path, name: str, listed: Collection[str]) -> None:
    """Raise BundleError unless the file is what the end of its name says, and harmless.

    `name`: in the manifest, `listed`: all names there, which an ONNX file may take weights from.
    """
    try:
        if name.endswith(".onnx"):
            _check_onnx(path, name, listed)
        elif name.endswith(DATA_SUFFIX):
            if name.removesuffix(".data") not in listed:
                raise ValueError(f"no {name.removesuffix('.data')} that it could belong to")
        elif name.endswith(".npy"):
            with path.open("rb") as file:
                _check_array(file)
        elif name.endswith(".npz"):
            _check_arrays(path)
        elif name.endswith(".safetensors"):
            _check_safetensors(path)
        elif name.endswith(TEXT):
            _check_text(path)
        else:
            raise ValueError("a file of another kind")
    except (ValueError, EOFError, struct.error, zipfile.BadZipFile, RecursionError) as error:
        raise BundleError(
            "the bundle has a file that a station does not open",
            which=name,
            expected=f"one of {', '.join(SUFFIXES)}, and harmless",
            got=" ".join(str(error).split())[:300],
            action="export the bundle again",
        ) from error
    except OSError as error:
        raise BundleError("bundle file cannot be read", which=path, got=error.strerror) from error


def _check_text(path: Path) -> None:
    size = path.stat().st_size
    if size > MAX_TEXT_BYTES:
        raise ValueError(f"{size} bytes of text, at most {MAX_TEXT_BYTES}")
    content = path.read_bytes()
    content.decode("utf-8")
    if b"\0" in content:
        raise ValueError("zero bytes in a text")


def _check_array(file: IO[bytes]) -> int:
    """Bytes of the array whose header comes next. Never unpickles: an object array is refused."""
    version = np.lib.format.read_magic(file)
    if version not in _ARRAY_HEADERS:
        raise ValueError(f"an array file of version {version}")
    shape, _, dtype = _ARRAY_HEADERS[version](file)
    if dtype.hasobject:
        raise ValueError("an array of Python objects (a pickle)")
    return int(np.prod(shape, dtype=object)) * dtype.itemsize


def _check_arrays(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if len(members) > _MAX_ARRAYS:
            raise ValueError(f"{len(members)} arrays, at most {_MAX_ARRAYS}")
        names = [member.filename for member in members]
        if len(set(names)) != len(names):
            raise ValueError("an array is given twice")
        total = sum(member.file_size for member in members)
        if total > MAX_ARRAYS_BYTES:
            raise ValueError(f"{total} bytes unpacked, at most {MAX_ARRAYS_BYTES}")
        for member in members:
            if not member.filename.endswith(".npy"):
                raise ValueError(f"{member.filename} is no array")
            with archive.open(member) as file:
                size = _check_array(file)
            if size > member.file_size:
                raise ValueError(f"{member.filename} is truncated")


def _check_safetensors(path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(_MAX_HEADER, size - 8):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        if not isinstance(json.loads(file.read(length)), dict):
            raise ValueError("a header that is no JSON object")


# --- ONNX: protobuf's wire format, of which a station has no library -----------------------------

_MODEL_GRAPH, _MODEL_OPSETS, _MODEL_FUNCTIONS = 7, 8, 25
_OPSET_DOMAIN = 1
_FUNCTION_NODES, _FUNCTION_OPSETS, _FUNCTION_DOMAIN = 7, 9, 10
_GRAPH_NODES, _GRAPH_TENSORS, _GRAPH_SPARSE = 1, 5, 15
_NODE_ATTRIBUTES = 5
_ATTRIBUTE_TENSORS, _ATTRIBUTE_GRAPHS, _ATTRIBUTE_SPARSE = (5, 10), (6, 11), (22, 23)
_SPARSE_TENSORS = (1, 2)
_TENSOR_EXTERNAL = 13
_ENTRY_KEY, _ENTRY_VALUE = 1, 2
Span = tuple[int, int]


def _check_onnx(path: Path, name: str, listed: Collection[str]) -> None:
    if not path.stat().st_size:
        raise ValueError("an empty file")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = _Onnx(content)
        found.model((0, len(content)))
        strange = sorted(found.domains - {*DOMAINS, *found.own_domains})
        if strange or not found.graphs:
            raise ValueError(
                f"operators of {', '.join(strange)}, for which there is no library"
                if strange
                else "no ONNX graph"
            )
        folder = name.rpartition("/")[0]
        for location in sorted(found.locations):
            placed = f"{folder}/{location}" if folder else location
            if placed not in listed or not placed.endswith(DATA_SUFFIX):
                raise ValueError(f"weights in {location!r}, which the bundle does not list")


class _Onnx:
    """Collects what a model refers to outside itself."""

    def __init__(self, content: Any) -> None:
        self._content = content
        self.graphs = 0
        self.domains: set[str] = set()
        self.own_domains: set[str] = set()
        self.locations: set[str] = set()

    def model(self, span: Span) -> None:
        for number, part in self._parts(span):
            if number == _MODEL_GRAPH:
                self._graph(part, 0)
            elif number == _MODEL_OPSETS:
                self._opset(part)
            elif number == _MODEL_FUNCTIONS:
                self._function(part)

    def _opset(self, span: Span) -> None:
        texts = [self._text(part) for n, part in self._parts(span) if n == _OPSET_DOMAIN]
        self.domains.add(texts[-1] if texts else "")

    def _function(self, span: Span) -> None:
        for number, part in self._parts(span):
            if number == _FUNCTION_DOMAIN:
                self.own_domains.add(self._text(part))
            elif number == _FUNCTION_OPSETS:
                self._opset(part)
            elif number == _FUNCTION_NODES:
                self._node(part, 0)

    def _graph(self, span: Span, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise ValueError("graphs nested too deeply")
        self.graphs += 1
        for number, part in self._parts(span):
            if number == _GRAPH_NODES:
                self._node(part, depth)
            elif number == _GRAPH_TENSORS:
                self._tensor(part)
            elif number == _GRAPH_SPARSE:
                self._sparse(part)

    def _node(self, span: Span, depth: int) -> None:
        for number, part in self._parts(span):
            if number != _NODE_ATTRIBUTES:
                continue
            for kind, value in self._parts(part):
                if kind in _ATTRIBUTE_TENSORS:
                    self._tensor(value)
                elif kind in _ATTRIBUTE_GRAPHS:
                    self._graph(value, depth + 1)
                elif kind in _ATTRIBUTE_SPARSE:
                    self._sparse(value)

    def _sparse(self, span: Span) -> None:
        for number, part in self._parts(span):
            if number in _SPARSE_TENSORS:
                self._tensor(part)

    def _tensor(self, span: Span) -> None:
        for number, part in self._parts(span):
            if number == _TENSOR_EXTERNAL:
                entry = {n: self._text(value) for n, value in self._parts(part)}
                if entry.get(_ENTRY_KEY) == "location":
                    self.locations.add(entry.get(_ENTRY_VALUE, ""))

    def _text(self, span: Span) -> str:
        return bytes(self._content[span[0] : span[1]]).decode("utf-8")

    def _parts(self, span: Span) -> Iterator[tuple[int, Span]]:
        """(field number, where its bytes are) of the length-delimited fields of a message."""
        at, end = span
        while at < end:
            tag, at = self._varint(at, end)
            kind = tag & 7
            if kind == 0:
                _, at = self._varint(at, end)
                continue
            if kind in (1, 5):
                at += 8 if kind == 1 else 4
                continue
            if kind != 2:
                raise ValueError("not protobuf")
            length, at = self._varint(at, end)
            if length > end - at:
                raise ValueError("truncated")
            yield tag >> 3, (at, at + length)
            at += length
        if at != end:
            raise ValueError("truncated")

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        value = shift = 0
        while at < end and shift < 70:
            byte = self._content[at]
            value |= (byte & 127) << shift
            at += 1
            if byte < 128:
                return value, at
            shift += 7
        raise ValueError("truncated")
