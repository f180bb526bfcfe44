"""A projector-camera scan head that never existed: rigs, and meshes -> noisy 8-bit pattern images.

Does not decode: what it makes goes through the same decoder as real images. Modelled: perspective
and lens distortion of both devices, shadows, Lambert and Blinn reflection, 1/r2, projector and
camera blur, shot and read noise, clipping, 8 bit, registration error of the head pose. Not
modelled: light reflected between surfaces, motion, sub-pixel edges beyond the blur, texture,
flicker; so figures from it are best cases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from forge_station.capture.base import PatternStack
from forge_station.capture.calibration import Calibration, Optics, PatternSpec
from forge_station.capture.patterns import profiles
from forge_station.errors import CaptureError
from forge_station.sim import raster

Float = NDArray[np.float64]
RANGE_MM, BASELINE_MM = 385.0, 130.0
CAMERA_FOCAL_SHARE = 1500 / 640  # focal length in image widths: 24 degrees of field
PROJECTOR_SIZE, PROJECTOR_FOCAL_PX = (912, 570), 1600.0
CAMERA_DISTORTION = (-0.08, 0.06, 4e-4, -3e-4, 0.0)
PROJECTOR_DISTORTION = (-0.05, 0.04, -3e-4, 2e-4, 0.0)
# name -> (azimuth, elevation) of the head seen from the tray centre, degrees; azimuth 0 is +x, -90
# looks along +y.
POSES: dict[str, tuple[tuple[str, float, float], ...]] = {
    "turntable4": (("front", -90, 45), ("right", 0, 45), ("back", 90, 45), ("left", 180, 45)),
    "overhead_front_side": (("overhead", -90, 90), ("front", -90, 45), ("right", 0, 45)),
    "front_side": (("front", -90, 45), ("right", 0, 45)),
    "overhead": (("overhead", -90, 90),),
}
TRAY_FACE = -2  # in face index images
NOTHING = -1


class MeshLike(Protocol):
    """vertices float64 [V, 3] mm in the tray frame, faces int32 [F, 3]."""

    @property
    def vertices(self) -> Float: ...

    @property
    def faces(self) -> NDArray[np.int32]: ...


@dataclass(frozen=True)
class Surface:
    """Reflectance: albedo and Blinn highlight. The defaults are plain zinc-plated steel.

    A tray is matt.
    """

    albedo: float = 0.55
    specular: float = 0.6
    shininess: float = 40.0


@dataclass(frozen=True)
class Sensor:
    """Camera and light.

    electrons: of a surface of albedo 1 that faces the light; full_well: electrons at 255;
    blur_side: outer weight of the camera's 3-tap blur; ambient: light that is always there, of 1.
    """

    electrons: float = 9000.0
    full_well: float = 10000.0
    read_noise: float = 8.0
    blur_side: float = 0.1065  # sigma 0.5 px
    projector_blur_px: float = 0.6
    ambient: float = 0.06


TRAY_SURFACE = Surface(albedo=0.35, specular=0.0, shininess=1.0)
STAIN = Surface(albedo=0.2, specular=0.1, shininess=20.0)
"""Of a closed crack: a line darker than the part, without depth. Assumed, not measured."""


def rig(
    scale: float,
    poses: str = "turntable4",
    image_size: tuple[int, int] = (640, 480),
    *,
    pattern: PatternSpec | None = None,
    distorted: bool = True,
) -> list[Calibration]:
    """Calibrations of a head aimed at the tray centre, one per pose.

    Range 385 x scale mm, baseline 130 x scale mm.
    At scale 1 the field of view is 164 x 123 mm and a camera pixel 0.257 mm (640 x 480). `poses` is
    a key of POSES; the projector stands to the right of the camera. Same lenses at every scale.
    """
    if poses not in POSES:
        raise CaptureError(f"rig: poses {poses!r} unknown; expected one of {', '.join(POSES)}")
    if not 0.01 <= scale <= 100:
        raise CaptureError(f"rig: scale {scale} out of 0.01..100")
    width, height = image_size
    focal = CAMERA_FOCAL_SHARE * width
    camera = Optics(
        image_size,
        np.array([[focal, 0, (width - 1) / 2], [0, focal, (height - 1) / 2], [0, 0, 1.0]]),
        np.array(CAMERA_DISTORTION if distorted else (0.0,) * 5),
    )
    columns, rows = PROJECTOR_SIZE
    projector = Optics(
        PROJECTOR_SIZE,
        np.array(
            [
                [PROJECTOR_FOCAL_PX, 0, (columns - 1) / 2],
                [0, PROJECTOR_FOCAL_PX, (rows - 1) / 2],
                [0, 0, 1.0],
            ]
        ),
        np.array(PROJECTOR_DISTORTION if distorted else (0.0,) * 5),
    )
    result = []
    for name, azimuth, elevation in POSES[poses]:
        a, e = math.radians(azimuth), math.radians(elevation)
        outward = np.array([math.cos(a) * math.cos(e), math.sin(a) * math.cos(e), math.sin(e)])
        up = np.array([-math.cos(a) * math.sin(e), -math.sin(a) * math.sin(e), math.cos(e)])
        right = np.cross(-outward, up)
        eye = outward * RANGE_MM * scale
        camera_from_tray = _look_at(eye, up)
        projector_from_tray = _look_at(eye + right * BASELINE_MM * scale, up)
        tray_from_camera = _inverse(camera_from_tray)
        result.append(
            Calibration(
                name=name,
                camera=camera,
                projector=projector,
                projector_from_camera=projector_from_tray @ tray_from_camera,
                tray_from_camera=tray_from_camera,
                pattern=pattern or PatternSpec(),
                notes={"source": "simulated rig", "scale": f"{scale:.6g}"},
            )
        )
    return result


def scale_for(
    width_mm: float,
    depth_mm: float,
    height_mm: float,
    poses: str = "turntable4",
    image_size: tuple[int, int] = (640, 480),
    margin: float = 0.04,
) -> float:
    """Smallest rig scale at which every camera and projector sees a box on the tray centre.

    The box is width (x) x depth (y) x height (z).
    `margin` is the free share of the image at each border. Found by bisection to 0.1 %.
    """
    devices = _devices(poses, image_size)
    x, y, z = (v.ravel() for v in np.meshgrid([-0.5, 0.5], [-0.5, 0.5], [0.0, 1.0]))
    corners = np.stack([x * width_mm, y * depth_mm, z * height_mm], axis=1)

    def sees(scale: float) -> bool:
        for optics, rotation, shift in devices:
            points = (corners / scale @ rotation + shift).reshape(-1, 3)
            if points[:, 2].min() < 0.3 * RANGE_MM:
                return False
            uv = optics.project(points) / (np.array(optics.image_size) - 1)
            if uv.min() < margin or uv.max() > 1 - margin:
                return False
        return True

    low, high = 1e-3, 1.0
    while not sees(high):
        high *= 2
        if high > 1e3:
            raise CaptureError(
                f"scale_for: a box of {width_mm} x {depth_mm} x {height_mm} mm fits no rig"
            )
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if sees(middle) else (middle, high)
    return high


@lru_cache(maxsize=8)
def _devices(poses: str, image_size: tuple[int, int]) -> tuple[tuple[Optics, Float, Float], ...]:
    """Camera and projector of the rig of scale 1, each with the transforms of all its poses.

    points [N, 3] of the tray @ [P, 3, 3] + [P, 1, 3] are [P, N, 3] in the device's frame.
    """
    unit = rig(1.0, poses, image_size)
    cameras = [
        _inverse(pose.tray_from_camera) for pose in unit if pose.tray_from_camera is not None
    ]
    projectors = [
        pose.projector_from_camera @ camera for pose, camera in zip(unit, cameras, strict=True)
    ]
    found = []
    for optics, matrices in ((unit[0].camera, cameras), (unit[0].projector, projectors)):
        stacked = np.stack(matrices)
        rotation = np.ascontiguousarray(stacked[:, :3, :3].transpose(0, 2, 1))
        found.append((optics, rotation, stacked[:, None, :3, 3]))
    return tuple(found)


def simulate(
    meshes: MeshLike | Sequence[MeshLike],
    calibration: Calibration,
    rng: np.random.Generator,
    *,
    exposures: tuple[float, ...] = (1.0, 0.35),
    registration: tuple[float, float] | None = None,
    surfaces: Surface | Sequence[Surface] = Surface(),
    tray: Surface = TRAY_SURFACE,
    sensor: Sensor = Sensor(),
    print_on_tray: NDArray[np.float32] | None = None,
) -> PatternStack:
    """Images that the head at `calibration` would take of parts lying on the tray (tray frame, mm).

    The true pose differs from the calibrated one by `registration` = (mm, degrees), one sigma per
    axis; None means 0.04 mm x (range / 385 mm) and 0.03 degrees. `surfaces`: one for all parts or
    one per mesh. `print_on_tray` float32 [H, W] of the camera image multiplies the tray's albedo
    (see sim.board); it is not shifted by `registration`.
    """
    parts = list(meshes) if isinstance(meshes, Sequence) else [meshes]
    scene = _scene(parts, surfaces, tray)
    pose = _true_pose(calibration, rng, registration)
    view = _look(scene, calibration, pose)
    width, height = calibration.camera.image_size
    shape = (height, width)
    gain, ambient, column, row = (np.empty(shape, np.float32) for _ in range(4))
    projector = calibration.projector
    projector_from_tray = calibration.projector_from_camera @ _inverse(pose)
    shadow = np.zeros((projector.image_size[1], projector.image_size[0]))
    _raster(
        scene,
        projector,
        projector_from_tray,
        calibration.pixel_centre,
        shadow,
        np.empty(shadow.shape, np.int32),
    )
    lens = projector.matrix
    origin = _inverse(projector_from_tray)[:3, 3]
    centre = pose[:3, 3] + pose[:3, 2] * (calibration.range_mm or 0.0)
    raster.shade(
        view.inverse_depth,
        view.face_index,
        scene.normals,
        scene.face_surface,
        scene.surfaces,
        view.ray_x,
        view.ray_y,
        pose,
        projector_from_tray,
        np.array(
            [
                lens[0, 0],
                lens[1, 1],
                lens[0, 2] - calibration.pixel_centre,
                lens[1, 2] - calibration.pixel_centre,
                *projector.distortion,
            ]
        ),
        shadow,
        6e-4,
        sensor.ambient,
        float(np.linalg.norm(origin - centre)),
        gain,
        ambient,
        column,
        row,
    )
    if print_on_tray is not None:
        factor = np.where(view.face_index == TRAY_FACE, print_on_tray, np.float32(1))
        gain *= factor
        ambient *= factor
    table, axes = _projected(calibration.pattern, projector.image_size, sensor.projector_blur_px)
    images = np.empty((len(exposures), len(axes), *shape), np.uint8)
    noise = _noise_table(width * height)
    raster.expose(
        gain,
        ambient,
        column,
        row,
        table,
        axes,
        np.array(exposures, np.float32),
        sensor.electrons,
        sensor.full_well,
        sensor.read_noise,
        np.array([1 - 2 * sensor.blur_side, sensor.blur_side], np.float32),
        noise,
        rng.integers(0, noise.size - width * height, images.shape[:2]),
        images,
    )
    return PatternStack(
        images=images,
        exposures=exposures,
        pattern=calibration.pattern,
        calibration_digest=calibration.digest,
        name=calibration.name,
        meta={"source": "simulated"},
    )


def on_tray(calibration: Calibration) -> tuple[Float, Float]:
    """x and y mm, tray frame, where the rays of the camera's pixels meet the tray; [H, W] each."""
    pose = calibration.tray_from_camera
    if pose is None:
        raise CaptureError(f"on_tray: calibration {calibration.name} has no tray_from_camera")
    ray_x, ray_y = _rays(calibration.camera, calibration.pixel_centre)
    x, y, z = (pose[k, 0] * ray_x + pose[k, 1] * ray_y + pose[k, 2] for k in range(3))
    depth = -pose[2, 3] / z
    return pose[0, 3] + depth * x, pose[1, 3] + depth * y


