"""One ONNX graph in one session. The only module that imports onnxruntime.

It knows nothing of what a graph means. Works with ONNX Runtime 1.23.2 (the last for Python 3.10)
and newer.

Where a graph runs is proved, not assumed. ONNX Runtime falls back to the CPU silently, in three
places: when a provider cannot start (`get_providers()` tells), when a provider that started takes
no node (only a profile tells), and when a run fails (its Python code then makes a new session; that
is switched off here). So the first run is profiled, and `check_placement` refuses a graph whose
matrix products did not run where they were asked to.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from forge_station.errors import BundleError, ModelError

log = logging.getLogger(__name__)

CPU = "CPUExecutionProvider"
AUTO = "auto"
PREFERRED = ("CUDAExecutionProvider", CPU)
VERSION: str = ort.__version__
Tensor = Any
"""An `OrtValue`: an array on the device of its session. It is never written to again."""
_DEVICES: Mapping[str, str] = {
    "CUDAExecutionProvider": "cuda",
    "TensorrtExecutionProvider": "cuda",
    "NvTensorRTRTXExecutionProvider": "cuda",
}
_PRODUCTS = frozenset({
    "Attention", "Conv", "DynamicQuantizeMatMul", "FusedConv", "FusedGemm", "FusedMatMul", "Gemm",
    "GroupQueryAttention", "MatMul", "MatMulInteger", "MatMulIntegerToFloat", "MatMulNBits",
    "MultiHeadAttention", "QGemm", "QLinearMatMul",
})  # fmt: skip


@dataclass(frozen=True)
class Placement:
    """Which execution provider ran the nodes of one profiled run.

    `products`: provider -> matrix products, nearly all of the work. `nodes`: provider -> all nodes
    (one that compiles a whole subgraph shows it as a single node).
    """

    nodes: Mapping[str, int]
    products: Mapping[str, int]

    @property
    def provider(self) -> str:
        """The provider that ran most matrix products; most nodes where none is visible."""
        counts = self.products or self.nodes
        return max(counts, key=lambda name: counts[name])

    @staticmethod
    def of_profile(events: Sequence[Mapping[str, Any]]) -> Placement:
        """From the events of ONNX Runtime's profile: those that end in `_kernel_time`."""
        nodes: Counter[str] = Counter()
        products: Counter[str] = Counter()
        for event in events:
            arguments = event.get("args", {})
            provider = arguments.get("provider")
            if event.get("cat") == "Node" and provider:
                nodes[provider] += 1
                products[provider] += arguments.get("op_name") in _PRODUCTS
        return Placement(dict(nodes), dict(+products))


class Graph:
    """A loaded graph.

    `threads` of one run; `spinning`: idle threads burn their core to start quicker (only where the
    station has the box for itself). `settings` are options of the provider that is asked for by
    name. `placement` is None until the first run has been profiled.
    """

    def __init__(
        self,
        path: Path,
        *,
        threads: int = 1,
        provider: str = AUTO,
        spinning: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        self.asked = provider
        self.placement: Placement | None = None
        folder = tempfile.mkdtemp(prefix="forge-profile-")
        self._forget = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._session = _started(path, threads, provider, spinning, Path(folder), settings or {})
        self._registered = tuple(self._session.get_providers())
        self._device = _DEVICES.get(self._registered[0], "cpu")
        self.inputs: dict[str, list[Any]] = {i.name: i.shape for i in self._session.get_inputs()}
        self.outputs: tuple[str, ...] = tuple(o.name for o in self._session.get_outputs())

    @property
    def provider(self) -> str:
        """Where the graph runs: proved by the profile, before that what is registered.

        Raises ModelError when the session is no longer the one that was profiled.
        """
        registered = tuple(self._session.get_providers())
        if registered != self._registered:
            raise ModelError(
                "the execution provider has changed while running",
                which=self.path.name,
                expected=", ".join(self._registered),
                got=", ".join(registered),
                action="check the driver, then start the station again",
            )
        return registered[0] if self.placement is None else self.placement.provider

    def check_placement(self) -> Placement:
        """End the profile of the runs so far. ModelError when they were not where asked.

        A provider asked for by name must have run every matrix product; `auto` takes what it gets.
        Shape arithmetic may stay on the CPU, where ONNX Runtime puts it on purpose.
        """
        if self.placement is None:
            file = Path(self._session.end_profiling())
            self.placement = Placement.of_profile(json.loads(file.read_text(encoding="utf-8")))
            self._forget()
        found = self.placement
        elsewhere = {name: n for name, n in found.products.items() if name != self.asked}
        if self.asked != AUTO and (elsewhere or self.asked not in found.nodes):
            ran = ", ".join(f"{name} ran {n}" for name, n in found.products.items())
            raise ModelError(
                "the execution provider does not run the graph",
                which=self.path.name,
                expected=f"all matrix products on {self.asked}",
                got=ran or "no matrix product",
                action="export the bundle for this provider, check its driver, or use `auto`",
            )
        return found

    def run(
        self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str] | None = None
    ) -> list[NDArray[Any]]:
        """Run once; the order of the result is that of `outputs` (default: the graph's own)."""
        try:
            result: list[NDArray[Any]] = self._session.run(outputs or self.outputs, dict(feeds))
        except _RUN_ERRORS as error:
            raise self._failed(error, {n: np.shape(v) for n, v in feeds.items()}) from error
        return result

    def run_bound(
        self,
        feeds: Mapping[str, NDArray[Any]],
        tensors: Mapping[str, Tensor],
        output: str,
        kept: Sequence[str] = (),
    ) -> tuple[NDArray[Any], list[Tensor]]:
        """Run once -> (`output` as an array, the `kept` outputs left on the device, in order).

        `tensors` are inputs that earlier runs kept: they are read where they are, without a copy.
        """
        binding = self._session.io_binding()
        try:
            for name, array in feeds.items():
                binding.bind_cpu_input(name, array)
            for name, tensor in tensors.items():
                binding.bind_ortvalue_input(name, tensor)
            binding.bind_output(output, "cpu")
            for name in kept:
                binding.bind_output(name, self._device)
            self._session.run_with_iobinding(binding)
        except _RUN_ERRORS as error:
            shapes = {n: np.shape(v) for n, v in feeds.items()}
            raise self._failed(
                error, shapes | {n: t.shape() for n, t in tensors.items()}
            ) from error
        binding.synchronize_outputs()
        first, *others = binding.get_outputs()
        result: NDArray[Any] = first.numpy()
        return result, others

    def tensor(self, array: NDArray[Any]) -> Tensor:
        """The array on the session's device."""
        return ort.OrtValue.ortvalue_from_numpy(array, self._device, 0)

    def _failed(self, error: Exception, shapes: Mapping[str, Sequence[int]]) -> ModelError:
        inputs = {name: list(shape) for name, shape in shapes.items()}
        return ModelError(
            "graph failed to run",
            which=self.path.name,
            got=f"{str(error).splitlines()[0][:300]}; inputs {inputs}",
        )


