"""Triangle meshes in mm: value type, rigid motion, concatenation, surface sampling, refinement.

It knows nothing of fasteners, defects or scanners.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Mesh:
    """Triangles in mm. Faces are counter-clockwise seen from outside.

    vertices: float64 [V, 3]; faces: int32 [F, 3]. Compared and hashed by identity, so that derived
    data can be cached per mesh. The arrays must not be changed in place.
    """

    vertices: Floats
    faces: Ints

    def __post_init__(self) -> None:
        vertices = np.ascontiguousarray(self.vertices, dtype=np.float64)
        faces = np.ascontiguousarray(self.faces, dtype=np.int32)
        if vertices.ndim != 2 or vertices.shape[1] != 3:
            raise ValueError(f"mesh vertices: expected shape [V, 3], got {vertices.shape}")
        if faces.ndim != 2 or faces.shape[1] != 3:
            raise ValueError(f"mesh faces: expected shape [F, 3], got {faces.shape}")
        if faces.size and (int(faces.min()) < 0 or int(faces.max()) >= len(vertices)):
            raise ValueError(
                f"mesh faces: index {int(faces.max())} or {int(faces.min())} is outside the "
                f"{len(vertices)} vertices"
            )
        object.__setattr__(self, "vertices", vertices)
        object.__setattr__(self, "faces", faces)

    @cached_property
    def _area_vectors(self) -> Floats:
        a, b, c = (self.vertices[self.faces[:, i]] for i in range(3))
        return np.cross(b - a, c - a) * 0.5

    def face_areas(self) -> Floats:
        """Area of each face, mm^2, float64 [F]."""
        return np.asarray(np.linalg.norm(self._area_vectors, axis=1))

    def face_normals(self) -> Floats:
        """Unit outward normal of each face, float64 [F, 3]; (0, 0, 0) for a face without area."""
        area = self.face_areas()[:, None]
        return np.divide(
            self._area_vectors, area, out=np.zeros_like(self._area_vectors), where=area > 1e-12
        )

    def vertex_normals(self) -> Floats:
        """Unit area-weighted normal of each vertex, float64 [V, 3]; zero where undefined."""
        total = np.zeros_like(self.vertices)
        for axis in range(3):
            per_corner = np.repeat(self._area_vectors[:, axis], 3)
            total[:, axis] = np.bincount(
                self.faces.ravel(), weights=per_corner, minlength=len(self.vertices)
            )
        length = np.linalg.norm(total, axis=1, keepdims=True)
        unit = np.divide(total, length, out=np.zeros_like(total), where=length > 1e-12)
        return np.asarray(unit)

    def volume_and_centroid(self) -> tuple[float, Floats]:
        """Signed volume, mm^3, and centre of mass, float64 [3], of a closed mesh.

        A mesh without volume (open or flat) answers 0.0 and the centroid of its surface.
        """
        a, b, c = (self.vertices[self.faces[:, i]] for i in range(3))
        origin = self.vertices.mean(axis=0) if len(self.vertices) else np.zeros(3)
        a, b, c = a - origin, b - origin, c - origin
        tetra = np.einsum("ij,ij->i", a, np.cross(b, c)) / 6.0
        volume = float(tetra.sum())
        area = self.face_areas()
        size = float(np.ptp(self.vertices, axis=0).max()) if len(self.vertices) else 0.0
        if abs(volume) <= 1e-6 * size**3:
            middle = (a + b + c) / 3.0
            weight = max(float(area.sum()), 1e-12)
            return 0.0, origin + (middle * area[:, None]).sum(axis=0) / weight
        centroid = ((a + b + c) * tetra[:, None]).sum(axis=0) / (4.0 * volume)
        return volume, origin + centroid

    def bounds(self) -> tuple[Floats, Floats]:
        """Lowest and highest corner of the axis-aligned box, each float64 [3], mm."""
        return self.vertices.min(axis=0), self.vertices.max(axis=0)

    def extents(self) -> Floats:
        """Size of the axis-aligned box, float64 [3], mm."""
        low, high = self.bounds()
        return high - low

    def transformed(
        self, rotation: Floats | None = None, translation: Sequence[float] | Floats | None = None
    ) -> Mesh:
        """Copy rotated by a 3x3 matrix (new = R @ old), then moved by a 3-vector in mm."""
        vertices = self.vertices
        if rotation is not None:
            vertices = vertices @ np.asarray(rotation, dtype=np.float64).T
        if translation is not None:
            vertices = vertices + np.asarray(translation, dtype=np.float64)
        return Mesh(vertices, self.faces)


def concat(meshes: Sequence[Mesh]) -> Mesh:
    """One mesh of all faces, in order; face k of mesh i comes after all faces of mesh i - 1."""
    if not meshes:
        return Mesh(np.zeros((0, 3)), np.zeros((0, 3), dtype=np.int32))
    offsets = np.cumsum([0] + [len(mesh.vertices) for mesh in meshes[:-1]])
    return Mesh(
        np.concatenate([mesh.vertices for mesh in meshes]),
        np.concatenate(
            [mesh.faces + np.int32(offset) for mesh, offset in zip(meshes, offsets, strict=True)]
        ),
    )


def sample_surface(
    mesh: Mesh, n: int, rng: np.random.Generator, weights: Floats | None = None
) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """`n` random surface points: (points [n, 3] mm, outward normals [n, 3], face index [n]).

    Density is uniform per area, times `weights` [F] where given. ValueError for a mesh without
    sampleable area.
    """
    share = mesh.face_areas()
    if weights is not None:
        share = share * np.asarray(weights, dtype=np.float64)
    cumulative = np.cumsum(share)
    if not len(cumulative) or not cumulative[-1] > 0.0:
        raise ValueError("sample_surface: the mesh has no area of weight above 0")
    pick = np.searchsorted(cumulative, rng.random(n) * cumulative[-1], side="right")
    pick = np.minimum(pick, len(cumulative) - 1)
    u = np.sqrt(rng.random((n, 1)))
    v = rng.random((n, 1))
    a, b, c = (mesh.vertices[mesh.faces[pick, i]] for i in range(3))
    points = a * (1.0 - u) + b * (u * (1.0 - v)) + c * (u * v)
    normal = mesh._area_vectors[pick]
    normal = normal / np.maximum(np.linalg.norm(normal, axis=1, keepdims=True), 1e-300)
    return points, normal, pick.astype(np.int64)


def densify(
    mesh: Mesh,
    max_edge_at: Callable[[Floats], Floats],
    *,
    shortest: float = 0.0,
    max_faces: int = 200_000,
    rounds: int = 14,
) -> Mesh:
    """Split edges until none is longer than `max_edge_at(midpoints [N, 3]) -> [N]` mm allows.

    Conforming: two faces that share an edge split it at the same point, so a closed mesh stays
    closed. Edges up to `shortest` mm are never asked about (give the least value of `max_edge_at`:
    it saves time). Stops at `max_faces` or after `rounds` halvings.
    """
    vertices = mesh.vertices
    done: list[Ints] = []
    active: NDArray[np.int64] = mesh.faces.astype(np.int64)
    kept = 0
    for _ in range(rounds):
        if not len(active) or kept + len(active) > max_faces:
            break
        # an edge is judged by its midpoint and length only: both sides decide alike, and an edge
        # that is left whole now is never split later, so finished faces drop out of the loop
        a, b, c = (vertices[active[:, i]] for i in range(3))
        pairs = ((a, b), (b, c), (c, a))
        split = np.stack([_too_long(p, q, max_edge_at, shortest) for p, q in pairs], axis=1)
        touched = split.any(axis=1)
        done.append(active[~touched].astype(np.int32))
        kept += len(done[-1])
        active = active[touched]
        split = split[touched]
        if not len(active):
            break
        ends = np.sort(np.stack([active, np.roll(active, -1, axis=1)], axis=-1), axis=-1)[split]
        key, inverse = np.unique(ends[:, 0] * len(vertices) + ends[:, 1], return_inverse=True)
        middle = np.full(split.shape, -1, dtype=np.int64)
        middle[split] = len(vertices) + inverse.ravel()
        halves = (vertices[key // len(vertices)] + vertices[key % len(vertices)]) * 0.5
        vertices = np.concatenate([vertices, halves])
        active = _split_faces(active, middle)
    done.append(active.astype(np.int32))
    return Mesh(vertices, np.concatenate(done))


def _too_long(
    p: Floats, q: Floats, max_edge_at: Callable[[Floats], Floats], shortest: float
) -> Bools:
    edge = p - q
    length = np.sqrt(np.einsum("ij,ij->i", edge, edge))
    long = length > shortest
    long[long] = length[long] > max_edge_at((p[long] + q[long]) * 0.5)
    return np.asarray(long)


def _split_faces(faces: NDArray[np.int64], middle: NDArray[np.int64]) -> NDArray[np.int64]:
    """Faces [F, 3] with edge midpoints [F, 3] (-1: edge stays whole) -> finer faces."""
    count = (middle >= 0).sum(axis=1)
    out: list[NDArray[np.int64]] = [faces[count == 0]]

    def add(*corners: NDArray[np.int64]) -> None:
        out.append(np.stack(corners, axis=1))

    for k in range(3):
        face, mid = np.roll(faces, -k, axis=1), np.roll(middle, -k, axis=1)
        one = (count == 1) & (mid[:, 0] >= 0)
        a, b, c = face[one].T
        m = mid[one, 0]
        add(a, m, c)
        add(m, b, c)
        two = (count == 2) & (mid[:, 2] < 0)
        a, b, c = face[two].T
        m, n = mid[two, 0], mid[two, 1]
        add(m, b, n)
        add(a, m, n)
        add(a, n, c)
    three = count == 3
    a, b, c = faces[three].T
    m, n, o = middle[three].T
    add(a, m, o)
    add(m, b, n)
    add(o, n, c)
    add(m, n, o)
    return np.concatenate(out)
