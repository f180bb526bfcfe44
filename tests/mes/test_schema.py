"""The small schema checker against the reference implementation, on the schemas we publish."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from forge_station.contract.error import ContractError
from forge_station.mes import payloads, schema, stamp
from tests.mes.rig import verdict

REGISTRY: Registry[Any] = Registry().with_resources(
    [(name, Resource.from_contents(schema.load(name))) for name in schema.names()]
)
DELIVERY: dict[str, str | int] = {
    "id": "01a22c09-02ac-7ae4-9890-27743ec78250",
    "stream": "verdict",
    "epoch": "0123abcd",
    "seq": 7,
    "streamSeq": 3,
    "bootId": "deadbeef",
}


def reference_accepts(message: object, name: str) -> bool:
    return bool(Draft202012Validator(schema.load(name), registry=REGISTRY).is_valid(message))


def sample() -> dict[str, Any]:
    body = payloads.verdict_body(
        verdict(front=[(4, 5)]).to_dict(),
        "acme/berlin/hall2/l3/s1",
        sw_version="0.1.0",
        context={"orderId": "4711", "recipe": {"externalId": "r1"}},
    )
    return {**DELIVERY, **json.loads(payloads.encode(body))}


@pytest.mark.parametrize("name", schema.names())
def test_schema_is_valid_and_uses_only_what_is_checked(name: str) -> None:
    Draft202012Validator.check_schema(schema.load(name))
    schema.faults({}, name)
    schema.faults([], name)
    assert schema.load(name)["$id"] == name
    check_keywords(schema.load(name))


def check_keywords(part: dict[str, Any]) -> None:
    """Also where no message of a test reaches."""
    assert part.keys() <= schema._CHECKED | schema._ANNOTATIONS
    for key in ("properties", "$defs"):
        for inner in part.get(key, {}).values():
            check_keywords(inner)
    for key in ("items", "additionalProperties"):
        if key in part:
            check_keywords(part[key])
    for inner in part.get("allOf", ()):
        check_keywords(inner)


def test_additional_members_are_held_against_their_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = {
        "$id": "x", "type": "object", "properties": {"a": {"type": "string"}},
        "additionalProperties": {"type": "integer", "minimum": 0},
    }  # fmt: skip
    monkeypatch.setattr(schema, "load", lambda _: rules)
    for message in ({"a": "x", "b": 1}, {}, {"b": -1}, {"b": "x"}, {"a": 1, "b": 1}):
        assert (schema.faults(message, "x") == ()) is Draft202012Validator(rules).is_valid(message)
    assert [fault.path for fault in schema.faults({"b": -1, "c": 2}, "x")] == ["b"]


def test_unknown_keyword_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "load", lambda _: {"$id": "x", "maxProperties": 3})
    with pytest.raises(ValueError, match="maxProperties"):
        schema.faults({}, "x")


def test_good_verdict_is_accepted_by_both() -> None:
    assert schema.faults(sample(), "verdict-1.0.json") == ()
    assert reference_accepts(sample(), "verdict-1.0.json")


def test_unknown_field_is_accepted_since_a_minor_version_may_add_it() -> None:
    message = {**sample(), "addedInOneDotSeven": {"x": 1}}
    assert schema.faults(message, "verdict-1.0.json") == ()
    assert reference_accepts(message, "verdict-1.0.json")


WRONG: list[tuple[tuple[str | int, ...], Any]] = [
    (("verdict",), "OK"),
    (("verdict",), None),
    (("verdict",), 1),
    (("schema",), "verdict/2.0"),
    (("source",), ""),
    (("source",), "acme//l3"),
    (("source",), "acme/berlin/hall2/l3/s1/"),
    (("source",), "/".join("abcdefghijklm")),
    (("type",), "verdict"),
    (("timeQuality",), "good"),
    (("source",), "acme/berlin/hall 2/l3/s1"),
    (("time",), "2026-11-30 10:38:37"),
    (("time",), "2026-11-30T10:38:37.741+01:00"),
    (("seq",), 0),
    (("seq",), "7"),
    (("seq",), 1.5),
    (("seq",), True),
    (("streamSeq",), None),
    (("epoch",), "0123ABCD"),
    (("bootId",), ""),
    (("id",), ""),
    (("id",), "a b"),
    (("partId",), ""),
    (("partIdSource",), "guess"),
    (("isSimulated",), 0),
    (("isSimulated",), "false"),
    (("reasons",), {}),
    (("reasons", 0, "code"), "dent"),
    (("reasons", 0, "label"), 3),
    (("checks", "surface"), "OK"),
    (("parts", 0, "probability"), 1.2),
    (("parts", 0, "sizeMm"), [1.0, 2.0]),
    (("parts", 0, "sizeMm"), [1.0, 2.0, "3"]),
    (("surface", 0, "class"), "scratch"),
    (("model", "releaseCounter"), -1),
    (("grid", "rows"), 15),
    (("grid", "inline"), "some"),
    (("grid", "views", 0, "view"), "back"),
    (("grid", "views", 0, "cells"), [[5]]),
    (("grid", "views", 0, "cells"), [[5, 6, 7, 8]]),
    (("grid", "views", 0, "data"), "not base64!"),
]


@pytest.mark.parametrize(("path", "value"), WRONG, ids=lambda item: str(item)[:40])
def test_wrong_value_is_refused_by_both_and_named(path: tuple[str | int, ...], value: Any) -> None:
    message = sample()
    target: Any = message
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    found = schema.faults(message, "verdict-1.0.json")
    assert found
    assert str(path[0]) in found[0].path
    assert not reference_accepts(message, "verdict-1.0.json")


@pytest.mark.parametrize("name", ["resultId", "partId", "verdict", "reasons", "seq", "time"])
def test_missing_field_is_refused_by_both(name: str) -> None:
    message = sample()
    del message[name]
    assert [fault.path for fault in schema.faults(message, "verdict-1.0.json")] == [name]
    assert not reference_accepts(message, "verdict-1.0.json")


def test_every_fault_is_reported() -> None:
    message = {**copy.deepcopy(sample()), "verdict": "OK", "seq": 0, "partId": 5}
    with pytest.raises(ContractError) as caught:
        schema.require(message)
    assert {fault.path for fault in caught.value.faults} == {"verdict", "seq", "partId"}


def test_message_of_unknown_schema_is_refused() -> None:
    for kind in (None, 3, "verdict/9.9", "../../etc/passwd"):
        with pytest.raises(ContractError, match="unknown schema"):
            schema.require({"schema": kind})


def test_delivery_fields_are_not_asked_of_a_body_not_yet_stamped() -> None:
    message = {key: value for key, value in sample().items() if key not in DELIVERY}
    schema.require(message, stamped=False)
    with pytest.raises(ContractError):
        schema.require(message)


def test_every_message_kind_we_send_is_accepted_by_both() -> None:
    source = "acme/berlin/hall2/l3/s1"
    alarm = payloads.alarm_message("DEAD_LETTER", "text", source, severity=800)
    bodies = {
        "alarm-1.0.json": stamp.stamped(alarm.body, **{**DELIVERY, "stream": "alarm"}),
        "grid-1.0.json": stamp.stamped(
            payloads.encode(payloads.grid_body(verdict(top=[(0, 0)]).to_dict(), source)),
            **{**DELIVERY, "stream": "grid"},
        ),
        "state-1.0.json": payloads.status_body(
            "state", source, {"state": "OPERATIONAL", "mode": "READY"}
        ),
        "last-1.0.json": payloads.status_body(
            "last", source, payloads.last_body(verdict(top=[(0, 0)]).to_dict())
        ),
    }
    for name, body in bodies.items():
        assert schema.faults(json.loads(body), name) == ()
        assert reference_accepts(json.loads(body), name), name


@pytest.mark.parametrize("message", [5, None, [], "x", True])
def test_what_is_no_object_is_no_message(message: Any) -> None:
    with pytest.raises(ContractError, match="no message"):
        schema.require(message)
