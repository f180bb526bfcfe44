"""The picture and the verdict as files: what they show, that they appear whole, a full disk."""

from __future__ import annotations

import json
import resource
from dataclasses import replace

import cv2
import numpy as np
import pytest

from forge_station import evidence
from forge_station.contract.verdict import (
    CheckResult,
    GridReading,
    Outcome,
    PartReading,
    Reason,
    ScanSummary,
    SurfaceReading,
    Verdict,
    decide,
)
from forge_station.contract.views import NANO_LAYOUT, Layout
from forge_station.geometry import pose, sheet, surface
from forge_station.pipeline import Inspection


def block(length: float = 30.0) -> pose.PartCloud:
    """A block on the tray, length x 8 x 6 mm, its surface sampled as four poses would."""
    rng = np.random.default_rng(0)
    size = np.array([length, 8.0, 6.0])
    points = rng.random((60_000, 3)) * size
    face = rng.integers(0, 3, len(points))
    points[np.arange(len(points)), face] = rng.integers(0, 2, len(points)) * size[face]
    return pose.align(points, 0.12, poses=4)


def inspection(
    outcome: Outcome = Outcome.PASS, parts: int = 1, cells: tuple[tuple[int, int], ...] = ()
) -> Inspection:
    clouds = tuple(block(30.0 - 4 * k) for k in range(parts))
    reasons = () if outcome is Outcome.PASS else (Reason("SURFACE_DENT", "A: a dent", "A", 0.9),)
    verdict: Verdict = decide(
        required=("surface",),
        checks=[CheckResult("scan", Outcome.PASS), CheckResult("surface", outcome, reasons)],
        scan=ScanSummary(points=60_000, source="/data/block.ply: cloud; unit mm as given"),
        result_id="01a22c2f-3f83-7e64-9cc4-cd44ef9b9b38",
        serial="SN 1/2",
        product="P",
        parts=tuple(
            PartReading("ABCDEF"[k], "pin", "6x30", 0.97, size_mm=(30.0, 8.0, 6.0))
            for k in range(parts)
        ),
        surface=(SurfaceReading("A", "dent", 0.9, {}, 4.0),) if cells else (),
        grids=(GridReading("A", "top", "", cells), GridReading("A", "front", "")) if cells else (),
    )
    looked = {"A": sheet.surface_picture(clouds[0].points, NANO_LAYOUT)[0]} if cells else {}
    return Inspection(verdict, clouds, looked)


def decoded(png: bytes) -> np.ndarray:
    image = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR)
    assert image.shape == (900, 1280, 3)
    return image


@pytest.mark.parametrize("parts", [0, 1, 2, 6])
def test_a_picture_for_any_number_of_parts(parts):
    if parts:
        decoded(evidence.picture_of(inspection(parts=parts)))
    else:
        found = inspection()
        decoded(evidence.picture_of(Inspection(found.verdict, (), {})))


def test_the_picture_is_the_same_every_time():
    assert evidence.picture_of(inspection(parts=3)) == evidence.picture_of(inspection(parts=3))


def test_outcomes_look_different():
    passed = decoded(evidence.picture_of(inspection()))
    failed = decoded(evidence.picture_of(inspection(Outcome.FAIL)))
    assert not np.array_equal(passed[20:160, 20:440], failed[20:160, 20:440])


def red(image: np.ndarray) -> np.ndarray:
    return (image[..., 2] > 230) & (image[..., 1] < 90) & (image[..., 0] < 90)


def test_defect_cells_lie_where_the_surface_check_saw_them():
    """The cell under the part's right end is drawn on the part's right end."""
    found = inspection(Outcome.FAIL, cells=((7, 14), (8, 14)))
    marked = decoded(evidence.picture_of(found))
    plain = decoded(evidence.picture_of(inspection(Outcome.FAIL)))
    cells = np.argwhere(red(marked)[200:840] & ~red(plain)[200:840])
    assert len(cells) > 50
    grey = marked[200:840, :640].min(axis=2) > 60
    middle = (cells.min(axis=0) + cells.max(axis=0)) / 2
    row = int(middle[0])
    lit = np.flatnonzero(grey[row - 40 : row + 40].any(axis=0))
    position = (middle[1] - lit[0]) / (lit[-1] - lit[0])
    # 30 mm of 32.3 mm are the part: the middle of column 14 is at 29.3 - 1.2 mm of its length.
    assert position == pytest.approx(28.1 / 30, abs=0.04)


