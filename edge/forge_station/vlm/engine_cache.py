"""TensorRT engines of a bundle: built on the station, kept for exactly this machine, never copied.

An engine belongs to a GPU architecture, a TensorRT release, a driver and a bundle: `Machine.key`
and the digest name its folder, so an engine of anything else is never looked at. It is built
beside the running station, appears complete or not at all, and one builder works at a time.

    python -m forge_station.vlm.engine_cache --bundle BUNDLE --cache /var/lib/forge-station/engines

Unproven: no NVIDIA device was at hand. Keys, folders, locks and options are tested; what
`engine.Graph` does with them on a device (`build_engine`) is not.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from forge_station.contract.error import StationError
from forge_station.contract.manifest import Manifest
from forge_station.errors import ModelError
from forge_station.vlm.bundle_files import verify_folder
from forge_station.vlm.engine import Graph
from forge_station.vlm.providers import TENSORRT

GRAPHS = ("vision.onnx", "decoder.onnx")
_READY, _LOCK, _BUILDING = "engines.json", "builder.lock", ".building"
_QUERY = ("nvidia-smi", "--query-gpu=compute_cap,driver_version", "--format=csv,noheader")
_LIBRARIES = ("libnvinfer.so", "libnvinfer.so.11", "libnvinfer.so.10", "libnvinfer.so.8")
_MOST_TOKENS = 4096


@dataclass(frozen=True)
class Machine:
    """What an engine depends on beside its bundle: `sm_87`, `10.3.0`, `540.4.0`."""

    architecture: str
    tensorrt: str
    driver: str

    @property
    def key(self) -> str:
        text = f"{self.architecture}-trt{self.tensorrt}-driver{self.driver}"
        return re.sub(r"[^A-Za-z0-9._-]", "_", text)


def this_machine() -> Machine:
    """Asks the driver and the TensorRT library. Raises ModelError where either is missing."""
    try:
        said = subprocess.run(_QUERY, capture_output=True, text=True, check=True, timeout=20).stdout
        capability, driver = (item.strip() for item in said.splitlines()[0].split(","))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError) as error:
        raise ModelError(
            "the GPU cannot be asked what it is",
            which=" ".join(_QUERY),
            expected="a compute capability and a driver version",
            got=error,
            action="install the NVIDIA driver, or use another provider",
        ) from error
    return Machine(f"sm_{capability.replace('.', '')}", tensorrt_version(), driver)


def tensorrt_version() -> str:
    """`major.minor.patch` of the library that the loader finds. Raises ModelError without one."""
    for name in _LIBRARIES:
        try:
            number = int(ctypes.CDLL(name).getInferLibVersion())
        except (OSError, AttributeError):
            continue
        # From release 10 on 10000 a major and 100 a minor version, before 1000 and 100.
        scale = 10000 if number >= 10000 else 1000
        return f"{number // scale}.{number % scale // 100}.{number % 100}"
    raise ModelError(
        "TensorRT is not installed",
        expected=" or ".join(_LIBRARIES),
        action="install TensorRT of this JetPack or CUDA, or use another provider",
    )


def profiles(manifest: Manifest, graph: str) -> dict[str, str]:
    """Shapes an engine is built for, smallest, usual and largest, from the bundle's pictures."""
    model = manifest.model
    patch, window = int(model["patch"]), int(model["window"])
    unit, side = int(model["merge"]) ** 2, window // patch
    grids = [
        -(-(high // patch) // side) * -(-(wide // patch) // side) * side * side
        for high, wide in manifest.images.values()
    ] or [side * side]
    if graph == GRAPHS[0]:
        sizes = {"min": side * side, "opt": max(grids), "max": max(grids)}

        def shape(slots: int, pictures: int) -> str:
            width = 3 * patch * patch
            return (
                f"pixel_values:{pictures}x{slots}x{width},valid:{slots},pos_hw:{slots}x2,"
                f"out_index:{slots // unit}"
            )

        found = {n: shape(slots, 3 if n == "max" else 1) for n, slots in sizes.items()}
    else:
        picture = max(grids) // unit
        usual = {"min": (1, 0), "opt": (64, picture + 64), "max": (_MOST_TOKENS, _MOST_TOKENS)}

        def feeds(tokens: int, past: int) -> str:
            heads, size = int(model["kv_heads"]), int(model["head_dim"])
            parts = [
                f"inputs_embeds:1x{tokens}x{model['hidden_size']}",
                f"position_ids:3x1x{tokens}",
                f"attention_bias:1x1x{tokens}x{past + tokens}",
                f"logit_positions:1x{tokens}",
            ]
            parts += [
                f"past.{layer}.{part}:1x{heads}x{past}x{size}"
                for layer in range(int(model["layers"]))
                for part in ("key", "value")
            ]
            return ",".join(parts)

        found = {name: feeds(*sizes) for name, sizes in usual.items()}
    return {f"trt_profile_{name}_shapes": text for name, text in found.items()}


def options(manifest: Manifest, graph: str, folder: Path) -> dict[str, str]:
    """Options of ONNX Runtime's TensorRT provider, with its engine cache in `folder`."""
    return {
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": str(folder),
        "trt_engine_cache_prefix": Path(graph).stem,
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": str(folder),
        "trt_fp16_enable": str(int(manifest.precision == "fp16")),
        **profiles(manifest, graph),
    }


def build_engine(bundle: Path, manifest: Manifest, graph: str, folder: Path) -> None:
    """The vendor's call: a session on TensorRT writes its engine into `folder`. Unproven."""
    Graph(bundle / graph, provider=TENSORRT, settings=options(manifest, graph, folder))


Build = Callable[[Path, Manifest, str, Path], None]
Progress = Callable[[str, int, int], None]
"""(graph that is built now, graphs done, graphs in all)"""


@dataclass(frozen=True)
class EngineCache:
    """The engines of one machine under `root`, a folder a bundle."""

    root: Path
    machine: Machine

    def folder(self, digest: str) -> Path:
        """Where the engines of the bundle with this digest are, whether built or not."""
        return self.root / f"{self.machine.key}-{digest[:16]}"

    def ready(self, digest: str) -> bool:
        """All engines of the bundle are there, whole, and of this machine."""
        folder = self.folder(digest)
        try:
            note = json.loads((folder / _READY).read_text(encoding="utf-8"))
            sizes = {name: (folder / name).stat().st_size for name in note["files"]}
        except (OSError, ValueError, KeyError, TypeError):
            return False
        same = note["machine"] == asdict(self.machine) and note["bundle"] == digest
        return same and bool(sizes) and sizes == note["files"]

    def build(
        self,
        bundle: Path,
        build: Build | None = None,
        progress: Progress = lambda _graph, _done, _all: None,
    ) -> Path:
        """The folder with the engines of a bundle, built (`build_engine`) where not ready.

        Minutes on a device: call it beside the station, which goes on with the bundle it has.
        Raises BundleError, ModelError; a failed build leaves nothing behind.
        """
        manifest = verify_folder(bundle).manifest
        digest = manifest.sha256
        folder = self.folder(digest)
        if self.ready(digest):
            return folder
        with self._alone():
            shutil.rmtree(folder, ignore_errors=True)
            begun = folder.with_name(folder.name + _BUILDING)
            shutil.rmtree(begun, ignore_errors=True)
            begun.mkdir(parents=True)
            try:
                for done, graph in enumerate(GRAPHS):
                    progress(graph, done, len(GRAPHS))
                    (build or build_engine)(bundle, manifest, graph, begun)
                files = {path.name: path.stat().st_size for path in sorted(begun.iterdir())}
                if not files:
                    raise ModelError("TensorRT wrote no engine", which=bundle, expected=begun)
                note = {"machine": asdict(self.machine), "bundle": digest, "files": files}
                (begun / _READY).write_text(json.dumps(note, indent=1), encoding="utf-8")
                begun.rename(folder)
            finally:
                shutil.rmtree(begun, ignore_errors=True)
        progress("", len(GRAPHS), len(GRAPHS))
        return folder

    def prune(self, keep: Collection[str]) -> list[str]:
        """Remove engines of other machines and of bundles that are not in `keep` (digests)."""
        kept = {self.folder(digest).name for digest in keep}
        removed = []
        if self.root.is_dir():
            with self._alone():
                for path in sorted(self.root.iterdir()):
                    if path.is_dir() and path.name not in kept:
                        shutil.rmtree(path)
                        removed.append(path.name)
        return removed

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One builder at a time; the lock goes with its process, however that ends."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / _LOCK).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ModelError(
                    "another process builds engines here",
                    which=self.root,
                    action="wait until it has finished",
                ) from error
            yield


def settings(manifest: Manifest, engines: Path | None) -> Mapping[str, Mapping[str, str]]:
    """Graph -> provider options for opening a bundle with the engines in a folder."""
    if engines is None:
        return {graph: {} for graph in GRAPHS}
    return {graph: options(manifest, graph, engines) for graph in GRAPHS}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, required=True, help="folder of target tensorrt")
    parser.add_argument(
        "--cache", type=Path, required=True, help="folder of this machine's engines"
    )
    args = parser.parse_args()
    begun = time.monotonic()

    def show(graph: str, done: int, total: int) -> None:
        now = f"building {graph}" if graph else "done"
        print(f"{done}/{total} engines, {time.monotonic() - begun:.0f} s: {now}", file=sys.stderr)

    try:
        cache = EngineCache(args.cache, this_machine())
        folder = cache.build(args.bundle, progress=show)
    except StationError as error:
        print(f"engine_cache: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"engines": str(folder), "seconds": round(time.monotonic() - begun, 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
