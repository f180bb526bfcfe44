"""Checks a message against the JSON Schemas in `schemas/` (2020-12, the keywords used there).

It knows no message: the schemas say what is allowed. A consumer may use any JSON Schema library
on the same files; the tests hold both to the same answer. A keyword that this file does not know
is an error, so that a schema cannot demand what is not checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from forge_station.contract.error import ContractError, Fault

DELIVERY = "delivery-1.0.json"
"""The part of the schema that a message meets only once the outbox has stamped it."""

_ANNOTATIONS = frozenset({"$schema", "$id", "$defs", "title", "description", "x-opc"})
_CHECKED = frozenset(
    {"$ref", "allOf", "type", "enum", "const", "pattern", "minLength", "maxLength", "minimum",
     "maximum", "required", "properties", "additionalProperties", "items",
     "minItems", "maxItems"}
)  # fmt: skip
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
}


@cache
def names() -> tuple[str, ...]:
    """The schema files, `verdict-1.0.json` and so on."""
    folder = resources.files(__package__) / "schemas"
    return tuple(sorted(item.name for item in folder.iterdir() if item.name.endswith(".json")))


@cache
def load(name: str) -> dict[str, Any]:
    """One schema by file name. Do not change it: it is shared."""
    file = resources.files(__package__) / "schemas" / name
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def faults(
    message: object, name: str, *, stamped: bool = True, part: str | None = None
) -> tuple[Fault, ...]:
    """All that is wrong with a message. `stamped` False: the outbox has yet to add its fields.

    `part` names a definition inside the schema that the value is held against instead.
    """
    found: list[Fault] = []
    schema = load(name)
    rules = schema if part is None else schema["$defs"][part]
    _check(message, rules, schema, "", found, stamped)
    return tuple(found)


def require(message: Mapping[str, Any], *, stamped: bool = True) -> None:
    """Raise ContractError with every fault; the message's own `schema` field says which it is."""
    if not isinstance(message, Mapping):
        raise ContractError("no message", expected="a JSON object", got=repr(message)[:60])
    kind = message.get("schema")
    name = f"{str(kind).replace('/', '-')}.json"
    if name not in names():
        raise ContractError(
            "message of an unknown schema", expected=", ".join(names()), got=repr(kind)
        )
    found = faults(message, name, stamped=stamped)
    if found:
        raise ContractError("the message breaks its schema", which=kind, faults=found)


def _check(
    value: object,
    schema: Mapping[str, Any],
    document: Mapping[str, Any],
    path: str,
    found: list[Fault],
    stamped: bool,
) -> None:
    unknown = schema.keys() - _CHECKED - _ANNOTATIONS
    if unknown:
        raise ValueError(f"schema {document.get('$id')} uses {sorted(unknown)}, not checked here")
    for part in schema.get("allOf", ()):
        _check(value, part, document, path, found, stamped)
    reference = schema.get("$ref")
    if reference == DELIVERY and not stamped:
        return
    if reference is not None and reference.startswith("#/$defs/"):
        target = document["$defs"][reference.removeprefix("#/$defs/")]
        _check(value, target, document, path, found, stamped)
    elif reference is not None:
        other = load(reference)
        _check(value, other, other, path, found, stamped)
    allowed = _broken_rule(value, schema)
    if allowed:
        shown = repr(value)
        found.append(Fault(path or "message", shown[:60], allowed))
        return
    if isinstance(value, dict):
        for key in schema.get("required", ()):
            if key not in value:
                found.append(Fault(_join(path, key), "missing", "required"))
        named, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        for key, item in value.items():
            inner = named.get(key, others)
            _check(item, inner, document, _join(path, key), found, stamped)
    elif isinstance(value, list) and "items" in schema:
        for number, item in enumerate(value):
            _check(item, schema["items"], document, f"{path}[{number}]", found, stamped)


def _broken_rule(value: object, schema: Mapping[str, Any]) -> str | None:
    """What is allowed, when the value itself (not its inside) breaks a rule."""
    kind = schema.get("type")
    if kind is not None:
        fits = isinstance(value, _TYPES[kind])
        if not fits or (isinstance(value, bool) and kind != "boolean"):
            return f"a value of type {kind}"
    if "const" in schema and value != schema["const"]:
        return repr(schema["const"])
    if "enum" in schema and value not in schema["enum"]:
        return ", ".join(map(str, schema["enum"]))
    if isinstance(value, str):
        if "pattern" in schema and not re.search(schema["pattern"], value):
            return f"text that matches {schema['pattern']}"
        length = len(value)
        low, high = schema.get("minLength", 0), schema.get("maxLength", length)
        if not low <= length <= high:
            return f"{low} to {high} characters"
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        low, high = schema.get("minimum", value), schema.get("maximum", value)
        if not low <= value <= high:
            return f"{schema.get('minimum', 'any')} to {schema.get('maximum', 'any')}"
    elif isinstance(value, list):
        low, high = schema.get("minItems", 0), schema.get("maxItems", len(value))
        if not low <= len(value) <= high:
            return f"{low} to {high} items"
    return None


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
