"""Fields of a verdict message picked by path, for consumers that know no nesting.

It knows the verdict's schema, no topic and no broker. A path names keys and places in lists:
`partId`, `reasons.0.code`, `model.version`. `cells` is the number of defective cells.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from forge_station.mes import schema

CELLS = "cells"
VERDICT = "verdict-1.0.json"
_SCALARS = ("string", "number", "integer", "boolean")

Scalar = str | int | float | bool | None


def value(message: Mapping[str, Any], path: str) -> Scalar:
    """What stands at the path of a verdict message; None when this verdict has it not."""
    if path == CELLS:
        return _cells(message)
    found: Any = message
    for key in path.split("."):
        if isinstance(found, Mapping):
            found = found.get(key)
        elif isinstance(found, list) and key.isdigit() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found if isinstance(found, (str, int, float, bool)) else None


def values(message: Mapping[str, Any], fields: Mapping[str, str]) -> dict[str, Scalar]:
    """Name -> value. Every name is there each time, so that no old value stays behind."""
    return {name: value(message, path) for name, path in fields.items()}


def text(found: Scalar) -> str:
    """A value alone on its topic: no quotes, `true` and `false`, empty for none."""
    if isinstance(found, bool):
        return "true" if found else "false"
    return "" if found is None else str(found)


def kind(path: str) -> str | None:
    """The JSON type of what a path names; None when a verdict never has it, or it is no scalar."""
    if path == CELLS:
        return "integer"
    here: Mapping[str, Any] = schema.load(VERDICT)
    for key in path.split("."):
        if here.get("type") == "array":
            inner = here.get("items", {}) if key.isdigit() else {}
        elif here.get("type") == "object" and "properties" not in here:
            return "number" if here is _property("timings") and path.count(".") == 1 else None
        else:
            inner = dict(_properties(here)).get(key, {})
        here = _resolved(inner)
    found = here.get("type") or ("string" if here.get("enum") else None)
    if "const" in here:
        found = {str: "string", int: "integer"}.get(type(here["const"]))
    return found if found in _SCALARS else None


def allowed(path: str) -> str | None:
    """What a path may be, when this one is none."""
    if kind(path) is not None:
        return None
    names = sorted({CELLS, *(name for name, _ in _properties(schema.load(VERDICT)))})
    near = difflib.get_close_matches(path.split(".")[0], names, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"a text, number or truth value of the verdict message: {', '.join(names)}{hint}"


def _cells(message: Mapping[str, Any]) -> int | None:
    grid = message.get("grid")
    if grid is None:
        return None
    counts = (view.get("count", len(view.get("cells", ()))) for view in grid["views"])
    return int(sum(counts))


def _property(name: str) -> Any:
    return dict(_properties(schema.load(VERDICT)))[name]


def _properties(part: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for other in part.get("allOf", ()):
        if other["$ref"] != schema.DELIVERY:  # given by the outbox, later
            yield from _properties(_resolved(other))
    yield from part.get("properties", {}).items()


def _resolved(part: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = part.get("$ref")
    if reference is None:
        return part
    if reference.startswith("#/$defs/"):
        found: Mapping[str, Any] = schema.load(VERDICT)["$defs"][reference.rsplit("/", 1)[-1]]
        return found
    return schema.load(reference)
