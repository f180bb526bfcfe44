"""The certificate of a bundle: what was shown about escapes, on which parts, and when it is void.

A record and its rules. It holds no key and reads no file: `permit.py` does, and decides with it
whether a station may say PASS. training/CALIBRATION.md tells how one is made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from typing import Annotated, Literal

from forge_station.contract import binomial, record
from forge_station.contract.error import ContractError, Fault
from forge_station.contract.record import Count, Limit, NotNegative, Probability
from forge_station.contract.spec import Product

CERTIFICATE_NAME = "certificate.json"
SCHEMA = "forge-station.certificate/1.0"
Change = Literal["camera", "light", "recipe", "drift"]
"""What a person or a monitor may find changed; a changed bundle is found by its digest."""
CHANGES: tuple[Change, ...] = ("camera", "light", "recipe", "drift")

Hex64 = Annotated[str, Limit(pattern="[0-9a-f]{64}", meaning="64 lower-case hex digits")]
Time = Annotated[
    str, Limit(pattern=r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", meaning="UTC, like 2026-11-30T14:00:00Z")
]
Open = Annotated[float, Limit(1e-9, 1 - 1e-9)]
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Claim:
    """Escape <= the certificate's `escape` among defective parts that these checks must catch.

    `limit` is the `rank`-th smallest score of `defective` distinct parts, where a part that a check
    stops in any case counts as unlimited. Risk of the claim being wrong: at most `delta`.
    """

    checks: tuple[str, ...]
    defective: Annotated[int, Limit(1)]
    rank: Annotated[int, Limit(1)]
    delta: Open
    limit: float
    escapes: Count
    """How many of the defective parts the station would have passed."""
    upper: Probability
    """Bound on the escape rate that rank and number of parts give; at most the claimed rate."""

    def __post_init__(self) -> None:
        record.check(self)


@dataclass(frozen=True)
class Share:
    """A share of the good parts: `count` of `parts`, with its exact upper bound."""

    parts: Count
    count: Count
    upper: Probability

    def __post_init__(self) -> None:
        record.check(self)


@dataclass(frozen=True)
class Certificate:
    """Holds for the model files of `model_sha256` and the strata named, nothing else."""

    bundle: str
    """Name and version, for people."""
    model_sha256: Hex64
    """`Manifest.model_sha256`: graphs, tokenizer and operating points."""
    score_version: int
    escape: Open
    """P(PASS | defective), and not defective parts per outgoing parts."""
    confidence: Open
    """Of all claims together."""
    look: Annotated[int, Limit(1)]
    """How many times parts of this set had been used, this one included."""
    temperatures: Mapping[str, Annotated[float, Limit(0.01, 100.0)]]
    """Check -> what its log-odds are divided by."""
    limit_pass: float
    """PASS needs a part score strictly below; the smallest `limit` of the claims."""
    limit_fail: float | None
    """At most `overkill_target` of the good parts score above; None: too few to tell."""
    overkill_target: Open
    claims: tuple[Claim, ...]
    overkill: Share
    """Good parts that FAIL."""
    unsure: Share
    """Good parts that are UNSURE."""
    families: Mapping[str, tuple[str, ...]]
    """Check -> workpieces it was shown for."""
    simulated: bool
    """Shown on simulated parts, for simulated scans only; or on real ones, for real scans only."""
    dataset_sha256: Hex64
    provenance: Mapping[str, int]
    """Where the parts came from -> number."""
    label_protocol: str
    """How the truth of the parts was found."""
    valid_from: Time
    expires: Time
    rules: Mapping[str, float] = field(default_factory=dict)
    """Limits that the products had, by name; a product must be at least as strict."""
    promised: Mapping[str, NotNegative] = field(default_factory=dict)
    """Defect class -> size from which the claim counts defects; empty: of every size."""
    promised_unit: Literal["mm", "px"] = "mm"
    """px: camera pixels on the part, so that the size grows with the part and its field."""
    kappa: float | None = None
    """Agreement of two blind labellers; None: not measured."""
    void_if: tuple[Change, ...] = CHANGES
    schema: Literal["forge-station.certificate/1.0"] = "forge-station.certificate/1.0"

    def __post_init__(self) -> None:
        record.check(self)
        faults = [*self._faults_of_claims(), *self._faults_of_strata()]
        if self.expires <= self.valid_from:
            faults.append(Fault("expires", self.expires, f"after {self.valid_from}"))
        if faults:
            raise ContractError("the certificate is not valid", which=self.bundle, faults=faults)

    def _faults_of_claims(self) -> list[Fault]:
        """The figures must carry what is claimed: checked again wherever a certificate is read."""
        faults = []
        for n, claim in enumerate(self.claims):
            found = binomial.cdf(claim.rank - 1, claim.defective, self.escape)
            if found > claim.delta + _ROUNDING or claim.escapes >= claim.rank:
                needed = binomial.needed(self.escape, claim.delta, claim.rank - 1)
                got = f"{claim.defective} parts, rank {claim.rank}, {claim.escapes} escapes"
                allowed = f"{needed} parts for escape {self.escape:g}, escapes below the rank"
                faults.append(Fault(f"claims[{n}]", got, allowed))
        risk = sum(claim.delta for claim in self.claims)
        allowed_risk = binomial.look_delta(1.0 - self.confidence, self.look)
        if not self.claims or risk > allowed_risk + _ROUNDING:
            allowed = f"one or more, risk at most {allowed_risk:.4g} at look {self.look}"
            faults.append(Fault("claims", f"{len(self.claims)} with risk {risk:.4g}", allowed))
        limits = [claim.limit for claim in self.claims]
        if limits and self.limit_pass > min(limits):
            allowed = f"at most {min(limits):g}, the smallest limit of a claim"
            faults.append(Fault("limit_pass", f"{self.limit_pass:g}", allowed))
        if self.limit_fail is not None and self.limit_fail < self.limit_pass:
            allowed = f"at least limit_pass, {self.limit_pass:g}"
            faults.append(Fault("limit_fail", f"{self.limit_fail:g}", allowed))
        return faults

    def _faults_of_strata(self) -> list[Fault]:
        claimed = {check for claim in self.claims for check in claim.checks}
        return [
            Fault(f"{name}", ", ".join(sorted(named)), f"the checks of the claims: {shown}")
            for name, named in (
                ("families", set(self.families)),
                ("temperatures", set(self.temperatures)),
            )
            if named != claimed and (shown := ", ".join(sorted(claimed)))
        ]

    @cached_property
    def sha256(self) -> str:
        """Digest of the canonical form: names the certificate."""
        return hashlib.sha256(canonical(self)).hexdigest()

    @property
    def text(self) -> str:
        """One line for people."""
        parts = sum(claim.defective for claim in self.claims)
        kind = "simulated parts only" if self.simulated else "real parts"
        return (
            f"escape <= {100 * self.escape:g} % ({100 * self.confidence:g} %), "
            f"{parts} defective parts, {kind}, until {self.expires[:10]}"
        )


def canonical(certificate: Certificate) -> bytes:
    """The bytes that are signed: JSON with sorted keys, no spaces, ASCII."""
    data = record.write(certificate)
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


@dataclass(frozen=True)
class SignedCertificate:
    """What stands in `certificate.json` of a bundle: the record, and an Ed25519 signature."""

    certificate: Certificate
    key_id: Annotated[str, Limit(pattern="[0-9a-f]{16}", meaning="16 lower-case hex digits")]
    """Start of the SHA-256 of the public key: tells which trusted key to try."""
    signature: Annotated[str, Limit(pattern="[A-Za-z0-9+/]{86}==", meaning="64 bytes as base64")]

    def __post_init__(self) -> None:
        record.check(self)

    def to_json(self) -> bytes:
        return (json.dumps(record.write(self), indent=1, sort_keys=True) + "\n").encode()


def parse(content: bytes, which: str = CERTIFICATE_NAME) -> SignedCertificate:
    """The signed certificate from the bytes of its file. Raises ContractError; checks no key."""
    try:
        data = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ContractError("the certificate is not JSON", which=which, got=error) from error
    return record.read(SignedCertificate, data)


def objections(
    certificate: Certificate,
    *,
    model_sha256: str,
    score_version: int,
    now: datetime,
    changed: Collection[str] = (),
) -> tuple[str, ...]:
    """Why the certificate does not hold for this bundle at this time; empty: it holds."""
    found = []
    if certificate.model_sha256 != model_sha256:
        found.append(
            f"it was made for other model files ({certificate.model_sha256[:12]}..., "
            f"the bundle has {model_sha256[:12]}...)"
        )
    if certificate.score_version != score_version:
        found.append(
            f"it was made with score version {certificate.score_version}, "
            f"this station has {score_version}"
        )
    stamp = now.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    if stamp < certificate.valid_from:
        found.append(f"it holds from {certificate.valid_from} on, and it is {stamp}")
    if stamp >= certificate.expires:
        found.append(f"it expired on {certificate.expires}")
    voiding = [name for name in certificate.void_if if name in changed]
    if voiding:
        found.append(f"it is void: {', '.join(voiding)} changed since it was made")
    return tuple(found)


def uncovered(
    certificate: Certificate, product: Product, families: Collection[str], simulated: bool
) -> str | None:
    """Why the certificate says nothing about this product and scan; None: it covers them."""
    if simulated != certificate.simulated:
        kinds = {True: "simulated", False: "real"}
        return f"it covers {kinds[certificate.simulated]} scans, and this one is {kinds[simulated]}"
    for check in product.checks:
        if check not in certificate.families:
            return f"it does not cover the {check} check"
        strange = sorted(set(families) - set(certificate.families[check]))
        if strange or not families:
            named = ", ".join(strange) or "a product without parts"
            return f"its {check} check does not cover {named}"
    for name, limit in certificate.rules.items():
        own = getattr(product.rules, name, None)
        if own is None or own < limit:
            return f"it was made with {name} {limit:g}, the product has {own}"
    return None
