"""Defects made on the mesh of a resting part: crack, cut, deformation, dent.

They are real geometry, so the simulated scanner sees them as it would see true ones. It knows no
part names and no pictures; `DefectivePart.face_flag` says which faces are the defect.

The stated sizes, at size_scale 1, relative to the part's length E (longest side of its box):

    crack        open trench along a jittered path of length E * U(.35, .6); width E * U(.042, .073)
                 (E * U(.016, .028) * 2.6), depth .58 * width
    cut          everything beyond a plane is taken away: E * U(.10, .22) deep, but at most the top
                 fifth of the surface, within a band of half width E * U(.15, .35)
    deformation  the end of the part, 50 to 70 % of its longest axis, bent quadratically sideways or
                 upwards by E * U(.14, .28)
    dent         a dimple of radius r = E * U(.13, .22), r * U(.45, .7) deep

`size_scale` multiplies width and depth of a crack, depth of a cut, amplitude of a deformation and
radius (with it depth) of a dent. `size_mm` is crack width, cut depth, bend amplitude, dent depth;
`extent_mm` is crack path length, half width of the cut's band, bent length, dent radius.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from forge_station.sim.mesh import Bools, Floats, Mesh, densify, sample_surface

DEFECTS = ("crack", "cut", "deformation", "dent")

#: directions towards the camera: four azimuths at 45 degrees elevation, and from above
_TOWARDS_CAMERA = np.array([[1, 0, 1], [0, 1, 1], [-1, 0, 1], [0, -1, 1], [0, 0, 1]], dtype=float)
_TOWARDS_CAMERA /= np.linalg.norm(_TOWARDS_CAMERA, axis=1, keepdims=True)
_TRIES = 12


@dataclass(frozen=True, eq=False)
class DefectivePart:
    """A part with one defect. face_flag: bool [F], the faces that are the defect; sizes in mm."""

    mesh: Mesh
    face_flag: Bools
    kind: str
    size_mm: float
    extent_mm: float


@dataclass(frozen=True)
class _Place:
    """A surface point, its outward normal, and the length E of the part, mm."""

    point: Floats
    normal: Floats
    length: float


@dataclass(frozen=True)
class _Made:
    vertices: Floats
    mesh: Mesh  # same faces as `vertices`, before the displacement
    flagged: Bools  # per vertex
    size: float
    extent: float


def apply_defect(
    mesh: Mesh, kind: str, rng: np.random.Generator, size_scale: float = 1.0
) -> DefectivePart:
    """Copy of `mesh`, RESTING in the tray frame, with one defect that a camera can see.

    The place is random surface seen from above or from 45 degrees elevation; places where the
    defect comes out hidden are drawn again. The result rests on z = 0. ValueError for an unknown
    kind or a scale that is not positive.
    """
    if kind not in _MAKERS:
        raise ValueError(f"defect kind: expected one of {', '.join(DEFECTS)}, got {kind!r}")
    if not size_scale > 0.0:
        raise ValueError(f"defect size_scale: expected a positive number, got {size_scale!r}")
    make = _MAKERS[kind]
    length = float(mesh.extents().max())
    best: tuple[float, DefectivePart] | None = None
    for _ in range(_TRIES):
        point, normal = _visible_place(mesh, rng)
        part = _finish(make(mesh, _Place(point, normal, length), rng, size_scale), kind)
        seen = _visible_share(part, rng)
        if best is None or seen > best[0]:
            best = seen, part
        if seen >= 0.3:
            break
    assert best is not None
    return best[1]


def _finish(made: _Made, kind: str) -> DefectivePart:
    corners = made.flagged[made.mesh.faces].sum(axis=1)
    flag = corners >= (1 if kind == "crack" else 2)
    low = np.array([0.0, 0.0, float(made.vertices[:, 2].min())])
    return DefectivePart(
        Mesh(made.vertices - low, made.mesh.faces), flag, kind, made.size, made.extent
    )


# ---------------------------------------------------------------- visibility


def _visible_place(mesh: Mesh, rng: np.random.Generator) -> tuple[Floats, Floats]:
    points, normals, faces = sample_surface(mesh, 64, rng, _skyward(mesh))
    for point, normal, face in zip(points, normals, faces, strict=True):
        if _seen(mesh, point, normal, int(face)):
            return point, normal
    return points[0], normals[0]


def _skyward(mesh: Mesh) -> Floats:
    """Weight 1 for faces that may be seen from the camera directions, 0 for the others."""
    return np.asarray((mesh.face_normals()[:, 2] > -0.2).astype(np.float64))


def _seen(mesh: Mesh, point: Floats, normal: Floats, face: int) -> bool:
    """Whether any camera direction sees `point` of `face` at less than about 75 degrees."""
    for towards in _TOWARDS_CAMERA[_TOWARDS_CAMERA @ normal > 0.25]:
        if not _blocked(mesh, point, towards, face):
            return True
    return False


def _blocked(mesh: Mesh, point: Floats, towards: Floats, face: int) -> bool:
    """Whether the ray from `point` along the unit `towards` hits any face but `face`."""
    x, y = _tangents(towards)
    flat = (mesh.vertices - point) @ np.stack([x, y, towards], axis=1)
    u, v, depth = (flat[:, i][mesh.faces] for i in range(3))
    near = (
        (u.min(axis=1) <= 0.0) & (u.max(axis=1) >= 0.0)
        & (v.min(axis=1) <= 0.0) & (v.max(axis=1) >= 0.0) & (depth.max(axis=1) > 1e-6)
    )  # fmt: skip
    near[face] = False
    u, v, depth = u[near], v[near], depth[near]
    # origin inside the triangle: the three edge functions share a sign
    edges = [u[:, i] * v[:, (i + 1) % 3] - u[:, (i + 1) % 3] * v[:, i] for i in range(3)]
    area = edges[0] + edges[1] + edges[2]
    solid = np.abs(area) > 1e-12
    weight = [np.divide(edge, area, out=np.zeros_like(area), where=solid) for edge in edges]
    inside = solid & (weight[0] >= 0.0) & (weight[1] >= 0.0) & (weight[2] >= 0.0)
    at = weight[1] * depth[:, 0] + weight[2] * depth[:, 1] + weight[0] * depth[:, 2]
    size = float(np.abs(flat).max())
    return bool((inside & (at > 1e-4 * size)).any())


def _visible_share(part: DefectivePart, rng: np.random.Generator) -> float:
    """Share of the defect's area that a camera direction sees, from 8 samples; 0 for no area."""
    weight = part.face_flag.astype(np.float64)
    if not float((part.mesh.face_areas() * weight).sum()) > 0.0:
        return 0.0
    points, normals, faces = sample_surface(part.mesh, 8, rng, weight)
    seen = [
        _seen(part.mesh, point, normal, int(face))
        for point, normal, face in zip(points, normals, faces, strict=True)
    ]
    return float(np.mean(seen))


