"""The specification and its rule engine: what a line may say, and how readings are judged."""

from __future__ import annotations

import pytest

from forge_station.contract.error import ContractError
from forge_station.contract.spec import (
    UNREAD,
    LineSpec,
    Product,
    Reading,
    Rules,
    evaluate,
    parse_line,
)
from forge_station.contract.verdict import Outcome

NUT, NUT_M10, CAP = "hex_nut M8", "hex_nut M10", "cap_nut M8"
BOLT, BOLT_LONG = "hex_bolt M8x30", "hex_bolt M8x40"
FLAT, SPRING = "flat_washer M8", "spring_washer M8"

BATCH = Product("NUTS", "batch", ("workpiece",), {NUT: 4})
MAJORITY = Product("ANY", "batch", ("workpiece",))
KIT = Product("KIT", "assembly", ("assembly",), {BOLT: 1, NUT: 1, FLAT: 1, SPRING: 1})
PAIRED = Product("KIT2", "assembly", ("assembly",), {BOLT: 1, NUT: 1, FLAT: 2})
SINGLE = Product("BOLT", "single", ("workpiece", "surface"), {BOLT: 1})


def read(*parts: str | tuple[str, float]) -> dict[str, Reading]:
    """Readings of marks A, B, ...; a bare part has probability 0.9."""
    pairs = [(item, 0.9) if isinstance(item, str) else item for item in parts]
    return {"ABCDEF"[n]: Reading(*pair) for n, pair in enumerate(pairs)}


