"""Names, axes and pixel layout of the pictures the model is given."""

from __future__ import annotations

import numpy as np
import pytest

from forge_station.contract.views import (
    AXES,
    LARGE_LAYOUT,
    MARKS,
    NANO_LAYOUT,
    VIEWS,
    VISION_TOKEN_PX,
    Layout,
)


@pytest.mark.parametrize("cell", [0, -56, 50, 57])
def test_a_cell_that_vision_tokens_do_not_fill_is_refused(cell):
    with pytest.raises(ValueError, match="layout cell"):
        Layout(cell=cell)


@pytest.mark.parametrize("panel", [0, -224, 225])
def test_a_panel_that_vision_tokens_do_not_fill_is_refused(panel):
    with pytest.raises(ValueError, match="layout panel"):
        Layout(panel=panel)


def test_a_panel_that_grid_cells_do_not_fill_is_refused():
    with pytest.raises(ValueError, match="multiple of 16"):
        Layout(panel=28 * 9)


def test_every_view_uses_each_axis_once_and_is_right_handed():
    """right x up = towards the viewer: a picture is never a mirror image."""
    for view in VIEWS:
        axes = AXES[view]
        assert {axes.right, axes.up, axes.towards} == {0, 1, 2}
        towards = np.cross(np.eye(3)[axes.right], np.eye(3)[axes.up])
        assert towards[axes.towards] == axes.sign


@pytest.mark.parametrize("layout", [NANO_LAYOUT, LARGE_LAYOUT])
def test_sizes_are_whole_vision_tokens(layout):
    for side in (*layout.sheet_size, *layout.surface_size):
        assert side % VISION_TOKEN_PX == 0
    assert layout.sheet_size == (3 * layout.cell, len(MARKS) * layout.cell)
    assert layout.surface_size == (layout.panel, 3 * layout.panel)


def test_nano_pictures_are_168_x_336_and_224_x_672():
    """A bundle is made for these sizes."""
    assert NANO_LAYOUT.sheet_size == (168, 336)
    assert NANO_LAYOUT.surface_size == (224, 672)


@pytest.mark.parametrize("layout", [NANO_LAYOUT, LARGE_LAYOUT])
def test_strip_and_margin_grow_with_the_cell(layout):
    factor = layout.cell / 56
    assert layout.strip == 10 * factor
    assert layout.margin == int(2 * factor)
    assert layout.strip + layout.margin < layout.cell / 2
