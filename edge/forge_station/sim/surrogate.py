"""A fast stand-in for the structured-light scanner, for training volume only.

Instead of projecting patterns and decoding images, the mesh is drawn into a depth map of every
head pose (camera) and of its projector (shadows); every pixel that both see becomes a point with
the decoder's noise: it grows with the angle to the projector, grazing surfaces are lost, depth
jumps lose points or throw them along the ray, and every pose is a little misregistered. The rates
were fitted to the decoded simulation; `tests/sim/test_surrogate.py` compares the statistics.

Never used for evaluation or at a station.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from forge_station.capture.calibration import Calibration
from forge_station.sim.mesh import Mesh
from forge_station.sim.raster import raster
from forge_station.sim.scanner import STAIN, Surface

Array = NDArray[np.float64]
STEEL = Surface()
Faces = NDArray[np.int32]


@dataclass(frozen=True)
class Noise:
    """Decode errors of the stand-in. Lengths are shares of a camera pixel on the part."""

    depth: float = 0.125
    """Standard deviation of depth at normal incidence of the projector."""
    grazing_keep: float = 0.9
    """Share of points kept where the surface is 72 to 78 degrees from the camera."""
    flying: float = 0.06
    """Share of points at depth jumps that fly along the ray."""
    edge_drop: float = 0.15
    """Share of points at depth jumps that are lost."""
    registration: float = 0.16
    """Standard deviation of each pose's shift; 0.03 degrees of turn come with it."""
    blind_share: float = 0.0
    """Share of poses that see nothing within a ball around a random point: glare, oil, dirt."""
    blind_radius: tuple[float, float] = (6.0, 40.0)
    """Least and largest radius of that ball."""


@dataclass(frozen=True)
class Points:
    """points [N, 3] float32 mm in the tray frame; face [N] int32 that each point came from; white
    [N] float32: how bright it is under full light, 1 for a white surface that faces the lamp.
    """

    points: NDArray[np.float32]
    face: NDArray[np.int32]
    white: NDArray[np.float32]


def scan(
    mesh: Mesh,
    calibrations: Sequence[Calibration],
    rng: np.random.Generator,
    noise: Noise = Noise(),
    *,
    step: int = 1,
    surface: Surface = STEEL,
    stained: NDArray[np.bool_] | None = None,
) -> Points:
    """Scan `mesh` (tray frame, mm) from every calibrated pose; `step` 2 halves the resolution.

    `surface`: how it shines, but faces [F] in `stained`, which are `scanner.STAIN`.
    """
    normals = mesh.face_normals()
    shine = np.tile([surface.albedo, surface.specular, surface.shininess], (len(normals), 1))
    if stained is not None:
        shine[stained] = STAIN.albedo, STAIN.specular, STAIN.shininess
    clouds, faces = [], []
    for calibration in calibrations:
        points, face = _pose(mesh, normals, shine, calibration, rng, noise, step)
        clouds.append(points)
        faces.append(face)
    every = np.concatenate(clouds).astype(np.float32)
    return Points(every[:, :3], np.concatenate(faces), every[:, 3])


