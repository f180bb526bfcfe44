"""Small bundles that no model is in: everything about them but what they decide."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from forge_station import private_key
from forge_station.bundles.trust import Trust
from forge_station.contract import CONTRACT_VERSION
from forge_station.contract.manifest import MANIFEST_NAME, FileEntry, Manifest
from forge_station.contract.seal import SEAL_NAME, Seal, Signature


@dataclass(frozen=True)
class Signer:
    """A release key."""

    key: Ed25519PrivateKey

    @staticmethod
    def new() -> Signer:
        return Signer(Ed25519PrivateKey.generate())

    @property
    def trust(self) -> Trust:
        return Trust((private_key.public_half(self.key),))

    def signature(self, content: bytes) -> Signature:
        return Signature(private_key.public_half(self.key).id, private_key.sign(self.key, content))


def array_bytes(array: np.ndarray[Any, Any], *, pickled: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=pickled)
    return file.getvalue()


def write(
    folder: Path,
    *signers: Signer,
    name: str = "nuts",
    release: int = 1,
    line: str = "l1",
    files: dict[str, bytes] | None = None,
    version: str = "1.0.0",
) -> Manifest:
    """Write a bundle folder, signed by each of the signers."""
    content = files or {
        "embed.npy": array_bytes(np.arange(12, dtype=np.float32).reshape(3, 4)),
        "notes.json": json.dumps({"release": release}).encode(),
    }
    manifest = Manifest(
        name=name,
        version=version,
        release_counter=release,
        contract_version=CONTRACT_VERSION,
        precision="fp32",
        files={key: FileEntry.of(value) for key, value in content.items()},
        line=line,
    )
    folder.mkdir(parents=True)
    for key, value in content.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(value)
    (folder / MANIFEST_NAME).write_bytes(manifest.to_json())
    seal(folder, *signers)
    return manifest


def seal(folder: Path, *signers: Signer) -> None:
    """Sign what lies there now."""
    content = (folder / MANIFEST_NAME).read_bytes()
    if signers:
        found = Seal(tuple(signer.signature(content) for signer in signers))
        (folder / SEAL_NAME).write_bytes(found.to_json())


def repacked(source: Path, out: Path, change: Any) -> Path:
    """A bundle file written anew: `change(members)` edits the list of (header, content)."""
    with tarfile.open(source) as tar:
        members = [(item, tar.extractfile(item).read()) for item in tar]  # type: ignore[union-attr]
    members = change(members)
    with tarfile.open(out, "w") as tar:
        for header, content in members:
            header.size = len(content) if header.isreg() else 0
            tar.addfile(header, io.BytesIO(content))
    return out
