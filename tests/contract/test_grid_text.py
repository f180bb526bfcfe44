"""The text codec of VIEScore2: strict parser with warnings, published parser with its holes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_station.contract import grid_text
from forge_station.contract.error import ContractError
from forge_station.contract.grid import EMPTY, DefectGrid
from forge_station.contract.grid_text import (
    Answer,
    Request,
    parse,
    parse_columns,
    parse_lenient,
    write,
)

FLAT = Request()
JOINT = Request(score=True)
CHANNELS = Request(axes=True, grid="channels")
SCORE_ONLY = Request(score=True, grid="no")

PUBLISHED = """pq: 4/10
sc: 7/10
artifact:
r5: 8,9!,10
r6: 8,9
misalign:
none"""


def grid(*cells: tuple[int, int], major: tuple[tuple[int, int], ...] = ()) -> DefectGrid:
    """From 1-based cells, as in text."""
    return DefectGrid.of(
        [(row - 1, column - 1) for row, column in cells],
        [(row - 1, column - 1) for row, column in major],
    )


def codes(parsed: grid_text.Parsed) -> list[str]:
    return [warning.code for warning in parsed.warnings]


class TestHolesOfThePublishedParser:
    """B8 of the facts: each is reproduced by the lenient parser and caught by the strict one."""

    @pytest.mark.parametrize(
        ("text", "lenient", "warnings"),
        [
            ("5: 8,9\n6: 8", grid((5, 8), (5, 9), (5, 6)), ["ROW_WITHOUT_R", "ROW_WITHOUT_R"]),
            ("r5: 8-12", grid((5, 8)), ["ROW_MALFORMED"]),
            ("r5: 123", grid((5, 12), (5, 3)), ["OUT_OF_GRID"]),
            ("none of the cells is defective", EMPTY, ["UNKNOWN_TEXT"]),
            ("the ratio 3:4 is fine", grid((3, 4)), ["UNKNOWN_TEXT"]),
            ("at 12:30 none", EMPTY, ["UNKNOWN_TEXT"]),
        ],
    )
    def test_hole(self, text, lenient, warnings):
        assert parse_lenient(text).grid == lenient
        parsed = parse(text, FLAT)
        assert codes(parsed) == warnings
        assert parsed.answer.grid is None, "what cannot be read exactly must not look clean"
        assert not parsed.ok


class TestStrictParser:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", ["GRID_MISSING"]),
            ("\n\n", ["GRID_MISSING"]),
            ("no defect", ["UNKNOWN_TEXT"]),
            ("r0: 5", ["OUT_OF_GRID"]),
            ("r17: 5", ["OUT_OF_GRID"]),
            ("r5: 0", ["OUT_OF_GRID"]),
            ("r5: 17", ["OUT_OF_GRID"]),
            ("r5:", ["ROW_MALFORMED"]),
            ("r5: 8,", ["ROW_MALFORMED"]),
            ("r5: ,8", ["ROW_MALFORMED"]),
            ("r5: 8;9", ["ROW_MALFORMED"]),
            ("r5: none", ["ROW_MALFORMED"]),
            ("r5: 8!!", ["ROW_MALFORMED"]),
            ("r5: 8[1,3]", ["ROW_MALFORMED"]),
            ("r5: 8 r6: 9", ["ROW_MALFORMED"]),
            ("r5: -8", ["ROW_MALFORMED"]),
            ("r 5 8", ["UNKNOWN_TEXT"]),
            (f"r5: {'9' * 5000}", ["ROW_MALFORMED"]),
            (f"r{'9' * 5000}: 5", ["ROW_MALFORMED"]),
            (f"r5: 8{' ' * 50_000}x", ["ROW_MALFORMED"]),
            ("r5: 8\nnone", ["NONE_WITH_CELLS"]),
            ("none\nr5: 8", ["NONE_WITH_CELLS"]),
            ("r5: 8\nthat is all", ["UNKNOWN_TEXT"]),
            (
                "artifact:\nr5: 8\nmisalign:",
                ["CHANNEL_NOT_REQUESTED", "CHANNEL_NOT_REQUESTED", "GRID_EMPTY_WITHOUT_NONE"],
            ),
        ],
    )
    def test_what_cannot_be_read_exactly_is_none(self, text, expected):
        parsed = parse(text, FLAT)
        assert codes(parsed) == expected
        assert parsed.answer.grid is None
        assert any(warning.fatal for warning in parsed.warnings)

    @pytest.mark.parametrize(
        ("text", "cells", "expected"),
        [
            ("r5: 8, 9", grid((5, 8), (5, 9)), ["SPACING"]),
            ("R5: 8", grid((5, 8)), ["SPACING"]),
            ("row 5: 8", grid((5, 8)), ["SPACING"]),
            ("r5:8", grid((5, 8)), ["SPACING"]),
            ("r05: 8", grid((5, 8)), ["SPACING"]),
            ("  r5: 8", grid((5, 8)), ["SPACING"]),
            ("r5: 9,8", grid((5, 8), (5, 9)), ["COLUMN_ORDER"]),
            ("r5: 8,8", grid((5, 8)), ["COLUMN_TWICE"]),
            ("r6: 8\nr5: 8", grid((5, 8), (6, 8)), ["ROW_ORDER"]),
            ("r5: 8\nr5: 9", grid((5, 8), (5, 9)), ["ROW_ORDER"]),
            ("r5: 8\n\nr6: 8", grid((5, 8), (6, 8)), ["EMPTY_LINE"]),
            ("NONE", EMPTY, ["CASE"]),
            ("none\nnone", EMPTY, ["NONE_TWICE"]),
            ("pq: 3/10\nnone", EMPTY, ["SCORE_NOT_REQUESTED"]),
        ],
    )
    def test_a_harmless_deviation_is_read_and_warned_of(self, text, cells, expected):
        parsed = parse(text, FLAT)
        assert codes(parsed) == expected
        assert parsed.answer.grid == cells
        assert not parsed.ok
        assert not any(warning.fatal for warning in parsed.warnings)

    @pytest.mark.parametrize(
        "text", ["none", "none\n", "r1: 1", "r16: 16!", "r5: 8,9!,10\nr6: 8,9\n"]
    )
    def test_the_exact_format_has_no_warning(self, text):
        assert parse(text, FLAT).ok

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("score: 11/10\nnone", ["SCORE_MALFORMED"]),
            ("score: -1/10\nnone", ["SCORE_MALFORMED"]),
            ("score: 4.5/10\nnone", ["SCORE_MALFORMED"]),
            ("score: 4\nnone", ["SCORE_MALFORMED"]),
            ("score: 4/5\nnone", ["SCORE_MALFORMED"]),
            ("score: four/10\nnone", ["SCORE_MALFORMED"]),
            ("none", ["SCORE_MISSING"]),
            ("score: 4/10\nscore: 5/10\nnone", ["SCORE_TWICE"]),
        ],
    )
    def test_a_score_that_cannot_be_read_is_left_out(self, text, expected):
        parsed = parse(text, JOINT)
        assert codes(parsed) == expected
        assert parsed.answer.scores == {}
        assert parsed.answer.grid == EMPTY, "the grid is not lost with the score"

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("none\nscore: 4/10", ["SCORE_AFTER_GRID"]),
            ("Score: 4/10\nnone", ["SPACING"]),
            ("score : 4 / 10\nnone", ["SPACING"]),
            ("score: 04/10\nnone", ["SPACING"]),
        ],
    )
    def test_a_score_out_of_form_is_read_and_warned_of(self, text, expected):
        parsed = parse(text, JOINT)
        assert codes(parsed) == expected
        assert parsed.answer.scores == {"score": 4}

    def test_the_published_example_reads_exactly(self):
        parsed = parse(PUBLISHED, CHANNELS)
        assert parsed.ok
        answer = parsed.answer
        assert answer.scores == {"pq": 4, "sc": 7}
        artifact = grid((5, 8), (5, 10), (6, 8), (6, 9), major=((5, 9),))
        assert answer.channels == {"artifact": artifact, "misalign": EMPTY}
        assert answer.grid == artifact
        assert answer.overall == pytest.approx(28**0.5)
        assert write(answer) == PUBLISHED

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("none", ["ROWS_BEFORE_CHANNEL"]),
            ("artifact:\nnone", ["CHANNEL_MISSING"]),
            ("artifact:\nmisalign:\nnone", ["GRID_EMPTY_WITHOUT_NONE"]),
            ("r5: 8\nartifact:\nnone\nmisalign:\nnone", ["ROWS_BEFORE_CHANNEL"]),
        ],
    )
    def test_incomplete_channels_are_none(self, text, expected):
        parsed = parse(text, Request(grid="channels"))
        assert codes(parsed) == expected
        assert parsed.answer.grid is None and parsed.answer.channels is None

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("misalign:\nnone\nartifact:\nr1: 1", ["CHANNEL_ORDER"]),
            (
                "artifact:\nnone\nartifact:\nr1: 1\nmisalign:\nnone",
                ["CHANNEL_TWICE", "NONE_WITH_CELLS"],
            ),
            ("artifact :\nr1: 1\nmisalign:\nnone", ["SPACING"]),
        ],
    )
    def test_channels_out_of_form_are_warned_of(self, text, expected):
        assert codes(parse(text, Request(grid="channels"))) == expected

    def test_a_score_only_request_takes_no_grid(self):
        parsed = parse("score: 9/10", SCORE_ONLY)
        assert parsed.ok and parsed.answer.grid is None and parsed.answer.overall == 9
        assert codes(parse("score: 9/10\nnone", SCORE_ONLY)) == ["GRID_NOT_REQUESTED"]


class TestLenientParser:
    def test_reads_the_published_example(self):
        answer = parse_lenient(PUBLISHED)
        assert answer.scores == {"pq": 4, "sc": 7}
        assert answer.channels is not None
        assert answer.channels["artifact"] == grid((5, 8), (5, 9), (5, 10), (6, 8), (6, 9))
        assert answer.channels["misalign"] == EMPTY

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", None),
            ("no defect at all", None),
            ("row 5 : 8 9", grid((5, 8), (5, 9))),
            ("r5: 8!,9[1,3]", grid((5, 8), (5, 9))),
            ("r5: 0,17,99", None),
            ("r0: 5\nr99: 5", None),
            ("r5: 16,17", grid((5, 16))),
            ("None.", EMPTY),
            ("nonexistent", None),
        ],
    )
    def test_grid(self, text, expected):
        assert parse_lenient(text).grid == expected

    @pytest.mark.parametrize(
        ("text", "scores"),
        [
            ("score: 11/10", {}),
            ("my score : 7 /10", {"score": 7}),
            ("PQ: 3/10, SC: 10/10", {"pq": 3, "sc": 10}),
            ("xpq: 3/10", {}),
        ],
    )
    def test_scores(self, text, scores):
        assert parse_lenient(text).scores == scores


class TestRowForm:
    """One answer per grid row, as the branches of one trunk give it."""

    @pytest.mark.parametrize(
        "text",
        ["", "17", "0", "5,5", "6,5", "5, 6", "5-6", "none ", "None", "5,", "a", "05", "5!x"],
    )
    def test_malformed_is_refused(self, text):
        with pytest.raises(ContractError, match="not a grid row"):
            parse_columns(text)

    @pytest.mark.parametrize(
        ("text", "columns"), [("none", ()), ("1", (0,)), ("5,6,16", (4, 5, 15))]
    )
    def test_columns(self, text, columns):
        assert parse_columns(text) == columns


@pytest.mark.parametrize(
    ("value", "score"),
    [(0.0, 0), (0.05, 0), (0.25, 2), (0.35, 4), (0.449, 4), (0.45, 4), (1.0, 10)],
)
def test_scores_round_halves_to_even(value, score):
    assert grid_text.score_of(value) == score


@pytest.mark.parametrize("value", [-0.01, 1.01, float("nan")])
def test_a_score_outside_0_to_1_is_refused(value):
    with pytest.raises(ContractError):
        grid_text.score_of(value)


cells = st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15)), max_size=60)
grids = st.builds(DefectGrid.of, cells, cells)
points = st.integers(0, 10)


@given(grids)
def test_round_trip_of_a_flat_grid(drawn):
    parsed = parse(write(Answer(grid=drawn)), FLAT)
    assert parsed.ok and parsed.answer.grid == drawn


@given(points, points, grids, grids)
def test_round_trip_of_axes_and_channels(pq, sc, artifact, misalign):
    channels = {"artifact": artifact, "misalign": misalign}
    answer = Answer({"pq": pq, "sc": sc}, artifact | misalign, channels)
    parsed = parse(write(answer), CHANNELS)
    assert parsed.ok and parsed.answer == answer


@given(points, grids)
def test_the_lenient_parser_reads_the_same_cells(score, drawn):
    answer = parse_lenient(write(Answer({"score": score}, drawn)))
    assert answer.scores == {"score": score}
    assert answer.grid is not None and answer.grid.indices() == drawn.indices()


@given(st.text(alphabet="r0123456789:,! \nnoeartifcmslg/[]-.R", max_size=80))
def test_strict_and_lenient_never_raise_and_strict_is_never_clean_by_accident(text):
    parse_lenient(text)
    for request in (FLAT, JOINT, CHANNELS, SCORE_ONLY):
        parsed = parse(text, request)
        if parsed.ok:
            assert write(parsed.answer) == text.rstrip("\n")


@given(grids)
def test_rows_of_branches_make_the_same_grid(drawn):
    rows = grid_text.rows_text(drawn).replace("!", "").split("\n")
    by_row = dict(line.split(": ") for line in rows if line != "none")
    found = [
        (row, column)
        for row in range(16)
        for column in parse_columns(by_row.get(f"r{row + 1}", "none"))
    ]
    assert DefectGrid.of(found).indices() == drawn.indices()
