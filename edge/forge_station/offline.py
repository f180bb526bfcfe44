"""`forge-station inspect`: parts from files, one verdict each, without scanner and broker.

Composes sources, pipeline and evidence. What stops one input becomes its ERROR verdict; wrong
usage, line or bundle stop the command before anything is inspected.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from forge_station import checks, evidence, sources
from forge_station.capture import base, structured_light
from forge_station.capture.base import Cloud, Scan
from forge_station.capture.health import plane_residual
from forge_station.checks import Thresholds
from forge_station.config import load_line
from forge_station.contract.spec import Product
from forge_station.contract.verdict import (
    GridReading,
    Outcome,
    PartReading,
    ScanSummary,
    SurfaceReading,
    worst,
)
from forge_station.contract.views import MARKS, VIEWS, Layout
from forge_station.errors import BundleError, ConfigError, ScanError, StationError
from forge_station.evidence import ReadyViews
from forge_station.geometry import quality, scene, view_images
from forge_station.geometry.gauge import Size
from forge_station.geometry.problem import Problem
from forge_station.geometry.view_images import ByteImage
from forge_station.mes.stamp import utc_now, uuid7
from forge_station.pipeline import Inspection, Inspector, Job, figures
from forge_station.sources import Item, Options
from forge_station.timing import Stopwatch
from forge_station.vlm.engine import AUTO
from forge_station.vlm.model import VisionLanguageModel

EXIT_CODES: Mapping[Outcome, int] = {
    Outcome.PASS: 0,
    Outcome.FAIL: 1,
    Outcome.UNSURE: 2,
    Outcome.ERROR: 3,
}
_BUNDLE = Path("station_config/demo/bundle")
_OUT = Path("out/inspect")
# Half the thickness, in camera pixels, of what counts as one plane.
_PLANE_PX = 2.5
_DISPLAY_PX = 448

DESCRIPTION = """\
Inspect parts from files: no scanner, no broker. One part an INPUT, one verdict a part.

INPUT is one of
  a recorded scan       folder with manifest.yaml (pattern images and calibrations)
  pattern images        folder of PNGs in projection order, with --calibration: a calibration of
                        this station (.yaml), or an OpenCV FileStorage file with --code-step and
                        --codes (Gray code and inverse in pairs, columns, rows, white, black)
  a cloud               .ply .pcd .npz .xyz .txt .csv .asc, organised or not, on a tray or bare
  a mesh                .obj .stl .ply with faces: laid on a virtual tray, scanned by the simulated
                        head and decoded (extra `demo`); --direct samples its surface instead
  three ready views     images named front, side and top (part-A_front.png ...), one part, one
                        scale: --mm-per-px
  a photo               any other image
Views and photos are read, but never judged: their outcome is UNSURE (NOT_CHECKED).
"""
EPILOG = """\
Without --line and --part-number a part is only read: UNSURE (NOT_CHECKED).

Standard output: one line of JSON a part, the verdict: outcome, reasons, parts (reading, probability
and size of each mark), surface, grids, scan (points, quality, source). The same goes to
OUT/NAME.verdict.json, and a picture for people to OUT/NAME.png.

Exit code: 0 PASS, 1 FAIL, 2 UNSURE, 3 ERROR (of several parts the worst: ERROR, FAIL, UNSURE,
PASS); 64 wrong usage, line file or bundle, nothing was inspected.

