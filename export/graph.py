"""A small writer of ONNX graphs whose weights go straight to an external file.

It knows operators and files, no model. Memory is one tensor: 3B graphs are written on a laptop. A
write that was killed goes on where it stopped: a journal beside the data says which tensors are in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from export.quantize import BLOCK, BlockWeight, Nearest, Quantizer, Storage, block_of

OPSET, IR_VERSION = 21, 10  # the newest that ONNX Runtime 1.23.2 (last for Python 3.10) loads
MICROSOFT = "com.microsoft"
ELEMENT = {
    np.dtype("float16"): TensorProto.FLOAT16,
    np.dtype("float32"): TensorProto.FLOAT,
    np.dtype("int64"): TensorProto.INT64,
    np.dtype("uint8"): TensorProto.UINT8,
}
HEADROOM = 64.0
"""Inputs of products that overflow in float16 are divided by it before, their outputs multiplied
after: exact, a power of two. Large checkpoints have outlier channels in the MLP."""
_INLINE_BYTES = 1024
_ALIGN = 4096

Array = NDArray[Any]
Weight = Callable[[], NDArray[np.float32]]
"""Reads a weight when it is needed: not at all where the file has it already."""


@dataclass(frozen=True)
class _Stored:
    """A tensor in the data file: bytes `offset` to `offset + length`."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    offset: int
    length: int


