"""Defects: stated sizes, visible places, honest flags, parts that still rest on the tray."""

from __future__ import annotations

import numpy as np
import pytest

from forge_station.contract.catalogue import CATALOGUE, by_id
from forge_station.sim.defects import DEFECTS, apply_defect
from forge_station.sim.fasteners import build
from forge_station.sim.mesh import Mesh
from forge_station.sim.rest_pose import rest

#: stated size over part length, lowest and highest
SIZES = {
    "crack": (0.016 * 2.6, 0.028 * 2.6),
    "cut": (0.0, 0.22),
    "deformation": (0.14, 0.28),
    "dent": (0.13 * 0.45, 0.22 * 0.7),
}


def resting(part: str, seed: int = 0) -> Mesh:
    rng = np.random.default_rng(seed)
    return rest(build(by_id(part), rng), rng)


@pytest.mark.parametrize("kind", ["", "scratch", "normal", "Dent"])
def test_an_unknown_kind_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="crack, cut, deformation, dent"):
        apply_defect(resting("hex_nut M8"), kind, np.random.default_rng(0))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_a_scale_that_is_not_positive_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="size_scale"):
        apply_defect(resting("hex_nut M8"), "dent", np.random.default_rng(0), scale)


@pytest.mark.parametrize("kind", DEFECTS)
def test_every_part_can_have_it_with_the_stated_size(kind: str) -> None:
    rng = np.random.default_rng(11)
    for model in CATALOGUE[::9]:
        mesh = rest(build(model, rng), rng)
        part = apply_defect(mesh, kind, rng)
        length = float(mesh.extents().max())
        assert part.kind == kind
        assert part.face_flag.shape == (len(part.mesh.faces),)
        assert part.face_flag.any(), model.id
        assert not part.face_flag.all(), model.id
        assert np.isfinite(part.mesh.vertices).all()
        assert part.mesh.vertices[:, 2].min() == pytest.approx(0.0, abs=1e-9)
        low, high = SIZES[kind]
        assert low * length * 0.999 < part.size_mm < high * length * 1.001, model.id
        assert part.extent_mm > 0.0


@pytest.mark.parametrize("kind", DEFECTS)
def test_the_same_seed_makes_the_same_defect(kind: str) -> None:
    mesh = resting("hex_bolt M8x30")
    one, two = (apply_defect(mesh, kind, np.random.default_rng(3)) for _ in range(2))
    assert np.array_equal(one.mesh.vertices, two.mesh.vertices)
    assert np.array_equal(one.face_flag, two.face_flag)


@pytest.mark.parametrize("kind", ["crack", "cut", "dent"])
def test_material_only_goes_away(kind: str) -> None:
    for seed in range(6):
        mesh = resting("hex_nut M16", seed)
        part = apply_defect(mesh, kind, np.random.default_rng(seed))
        before, after = mesh.volume_and_centroid()[0], part.mesh.volume_and_centroid()[0]
        assert 0.5 * before < after < before


@pytest.mark.parametrize("kind", ["crack", "dent"])
def test_unflagged_surface_stays_where_it_was(kind: str) -> None:
    mesh = resting("hex_bolt M8x30", 2)
    part = apply_defect(mesh, kind, np.random.default_rng(5))
    calm = np.setdiff1d(np.arange(len(part.mesh.vertices)), part.mesh.faces[part.face_flag])
    kept = part.mesh.vertices[calm[calm < len(mesh.vertices)]]
    original = mesh.vertices[calm[calm < len(mesh.vertices)]]
    lift = np.median(kept - original, axis=0)
    moved = np.linalg.norm(kept - original - lift, axis=1)
    assert np.quantile(moved, 0.99) <= 0.15 * part.size_mm


def test_most_defects_are_on_surface_that_faces_the_camera() -> None:
    rng = np.random.default_rng(8)
    upward = []
    for seed in range(24):
        part = apply_defect(resting("hex_nut M8", seed), DEFECTS[seed % 4], rng)
        weight = part.mesh.face_areas() * part.face_flag
        upward.append(
            float((weight * (part.mesh.face_normals()[:, 2] > -0.2)).sum() / weight.sum())
        )
    assert np.mean(upward) > 0.7


def test_a_smaller_scale_makes_smaller_defects() -> None:
    mesh = resting("hex_bolt M8x30", 1)
    for kind in DEFECTS:
        large = np.mean(
            [apply_defect(mesh, kind, np.random.default_rng(s)).size_mm for s in range(5)]
        )
        small = np.mean(
            [apply_defect(mesh, kind, np.random.default_rng(s), 0.3).size_mm for s in range(5)]
        )
        assert small < 0.6 * large, kind