Examples:
  forge-station inspect bolt.stl
  forge-station inspect tray.ply --line station_config/demo/line.yaml --part-number KIT-M8
  forge-station inspect recordings/0007 --line line.yaml --part-number BOLT-M10x50 --out evidence
  forge-station inspect capture_0 --calibration calibration.xml --code-step 2 --codes 1024x768
  forge-station inspect nut_front.png nut_side.png nut_top.png --mm-per-px 0.05
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command on its parser. Its formatter should keep the line breaks."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("inputs", nargs="+", type=Path, metavar="INPUT", help="see above")
    parser.add_argument(
        "--bundle", type=Path, default=_BUNDLE, metavar="DIR", help=f"model (default {_BUNDLE})"
    )
    parser.add_argument("--line", type=Path, metavar="FILE", help="line file with the products")
    parser.add_argument("--part-number", metavar="ID", help="the product of that line it should be")
    parser.add_argument(
        "--out", type=Path, default=_OUT, metavar="DIR", help=f"for the files (default {_OUT})"
    )
    scans = parser.add_argument_group("pattern images")
    scans.add_argument("--calibration", type=Path, metavar="FILE", help=".yaml, or OpenCV .xml")
    scans.add_argument(
        "--code-step", type=_whole, metavar="N", help="projector pixels a code (OpenCV file only)"
    )
    scans.add_argument(
        "--codes", type=_size, metavar="COLSxROWS", help="size of the code (OpenCV file only)"
    )
    clouds = parser.add_argument_group("clouds and meshes")
    clouds.add_argument(
        "--unit", choices=("auto", "mm", "m", "cm", "inch"), default="auto",
        help="of the file; auto: what it states, else metre if it is tiny, else mm",
    )  # fmt: skip
    clouds.add_argument(
        "--frame", choices=("auto", "tray", "part"), default="auto",
        help="of a cloud. tray: z = 0 is the tray; part: one bare part; auto: look for a tray",
    )  # fmt: skip
    clouds.add_argument(
        "--camera-pixel", type=_length, metavar="MM", help="of a cloud, if the file has it not"
    )
    clouds.add_argument(
        "--seed", type=_count, default=0, metavar="N", help="how a mesh comes to lie (default 0)"
    )
    clouds.add_argument(
        "--direct", action="store_true", help="sample a mesh's surface, do not scan it"
    )
    images = parser.add_argument_group("views and photos")
    images.add_argument("--mm-per-px", type=_length, metavar="MM", help="their scale")
    model = parser.add_argument_group("model")
    model.add_argument("--threads", type=_whole, default=2, metavar="N", help="default 2")
    model.add_argument("--provider", default=AUTO, help="ONNX Runtime provider (default auto)")


def run(args: argparse.Namespace) -> int:
    """Inspect all inputs; returns the exit code. Raises StationError before the first of them."""
    product, line = _product(args.line, args.part_number)
    options = Options(
        calibration=args.calibration,
        code_step=args.code_step,
        codes=args.codes,
        unit=args.unit,
        frame=args.frame,
        camera_pixel_mm=args.camera_pixel,
        mm_per_px=args.mm_per_px,
    )
    items = sources.items_of(args.inputs, options)
    _make_folder(args.out)
    request = Request(options, product, line, args.seed, args.direct)
    outcomes = []
    inspector = open_inspector(args.bundle, threads=args.threads, provider=args.provider)
    with inspector.model:
        for item in items:
            found = inspect(inspector, item, request)
            verdict = found.inspection.verdict
            outcomes.append(verdict.outcome)
            print(json.dumps(verdict.to_dict(), ensure_ascii=False, allow_nan=False), flush=True)
            png = evidence.picture_of(found.inspection, inspector.layout, ready=found.ready)
            stored = evidence.store_files(args.out, evidence.file_name(item.name), verdict, png)
            for warning in stored.warnings:
                print(f"forge-station: {warning}", file=sys.stderr)
            if stored.picture is not None:
                print(f"{item.name}: {verdict.outcome}, {stored.picture}", file=sys.stderr)
    return EXIT_CODES[worst(outcomes)]


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


def open_inspector(bundle: Path, *, threads: int = 2, provider: str = AUTO) -> Inspector:
    """The bundle's model with its own thresholds and layout. The caller closes `.model`.

    Raises BundleError for a bundle that is incomplete, edited or of another contract.
    """
    model = VisionLanguageModel.open(bundle, threads=threads, provider=provider)
    try:
        thresholds = Thresholds.read(model.manifest.thresholds)
        layout = Layout(
            cell=int(model.manifest.model.get("cell_px", Layout.cell)),
            panel=int(model.manifest.model.get("panel_px", Layout.panel)),
        )
    except (StationError, TypeError, ValueError) as error:
        model.close()
        raise BundleError(
            "the bundle's settings are not valid", which=bundle / "manifest.json", got=error
        ) from error
    return Inspector(model, thresholds, layout)


