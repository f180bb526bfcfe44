"""What may hang or crash in a native library, asked in a process of its own; prints one JSON line.

`camera SETTINGS_JSON`: open it, take one frame. `provider NAME`: run a matrix product there.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from forge_station.capture.camera import CameraSettings, open_camera
from forge_station.errors import CameraBusyError, StationError
from forge_station.vlm.engine import Graph

FRAME_TIMEOUT_S = 5.0


def camera(settings: dict[str, Any]) -> dict[str, Any]:
    """Open the device, grab one frame, close it."""
    began = time.monotonic()
    try:
        with closing(open_camera(CameraSettings(**settings))) as device:
            info = device.describe()
            modes = info.triggers
            device.arm("free" if "free" in modes else "software", 1)
            if "free" not in modes:
                device.trigger()
            frame = device.grab(FRAME_TIMEOUT_S)
            device.disarm()
    except CameraBusyError as error:
        return {"busy": str(error)}
    except StationError as error:
        return {"error": str(error)}
    return {
        "model": f"{info.vendor} {info.model}".strip(),
        "serial": info.serial,
        "driver": f"{info.driver} {info.driver_version}".strip(),
        "address": info.address,
        "size": [int(frame.image.shape[1]), int(frame.image.shape[0])],
        "complete": frame.complete,
        "mean": float(frame.image.mean()),
        "spread": float(frame.image.std()),
        "seconds": time.monotonic() - began,
    }


def provider(name: str) -> dict[str, Any]:
    """Run a graph of one matrix product and prove by the profile where it ran."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "product.onnx"
        path.write_bytes(product_graph())
        try:
            graph = Graph(path, provider=name)
            matrix = np.eye(4, dtype=np.float32)
            graph.run({"a": matrix, "b": matrix})
            placement = graph.check_placement()
        except StationError as error:
            got = "" if error.got is None else f" ({error.got})"
            return {"error": f"{error.what}{got}"}
    return {"ran": placement.provider, "seconds": time.monotonic() - began}


def product_graph() -> bytes:
    """An ONNX model, opset 17: c = a x b, float32 [4, 4]. Written as protobuf by hand: a station
    has no package that makes models.
    """

    def field(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    def number(number: int, value: int) -> bytes:
        return bytes([number << 3, value])

    def tensor(name: str) -> bytes:
        dimension = field(1, number(1, 4))
        typed = number(1, 1) + field(2, dimension * 2)  # float32, shape
        return field(1, name.encode()) + field(2, field(1, typed))

    node = field(1, b"a") + field(1, b"b") + field(2, b"c") + field(4, b"MatMul")
    graph = field(1, node) + field(2, b"product")
    graph += field(11, tensor("a")) + field(11, tensor("b")) + field(12, tensor("c"))
    opset = field(1, b"") + number(2, 17)
    return number(1, 8) + field(7, graph) + field(8, opset)


def main(words: list[str]) -> int:
    """Ask, print, done."""
    kind, argument = words
    found = camera(json.loads(argument)) if kind == "camera" else provider(argument)
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
