"""Which parts are mixed up, by the catalogue's dimensions."""

from __future__ import annotations

import pytest

from training.evaluation import lookalikes


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("flat_washer M8", "flat_washer M10", "flat washer"),
        ("flat_washer M8", "flat_washer M12", None),  # not neighbours
        ("flat_washer M8", "spring_washer M8", None),
        ("hex_nut M8", "hex_nut M10", "neighbouring size"),
        ("hex_nut M10", "hex_nut M8", "neighbouring size"),
        ("hex_nut M8", "flange_nut M8", None),
        ("hex_bolt M8x30", "hex_bolt M8x40", "other length"),
        ("hex_bolt M8x30", "hex_bolt M10x25", "neighbouring size"),
        ("hex_bolt M8x20", "hex_bolt M10x50", None),  # told apart by its length at a glance
        ("hex_nut M8", "hex_nut M8", None),
        ("step_block 30x25", "step_block 40x30", "neighbouring size"),
    ],
)
def test_kinds_of_look_alikes(first: str, second: str, expected: str | None) -> None:
    assert lookalikes.kind(first, second) == expected


def test_every_base_has_its_look_alikes() -> None:
    for kind in lookalikes.KINDS:
        found = lookalikes.bases(kind, ["flat_washer", "hex_nut", "hex_bolt"])
        assert found
        for model in found:
            others = lookalikes.of(model, kind)
            assert others and all(lookalikes.kind(model.id, m.id) == kind for m in others)
    assert lookalikes.bases("flat washer", ["hex_nut"]) == []
