"""One ONNX graph in one session. The only module that imports onnxruntime.

It knows nothing of what a graph means. Works with ONNX Runtime 1.23.2 (the last for Python 3.10)
and newer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from forge_station.errors import BundleError, ModelError

CPU = "CPUExecutionProvider"
AUTO = "auto"
PREFERRED = ("CUDAExecutionProvider", CPU)
VERSION: str = ort.__version__


class Graph:
    """A loaded graph. `provider` is the execution provider that ONNX Runtime really registered."""

    def __init__(self, path: Path, *, threads: int = 1, provider: str = AUTO) -> None:
        available = ort.get_available_providers()
        if provider != AUTO and provider not in available:
            raise ModelError(
                "execution provider is not installed",
                which=provider,
                expected=f"one of {', '.join(available)}",
                action="install the matching onnxruntime package or use `auto`",
            )
        wanted = [p for p in PREFERRED if p in available] if provider == AUTO else [provider]
        if CPU not in wanted:
            wanted.append(CPU)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.inter_op.allow_spinning", "0")
        try:
            self._session = ort.InferenceSession(str(path), options, providers=wanted)
        except _LOAD_ERRORS as error:
            raise BundleError(
                "graph cannot be loaded",
                which=path.name,
                got=str(error).splitlines()[0][:300],
                action=f"export the bundle again, or check ONNX Runtime (here {VERSION})",
            ) from error
        self.path = path
        self.provider: str = self._session.get_providers()[0]
        if provider not in (AUTO, self.provider):
            raise ModelError(
                "execution provider could not start",
                which=path.name,
                expected=provider,
                got=self.provider,
                action="check the driver and its libraries, or use `auto`",
            )
        self.inputs: dict[str, list[Any]] = {i.name: i.shape for i in self._session.get_inputs()}
        self.outputs: tuple[str, ...] = tuple(o.name for o in self._session.get_outputs())

    def run(
        self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str] | None = None
    ) -> list[NDArray[Any]]:
        """Run once; the order of the result is that of `outputs` (default: the graph's own)."""
        try:
            result: list[NDArray[Any]] = self._session.run(outputs or self.outputs, dict(feeds))
        except _RUN_ERRORS as error:
            shapes = {name: list(np.shape(value)) for name, value in feeds.items()}
            raise ModelError(
                "graph failed to run",
                which=self.path.name,
                got=f"{str(error).splitlines()[0][:300]}; inputs {shapes}",
            ) from error
        return result


_STATE = ort.capi.onnxruntime_pybind11_state
_LOAD_ERRORS: tuple[type[Exception], ...] = (
    _STATE.Fail,
    _STATE.InvalidArgument,
    _STATE.InvalidGraph,
    _STATE.InvalidProtobuf,
    _STATE.NoSuchFile,
    _STATE.NotImplemented,
    _STATE.RuntimeException,
)
_RUN_ERRORS: tuple[type[Exception], ...] = (
    _STATE.Fail,
    _STATE.InvalidArgument,
    _STATE.RuntimeException,
    ValueError,
)
