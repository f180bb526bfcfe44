"""Private Ed25519 keys on the machine of the person who signs.

A station has at most one: that of its reports on a stick (`release.report_key`).

A private key is a PEM file that its owner alone can read and that never enters a repository.
`openssl genpkey -algorithm ed25519` makes the same.
"""

from __future__ import annotations

import base64
import os
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from forge_station.errors import ConfigError
from forge_station.signing import PublicKey

PrivateKey = Ed25519PrivateKey
"""For whoever only hands a key on."""


def generate(private: Path, public: Path) -> PublicKey:
    """Write a new pair of PEM files. Raises ConfigError rather than replace a key."""
    for path in (private, public):
        if path.exists():
            raise ConfigError(
                "a key is there already",
                which=path,
                action="choose another name: stations may still trust it",
            )
    key = Ed25519PrivateKey.generate()
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    try:
        private.parent.mkdir(parents=True, exist_ok=True)
        public.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        public.write_bytes(pem)
    except OSError as error:
        raise ConfigError("a key cannot be written", which=error.filename, got=error) from None
    return public_half(key)


def read(path: Path) -> Ed25519PrivateKey:
    """The private key in a PEM file without a passphrase. Raises ConfigError."""
    try:
        pem = path.read_bytes()
        key = load_pem_private_key(pem, password=None)
    except OSError as error:
        raise ConfigError(
            "the private key cannot be read",
            which=path,
            got=error.strerror,
            action="make a pair: forge-station bundle keygen, or training.calibrate keygen",
        ) from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        public = b"PUBLIC KEY" in pem
        raise ConfigError(
            "not a private key",
            which=path,
            expected="PEM, Ed25519, no passphrase",
            got="a public key" if public else "no such key",
            action="name the private file of the pair, the one without .pub" if public else None,
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(
            "private key of another kind", which=path, expected="Ed25519", got=type(key).__name__
        )
    return key


def public_half(key: Ed25519PrivateKey) -> PublicKey:
    """The key that stations are given."""
    return PublicKey(key.public_key().public_bytes_raw())


def sign(key: Ed25519PrivateKey, content: bytes) -> str:
    """The signature as base64."""
    return base64.b64encode(key.sign(content)).decode()
