"""Scans of several head poses -> one cloud, with the poses refined on the scans where asked.

Known poses (several calibrated heads, a turntable, a robot: see `poses`) are used as they are, or
moved by what GICP (small_gicp, extra `pointcloud`) finds between a pose and those before it. The
first pose stays. A fit that is bad is never used: the scan keeps its known poses and is flagged
POSE_MISFIT, with the reason. numpy only, but for the fit itself.

Directions that the parts do not fix (a single washer may turn about its axis) stay as they were:
of the correction, only the components along which the fit is sharp are taken (Zhang, Kaess, Singh:
On degeneracy of optimization-based state estimation problems, 2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from forge_station.capture import base
from forge_station.capture.base import POSE_MISFIT, Cloud, Scan
from forge_station.capture.poses import rotation_matrix, rotation_vector
from forge_station.contract.record import Limit
from forge_station.errors import ConfigError

Points = NDArray[np.float64]

# Of a scan in camera pixels: voxel of the fit, least height of what is a part, half thickness of
# the tray. Tray points are thinned to this share of the part points: they say nothing of x and y.
_VOXEL_PX, _RISE_PX, _TRAY_PX, _TRAY_SHARE = 1.5, 3.0, 3.0, 0.5
_LEAST_POINTS = 300
# Points are matched within so many voxels, from coarse to fine: sides that only one pose sees must
# not be drawn to others. The last is also what counts as seen by both.
_REACH_VOXELS = (4.0, 2.0, 1.2)
# A direction is fixed where its share of the information is at least this, of the best one: 0.04
# to 0.09 for three parts, 0.0003 for the turn of a washer about its axis.
_FIXED_SHARE = 0.003


@dataclass(frozen=True)
class Fusion:
    """How the head poses of a scan are put together."""

    refine: bool = False
    """Correct the poses by what the scans show (extra `pointcloud`)."""
    max_residual_px: Annotated[float, Limit(0.05, 20)] = 0.5
    """Largest distance of surfaces seen from two poses, rms, in camera pixels."""
    max_shift_mm: Annotated[float, Limit(0.0, 100)] = 2.0
    """A larger correction is a fault, not a refinement: calibrate again."""
    max_turn_deg: Annotated[float, Limit(0.0, 10)] = 1.0
    """The same for turns."""
    min_overlap: Annotated[float, Limit(0.0, 1)] = 0.15
    """Least share of a pose's points that an earlier pose saw as well."""


@dataclass(frozen=True)
class Fit:
    """What a pose was moved by, and how well it fits then.

    `corrected_from_known` [4, 4] in the tray frame, mm. shift_mm: of the middle of the parts.
    residual_mm: rms distance between the surfaces; overlap: share of points with a neighbour.
    """

    corrected_from_known: Points
    shift_mm: float
    turn_deg: float
    residual_mm: float
    overlap: float


def require() -> None:
    """Raise ConfigError where the extra that refines poses is not installed."""
    try:
        import small_gicp  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "fusion.refine needs small_gicp",
            got=error,
            action="install the extra: pip install forge-station[pointcloud]",
        ) from error


def fuse(scans: Sequence[Scan], how: Fusion | None = None) -> Cloud:
    """One cloud of all poses; see `base.fuse`.

    With `how.refine` the poses are corrected, and the quality says by how much and what was left.
    Raises CaptureError for scans that cannot be fused, ConfigError without the extra.
    """
    if how is None or not how.refine or len(scans) < 2:
        return base.fuse(scans)
    require()
    fits: list[Fit] = []
    misfits: list[str] = []
    moved = [scans[0]]
    for number, scan in enumerate(scans[1:], start=2):
        fit = refined(scan, moved)
        wrong = (
            "too few points of parts to refine the pose" if fit is None else _wrong(fit, scan, how)
        )
        if fit is not None:
            fits.append(fit)
        if wrong:
            misfits.append(f"pose {number} of {len(scans)}: {wrong}")
        elif fit is not None:
            moved.append(replace(scan, points=_apply(fit.corrected_from_known, scan.points)))
    cloud = base.fuse(scans if misfits else moved)
    flags = (*cloud.quality.flags, POSE_MISFIT) if misfits else cloud.quality.flags
    quality = replace(
        cloud.quality,
        residual_mm=max((fit.residual_mm for fit in fits), default=None),
        shift_mm=max((fit.shift_mm for fit in fits), default=None),
        turn_deg=max((fit.turn_deg for fit in fits), default=None),
        misfits=tuple(misfits),
        flags=flags,
    )
    return replace(cloud, quality=quality)