def true_depth(
    meshes: MeshLike | Sequence[MeshLike], calibration: Calibration
) -> tuple[Float, NDArray[np.int32], NDArray[np.int32]]:
    """What the camera would see without error: depth, mesh index, face index.

    depth float64 [H, W] mm along the camera's axis (inf = nothing).
    mesh index is the position in `meshes`, face index the row of that mesh's `faces`; TRAY_FACE for
    the tray, NOTHING for none (both images).
    """
    parts = list(meshes) if isinstance(meshes, Sequence) else [meshes]
    scene = _scene(parts, Surface(), TRAY_SURFACE)
    if calibration.tray_from_camera is None:
        raise CaptureError(f"true_depth: calibration {calibration.name} has no tray_from_camera")
    view = _look(scene, calibration, calibration.tray_from_camera)
    with np.errstate(divide="ignore"):
        depth = 1 / view.inverse_depth
    starts = np.cumsum([0] + [len(part.faces) for part in parts])
    on_part = view.face_index >= 0
    mesh_index = np.where(
        on_part, np.searchsorted(starts, view.face_index, side="right") - 1, view.face_index
    )
    face_index = np.where(
        on_part, view.face_index - starts[np.clip(mesh_index, 0, None)], view.face_index
    )
    return depth, mesh_index.astype(np.int32), face_index.astype(np.int32)


