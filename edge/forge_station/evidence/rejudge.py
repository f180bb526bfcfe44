"""Judges a stored part again, and says how two verdicts differ. It opens no bundle.

With the bundle of the record the verdict must come out the same, byte for byte. What cannot be the
same is put in from the record: when the part came, when it was done, how long the stages took.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forge_station.capture import replay
from forge_station.contract.error import ContractError
from forge_station.contract.verdict import Verdict
from forge_station.errors import InputError
from forge_station.evidence.case import Case
from forge_station.evidence.files import json_bytes
from forge_station.pipeline import Inspector
from forge_station.timing import Stopwatch

_VERDICT, _CASE, _STACK = ".verdict.json", ".case.npz", ".stack"


@dataclass(frozen=True)
class StoredPart:
    """A part as it was kept: the verdict of then, and the case it was made from."""

    verdict: Verdict
    case: Case
    stack: Path | None = None
    """Folder of its pattern images, where they were kept."""


@dataclass(frozen=True)
class Change:
    """One thing that two verdicts say differently."""

    what: str
    before: str
    now: str


def load(file: Path) -> StoredPart:
    """The stored part whose verdict or case this is; the other lies beside it. InputError."""
    for suffix in (_VERDICT, _CASE):
        if file.name.endswith(suffix):
            name = file.name.removesuffix(suffix)
            break
    else:
        raise InputError(
            "not a file of a stored part", which=file, expected=f"NAME{_VERDICT} or NAME{_CASE}"
        )
    verdict_file, case_file = (file.with_name(f"{name}{suffix}") for suffix in (_VERDICT, _CASE))
    content = _bytes(verdict_file)
    try:
        verdict = Verdict.from_dict(json.loads(content))
    except (ContractError, ValueError, RecursionError) as error:
        raise InputError("not a verdict", which=verdict_file, got=error) from error
    case = Case.from_bytes(_bytes(case_file), case_file)
    if case.job.result_id != verdict.result_id:
        raise InputError(
            "case and verdict are of different parts",
            which=case_file,
            expected=verdict.result_id,
            got=case.job.result_id,
        )
    stack = file.with_name(f"{name}{_STACK}")
    return StoredPart(verdict, case, stack if stack.is_dir() else None)


def again(part: StoredPart, inspector: Inspector, *, images: bool = False) -> Verdict:
    """The verdict of the same bundle, with the settings of then; times are those of the record.

    `images`: decode the pattern images again as well. Raises InputError without them.
    """
    # A time budget that was kept then is no reason to stop a slower machine now.
    spent = any(reason.code == "MODEL_OVERRUN" for reason in part.verdict.reasons)
    budget_s = part.case.decider.time_budget_s if spent else math.inf
    then = part.case.decider.set(inspector, part.case.job.begin_time, budget_s)
    return _timed(_judged(part, then, images), part.verdict)


def by_another(part: StoredPart, inspector: Inspector, *, images: bool = False) -> Verdict:
    """What an inspector of another bundle, as it is set, says of the part."""
    return _timed(_judged(part, replace(inspector, time_budget_s=math.inf), images), part.verdict)


def same(one: Verdict, other: Verdict) -> bool:
    """Whether two verdicts are the same bytes as JSON."""
    return json_bytes(one.to_dict()) == json_bytes(other.to_dict())


def differences(before: Verdict, now: Verdict) -> list[Change]:
    """What differs, for a person: outcome, reasons, readings, probabilities, grids first."""
    old, new = _facts(before), _facts(now)
    names = dict.fromkeys([*old, *new])
    found = [
        Change(name, old.get(name, "-"), new.get(name, "-"))
        for name in names
        if old.get(name, "-") != new.get(name, "-")
    ]
    if not found and not same(before, now):
        found = [
            Change(name, str(value)[:200], str(now.to_dict()[name])[:200])
            for name, value in before.to_dict().items()
            if value != now.to_dict()[name]
        ]
    return found


def _judged(part: StoredPart, inspector: Inspector, images: bool) -> Verdict:
    case = part.case
    if not images:
        return inspector.inspect_parts(case.job, case.parts, case.scan, case.problems).verdict
    if part.stack is None:
        raise InputError(
            "the pattern images of the part were not kept",
            which=case.job.serial,
            action="set evidence.stacks in the station file, or leave --images out",
        )
    recording = replay.read(part.stack)
    return inspector.inspect_stacks(
        case.job, recording.stacks, recording.calibrations, Stopwatch()
    ).verdict


def _timed(verdict: Verdict, record: Verdict) -> Verdict:
    return replace(verdict, end_time=record.end_time, timings_ms=record.timings_ms)


def _facts(verdict: Verdict) -> dict[str, str]:
    facts = {
        "outcome": str(verdict.outcome),
        "reasons": ", ".join(
            f"{reason.code}{f' {reason.mark}' if reason.mark else ''}" for reason in verdict.reasons
        )
        or "none",
    }
    for part in verdict.parts:
        facts[f"{part.mark} part"] = part.part
        facts[f"{part.mark} probability"] = f"{part.probability:.6f}"
    for surface in verdict.surface:
        facts[f"{surface.mark} surface"] = surface.defect_class
        for name, probability in surface.probabilities.items():
            facts[f"{surface.mark} p({name})"] = f"{probability:.6f}"
        if surface.score is not None:
            facts[f"{surface.mark} score"] = f"{surface.score:.3f}"
    for grid in verdict.grids:
        cells = ", ".join(f"{row}/{column}" for row, column in grid.cells)
        facts[f"{grid.mark} grid {grid.view}"] = f"{len(grid.cells)}: {cells}"[:60]
    for check in verdict.checks:
        odds = "-" if check.log_odds is None else f"{check.log_odds:.4f}"
        facts[f"check {check.check}"] = f"{check.outcome}, log-odds {odds}"
    if verdict.certification is not None:
        facts["certificate"] = verdict.certification.mode
    if verdict.model is not None:
        model = verdict.model
        facts["bundle"] = f"{model.name} {model.version} {model.sha256[:12]} ({model.provider})"
    return facts


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(
            "a file of the stored part is missing or cannot be read",
            which=path,
            got=error.strerror,
            action="parts are kept with their case since evidence has .case.npz",
        ) from error


def figures(verdict: Verdict) -> Mapping[str, Any]:
    """For a line of JSON: the part and what was said of it."""
    return {
        "result_id": verdict.result_id,
        "serial": verdict.serial,
        "product": verdict.product,
        "outcome": str(verdict.outcome),
        "reasons": [reason.code for reason in verdict.reasons],
    }
