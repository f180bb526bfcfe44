"""Whose bundles a station takes: signatures over the manifest, held against its keys.

It reads no bundle: `vlm/bundle_files.py` hands over the bytes of the manifest and of the seal.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from forge_station import signing
from forge_station.contract import seal as contract_seal
from forge_station.contract.error import ContractError
from forge_station.contract.manifest import Manifest
from forge_station.contract.seal import SEAL_NAME, SignedAllowance
from forge_station.errors import BundleError
from forge_station.signing import PublicKey


@dataclass(frozen=True)
class Trust:
    """`threshold` of the `keys` must have signed. `unsigned`: a bundle without any counts too."""

    keys: tuple[PublicKey, ...] = ()
    threshold: int = 1
    unsigned: bool = False

    def check(self, manifest: bytes, seal: bytes | None, which: object) -> tuple[str, ...]:
        """Ids of the trusted keys that signed these bytes of a manifest. Raises BundleError.

        A signature of a trusted key that is wrong is refused in any case: something was altered.
        """
        if seal is None:
            if self.unsigned:
                return ()
            raise BundleError(
                "the bundle is not signed",
                which=which,
                expected=f"{SEAL_NAME} with {self._wanted()}",
                action="sign it: forge-station bundle sign (or allow unsigned bundles in the "
                "station file: release.unsigned)",
            )
        try:
            signatures = contract_seal.parse(seal).signatures
        except ContractError as error:
            text = " ".join(str(error).split())
            raise BundleError("the seal cannot be read", which=which, got=text) from error
        known = {key.id: key for key in self.keys}
        good = []
        for item in signatures:
            key = known.get(item.key_id)
            if key is None:
                continue
            if not key.verifies(base64.b64decode(item.signature), manifest):
                raise BundleError(
                    "the manifest was altered after it was signed",
                    which=which,
                    expected=f"the manifest that the key {item.key_id} signed",
                    action="copy the bundle again; if you altered it on purpose, sign it again",
                )
            good.append(item.key_id)
        if len(good) < self.threshold and not self.unsigned:
            raise BundleError(
                "the bundle is not signed by a key that this station trusts",
                which=which,
                expected=self._wanted(),
                got=", ".join(item.key_id for item in signatures),
                action="enrol the key in release.keys of the station file, or have it signed",
            )
        return tuple(good)

    def allows(self, signed: SignedAllowance | None, manifest: Manifest, now: datetime) -> bool:
        """Whether a trusted key lets this bundle in although a later release has run here.

        Raises BundleError for an allowance that is for something else, expired or altered.
        """
        if signed is None:
            return False
        found = signed.allowance
        signature = base64.b64decode(signed.signature)
        fault = signing.fault(self.keys, signed.key_id, signature, found.canonical())
        wanted = (manifest.line, manifest.name, manifest.release_counter)
        if fault is None and (found.line, found.name, found.release_counter) != wanted:
            named = f"{found.name}, release {found.release_counter}, line {found.line or 'any'}"
            fault = f"it is for {named}"
        if fault is None and now.strftime("%Y-%m-%dT%H:%M:%SZ") >= found.expires:
            fault = f"it expired on {found.expires}"
        if fault is not None:
            raise BundleError("the allowance of a downgrade does not count", got=fault)
        return True

    def _wanted(self) -> str:
        ids = ", ".join(key.id for key in self.keys) or "none is enrolled"
        count = "a signature" if self.threshold == 1 else f"{self.threshold} signatures"
        return f"{count} of the trusted keys ({ids})"


def release_trust(
    keys: Sequence[PublicKey], fallback: Sequence[PublicKey], threshold: int, unsigned: bool
) -> Trust:
    """What a station file says: its release keys, else those that it trusts for certificates."""
    return Trust(tuple(keys or fallback), threshold, unsigned)