@dataclass(frozen=True, eq=False)
class _Scene:
    vertices: Float
    faces: NDArray[np.int32]
    normals: Float
    anchors: Float
    face_surface: NDArray[np.int32]
    surfaces: Float


@dataclass(frozen=True, eq=False)
class _View:
    ray_x: Float
    ray_y: Float
    inverse_depth: Float
    face_index: NDArray[np.int32]


def _scene(
    parts: Sequence[MeshLike], surfaces: Surface | Sequence[Surface], tray: Surface
) -> _Scene:
    per_part = [surfaces] * len(parts) if isinstance(surfaces, Surface) else list(surfaces)
    if len(per_part) != len(parts):
        raise CaptureError(f"simulate: {len(per_part)} surfaces for {len(parts)} meshes")
    starts = np.cumsum([0] + [len(part.vertices) for part in parts])
    vertices = np.concatenate(
        [np.zeros((0, 3)), *(np.asarray(p.vertices, np.float64) for p in parts)]
    )
    faces = np.concatenate(
        [
            np.zeros((0, 3), np.int32),
            *(
                np.asarray(p.faces, np.int32) + np.int32(s)
                for p, s in zip(parts, starts[:-1], strict=True)
            ),
        ]
    )
    corners = vertices[faces]
    normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    length = np.linalg.norm(normals, axis=1, keepdims=True)
    return _Scene(
        vertices=vertices,
        faces=faces,
        normals=normals / np.maximum(length, 1e-12),
        anchors=np.ascontiguousarray(corners[:, 0]),
        face_surface=np.repeat(
            np.arange(1, len(parts) + 1, dtype=np.int32), [len(p.faces) for p in parts]
        ),
        surfaces=np.array(
            [(s.albedo, s.specular, s.shininess) for s in [tray, *per_part]], np.float64
        ),
    )


