"""The published FORGE composite, as measured on its figure."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from forge_station.geometry import forge_style

LEFT, FRAME, PITCH = 10, 5, 945


def panel(image: NDArray[np.uint8], index: int) -> NDArray[np.uint8]:
    left = LEFT + index * PITCH + FRAME
    return image[FRAME : FRAME + 931, left : left + 926]


def span(mask: NDArray[np.bool_]) -> tuple[int, int, int, int]:
    rows, columns = np.nonzero(mask)
    return int(rows.min()), int(rows.max()), int(columns.min()), int(columns.max())


def box(size: tuple[float, float, float], at: tuple[float, float, float]) -> NDArray[np.float64]:
    corners = np.stack(np.meshgrid(*[(-0.5, 0.5)] * 3, indexing="ij"), -1).reshape(-1, 3)
    return np.asarray(corners * size + np.array(at), np.float64)


def test_layout_is_the_published_one() -> None:
    image = forge_style.composite([box((10, 10, 10), (0, 0, 0))])
    assert image.shape == (1077, 2810, 3) and image.dtype == np.uint8
    for index in range(3):
        left = LEFT + index * PITCH
        assert (image[:FRAME, left : left + 900] == 0).all()
        assert (image[:941, left : left + FRAME] == 0).all()
        assert (image[936:941, left : left + 900] == 0).all()
        assert (image[:941, left - 9 : left] == 255).all()
    # The third panel is cut by 26 px at the right, its frame included.
    assert panel(image, 2).shape[1] == 905
    assert (image[941:] < 128).any(), "captions"


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (4, ["1f77b4", "d62728", "f7b6d2", "9edae5"]),
        (5, ["1f77b4", "98df8a", "8c564b", "c7c7c7", "9edae5"]),
        (1, ["1f77b4"]),
    ],
)
def test_colours_are_tab20_by_linspace(count: int, expected: list[str]) -> None:
    assert [f"{r:02x}{g:02x}{b:02x}" for r, g, b in forge_style.colours(count)] == expected


def test_each_panel_has_its_own_axes_and_scale() -> None:
    points = np.array([[x, y, z] for x in (0, 40) for y in (0, 20) for z in (0, 10)], float)
    image = forge_style.surface(points)
    blue = [(panel(image, i) == (0, 0, 255)).all(axis=2) for i in range(3)]
    for mask, (wide, high) in zip(blue, [(40, 20), (20, 10), (40, 10)], strict=True):
        top, bottom, left, right = span(mask)
        # The larger extent takes 1 / 1.1 of the panel in every panel.
        assert right - left == pytest.approx(926 / 1.1, abs=7)
        assert (bottom - top) / (right - left) == pytest.approx(high / wide, abs=0.01)
        assert (top + bottom) / 2 == pytest.approx(465, abs=4)


def test_up_is_up_and_right_is_right() -> None:
    corner = np.array([[9.0, 9.0, 9.0]])
    rest = np.array([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    image = forge_style.surface(np.concatenate([rest, corner]), np.array([False, False, True]))
    for index in range(3):
        red = (panel(image, index) == (255, 0, 0)).all(axis=2)
        top, _, left, _ = span(red)
        assert top < 100 and left > 800


def test_later_parts_are_drawn_over_earlier_ones_whatever_is_nearer() -> None:
    rng = np.random.default_rng(0)
    flat = rng.uniform((-20, -20, 0), (20, 20, 1), (200_000, 3))
    near, far = flat + np.array([0, 0, 50]), flat
    image = panel(forge_style.composite([near, far]), 0)
    second = np.array(forge_style.colours(2)[1], np.uint8)
    # Beside the letter's box; a pixel in three hundred has no point near it.
    assert (image[200:300, 200:700] == second).all(axis=2).mean() > 0.99


def test_letters_sit_on_the_centroids_in_a_mostly_white_box() -> None:
    rng = np.random.default_rng(1)
    left = rng.uniform((-30, -5, 0), (-10, 5, 10), (50_000, 3))
    right = left + np.array([40, 0, 0])
    image = panel(forge_style.composite([left, right]), 0)
    first = np.array(forge_style.colours(2)[0], np.uint8)
    mixed = np.rint(0.2 * first + 0.8 * 255).astype(np.uint8)
    rows, columns = np.nonzero((image == mixed).all(axis=2))
    assert rows.mean() == pytest.approx(465, abs=8)
    assert columns.mean() == pytest.approx(463 - 20 * 926 / 66, abs=8)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "at least one part"),
        ([np.zeros((0, 3))], "part 0 must be"),
        ([np.zeros((5, 3)), np.zeros((5, 2))], "part 1 must be"),
        ([np.zeros((5, 3))] * 27, "at most 26"),
    ],
)
def test_wrong_input_is_named(parts: list[NDArray[np.float64]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        forge_style.composite(parts)


def test_a_defect_mask_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected shape \(5,\), got \(4,\)"):
        forge_style.surface(np.zeros((5, 3)), np.zeros(4, bool))


def test_same_points_give_the_same_bytes() -> None:
    rng = np.random.default_rng(2)
    parts = [rng.normal(size=(5000, 3)) + 9 * i for i in range(3)]
    assert forge_style.composite(parts).tobytes() == forge_style.composite(parts).tobytes()