# ---------------------------------------------------------------- the four kinds


def _crack(mesh: Mesh, place: _Place, rng: np.random.Generator, scale: float) -> _Made:
    unit = place.length * rng.uniform(0.016, 0.028) * scale
    width, depth = unit * 2.6, unit * 1.5
    extent = place.length * rng.uniform(0.35, 0.6)
    along = np.cross(place.normal, rng.normal(size=3))
    along /= np.linalg.norm(along)
    across = np.cross(place.normal, along)
    steps = 14
    jitter = np.cumsum(rng.normal(size=steps)) * extent / steps * 0.8
    start = place.point - along * extent / 2.0
    path = start + np.concatenate(
        [np.zeros((1, 3)),
         np.arange(1, steps + 1)[:, None] * along * extent / steps + jitter[:, None] * across]
    )  # fmt: skip
    # distance to the path with only 30 % of the part along the normal: the trench follows the
    # surface over edges and curves
    flatten = np.eye(3) - 0.7 * np.outer(place.normal, place.normal)
    line = path @ flatten
    reach = extent / 2.0 + float(np.abs(jitter).max()) + width

    def distance(points: Floats) -> Floats:
        return _distance_to_path(points @ flatten, line)

    def max_edge(points: Floats) -> Floats:
        far = np.linalg.norm((points - place.point) @ flatten, axis=1) - reach
        result = np.maximum(0.6 * far, width / 3.0)
        close = far < width
        result[close] = np.maximum(width / 3.0, 0.6 * (distance(points[close]) - 0.6 * width))
        return result

    fine = densify(mesh, max_edge)
    offset = (fine.vertices - place.point) @ place.normal
    limit = min(0.35 * place.length, 0.18 * place.length + width)
    normals = fine.vertex_normals()
    facing = normals @ place.normal
    candidates = np.flatnonzero((offset > -limit) & (np.abs(facing) > 0.1))
    flagged = np.zeros(len(fine.vertices), dtype=bool)
    flagged[candidates] = distance(fine.vertices[candidates]) < width / 2.0
    inward = normals[flagged] * np.sign(facing[flagged])[:, None]
    vertices = fine.vertices.copy()
    vertices[flagged] -= inward * depth
    return _Made(vertices, fine, flagged, width, extent)


