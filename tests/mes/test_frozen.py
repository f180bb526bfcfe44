"""Interface 1.0 is frozen: the same messages, and schemas that only ever gain optional fields."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from forge_station.mes import command, schema
from forge_station.mes.listen import Received, line_of
from forge_station.mes.topics import TOPICS
from tests.mes import golden, signing_rig
from tests.mes.test_schema import reference_accepts

FROZEN: dict[str, Any] = json.loads(golden.SCHEMAS.read_text())
EXAMPLES = golden.read()


def test_there_is_an_example_of_every_kind_of_message() -> None:
    assert set(EXAMPLES) == set(TOPICS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_keeps_its_schema(name: str) -> None:
    file = f"{TOPICS[name].schema.replace('/', '-')}.json"
    assert schema.faults(EXAMPLES[name], file) == ()
    assert reference_accepts(EXAMPLES[name], file)


@pytest.mark.parametrize("name", EXAMPLES)
def test_this_code_writes_the_frozen_message(name: str) -> None:
    assert golden.build()[name] == EXAMPLES[name]


def test_frozen_command_is_rightly_signed() -> None:
    body = json.dumps(EXAMPLES["command"]).encode()
    assert command.read(body, signing_rig.settings().keys).args["value"] == 0.45


def test_everything_that_a_station_says_is_one_line_for_a_person() -> None:
    for name in [item.name for item in TOPICS.values() if not item.inbound]:
        message = EXAMPLES[name]
        body = json.dumps(message).encode()
        text = line_of(Received(f"x/{name}", body, False, message, name))
        assert len(text.splitlines()) == 1, name
    audit = line_of(Received("x/audit", b"", False, EXAMPLES["audit"], "audit"))
    assert audit == "10:38:37.912 AUDIT   setThreshold SUCCEEDED for mes-1: setThreshold: done"


def broken(old: Any, new: Any, path: str) -> Iterator[str]:
    """Where the new schema asks for more, or for other things, than the old one."""
    for key, rule in old.items():
        place = f"{path}/{key}"
        if key in ("title", "description", "$id", "$schema") or key.startswith("x-"):
            continue
        if key in ("properties", "$defs"):
            for name in rule:
                if name not in new.get(key, {}):
                    yield f"{place}/{name} is gone"
                else:
                    yield from broken(rule[name], new[key][name], f"{place}/{name}")
        elif key == "enum":
            if set(rule) - set(new.get(key, ())):
                yield f"{place} has lost a value"
        elif key in ("items",):
            yield from broken(rule, new.get(key, {}), place)
        elif new.get(key) != rule:
            yield f"{place} was {rule}, is {new.get(key)}"
    for key in set(new) - set(old) - {"title", "description", "properties", "$defs"}:
        if not key.startswith("x-"):
            yield f"{path}/{key} is new"


@pytest.mark.parametrize("name", FROZEN)
def test_schema_has_changed_by_optional_fields_only(name: str) -> None:
    assert name in schema.names()
    assert list(broken(FROZEN[name], schema.load(name), name)) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda new: new["required"].append("orderId"), "required was"),
        (lambda new: new["properties"].pop("orderId"), "orderId is gone"),
        (lambda new: new["properties"]["verdict"]["enum"].remove("UNSURE"), "has lost a value"),
        (lambda new: new["properties"]["orderId"].update(maxLength=5), "maxLength was"),
        (lambda new: new["$defs"]["view"]["properties"].pop("data"), "data is gone"),
        (lambda new: new["properties"]["images"]["items"]["required"].append("x"), "required was"),
        (lambda new: new.update(minProperties=3), "minProperties is new"),
    ],
)
def test_change_that_would_break_a_consumer_is_found(change: Any, said: str) -> None:
    new = copy.deepcopy(FROZEN["verdict-1.0.json"])
    change(new)
    assert said in "; ".join(broken(FROZEN["verdict-1.0.json"], new, "verdict"))


def test_an_added_optional_field_is_no_break() -> None:
    new: dict[str, Any] = copy.deepcopy(FROZEN["verdict-1.0.json"])
    new["properties"]["ambientC"] = {"type": "number"}
    found: Mapping[str, Any] = new
    assert list(broken(FROZEN["verdict-1.0.json"], found, "verdict")) == []
