"""One input of an offline inspection -> one verdict, by the kind of the input.

Composes sources and pipeline. Knows no command line and writes no files; data that cannot be used
ends in an ERROR verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from forge_station import checks, sources
from forge_station.capture import fusion, structured_light
from forge_station.capture.base import Cloud, Scan
from forge_station.capture.health import plane_residual
from forge_station.contract.catalogue import CATALOGUE
from forge_station.contract.spec import Product
from forge_station.contract.verdict import ScanSummary, Verdict
from forge_station.contract.views import MARKS, VIEWS, Layout
from forge_station.errors import InputError, ScanError, StationError
from forge_station.evidence import ReadyViews
from forge_station.geometry import gauge, quality, scene, view_images
from forge_station.geometry.gauge import Size
from forge_station.geometry.pose import PartCloud
from forge_station.geometry.problem import Problem
from forge_station.geometry.view_images import ByteImage
from forge_station.mes.stamp import utc_now, uuid7
from forge_station.pipeline import Inspection, Inspector, Job, figures
from forge_station.sources import Item, Options
from forge_station.timing import Stopwatch

# Half the thickness, in camera pixels, of what counts as one plane.
_PLANE_PX = 2.5
# A part this many times longer or shorter than every catalogue model cannot be one of them.
_SIZE_FACTOR = 1.5
_DISPLAY = Layout(panel=448)


@dataclass(frozen=True)
class Request:
    """What all inputs of a command have in common. `product` None: read only."""

    options: Options
    product: Product | None = None
    line: str = ""
    seed: int = 0
    direct: bool = False


@dataclass(frozen=True)
class Found:
    """An inspection, and the views to show where the part came without a cloud."""

    inspection: Inspection
    ready: Mapping[str, ReadyViews] | None = None

    @property
    def verdict(self) -> Verdict:
        return self.inspection.verdict


def inspect(inspector: Inspector, item: Item, request: Request) -> Found:
    """One input to one verdict. Data that cannot be used ends in an ERROR verdict, not raised."""
    watch = Stopwatch()
    job = replace(job_of(item.name, request), source=str(item.path))
    try:
        found = _inspected(inspector, item, request, job, watch)
    except StationError as error:
        found = Found(inspector.failed(job, error, watch))
    except OSError as error:
        refused = InputError(
            "input cannot be read", which=error.filename or item.path, got=error.strerror
        )
        found = Found(inspector.failed(job, refused, watch))
    verdict = replace(found.verdict, end_time=utc_now(), timings_ms=watch.timings_ms())
    return replace(found, inspection=replace(found.inspection, verdict=verdict))


def job_of(name: str, request: Request) -> Job:
    """A job for a part that nothing triggered; its serial is the name of the input."""
    return Job(
        result_id=uuid7(),
        serial=name,
        product=request.product,
        begin_time=utc_now(),
        line=request.line,
        serial_source="none",
    )


def _inspected(
    inspector: Inspector, item: Item, request: Request, job: Job, watch: Stopwatch
) -> Found:
    options = request.options
    match item.kind:
        case "recording" | "gray code":
            with watch.stage("capture"):
                stacks = sources.read_stacks(item, options)
            bare = options.frame == "part"
            return Found(from_stacks(inspector, stacks, job, watch, bare=bare))
        case "cloud":
            with watch.stage("capture"):
                cloud, source = sources.read_cloud(item, options)
            job = replace(job, source=source)
            known = {"auto": None, "tray": False, "part": True}[options.frame]
            return Found(_from_cloud(inspector, cloud, job, watch, bare=known))
        case "mesh":
            return Found(_from_mesh(inspector, item, request, job, watch))
        case "views" | "photo":
            return _from_images(inspector, item, options.mm_per_px, job, watch)


def from_stacks(
    inspector: Inspector,
    given: sources.Stacks,
    job: Job,
    watch: Stopwatch | None = None,
    *,
    bare: bool = False,
) -> Inspection:
    """Decode and fuse pattern stacks, say how flat the largest plane is, inspect the cloud.

    Raises StationError where stacks and calibrations do not belong together.
    """
    watch = watch or Stopwatch()
    job = replace(job, source=given.source, simulated=given.simulated)
    with watch.stage("decode"):
        gates = inspector.gates.decoding
        scans = structured_light.decode_all(given.stacks, given.calibrations, gates)
        cloud = fusion.fuse(scans, inspector.fusion)
    digests = sorted({stack.calibration_digest for stack in given.stacks})
    calibration = "+".join(digest[:16] for digest in digests)
    found = _from_cloud(inspector, cloud, job, watch, bare=bare, calibration=calibration)
    with watch.stage("plane"):
        plane = _plane_figures(scans)
    summary = found.verdict.scan
    summary = replace(summary, quality={**summary.quality, **plane})
    return replace(found, verdict=replace(found.verdict, scan=summary))


def _plane_figures(scans: Sequence[Scan]) -> dict[str, float]:
    """How flat the largest plane in the worst pose is; empty where no pose has a plane."""
    residuals = []
    for scan in scans:
        try:
            residuals.append(plane_residual(scan, _PLANE_PX * scan.camera_pixel_mm))
        except ScanError:
            continue
    if not residuals:
        return {}
    found = max(residuals, key=lambda residual: residual.std_mm)
    return {
        "plane_points": float(found.points),
        "plane_distance_mm": round(found.distance_mm, 2),
        "plane_residual_std_mm": round(found.std_mm, 4),
        "plane_residual_robust_mm": round(found.robust_mm, 4),
    }


def _from_cloud(
    inspector: Inspector,
    cloud: Cloud,
    job: Job,
    watch: Stopwatch,
    *,
    bare: bool | None,
    calibration: str | None = None,
) -> Inspection:
    """`bare` True: one part without a tray; False: a tray must be there; None: as it is found."""
    source = job.source
    with watch.stage("scene"):
        found = scene.separate(cloud, max_marks=len(MARKS)) if not bare else _alone(cloud, job)
        if bare is None and any(problem.code == "NO_TRAY" for problem in found.problems):
            found = _alone(cloud, job)
            bare = True
    if bare:
        source = f"{source}; one bare part without a tray, laid on its flattest side"
    with watch.stage("gate"):
        problems = quality.gate(cloud, found, inspector.gates.scene)
        problems = (*problems, *_size_problems(found.parts))
    summary = ScanSummary(
        points=len(cloud.points),
        quality=figures(cloud),
        flags=tuple(cloud.quality.flags),
        source=source,
        poses=cloud.poses,
        camera_pixel_mm=cloud.camera_pixel_mm,
        calibration=calibration,
    )
    return inspector.inspect_parts(job, found.parts, summary, problems, watch)


def _alone(cloud: Cloud, job: Job) -> scene.Scene:
    try:
        part = scene.single(cloud.points, cloud.camera_pixel_mm)
    except ValueError as error:
        raise ScanError("the cloud is no part", which=job.serial, got=error) from error
    return scene.Scene((part,), (), None)


def _size_problems(parts: Sequence[PartCloud]) -> list[Problem]:
    """Parts far larger or smaller than everything the catalogue has: most likely a wrong unit."""
    return [
        problem
        for mark, part in zip(MARKS, parts, strict=False)
        for problem in _size_problem(mark, gauge.measure(part).box)
    ]


def _size_problem(mark: str, box: tuple[float, float, float]) -> list[Problem]:
    longest = [max(model.extents) for model in CATALOGUE]
    low, high = min(longest) / _SIZE_FACTOR, max(longest) * _SIZE_FACTOR
    if low <= max(box) <= high:
        return []
    measured = " x ".join(f"{value:.3g}" for value in box)
    text = (
        f"{mark} measures {measured} mm; parts of the catalogue are {min(longest):.3g} to "
        f"{max(longest):.3g} mm long, so it was not read; check the unit, and what was scanned"
    )
    return [Problem("NOT_CHECKED", text, "ERROR")]


def _from_mesh(
    inspector: Inspector, item: Item, request: Request, job: Job, watch: Stopwatch
) -> Inspection:
    with watch.stage("capture"):
        mesh = sources.read_mesh(item, request.options)
    source = "; ".join([str(item.path), *mesh.notes])
    missing = "as asked for"
    if not request.direct:
        field_mm = request.product.field_mm if request.product is not None else None
        try:
            with watch.stage("capture"):
                stacks = sources.scanned(mesh, request.seed, field_mm, source)
            return from_stacks(inspector, stacks, job, watch)
        except ModuleNotFoundError as error:
            missing = f"for want of {error.name} (extra `demo`)"
    with watch.stage("capture"):
        points, spacing_mm = sources.sampled(mesh, request.seed, source)
    told = f"{source}: surface of the mesh sampled, not scanned, {missing}"
    cloud = Cloud(points.astype("float32"), None, spacing_mm, frame="unknown")
    return _from_cloud(inspector, cloud, replace(job, source=told), watch, bare=True)


def _from_images(
    inspector: Inspector, item: Item, mm_per_px: float | None, job: Job, watch: Stopwatch
) -> Found:
    """Read the part on ready views or a photo. Never a PASS: no bundle is qualified for them."""
    mark, scale, box = MARKS[0], mm_per_px or 1.0, None
    with watch.stage("capture"):
        views = sources.read_views(item)
        if mm_per_px is not None and item.kind == "views":
            box = view_images.size_of(views, mm_per_px, item.path)
    told = "ready views were" if item.kind == "views" else "a photo was"
    text = f"{told} read, not a scan; the model is not qualified for that: a hint, no decision"
    problems = [Problem("NOT_CHECKED", text, "UNSURE")]
    problems += _size_problem(mark, box) if box is not None else []
    names = ", ".join(path.name for path in item.paths.values())
    job = replace(job, source=f"{names}: {item.kind}")
    summary = ScanSummary(points=0, source=job.source)
    found = Found(
        inspector.inspect_parts(job, (), summary, problems, watch), _shown(views, mm_per_px, mark)
    )
    if any(problem.level == "ERROR" for problem in problems):
        return found
    size = Size(*(box or (0.0, 0.0, 0.0)), uncertainty_mm=2 * scale)
    model, thresholds, budget_s = inspector.model, inspector.thresholds, inspector.time_budget_s
    with watch.stage("read"):
        picture = view_images.marks_sheet(views, scale, inspector.layout)
        read = checks.read_marks(model, picture, {mark: size}, {})
    with watch.stage("surface"):
        panels = view_images.surface_picture(views, scale, inspector.layout)
        looked = checks.read_surface(
            model, panels, mark, read.parts[0].part, size, thresholds, budget_s
        )
    verdict = replace(
        found.verdict,
        parts=tuple(replace(part, size_mm=box, points=None) for part in read.parts),
        surface=(looked.reading,),
        grids=tuple(grid for grid in looked.grids if grid.view in views),
    )
    return replace(found, inspection=replace(found.inspection, verdict=verdict))


def _shown(
    views: Mapping[str, ByteImage], mm_per_px: float | None, mark: str
) -> dict[str, ReadyViews]:
    """The panels that the surface check looks at, larger: a defect grid covers them as a whole."""
    picture = view_images.surface_picture(views, mm_per_px or 1.0, _DISPLAY)
    side = _DISPLAY.panel
    panels = {view: picture.image[:, k * side : (k + 1) * side] for k, view in enumerate(VIEWS)}
    shown = {view: panels[view] for view in views}
    return {mark: ReadyViews(shown, picture.mm_per_px, metric=mm_per_px is not None)}
