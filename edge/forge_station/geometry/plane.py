"""The tray plane in a cloud: find it, or level a cloud whose plane is nearly right.

It does not know parts. Deterministic: the random sample of the search has a fixed seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.floating]
Matrix = NDArray[np.float64]

_SAMPLE = 4000
_TRIALS = 200
# A plane is a tray if it holds this share of the points and reaches far enough beyond what
# stands on it. Faces of parts (a washer holds 45 % of its surface in one face) do neither.
_TRAY_SHARE = 0.35
_PART_AREA_SHARE = 0.6
_LEVEL_POINTS = 15000


@dataclass(frozen=True)
class TrayFit:
    """Where the tray of a cloud in the tray frame really lies: z = zero + slope . (x, y), mm.

    `offset_mm` its height in the middle of the cloud; `rms_mm` scatter of the tray points;
    `tray_share` of all points that lie on the tray.
    """

    slope: tuple[float, float]
    zero_mm: float
    offset_mm: float
    tilt_deg: float
    rms_mm: float
    tray_share: float


def spread(points: Points, count: int) -> Points:
    """At most about `count` points at an even stride."""
    return points[:: max(1, len(points) // count)]


def typical_spacing(points: Points) -> float:
    """Side of a surface cell per point, mm: a stand-in for the camera pixel of a bare cloud.

    Median over occupied voxels of (area of a voxel face / points inside) ** 0.5.
    """
    if len(points) < 8:
        return 1.0
    xyz = np.asarray(points, np.float64)
    low, high = np.percentile(xyz, (1, 99), axis=0)
    diagonal = float(np.linalg.norm(high - low))
    if diagonal <= 0:
        return 1.0
    voxel = diagonal / 40.0
    inside = xyz[((xyz >= low) & (xyz <= high)).all(axis=1)]
    index = ((inside - low) / voxel).astype(np.int64)
    key = (index[:, 2] * 64 + index[:, 1]) * 64 + index[:, 0]
    counts = np.unique(key, return_counts=True)[1]
    return float(voxel / np.sqrt(max(1.0, float(np.median(counts)))))


def find_tray(points: Points, tolerance_mm: float) -> Matrix | None:
    """tray_from_cloud [4, 4] of the dominant plane, z up towards the points above it, or None.

    x of the tray frame is the direction in the plane closest to the cloud's x. None if no plane
    holds enough points, or if it does not reach beyond what stands on it (a face of a part).
    """
    if len(points) < 100:
        return None
    sample = np.asarray(spread(points, _SAMPLE), np.float64)
    rng = np.random.default_rng(0)
    best: tuple[int, Matrix, Matrix] | None = None
    for corner in rng.integers(0, len(sample), (_TRIALS, 3)):
        a, b, c = sample[corner]
        normal = np.cross(b - a, c - a)
        length = float(np.linalg.norm(normal))
        if length < 1e-9:
            continue
        normal /= length
        hits = int((np.abs((sample - a) @ normal) < tolerance_mm).sum())
        if best is None or hits > best[0]:
            best = (hits, normal, a)
    if best is None or best[0] < _TRAY_SHARE * len(sample):
        return None
    normal, origin = best[1], best[2]
    for _ in range(2):
        near = sample[np.abs((sample - origin) @ normal) < 2 * tolerance_mm]
        origin = near.mean(axis=0)
        normal = np.linalg.eigh(np.cov((near - origin).T))[1][:, 0]
    height = (sample - origin) @ normal
    if (height > 3 * tolerance_mm).sum() < (height < -3 * tolerance_mm).sum():
        normal = -normal
    tray_from_cloud = frame(normal, origin)
    flat = sample @ tray_from_cloud[:3, :3].T + tray_from_cloud[:3, 3]
    above = flat[flat[:, 2] > 3 * tolerance_mm]
    on_plane = flat[np.abs(flat[:, 2]) < 2 * tolerance_mm]
    if _hull_area(above) > _PART_AREA_SHARE * _hull_area(on_plane):
        return None
    return tray_from_cloud


def fit_tray(points: Points, camera_pixel_mm: float) -> TrayFit | None:
    """Fit the seen tray of a cloud whose tray should lie on z = 0. None: no tray is seen.

    Looks within 5 camera pixels (at least 0.5 mm) of z = 0 for the densest height, then fits a
    plane to the points around it.
    """
    reach = max(5.0 * camera_pixel_mm, 0.5)
    near = np.asarray(spread(points, _LEVEL_POINTS), np.float64)
    total = len(near)
    near = near[np.abs(near[:, 2]) < reach]
    if len(near) < 100 or len(near) < 0.05 * total:
        return None
    band = max(camera_pixel_mm, 0.02)
    edges = np.arange(-reach, reach + band / 4, band / 4)
    counts = np.histogram(near[:, 2], edges)[0]
    counts = np.convolve(counts, np.ones(4), "same")
    level = float(edges[int(np.argmax(counts))] + band / 8)
    origin = np.array([near[:, 0].mean(), near[:, 1].mean()])
    terms = np.column_stack([near[:, :2] - origin, np.ones(len(near))])
    plane = np.array([0.0, 0.0, level])
    inside = np.zeros(len(near), bool)
    for width in (2.0, 1.0, 0.7):
        inside = np.abs(near[:, 2] - terms @ plane) < width * band
        if inside.sum() < 50:
            return None
        plane = np.linalg.lstsq(terms[inside], near[inside, 2], rcond=None)[0]
    residual = near[inside, 2] - terms[inside] @ plane
    return TrayFit(
        slope=(float(plane[0]), float(plane[1])),
        zero_mm=float(plane[2] - plane[:2] @ origin),
        offset_mm=float(plane[2]),
        tilt_deg=float(np.degrees(np.arctan(np.hypot(plane[0], plane[1])))),
        rms_mm=float(np.sqrt(np.mean(residual**2))),
        tray_share=float(inside.sum() / total),
    )


def heights(points: NDArray[np.float32], fit: TrayFit | None) -> NDArray[np.float32]:
    """Height [N] of points [N, 3] above the seen tray (z itself without a fit), mm.

    Heights only: tilts are fractions of a degree.
    """
    z = np.ascontiguousarray(points[:, 2])
    if fit is None:
        return z
    tray = points[:, 0] * np.float32(fit.slope[0])
    tray += points[:, 1] * np.float32(fit.slope[1])
    tray += np.float32(fit.zero_mm)
    return np.asarray(z - tray, np.float32)


def moved(points: Points, target_from_source: Matrix) -> NDArray[np.float32]:
    """Points [N, 3] under a 4x4 matrix, float32."""
    rotation = target_from_source[:3, :3].T.astype(np.float32)
    shift = target_from_source[:3, 3].astype(np.float32)
    xyz = np.asarray(points, np.float32)
    out = xyz[:, :1] * rotation[0] + xyz[:, 1:2] * rotation[1] + xyz[:, 2:3] * rotation[2] + shift
    return np.asarray(out, np.float32)


def frame(normal: Matrix, origin: Matrix) -> Matrix:
    """Frame with z along `normal` through `origin`, x the projection of the source's x."""
    x_axis = np.array([1.0, 0.0, 0.0]) - normal[0] * normal
    if np.linalg.norm(x_axis) < 0.1:
        x_axis = np.array([0.0, 1.0, 0.0]) - normal[1] * normal
    x_axis /= np.linalg.norm(x_axis)
    frame = np.eye(4)
    frame[:3, :3] = np.stack([x_axis, np.cross(normal, x_axis), normal])
    frame[:3, 3] = -frame[:3, :3] @ origin
    return frame


def _hull_area(points: Matrix) -> float:
    if len(points) < 3:
        return 0.0
    return float(cv2.contourArea(cv2.convexHull(points[:, :2].astype(np.float32))))
