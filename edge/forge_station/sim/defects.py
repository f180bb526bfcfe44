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
from dataclasses import dataclass, replace

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
    mesh: Mesh,
    kind: str,
    rng: np.random.Generator,
    size_scale: float = 1.0,
    *,
    closed: bool = False,
) -> DefectivePart:
    """Copy of `mesh`, RESTING in the tray frame, with one defect that a camera can see.

    The place is random surface seen from above or from 45 degrees elevation; places where the
    defect comes out hidden are drawn again. The result is moved up or down so that its lowest z is
    0, and not put down anew. `closed`: a crack without depth, which is only another colour (see
    `scanner.STAIN`). ValueError for an unknown kind or a scale that is not positive.
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
        made = make(mesh, _Place(point, normal, length), rng, size_scale)
        if closed:
            made = replace(made, vertices=made.mesh.vertices)
        part = _finish(made, kind)
        seen = _visible_share(mesh, made, part, rng)
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
    # surface that faces up is what the views show most of
    upward = np.clip(mesh.face_normals()[:, 2] + 0.5, 0.0, 1.0)
    upward[mesh.face_normals()[:, 2] < -0.2] = 0.0
    points, normals, _ = sample_surface(mesh, 64, rng, upward)
    for point, normal in zip(points, normals, strict=True):
        if _seen(mesh, point, normal):
            return point, normal
    return points[0], normals[0]


def _seen(mesh: Mesh, point: Floats, normal: Floats) -> bool:
    """Whether any camera direction sees the surface `point` at less than about 75 degrees."""
    facing = _TOWARDS_CAMERA @ normal
    for i in np.argsort(-facing):
        if facing[i] <= 0.25:
            return False
        if not _blocked(mesh, point, _TOWARDS_CAMERA[i]):
            return True
    return False


def _blocked(mesh: Mesh, point: Floats, towards: Floats) -> bool:
    """Whether the ray from `point` along the unit `towards` hits a face beyond a short start."""
    x, y = _tangents(towards)
    flat = np.stack([x, y, towards]) @ (mesh.vertices - point).T
    # a face can only be hit if its corners lie on both sides of the ray in u and in v
    a, b, c = mesh.faces[:, 0], mesh.faces[:, 1], mesh.faces[:, 2]
    right, above = flat[0] > 0.0, flat[1] > 0.0
    across = (right[a] != right[b]) | (right[a] != right[c])
    near = np.flatnonzero(across)
    a, b, c = a[near], b[near], c[near]
    near = near[(above[a] != above[b]) | (above[a] != above[c])]
    u, v, depth = (flat[i][mesh.faces[near]] for i in range(3))
    # origin inside the triangle: the three edge functions share a sign
    edges = [u[:, i] * v[:, (i + 1) % 3] - u[:, (i + 1) % 3] * v[:, i] for i in range(3)]
    area = edges[0] + edges[1] + edges[2]
    solid = np.abs(area) > 1e-12
    weight = [np.divide(edge, area, out=np.zeros_like(area), where=solid) for edge in edges]
    inside = solid & (weight[0] >= 0.0) & (weight[1] >= 0.0) & (weight[2] >= 0.0)
    at = weight[1] * depth[:, 0] + weight[2] * depth[:, 1] + weight[0] * depth[:, 2]
    start = 2e-3 * float(np.abs(flat[2]).max())
    return bool((inside & (at > start)).any())


def _visible_share(mesh: Mesh, made: _Made, part: DefectivePart, rng: np.random.Generator) -> float:
    """Share of the defect's area that a camera direction sees, from 6 samples; 0 for no area.

    Judged before the displacement, on the coarse sound `mesh`: that is several times faster, and
    what is visible then stays so but for the walls. A cut is judged on the new surface, against
    the sound mesh less what was taken away.
    """
    cut = part.kind == "cut"
    surface = part.mesh if cut else made.mesh
    weight = part.face_flag.astype(np.float64)
    if not float((surface.face_areas() * weight).sum()) > 0.0:
        return 0.0
    points, normals, _ = sample_surface(surface, 6, rng, weight)
    blocker = part.mesh if cut else mesh
    return float(np.mean([_seen(blocker, p, n) for p, n in zip(points, normals, strict=True)]))


# ---------------------------------------------------------------- the four kinds


def _crack(mesh: Mesh, place: _Place, rng: np.random.Generator, scale: float) -> _Made:
    unit = place.length * rng.uniform(0.016, 0.028) * scale
    width, depth = unit * 2.6, unit * 1.5
    extent = place.length * rng.uniform(0.35, 0.6)
    along = np.cross(place.normal, rng.normal(size=3))
    along /= np.linalg.norm(along)
    across = np.cross(place.normal, along)
    # a random walk across the tangent plane, one step for each of 14 equal lengths
    steps = 14
    step = extent / steps
    walk = np.concatenate([[0.0], np.cumsum(rng.normal(size=steps) * step * 0.8)])
    reach = extent / 2.0 + float(np.abs(walk).max()) + width
    frame = np.stack([along, across, place.normal], axis=1)

    def distance(points: Floats) -> Floats:
        # only 30 % of the part along the normal counts, so that the trench follows the surface
        # over edges and curves
        local = (points - place.point) @ frame * np.array([1.0, 1.0, 0.3])
        local[:, 0] += extent / 2.0
        return _distance_to_walk(local, walk, step)

    def max_edge(points: Floats) -> Floats:
        offset = points - place.point
        far = np.sqrt(np.einsum("ij,ij->i", offset, offset)) - reach
        result = np.maximum(0.6 * far, width / 3.0)
        close = far < width
        result[close] = np.maximum(width / 3.0, 0.6 * (distance(points[close]) - 0.6 * width))
        return np.asarray(result)

    fine = densify(mesh, max_edge, shortest=width / 3.0)
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


def _distance_to_walk(local: Floats, walk: Floats, step: float) -> Floats:
    """Distance of points [N, 3] to the polyline (k * step, walk[k], 0), from its near segments."""
    count = len(walk) - 1
    at = np.floor(local[:, 0] / step).astype(np.int64)
    height = local[:, 2] ** 2
    best = np.full(len(local), np.inf)
    for shift in (-2, -1, 0, 1, 2):
        k = np.clip(at + shift, 0, count - 1)
        rise = walk[k + 1] - walk[k]
        x, y = local[:, 0] - k * step, local[:, 1] - walk[k]
        share = np.clip((x * step + y * rise) / (step**2 + rise**2), 0.0, 1.0)
        best = np.minimum(best, (x - share * step) ** 2 + (y - share * rise) ** 2)
    return np.sqrt(best + height)


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

    fine = densify(mesh, max_edge, shortest=half / 12.0)
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

    fine = densify(mesh, max_edge, shortest=bent / 14.0)
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

    fine = densify(mesh, max_edge, shortest=radius / 10.0)
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