@pytest.mark.parametrize(
    ("product", "readings", "outcome", "found"),
    [
        # a batch with an expected part
        (BATCH, read(NUT, NUT, NUT, NUT), "PASS", []),
        (BATCH, read(NUT, NUT_M10, NUT, NUT), "FAIL", [("WRONG_MODEL", "B")]),
        (BATCH, read(NUT, NUT, CAP, NUT), "FAIL", [("WRONG_WORKPIECE", "C")]),
        (
            BATCH,
            read(CAP, NUT, NUT, NUT_M10),
            "FAIL",
            [("WRONG_WORKPIECE", "A"), ("WRONG_MODEL", "D")],
        ),
        (BATCH, read(*[NUT_M10] * 4), "FAIL", [("WRONG_MODEL", mark) for mark in "ABCD"]),
        (BATCH, read(NUT, NUT, NUT), "FAIL", [("WRONG_COUNT", None)]),
        (BATCH, read(*[NUT] * 5), "FAIL", [("WRONG_COUNT", None)]),
        (
            BATCH,
            read(NUT, NUT, NUT, CAP, NUT),
            "FAIL",
            [("WRONG_COUNT", None), ("WRONG_WORKPIECE", "D")],
        ),
        (BATCH, {}, "FAIL", [("WRONG_COUNT", None)]),
        # low probability: of a wrong part, of a right part, next to a certain fault
        (BATCH, read(NUT, (NUT_M10, 0.59), NUT, NUT), "UNSURE", [("WRONG_MODEL", "B")]),
        (BATCH, read(NUT, (NUT_M10, 0.60), NUT, NUT), "FAIL", [("WRONG_MODEL", "B")]),
        (BATCH, read(NUT, (NUT, 0.3), NUT, NUT), "UNSURE", []),
        (BATCH, read(CAP, (NUT, 0.3), NUT, NUT), "FAIL", [("WRONG_WORKPIECE", "A")]),
        (BATCH, {**read(NUT, NUT, NUT), "D": UNREAD}, "UNSURE", [("WRONG_WORKPIECE", "D")]),
        # the majority of a batch without an expected part
        (MAJORITY, read(NUT, NUT, NUT, NUT), "PASS", []),
        (MAJORITY, read(NUT, NUT, NUT_M10, NUT), "FAIL", [("WRONG_MODEL", "C")]),
        (MAJORITY, read(NUT_M10, NUT_M10, NUT), "FAIL", [("WRONG_MODEL", "C")]),
        (MAJORITY, read(NUT, NUT, CAP, CAP), "UNSURE", [("NO_MAJORITY", None)]),
        (MAJORITY, read(NUT, NUT, CAP, BOLT), "UNSURE", [("NO_MAJORITY", None)]),
        (MAJORITY, read(NUT, CAP), "UNSURE", [("NO_MAJORITY", None)]),
        (MAJORITY, read(NUT), "UNSURE", [("NO_MAJORITY", None)]),
        (MAJORITY, read((NUT, 0.3), (NUT, 0.3), NUT_M10), "UNSURE", [("NO_MAJORITY", None)]),
        (MAJORITY, read(NUT, NUT, (CAP, 0.5)), "UNSURE", [("WRONG_WORKPIECE", "C")]),
        (MAJORITY, dict.fromkeys("ABC", UNREAD), "UNSURE", [("NO_MAJORITY", None)]),
        (MAJORITY, {}, "FAIL", [("WRONG_COUNT", None)]),
        # an assembly
        (KIT, read(BOLT, NUT, FLAT, SPRING), "PASS", []),
        (KIT, read(SPRING, FLAT, NUT, BOLT), "PASS", []),
        (KIT, read(BOLT, NUT_M10, FLAT, SPRING), "FAIL", [("WRONG_MODEL", "B")]),
        (KIT, read(BOLT_LONG, NUT, FLAT, SPRING), "FAIL", [("WRONG_MODEL", "A")]),
        (KIT, read(BOLT, CAP, FLAT, SPRING), "FAIL", [("WRONG_WORKPIECE", "B")]),
        (KIT, read(BOLT, NUT, FLAT), "FAIL", [("MISSING_PART", None)]),
        (KIT, read(BOLT, NUT, FLAT, SPRING, SPRING), "FAIL", [("EXTRA_PART", "E")]),
        (KIT, read(BOLT, NUT, FLAT, SPRING, "rivet 6x12"), "FAIL", [("EXTRA_PART", "E")]),
        (KIT, read(BOLT, FLAT, SPRING, SPRING), "FAIL", [("WRONG_WORKPIECE", "D")]),
        (KIT, read(BOLT, NUT_M10, FLAT), "FAIL", [("WRONG_MODEL", "B"), ("MISSING_PART", None)]),
        (
            KIT,
            read(NUT_M10, CAP, BOLT, FLAT, SPRING),
            "FAIL",
            [("WRONG_MODEL", "A"), ("EXTRA_PART", "B")],
        ),
        (KIT, {}, "FAIL", [("MISSING_PART", None)] * 4),
        (PAIRED, read(BOLT, NUT, FLAT, FLAT), "PASS", []),
        (PAIRED, read(BOLT, NUT, FLAT), "FAIL", [("MISSING_PART", None)]),
        (PAIRED, read(BOLT, NUT), "FAIL", [("MISSING_PART", None)]),
        (PAIRED, read(BOLT, NUT, FLAT, FLAT, FLAT), "FAIL", [("EXTRA_PART", "E")]),
        # low probability in an assembly: a swap is doubtful, a count is not
        (KIT, read(BOLT, (NUT_M10, 0.5), FLAT, SPRING), "UNSURE", [("WRONG_MODEL", "B")]),
        (KIT, read(BOLT, (NUT, 0.5), FLAT, SPRING), "UNSURE", []),
        (KIT, read(BOLT, NUT, FLAT, SPRING, (CAP, 0.2)), "FAIL", [("EXTRA_PART", "E")]),
        (KIT, read(BOLT, NUT, (FLAT, 0.2)), "FAIL", [("MISSING_PART", None)]),
        (KIT, {**read(BOLT, NUT, FLAT), "D": UNREAD}, "UNSURE", [("WRONG_WORKPIECE", "D")]),
        (KIT, {**read(BOLT, NUT, FLAT, SPRING), "E": UNREAD}, "FAIL", [("EXTRA_PART", "E")]),
        # a single part
        (SINGLE, read(BOLT), "PASS", []),
        (SINGLE, read(BOLT_LONG), "FAIL", [("WRONG_MODEL", "A")]),
        (SINGLE, read(NUT), "FAIL", [("WRONG_WORKPIECE", "A")]),
        (SINGLE, read(BOLT, BOLT), "FAIL", [("WRONG_COUNT", None)]),
        (SINGLE, {}, "FAIL", [("WRONG_COUNT", None)]),
    ],
)
def test_judgement(product, readings, outcome, found):
    judgement = evaluate(product, readings)
    assert [(item.code, item.mark) for item in judgement.violations] == found
    assert judgement.outcome is Outcome(outcome)


