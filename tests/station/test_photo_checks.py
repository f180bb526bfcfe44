"""A photo through the checks: the line's own words, one grid, fixed places; the picture itself."""

from __future__ import annotations

import json
from dataclasses import replace

import cv2
import numpy as np
import pytest

from forge_station import checks
from forge_station.checks import Thresholds
from forge_station.contract import manifest as manifests
from forge_station.contract import record, spec, tasks
from forge_station.contract.error import ContractError
from forge_station.contract.manifest import PhotoInput, Vocabulary
from forge_station.contract.spec import Product, Reading
from forge_station.contract.verdict import Outcome
from forge_station.errors import InputError
from forge_station.geometry import photo
from tests.station.fake_model import FakeModel

TILE = Vocabulary(classes=("normal", "blowhole", "crack"))
BLOCK = Vocabulary(parts=("screw", "none"))
SQUARE = PhotoInput(112, 168)
PICTURE = photo.photo_picture(np.full((60, 90, 3), 90, np.uint8), SQUARE)


def model_of(vocabulary: Vocabulary, **script: object) -> FakeModel:
    model = FakeModel(**script)
    model.manifest = replace(FakeModel.manifest, vocabulary=vocabulary, photo=SQUARE)
    return model


def test_a_photo_is_read_in_the_lines_own_classes_with_one_grid():
    rows = {"photo r1:": "2,3", "photo r16:": "16"}
    model = model_of(TILE, surface={"blowhole": 0.9, "normal": 0.06}, rows=rows)
    read = checks.read_photo(model, PICTURE, "A", "magnetic_tile", Thresholds(), 1.0)
    assert (read.reading.defect_class, read.defect_probability) == ("blowhole", pytest.approx(0.94))
    (grid,) = read.grids
    assert (grid.view, grid.cells) == ("photo", ((0, 1), (0, 2), (15, 15)))
    assert (grid.mm_per_cell, grid.origin_mm) == (None, None), "a photo has no millimetres"
    assert model.texts == [
        f"{tasks.TRUNK_OPEN}<|vision_start|><|image_pad|><|vision_end|>"
        f"surface joint\nmagnetic_tile{tasks.ASSISTANT}"
    ]
    product = Product("TILE", "single", ("surface",), parts={"magnetic_tile": 1}, photo=True)
    result = checks.surface_result([read], product, Thresholds())
    assert result.outcome is Outcome.FAIL
    assert [reason.code for reason in result.reasons] == ["SURFACE_DEFECT"]


def test_a_clean_photo_has_no_grid_unless_it_is_asked_for():
    model = model_of(TILE)
    arguments = (model, PICTURE, "A", "magnetic_tile", Thresholds(), 1.0)
    assert checks.read_photo(*arguments).grids == ()
    (grid,) = checks.read_photo(*arguments, always_grid=True).grids
    assert (grid.view, grid.cells, grid.text) == ("photo", (), "artifact:\nnone")


def test_places_are_read_and_the_specification_counts_what_is_there():
    readings = {"A": ("screw", 0.99), "B": ("none", 0.9), "C": ("screw", 0.8), "D": ("screw", 0.7)}
    model = model_of(BLOCK, readings=readings)
    parts = checks.read_positions(model, PICTURE, "ABCD")
    assert [(part.mark, part.part, part.probability) for part in parts] == [
        (mark, *reading) for mark, reading in readings.items()
    ]
    assert parts[1].alternatives[0].part == "screw"
    assert "positions\nA B C D" in model.texts[0]
    product = Product("BLOCK", "assembly", ("assembly",), parts={"screw": 4}, photo=True)
    there = {part.mark: Reading(part.part, part.probability) for part in checks.present(parts)}
    assert sorted(there) == ["A", "C", "D"]
    (violation,) = spec.evaluate(product, there).violations
    assert (violation.code, violation.text) == ("MISSING_PART", "1 of 4 screw missing")


def test_only_a_photo_product_may_have_parts_that_the_catalogue_lacks():
    with pytest.raises(ContractError, match="id of the catalogue"):
        Product("BLOCK", "assembly", ("assembly",), parts={"screw": 4})


def test_the_manifest_keeps_vocabulary_and_photo():
    given = replace(FakeModel.manifest, vocabulary=TILE, photo=PhotoInput(224, 336, "detail"))
    assert manifests.parse(given.to_json()) == given


def test_an_older_manifest_has_the_words_of_the_scan_checks():
    data = json.loads(FakeModel.manifest.to_json())
    del data["vocabulary"], data["photo"]
    old = record.read(manifests.Manifest, data)
    assert old.vocabulary.classes == tasks.SURFACE_CLASSES
    assert (old.vocabulary.parts, old.photo) == ((), None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"classes": ("crack", "dent")}, "normal"),
        ({"classes": ("normal",)}, "one defect class or more"),
        ({"classes": ("normal", "Blow hole")}, "lower-case"),
        ({"parts": ("screw", "screw")}, "each word once"),
    ],
)
def test_a_vocabulary_that_no_check_can_use_is_refused(fields, message):
    with pytest.raises(ContractError, match=message):
        Vocabulary(**fields)


@pytest.mark.parametrize("size", [(100, 112), (0, 112), (112, 2800)])
def test_a_photo_size_that_the_vision_cannot_take_is_refused(size):
    with pytest.raises(ContractError, match="multiple of 28"):
        PhotoInput(*size)


def test_a_photo_keeps_its_colours_and_is_stretched(tmp_path):
    colours = np.zeros((40, 20, 3), np.uint8)
    colours[:20] = (200, 100, 50)
    cv2.imwrite(str(tmp_path / "p.png"), colours[..., ::-1])
    drawn = photo.photo_picture(photo.read_photo(tmp_path / "p.png"), PhotoInput(56, 84)).image
    assert drawn.shape == (56, 84, 3)
    assert drawn[5, 5].tolist() == [200, 100, 50]
    assert drawn[-5, 5].tolist() == [0, 0, 0]


def test_detail_shows_a_thin_dark_line_and_forgets_the_light():
    grey = np.tile(np.linspace(60, 180, 224, dtype=np.float32), (224, 1))
    grey[:, 100:103] -= 30
    rgb = np.repeat(grey[..., None], 3, 2).astype(np.uint8)
    drawn = photo.with_channels(rgb, PhotoInput(224, 224, "detail")).astype(int)
    assert drawn[112, 101, 2] > 60 > 20 > drawn[112, 60, 2], "the third channel shows the line only"
    flat = drawn[112, [40, 180], 1]
    assert abs(flat[0] - flat[1]) < 10, "the second channel does not know how bright a place is"


def test_where_shows_grey_and_how_far_right_and_down_a_pixel_is():
    rgb = np.full((56, 112, 3), 77, np.uint8)
    drawn = photo.with_channels(rgb, PhotoInput(56, 112, "where"))
    assert (drawn[..., 0] == 77).all()
    assert drawn[[0, 0, -1, -1], [0, -1, 0, -1], 1].tolist() == [0, 255, 0, 255]
    assert drawn[[0, 0, -1, -1], [0, -1, 0, -1], 2].tolist() == [0, 0, 255, 255]


def test_an_image_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "p.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"p\.png"):
        photo.read_photo(tmp_path / "p.png")
