"""The picture for people: what must be in it, and that odd input never breaks it."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from forge_station.contract.verdict import Outcome
from forge_station.contract.views import VIEWS
from forge_station.geometry import ink, picture
from forge_station.geometry.picture import MarkPicture, Title

RED = (255, 64, 64)


def mark(letter: str = "A", side_px: int = 120, **changes: object) -> MarkPicture:
    shown = np.zeros((224, 224), np.uint8)
    start = 112 - side_px // 2
    shown[start : start + side_px, start : start + side_px] = 160
    fields: dict[str, object] = {
        "mark": letter,
        "views": dict.fromkeys(VIEWS, shown),
        "mm_per_px": 0.1,
        "reading": "hex_nut M8",
        "probability": 0.97,
        "size_mm": (15.0, 13.0, 6.8),
    }
    return MarkPicture(**{**fields, **changes})  # type: ignore[arg-type]


def has(image: NDArray[np.uint8], colour: tuple[int, int, int]) -> NDArray[np.bool_]:
    return np.asarray((image == np.array(colour, np.uint8)).all(axis=2))


@pytest.mark.parametrize("count", range(7))
@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_outcome_draws_with_any_number_of_marks(outcome: Outcome, count: int) -> None:
    marks = [mark("ABCDEF"[i], flagged=i == 0) for i in range(count)]
    image = picture.draw(Title(outcome, "4711", "L3", 187.0, ("a", "b")), ["reason"], marks)
    assert image.shape == (900, 1280, 3) and image.dtype == np.uint8
    assert has(image, ink.BLOCK[outcome][0]).sum() > 20000


def test_outcomes_differ_in_shape_and_not_only_in_colour() -> None:
    shapes = []
    for outcome in Outcome:
        image = np.full((200, 200, 3), 255, np.uint8)
        ink.shape(image, outcome, (100, 100), 58, (0, 0, 0), (255, 255, 255))
        shapes.append(image[..., 0] < 128)
    for i, one in enumerate(shapes):
        for other in shapes[i + 1 :]:
            overlap = (one & other).sum() / (one | other).sum()
            assert overlap < 0.85


@pytest.mark.parametrize("count", [1, 2, 4])
def test_defect_cells_are_outlined_red_only_where_the_grid_has_them(count: int) -> None:
    grid = np.zeros((16, 16), bool)
    marks = [mark("ABCD"[i], grids={"top": grid}) for i in range(count)]
    assert not has(picture.draw(Title(Outcome.PASS, "1"), [], marks), RED).any()
    grid[8, 8] = True
    assert has(picture.draw(Title(Outcome.FAIL, "1"), ["dent"], marks), RED).sum() > 20


def test_a_defect_cell_lies_on_the_pixels_it_means() -> None:
    shown = np.zeros((224, 224), np.uint8)
    shown[56:168, 56:168] = 160
    shown[70:84, 98:112] = 255  # the cell in row 5, column 7
    grid = np.zeros((16, 16), bool)
    grid[5, 7] = True
    views = {"front": shown}
    image = picture.draw(
        Title(Outcome.FAIL, "1"), [], [mark(views=views, grids={"front": grid}, reading="")]
    )
    window = image[200:520, 12:640]
    rows, columns = np.nonzero(has(window, RED))
    bright_rows, bright_columns = np.nonzero(window.min(axis=2) > 245)
    inside = (bright_columns > 150) & (bright_columns < 450)
    for bright, red in ((bright_rows[inside], rows), (bright_columns[inside], columns)):
        # The red line and its dark rim take the outermost pixels of the bright cell.
        assert abs(int(bright.min()) + int(bright.max()) - int(red.min()) - int(red.max())) <= 2
        assert 0 <= bright.min() - red.min() <= 6


def test_all_marks_share_one_scale() -> None:
    small, large = mark("A", side_px=40), mark("B", side_px=120)
    image = picture.draw(Title(Outcome.PASS, "1"), [], [small, large, mark("C")])
    middle = image[236 + 84, :, 0]
    widths = [int((middle[12 + i * 423 : 12 + (i + 1) * 423 - 12] > 150).sum()) for i in range(2)]
    # Both cards have light rims; the parts differ by a factor of three.
    rims = 12
    assert (widths[1] - rims) / (widths[0] - rims) == pytest.approx(3.0, rel=0.1)


def test_letters_stand_outside_the_views() -> None:
    plain = picture.draw(Title(Outcome.PASS, "1"), [], [mark("A"), mark("B"), mark("C")])
    other = picture.draw(Title(Outcome.PASS, "1"), [], [mark("D"), mark("E"), mark("F")])
    changed = np.nonzero((plain != other).any(axis=2))[0]
    assert len(changed) and changed.max() < 236, "the views start at row 236"


@pytest.mark.parametrize(
    "odd",
    [
        {"views": {}},
        {"views": {"front": np.zeros((56, 56), np.uint8)}},
        {"views": dict.fromkeys(VIEWS, np.full((56, 56, 3), 90, np.uint8))},
        {"reading": ""},
        {"reading": "unknown"},
        {"reading": "very_long_workpiece_name_that_never_ends " + "M20x125" * 9},
        {"probability": None},
        {"probability": 1.0},
        {"probability": 7.5},
        {"size_mm": None},
        {"notes": ("Ölspuren ±0,1 µm 螺母", "x" * 400, "", "more", "more")},
        {"mm_per_px": 1e-4},
        {"mm_per_px": 50.0},
    ],
)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_odd_marks_still_draw(odd: dict[str, Any], count: int) -> None:
    marks = [mark("A", **odd), *(mark("BC"[i]) for i in range(count - 1))]
    assert picture.draw(Title(Outcome.UNSURE, "4711"), ["reason"], marks).shape == (900, 1280, 3)


def test_reasons_that_do_not_fit_are_counted() -> None:
    lines = picture.reason_lines([f"reason {i}" for i in range(9)], room=500)
    assert [line for _, line in lines] == [
        *(f"reason {i}" for i in range(4)),
        "and 5 more: see the record",
    ]
    (first, *rest) = picture.reason_lines(["word " * 300], room=500)
    assert first[0] and not any(start for start, _ in rest)
    assert rest[-1][1] == "... see the record"


def test_certainty_is_never_rounded_up_to_certain() -> None:
    assert picture.percent(0.9996) == ">99 %"
    assert picture.percent(0.994) == "99 %"
    assert picture.percent(0.0) == "0 %"


def test_text_is_cut_to_its_room_and_signs_become_ascii() -> None:
    assert ink.plain("Ø 8 ± 0.1 µm ü 螺") == "? 8 ? 0.1 ?m u ?"
    image = np.full((40, 400, 3), 255, np.uint8)
    ink.text(image, "w" * 200, (0, 30), 0.7, (0, 0, 0), room=200)
    assert np.nonzero((image < 128).any(axis=(0, 2)))[0].max() <= 204


def test_png_round_trip_keeps_every_pixel_and_is_the_same_every_time() -> None:
    title = Title(Outcome.FAIL, "4711", "L3", 12.0)
    first, second = (picture.encode(picture.draw(title, ["a"], [mark()])) for _ in range(2))
    assert first == second
    decoded = cv2.imdecode(np.frombuffer(first, np.uint8), cv2.IMREAD_COLOR)
    assert decoded is not None
    np.testing.assert_array_equal(decoded[..., ::-1], picture.draw(title, ["a"], [mark()]))
