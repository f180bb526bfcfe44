"""Free text to answers, malformed text first."""

from __future__ import annotations

import pytest

from forge_station.contract import tasks
from forge_station.contract.views import VIEWS
from training.evaluation import prompts, replies

BATCH = prompts.workveri(("A", "B", "C", "D", "E"), "hex_nut M8")
MISSING = prompts.missing({"hex_nut M8": 1, "flat_washer M8": 2})


@pytest.mark.parametrize(
    ("text", "option", "codes"),
    [
        ("", "", ["NO_ANSWER"]),
        ("I see a bolt and a nut.", "", ["NO_ANSWER"]),
        ("A or B, hard to say", "", ["NO_ANSWER"]),
        ("Answer: B", "B", []),
        ("At first Answer: A. On second thought\nAnswer: **C**", "C", ["TWO_ANSWERS"]),
        ("The answer is a matter of taste: D", "D", []),
        ("none", "none", []),
        ("Answer: None.", "none", []),
        ("All of them belong: none of these is wrong", "none", []),
    ],
)
def test_letters(text: str, option: str, codes: list[str]) -> None:
    found = replies.letter(text, BATCH)
    assert found.option == option
    assert [code.partition(":")[2] for code in found.warnings] == codes


def test_the_published_protocol_takes_the_first_capital() -> None:
    assert replies.letter("Answer: B", BATCH, strict_first_letter=True).option == "A"
    assert replies.letter("none", BATCH, strict_first_letter=True).option == "E"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("Answer: A", "hex_nut M8"),
        ("Answer: C", tasks.NONE),
        ("Answer: none", tasks.NONE),
        ("There is one hex nut M8. Answer: flat washer M8", "flat_washer M8"),
        ("Missing is the flat_washer M8", "flat_washer M8"),
        ("Either the hex nut M8 or the flat washer M8", ""),
    ],
)
def test_missing_parts_are_named_by_letter_or_by_name(text: str, part: str) -> None:
    assert replies.letter(text, MISSING).option == part


@pytest.mark.parametrize(
    ("text", "found", "warnings"),
    [
        ("", "", 1),
        ("Part 1: No", "", 1),
        ("Part 1: Yes\nPart 2: A", tasks.NORMAL, 1),
        ("part 1 : YES", tasks.NORMAL, 0),
        ("Part 1: No\nPart 2: (B) fray", "fray", 0),
    ],
)
def test_two_part_answers_of_other_classes(text: str, found: str, warnings: int) -> None:
    said = replies.surfinsp(text, ("blowhole", "fray"))
    assert said.option == found and len(said.warnings) == warnings


@pytest.mark.parametrize(
    ("text", "cells", "score", "codes"),
    [
        ("", None, None, {"SCORE:SCORE_MISSING", "GRID:NO_VIEW"}),
        ("score: 4/10\nfront:\nr5: 8,9\nside:\nnone\ntop:\nnone", ((0, 4, 7), (0, 4, 8)), 4, set()),
        ("score: 4/10\nFront:\nnone\nSide: \nnone\ntop:\nr1: 16", ((2, 0, 15),), 4, set()),
        ("score: 4/10\nfront:\nnone\nside:\nnone", None, 4, {"GRID:NO_VIEW"}),
        ("score: 4/10\nfront:\n5: 8,9\nside:\nnone\ntop:\nnone", None, 4, {"GRID:ROW_WITHOUT_R"}),
        (
            "score: 12/10\nfront:\nnone\nside:\nnone\ntop:\nnone",
            (),
            None,
            {"SCORE:SCORE_MALFORMED"},
        ),
    ],
)
def test_grids_of_three_views(
    text: str, cells: object, score: float | None, codes: set[str]
) -> None:
    found = replies.grids(text, VIEWS, "joint")
    assert found.cells == cells and found.score == score
    assert codes <= set(found.warnings) if codes else found.warnings == ()


def test_a_photo_has_one_grid_without_a_header() -> None:
    found = replies.grids("score: 7/10\nr1: 1,2", ("photo",), "joint")
    assert found.cells == ((3, 0, 0), (3, 0, 1)) and found.score == 7.0 and not found.warnings
    assert replies.grids("r1: 1", ("photo",), "grid").score is None
    assert replies.grids("score: 7/10", ("photo",), "score").cells is None


def test_a_solved_example_is_read_back_as_itself() -> None:
    assert replies.letter(prompts.letter_answer(MISSING, "flat_washer M8"), MISSING).option == (
        "flat_washer M8"
    )
    classes = ("crack", "cut", "deformation", "dent")
    for name in ("normal", *classes):
        assert replies.surfinsp(prompts.surfinsp_answer(name, classes), classes).option == name
