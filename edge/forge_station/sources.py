"""What a person hands in for an offline inspection: recordings, clouds, meshes, views, photos.

Tells the kinds apart and reads each into what the pipeline takes. It knows no model and decides
nothing. Errors name the file and the field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from forge_station.capture import calibration_io, foreign, replay
from forge_station.capture.base import Cloud, PatternStack
from forge_station.capture.calibration import Calibration
from forge_station.contract.views import VIEWS
from forge_station.errors import ConfigError, InputError
from forge_station.geometry import cloud_io, mesh_io, view_images
from forge_station.geometry.mesh_io import TriangleMesh
from forge_station.geometry.view_images import ByteImage
from forge_station.sim.mesh import Mesh, sample_surface

Kind = Literal["recording", "gray code", "cloud", "mesh", "views", "photo"]
MESH_SUFFIXES = (".obj", ".stl")
_VIEW_STEM = re.compile(rf"(?:(?P<prefix>.*)[-_. ])?(?P<view>{'|'.join(VIEWS)})", re.IGNORECASE)
_FACES = re.compile(rb"element\s+face\s+[1-9]")
DIRECT_POINTS = 120_000
# A mesh whose thinnest extent is less than this share of its longest is a sheet, not a part.
_FLAT_SHARE = 1e-4


@dataclass(frozen=True)
class Options:
    """How inputs are to be read where the files do not say it themselves."""

    calibration: Path | None = None
    code_step: int | None = None
    codes: tuple[int, int] | None = None
    """(columns, rows) of the projected code, for an OpenCV calibration."""
    unit: str = "auto"
    frame: Literal["auto", "tray", "part"] = "auto"
    """Of a cloud. tray: z = 0 is the tray; part: a bare part; auto: look for the tray plane."""
    camera_pixel_mm: float | None = None
    mm_per_px: float | None = None
    """Of views and photos."""


@dataclass(frozen=True)
class Item:
    """One part to inspect. `paths`: the file or folder, or the files of three views by name."""

    name: str
    kind: Kind
    paths: Mapping[str, Path]

    @property
    def path(self) -> Path:
        return next(iter(self.paths.values()))


@dataclass(frozen=True)
class Stacks:
    """Pattern stacks of all head poses, their calibrations by digest, and where they came from."""

    stacks: tuple[PatternStack, ...]
    calibrations: Mapping[str, Calibration]
    source: str
    simulated: bool = False


def items_of(paths: Sequence[Path], options: Options) -> list[Item]:
    """What the inputs are, in order; images named `*front*`, `*side*`, `*top*` form one item.

    Raises ConfigError where an option that an input needs was not given. A file that is missing or
    unreadable is found when it is read.
    """
    items: list[Item] = []
    views: dict[tuple[Path, str], dict[str, Path]] = {}
    for path in paths:
        try:
            if path.is_dir():
                items.append(_folder_item(path, options))
                continue
        except OSError as error:
            raise ConfigError(
                "the folder cannot be read", which=path, got=error.strerror
            ) from error
        found = _VIEW_STEM.fullmatch(path.stem)
        if path.suffix.lower() in view_images.SUFFIXES and found is not None:
            key = (path.parent, found["prefix"] or "")
            if key not in views:
                views[key] = {}
                items.append(Item(found["prefix"] or path.parent.name, "views", views[key]))
            views[key][found["view"].lower()] = path
        else:
            items.append(Item(path.stem, _file_kind(path), {"input": path}))
    for item in items:
        if item.kind == "views":
            _refuse_incomplete(item, options)
    return [replace(item, name=name) for item, name in zip(items, _distinct(items), strict=True)]


def _folder_item(folder: Path, options: Options) -> Item:
    name = folder.resolve().name
    if (folder / replay.MANIFEST).is_file():
        return Item(name, "recording", {"input": folder})
    named = {path.stem.lower(): path for path in sorted(folder.iterdir()) if _is_image(path)}
    views = {view: named[view] for view in VIEWS if view in named}
    if views:
        return Item(name, "views", views)
    inside = sorted(folder.glob(f"*/{replay.MANIFEST}"))
    if inside:
        raise ConfigError(
            "the folder holds several scans",
            which=folder,
            got=f"{len(inside)} folders with {replay.MANIFEST}",
            action=f"give them one by one: {folder}/*",
        )
    if not named:
        raise ConfigError(
            "nothing to inspect in the folder",
            which=folder,
            expected=f"{replay.MANIFEST}, pattern images, or {', '.join(VIEWS)} images",
            got=f"{sum(1 for _ in folder.iterdir())} other entries",
        )
    if options.calibration is None:
        raise ConfigError(
            "pattern images without a calibration",
            which=folder,
            expected=f"{replay.MANIFEST} in the folder, or --calibration FILE",
            got=f"{len(named)} images",
            action="for an OpenCV calibration add --code-step N and --codes COLUMNSxROWS",
        )
    return Item(name, "gray code", {"input": folder})


def _is_image(path: Path) -> bool:
    return path.is_file() and path.suffix.lower() in view_images.SUFFIXES


def _file_kind(path: Path) -> Kind:
    suffix = path.suffix.lower()
    if suffix in MESH_SUFFIXES or (suffix == ".ply" and _ply_has_faces(path)):
        return "mesh"
    if suffix in cloud_io.SUFFIXES:
        return "cloud"
    if suffix in view_images.SUFFIXES:
        return "photo"
    known = (*MESH_SUFFIXES, *cloud_io.SUFFIXES, *view_images.SUFFIXES)
    raise ConfigError(
        "input of unknown kind",
        which=path,
        expected=f"a folder, or a file {', '.join(known)}",
        got=suffix or "no suffix",
    )


def _ply_has_faces(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            header = file.read(8192).split(b"end_header", 1)[0]
    except OSError:
        return False
    return _FACES.search(header) is not None


def _refuse_incomplete(item: Item, options: Options) -> None:
    missing = [view for view in VIEWS if view not in item.paths]
    if missing:
        raise ConfigError(
            "views are missing",
            which=f"{item.path.parent}, part {item.name}",
            expected=f"images whose names end in {', '.join(VIEWS)}",
            got=f"no {', no '.join(missing)}",
        )
    if options.mm_per_px is None:
        raise ConfigError(
            "views without their scale", which=item.path, expected="--mm-per-px MM", got="nothing"
        )


def _distinct(items: Sequence[Item]) -> list[str]:
    """Names of the items, numbered where two are alike: each has its own files."""
    seen: dict[str, int] = {}
    names = []
    for item in items:
        seen[item.name] = seen.get(item.name, 0) + 1
        times = seen[item.name]
        names.append(item.name if times == 1 else f"{item.name}-{times}")
    return names


def read_stacks(item: Item, options: Options) -> Stacks:
    """A recording, or plain pattern images in name order with the calibration given."""
    folder = item.path
    if item.kind == "recording":
        recording = replay.read(folder)
        return Stacks(recording.stacks, recording.calibrations, f"{folder}: recorded scan")
    calibration = _calibration(options)
    if calibration.pattern.kind == "gray_pairs":
        found = foreign.read_folder(folder, calibration, item.name)
        source = (
            f"{folder}: {found.stack.meta['found']}, calibration {calibration.name}, "
            f"code step {calibration.pattern.code_step}"
        )
        return Stacks((found.stack,), {found.calibration.digest: found.calibration}, source)
    images = foreign.natural_order([path for path in folder.iterdir() if _is_image(path)])
    stack = replay.read_images(images, calibration, name=item.name)
    source = (
        f"{folder}: {len(images)} pattern images, calibration {calibration.name}, "
        f"code step {calibration.pattern.code_step}"
    )
    return Stacks((stack,), {calibration.digest: calibration}, source)


def _calibration(options: Options) -> Calibration:
    path = options.calibration
    if path is None:
        raise ConfigError("no calibration given", expected="--calibration FILE")
    if path.suffix.lower() in (".yaml", ".yml"):
        return calibration_io.load(path)
    if options.code_step is None or options.codes is None:
        raise ConfigError(
            "an OpenCV calibration does not tell the projected code",
            which=path,
            expected="--code-step N and --codes COLUMNSxROWS",
            action="code step: projector pixels a code; codes: how many columns and rows",
        )
    return calibration_io.import_opencv(
        path, code_step=options.code_step, pattern_size=options.codes
    )


def read_cloud(item: Item, options: Options) -> tuple[Cloud, str]:
    """(cloud, source). The frame is "tray" only where the file or the options say so."""
    cloud = cloud_io.read_cloud(
        item.path,
        unit=options.unit,
        frame="tray" if options.frame == "tray" else None,
        camera_pixel_mm=options.camera_pixel_mm,
    )
    return cloud, "; ".join([f"{item.path}: cloud", *cloud.notes])


def read_mesh(item: Item, options: Options) -> TriangleMesh:
    """A mesh in mm without vertices that no face uses. Raises InputError, also if it is flat."""
    mesh = mesh_io.read_mesh(item.path, options.unit)
    used, faces = np.unique(mesh.faces, return_inverse=True)
    vertices = mesh.vertices[used]
    spans = np.linalg.svd(vertices - vertices.mean(axis=0), compute_uv=False)
    if len(used) < 4 or spans[-1] <= _FLAT_SHARE * spans[0]:
        raise InputError("the mesh is flat, it has no volume", which=item.path)
    return replace(mesh, vertices=vertices, faces=faces.reshape(-1, 3).astype(np.int32))


def read_views(item: Item) -> dict[str, ByteImage]:
    """Grey images by view with background 0; a photo is its own top view, as it is."""
    if item.kind == "photo":
        return {"top": np.maximum(view_images.read_image(item.path), 1)}
    return view_images.read_views(item.paths)


def scanned(
    mesh: TriangleMesh, seed: int, field_mm: tuple[float, float, float] | None, source: str
) -> Stacks:
    """Put a mesh to rest on a tray and take pictures of it with the head of the demo.

    `field_mm`: what the head is set to; None: just the part. The same seed gives the same pose and
    the same images. Raises ModuleNotFoundError where the extra `demo` is not installed.
    """
    from forge_station.sim import rest_pose, scanner, trays

    rng = np.random.default_rng(seed)
    try:
        resting = rest_pose.rest(Mesh(mesh.vertices, mesh.faces), rng)
    except ValueError as error:
        raise InputError("the mesh does not rest on a tray", which=source, got=error) from error
    rig = scanner.rig(scanner.scale_for(*(field_mm or trays.field_mm([resting]))))
    stacks = tuple(scanner.simulate(resting, pose, rng) for pose in rig)
    told = f"{source}: mesh at rest (seed {seed}), scanned by the simulated head from {len(rig)} "
    told += "poses and decoded"
    return Stacks(stacks, {pose.digest: pose for pose in rig}, told, simulated=True)


def sampled(mesh: TriangleMesh, seed: int, source: str) -> tuple[NDArray[np.float64], float]:
    """Points [N, 3] mm on the surface of a mesh, even by area, and their spacing in mm.

    No scan: what no camera would see is there too. Raises InputError for a mesh without area.
    """
    try:
        surface = Mesh(mesh.vertices, mesh.faces)
        points, _, _ = sample_surface(surface, DIRECT_POINTS, np.random.default_rng(seed))
    except ValueError as error:
        raise InputError("the mesh has no surface", which=source, got=error) from error
    return points, float(np.sqrt(surface.face_areas().sum() / DIRECT_POINTS))
