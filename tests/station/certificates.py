"""A certificate as training.calibrate writes it, keys to sign it with, and a permit that holds."""

from __future__ import annotations

import base64
import dataclasses
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from forge_station.checks import SCORE_VERSION
from forge_station.contract import binomial
from forge_station.contract.catalogue import WORKPIECES
from forge_station.contract.certificate import (
    CERTIFICATE_NAME,
    Certificate,
    Claim,
    Share,
    SignedCertificate,
    canonical,
)
from forge_station.permit import Permit
from forge_station.signing import PublicKey

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
NOW = datetime(2026, 12, 1, 12, tzinfo=timezone.utc)
MODEL = "ab" * 32


def public(key: Ed25519PrivateKey = KEY) -> PublicKey:
    return PublicKey(key.public_key().public_bytes_raw())


CHECKS = ("assembly", "surface", "workpiece")


def claim(limit: float) -> Claim:
    """Escape <= 1 % for all checks together, at the first look, from 700 defective parts."""
    delta = binomial.look_delta(0.05, 1)
    rank = binomial.rank(700, 0.01, delta)
    return Claim(CHECKS, 700, rank, delta, limit, 0, binomial.upper(rank - 1, 700, delta))


def certificate(limit: float = -2.0, **changes: Any) -> Certificate:
    """One claim for all checks, 1 % at 95 %, for simulated scans. `limit`: of a PASS."""
    found = Certificate(
        bundle="test 1.0.0",
        model_sha256=MODEL,
        score_version=SCORE_VERSION,
        escape=0.01,
        confidence=0.95,
        look=1,
        temperatures=dict.fromkeys(CHECKS, 1.0),
        limit_pass=limit,
        limit_fail=limit + 2.0,
        overkill_target=0.02,
        claims=(claim(limit),),
        overkill=Share(500, 1, binomial.upper(1, 500, 0.05)),
        unsure=Share(500, 10, binomial.upper(10, 500, 0.05)),
        families={check: tuple(WORKPIECES) for check in CHECKS},
        simulated=True,
        dataset_sha256="cd" * 32,
        provenance={"simulated": 1200},
        label_protocol="known from the simulation",
        valid_from="2026-11-30T00:00:00Z",
        expires="2027-05-29T00:00:00Z",
    )
    return dataclasses.replace(found, **changes)


def certified(limit: float = -2.0, **changes: Any) -> Permit:
    """A permit whose certificate holds on `NOW`."""
    return Permit(certificate(limit, **changes), "", model_sha256=MODEL, clock=lambda: NOW)


def signed(found: Certificate, key: Ed25519PrivateKey = KEY) -> SignedCertificate:
    signature = base64.b64encode(key.sign(canonical(found))).decode()
    return SignedCertificate(found, public(key).id, signature)


def write(folder: Path, found: Certificate, key: Ed25519PrivateKey = KEY) -> None:
    """`certificate.json` of a bundle folder."""
    (folder / CERTIFICATE_NAME).write_bytes(signed(found, key).to_json())
