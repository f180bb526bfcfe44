"""A message as a picture: the marked cells, and no others, in their place."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import cv2
import numpy as np
import pytest

from forge_station.contract.error import ContractError
from forge_station.mes import payloads, picture
from tests.mes import golden
from tests.mes.rig import verdict

NAMESPACE = "{http://www.w3.org/2000/svg}"
EXAMPLES = golden.read()


def red_cells(image: np.ndarray, view: int) -> set[tuple[int, int]]:
    """Cells (row, column) whose centre is red."""
    left = picture.MARGIN_PX + view * (16 * picture.CELL_PX + picture.MARGIN_PX)
    half = picture.CELL_PX // 2
    return {
        (row, column)
        for row in range(16)
        for column in range(16)
        if tuple(
            image[
                picture.HEAD_PX + row * picture.CELL_PX + half,
                left + column * picture.CELL_PX + half,
            ]
        )
        == picture.DEFECT
    }


@pytest.mark.parametrize("name", ["verdict", "grid"])
def test_pixels_show_the_marked_cells(name: str) -> None:
    image = picture.pixels(EXAMPLES[name])
    assert red_cells(image, 0) == set(golden.BLOB)
    assert red_cells(image, 1) == set()
    assert red_cells(image, 2) == set(golden.BLOB[:2])
    decoded = cv2.imdecode(np.frombuffer(picture.png(EXAMPLES[name]), np.uint8), cv2.IMREAD_COLOR)
    assert np.array_equal(cv2.cvtColor(decoded, cv2.COLOR_BGR2RGB), image)


def test_svg_is_one_element_that_needs_nothing_else() -> None:
    text = picture.svg(payloads.encode(EXAMPLES["verdict"]))
    root = ET.fromstring(text)
    filled = [item for item in root.iter(f"{NAMESPACE}rect") if item.get("fill") == "#dc322f"]
    assert len(filled) == 8
    labels = [item.text for item in root.iter(f"{NAMESPACE}text")]
    assert labels[:2] == ["A front", "0.51 mm a cell, corner -12.3, 15.7"]
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_message_without_grids_is_an_empty_picture() -> None:
    assert picture.views({"schema": "verdict/1.0"}) == ()
    assert set(np.unique(picture.pixels({"schema": "verdict/1.0"}))) == {255}


def test_verdict_that_only_counts_points_to_the_grid_message() -> None:
    everything = [(row, column) for row in range(16) for column in range(16)]
    grid, summary = payloads.messages_of(verdict(everything, everything).to_dict(), "a/b")
    with pytest.raises(ContractError, match=grid.id):
        picture.svg(summary.body)
    assert red_cells(picture.pixels(grid.body), 0) == set(everything)
    with pytest.raises(ContractError, match="no JSON"):
        picture.svg(b"{")
