"""A checkpoint as a bundle: exported once in full precision and kept by the digest of its files.

The export runs in a process of its own: training and export meet in files only.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from forge_station.contract.manifest import MANIFEST_NAME
from forge_station.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".work" / "evaluated-bundles"
_WEIGHTS = (".safetensors", ".json")


def bundle_of(checkpoint: Path, cache: Path = CACHE) -> Path:
    """The float32 bundle of a checkpoint folder. InputError with the export's words on failure."""
    if not (checkpoint / "config.json").is_file():
        raise InputError(
            "not a checkpoint folder",
            which=checkpoint,
            expected="config.json, weights in safetensors and a tokenizer, as training writes them",
        )
    folder = cache / f"{checkpoint.resolve().name}-{digest_of(checkpoint)}"
    if (folder / MANIFEST_NAME).is_file():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "export.bundle", "--checkpoint", str(checkpoint), "--out",
        str(folder), "--precision", "fp32", "--name", _name(checkpoint), "--version", "0.0.0",
    ]  # fmt: skip
    paths = [str(ROOT / "edge"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0 and not (folder / MANIFEST_NAME).is_file():
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise InputError(
            "the checkpoint cannot be exported",
            which=checkpoint,
            got=said[-1] if said else f"exit status {done.returncode}",
            action=f"see {' '.join(command[1:])}",
        )
    return folder


def _name(checkpoint: Path) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in checkpoint.resolve().name)


def digest_of(checkpoint: Path) -> str:
    """12 hex digits of the names and contents of weights, configuration and tokenizer."""
    total = hashlib.sha256()
    for path in sorted(p for p in checkpoint.iterdir() if p.suffix in _WEIGHTS):
        total.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(2**20):
                total.update(block)
    return total.hexdigest()[:12]