def test_the_less_certain_of_two_equal_parts_is_the_extra_one():
    readings = read(BOLT, NUT, FLAT, (SPRING, 0.7), (SPRING, 0.95))
    violation = evaluate(KIT, readings).violations[0]
    assert violation.mark == "D" and "D, E" in violation.text


def test_a_surplus_part_is_paired_with_the_likeliest_missing_one():
    """M10 nut and M10 washer for their M8 fellows: each is named as what it replaces."""
    judgement = evaluate(KIT, read(BOLT, "flat_washer M10", NUT_M10, SPRING))
    assert {(item.mark, item.expected) for item in judgement.violations} == {
        ("B", FLAT),
        ("C", NUT),
    }
    assert {item.code for item in judgement.violations} == {"WRONG_MODEL"}


def test_the_same_size_is_the_likelier_swap_among_other_workpieces():
    judgement = evaluate(KIT, read(BOLT, "rivet 6x12", CAP, SPRING))
    expected = {item.mark: item.expected for item in judgement.violations}
    assert expected["C"] in (FLAT, NUT) and {item.mark for item in judgement.violations} == {
        "B",
        "C",
    }


def test_reasons_tell_what_was_read_and_what_should_be_there():
    result = evaluate(BATCH, read(NUT, (NUT_M10, 0.8), NUT, (NUT, 0.4))).result("workpiece", 0.6)
    assert result.outcome is Outcome.FAIL and result.confidence == 0.4 and result.threshold == 0.6
    assert [(item.code, item.mark, item.score) for item in result.reasons] == [
        ("WRONG_MODEL", "B", 0.8),
        ("LOW_PROBABILITY", "D", 0.4),
    ]
    assert result.reasons[0].text == "B: hex_nut M10 instead of hex_nut M8"
    assert "0.40 < 0.6" in result.reasons[1].text


def test_decisive_reasons_come_first():
    result = evaluate(BATCH, read((CAP, 0.3), NUT, NUT, NUT_M10)).result("workpiece", 0.6)
    assert [item.mark for item in result.reasons] == ["D", "A", "A"]


def test_a_pass_has_no_reasons_and_the_letter_answer_is_none():
    judgement = evaluate(KIT, read(BOLT, NUT, FLAT, SPRING))
    assert judgement.result("assembly", 0.6).reasons == () and judgement.marks == ()


def test_marks_and_outcome_of_each_part():
    judgement = evaluate(BATCH, read(NUT, NUT_M10, (NUT, 0.2), (CAP, 0.2)))
    assert judgement.marks == ("B", "D")
    outcomes = [judgement.outcome_of(mark) for mark in "ABCD"]
    assert outcomes == [Outcome.PASS, Outcome.FAIL, Outcome.UNSURE, Outcome.UNSURE]


def test_expected_names_the_majority():
    assert evaluate(MAJORITY, read(NUT, NUT, CAP)).expected == {NUT: 3}
    assert evaluate(KIT, {}).expected == dict(KIT.parts)


def test_the_limit_is_the_products_own():
    strict = Product("S", "single", ("workpiece",), {BOLT: 1}, rules=Rules(0.95))
    assert evaluate(strict, read(BOLT)).outcome is Outcome.UNSURE