def _pose(
    mesh: Mesh,
    normals: Array,
    shine: Array,
    calibration: Calibration,
    rng: np.random.Generator,
    noise: Noise,
    step: int,
) -> tuple[Array, Faces]:
    """Points and brightness [N, 4], and their faces."""
    tray_from_camera = calibration.tray_from_camera
    if tray_from_camera is None:
        raise ValueError(f"calibration {calibration.name}: the surrogate needs tray_from_camera")
    camera_from_tray = np.asarray(np.linalg.inv(tray_from_camera), np.float64)
    projector_from_tray = calibration.projector_from_camera @ camera_from_tray
    camera, width, height = _shrunk(calibration.camera.matrix, calibration.camera.image_size, step)
    lamp, lamp_width, lamp_height = _shrunk(
        calibration.projector.matrix, calibration.projector.image_size, step
    )
    depth, face = _z_buffer(mesh, camera_from_tray, camera, width, height)
    lamp_depth, _ = _z_buffer(mesh, projector_from_tray, lamp, lamp_width, lamp_height)
    out = np.empty((height * width, 4))
    source = np.empty(height * width, np.int32)
    pixel_mm = float(np.median(1.0 / depth[face >= 0])) / camera[0, 0] if (face >= 0).any() else 1.0
    count = _points(
        depth, face, normals, shine, camera, tray_from_camera,
        lamp_depth, lamp, projector_from_tray, int(rng.integers(2**31)), pixel_mm / step,
        noise.depth, noise.grazing_keep, noise.flying, noise.edge_drop,
        out, source,
    )  # fmt: skip
    points = out[:count]
    x, y, z = np.radians(rng.normal(0, 0.03, 3))
    turn = np.array([[1.0, -z, y], [z, 1.0, -x], [-y, x, 1.0]])
    points[:, :3] = points[:, :3] @ turn.T
    points[:, :3] += rng.normal(0, noise.registration * pixel_mm / step, 3)
    if count and noise.blind_share > 0.0 and rng.random() < noise.blind_share:
        off = points[:, :3] - points[int(rng.integers(count)), :3]
        radius = float(rng.uniform(*noise.blind_radius)) * pixel_mm / step
        seen = np.einsum("ij,ij->i", off, off) > radius**2
        return points.compress(seen, axis=0), source[:count].compress(seen)
    return points.copy(), source[:count].copy()


def _shrunk(matrix: Array, size: tuple[int, int], step: int) -> tuple[Array, int, int]:
    """Intrinsics and size of the same camera with `step` times larger pixels."""
    small = matrix.copy()
    small[:2] /= step
    small[:2, 2] += 0.5 / step - 0.5
    return small, size[0] // step, size[1] // step


def _z_buffer(
    mesh: Mesh, target_from_tray: Array, matrix: Array, width: int, height: int
) -> tuple[Array, Faces]:
    xyz = mesh.vertices @ target_from_tray[:3, :3].T + target_from_tray[:3, 3]
    inverse = 1.0 / xyz[:, 2]
    u = matrix[0, 0] * xyz[:, 0] * inverse + matrix[0, 2]
    v = matrix[1, 1] * xyz[:, 1] * inverse + matrix[1, 2]
    depth = np.zeros((height, width))
    face = np.full((height, width), -1, np.int32)
    raster(u, v, inverse, mesh.faces, depth, face)
    return depth, face


