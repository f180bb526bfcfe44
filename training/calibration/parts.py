"""The parts of a certification set: one line a physical part, with truth, score and origin.

Reads evaluation rows and refuses what no claim may rest on: parts that the station itself selected,
parts of unknown origin, simulated and real ones together, one part counted twice. It knows no
threshold and no certificate.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from forge_station.checks import CERTAIN
from forge_station.permit import part_score
from training.calibration.error import CalibrationError
from training.evaluation.rows import Row

SIMULATED = "simulated"
PROVENANCE: Mapping[str, str] = {
    SIMULATED: "made by training.cases; a claim of its own, never mixed with real parts",
    "manual": "every part of a time window, inspected by people whatever the station said",
    "audit": "drawn at random from the parts that the station passed",
    "challenge": "seeded or challenge parts with a known fault, sent through the line",
    "returns": "parts that a customer sent back",
}
"""Origins that a certificate may rest on."""
BARRED: Mapping[str, str] = {
    "harvested": "found among the station's own FAIL and UNSURE parts: those are the ones that it "
    "finds, so that escapes among them are rare by construction",
}
Repeats = Literal["refuse", "worst"]


@dataclass(frozen=True)
class Part:
    """One physical part or tray as the station's checks saw it, all gates and limits included.

    `passed`: it would be PASS by the checks alone. `log_odds`: check -> log-odds of defective.
    """

    id: str
    check: str
    """The check whose task it was: workpiece, surface or assembly."""
    defective: bool
    passed: bool
    failed: bool
    log_odds: Mapping[str, float]
    families: tuple[str, ...]
    provenance: str
    rules: Mapping[str, float] = field(default_factory=dict)
    defect: str = ""
    size_mm: float | None = None
    size_px: float | None = None

    def score(self, temperatures: Mapping[str, float]) -> float:
        """The part-level score; CERTAIN where a gate stopped the part before it had one."""
        found = part_score(self.log_odds, temperatures)
        return CERTAIN if found is None else min(found, CERTAIN)

    def reach(self, temperatures: Mapping[str, float]) -> float:
        """The limit above which this part would be PASS; CERTAIN where a check stops it anyway."""
        return self.score(temperatures) if self.passed else CERTAIN


@dataclass(frozen=True)
class PartSet:
    """Distinct parts, and how many rows were left out why."""

    parts: tuple[Part, ...]
    left_out: Mapping[str, int]

    @property
    def sha256(self) -> str:
        """Digest of parts, truths and origins; scores do not count, so it names the set."""
        lines = sorted(f"{p.id} {p.check} {p.defective} {p.provenance}" for p in self.parts)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @property
    def simulated(self) -> bool:
        return any(part.provenance == SIMULATED for part in self.parts)

    def of(self, *, defective: bool) -> list[Part]:
        return [part for part in self.parts if part.defective == defective]

    def only(self, parts: Iterable[Part], why: str) -> PartSet:
        """The set with these parts; the others are counted as left out because of `why`."""
        kept = tuple(parts)
        gone = len(self.parts) - len(kept)
        counts = {**self.left_out, why: self.left_out.get(why, 0) + gone}
        return PartSet(kept, {name: count for name, count in counts.items() if count})


def gather(rows: Sequence[Row], provenance: str | None, repeats: Repeats = "refuse") -> PartSet:
    """The distinct parts of evaluation rows. `provenance`: of rows that do not tell their own.

    ERROR rows are in no denominator, but counted. Raises CalibrationError.
    """
    left_out: Counter[str] = Counter()
    parts = []
    for row in rows:
        if row.expected is None:
            left_out["truth not told"] += 1
        elif row.outcome == "ERROR":
            left_out["ERROR"] += 1
        else:
            parts.append(_part(row, provenance))
    if not any(part.log_odds for part in parts):
        raise CalibrationError(
            "the rows have no scores",
            expected="rows with log_odds of cases whose truth is told",
            got=f"{len(rows)} rows, left out {dict(left_out) or 'none'}",
            action="make them with this release: python -m training.evaluate --out ROWS",
        )
    unscored = [part.id for part in parts if part.passed and not part.log_odds]
    if unscored:
        raise CalibrationError("a part passes without a score", which=unscored[0])
    _check_provenance(parts)
    return PartSet(tuple(_distinct(parts, repeats)), dict(left_out))


def _part(row: Row, provenance: str | None) -> Part:
    return Part(
        id=row.part or row.id,
        check=row.task,
        defective=row.expected == "FAIL",
        passed=row.outcome == "PASS",
        failed=row.outcome == "FAIL",
        log_odds=dict(row.log_odds),
        families=tuple(row.families),
        provenance=row.provenance or provenance or "",
        rules=dict(row.rules),
        defect=(row.defect_true or "") if row.task == "surface" else "",
        size_mm=row.defect_size_mm,
        size_px=row.defect_size_px,
    )


def _check_provenance(parts: Sequence[Part]) -> None:
    counts = Counter(part.provenance for part in parts)
    allowed = "; ".join(f"{name}: {text}" for name, text in PROVENANCE.items())
    barred = {name: count for name, count in counts.items() if name in BARRED}
    if barred:
        name, count = next(iter(barred.items()))
        raise CalibrationError(
            "parts that the station selected itself cannot carry a certificate",
            which=f"{count} of {len(parts)} parts, provenance {name}",
            expected=allowed,
            got=BARRED[name],
        )
    unknown = {name: count for name, count in counts.items() if name not in PROVENANCE}
    if unknown:
        name, count = next(iter(unknown.items()))
        raise CalibrationError(
            "where parts come from is not told" if not name else "unknown provenance",
            which=f"{count} of {len(parts)} parts" + (f", {name!r}" if name else ""),
            expected=allowed,
            action="name it in the case files, or with --provenance for all that name none",
        )
    if SIMULATED in counts and len(counts) > 1:
        raise CalibrationError(
            "simulated and real parts are in one set",
            got=", ".join(f"{count} {name}" for name, count in sorted(counts.items())),
            action="certify them apart: a claim from simulated parts holds for simulated scans",
        )


def _distinct(parts: Sequence[Part], repeats: Repeats) -> list[Part]:
    """One entry a physical part. `worst`: of several captures the one that speaks against us."""
    by_id: dict[str, list[Part]] = {}
    for part in parts:
        by_id.setdefault(part.id, []).append(part)
    twice = [name for name, own in by_id.items() if len(own) > 1]
    if twice and repeats == "refuse":
        raise CalibrationError(
            "parts are counted more than once: n is the number of distinct parts",
            which=f"{len(twice)} part ids, such as {twice[0]}",
            action="--repeats worst keeps of each the capture that speaks against the station",
        )
    for name in twice:
        told = {(part.defective, part.check) for part in by_id[name]}
        if len(told) > 1:
            raise CalibrationError(
                "a part has two truths", which=name, got=", ".join(map(str, sorted(told)))
            )
    return [_worst(own) for own in by_id.values()]


def _worst(captures: Sequence[Part]) -> Part:
    if captures[0].defective:
        return min(captures, key=lambda part: part.reach({}))
    return max(captures, key=lambda part: (part.failed, part.score({})))


def split(found: PartSet, share: float) -> tuple[PartSet, PartSet]:
    """(parts for the temperatures, parts for the claims), by a digest of the part's id.

    A part is always on the same side, whatever set it stands in and however often it is captured.
    """
    fit = [part for part in found.parts if _draw(part.id) < share]
    rest = [part for part in found.parts if _draw(part.id) >= share]
    return PartSet(tuple(fit), {}), replace(found, parts=tuple(rest))


def _draw(name: str) -> float:
    return int(hashlib.sha256(f"fit {name}".encode()).hexdigest()[:13], 16) / 16**13


def refuse_shared(fit: PartSet, claims: PartSet) -> None:
    """Raise CalibrationError when a part would both fit temperatures and carry a claim."""
    shared = {part.id for part in fit.parts} & {part.id for part in claims.parts}
    if shared:
        raise CalibrationError(
            "the same parts would fit the temperatures and carry the claim",
            which=f"{len(shared)} parts, such as {min(shared)}",
            action="use other parts for --fit, or let --fit-share divide one set",
        )


def promised(found: PartSet, sizes: Mapping[str, float], unit: str = "mm") -> PartSet:
    """Without the surface defects that are smaller than the size promised for their class."""

    def counts(part: Part) -> bool:
        if part.defect not in sizes:
            return True
        size = part.size_mm if unit == "mm" else part.size_px
        return size is not None and size >= sizes[part.defect]

    return found.only(filter(counts, found.parts), "defect below the promised size")


def common_families(found: PartSet, least: int) -> PartSet:
    """Without parts that ask for a workpiece of which the check has less than `least` of each kind.

    A claim names the workpieces it was shown for; a handful is not shown. Repeated until it holds,
    since a tray that goes takes its other workpieces along.
    """
    while True:
        counts: Counter[tuple[str, bool, str]] = Counter()
        for part in found.parts:
            counts.update((part.check, part.defective, family) for family in part.families)

        def enough(part: Part, counts: Counter[tuple[str, bool, str]] = counts) -> bool:
            return all(
                counts[part.check, defective, family] >= least
                for family in part.families
                for defective in (True, False)
            )

        kept = [part for part in found.parts if enough(part)]
        if len(kept) == len(found.parts):
            return found
        found = found.only(kept, "workpiece with too few parts")
