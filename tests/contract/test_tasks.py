"""The text of the three checks, and how free answers of the benchmark are read."""

from __future__ import annotations

import itertools

import pytest

from forge_station.contract import tasks
from forge_station.contract.views import MARKS, VIEWS

LETTERS = tasks.LETTER_OPTIONS

# (text, letter); what must not be read first.
FREE_ANSWERS = [
    ("", ""),
    ("   \n", ""),
    ("I cannot tell.", ""),
    ("A or B", ""),
    ("Both C and E are wrong", ""),
    ("answer: G", ""),
    ("Answer: AB", ""),
    ("none of them looks right, C neither, nor D", ""),
    ("The answer is a bolt of another size", ""),
    ("The answer is a bolt, namely C", "C"),
    ("Answer: a dent at D", "D"),
    ("ABCDEF", ""),
    ("Answer: B", "B"),
    ("answer:B", "B"),
    ("**Answer:** B", "B"),
    ("Answer: **B**", "B"),
    ("the answer is (D).", "D"),
    ("The answer is: E", "E"),
    ("Looking at A and C, the answer is: C", "C"),
    ("Answer: A. No, wait. Answer: C", "C"),
    ("answer: d", "D"),
    ("Answer: A\nbecause it is the longest", "A"),
    ("Answer:\nF", "F"),
    ("B", "B"),
    ("(B)", "B"),
    ("It is B, B for certain", "B"),
    ("Answer is none", "none"),
    ("Answer: None.", "none"),
    ("none", "none"),
    ("None.\n", "none"),
]


@pytest.mark.parametrize(("text", "letter"), FREE_ANSWERS)
def test_letter_of_a_free_answer(text, letter):
    assert tasks.parse_letter(text, LETTERS) == letter


@pytest.mark.parametrize(
    ("text", "letter"),
    [("", ""), ("no", ""), ("Answer: B", "A"), ("B", "B"), ("It is C", "C"), ("none", "E")],
)
def test_published_protocol_takes_the_first_letter_whatever_it_means(text, letter):
    assert tasks.parse_letter(text, LETTERS, strict_first_letter=True) == letter


@pytest.mark.parametrize("text", ["none", "Answer: none", "Answer: F"])
def test_an_answer_that_was_no_option_is_not_read(text):
    assert tasks.parse_letter(text, ("A", "B")) == ""


@pytest.mark.parametrize(
    ("text", "kind", "warned"),
    [
        ("", "", True),
        ("Yes", "", True),
        ("Part 2: B", "", True),
        ("Part 1: perhaps\nPart 2: A", "", True),
        ("Part 1: No", "", True),
        ("Part 1: No\nPart 2: E", "", True),
        ("Part 1: Nobody knows\nPart 2: A", "", True),
        ("Part 1: Yes\nPart 2: C", "normal", True),
        ("Part 1: Yes", "normal", False),
        ("part 1 : yes", "normal", False),
        ("Part 1: No\nPart 2: A", "crack", False),
        ("Part 1: No\nPart 2: B", "cut", False),
        ("Part 1: No\nPart 2: (c)", "deformation", False),
        ("PART 1:no. PART 2:D", "dent", False),
    ],
)
def test_two_part_surface_answer(text, kind, warned):
    found, warnings = tasks.parse_surfinsp(text)
    assert found == kind
    assert bool(warnings) == warned


@pytest.mark.parametrize(
    ("share", "score"),
    [(-0.1, 10), (0.0, 10), (0.0001, 7), (0.01, 6), (0.05, 4), (0.16, 1), (0.25, 0), (1.0, 0)],
)
def test_surface_score_of_a_defect_share(share, score):
    assert tasks.surface_score(share) == score


def test_surface_score_falls_with_the_share_and_every_value_but_8_and_9_occurs():
    scores = [tasks.surface_score(n / 1000) for n in range(1001)]
    assert all(earlier >= later for earlier, later in itertools.pairwise(scores))
    assert set(scores) == {10, *range(8)}


@pytest.mark.parametrize(("violations", "score"), [(0, 10), (1, 7), (2, 4), (3, 1), (4, 0), (9, 0)])
def test_conformity_score_of_violations(violations, score):
    assert tasks.conformity_score(violations) == score


def test_facts_of_a_sheet_are_in_mark_order():
    facts = tasks.sheet_facts({"C": (5, 4.04, 3), "A": (30.12, 13.0, 6.76)}, 0.7079)
    assert facts == "marks scale 0.71\nA: 30.1 13.0 6.8\nC: 5.0 4.0 3.0"


def test_facts_of_a_surface_picture():
    facts = tasks.surface_facts("hex_nut M8", (14.8, 13.0, 6.5), "grid")
    assert facts == "surface grid\nhex_nut M8\n14.8 13.0 6.5"
    assert tasks.surface_facts("pin 6x20", (1, 2, 3)).startswith("surface joint\n")


def test_an_unknown_request_is_refused():
    with pytest.raises(ValueError, match=r"'all'"):
        tasks.surface_facts("hex_nut M8", (1.0, 1.0, 1.0), "all")


def test_readings_are_written_one_line_a_mark_in_mark_order():
    text = tasks.readings_text({"B": "hex_nut M8", "A": "pin 6x20"})
    assert text == "A: pin 6x20\nB: hex_nut M8\n"


@pytest.mark.parametrize(
    ("kind", "required", "text"),
    [
        ("batch", None, "batch majority"),
        ("batch", {"hex_nut M8": 5}, "batch hex_nut M8"),
        ("assembly", {"hex_nut M8": 1, "pin 6x20": 2}, "assembly\n1 hex_nut M8\n2 pin 6x20"),
    ],
)
def test_judge_text(kind, required, text):
    assert tasks.judge_text(kind, required) == text


def test_an_unknown_kind_of_judgement_is_refused():
    with pytest.raises(ValueError, match="single"):
        tasks.judge_text("single", {"hex_nut M8": 1})


def test_an_assembly_without_parts_cannot_be_asked_about():
    with pytest.raises(ValueError, match="assembly"):
        tasks.judge_text("assembly", None)


def test_row_keys_name_every_row_of_every_view_once_counted_from_one():
    keys = [tasks.row_key(view, row) for view, row in tasks.ROW_KEYS]
    assert len(set(keys)) == 48
    assert keys[0] == "front r1:"
    assert keys[-1] == "top r16:"
    assert {key.split()[0] for key in keys} == set(VIEWS)


def test_row_text_is_ascending_and_one_based():
    assert tasks.row_text([]) == "none"
    assert tasks.row_text([8, 4, 5]) == "5,6,9"
    assert tasks.row_text([0, 15]) == "1,16"


def test_no_mark_looks_like_another_option():
    assert list(tasks.LETTER_OPTIONS) == [*MARKS, "none"]
    assert [tasks.mark_key(mark) for mark in MARKS] == ["A:", "B:", "C:", "D:", "E:", "F:"]
