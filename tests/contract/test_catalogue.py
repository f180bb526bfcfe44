"""The catalogue: ids that models can spell, and nominal sizes of the named standards."""

from __future__ import annotations

import re

import pytest

from forge_station.contract.catalogue import (
    CATALOGUE,
    WORKPIECES,
    PartModel,
    UnknownPartError,
    by_id,
    of_workpiece,
)
from forge_station.contract.error import StationError


@pytest.mark.parametrize("bad", ["", "hex_nut", "hex_nut M9", "hex nut M8", "M8", "HEX_NUT M8"])
def test_an_unknown_id_is_refused_and_named(bad: str) -> None:
    with pytest.raises(UnknownPartError, match=re.escape(repr(bad))):
        by_id(bad)


def test_an_unknown_id_suggests_near_ones() -> None:
    with pytest.raises(StationError, match="hex_nut M8"):
        by_id("hex_nut M8 ")


def test_an_unknown_workpiece_lists_what_there_is() -> None:
    with pytest.raises(UnknownPartError, match="flat_washer"):
        of_workpiece("gasket")


def test_every_id_is_unique_and_found_again() -> None:
    assert len({model.id for model in CATALOGUE}) == len(CATALOGUE)
    assert all(by_id(model.id) is model for model in CATALOGUE)


def test_the_catalogue_has_the_promised_breadth() -> None:
    assert len(WORKPIECES) >= 14
    assert 90 <= len(CATALOGUE) <= 190
    assert sum(len(of_workpiece(name)) for name in WORKPIECES) == len(CATALOGUE)


@pytest.mark.parametrize("model", CATALOGUE, ids=lambda model: model.id)
def test_an_id_splits_into_a_workpiece_and_at_most_two_number_words(model: PartModel) -> None:
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", model.workpiece)
    assert re.fullmatch(r"M\d+(x\d+)?|\d+x\d+", model.model_number)


def test_dimensions_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        by_id("hex_nut M8").dims["s"] = 14.0  # type: ignore[index]


# nominal values where published tables often hold the maximum or the DIN width instead
@pytest.mark.parametrize(
    ("part", "letter", "nominal"),
    [
        ("hex_bolt M8x30", "k", 5.3),
        ("hex_bolt M10x25", "s", 16.0),
        ("hex_bolt M12x30", "s", 18.0),
        ("socket_cap_screw M8x16", "dk", 13.0),
        ("socket_cap_screw M8x20", "k", 8.0),
        ("socket_cap_screw M16x25", "dk", 24.0),
        ("button_head_screw M8x16", "s", 5.0),
        ("hex_nut M8", "m", 6.8),
        ("hex_nut M16", "m", 14.8),
        ("flange_nut M10", "s", 15.0),
        ("flat_washer M8", "h", 1.6),
        ("flat_washer M8", "d1", 8.4),
        ("pin 6x20", "d", 6.0),
        ("pin 6x20", "l", 20.0),
        ("hex_bolt M20x80", "P", 2.5),
    ],
)
def test_dimensions_are_the_nominal_ones(part: str, letter: str, nominal: float) -> None:
    assert by_id(part).dims[letter] == nominal


@pytest.mark.parametrize(
    ("part", "box"),
    [
        ("hex_bolt M8x30", (35.3, 15.01, 13.0)),
        ("hex_nut M8", (6.8, 15.01, 13.0)),
        ("countersunk_screw M8x20", (20.0, 16.0, 16.0)),
        ("pin 6x20", (20.0, 6.0, 6.0)),
        ("strap_clamp M8x60", (12.0, 60.0, 25.0)),
    ],
)
def test_extents_are_axis_then_wide_then_narrow(part: str, box: tuple[float, float, float]) -> None:
    assert by_id(part).extents == pytest.approx(box, abs=0.01)


def test_a_larger_thread_never_makes_a_smaller_part() -> None:
    for name in WORKPIECES:
        models = [model for model in of_workpiece(name) if "l" not in model.dims]
        spans = [max(model.extents) for model in models]
        assert spans == sorted(spans), name
