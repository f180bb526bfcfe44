"""Part meshes: closed, true to the nominal sizes, and varied inside the tolerance."""

from __future__ import annotations

import numpy as np
import pytest

from forge_station.contract.catalogue import CATALOGUE, WORKPIECES, PartModel, by_id, of_workpiece
from forge_station.sim.fasteners import build
from forge_station.sim.lathe import hexagon, square
from forge_station.sim.mesh import Mesh

#: box of a mesh, mm, in the order of PartModel.extents
AXIS_WIDE_NARROW = [2, 0, 1]


def open_edges(mesh: Mesh) -> int:
    ends = mesh.faces[:, [0, 1, 1, 2, 2, 0]].reshape(-1, 2).astype(np.int64)
    forth = ends[:, 0] * len(mesh.vertices) + ends[:, 1]
    back = ends[:, 1] * len(mesh.vertices) + ends[:, 0]
    return int((~np.isin(forth, back)).sum()) + len(forth) - len(np.unique(forth))


@pytest.mark.parametrize("columns", [10, 40])
def test_corners_must_meet_columns(columns: int) -> None:
    with pytest.raises(ValueError, match="multiple of 6"):
        hexagon(columns, 13.0)
    with pytest.raises(ValueError, match="multiple of 8"):
        square(columns + 2, 13.0)


@pytest.mark.parametrize("model", CATALOGUE, ids=lambda model: model.id)
def test_a_nominal_part_is_closed_and_has_the_nominal_box(model: PartModel) -> None:
    mesh = build(model)
    assert open_edges(mesh) == 0
    assert mesh.volume_and_centroid()[0] > 0.0
    assert mesh.extents()[AXIS_WIDE_NARROW] == pytest.approx(model.extents, rel=0.016)


@pytest.mark.parametrize("name", WORKPIECES)
def test_real_parts_are_closed_and_stay_near_the_nominal_box(name: str) -> None:
    rng = np.random.default_rng(7)
    for model in of_workpiece(name):
        for _ in range(3):
            mesh = build(model, rng)
            assert open_edges(mesh) == 0, model.id
            assert mesh.volume_and_centroid()[0] > 0.0, model.id
            box = mesh.extents()[AXIS_WIDE_NARROW] / np.array(model.extents)
            assert box.min() > 0.86, (model.id, box)
            assert box.max() < 1.04, (model.id, box)


def test_a_nominal_part_is_the_same_every_time_and_a_drawn_one_repeats_with_its_seed() -> None:
    model = by_id("hex_bolt M8x30")
    assert np.array_equal(build(model).vertices, build(model).vertices)
    one, two, three = (build(model, np.random.default_rng(s)) for s in (1, 1, 2))
    assert np.array_equal(one.vertices, two.vertices)
    assert one.vertices.shape != three.vertices.shape or not np.allclose(
        one.vertices, three.vertices
    )


def shank_radii(mesh: Mesh, low: float, high: float) -> np.ndarray:
    inside = (mesh.vertices[:, 2] > low) & (mesh.vertices[:, 2] < high)
    return np.hypot(mesh.vertices[inside, 0], mesh.vertices[inside, 1])


def test_an_external_thread_reaches_the_major_and_the_minor_diameter() -> None:
    radii = shank_radii(build(by_id("hex_bolt M8x30")), -25.0, -5.0)
    assert radii.max() == pytest.approx(4.0, abs=1e-6)
    assert radii.min() == pytest.approx(4.0 - 0.6134 * 1.25, abs=1e-6)


def test_an_external_thread_is_right_handed_with_the_coarse_pitch() -> None:
    mesh = build(by_id("hex_bolt M8x30"))
    radius = np.hypot(mesh.vertices[:, 0], mesh.vertices[:, 1])
    crest = (radius > 4.0 - 1e-6) & (mesh.vertices[:, 2] < -8) & (mesh.vertices[:, 2] > -22)
    turn = np.arctan2(mesh.vertices[crest, 1], mesh.vertices[crest, 0]) / (2 * np.pi)
    lead = (mesh.vertices[crest, 2] / 1.25 - turn) % 1.0
    # a crest has two edges, 1/8 pitch apart: all its points share two values, not a spread
    assert len(np.unique(np.round(lead, 4))) == 2


def test_a_nut_has_a_threaded_hole_and_a_hexagon_with_chamfered_corners() -> None:
    mesh = build(by_id("hex_nut M8"))
    radius = np.hypot(mesh.vertices[:, 0], mesh.vertices[:, 1])
    middle = np.abs(mesh.vertices[:, 2] - 3.4) < 2.0
    hole = radius[middle & (radius < 5.0)]
    assert hole.min() == pytest.approx(4.0 - 0.5413 * 1.25, abs=1e-6)
    assert hole.max() == pytest.approx(4.0, abs=1e-6)
    top = radius[mesh.vertices[:, 2] > 6.8 - 1e-6]
    assert top.max() == pytest.approx(0.95 * 6.5)
    assert radius.max() == pytest.approx(13.0 / 3**0.5)


def test_a_socket_is_open_at_the_top_and_no_wider_than_its_key() -> None:
    mesh = build(by_id("socket_cap_screw M8x20"))
    radius = np.hypot(mesh.vertices[:, 0], mesh.vertices[:, 1])
    bottom = mesh.vertices[(radius < 1e-9) & (mesh.vertices[:, 2] > 0), 2]
    assert bottom.min() < 8.0 - 4.0
    floor = np.abs(mesh.vertices[:, 2] - 4.0) < 1e-6
    assert radius[floor].max() == pytest.approx(6.0 / 3**0.5)


def test_variety_covers_plain_and_threaded_shanks_and_filled_sockets() -> None:
    rng = np.random.default_rng(3)
    model = by_id("socket_cap_screw M8x20")
    meshes = [build(model, rng) for _ in range(60)]
    plain = [len(shank_radii(mesh, -12.0, -8.0)) == 0 for mesh in meshes]
    filled = [
        mesh.vertices[np.hypot(mesh.vertices[:, 0], mesh.vertices[:, 1]) < 1e-9, 2].max() > 7.0
        for mesh in meshes
    ]
    assert 3 <= sum(plain) <= 40
    assert 2 <= sum(filled) <= 25
    assert len({len(mesh.faces) for mesh in meshes}) > 10