def product(**changes: object) -> dict[str, object]:
    data: dict[str, object] = {
        "part_number": "P-1",
        "kind": "batch",
        "checks": ["workpiece"],
        "parts": {NUT: 4},
    }
    data.update(changes)
    return {key: value for key, value in data.items() if value != "absent"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colour": "red"}, "products[0].colour: unknown key"),
        ({"part": {NUT: 4}}, "did you mean parts?"),
        ({"part_number": "absent"}, "products[0].part_number: missing"),
        ({"part_number": "a/b"}, "letters, digits"),
        ({"part_number": 7}, "put quotes around it"),
        ({"kind": "kit"}, "products[0].kind: 'kit'; allowed: batch, assembly, single"),
        ({"parts": {"hex_nut M7": 4}}, "an id of the catalogue"),
        ({"parts": {"hexnut M8": 4}}, "an id of the catalogue"),
        ({"parts": {NUT: 0}}, f"products[0].parts.{NUT}: 0; allowed: 1 to 6"),
        ({"parts": {NUT: True}}, "a whole number"),
        ({"parts": {NUT: "4"}}, "a whole number"),
        ({"parts": {NUT: 7}}, "1 to 6"),
        ({"parts": {NUT: 2, CAP: 2}}, "one part, or none: the majority rules"),
        ({"parts": [NUT]}, "a table of keys and values"),
        ({"parts": {}, "count": 2}, "3 or more, for a majority"),
        ({"count": 4}, "left out: `parts` gives the number"),
        ({"checks": []}, "at least one of workpiece"),
        ({"checks": ["workpiece", "workpiece"]}, "each check once"),
        ({"checks": ["surface"]}, "workpiece for kind batch"),
        ({"checks": ["colour"]}, "products[0].checks[0]: 'colour'"),
        ({"checks": "workpiece"}, "a list"),
        ({"kind": "single", "parts": {NUT: 2}}, "one part with count 1"),
        ({"kind": "single", "parts": {}}, "one part with count 1"),
        ({"kind": "assembly", "checks": ["assembly"], "parts": {NUT: 1}}, "two pieces or more"),
        (
            {"kind": "assembly", "checks": ["assembly"], "parts": {NUT: 4, CAP: 3}},
            "at most 6 pieces",
        ),
        ({"field_mm": [60, 40]}, "3 items"),
        ({"field_mm": [60, 0, 10]}, "three lengths above 0"),
        (
            {"rules": {"min_reading_probability": 1.5}},
            "rules.min_reading_probability: 1.5; allowed: 0.0 to 1.0",
        ),
        ({"rules": {"min_surface_score": 11}}, "0.0 to 10.0"),
        ({"rules": {"min_reading_probability": float("nan")}}, "a finite number"),
    ],
)
def test_a_wrong_product_is_refused_with_path_and_what_is_allowed(changes, message):
    with pytest.raises(ContractError) as caught:
        parse_line({"line": "l", "products": [product(**changes)]})
    assert message in str(caught.value)


def test_all_problems_of_a_line_are_in_one_message():
    data = {
        "line": "a b",
        "products": [product(kind="kit"), product(parts={"hex_nut M7": 1}), product(count="x")],
        "extra": 1,
    }
    with pytest.raises(ContractError) as caught:
        parse_line(data, "line.yaml")
    paths = [fault.path for fault in caught.value.faults]
    assert paths == [
        "line.yaml.extra",
        "line.yaml.line",
        "line.yaml.products[0].kind",
        "line.yaml.products[1].parts.hex_nut M7",
        "line.yaml.products[2].count",
    ]


@pytest.mark.parametrize("data", [None, [], "line", 3])
def test_a_line_that_is_no_table_is_refused(data):
    with pytest.raises(ContractError, match="a table with the keys line, products"):
        parse_line(data)


def test_a_part_number_given_twice_and_a_line_without_products_are_refused():
    with pytest.raises(ContractError, match="twice: P-1"):
        parse_line({"line": "l", "products": [product(), product()]})
    with pytest.raises(ContractError, match="each part_number once"):
        LineSpec("l", ())


def test_a_product_is_found_by_its_part_number_only():
    line = parse_line({"line": "l", "products": [product(), product(part_number="P-2")]})
    assert line.product("P-2").part == NUT
    with pytest.raises(ContractError, match="expected P-1, P-2, got P-3"):
        line.product("P-3")
