"""Patches, window layout and positions."""

from __future__ import annotations

import numpy as np
import pytest

from forge_station.errors import ModelError
from forge_station.vlm.preprocess import (
    VisionGeometry,
    mrope_positions,
    patchify,
    vision_layout,
)

NANO = VisionGeometry(window=56)
LARGE = VisionGeometry(window=112)


@pytest.mark.parametrize(
    "image",
    [
        np.zeros((28, 28), np.uint8),
        np.zeros((28, 28, 4), np.uint8),
        np.zeros((28, 28, 3), np.float32),
        np.zeros((3, 28, 28), np.uint8),
    ],
)
def test_what_is_not_an_rgb_image_is_refused(image):
    with pytest.raises(ModelError, match="not an image"):
        patchify(image, NANO)


@pytest.mark.parametrize("size", [(0, 28), (27, 28), (28, 42), (30, 30)])
def test_sizes_off_the_token_grid_are_refused(size):
    with pytest.raises(ModelError, match="multiples of 28"):
        patchify(np.zeros((*size, 3), np.uint8), NANO)


def test_patches_come_in_merge_order():
    image = np.zeros((56, 56, 3), np.uint8)
    for row in range(4):
        for column in range(4):
            image[row * 14 : row * 14 + 14, column * 14 : column * 14 + 14, 0] = 4 * row + column
    found = patchify(image, NANO)[:, 0].tolist()
    assert found == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]


def test_patches_are_channel_then_pixels_of_the_image():
    image = np.random.default_rng(0).integers(0, 256, (28, 28, 3), np.uint8)
    patches = patchify(image, NANO).reshape(4, 3, 14, 14)
    assert (patches[3] == image[14:, 14:].transpose(2, 0, 1)).all()


@pytest.mark.parametrize("geometry", [NANO, LARGE])
@pytest.mark.parametrize("grid", [(2, 2), (4, 8), (12, 24), (16, 48), (10, 14), (6, 22)])
def test_the_layout_holds_every_patch_once_in_its_window(geometry, grid):
    rows, columns = grid
    layout = vision_layout(rows, columns, geometry)
    valid = layout.valid.astype(bool)
    assert len(valid) % geometry.slots == 0
    assert sorted(layout.source[valid].tolist()) == list(range(rows * columns))
    side = geometry.window // geometry.patch
    windows = layout.position.reshape(-1, geometry.slots, 2) // side
    for window, real in zip(windows, valid.reshape(-1, geometry.slots), strict=True):
        assert real.any(), "no window is padding only"
        assert len(np.unique(window[real], axis=0)) == 1
    # A merged token is a square of patches, and out_index lists tokens in reading order.
    unit = geometry.merge**2
    corner = layout.position.reshape(-1, unit, 2)[layout.out_index][:, 0] // geometry.merge
    reading = [(r, c) for r in range(rows // 2) for c in range(columns // 2)]
    assert [tuple(place) for place in corner.tolist()] == reading


def test_layouts_are_shared_and_cannot_be_changed():
    layout = vision_layout(4, 4, NANO)
    assert vision_layout(4, 4, NANO) is layout
    with pytest.raises(ValueError, match="read-only"):
        layout.source[0] = 3


def test_positions_of_text_and_pictures():
    ids = np.array([1, 9, 9, 9, 9, 9, 9, 2, 3])
    positions, after = mrope_positions(ids, 9, [(2, 3)], start=10)
    assert positions.tolist() == [
        [10, 11, 11, 11, 11, 11, 11, 14, 15],
        [10, 11, 11, 11, 12, 12, 12, 14, 15],
        [10, 11, 12, 13, 11, 12, 13, 14, 15],
    ]
    assert after == 16


@pytest.mark.parametrize(
    ("ids", "grids"),
    [
        ([1, 9, 9, 2], [(2, 2)]),
        ([1, 2], [(1, 1)]),
        ([9, 9, 1, 9, 9], [(2, 2)]),
        ([9, 9, 9], [(1, 2)]),
        ([1, 9], []),
    ],
)
def test_image_tokens_must_match_the_images(ids, grids):
    with pytest.raises(ModelError, match="image tokens do not match"):
        mrope_positions(np.array(ids), 9, grids)


def test_no_tokens_have_no_positions():
    positions, after = mrope_positions(np.array([], np.int64), 9, [], start=4)
    assert positions.shape == (3, 0)
    assert after == 4