def _raster(
    scene: _Scene,
    optics: Optics,
    from_tray: Float,
    pixel_centre: float,
    inverse_depth: Float,
    face_index: NDArray[np.int32],
) -> None:
    points = scene.vertices @ from_tray[:3, :3].T + from_tray[:3, 3]
    depth = np.where(points[:, 2] > 1e-6, points[:, 2], 1.0)
    x, y = optics.distort(points[:, 0] / depth, points[:, 1] / depth)
    u = optics.matrix[0, 0] * x + (optics.matrix[0, 2] - pixel_centre)
    v = optics.matrix[1, 1] * y + (optics.matrix[1, 2] - pixel_centre)
    raster.raster(
        u, v, np.where(points[:, 2] > 1e-6, 1 / depth, 0.0), scene.faces, inverse_depth, face_index
    )


def _look(scene: _Scene, calibration: Calibration, tray_from_camera: Float) -> _View:
    width, height = calibration.camera.image_size
    inverse_depth = np.zeros((height, width))
    face_index = np.full((height, width), NOTHING, np.int32)
    _raster(
        scene,
        calibration.camera,
        _inverse(tray_from_camera),
        calibration.pixel_centre,
        inverse_depth,
        face_index,
    )
    ray_x, ray_y = _rays(calibration.camera, calibration.pixel_centre)
    rotation = tray_from_camera[:3, :3]
    normals = np.ascontiguousarray(scene.normals @ rotation)
    offsets = ((scene.anchors - tray_from_camera[:3, 3]) * scene.normals).sum(axis=1)
    raster.on_faces(ray_x, ray_y, normals, offsets, inverse_depth, face_index)
    raster.add_tray(ray_x, ray_y, tray_from_camera, inverse_depth, face_index)
    return _View(ray_x, ray_y, inverse_depth, face_index)