class GraphWriter:
    """Collects nodes; large constants are appended to `<path>.data` at once. A context manager.

    `storage` says how linear weights are kept, `quantizer` which stored values they get. `fused`
    uses ONNX Runtime's own operators; without, standard ones only, for other runtimes.
    """

    def __init__(
        self,
        path: Path,
        storage: Storage,
        quantizer: Quantizer | None = None,
        *,
        fused: bool = True,
    ) -> None:
        self.path, self.storage, self.fused = path, storage, fused
        self.quantizer = quantizer or Nearest()
        self.data_path = path.with_name(path.name + ".data")
        self._journal_path = path.with_name(path.name + ".journal")
        self._kept = {stored.name: stored for stored in self._journal()}
        end = max((stored.offset + stored.length for stored in self._kept.values()), default=0)
        self._file = self.data_path.open("r+b" if self._kept else "w+b")
        self._file.truncate(end)
        self._file.seek(end)
        self._log = self._journal_path.open("a" if self._kept else "w", encoding="utf-8")
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, TensorProto] = {}

    def __enter__(self) -> GraphWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        self._log.close()

    def _journal(self) -> list[_Stored]:
        """Tensors that an earlier run wrote whole; half a line at the end (killed) does not count.

        Data is flushed before its line is written.
        """
        if not (self._journal_path.is_file() and self.data_path.is_file()):
            return []
        found = []
        for line in self._journal_path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                item = json.loads(line)
                found.append(_Stored(**{**item, "dims": tuple(item["dims"])}))
        size = self.data_path.stat().st_size
        return [stored for stored in found if stored.offset + stored.length <= size]

    def constant(self, name: str, array: Array | np.float32 | int | Sequence[int]) -> str:
        """Add an initializer; Python whole numbers become int64."""
        value = np.asarray(array, order="C")
        if value.nbytes < _INLINE_BYTES:
            tensor = TensorProto(name=name, data_type=ELEMENT[value.dtype], dims=value.shape)
            tensor.raw_data = value.tobytes()
            self._constants[name] = tensor
        elif name in self._kept:
            self._refer(self._kept[name])
        else:
            self._append(name, value)
        return name

    def _append(self, name: str, value: Array) -> None:
        self._file.write(b"\0" * (-self._file.tell() % _ALIGN))
        offset = self._file.tell()
        value.tofile(self._file)
        self._file.flush()
        stored = _Stored(name, value.dtype.str, value.shape, offset, value.nbytes)
        self._log.write(json.dumps(asdict(stored)) + "\n")
        self._log.flush()
        self._refer(stored)

    def _refer(self, stored: _Stored) -> None:
        kind = ELEMENT[np.dtype(stored.dtype)]
        tensor = TensorProto(name=stored.name, data_type=kind, dims=stored.dims)
        tensor.data_location = TensorProto.EXTERNAL
        place = {"location": self.data_path.name, "offset": stored.offset, "length": stored.length}
        for key, item in place.items():
            tensor.external_data.add(key=key, value=str(item))
        self._constants[stored.name] = tensor

    def _stored(self, name: str) -> Array:
        """A tensor that is in the file already."""
        stored = self._kept[name]
        count = int(np.prod(stored.dims))
        array = np.fromfile(self.data_path, np.dtype(stored.dtype), count, offset=stored.offset)
        return array.reshape(stored.dims)

    def op(
        self,
        kind: str,
        inputs: Sequence[str],
        outputs: Sequence[str] = (),
        domain: str = "",
        **attributes: Any,
    ) -> str:
        """Add a node; returns the name of its first output (made up when `outputs` is empty)."""
        names = list(outputs) or [f"{kind}_{len(self._nodes)}"]
        unique = f"{kind}_{len(self._nodes)}"
        node = helper.make_node(kind, inputs, names, name=unique, domain=domain, **attributes)
        self._nodes.append(node)
        return names[0]

    def linear(
        self,
        source: str,
        name: str,
        shape: tuple[int, int],
        weight: Weight,
        bias: NDArray[np.float32] | None = None,
        *,
        exact: bool = False,
        outliers: bool = False,
    ) -> str:
        """source [R, K] times weight [N, K] = `shape` transposed, plus bias [N].

        Stored as the writer's `storage` says, or in float32 when `exact`. What goes in and out is
        float32; `outliers` marks products that need `HEADROOM` in float16.
        """
        bits = 0 if exact else self.storage.bits
        if bits in (0, 8) and (not bits or self.storage.unpacked):
            if bits:
                table = self._unpacked(name, shape, weight, bias)
            else:
                table = self._table(f"{name}.weight", lambda: weight().T)
            if bias is None:
                return self.op("MatMul", [source, table])
            return self.op("Gemm", [source, table, self.constant(f"{name}.bias", bias)])
        half = bits == 16 or self.storage.half
        scale = half and outliers
        if scale:
            down = self.constant("headroom_down", np.float32(1 / HEADROOM))
            source = self.op("Mul", [source, down])
        if half:
            source = self.op("Cast", [source], to=TensorProto.FLOAT16)
        if bits == 16:
            table = self._table(f"{name}.weight", lambda: weight().T.astype(np.float16))
            result = self.op("MatMul", [source, table])
        else:
            result = self._packed(source, name, shape, weight, bias)
        if half:
            result = self.op("Cast", [result], to=TensorProto.FLOAT)
        if scale:
            result = self.op("Mul", [result, self.constant("headroom_up", np.float32(HEADROOM))])
        if bias is None:
            return result
        return self.op("Add", [result, self.constant(f"{name}.bias", bias)])

    def _table(self, name: str, make: Callable[[], Array]) -> str:
        if name in self._kept:
            self._refer(self._kept[name])
            return name
        return self.constant(name, make())

    def _packed(
        self,
        source: str,
        name: str,
        shape: tuple[int, int],
        weight: Weight,
        bias: NDArray[np.float32] | None,
    ) -> str:
        rows, columns = shape
        blocks = self._blocks(name, shape, weight, bias, BLOCK)
        scales = blocks.scales.reshape(-1)
        scales = scales.astype(np.float16) if self.storage.half else scales
        return self.op(
            "MatMulNBits",
            [
                source,
                self.constant(f"{name}.values", blocks.values),
                self.constant(f"{name}.scales", scales),
            ],
            domain=MICROSOFT,
            K=columns,
            N=rows,
            bits=self.storage.bits,
            block_size=BLOCK,
            # Products in int8 (CPU only): as accurate as float32 here, and faster.
            accuracy_level=0 if self.storage.half else 4,
        )

    def _blocks(
        self,
        name: str,
        shape: tuple[int, int],
        weight: Weight,
        bias: NDArray[np.float32] | None,
        block: int,
    ) -> BlockWeight:
        """From the quantizer, or from the file where an earlier run wrote both parts."""
        values, scales = f"{name}.values", f"{name}.scales"
        if values in self._kept and scales in self._kept:
            count = -(-shape[1] // block)
            stored = self._stored(values)
            own = self._stored(scales).astype(np.float32)
            if self.storage.unpacked:
                stored = stored.reshape(-1, shape[0]).T
                own = own.reshape(-1, shape[0]).T
            blocks = BlockWeight(
                np.ascontiguousarray(stored.reshape(shape[0], count, -1)),
                np.ascontiguousarray(own.reshape(shape[0], count)),
                self.storage.bits,
                shape[1],
            )
            self.quantizer.kept(name, blocks, bias)
            return blocks
        # Where scales are missing (killed in between, or inline) the same values come out again.
        return self.quantizer(name, weight(), bias, self.storage.bits, block)

    def _unpacked(
        self,
        name: str,
        shape: tuple[int, int],
        weight: Weight,
        bias: NDArray[np.float32] | None,
    ) -> str:
        """int8 blocks on disk; ONNX Runtime folds this arithmetic into float32 when it loads."""
        rows, columns = shape
        blocks = self._blocks(name, shape, weight, bias, block_of(columns))
        count = blocks.scales.shape[1]
        values = blocks.values.reshape(rows, columns).T.reshape(count, -1, rows)
        stored = self.constant(f"{name}.values", values)
        scales = self.constant(f"{name}.scales", blocks.scales.T.reshape(count, 1, rows))
        centre = self.constant("centre", np.float32(1 << (self.storage.bits - 1)))
        real = self.op("Sub", [self.op("Cast", [stored], to=TensorProto.FLOAT), centre])
        reshaped = self.constant(f"{name}.shape", [columns, rows])
        return self.op("Reshape", [self.op("Mul", [real, scales]), reshaped])

    def norm(self, x: str, weight: str, epsilon: float, outputs: Sequence[str] = ()) -> str:
        """x over its root mean square along the last axis, times `weight` [width]."""
        if self.fused:
            kind = "SimplifiedLayerNormalization"
            return self.op(kind, [x, weight], outputs, axis=-1, epsilon=epsilon)
        last = self.constant("axis_last", [-1])
        square = self.op("ReduceMean", [self.op("Mul", [x, x]), last], keepdims=1)
        small = self.constant(f"epsilon_{epsilon:g}", np.float32(epsilon))
        root = self.op("Sqrt", [self.op("Add", [square, small])])
        return self.op("Mul", [self.op("Div", [x, root]), weight], outputs)

    def skip_norm(self, stream: str, added: str, weight: str, epsilon: float) -> tuple[str, str]:
        """(normalised, new residual stream) of stream + added."""
        outputs = [f"{weight}.out", "", "", f"{weight}.stream"]
        if self.fused:
            kind = "SkipSimplifiedLayerNormalization"
            inputs = [stream, added, weight]
            self.op(kind, inputs, outputs, domain=MICROSOFT, epsilon=epsilon)
        else:
            self.op("Add", [stream, added], [outputs[3]])
            self.norm(outputs[3], weight, epsilon, [outputs[0]])
        return outputs[0], outputs[3]

    def rotary(self, x: str, rows: str, cos: str, sin: str, heads: int, size: int) -> str:
        """x [B, S, heads * size] with each head's halves turned by the angles of row `rows` [B, S]
        of `cos` and `sin` [rows, size / 2]."""
        if self.fused:
            inputs = [x, rows, cos, sin]
            return self.op("RotaryEmbedding", inputs, domain=MICROSOFT, num_heads=heads)
        axis = self.constant("axis_heads", [2])
        near, far = (
            self.op("Unsqueeze", [self.op("Gather", [table, rows], axis=0), axis])
            for table in (cos, sin)
        )
        split = self.constant(f"rotary_heads_{heads}_{size}", [0, 0, heads, size])
        names = [f"{x}.left", f"{x}.right"]
        self.op("Split", [self.op("Reshape", [x, split])], names, axis=-1, num_outputs=2)
        left, right = names
        turned = [
            self.op("Sub", [self.op("Mul", [left, near]), self.op("Mul", [right, far])]),
            self.op("Add", [self.op("Mul", [right, near]), self.op("Mul", [left, far])]),
        ]
        back = self.constant(f"rotary_flat_{heads * size}", [0, 0, heads * size])
        return self.op("Reshape", [self.op("Concat", turned, axis=-1), back])

    def silu(self, x: str) -> str:
        """x * sigmoid(x)."""
        if self.fused:
            return self.op("QuickGelu", [x], domain=MICROSOFT, alpha=1.0)
        return self.op("Mul", [x, self.op("Sigmoid", [x])])

    def save(
        self,
        name: str,
        inputs: Sequence[onnx.ValueInfoProto],
        outputs: Sequence[onnx.ValueInfoProto],
    ) -> None:
        """Write the graph file beside its data; the journal goes."""
        self._file.flush()
        graph = helper.make_graph(
            self._nodes, name, inputs, outputs, list(self._constants.values())
        )
        own = [helper.make_opsetid(MICROSOFT, 1)]
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET), *(own if self._uses_own() else [])],
            ir_version=IR_VERSION,
            producer_name="forge-station",
        )
        onnx.save(model, self.path)
        self._log.close()
        self._journal_path.unlink()

    def _uses_own(self) -> bool:
        """Whether any operator is ONNX Runtime's own."""
        return self.fused or any(node.domain for node in self._nodes)
