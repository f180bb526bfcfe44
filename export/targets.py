"""What each target runs: its precisions, its operators, and how many bits a weight gets.

    cpu        ONNX Runtime's CPU provider, operators of its own
    cuda       ONNX Runtime's CUDA provider, the same operators; float16 products
    tensorrt   standard operators only: engines are built on the station
    openvino   standard operators only: OpenVINO reads the graphs as they are

Names and layout of inputs and outputs are the same for all. It knows no file and no model.
"""

from __future__ import annotations

from dataclasses import dataclass

from forge_station.errors import InputError


@dataclass(frozen=True)
class Bits:
    """Bits of a linear weight in each graph (0: float32, 16: float16)."""

    decoder: int
    vision: int


@dataclass(frozen=True)
class Target:
    """`fused`: ONNX Runtime's own operators; `half`: products of 4-bit weights in float16."""

    name: str
    precisions: dict[str, Bits]
    fused: bool
    half: bool
    reason: str
    """Why other precisions are refused."""


_FULL, _HALF, _INT8 = Bits(0, 0), Bits(16, 16), Bits(8, 8)
TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target(
            "cpu",
            {"fp32": _FULL, "int8": _INT8, "w4a16": Bits(4, 8)},
            fused=True,
            half=False,
            reason="a graph optimisation of ONNX Runtime crashes on float16 on a CPU",
        ),
        Target(
            "cuda",
            {"fp32": _FULL, "fp16": _HALF, "int8": _INT8, "w4a16": Bits(4, 16)},
            fused=True,
            half=True,
            reason="ONNX Runtime's CUDA provider has no product for it",
        ),
        Target(
            "tensorrt",
            {"fp32": _FULL, "fp16": _HALF},
            fused=False,
            half=True,
            reason="packed weights need an operator that TensorRT does not have",
        ),
        Target(
            "openvino",
            {"fp32": _FULL, "int8": _INT8},
            fused=False,
            half=False,
            reason="packed weights need an operator that OpenVINO does not have",
        ),
    )
}
PRECISIONS: tuple[str, ...] = tuple(
    dict.fromkeys(name for target in TARGETS.values() for name in target.precisions)
)


def bits_of(target: str, precision: str) -> Bits:
    """Raises InputError for what a target does not run."""
    if target not in TARGETS:
        raise InputError("target", expected=", ".join(TARGETS), got=target)
    allowed = TARGETS[target].precisions
    if precision not in allowed:
        known = precision in PRECISIONS
        raise InputError(
            "precision",
            which=f"target {target}",
            expected=", ".join(allowed),
            got=precision,
            action=TARGETS[target].reason if known else None,
        )
    return allowed[precision]