def inspect(inspector: Inspector, item: Item, request: Request) -> Found:
    """One input to one verdict. Data that cannot be used ends in an ERROR verdict, not raised."""
    watch = Stopwatch()
    job = Job(
        result_id=uuid7(),
        serial=item.name,
        product=request.product,
        begin_time=utc_now(),
        line=request.line,
        serial_source="none",
        source=str(item.path),
    )
    try:
        found = _inspected(inspector, item, request, job, watch)
    except StationError as error:
        found = Found(inspector.failed(job, error, watch))
    verdict = replace(found.inspection.verdict, end_time=utc_now(), timings_ms=watch.timings_ms())
    return replace(found, inspection=replace(found.inspection, verdict=verdict))


def _inspected(
    inspector: Inspector, item: Item, request: Request, job: Job, watch: Stopwatch
) -> Found:
    options = request.options
    match item.kind:
        case "recording" | "gray code":
            with watch.stage("capture"):
                stacks = sources.read_stacks(item, options)
            return Found(_from_stacks(inspector, stacks, job, watch))
        case "cloud":
            with watch.stage("capture"):
                cloud, source = sources.read_cloud(item, options)
            job = replace(job, source=source)
            return Found(_from_cloud(inspector, cloud, job, watch, bare=options.frame == "part"))
        case "mesh":
            return Found(_from_mesh(inspector, item, request, job, watch))
        case "views" | "photo":
            with watch.stage("capture"):
                views = sources.read_views(item)
            return _from_images(inspector, views, options.mm_per_px, item, job, watch)


def _from_stacks(
    inspector: Inspector, given: sources.Stacks, job: Job, watch: Stopwatch
) -> Inspection:
    job = replace(job, source=given.source, simulated=given.simulated)
    with watch.stage("decode"):
        scans = structured_light.decode_all(given.stacks, given.calibrations)
        cloud = base.fuse(scans)
    digests = sorted({stack.calibration_digest for stack in given.stacks})
    calibration = "+".join(digest[:16] for digest in digests)
    if cloud.frame == "tray":
        found = inspector.inspect_cloud(job, cloud, watch, calibration)
    else:
        found = _from_cloud(inspector, cloud, job, watch, bare=False, calibration=calibration)
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
    bare: bool,
    calibration: str | None = None,
) -> Inspection:
    """A cloud with a tray as the station inspects it; without one as a single bare part."""
    if not bare and cloud.frame != "tray":
        with watch.stage("scene"):
            found = scene.separate(cloud, max_marks=len(MARKS))
        bare = any(problem.code == "NO_TRAY" for problem in found.problems)
    if not bare:
        return inspector.inspect_cloud(job, cloud, watch, calibration)
    with watch.stage("scene"):
        try:
            part = scene.single(cloud.points, cloud.camera_pixel_mm)
        except ValueError as error:
            raise ScanError("the cloud is no part", which=job.serial, got=error) from error
        alone = scene.Scene((part,), (), 0.0)
        problems = quality.gate(cloud, alone)
    source = f"{job.source}; no tray in it: one bare part, laid on its flattest side"
    summary = ScanSummary(
        points=len(cloud.points),
        quality=figures(cloud),
        flags=tuple(cloud.quality.flags),
        source=source,
        poses=cloud.poses,
        camera_pixel_mm=cloud.camera_pixel_mm,
        calibration=calibration,
    )
    return inspector.inspect_parts(job, (part,), summary, problems, watch)


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
            return _from_stacks(inspector, stacks, job, watch)
        except ModuleNotFoundError as error:
            missing = f"for want of {error.name} (extra `demo`)"
    with watch.stage("capture"):
        points, spacing_mm = sources.sampled(mesh, request.seed, source)
    told = f"{source}: surface of the mesh sampled, not scanned, {missing}"
    cloud = Cloud(points.astype("float32"), None, spacing_mm, frame="unknown")
    return _from_cloud(inspector, cloud, replace(job, source=told), watch, bare=True)


