"""Which execution provider a bundle may be given. It starts nothing.

A bundle is exported for a target (`manifest.model["target"]`, `cpu` where it is not said). Products
in float16 are never offered to the CPU: an optimisation of ONNX Runtime crashes the process there
(1.23.2 and 1.32.0, seen on x86).
"""

from __future__ import annotations

from forge_station.contract.manifest import Manifest
from forge_station.errors import ModelError
from forge_station.vlm.engine import AUTO, CPU

CUDA, TENSORRT = "CUDAExecutionProvider", "TensorrtExecutionProvider"
_ON_A_GPU = ("cuda", "tensorrt")
_HALF = ("fp16", "w4a16")


def chosen(manifest: Manifest, asked: str) -> str:
    """The provider to start for what was asked (a name or `auto`). Raises ModelError."""
    target = str(manifest.model.get("target", "cpu"))
    if target not in _ON_A_GPU or manifest.precision not in _HALF:
        return asked
    if asked == CPU:
        raise ModelError(
            "float16 is not run on a CPU",
            which=f"{manifest.name}, exported for {target} in {manifest.precision}",
            expected=CUDA,
            got=asked,
            action="export the bundle with --target cpu",
        )
    return CUDA if asked == AUTO else asked
