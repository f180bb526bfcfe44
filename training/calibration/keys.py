"""Keys that certificates are signed with, and the signing. The station only verifies.

A private key is a PEM file that its owner alone can read and that never enters a repository; the
public half goes into `trusted_keys` of the stations. `openssl genpkey -algorithm ed25519` makes
the same.
"""

from __future__ import annotations

import json
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from forge_station import private_key
from forge_station.contract import record
from forge_station.contract.certificate import (
    CERTIFICATE_NAME,
    Certificate,
    SignedCertificate,
    canonical,
)
from forge_station.contract.error import ContractError
from forge_station.vlm.bundle_files import verify_folder
from training.calibration.error import CalibrationError


def signed(found: Certificate, key: Ed25519PrivateKey) -> SignedCertificate:
    """The certificate with its signature. It is signed as a station will read it back."""
    found = record.read(Certificate, record.write(found))
    signature = private_key.sign(key, canonical(found))
    return SignedCertificate(found, private_key.public_half(key).id, signature)


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
