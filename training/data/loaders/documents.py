"""JSON files of annotation tools, read without trust."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.data.loaders.sample import LoadError


def read_json(path: Path) -> dict[str, Any]:
    """The object of a JSON file; LoadError with the file's name for anything else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LoadError("file cannot be read", which=path, got=error.strerror) from error
    except (ValueError, RecursionError) as error:
        raise LoadError("not JSON", which=path, got=error) from error
    if not isinstance(data, dict):
        raise LoadError("not a JSON object", which=path, got=type(data).__name__)
    return data


def entries(data: Mapping[str, Any], key: str, path: Path) -> list[Mapping[str, Any]]:
    """A list of objects under `key`."""
    found = data.get(key)
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise LoadError(
            "key is missing or wrong", which=f"{path.name}: {key}", expected="a list of objects",
            got="nothing" if found is None else type(found).__name__,
        )  # fmt: skip
    return found


def id_of(data: Mapping[str, Any], key: str, which: str) -> int | str:
    """A number or text under `key` that names something."""
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise LoadError("key is missing or wrong", which=f"{which}.{key}", expected="an id")
    return value


def is_number(value: object) -> bool:
    """A plain number of a size that pixels have; not true, not NaN."""
    return type(value) in (int, float) and -1e9 < value < 1e9  # type: ignore[operator]


def text_of(data: Mapping[str, Any], key: str, which: str) -> str:
    """A text under `key` that is not empty."""
    value = data.get(key)
    if not isinstance(value, str) or not value.strip():
        raise LoadError("key is missing or wrong", which=f"{which}.{key}", expected="a text")
    return value
