"""Gravity-stable poses of a rigid part on a flat tray, and a part put down in one of them.

A part rests on a facet of its convex hull above which its centre of mass stays. From any other
facet it rolls on. Probabilities are solid angles seen from the centre of mass, those of unstable
facets added to where they roll (Goldberg et al. 1999, "Part pose statistics"). A pose counts as
stable only if it survives a real tilt, so washers do not stand on their rim and long screws do
not stand on their tip. It knows no part names.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import ConvexHull

from forge_station.sim.mesh import Bools, Floats, Mesh

#: tilt that a pose must survive, rad; 10 degrees
MIN_TILT = float(np.radians(10.0))
#: tilt that suffices where a part ends in this share of throws: there is no better pose then
_LEAST_TILT, _USUAL = float(np.radians(3.0)), 0.35
#: poses (all facets of equal height together) below this probability are dropped
MIN_PROBABILITY = 0.04
#: hull vertices this close to the tray, as a share of the centre's height, count as support
_CONTACT = 0.05
#: share of its height by which the centre may be lower after a tilt (round bodies have facets)
_ROLL = 0.006


@dataclass(frozen=True, eq=False)
class RestPose:
    """rotation: float64 [3, 3], tray_from_part; the part then rests on its lowest z."""

    rotation: Floats
    probability: float


_POSES: WeakKeyDictionary[Mesh, tuple[RestPose, ...]] = WeakKeyDictionary()


def rest_poses(mesh: Mesh) -> tuple[RestPose, ...]:
    """All stable poses of `mesh`, most probable first; their probabilities sum to 1.

    A round body has one pose per hull facet it can roll onto. Cached per mesh object. Closed
    meshes are weighed by volume, others by surface. ValueError for a mesh without a 3D hull.
    """
    known = _POSES.get(mesh)
    if known is None:
        known = _POSES[mesh] = _find(mesh)
    return known


def rest(mesh: Mesh, rng: np.random.Generator) -> Mesh:
    """Copy in a random stable pose and a random yaw: lowest z is 0, box centred in x and y, mm."""
    poses = rest_poses(mesh)
    share = np.array([pose.probability for pose in poses])
    pose = poses[int(rng.choice(len(poses), p=share / share.sum()))]
    yaw = rng.uniform(0.0, 2.0 * np.pi)
    cos, sin = np.cos(yaw), np.sin(yaw)
    turn = np.array([[cos, -sin, 0.0], [sin, cos, 0.0], [0.0, 0.0, 1.0]])
    return settle(mesh.transformed(turn @ pose.rotation))


def settle(mesh: Mesh) -> Mesh:
    """Copy moved so that the lowest z is 0 and the box is centred at x = y = 0."""
    low, high = mesh.bounds()
    middle = (low + high) * 0.5
    return mesh.transformed(translation=np.array([-middle[0], -middle[1], -low[2]]))


def _find(mesh: Mesh) -> tuple[RestPose, ...]:
    if len(mesh.vertices) < 4:
        raise ValueError(f"rest_poses: expected a solid mesh, got {len(mesh.vertices)} vertices")
    _, centre = mesh.volume_and_centroid()
    hull = ConvexHull(mesh.vertices - centre)
    normals, height = hull.equations[:, :3], -hull.equations[:, 3]
    corners = hull.points[hull.simplices]
    angle = _solid_angles(corners)
    final = _roll(corners, normals, height, hull.neighbors)
    mass = np.bincount(final, weights=angle, minlength=len(final)) / angle.sum()
    outline = hull.points[hull.vertices]
    size = float(np.ptp(outline, axis=0).max())
    found = np.flatnonzero(mass > 1e-6)
    found = found[np.argsort(-mass[found])]
    found = found[_alike(height[found], mass[found], size) >= MIN_PROBABILITY]
    tilt, rolls_on = _stability(outline, normals[found], height[found])
    usual = _alike(height[found], mass[found], size) >= _USUAL
    stable = ~rolls_on & ((tilt >= MIN_TILT) | (usual & (tilt >= _LEAST_TILT)))
    if stable.any():  # else a ball, or nothing but knife edges: keep what is there
        found = found[stable]
        share = mass[found] / mass[found].sum()
        found = found[_alike(height[found], share, size) >= MIN_PROBABILITY]
    total = mass[found].sum()
    return tuple(RestPose(_down(normals[i]), float(mass[i] / total)) for i in found)


def _solid_angles(corners: Floats) -> Floats:
    """Solid angle of triangles [N, 3, 3] seen from the origin (van Oosterom and Strackee)."""
    a, b, c = corners[:, 0], corners[:, 1], corners[:, 2]
    la, lb, lc = (np.linalg.norm(p, axis=1) for p in (a, b, c))
    det = np.abs(np.einsum("ij,ij->i", a, np.cross(b, c)))
    dot = np.einsum
    below = (
        la * lb * lc
        + dot("ij,ij->i", a, b) * lc
        + dot("ij,ij->i", b, c) * la
        + dot("ij,ij->i", c, a) * lb
    )
    return np.asarray(2.0 * np.arctan2(det, below))


def _roll(
    corners: Floats, normals: Floats, height: Floats, neighbours: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Facet on which the part ends when it is put down on each facet, int64 [N].

    It rolls over the edge that the centre of mass hangs out of furthest, always to a facet under
    which the centre is not higher.
    """
    foot = normals * height[:, None]
    count = len(corners)
    outside = np.empty((count, 3))
    for k in range(3):  # the edge opposite corner k, shared with neighbours[:, k]
        p, q = corners[:, (k + 1) % 3], corners[:, (k + 2) % 3]
        edge = q - p
        away = np.cross(edge, normals)
        inward = np.einsum("ij,ij->i", corners[:, k] - p, away)
        away = np.where((inward > 0.0)[:, None], -away, away)
        length = np.maximum(np.linalg.norm(away, axis=1), 1e-12)
        outside[:, k] = np.einsum("ij,ij->i", foot - p, away) / length
    worst = outside.argmax(axis=1)
    rows = np.arange(count)
    target = neighbours[rows, worst].astype(np.int64)
    moves = (outside[rows, worst] > 1e-9) & (height[target] <= height + 1e-9)
    following = np.where(moves, target, rows)
    for _ in range(14):  # pointer doubling: 2^14 rolls
        following = following[following]
    return following


