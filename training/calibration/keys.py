"""Keys that certificates are signed with, and the signing. The station only verifies.

A private key is a PEM file that its owner alone can read and that never enters a repository; the
public half goes into `trusted_keys` of the stations. `openssl genpkey -algorithm ed25519` makes
the same.
"""

from __future__ import annotations

import base64
import json
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

from forge_station.contract import record
from forge_station.contract.certificate import (
    CERTIFICATE_NAME,
    Certificate,
    SignedCertificate,
    canonical,
)
from forge_station.contract.error import ContractError
from forge_station.signing import PublicKey
from forge_station.vlm.bundle_files import verify_folder
from training.calibration.error import CalibrationError


def generate(private: Path, public: Path) -> PublicKey:
    """Write a new pair of PEM files. Raises CalibrationError rather than replace a key."""
    for path in (private, public):
        if path.exists():
            raise CalibrationError(
                "a key is there already",
                which=path,
                action="choose another name: stations may still trust it",
            )
    key = Ed25519PrivateKey.generate()
    try:
        private.parent.mkdir(parents=True, exist_ok=True)
        public.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        opened = key.public_key()
        public.write_bytes(opened.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    except OSError as error:
        raise CalibrationError("a key cannot be written", which=error.filename, got=error) from None
    return PublicKey(opened.public_bytes_raw())


def read_private(path: Path) -> Ed25519PrivateKey:
    """The private key in a PEM file without a passphrase. Raises CalibrationError."""
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise CalibrationError(
            "the private key cannot be read",
            which=path,
            got=error.strerror,
            action="make a pair: python -m training.calibrate keygen",
        ) from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise CalibrationError(
            "not a private key", which=path, expected="PEM, Ed25519, no passphrase", got=error
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise CalibrationError(
            "private key of another kind", which=path, expected="Ed25519", got=type(key).__name__
        )
    return key


def signed(found: Certificate, key: Ed25519PrivateKey) -> SignedCertificate:
    """The certificate with its signature. It is signed as a station will read it back."""
    found = record.read(Certificate, record.write(found))
    signature = base64.b64encode(key.sign(canonical(found))).decode()
    return SignedCertificate(found, PublicKey(key.public_key().public_bytes_raw()).id, signature)


def put(found: SignedCertificate, bundle: Path) -> Path:
    """Write `certificate.json` into a bundle folder. CalibrationError when it is for another one.

    It stands beside the manifest, not in it: it is made after the bundle and names its model files
    by digest, and a station without it still has a whole bundle.
    """
    manifest = verify_folder(bundle).manifest
    if found.certificate.model_sha256 != manifest.model_sha256:
        raise CalibrationError(
            "the certificate is for other model files",
            which=bundle,
            expected=f"{found.certificate.model_sha256[:16]}... ({found.certificate.bundle})",
            got=f"{manifest.model_sha256[:16]}... ({manifest.name} {manifest.version})",
            action="certify this bundle: its graphs, tokenizer or thresholds are not the same",
        )
    path = bundle / CERTIFICATE_NAME
    write_whole(path, found.to_json())
    return path


def read_draft(path: Path) -> Certificate:
    """An unsigned certificate that `training.calibrate` wrote. Raises CalibrationError."""
    try:
        return record.read(Certificate, json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise CalibrationError(
            "the certificate cannot be read", which=path, got=error.strerror
        ) from error
    except (ValueError, ContractError) as error:
        raise CalibrationError("not a certificate", which=path, got=error) from error


def write_whole(path: Path, content: bytes) -> None:
    """Write beside the place and rename, so that nobody sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.part")
    draft.write_bytes(content)
    draft.replace(path)
