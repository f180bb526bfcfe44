"""Whether the station may say PASS: the certificate of its bundle, held against every part.

Without a valid certificate a station is advisory: what passes every check becomes UNSURE. It never
makes a FAIL: a score above the limit is a reason to look, not a defect that anyone could name. How
a part is scored is `checks.py`'s; what a certificate says is `contract/certificate.py`'s.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from pathlib import Path

from forge_station import signing
from forge_station.checks import SCORE_VERSION, Thresholds
from forge_station.contract import certificate as contract_certificate
from forge_station.contract.certificate import CERTIFICATE_NAME, Certificate, canonical, objections
from forge_station.contract.error import ContractError
from forge_station.contract.manifest import Manifest
from forge_station.contract.spec import Product
from forge_station.contract.verdict import (
    CERTIFICATE,
    CHECKS,
    Certification,
    CheckResult,
    Outcome,
    Reason,
    combine,
)
from forge_station.signing import PublicKey

_MAX_BYTES = 1_000_000
# Thresholds that only a smaller value makes stricter, in that fewer parts pass.
_STRICTER_BELOW = frozenset(
    {"defect_fail", "defect_unsure", "size_tolerance", "answer_disagree", "token_budget"}
)


def utc_now() -> datetime:
    return datetime.now(timezone.utc)


@dataclass(frozen=True)
class Permit:
    """What a station was permitted when it opened its bundle. The default permits nothing.

    `refusal`: why there is no certificate. `checks_alone`: nothing is permitted or forbidden, the
    checks decide; for evaluations that measure them, and refused by a station.
    """

    certificate: Certificate | None = None
    refusal: str = "no certificate was asked for"
    checks_alone: bool = False
    model_sha256: str = ""
    changed: tuple[str, ...] = ()
    withheld: str | None = None
    """Why a monitor of the running station (the drift watch) takes the permit back for now."""
    clock: Callable[[], datetime] = utc_now

    @property
    def objection(self) -> str | None:
        """Why the station is advisory now; None while its certificate holds."""
        if self.withheld is not None:
            return self.withheld
        if self.certificate is None:
            return self.refusal
        found = objections(
            self.certificate,
            model_sha256=self.model_sha256,
            score_version=SCORE_VERSION,
            now=self.clock(),
            changed=self.changed,
        )
        return "; ".join(found) or None

    @property
    def text(self) -> str:
        """The mode in one line, for people."""
        if self.checks_alone:
            return "the checks alone decide; not for a line"
        objection = self.objection
        if self.certificate is None or objection is not None:
            return f"ADVISORY, no part will be called PASS: {objection}"
        return f"certified, {self.certificate.text}"

    def judge(
        self,
        product: Product | None,
        families: Collection[str],
        simulated: bool,
        results: Sequence[CheckResult],
    ) -> tuple[Certification, CheckResult | None]:
        """What the verdict says of the certificate, and its result for a part that passed.

        `families`: workpieces the product asks for. `results`: of the gate and of all checks.
        Nothing is added to a part that does not pass anyway: its own reasons are the reasons.
        """
        if self.checks_alone:
            return Certification(
                "checks_alone", self.text, part_score(log_odds_of(results), {})
            ), None
        objection, found = self.objection, self.certificate
        if found is None or objection is not None:
            said = Certification("advisory", objection or "", part_score(log_odds_of(results), {}))
            doubt: Reason | None = Reason(
                "NO_CERTIFICATE", f"the station only advises: {objection}"
            )
        else:
            score = part_score(log_odds_of(results), found.temperatures)
            said = Certification(
                "certified", found.text, score, found.limit_pass, found.limit_fail, found.sha256
            )
            doubt = _doubt(found, product, families, simulated, results, score)
        required = product.checks if product is not None else ()
        if not required or combine(required, results)[0] is not Outcome.PASS:
            return said, None
        if doubt is None:
            return said, CheckResult(CERTIFICATE, Outcome.PASS)
        return said, CheckResult(CERTIFICATE, Outcome.UNSURE, (doubt,))


def _doubt(
    found: Certificate,
    product: Product | None,
    families: Collection[str],
    simulated: bool,
    results: Sequence[CheckResult],
    score: float | None,
) -> Reason | None:
    """Why a valid certificate does not let this part pass; None: it does."""
    if product is None:
        return Reason("NOT_COVERED", "the certificate covers no part without a part number")
    strange = contract_certificate.uncovered(found, product, families, simulated)
    scored = log_odds_of(results)
    missing = [check for check in product.checks if check not in scored]
    if strange is None and (missing or score is None):
        strange = f"the {', '.join(missing)} check has no score"
    if strange is not None:
        return Reason("NOT_COVERED", f"the certificate does not apply: {strange}")
    if score is not None and score < found.limit_pass:  # False for NaN
        return None
    text = f"score {score:.2f}, certified to pass below {found.limit_pass:.2f}"
    if found.limit_fail is not None and score is not None and score >= found.limit_fail:
        text += f"; good parts stay below {found.limit_fail:.2f}, yet no check found a fault"
    return Reason("ABOVE_LIMIT", text, score=score)


def log_odds_of(results: Iterable[CheckResult]) -> dict[str, float]:
    """Check -> log-odds that the part is defective, of the checks that have a score."""
    return {
        item.check: item.log_odds
        for item in results
        if item.check in CHECKS and item.log_odds is not None
    }


def part_score(log_odds: Mapping[str, float], temperatures: Mapping[str, float]) -> float | None:
    """The largest of the checks' log-odds, each divided by its temperature (1 where none is)."""
    scores = [value / temperatures.get(check, 1.0) for check, value in log_odds.items()]
    if any(math.isnan(score) for score in scores):  # `max` would take or leave it by its place
        return math.nan
    return max(scores, default=None)