def _stability(outline: Floats, normals: Floats, height: Floats) -> tuple[Floats, Bools]:
    """How the part stands on the plane of each normal [N, 3].

    Returns the tilt, rad [N], at which its centre leaves the support, and whether it rolls on, bool
    [N]: tilted by twice MIN_TILT its centre lies lower, as on a smooth dome made of facets.
    """
    x, y = _planes(normals)
    up = outline @ normals.T
    east, north = outline @ x.T, outline @ y.T
    contact = up > height * (1.0 - _CONTACT)
    reach = np.full(len(normals), np.inf)
    tilted = np.full(len(normals), np.inf)
    for turn in np.linspace(0.0, 2.0 * np.pi, 16, endpoint=False):
        outward = np.cos(turn) * east + np.sin(turn) * north
        np.minimum(reach, np.where(contact, outward, -np.inf).max(axis=0), out=reach)
        lowest = (np.cos(2.0 * MIN_TILT) * up + np.sin(2.0 * MIN_TILT) * outward).max(axis=0)
        np.minimum(tilted, lowest, out=tilted)
    return np.arctan2(reach, height), np.asarray(tilted < height * (1.0 - _ROLL))


def _alike(height: Floats, mass: Floats, size: float) -> Floats:
    """Mass of all facets of about the same height as each: rotations of one and the same pose."""
    order = np.argsort(height)
    ladder, running = height[order], np.concatenate([[0.0], np.cumsum(mass[order])])
    first = np.searchsorted(ladder, height - 0.01 * size)
    last = np.searchsorted(ladder, height + 0.01 * size, side="right")
    return np.asarray(running[last] - running[first])


def _planes(normals: Floats) -> tuple[Floats, Floats]:
    """Two unit vectors across each normal, so that (x, y, normal) is right-handed; each [N, 3]."""
    helper = np.eye(3)[np.abs(normals).argmin(axis=1)]
    x = np.cross(helper, normals)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x, np.cross(normals, x)


def _down(normal: Floats) -> Floats:
    """Rotation that turns the outward `normal` to -z."""
    x, y = _planes(normal[None])
    return np.stack([x[0], -y[0], -normal])