def _from_images(
    inspector: Inspector,
    views: Mapping[str, ByteImage],
    mm_per_px: float | None,
    item: Item,
    job: Job,
    watch: Stopwatch,
) -> Found:
    """Read the part on ready views or a photo. Always UNSURE: no bundle is qualified for them."""
    mark, scale = MARKS[0], mm_per_px or 1.0
    box = None
    if mm_per_px is not None and item.kind == "views":
        box = view_images.size_of(views, mm_per_px, item.path)
    size = Size(*(box or (0.0, 0.0, 0.0)), uncertainty_mm=2 * scale)
    text = (
        f"{'ready views were' if item.kind == 'views' else 'a photo was'} read, not a scan: the "
        "model is not qualified for them, so the readings decide nothing"
    )
    problem = Problem("NOT_CHECKED", text, "UNSURE")
    names = ", ".join(path.name for path in item.paths.values())
    summary = ScanSummary(points=0, source=f"{item.path.parent}: {item.kind} {names}")
    inspection = inspector.inspect_parts(job, (), summary, (problem,), watch)
    model, thresholds, budget_s = inspector.model, inspector.thresholds, inspector.time_budget_s
    parts: tuple[PartReading, ...] = ()
    surface: tuple[SurfaceReading, ...] = ()
    grids: tuple[GridReading, ...] = ()
    with watch.stage("read"):
        picture = view_images.marks_sheet(views, scale, inspector.layout)
        read = checks.read_marks(model, picture, {mark: size}, {}, thresholds, budget_s)
        parts = tuple(replace(part, size_mm=box) for part in read.parts)
    with watch.stage("surface"):
        panels = view_images.surface_picture(views, scale, inspector.layout)
        looked = checks.read_surface(
            model, panels, mark, read.parts[0].part, size, thresholds, budget_s
        )
        surface = (looked.reading,)
        grids = tuple(grid for grid in looked.grids if grid.view in views)
    verdict = replace(inspection.verdict, parts=parts, surface=surface, grids=grids)
    shown = view_images.surface_picture(views, scale, Layout(panel=_DISPLAY_PX))
    ready = {
        view: shown.image[:, k * _DISPLAY_PX : (k + 1) * _DISPLAY_PX, 0]
        for k, view in enumerate(VIEWS)
        if view in views
    }
    return Found(replace(inspection, verdict=verdict), {mark: ReadyViews(ready, shown.mm_per_px)})


def _product(line: Path | None, part_number: str | None) -> tuple[Product | None, str]:
    if line is None:
        if part_number is not None:
            raise ConfigError(
                "a part number needs its line", expected="--line FILE", got="--part-number alone"
            )
        return None, ""
    spec = load_line(line)
    if part_number is None:
        known = ", ".join(product.part_number for product in spec.products)
        raise ConfigError(
            "a line without a part number", which=line, expected=f"--part-number, one of {known}"
        )
    return spec.product(part_number), spec.line


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "the output folder cannot be made", which=f"--out {folder}", got=error.strerror
        ) from error


def _whole(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number, 1 or more")
    return number


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number, 0 or more")
    return number


def _length(text: str) -> float:
    number = float(text)
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"{text}: expected millimetres above 0")
    return number


def _size(text: str) -> tuple[int, int]:
    columns, cross, rows = text.lower().partition("x")
    if not (cross and columns.isdecimal() and rows.isdecimal() and int(columns) and int(rows)):
        raise argparse.ArgumentTypeError(f"{text}: expected COLUMNSxROWS, e.g. 1024x768")
    return int(columns), int(rows)
