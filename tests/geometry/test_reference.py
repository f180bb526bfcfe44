"""A part beside its reference: the fit finds pose, turn and size; what differs is what is wrong."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

from forge_station.contract.catalogue import by_id
from forge_station.contract.views import NANO_LAYOUT, VIEWS
from forge_station.errors import InputError
from forge_station.geometry import pose, reference, reference_io, surface
from forge_station.geometry.reference import EXTRA, MISSING, Fit, Reference
from forge_station.geometry.surface import Surface
from forge_station.sim import defects, fasteners, references, rest_pose
from forge_station.sim.mesh import Mesh


@pytest.fixture(scope="module")
def nut() -> Mesh:
    return fasteners.build(by_id("hex_nut M10"))


@pytest.fixture(scope="module")
def known(nut: Mesh) -> Reference:
    return references.cad_reference(nut)


def flat(nut: Mesh) -> Mesh:
    """The nut on its face, a corner towards +x."""
    low = min(rest_pose.rest_poses(nut), key=lambda p: nut.transformed(p.rotation).extents()[2])
    return rest_pose.settle(nut.transformed(low.rotation))


def beside(points: np.ndarray, known: Reference) -> Fit:
    return fit_of(surface.look(points, NANO_LAYOUT, known))


def fit_of(seen: Surface) -> Fit:
    assert seen.fit is not None
    return seen.fit


def channel(points: np.ndarray, known: Reference, view: str) -> np.ndarray:
    seen = surface.look(points, NANO_LAYOUT, known)
    return fit_of(seen).channel(seen.views[view], view)


def dark(points: np.ndarray, known: Reference) -> int:
    """Pixels that lie well behind the reference."""
    drawn = [channel(points, known, view) for view in VIEWS]
    return sum(int(((c < 100) & (c > MISSING)).sum()) for c in drawn)


def test_poses_that_are_turns_of_each_other_are_kept_once(known: Reference) -> None:
    """A hexagon lies on a face or on one of six equal flats."""
    assert len(known.poses) == 2


def test_a_sound_part_does_not_differ(nut: Mesh, known: Reference) -> None:
    seen = surface.look(references.clean_scan(flat(nut)), NANO_LAYOUT, known)
    assert fit_of(seen).misfit < 0.25
    top = fit_of(seen).difference(seen.views["top"], "top")
    assert np.nanpercentile(np.abs(top), 95) < 0.5


def test_every_pose_is_found(nut: Mesh, known: Reference) -> None:
    chosen = set()
    for rest in rest_pose.rest_poses(nut)[:8]:
        lying = rest_pose.settle(nut.transformed(rest.rotation))
        found = beside(references.clean_scan(lying), known)
        chosen.add(found.pose)
        assert found.misfit < 0.8
    assert chosen == {0, 1}


def test_a_part_turned_in_the_part_frame_is_turned_back() -> None:
    """Equal sides: which is the long one is chance, so the part frame may be turned."""
    bolt = fasteners.build(by_id("hex_bolt M8x30"))
    lying = rest_pose.settle(bolt.transformed(rest_pose.rest_poses(bolt)[0].rotation))
    points = references.clean_scan(lying)
    known = reference.build([points])
    for quarters in range(4):
        turned = reference._turned(points.astype(np.float32), quarters)
        found = beside(turned, known)
        assert found.turn == quarters and found.misfit < 0.3


def test_sizes_within_tolerance_are_no_defect(nut: Mesh, known: Reference) -> None:
    points = references.clean_scan(flat(nut))
    other = points * np.array([1.015, 1.015, 0.96])
    assert beside(other, known).misfit < 0.4


def test_a_dent_is_deeper_than_the_reference(nut: Mesh, known: Reference) -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        made = defects.apply_defect(flat(nut), "dent", rng, 0.5)
        points = references.clean_scan(made.mesh)
        seen = surface.look(points, NANO_LAYOUT, known)
        far = [fit_of(seen).difference(seen.views[view], view) for view in VIEWS]
        deepest = min(float(np.nanmin(view)) for view in far)
        if deepest < -2.0:
            break
    else:
        pytest.fail("twenty dents and none is seen in the difference")
    assert dark(points, known) > 50 + dark(references.clean_scan(flat(nut)), known)


def test_what_only_one_of_them_has_is_marked(nut: Mesh, known: Reference) -> None:
    points = references.clean_scan(flat(nut))
    part = points[points[:, 0] < 4.0]
    found = channel(np.concatenate([part, part[:1] * 0 + points.max(axis=0)]), known, "top")
    assert (found == MISSING).sum() > 200
    stub = np.random.default_rng(0).uniform((9.5, -1, 2), (12, 1, 6), (20_000, 3))
    found = channel(np.concatenate([points, stub]), known, "top")
    assert (found == EXTRA).sum() > 100


def test_a_reference_needs_a_cloud() -> None:
    with pytest.raises(ValueError, match="at least one cloud"):
        reference.build([])


def test_references_are_read_as_they_were_written(known: Reference, tmp_path: Path) -> None:
    path = tmp_path / reference_io.FILE
    reference_io.save(path, {"hex_nut M10": known})
    loaded = reference_io.load(path)["hex_nut M10"]
    for one, other in zip(known.poses, loaded.poses, strict=True):
        assert np.array_equal(np.isnan(one.depth), np.isnan(other.depth))
        assert np.nanmax(np.abs(one.depth - other.depth)) <= one.mm_per_px / 64
        assert (one.mm_per_px, one.middle_mm) == (other.mm_per_px, other.middle_mm)
    reference_io.save(tmp_path / "again.npz", {"hex_nut M10": known})
    assert (tmp_path / "again.npz").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("name", "array", "said"),
    [
        ("hex_nut M10/0.depth", np.zeros((2, 2), np.int16), "expected int16"),
        ("hex_nut M10/0.depth", np.zeros((5, 224, 224), np.float32), "expected int16"),
        ("hex_nut M10/0.scale", np.array([0.0, 1.0]), "mm a pixel > 0"),
        ("hex_nut M10/x.depth", np.zeros(1), "unknown entry"),
    ],
)
def test_a_wrong_entry_is_named(
    known: Reference, tmp_path: Path, name: str, array: np.ndarray, said: str
) -> None:
    path = tmp_path / "bad.npz"
    pose0 = known.poses[0]
    content = {
        "hex_nut M10/0.depth": np.zeros(pose0.depth.shape, np.int16),
        "hex_nut M10/0.scale": np.array([0.1, 2.0]),
    } | {name: array}
    np.savez(path, **content)
    with pytest.raises(InputError, match=said):
        reference_io.load(path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no archive", b"\x80\x04pickle"])
def test_a_file_that_is_no_archive_is_one_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.npz"
    path.write_bytes(content)
    with pytest.raises(InputError, match="references cannot be read"):
        reference_io.load(path)


def test_an_archive_that_unpacks_without_end_is_refused(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/0.depth.npy", bytes(1 << 20))
    monkeypatch.setattr(reference_io, "_MAX_BYTES", 1 << 16)
    with pytest.raises(InputError, match="unpacks to more"):
        reference_io.load(path)


def test_a_part_cloud_of_a_scan_is_compared_as_it_is(nut: Mesh, known: Reference) -> None:
    """What the station does: aligned again from the tray frame, another yaw, half the points."""
    points = references.clean_scan(flat(nut))[::2]
    turn = np.deg2rad(37.0)
    cos, sin = np.cos(turn), np.sin(turn)
    moved = points @ np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]]) + [40.0, -25.0, 0.0]
    part = pose.align(moved.astype(np.float32), 0.08, poses=4)
    assert beside(part.points, known).misfit < 0.8