def _distance_to_path(points: Floats, path: Floats) -> Floats:
    best = np.full(len(points), np.inf)
    for a, b in zip(path[:-1], path[1:], strict=True):
        edge = b - a
        offset = points - a
        share = np.clip(offset @ edge / float(edge @ edge), 0.0, 1.0)
        offset -= share[:, None] * edge
        np.minimum(best, np.einsum("ij,ij->i", offset, offset), out=best)
    return np.sqrt(best)


def _cut(mesh: Mesh, place: _Place, rng: np.random.Generator, scale: float) -> _Made:
    normal = place.normal * 0.6 + rng.normal(size=3) * 0.45
    normal /= np.linalg.norm(normal)
    depth = place.length * rng.uniform(0.10, 0.22) * scale
    half = place.length * rng.uniform(0.15, 0.35)
    sample, _, _ = sample_surface(mesh, 1500, rng)
    top = float((mesh.vertices @ normal).max())
    level = max(top - depth, float(np.quantile(sample @ normal, 0.80)))
    along = np.cross(normal, rng.normal(size=3))
    along /= np.linalg.norm(along)
    middle = float(place.point @ along)

    def max_edge(points: Floats) -> Floats:
        outside = np.maximum(level - points @ normal, np.abs(points @ along - middle) - half)
        return np.asarray(np.maximum(half / 12.0, 0.6 * outside))

    fine = densify(mesh, max_edge)
    height = fine.vertices @ normal
    flagged = (height > level) & (np.abs(fine.vertices @ along - middle) < half)
    vertices = fine.vertices.copy()
    vertices[flagged] -= (height[flagged] - level)[:, None] * normal
    size = float((height[flagged] - level).max()) if flagged.any() else 0.0
    return _Made(vertices, fine, flagged, size, half)


def _deformation(mesh: Mesh, place: _Place, rng: np.random.Generator, scale: float) -> _Made:
    axis = np.linalg.eigh(np.cov(mesh.vertices.T))[1][:, 2]
    if rng.random() < 0.5:
        axis = -axis
    along = mesh.vertices @ axis
    start = float(along.min() + np.ptp(along) * rng.uniform(0.3, 0.5))
    bent = float(along.max() - start)
    amplitude = place.length * rng.uniform(0.14, 0.28) * scale
    sideways = np.cross(axis, rng.normal(size=3))
    sideways /= np.linalg.norm(sideways)
    if sideways[2] < -0.1:  # the tray is in the way
        sideways = -sideways

    def max_edge(points: Floats) -> Floats:
        return np.where(points @ axis > start - 1.0, bent / 14.0, np.inf)

    fine = densify(mesh, max_edge)
    share = np.clip((fine.vertices @ axis - start) / bent, 0.0, None) ** 2
    vertices = fine.vertices + share[:, None] * (amplitude * sideways)
    flagged = share * amplitude > min(0.05 * place.length, 0.3 * amplitude)
    return _Made(vertices, fine, flagged, amplitude, bent)


def _dent(mesh: Mesh, place: _Place, rng: np.random.Generator, scale: float) -> _Made:
    radius = place.length * rng.uniform(0.13, 0.22) * scale
    depth = radius * rng.uniform(0.45, 0.7)

    def max_edge(points: Floats) -> Floats:
        away = np.linalg.norm(points - place.point, axis=1) - radius
        return np.asarray(np.maximum(radius / 10.0, 0.6 * away))

    fine = densify(mesh, max_edge)
    away = np.linalg.norm(fine.vertices - place.point, axis=1) / radius
    share = np.where(away < 1.0, (1.0 - np.minimum(away, 1.0) ** 2) ** 2, 0.0)
    vertices = fine.vertices - share[:, None] * (depth * place.normal)
    return _Made(vertices, fine, share > 0.12, depth, radius)


_MAKERS: dict[str, Callable[[Mesh, _Place, np.random.Generator, float], _Made]] = {
    "crack": _crack,
    "cut": _cut,
    "deformation": _deformation,
    "dent": _dent,
}


def _tangents(normal: Floats) -> tuple[Floats, Floats]:
    helper = np.eye(3)[int(np.abs(normal).argmin())]
    x = np.cross(normal, helper)
    x /= np.linalg.norm(x)
    return x, np.cross(normal, x)
