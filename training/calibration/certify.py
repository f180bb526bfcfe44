"""Rows of an evaluation -> an unsigned certificate for the bundle that made them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Literal

from forge_station.checks import SCORE_VERSION
from forge_station.contract.certificate import CHANGES, Certificate, Change
from forge_station.contract.manifest import Manifest
from training.calibration import ledger, limits, parts, temperature
from training.calibration.error import CalibrationError
from training.calibration.ledger import Look
from training.calibration.limits import Limits, Target
from training.calibration.parts import PartSet
from training.calibration.temperature import Fit
from training.evaluation.rows import Row

TIME = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True)
class Settings:
    """All that is decided before the scores are seen."""

    target: Target
    ledger: Path
    provenance: str | None = None
    fit_share: float = 0.2
    """Share of the parts that fit the temperatures, where no rows of their own are given."""
    least: int = 5
    """Good and defective parts of each workpiece a check needs to be certified for it."""
    repeats: parts.Repeats = "refuse"
    promised: Mapping[str, float] = field(default_factory=dict)
    promised_unit: Literal["mm", "px"] = "mm"
    label_protocol: str = ""
    kappa: float | None = None
    days: int = 180
    void_if: tuple[Change, ...] = CHANGES


@dataclass(frozen=True)
class Certified:
    """A certificate, and what it was made from (for pictures and reports)."""

    certificate: Certificate
    found: PartSet
    fitted: PartSet
    fits: Mapping[str, Fit]
    limits: Limits

    @property
    def temperatures(self) -> dict[str, float]:
        return dict(self.certificate.temperatures)


def certify(
    rows: list[Row],
    manifest: Manifest,
    settings: Settings,
    now: datetime,
    fit_rows: list[Row] | None = None,
) -> Certified:
    """The certificate. Raises CalibrationError for a claim that the parts cannot carry.

    The look is in the ledger before any score decides anything.
    """
    found = parts.gather(rows, settings.provenance, settings.repeats)
    if fit_rows is not None:
        fitted = parts.gather(fit_rows, settings.provenance, settings.repeats)
    else:
        fitted, found = parts.split(found, settings.fit_share)
    parts.refuse_shared(fitted, found)
    found = parts.promised(found, settings.promised, settings.promised_unit)
    found = parts.common_families(found, settings.least)
    if not found.parts:
        raise CalibrationError(
            "no parts are left", got=", ".join(f"{n} {why}" for why, n in found.left_out.items())
        )
    labels = _labels(found, settings)
    checks = sorted({part.check for part in found.parts})
    fits = {check: temperature.fit(fitted.parts, check) for check in checks}
    temperatures = {check: one.temperature for check, one in fits.items()}
    look = _look(found, manifest, settings, temperatures, now)
    chosen = limits.choose(found, settings.target, look, temperatures)
    target = settings.target
    certificate = Certificate(
        bundle=f"{manifest.name} {manifest.version}",
        model_sha256=manifest.model_sha256,
        score_version=SCORE_VERSION,
        escape=target.escape,
        confidence=target.confidence,
        look=look,
        temperatures=temperatures,
        limit_pass=chosen.limit_pass,
        limit_fail=chosen.limit_fail,
        overkill_target=target.overkill,
        claims=chosen.claims,
        overkill=chosen.overkill,
        unsure=chosen.unsure,
        families=limits.families(found),
        simulated=found.simulated,
        dataset_sha256=found.sha256,
        provenance=limits.origins(found),
        label_protocol=labels,
        valid_from=now.astimezone(timezone.utc).strftime(TIME),
        expires=(now.astimezone(timezone.utc) + timedelta(days=settings.days)).strftime(TIME),
        rules=limits.strictest_rules(found),
        promised=dict(settings.promised),
        promised_unit=settings.promised_unit,
        kappa=settings.kappa,
        void_if=settings.void_if,
    )
    return Certified(certificate, found, fitted, fits, chosen)


def _labels(found: PartSet, settings: Settings) -> str:
    if settings.label_protocol:
        return settings.label_protocol
    if found.simulated:
        return "known from the simulation"
    raise CalibrationError(
        "how the truth of the parts was found is not told",
        expected="--labels 'two people, blind, third decides' or the like",
        got="real parts without it",
    )


def _look(
    found: PartSet,
    manifest: Manifest,
    settings: Settings,
    temperatures: Mapping[str, float],
    now: datetime,
) -> int:
    """The number of this look, entered into the ledger once it is known that it can succeed."""
    looks = ledger.read(settings.ledger)
    claim = f"{settings.target} {sorted(temperatures.items())}"
    key = ledger.key([manifest.model_sha256, claim], found.parts)
    names = ledger.names(found.parts)
    number = ledger.number(looks, key, names)
    limits.require(found, settings.target, number)
    stamp = now.astimezone(timezone.utc).strftime(TIME)
    entry = Look(number, key, stamp, f"{manifest.name} {manifest.version}", claim, names)
    ledger.append(settings.ledger, entry)
    return number