CHECKS_ALONE = Permit(refusal="an evaluation measures the checks", checks_alone=True)


def read_permit(
    bundle: Path,
    manifest: Manifest,
    keys: Sequence[PublicKey],
    released: Thresholds,
    used: Thresholds,
    changed: Sequence[str] = (),
) -> Permit:
    """The permit of an opened bundle. Never raises: what is wrong with its certificate is said.

    `released`: operating points of the bundle, `used`: those of this station. Any that is looser,
    or differs where neither direction is stricter, voids the certificate.
    """
    try:
        with (bundle / CERTIFICATE_NAME).open("rb") as file:
            content = file.read(_MAX_BYTES)
        signed = contract_certificate.parse(content)
    except FileNotFoundError:
        return Permit(refusal=f"the bundle has no {CERTIFICATE_NAME}")
    except OSError as error:
        return Permit(refusal=f"{CERTIFICATE_NAME} cannot be read: {error.strerror}")
    except ContractError as error:
        return Permit(refusal=" ".join(str(error).split()))
    if not keys:
        return Permit(refusal="the station trusts no key (trusted_keys), so no certificate counts")
    signature = base64.b64decode(signed.signature)
    wrong = signing.fault(keys, signed.key_id, signature, canonical(signed.certificate))
    if wrong is not None:
        return Permit(refusal=f"the certificate does not count: {wrong}")
    looser = _looser(released, used)
    if looser:
        return Permit(refusal=f"thresholds that are not stricter void it: {', '.join(looser)}")
    return Permit(
        signed.certificate, "", model_sha256=manifest.model_sha256, changed=tuple(changed)
    )


def _looser(released: Thresholds, used: Thresholds) -> list[str]:
    """Names with their values where the station is not at least as strict as the bundle."""
    found = []
    for field in fields(Thresholds):
        ours, theirs = getattr(used, field.name), getattr(released, field.name)
        stricter = field.name in _STRICTER_BELOW and ours < theirs
        if ours != theirs and not stricter:
            found.append(f"{field.name} {ours:g} for {theirs:g}")
    return found