def available() -> list[str]:
    """Execution providers that are installed here, as ONNX Runtime names them."""
    return list(ort.get_available_providers())


def _started(
    path: Path,
    threads: int,
    provider: str,
    spinning: bool,
    profile: Path,
    settings: Mapping[str, str],
) -> ort.InferenceSession:
    """A session on the provider asked for; with `auto` on the first that starts."""
    installed = available()
    if provider != AUTO and provider not in installed:
        raise ModelError(
            "execution provider is not installed",
            which=provider,
            expected=f"one of {', '.join(installed)}",
            action="install the matching onnxruntime package or use `auto`",
        )
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.enable_profiling = True
    options.profile_file_prefix = str(profile / "run")
    for pool in ("intra_op", "inter_op"):
        options.add_session_config_entry(f"session.{pool}.allow_spinning", str(int(spinning)))
    wanted = [p for p in PREFERRED if p in installed] if provider == AUTO else [provider]
    for name in wanted:
        given: list[Any] = [(name, dict(settings))] if settings else [name]
        given += [] if name == CPU else [CPU]
        session = _session(path, options, given, name == wanted[-1])
        got = "no session" if session is None else session.get_providers()[0]
        if session is not None and got == name:
            return session
        if name != wanted[-1]:
            log.warning("%s does not start for %s (got %s); trying the next", name, path.name, got)
    raise ModelError(
        "execution provider could not start",
        which=path.name,
        expected=" or ".join(wanted),
        got=got,
        action="check the driver and its libraries, or use `auto`",
    )


def _session(
    path: Path, options: ort.SessionOptions, providers: Sequence[Any], last: bool
) -> ort.InferenceSession | None:
    """None: the provider failed and there is another to try. BundleError for a graph of no use."""
    try:
        return ort.InferenceSession(str(path), options, providers=providers, enable_fallback=0)
    except _LOAD_ERRORS as error:
        if not last:
            return None
        raise BundleError(
            "graph cannot be loaded",
            which=path.name,
            got=str(error).splitlines()[0][:300],
            action=f"export the bundle again, or check ONNX Runtime (here {VERSION})",
        ) from error


_STATE = ort.capi.onnxruntime_pybind11_state
_LOAD_ERRORS: tuple[type[Exception], ...] = (
    _STATE.EPFail,
    _STATE.Fail,
    _STATE.InvalidArgument,
    _STATE.InvalidGraph,
    _STATE.InvalidProtobuf,
    _STATE.NoSuchFile,
    _STATE.NotImplemented,
    _STATE.RuntimeException,
)
_RUN_ERRORS: tuple[type[Exception], ...] = (
    _STATE.EPFail,
    _STATE.Fail,
    _STATE.InvalidArgument,
    _STATE.RuntimeException,
    RuntimeError,  # of a bound run
    ValueError,
)
