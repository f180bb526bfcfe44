"""Reading plain data into frozen dataclasses: types, limits, and every problem at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_station.contract import record
from forge_station.contract.error import ContractError, Fault, StationError
from forge_station.contract.manifest import Manifest
from forge_station.contract.record import Limit
from forge_station.contract.spec import LineSpec
from forge_station.contract.verdict import Verdict


class Colour(str, Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Small:
    a: Annotated[int, Limit(1, 3)]
    b: str = "x"

    def __post_init__(self) -> None:
        record.check(self)
        if self.b == "same":
            raise ContractError("b is wrong", action="write another b")


@dataclass(frozen=True)
class Cat:
    kind: Literal["cat"]
    mood: Literal["good", "bad"] = "good"


@dataclass(frozen=True)
class Dog:
    kind: Literal["dog", "wolf"]
    size: float = 1.0


@dataclass(frozen=True)
class Everything:
    number: float = 0.0
    whole: int = 0
    flag: bool = False
    text: str = ""
    colour: Colour = Colour.RED
    choice: Literal["one", 2] = "one"
    version: Literal["5", "6"] = "5"
    pair: tuple[int, str] = (0, "")
    many: tuple[Small, ...] = ()
    table: Mapping[str, Small] = field(default_factory=dict)
    maybe: Annotated[float, Limit(0, 1)] | None = None
    either: int | str = 0
    animal: Cat | Dog | None = None


@pytest.mark.parametrize(
    ("data", "path", "allowed"),
    [
        ([], "document", "a table with the keys number, whole"),
        ({"number": "1"}, "number", "a number"),
        ({"number": True}, "number", "a number"),
        ({"number": float("nan")}, "number", "a finite number"),
        ({"number": float("inf")}, "number", "a finite number"),
        ({"whole": 1.0}, "whole", "a whole number"),
        ({"whole": True}, "whole", "a whole number"),
        ({"flag": 1}, "flag", "true, false"),
        ({"flag": "true"}, "flag", "true, false"),
        ({"text": 1}, "text", "a text (put quotes around it)"),
        ({"text": None}, "text", "a text"),
        ({"colour": "green"}, "colour", "red, blue"),
        ({"colour": 1}, "colour", "red, blue"),
        ({"choice": "two"}, "choice", "one, 2"),
        ({"choice": True}, "choice", "one, 2"),
        ({"version": 5}, "version", "5, 6 (put quotes around it)"),
        ({"pair": [1]}, "pair", "2 items"),
        ({"pair": "ab"}, "pair", "a list"),
        ({"pair": [1, 2]}, "pair[1]", "a text (put quotes around it)"),
        ({"many": [{"a": 1}, {"a": 4}]}, "many[1].a", "1 to 3"),
        ({"many": [{}]}, "many[0].a", "missing|a whole number"),
        ({"many": [{"a": 1, "c": 1}]}, "many[0].c", "a, b"),
        ({"table": {"k": {"a": 0}}}, "table.k.a", "1 to 3"),
        ({"table": {1: {"a": 1}}}, "table.1", "a text as key"),
        ({"maybe": 2}, "maybe", "0 to 1"),
        ({"either": 1.5}, "either", "a whole number or a text"),
        ({"animal": {"kind": "cow"}}, "animal.kind", "cat, dog, wolf"),
        ({"animal": {"mood": "bad"}}, "animal.kind", "cat, dog, wolf"),
        ({"animal": {"kind": ["cat"]}}, "animal.kind", "cat, dog, wolf"),
        ({"animal": "cat"}, "animal", "a table with the key kind"),
        ({"animal": {"kind": "cat", "size": 1}}, "animal.size", "kind, mood"),
        ({"many": [{"a": 1, "b": "same"}]}, "many[0]", "write another b"),
    ],
)
def test_a_problem_names_path_and_what_is_allowed(data, path, allowed):
    with pytest.raises(ContractError) as caught:
        record.read(Everything, data)
    assert [fault.path for fault in caught.value.faults] == [path]
    assert any(word in caught.value.faults[0].allowed for word in allowed.split("|"))


def test_all_problems_are_told_at_once():
    data = {
        "number": "x",
        "many": [{"a": 9}, {"b": 1}],
        "colou": "red",
        "animal": {"kind": "dog", "size": "big"},
    }
    with pytest.raises(ContractError) as caught:
        record.read(Everything, data, "file")
    assert {fault.path for fault in caught.value.faults} == {
        "file.colou",
        "file.number",
        "file.many[0].a",
        "file.many[1].a",
        "file.many[1].b",
        "file.animal.size",
    }
    assert "did you mean colour?" in str(caught.value)
    assert str(caught.value).startswith("Everything is not valid (file): 6 problem(s)")


def test_a_full_value_survives_writing_and_reading():
    value = Everything(
        1.5,
        2,
        True,
        "t",
        Colour.BLUE,
        2,
        "6",
        (1, "a"),
        (Small(1), Small(2, "y")),
        {"k": Small(3)},
        0.5,
        "s",
        Dog("wolf", 2.5),
    )
    assert record.read(Everything, record.write(value)) == value


def test_written_data_is_plain():
    data = record.write(Everything(colour=Colour.BLUE, many=(Small(1),)))
    assert data["colour"] == "blue" and type(data["colour"]) is str
    assert data["many"] == [{"a": 1, "b": "x"}] and data["maybe"] is None


def test_whole_numbers_are_read_as_numbers():
    number = record.read(Everything, {"number": 3}).number
    assert number == 3.0 and isinstance(number, float)


def test_limits_hold_for_values_made_in_code_too():
    with pytest.raises(ContractError, match="a: 4; allowed: 1 to 3"):
        Small(4)


def test_converters_read_further_types_and_may_add_faults():
    @dataclass(frozen=True)
    class Holder:
        c: complex
        d: bytes

    def number(value: object) -> complex:
        raise ValueError("a complex number")

    def content(value: object) -> bytes:
        raise ContractError("x", faults=(Fault("other.yaml: k", "1", "2"),))

    with pytest.raises(ContractError) as caught:
        record.read(Holder, {"c": "i", "d": "x"}, converters={complex: number, bytes: content})
    assert [str(fault) for fault in caught.value.faults] == [
        "c: 'i'; allowed: a complex number",
        "other.yaml: k: 1; allowed: 2",
    ]


def test_a_type_without_a_rule_is_a_programming_error():
    @dataclass(frozen=True)
    class Odd:
        c: complex

    with pytest.raises(TypeError, match="no rule for the type"):
        record.read(Odd, {"c": 1})


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    "many",
                    "table",
                    "animal",
                    "kind",
                    "a",
                    "b",
                    "pair",
                    "outcome",
                    "scan",
                    "checks",
                    "files",
                ]
            )
            | st.text(max_size=4),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


@given(plain)
def test_any_plain_data_gives_a_value_or_a_contract_error(data):
    for cls in (Everything, Verdict, Manifest, LineSpec):
        try:
            outcome = record.read(cls, data)
        except ContractError as error:
            outcome = error
        assert isinstance(outcome, cls) or outcome.faults


class TestMessages:
    def test_say_what_which_expected_got_and_what_to_do(self):
        error = StationError(
            "digest differs", which="front.yaml", expected="ab", got="cd", action="calibrate again"
        )
        assert str(error) == "digest differs (front.yaml): expected ab, got cd. Calibrate again"

    def test_leave_out_what_is_not_known(self):
        assert str(StationError("no light")) == "no light"
        assert str(StationError("no light", got=0)) == "no light: got 0"

    def test_every_error_has_its_own_reason_code(self):
        from forge_station import errors
        from forge_station.contract.verdict import REASONS

        classes = [getattr(errors, name) for name in errors.__all__ if name.endswith("Error")]
        codes = {cls.code for cls in classes}
        assert len(codes) == len(classes)
        assert all(issubclass(cls, StationError) for cls in classes)
        unpublished = {"CONFIG_WRONG", "LINK_FAILED", "OUTBOX_FAILED", "TRIGGER_FAILED"}
        assert codes <= set(REASONS) | unpublished
