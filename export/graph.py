"""A small writer of ONNX graphs whose weights go straight to an external file.

It knows operators and files, no model. Memory is one tensor: 3B graphs are written on a laptop.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from export.quantize import BLOCK, Storage, block_of, quantize_blocks

OPSET, IR_VERSION = 21, 10  # the newest that ONNX Runtime 1.23.2 (last for Python 3.10) loads
MICROSOFT = "com.microsoft"
ELEMENT = {
    np.dtype("float32"): TensorProto.FLOAT,
    np.dtype("int64"): TensorProto.INT64,
    np.dtype("uint8"): TensorProto.UINT8,
}
_INLINE_BYTES = 1024
_ALIGN = 4096


class GraphWriter:
    """Collects nodes; large constants are appended to `<path>.data` at once. A context manager."""

    def __init__(self, path: Path, storage: Storage) -> None:
        self.path, self.storage = path, storage
        self.data_path = path.with_name(path.name + ".data")
        self._file = self.data_path.open("wb")
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

    def constant(self, name: str, array: NDArray[Any] | np.float32 | int | Sequence[int]) -> str:
        """Add an initializer; Python whole numbers become int64."""
        value = np.asarray(array, order="C")
        tensor = TensorProto(name=name, data_type=ELEMENT[value.dtype], dims=value.shape)
        if value.nbytes < _INLINE_BYTES:
            tensor.raw_data = value.tobytes()
        else:
            self._file.write(b"\0" * (-self._file.tell() % _ALIGN))
            place = (
                ("location", self.data_path.name),
                ("offset", self._file.tell()),
                ("length", value.nbytes),
            )
            value.tofile(self._file)
            tensor.data_location = TensorProto.EXTERNAL
            for key, item in place:
                tensor.external_data.add(key=key, value=str(item))
        self._constants[name] = tensor
        return name

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
        weight: NDArray[np.float32],
        bias: NDArray[np.float32] | None = None,
        *,
        exact: bool = False,
    ) -> str:
        """source [R, K] times weight [N, K] transposed, plus bias [N].

        Stored as the writer's `storage` says, or in float32 when `exact`.
        """
        rows, columns = weight.shape
        if self.storage.bits and not exact and not self.storage.unpacked:
            blocks = quantize_blocks(weight, self.storage.bits)
            result = self.op(
                "MatMulNBits",
                [
                    source,
                    self.constant(f"{name}.values", blocks.values),
                    self.constant(f"{name}.scales", blocks.scales.reshape(-1)),
                ],
                domain=MICROSOFT,
                K=columns,
                N=rows,
                bits=self.storage.bits,
                block_size=BLOCK,
                accuracy_level=4,
            )
            if bias is None:
                return result
            return self.op("Add", [result, self.constant(f"{name}.bias", bias)])
        if self.storage.bits and not exact:
            table = self._unpacked(name, weight)
        else:
            table = self.constant(f"{name}.weight", weight.T)
        if bias is None:
            return self.op("MatMul", [source, table])
        return self.op("Gemm", [source, table, self.constant(f"{name}.bias", bias)])

    def _unpacked(self, name: str, weight: NDArray[np.float32]) -> str:
        """int8 blocks on disk; ONNX Runtime folds this arithmetic into float32 when it loads."""
        rows, columns = weight.shape
        blocks = quantize_blocks(weight, self.storage.bits, block_of(columns))
        count = blocks.scales.shape[1]
        values = blocks.values.reshape(rows, columns).T.reshape(count, -1, rows)
        stored = self.constant(f"{name}.values", values)
        scales = self.constant(f"{name}.scales", blocks.scales.T.reshape(count, 1, rows))
        centre = self.constant("centre", np.float32(1 << (self.storage.bits - 1)))
        real = self.op("Sub", [self.op("Cast", [stored], to=TensorProto.FLOAT), centre])
        shape = self.constant(f"{name}.shape", [columns, rows])
        return self.op("Reshape", [self.op("Mul", [real, scales]), shape])

    def save(
        self,
        name: str,
        inputs: Sequence[onnx.ValueInfoProto],
        outputs: Sequence[onnx.ValueInfoProto],
    ) -> None:
        """Write the graph file beside its data."""
        self._file.flush()
        graph = helper.make_graph(
            self._nodes, name, inputs, outputs, list(self._constants.values())
        )
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)],
            ir_version=IR_VERSION,
            producer_name="forge-station",
        )
        onnx.save(model, self.path)