def test_the_layout_scales_the_window_of_a_grid():
    found = inspection(Outcome.FAIL, cells=((7, 14),))
    picture, _ = sheet.surface_picture(found.parts[0].points, Layout(panel=448))
    large = Inspection(found.verdict, found.parts, {"A": picture})
    nano = decoded(evidence.picture_of(found)).astype(int)
    three_b = decoded(evidence.picture_of(large, Layout(panel=448))).astype(int)
    assert np.abs(nano - three_b).mean() < 1.0


def test_files_are_named_after_serial_and_result_and_hold_the_verdict(tmp_path):
    found = inspection()
    stored = evidence.store(tmp_path / "new" / "folder", found)
    assert stored.warnings == ()
    assert stored.verdict is not None
    assert stored.verdict.name == "SN_1_2-ef9b9b38.verdict.json"
    assert stored.picture == stored.verdict.with_name("SN_1_2-ef9b9b38.png")
    assert Verdict.from_dict(json.loads(stored.verdict.read_text())) == found.verdict
    decoded(stored.picture.read_bytes())
    assert len(list(stored.verdict.parent.iterdir())) == 2


def test_the_input_of_the_model_is_kept_to_the_bit(tmp_path):
    found = inspection(parts=2, cells=((7, 14),))
    picture = sheet.marks_sheet([part.points for part in found.parts], (0, 2), NANO_LAYOUT)
    found = replace(found, marks_picture=picture)
    stored = evidence.store(tmp_path, found)
    *pictures, listing = stored.inputs
    assert [path.name.partition(".")[2] for path in pictures] == ["sheet.png", "surface-A.png"]
    seen = [picture.image, found.surface_pictures["A"].image]
    for path, image in zip(pictures, seen, strict=True):
        assert np.array_equal(cv2.cvtColor(cv2.imread(str(path)), cv2.COLOR_BGR2RGB), image)
    data = json.loads(listing.read_text())
    assert data["result_id"] == found.verdict.result_id
    whole, single = data["pictures"]
    assert whole["facts"].startswith("marks scale") and "B: 30.0 8.0 6.0" in whole["facts"]
    assert single["mark"] == "A" and single["facts"] == "surface joint\npin 6x30\n30.0 8.0 6.0"


def test_a_second_look_is_kept_with_its_windows(tmp_path):
    found = inspection(cells=((7, 14),))
    seen = surface.look(found.parts[0].points, NANO_LAYOUT)
    look = seen.closer_look({"front": (4, 4), "side": (0, 8), "top": (3, 2)})
    *pictures, listing = evidence.store(tmp_path, replace(found, closer_looks={"A": look})).inputs
    assert pictures[-1].name.endswith(".surface-A-closer.png")
    kept = cv2.cvtColor(cv2.imread(str(pictures[-1])), cv2.COLOR_BGR2RGB)
    assert np.array_equal(kept, look.picture.image)
    (said,) = json.loads(listing.read_text())["closer"]
    assert said["mark"] == "A" and said["windows"]["side"] == [0, 8]
    assert (tmp_path / said["file"]) == pictures[-1]


def test_a_picture_of_four_channels_is_kept(tmp_path):
    found = inspection(cells=((7, 14),))
    four = np.random.default_rng(0).integers(0, 255, (16, 48, 4), np.uint8)
    seen = replace(found.surface_pictures["A"], image=four)
    stored = evidence.store(tmp_path, replace(found, surface_pictures={"A": seen}))
    read = cv2.imread(str(stored.inputs[0]), cv2.IMREAD_UNCHANGED)
    assert np.array_equal(cv2.cvtColor(read, cv2.COLOR_BGRA2RGBA), four)


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    stored = evidence.store(tmp_path / "file" / "folder", inspection())
    assert (stored.verdict, stored.picture) == (None, None)
    assert len(stored.warnings) == 2
    assert "evidence not written" in stored.warnings[0]


def test_a_disk_that_takes_no_more_leaves_no_half_file(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        stored = evidence.store(tmp_path, inspection())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert stored.picture is None
    assert stored.verdict is not None  # small enough
    assert len(stored.warnings) == 1
    assert [path.name for path in tmp_path.iterdir()] == [stored.verdict.name]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a/b", "a_b"),
        ("../..", "part"),
        ("", "part"),
        ("Schraube ü", "Schraube"),
        ("x" * 99, "x" * 80),
    ],
)
def test_file_names_are_plain(text, name):
    assert evidence.file_name(text) == name
