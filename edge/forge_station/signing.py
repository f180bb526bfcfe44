"""Ed25519 signatures: public keys that a station trusts, and whether one of them signed.

The only module that uses `cryptography`. It makes no signature (training/calibration does) and
knows no certificate.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from forge_station.errors import ConfigError

_MAX_BYTES = 10_000


@dataclass(frozen=True)
class PublicKey:
    """An Ed25519 public key, 32 bytes."""

    raw: bytes

    @property
    def id(self) -> str:
        """16 hex digits that name the key in a signed document."""
        return hashlib.sha256(self.raw).hexdigest()[:16]

    def verifies(self, signature: bytes, content: bytes) -> bool:
        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, content)
        except (InvalidSignature, ValueError):
            return False
        return True


def public_key(text: str, folder: Path) -> PublicKey:
    """A key from a configuration: 32 bytes as base64, or the path of a PEM file.

    A relative path starts at `folder`. Raises ConfigError.
    """
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    return PublicKey(raw) if len(raw) == 32 else read_public_key(folder / Path(text).expanduser())


def read_public_key(path: Path) -> PublicKey:
    """The key in a PEM file, as `openssl pkey -pubout` writes it. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES)
    except OSError as error:
        raise ConfigError(
            "public key cannot be read",
            which=path,
            expected="a PEM file, or 32 bytes as base64",
            got=error.strerror,
        ) from error
    try:
        key = load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            "not a public key", which=path, expected="a PEM file with an Ed25519 public key"
        ) from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(
            "public key of another kind", which=path, expected="Ed25519", got=type(key).__name__
        )
    return PublicKey(key.public_bytes_raw())


def fault(keys: Iterable[PublicKey], key_id: str, signature: bytes, content: bytes) -> str | None:
    """Why no trusted key has signed the content; None: one has."""
    trusted = [key for key in keys if key.id == key_id]
    if not trusted:
        return f"it is signed with the key {key_id}, which this station does not trust"
    if not any(key.verifies(signature, content) for key in trusted):
        return "its signature is wrong: it was altered after it was signed"
    return None