def _true_pose(
    calibration: Calibration, rng: np.random.Generator, registration: tuple[float, float] | None
) -> Float:
    pose, distance = calibration.tray_from_camera, calibration.range_mm
    if pose is None or distance is None:
        raise CaptureError(
            f"simulate: calibration {calibration.name} has no tray_from_camera that looks down on "
            "the tray"
        )
    shift_mm, turn_deg = (
        registration if registration is not None else (0.04 * distance / RANGE_MM, 0.03)
    )
    turn = rng.normal(size=3) * math.radians(turn_deg)
    error = np.eye(4)
    error[:3, :3] = rotation(turn)
    error[:3, 3] = rng.normal(size=3) * shift_mm
    return error @ pose


def _inverse(matrix: Float) -> Float:
    return np.asarray(np.linalg.inv(matrix), np.float64)


def rotation(vector: Float) -> Float:
    """Rodrigues: axis times angle (radians) -> matrix."""
    angle = float(np.linalg.norm(vector))
    if angle < 1e-12:
        return np.eye(3)
    x, y, z = vector / angle
    k = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    result: Float = np.eye(3) + math.sin(angle) * k + (1 - math.cos(angle)) * (k @ k)
    return result


def _look_at(eye: Float, up: Float) -> Float:
    """camera_from_tray of a device at `eye` looking at the origin: x right, y down, z forward."""
    forward = -eye / np.linalg.norm(eye)
    right = np.cross(forward, up)
    right /= np.linalg.norm(right)
    matrix = np.eye(4)
    matrix[:3, :3] = np.stack([right, np.cross(forward, right), forward])
    matrix[:3, 3] = -matrix[:3, :3] @ eye
    return matrix


@lru_cache(maxsize=4)
def _rays(optics: Optics, pixel_centre: float) -> tuple[Float, Float]:
    width, height = optics.image_size
    u, v = np.meshgrid(np.arange(width) + pixel_centre, np.arange(height) + pixel_centre)
    return optics.undistort(
        (u - optics.matrix[0, 2]) / optics.matrix[0, 0],
        (v - optics.matrix[1, 2]) / optics.matrix[1, 1],
    )


@lru_cache(maxsize=4)
def _projected(
    pattern: PatternSpec, projector_size: tuple[int, int], blur_px: float
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Pattern profiles, 8-bit and blurred by the projector, float32 [N, longest side], and axes."""
    reach = np.arange(-3, 4)
    kernel = np.exp(-0.5 * (reach / max(blur_px, 1e-3)) ** 2)
    kernel /= kernel.sum()
    listed = profiles(pattern, projector_size)
    table = np.zeros((len(listed), max(projector_size)), np.float32)
    for line, (_, profile) in zip(table, listed, strict=True):
        padded = np.pad(np.round(profile * 255) / 255, 3, mode="edge")
        line[: profile.size] = np.convolve(padded, kernel, mode="valid")
        line[profile.size :] = line[profile.size - 1]
    return table, np.array([axis for axis, _ in listed])


@lru_cache(maxsize=2)
def _noise_table(pixels: int) -> NDArray[np.float32]:
    return np.random.default_rng(7).standard_normal(4 * pixels + 99991, np.float32)