@numba.njit(cache=True, fastmath=True)
def _points(
    depth: Array, face: Faces, normals: Array, shine: Array, camera: Array, tray_from_camera: Array,
    lamp_depth: Array, lamp: Array, projector_from_tray: Array, seed: int, pixel_mm: float,
    sigma: float, grazing_keep: float, flying: float, edge_drop: float, out: Array, source: Faces,
) -> int:  # fmt: skip
    """Pixels of the camera's depth map -> noisy points; returns how many."""
    np.random.seed(seed)
    height, width = depth.shape
    lamp_height, lamp_width = lamp_depth.shape
    lamp_from = projector_from_tray
    lx0 = -(lamp_from[0, 0] * lamp_from[0, 3] + lamp_from[1, 0] * lamp_from[1, 3]
            + lamp_from[2, 0] * lamp_from[2, 3])  # fmt: skip
    ly0 = -(lamp_from[0, 1] * lamp_from[0, 3] + lamp_from[1, 1] * lamp_from[1, 3]
            + lamp_from[2, 1] * lamp_from[2, 3])  # fmt: skip
    lz0 = -(lamp_from[0, 2] * lamp_from[0, 3] + lamp_from[1, 2] * lamp_from[1, 3]
            + lamp_from[2, 2] * lamp_from[2, 3])  # fmt: skip
    n = 0
    for y in range(1, height - 1):
        for x in range(1, width - 1):
            t = face[y, x]
            if t < 0:
                continue
            z = 1.0 / depth[y, x]
            dx = (x - camera[0, 2]) / camera[0, 0]
            dy = (y - camera[1, 2]) / camera[1, 1]
            rx = tray_from_camera[0, 0] * dx + tray_from_camera[0, 1] * dy + tray_from_camera[0, 2]
            ry = tray_from_camera[1, 0] * dx + tray_from_camera[1, 1] * dy + tray_from_camera[1, 2]
            rz = tray_from_camera[2, 0] * dx + tray_from_camera[2, 1] * dy + tray_from_camera[2, 2]
            px = tray_from_camera[0, 3] + z * rx
            py = tray_from_camera[1, 3] + z * ry
            pz = tray_from_camera[2, 3] + z * rz
            nx, ny, nz = normals[t, 0], normals[t, 1], normals[t, 2]
            length = math.sqrt(rx * rx + ry * ry + rz * rz)
            view = -(nx * rx + ny * ry + nz * rz) / length
            if view < 0:
                nx, ny, nz, view = -nx, -ny, -nz, -view
            lx, ly, lz = lx0 - px, ly0 - py, lz0 - pz
            far = math.sqrt(lx * lx + ly * ly + lz * lz)
            light = (nx * lx + ny * ly + nz * lz) / far
            if light <= 0.03:
                continue
            qx = lamp_from[0, 0] * px + lamp_from[0, 1] * py + lamp_from[0, 2] * pz
            qy = lamp_from[1, 0] * px + lamp_from[1, 1] * py + lamp_from[1, 2] * pz
            qz = lamp_from[2, 0] * px + lamp_from[2, 1] * py + lamp_from[2, 2] * pz
            qx, qy, qz = qx + lamp_from[0, 3], qy + lamp_from[1, 3], qz + lamp_from[2, 3]
            u = lamp[0, 0] * qx / qz + lamp[0, 2]
            v = lamp[1, 1] * qy / qz + lamp[1, 2]
            if u < 0 or v < 0 or u >= lamp_width - 1 or v >= lamp_height - 1:
                continue
            i, j = int(u), int(v)
            lit = min(
                min(lamp_depth[j, i], lamp_depth[j, i + 1]),
                min(lamp_depth[j + 1, i], lamp_depth[j + 1, i + 1]),
            )
            if qz * lit > 1.0025:
                continue
            if view <= 0.12:
                continue
            keep = 1.0
            if view < 0.2:
                keep = 0.3
            elif view < 0.3:
                keep = grazing_keep
            if light < 0.1:
                keep *= 0.5
            if keep < 1.0 and np.random.random() > keep:
                continue
            jump = False
            for k in range(4):
                a = y + (k == 0) - (k == 1)
                b = x + (k == 2) - (k == 3)
                if face[a, b] < 0 or abs(1.0 / depth[a, b] - z) > 3.0 * pixel_mm:
                    jump = True
            moved = z + np.random.standard_normal() * sigma * pixel_mm / max(light, 0.12)
            if jump:
                fate = np.random.random()
                if fate < edge_drop:
                    continue
                if fate > 1.0 - flying:
                    sign = -1.0 if np.random.random() < 0.75 else 1.0
                    moved += sign * np.random.exponential(1.4 * pixel_mm)
            out[n, 0] = tray_from_camera[0, 3] + moved * rx
            out[n, 1] = tray_from_camera[1, 3] + moved * ry
            out[n, 2] = tray_from_camera[2, 3] + moved * rz
            hx, hy, hz = lx / far - rx / length, ly / far - ry / length, lz / far - rz / length
            half = (nx * hx + ny * hy + nz * hz) / math.sqrt(hx * hx + hy * hy + hz * hz)
            bright = shine[t, 0] * light
            if half > 0.0:
                bright += shine[t, 1] * half ** shine[t, 2]
            out[n, 3] = min(bright, 1.0) * (1.0 + 0.015 * np.random.standard_normal())
            source[n] = t
            n += 1
    return n
