"""The seal of a bundle: who released it, as signatures over its manifest, and what lifts a refusal.

Records only. They hold no key and read no file: `bundles/trust.py` does.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Literal

from forge_station.contract import record
from forge_station.contract.error import ContractError, Fault
from forge_station.contract.manifest import no_duplicates
from forge_station.contract.record import Count, Limit

SEAL_NAME = "signatures.json"
_MOST_SIGNATURES = 16

KeyId = Annotated[str, Limit(pattern="[0-9a-f]{16}", meaning="16 lower-case hex digits")]
SignatureText = Annotated[str, Limit(pattern="[A-Za-z0-9+/]{86}==", meaning="64 bytes as base64")]
Time = Annotated[
    str, Limit(pattern=r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", meaning="UTC, like 2026-11-30T14:00:00Z")
]


@dataclass(frozen=True)
class Signature:
    """Ed25519 over the bytes of `manifest.json` as they stand in the file."""

    key_id: KeyId
    """Start of the SHA-256 of the public key: tells which trusted key to try."""
    signature: SignatureText

    def __post_init__(self) -> None:
        record.check(self)


@dataclass(frozen=True)
class Seal:
    """What stands in `signatures.json` of a bundle: one signature a key."""

    signatures: tuple[Signature, ...]
    schema: Literal["forge-station.signatures/1.0"] = "forge-station.signatures/1.0"

    def __post_init__(self) -> None:
        ids = [item.key_id for item in self.signatures]
        if not 0 < len(ids) <= _MOST_SIGNATURES or len(set(ids)) != len(ids):
            allowed = f"1 to {_MOST_SIGNATURES}, each of another key"
            fault = Fault("signatures", ", ".join(ids) or "none", allowed)
            raise ContractError("the seal is not valid", faults=[fault])

    def with_signature(self, signature: Signature) -> Seal:
        """The seal with one more signature; that of the same key is replaced."""
        others = [item for item in self.signatures if item.key_id != signature.key_id]
        return Seal((*others, signature))

    def to_json(self) -> bytes:
        return (json.dumps(record.write(self), indent=1, sort_keys=True) + "\n").encode()


@dataclass(frozen=True)
class Allowance:
    """Lets a station take a bundle although it has run a later release of the same name."""

    line: str
    """Product line of the bundle, as its manifest says."""
    name: str
    """Of the bundle."""
    release_counter: Count
    """Of the one bundle that may be taken."""
    expires: Time
    schema: Literal["forge-station.downgrade/1.0"] = "forge-station.downgrade/1.0"

    def __post_init__(self) -> None:
        record.check(self)

    def canonical(self) -> bytes:
        """The bytes that are signed: JSON with sorted keys, no spaces, ASCII."""
        return json.dumps(record.write(self), sort_keys=True, separators=(",", ":")).encode()


@dataclass(frozen=True)
class SignedAllowance:
    """The file that `forge-station bundle allow` writes."""

    allowance: Allowance
    key_id: KeyId
    signature: SignatureText

    def __post_init__(self) -> None:
        record.check(self)

    def to_json(self) -> bytes:
        return (json.dumps(record.write(self), indent=1, sort_keys=True) + "\n").encode()


def parse(content: bytes, which: str = SEAL_NAME) -> Seal:
    """The seal from the bytes of its file. Raises ContractError; checks no key."""
    return record.read(Seal, _json(content, "the seal", which), which)


def parse_allowance(content: bytes, which: str) -> SignedAllowance:
    """The allowance from the bytes of its file. Raises ContractError; checks no key."""
    return record.read(SignedAllowance, _json(content, "the allowance", which), which)


def _json(content: bytes, what: str, which: str) -> object:
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ContractError(f"{what} is not JSON", which=which, got=error) from error
