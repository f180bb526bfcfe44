"""One part: pattern stacks or a cloud -> verdict, timed per stage. The hot path, without I/O.

The scanner, the publisher and the evidence are passed in or follow later; this module imports
neither drivers nor MQTT. Whatever stops a check ends in UNSURE or ERROR, never in PASS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge_station import checks
from forge_station.capture import fusion, structured_light
from forge_station.capture.base import Cloud, PatternStack, Scan
from forge_station.capture.calibration import Calibration
from forge_station.capture.fusion import Fusion
from forge_station.checks import Thresholds
from forge_station.contract import spec
from forge_station.contract.spec import Product, Reading
from forge_station.contract.verdict import (
    GATE,
    CheckResult,
    GridReading,
    ModelUsed,
    Outcome,
    PartReading,
    Reason,
    ScanSummary,
    SurfaceReading,
    Verdict,
    decide,
)
from forge_station.contract.views import DIFFERENCE, MARKS, NANO_LAYOUT, Layout
from forge_station.errors import StationError
from forge_station.geometry import quality, reference, scene, sheet, surface
from forge_station.geometry.pose import PartCloud
from forge_station.geometry.problem import Problem
from forge_station.geometry.reference import Reference
from forge_station.permit import Permit
from forge_station.timing import Stopwatch
from forge_station.vlm.grid_readout import Readout
from forge_station.vlm.model import VisionLanguageModel

_SHARES = ("valid", "decoded", "saturated", "dark", "inconsistent", "flying")
_FIGURES = (
    *(f"{name}_share" for name in _SHARES),
    *("reprojection_px", "motion_px", "blur_px", "residual_mm", "shift_mm", "turn_deg"),
)


@dataclass(frozen=True)
class Gates:
    """What a scan must reach, in the decoder and in the scene."""

    decoding: structured_light.Limits = field(default_factory=structured_light.Limits)
    scene: quality.Limits = quality.DEFAULT_LIMITS


@dataclass(frozen=True)
class Job:
    """What a trigger asked for. `product` None: read only, nothing to compare with."""

    result_id: str
    serial: str
    product: Product | None
    begin_time: str = ""
    line: str = ""
    station: str = ""
    serial_source: str = "counter"
    simulated: bool = False
    source: str = ""


@dataclass(frozen=True)
class Inspection:
    """A verdict and what it was made from (for the picture and the evidence)."""

    verdict: Verdict
    parts: tuple[PartCloud, ...]
    surface_pictures: Mapping[str, sheet.Sheet]
    """Mark -> picture, for parts whose surface was looked at."""
    marks_picture: sheet.Sheet | None = None
    """The marks sheet that was read; None when nothing was."""
    closer_looks: Mapping[str, surface.CloserLook] = field(default_factory=dict)
    """Mark -> second picture, for surfaces that were looked at twice."""
    problems: tuple[Problem, ...] = ()
    """What the gate found, or what kept the data from being used at all."""


@dataclass(frozen=True)
class Inspector:
    """The model and its operating points: everything that stays from part to part."""

    model: VisionLanguageModel
    thresholds: Thresholds = field(default_factory=Thresholds)
    layout: Layout = NANO_LAYOUT
    time_budget_s: float = 10.0
    grid: Readout = "rows"
    references: Mapping[str, Reference] = field(default_factory=dict)
    """Part id -> the sound part, for models that are shown the difference from it."""
    permit: Permit = field(default_factory=Permit)
    """By default nothing may pass: see `permit.Permit`."""
    fusion: Fusion = field(default_factory=Fusion)
    gates: Gates = field(default_factory=Gates)

    def surface(self, part: PartCloud, name: str) -> surface.Surface:
        """What the surface check sees of a part that reads `name`."""
        if DIFFERENCE not in self.model.manifest.surface_channels:
            return surface.look(part.points, self.layout, height=True)
        return surface.look(part.points, self.layout, self.references.get(name))

    def _unknown(self, readings: Sequence[PartReading]) -> list[Reason]:
        """Parts whose surface was judged without the reference that the model counts on."""
        if DIFFERENCE not in self.model.manifest.surface_channels:
            return []
        return [
            Reason("NO_REFERENCE", f"{r.mark}: the bundle has no reference of {r.part}", r.mark)
            for r in readings
            if r.part not in self.references
        ]

    def inspect_stacks(
        self,
        job: Job,
        stacks: Sequence[PatternStack] | Sequence[Scan],
        calibrations: Mapping[str, Calibration],
        watch: Stopwatch | None = None,
    ) -> Inspection:
        """Decode and fuse the pattern stacks of all head poses, then `inspect_cloud`.

        Scans of heads that measure by themselves are fused as they are.
        """
        watch = watch or Stopwatch()
        try:
            with watch.stage("decode"):
                scans = [item for item in stacks if isinstance(item, Scan)]
                raw = [item for item in stacks if isinstance(item, PatternStack)]
                scans += structured_light.decode_all(raw, calibrations, self.gates.decoding)
            with watch.stage("fuse"):
                cloud = fusion.fuse(scans, self.fusion)
        except StationError as error:
            return self.failed(job, error, watch)
        digests = sorted({item.calibration_digest for item in stacks} - {""})
        digest = "+".join(d[:16] for d in digests) or None
        return self.inspect_cloud(job, cloud, watch, calibration=digest)

    def inspect_cloud(
        self,
        job: Job,
        cloud: Cloud,
        watch: Stopwatch | None = None,
        calibration: str | None = None,
    ) -> Inspection:
        """Separate the parts of a fused cloud (tray frame), then `inspect_parts`."""
        watch = watch or Stopwatch()
        with watch.stage("scene"):
            found = scene.separate(cloud, max_marks=len(MARKS))
        with watch.stage("gate"):
            problems = quality.gate(cloud, found, self.gates.scene)
        summary = ScanSummary(
            points=len(cloud.points),
            quality=figures(cloud),
            flags=tuple(cloud.quality.flags),
            source=job.source,
            poses=cloud.poses,
            camera_pixel_mm=cloud.camera_pixel_mm,
            calibration=calibration,
        )
        return self.inspect_parts(job, found.parts, summary, problems, watch)

    def inspect_parts(
        self,
        job: Job,
        parts: Sequence[PartCloud],
        summary: ScanSummary,
        problems: Sequence[Problem],
        watch: Stopwatch | None = None,
    ) -> Inspection:
        """Read, judge and decide on parts that are separated and aligned already."""
        watch = watch or Stopwatch()
        results = [gate_result(problems)]
        readings: tuple[PartReading, ...] = ()
        surfaces: list[checks.SurfaceRead] = []
        pictures: dict[str, sheet.Sheet] = {}
        picture: sheet.Sheet | None = None
        stopped = any(problem.level == "ERROR" for problem in problems)
        if not stopped and 0 < len(parts) <= len(MARKS):
            try:
                with watch.stage("gauge"):
                    sizes = checks.measured(parts)
                with watch.stage("views"):
                    columns = checks.columns_of(len(parts), self.layout)
                    clouds = [part.points for part in parts]
                    picture = sheet.marks_sheet(clouds, columns, self.layout)
                points = {MARKS[i]: len(part.points) for i, part in enumerate(parts)}
                with watch.stage("read"):
                    read = checks.read_marks(self.model, picture, sizes, points)
                readings = read.parts
                if job.product is not None:
                    with watch.stage("judge"):
                        result, readings = self._judge(job.product, read, sizes)
                    if result.check in job.product.checks:
                        results.append(result)
                if job.product is None or "surface" in job.product.checks:
                    misfits: list[Reason] = []
                    for mark, part in zip(sizes, parts, strict=True):
                        name = next(r.part for r in read.parts if r.mark == mark)
                        with watch.stage("views"):
                            seen = self.surface(part, name)
                            pictures[mark] = seen.picture
                        misfits += misfit_reasons(mark, name, seen)
                        with watch.stage("surface"):
                            surfaces.append(
                                checks.read_surface(
                                    self.model, pictures[mark], mark, name, sizes[mark],
                                    self.thresholds, self.time_budget_s,
                                    closer=seen.closer_look, grid=self.grid,
                                )
                            )  # fmt: skip
                    if job.product is not None:
                        # What was compared with a reference that does not fit decides nothing.
                        off = {reason.mark for reason in misfits}
                        sound = [item for item in surfaces if item.reading.mark not in off]
                        result = checks.surface_result(sound, job.product, self.thresholds)
                        doubts = [*self._unknown(readings), *misfits]
                        results.append(checks.with_doubts(result, doubts))
            except StationError as error:
                results = [results[0], *_failed_checks(job, error)]
        verdict = self._verdict(
            job,
            results,
            summary,
            watch,
            parts=readings,
            surface=tuple(item.reading for item in surfaces),
            grids=tuple(grid for item in surfaces for grid in item.grids),
        )
        looks = {read.reading.mark: read.closer for read in surfaces if read.closer is not None}
        return Inspection(verdict, tuple(parts), pictures, picture, looks, tuple(problems))

    def failed(self, job: Job, error: StationError, watch: Stopwatch | None = None) -> Inspection:
        """The ERROR verdict of a part whose data could not be used at all."""
        problems = (Problem(error.code, str(error), "ERROR"),)
        summary = ScanSummary(points=0, source=job.source)
        verdict = self._verdict(job, [gate_result(problems)], summary, watch or Stopwatch())
        return Inspection(verdict, (), {}, problems=problems)

    def _judge(
        self, product: Product, read: checks.MarksRead, sizes: Mapping[str, Any]
    ) -> tuple[CheckResult, tuple[PartReading, ...]]:
        """The specification's result, the model's own answer beside it, parts marked FAIL."""
        judgement = spec.evaluate(
            product, {part.mark: Reading(part.part, part.probability) for part in read.parts}
        )
        result = checks.workpiece_result(judgement, read, sizes, product, self.thresholds)
        if product.kind != "single":
            judged = checks.judge_marks(self.model, read, product)
            doubts = checks.judged_doubts(judged, judgement, product, self.thresholds)
            score = judged.score if product.kind == "assembly" else None
            result = checks.with_doubts(result, doubts, score, judged.letter)
        marked = tuple(
            PartReading(
                part.mark, part.workpiece, part.model_number, part.probability,
                part.alternatives, part.size_mm, part.points, judgement.outcome_of(part.mark),
            )
            for part in read.parts
        )  # fmt: skip
        return result, marked

    def _verdict(
        self,
        job: Job,
        results: Sequence[CheckResult],
        summary: ScanSummary,
        watch: Stopwatch,
        *,
        parts: tuple[PartReading, ...] = (),
        surface: tuple[SurfaceReading, ...] = (),
        grids: tuple[GridReading, ...] = (),
    ) -> Verdict:
        required = job.product.checks if job.product is not None else ("workpiece",)
        checked = list(results)
        if job.product is None and [item.outcome for item in checked] == [Outcome.PASS]:
            text = "no part number was given, so there is nothing to compare the readings with"
            checked.append(CheckResult("workpiece", Outcome.UNSURE, (Reason("NOT_CHECKED", text),)))
        asked = job.product.parts if job.product is not None else {}
        named = asked or [part.part for part in parts]
        families = {part.partition(" ")[0] for part in named}
        said, last = self.permit.judge(job.product, families, job.simulated, checked)
        checked += [] if last is None else [last]
        manifest = self.model.manifest
        return decide(
            required=required,
            checks=checked,
            scan=summary,
            result_id=job.result_id,
            serial=job.serial,
            product=job.product.part_number if job.product is not None else "none",
            parts=parts,
            surface=surface,
            grids=grids,
            model=ModelUsed(
                name=manifest.name,
                version=manifest.version,
                release_counter=manifest.release_counter,
                sha256=manifest.sha256,
                precision=manifest.precision,
                provider=self.model.provider,
            ),
            certification=said,
            line=job.line,
            station=job.station,
            serial_source=job.serial_source,
            simulated=job.simulated,
            begin_time=job.begin_time,
            timings_ms=watch.timings_ms(),
        )


def gate_result(problems: Sequence[Problem]) -> CheckResult:
    """The scan gate: PASS without problems, else the worst level with all reasons."""
    reasons = tuple(Reason(problem.code, problem.text) for problem in problems)
    if not reasons:
        return CheckResult(GATE, Outcome.PASS)
    worst = any(problem.level == "ERROR" for problem in problems)
    return CheckResult(GATE, Outcome.ERROR if worst else Outcome.UNSURE, reasons)


def figures(cloud: Cloud) -> dict[str, float]:
    """Quality of a scan as numbers of the verdict."""
    found = {name: getattr(cloud.quality, name) for name in _FIGURES}
    return {name: round(float(value), 5) for name, value in found.items() if value is not None}


def misfit_reasons(mark: str, name: str, seen: surface.Surface) -> list[Reason]:
    """Why the comparison of a part with its reference is unsound, if it is."""
    limit = reference.misfit_limit(seen.views, len(seen.points))
    if seen.fit is None or seen.fit.misfit <= limit:
        return []
    text = (
        f"{mark} lies {seen.fit.misfit:.1f} picture pixels off the reference of {name} on average "
        f"(limit {limit:g}): another part, or too few points to compare; look, and scan again"
    )
    return [Reason("REFERENCE_MISFIT", text, mark)]


def _failed_checks(job: Job, error: StationError) -> list[CheckResult]:
    required = job.product.checks if job.product is not None else ("workpiece",)
    return [
        CheckResult(name, Outcome.ERROR, (Reason(error.code, str(error)),)) for name in required
    ]
