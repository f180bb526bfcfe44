"""Meshes: malformed input, sampling, and refinement that keeps a closed surface closed."""

from __future__ import annotations

import numpy as np
import pytest

from forge_station.sim.mesh import Floats, Mesh, concat, densify, sample_surface


def cube(size: float = 2.0) -> Mesh:
    corners = np.array([[x, y, z] for x in (0, 1) for y in (0, 1) for z in (0, 1)], dtype=float)
    quads = [(0, 1, 3, 2), (4, 6, 7, 5), (0, 4, 5, 1), (2, 3, 7, 6), (0, 2, 6, 4), (1, 5, 7, 3)]
    faces = [t for a, b, c, d in quads for t in ((a, b, c), (a, c, d))]
    return Mesh(corners * size, np.array(faces, dtype=np.int32))


def open_edges(mesh: Mesh) -> int:
    """Directed edges whose opposite is missing; 0 for a closed, consistently oriented mesh."""
    edges = mesh.faces[:, [0, 1, 1, 2, 2, 0]].reshape(-1, 2).tolist()
    there = {(a, b) for a, b in edges}
    return sum((b, a) not in there for a, b in there) + len(edges) - len(there)


@pytest.mark.parametrize(
    ("vertices", "faces", "message"),
    [
        (np.zeros((3, 2)), np.zeros((1, 3), dtype=int), "vertices"),
        (np.zeros((3, 3)), np.zeros((1, 4), dtype=int), "faces"),
        (np.zeros((3, 3)), np.array([[0, 1, 3]]), "outside"),
        (np.zeros((3, 3)), np.array([[0, 1, -1]]), "outside"),
    ],
)
def test_malformed_arrays_are_refused(vertices: Floats, faces: Floats, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mesh(vertices, faces.astype(np.int32))


def test_sampling_a_mesh_without_area_is_refused() -> None:
    flat = Mesh(np.zeros((3, 3)), np.array([[0, 1, 2]], dtype=np.int32))
    with pytest.raises(ValueError, match="no area"):
        sample_surface(flat, 10, np.random.default_rng(0))
    with pytest.raises(ValueError, match="no area"):
        sample_surface(cube(), 10, np.random.default_rng(0), np.zeros(12))


def test_normals_point_outwards_and_a_face_without_area_has_none() -> None:
    box = cube()
    middle = box.vertices[box.faces].mean(axis=1) - 1.0
    assert (np.einsum("ij,ij->i", middle, box.face_normals()) > 0.9).all()
    outwards = (box.vertices - 1.0) / 3**0.5
    assert (np.einsum("ij,ij->i", outwards, box.vertex_normals()) > 0.8).all()
    flat = Mesh(np.zeros((3, 3)), np.array([[0, 1, 2]], dtype=np.int32))
    assert not flat.face_normals().any()


def test_volume_and_centre_of_mass_survive_a_motion() -> None:
    turn = np.array([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    volume, centre = cube().transformed(turn, [5.0, 0.0, 1.0]).volume_and_centroid()
    assert volume == pytest.approx(8.0)
    assert centre == pytest.approx([4.0, 1.0, 2.0])


def test_an_open_mesh_answers_its_surface_centroid() -> None:
    sheet = Mesh(np.array([[0, 0, 1], [3, 0, 1], [0, 3, 1]], dtype=float), np.array([[0, 1, 2]]))
    volume, centre = sheet.volume_and_centroid()
    assert volume == 0.0
    assert centre == pytest.approx([1.0, 1.0, 1.0])


def test_concat_keeps_faces_in_order() -> None:
    both = concat([cube(), cube().transformed(translation=[10.0, 0.0, 0.0])])
    assert len(both.faces) == 24
    assert both.vertices[both.faces[12:]][..., 0].min() == 10.0
    assert len(concat([]).faces) == 0


def test_samples_lie_on_their_face_and_follow_the_weights() -> None:
    box = cube()
    weight = np.zeros(12)
    weight[3] = 1.0
    points, normals, index = sample_surface(box, 200, np.random.default_rng(1), weight)
    assert (index == 3).all()
    corner = box.vertices[box.faces[3, 0]]
    assert (points - corner) @ normals[0] == pytest.approx(np.zeros(200), abs=1e-12)
    _, _, spread = sample_surface(box, 12_000, np.random.default_rng(2))
    assert np.bincount(spread, minlength=12) == pytest.approx(np.full(12, 1000), rel=0.15)


def test_refinement_is_fine_where_asked_closed_and_keeps_the_shape() -> None:
    box = cube()

    def max_edge(points: Floats) -> Floats:
        return np.asarray(0.05 + 0.5 * np.linalg.norm(points, axis=1))

    fine = densify(box, max_edge)
    corners = fine.vertices[fine.faces]
    edges = np.concatenate([corners[:, i] - corners[:, (i + 1) % 3] for i in range(3)])
    middles = np.concatenate([corners[:, i] + corners[:, (i + 1) % 3] for i in range(3)]) / 2
    assert (np.linalg.norm(edges, axis=1) <= max_edge(middles) + 1e-12).all()
    assert open_edges(fine) == 0
    assert fine.volume_and_centroid()[0] == pytest.approx(8.0)
    assert fine.face_areas().sum() == pytest.approx(24.0)


def test_refinement_stops_at_the_face_limit() -> None:
    fine = densify(cube(), lambda p: np.full(len(p), 1e-3), max_faces=2000)
    assert 2000 <= len(fine.faces) <= 8000


def test_a_shortest_edge_changes_nothing_but_the_time() -> None:
    def max_edge(points: Floats) -> Floats:
        return np.maximum(0.3, np.abs(points[:, 0] - 1.0))

    assert len(densify(cube(), max_edge).faces) == len(
        densify(cube(), max_edge, shortest=0.3).faces
    )
