"""Measured sizes against the boxes that catalogue models show in their rest poses."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from forge_station.contract.catalogue import CATALOGUE, by_id
from forge_station.geometry import gauge
from forge_station.geometry.pose import ends, top
from training import rest_boxes


def size(length: float, width: float, height: float, pixel: float = 0.2) -> gauge.Size:
    return gauge.Size(length, width, height, uncertainty_mm=1.1 * pixel)


def test_every_catalogue_model_has_boxes_and_they_are_ordered() -> None:
    table = gauge.rest_boxes()
    assert set(table) == {model.id for model in CATALOGUE}
    for part, rows in table.items():
        low, high = rows[:, 0::2], rows[:, 1::2]
        assert len(rows) > 0 and (low > 0).all() and (low <= high).all(), part
        assert (high[:, 0] >= low[:, 1]).all(), part


@pytest.mark.parametrize("part", ["hex_nut M8", "hex_bolt M8x30", "strap_clamp M8x60"])
def test_table_is_what_the_generator_makes_of_the_nominal_part(part: str) -> None:
    from forge_station.sim import fasteners

    for box in rest_boxes.boxes_of(fasteners.build(by_id(part))):
        misfit = gauge.misfit(size(*box), part)
        assert misfit is not None and misfit < 0.02, (part, box)


@pytest.mark.parametrize(
    ("measured", "part", "expected"),
    [
        ((15.0, 13.0, 6.8), "hex_nut M8", True),
        ((14.7, 12.9, 6.7), "hex_nut M8", True),
        ((15.0, 6.8, 13.0), "hex_nut M8", True),  # standing on a flat
        ((15.0, 13.0, 6.8), "hex_nut M10", False),
        ((15.0, 13.0, 6.8), "hex_nut M6", False),
        ((18.4, 16.0, 8.4), "hex_nut M8", False),
        ((16.0, 16.0, 1.6), "flat_washer M8", True),
        ((16.0, 16.0, 6.8), "flat_washer M8", False),
        ((36.0, 15.0, 13.0), "hex_bolt M8x30", True),
        ((36.0, 15.0, 13.0), "hex_bolt M8x40", False),
        ((36.0, 15.0, 13.0), "hex_bolt M8x20", False),
    ],
)
def test_size_refuses_neighbours_and_keeps_the_true_model(
    measured: tuple[float, float, float], part: str, expected: bool
) -> None:
    assert gauge.consistent(size(*measured), by_id(part)) is expected
    assert gauge.consistent(size(*measured), part) is expected


def test_an_unknown_model_is_neither_consistent_nor_inconsistent() -> None:
    assert gauge.consistent(size(15, 13, 6.8), "hex_nut M7") is None


def test_a_hidden_side_excuses_a_short_part_and_not_a_long_one() -> None:
    short = gauge.Size(33.5, 15.0, 13.0, uncertainty_mm=0.2, hidden_mm=1.0)
    assert gauge.consistent(short, "hex_bolt M8x30")
    assert not gauge.consistent(gauge.Size(33.5, 15.0, 13.0, 0.2), "hex_bolt M8x30")
    assert not gauge.consistent(gauge.Size(38.5, 15.0, 13.0, 0.2, 1.0), "hex_bolt M8x30")


@pytest.mark.parametrize("shape", ["wall", "disc", "corner"])
def test_ends_are_unbiased_for_flat_round_and_pointed_ends_with_flying_points(shape: str) -> None:
    rng = np.random.default_rng(3)
    pixel, half = 0.2, 10.0
    xy = rng.uniform(-half, half, (60000, 2))
    if shape == "disc":
        xy = xy[np.hypot(xy[:, 0], xy[:, 1]) < half]
    if shape == "corner":
        xy = xy[np.abs(xy).sum(axis=1) < half]
    flying = rng.exponential(2 * pixel, 40) + half
    x = np.concatenate([xy[:, 0] + rng.normal(0, 0.15 * pixel, len(xy)), flying, -flying])
    low, high = ends(x, pixel, poses=4)
    # A corner of 90 degrees holds too few points in its last pixel to be seen to the tip.
    limit = {"wall": 0.5, "disc": 0.8, "corner": 2.0}[shape] * pixel
    assert high == pytest.approx(half, abs=limit)
    assert low == pytest.approx(-half, abs=limit)


def test_top_of_a_flat_face_is_its_middle_not_its_noise() -> None:
    rng = np.random.default_rng(4)
    z = np.concatenate([rng.uniform(0, 6.8, 4000), 6.8 + rng.normal(0, 0.03, 20000)])
    assert top(z, 0.2, poses=4) == pytest.approx(6.8, abs=0.08)


@pytest.mark.parametrize("values", [[5.0], [1.0, 1.0, 1.0], [0.0, 10.0]])
def test_ends_of_a_handful_of_points_stay_inside_them(values: list[float]) -> None:
    low, high = ends(np.array(values), 0.2, poses=4)
    assert min(values) <= low <= high <= max(values)


def test_least_area_rectangle_of_the_table_agrees_with_opencv() -> None:
    rng = np.random.default_rng(5)
    hull = cv2.convexHull(rng.normal(size=(200, 2)).astype(np.float32))[:, 0]
    expected = sorted(cv2.minAreaRect(hull)[1], reverse=True)
    found = min(rest_boxes.rectangles(hull.astype(np.float64)), key=lambda r: r[0] * r[1])
    assert found == pytest.approx(expected, rel=0.01)