def refined(scan: Scan, earlier: Sequence[Scan]) -> Fit | None:
    """Fit a scan to those before it, all in the tray frame. None: too few points of parts."""
    import small_gicp

    pixel = max(scan.camera_pixel_mm, *(other.camera_pixel_mm for other in earlier))
    voxel = _VOXEL_PX * pixel
    source = _structure(scan, pixel)
    targets = [_structure(other, pixel) for other in earlier]
    if source is None or any(points is None for points in targets):
        return None
    target = np.concatenate([points for points in targets if points is not None])
    # About the middle of the parts a turn and a shift are told apart best.
    middle = source.mean(axis=0)
    reach = float(np.linalg.norm(source - middle, axis=1).mean())
    one, tree = small_gicp.preprocess_points(target - middle, downsampling_resolution=voxel)
    other, _ = small_gicp.preprocess_points(source - middle, downsampling_resolution=voxel)
    if min(one.size(), other.size()) < _LEAST_POINTS:
        return None
    moved = np.eye(4)
    for within in _REACH_VOXELS:
        found = small_gicp.align(
            one,
            other,
            tree,
            moved,
            registration_type="GICP",
            max_correspondence_distance=within * voxel,
            max_iterations=30,
            rotation_epsilon=1e-5,
            translation_epsilon=1e-3,
        )
        moved = np.asarray(found.T_target_source, np.float64)
    pairs = _pairs(one, tree, other, moved, voxel)
    correction = _fixed(moved, pairs, reach)
    pairs = _pairs(one, tree, other, correction, voxel)
    residual = float(np.sqrt(np.mean(pairs.across**2))) if len(pairs.across) else float("inf")
    about_middle = np.eye(4)
    about_middle[:3, 3] = middle
    return Fit(
        corrected_from_known=about_middle @ correction @ np.linalg.inv(about_middle),
        shift_mm=float(np.linalg.norm(correction[:3, 3])),
        turn_deg=float(np.degrees(np.linalg.norm(rotation_vector(correction[:3, :3])))),
        residual_mm=residual,
        overlap=len(pairs.across) / other.size(),
    )


def _structure(scan: Scan, pixel: float) -> Points | None:
    """The points of parts, and some of the tray around them."""
    z = scan.points[..., 2]
    with np.errstate(invalid="ignore"):
        part = scan.points[z > _RISE_PX * pixel].astype(np.float64)
        tray = scan.points[np.abs(z) <= _TRAY_PX * pixel]
    if len(part) < _LEAST_POINTS:
        return None
    step = max(1, int(len(tray) / max(1.0, _TRAY_SHARE * len(part))))
    return np.concatenate([part, tray[::step]])


@dataclass(frozen=True)
class _Pairs:
    """Points [N, 3] with a neighbour in the other pose, its normals, and the distances across."""

    points: Points
    normals: Points
    across: Points


def _pairs(target: Any, tree: Any, source: Any, moved: Points, voxel: float) -> _Pairs:
    points = np.asarray(source.points())[:, :3] @ moved[:3, :3].T + moved[:3, 3]
    numbers, squared = tree.batch_nearest_neighbor_search(points)
    near = np.asarray(squared) < (_REACH_VOXELS[-1] * voxel) ** 2
    number, points = np.asarray(numbers)[near], points[near]
    normals = np.asarray(target.normals())[number, :3]
    across = ((points - np.asarray(target.points())[number, :3]) * normals).sum(axis=1)
    return _Pairs(points, normals, across)


def _fixed(transform: Points, pairs: _Pairs, reach: float) -> Points:
    """The transform without what the surfaces do not fix; turns count as the way at `reach` mm."""
    lever = np.hstack([np.cross(pairs.points, pairs.normals) / reach, pairs.normals])
    information, directions = np.linalg.eigh(lever.T @ lever)
    known = directions[:, information >= _FIXED_SHARE * max(float(information[-1]), 1e-9)]
    move = np.concatenate([rotation_vector(transform[:3, :3]) * reach, transform[:3, 3]])
    move = known @ (known.T @ move)
    fixed = np.eye(4)
    fixed[:3, :3] = rotation_matrix(move[:3] / reach)
    fixed[:3, 3] = move[3:]
    return fixed


def _wrong(fit: Fit, scan: Scan, how: Fusion) -> str:
    """Why a fit must not be used; empty for a good one."""
    limit = how.max_residual_px * scan.camera_pixel_mm
    if fit.overlap < how.min_overlap:
        return (
            f"only {fit.overlap:.0%} of its points were seen from an earlier pose as well (limit "
            f"{how.min_overlap:.0%})"
        )
    if fit.shift_mm > how.max_shift_mm or fit.turn_deg > how.max_turn_deg:
        return (
            f"it would have to be corrected by {fit.shift_mm:.2f} mm and {fit.turn_deg:.2f} "
            f"degrees (limits {how.max_shift_mm:g} mm, {how.max_turn_deg:g} degrees)"
        )
    if not fit.residual_mm <= limit:
        return (
            f"its surfaces lie {fit.residual_mm:.3f} mm off those of earlier poses (limit "
            f"{limit:.3f} mm)"
        )
    return ""


def _apply(matrix: Points, points: NDArray[np.float32]) -> NDArray[np.float32]:
    rotation = matrix[:3, :3].T.astype(np.float32)
    return np.asarray(points @ rotation + matrix[:3, 3].astype(np.float32), np.float32)
