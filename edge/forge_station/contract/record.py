"""Frozen dataclasses <-> plain JSON/YAML data: strict, and every problem in one error.

It knows no file and no format: the caller parses text and writes text. An unknown key, a missing
key, a wrong type, a number out of bounds and a NaN are problems; each names its path.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import reprlib
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar

from forge_station.contract.error import ContractError, Fault

T = TypeVar("T")
Converter = Callable[[object], object]


@dataclasses.dataclass(frozen=True)
class Limit:
    """Stands in `Annotated[...]`: a number lies in [low, high], a text matches `pattern` fully.

    `meaning` says the pattern in words. Enforced by `read`, and by `check` in `__post_init__`.
    """

    low: float | None = None
    high: float | None = None
    pattern: str | None = None
    meaning: str = ""

    def violated_by(self, value: object) -> str | None:
        """What is allowed, when the value breaks the limit; None when it keeps it."""
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            too_low = self.low is not None and not value >= self.low
            too_high = self.high is not None and not value <= self.high
            if too_low or too_high:
                if self.high is None:
                    return f"at least {self.low}"
                return f"at most {self.high}" if self.low is None else f"{self.low} to {self.high}"
        if self.pattern and isinstance(value, str) and not re.fullmatch(self.pattern, value):
            return self.meaning or f"text that matches {self.pattern}"
        return None


Probability = Annotated[float, Limit(0.0, 1.0)]
Score = Annotated[float, Limit(0.0, 10.0)]
NotNegative = Annotated[float, Limit(0.0)]
Count = Annotated[int, Limit(0)]


def hints_of(cls: type) -> dict[str, Any]:
    """Field name -> type with its `Limit`s, strings resolved; resolved once per class."""
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls, include_extras=True)
    return _HINTS[cls]


_HINTS: dict[type, dict[str, Any]] = {}


def _limits_of(cls: type) -> dict[str, tuple[Limit, ...]]:
    """The limits of each field that has any; looked up once a class."""
    if cls not in _LIMITS:
        found = {name: _limits(hint) for name, hint in hints_of(cls).items()}
        _LIMITS[cls] = {name: limits for name, limits in found.items() if limits}
    return _LIMITS[cls]


_LIMITS: dict[type, dict[str, tuple[Limit, ...]]] = {}


def check(instance: Any) -> None:
    """For `__post_init__`: raise ContractError when a value is outside the `Limit` of its field."""
    faults = []
    for name, limits in _limits_of(type(instance)).items():
        value = getattr(instance, name)
        allowed = next((text for limit in limits if (text := limit.violated_by(value))), None)
        if allowed:
            faults.append(Fault(name, _shown(value), allowed))
    if faults:
        raise ContractError(f"{type(instance).__name__} is not valid", faults=faults)


def read(
    cls: type[T],
    data: object,
    where: str = "",
    converters: Mapping[Any, Converter] | None = None,
) -> T:
    """Build the dataclass `cls` from plain data.

    `where` prefixes every path. `converters` reads further types (a config reads `Path`); a
    converter raises ValueError with what is allowed, or ContractError with its own faults. In a
    union of dataclasses the one `Literal` field that all have (a driver's name) picks the member.
    Raises ContractError with all faults.
    """
    reader = _Reader(dict(converters or {}))
    value = reader.value(cls, data, where)
    if reader.faults:
        raise ContractError(
            f"{cls.__name__} is not valid", which=where or None, faults=reader.faults
        )
    return typing.cast(T, value)


def write(value: object) -> Any:
    """Plain data (dict, list, str, int, float, bool, None) of a dataclass, for JSON or YAML."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: write(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): write(item) for key, item in value.items()}
    if isinstance(value, (tuple, list, frozenset, set)):
        return [write(item) for item in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return str(value)


class _Reader:
    def __init__(self, converters: dict[Any, Converter]) -> None:
        self.converters = converters
        self.faults: list[Fault] = []

    def fault(self, path: str, got: str, allowed: str) -> object:
        self.faults.append(Fault(path or "document", got, allowed))
        return None

    def value(self, hint: Any, data: object, path: str) -> object:
        """The value of type `hint`, or None after a fault was noted."""
        if hint is Any:
            return data
        if hint in self.converters:
            try:
                return self.converters[hint](data)
            except ContractError as error:
                self.faults += error.faults or (Fault(path, _shown(data), str(error)),)
                return None
            except ValueError as error:
                return self.fault(path, _shown(data), str(error))
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin is Annotated:
            return self.limited(hint, data, path)
        if origin in (typing.Union, types.UnionType):
            return self.union(arguments, data, path)
        if origin is Literal:
            if any(data == item and type(data) is type(item) for item in arguments):
                return data
            quotes = " (put quotes around it)" if str(data) in arguments else ""
            return self.fault(path, _shown(data), f"{_one_of(arguments)}{quotes}")
        if origin is tuple:
            return self.sequence(arguments, data, path)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return self.mapping(arguments, data, path)
        if dataclasses.is_dataclass(hint):
            return self.dataclass(typing.cast(type, hint), data, path)
        if isinstance(hint, type) and issubclass(hint, Enum):
            names = [str(item.value) for item in hint]
            if isinstance(data, str) and data in names:
                return hint(data)
            return self.fault(path, _shown(data), _one_of(names))
        return self.scalar(hint, data, path)

    def limited(self, hint: Any, data: object, path: str) -> object:
        noted = len(self.faults)
        value = self.value(typing.get_args(hint)[0], data, path)
        for limit in _limits(hint) if len(self.faults) == noted else ():
            allowed = limit.violated_by(value)
            if allowed:
                return self.fault(path, _shown(data), allowed)
        return value

    def scalar(self, hint: Any, data: object, path: str) -> object:
        if hint is float:
            if isinstance(data, (int, float)) and not isinstance(data, bool):
                if math.isfinite(data):
                    return float(data)
                return self.fault(path, _shown(data), "a finite number")
            return self.fault(path, _shown(data), "a number")
        if hint is int:
            if isinstance(data, int) and not isinstance(data, bool):
                return data
            return self.fault(path, _shown(data), "a whole number")
        if hint is bool:
            return data if isinstance(data, bool) else self.fault(path, _shown(data), "true, false")
        if hint is str:
            if isinstance(data, str):
                return data
            quotes = "" if data is None else " (put quotes around it)"
            return self.fault(path, _shown(data), f"a text{quotes}")
        raise TypeError(f"record.read has no rule for the type {hint!r}")

    def union(self, arguments: tuple[Any, ...], data: object, path: str) -> object:
        others = [item for item in arguments if item is not type(None)]
        if data is None and len(others) < len(arguments):
            return None
        if len(others) == 1:
            return self.value(others[0], data, path)
        if all(dataclasses.is_dataclass(item) for item in others):
            return self.tagged(others, data, path)
        trials = []
        for item in others:
            trial = _Reader(self.converters)
            value = trial.value(item, data, path)
            if not trial.faults:
                return value
            trials.append(trial.faults)
        allowed = " or ".join(faults[0].allowed for faults in trials)
        return self.fault(path, _shown(data), allowed)

    def tagged(self, members: list[Any], data: object, path: str) -> object:
        literals = [
            {name for name, hint in hints_of(member).items() if typing.get_origin(hint) is Literal}
            for member in members
        ]
        shared = set.intersection(*literals)
        if len(shared) != 1:
            raise TypeError(f"record.read needs one Literal field in common: {members!r}")
        name = shared.pop()
        tags = {
            tag: member for member in members for tag in typing.get_args(hints_of(member)[name])
        }
        if not isinstance(data, Mapping):
            return self.fault(path, _shown(data), f"a table with the key {name}")
        chosen = data.get(name)
        member = tags.get(chosen) if isinstance(chosen, str) else None
        if member is None:
            got = _shown(chosen) if name in data else "missing"
            return self.fault(_join(path, name), got, _one_of(tags))
        return self.value(member, data, path)

    def sequence(self, arguments: tuple[Any, ...], data: object, path: str) -> object:
        if not isinstance(data, (list, tuple)):
            return self.fault(path, _shown(data), "a list")
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            hints: tuple[Any, ...] = (arguments[0],) * len(data)
        elif len(data) != len(arguments):
            return self.fault(path, f"{len(data)} items", f"{len(arguments)} items")
        else:
            hints = arguments
        pairs = zip(hints, data, strict=True)
        return tuple(self.value(hint, item, f"{path}[{n}]") for n, (hint, item) in enumerate(pairs))

    def mapping(self, arguments: tuple[Any, ...], data: object, path: str) -> object:
        if not isinstance(data, Mapping):
            return self.fault(path, _shown(data), "a table of keys and values")
        result: dict[str, object] = {}
        for key, item in data.items():
            if not isinstance(key, str):
                self.fault(_join(path, str(key)), _shown(key), "a text as key")
                continue
            result[key] = self.value(arguments[1], item, _join(path, key))
        return result

    def dataclass(self, cls: type, data: object, path: str) -> object:
        if not isinstance(data, Mapping):
            names = ", ".join(field.name for field in dataclasses.fields(cls))
            return self.fault(path, _shown(data), f"a table with the keys {names}")
        before = len(self.faults)
        fields = {field.name: field for field in dataclasses.fields(cls)}
        hints = hints_of(cls)
        for key in data:
            if key not in fields:
                near = difflib.get_close_matches(str(key), list(fields), n=1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                allowed = f"{', '.join(fields)}{hint}"
                self.fault(_join(path, str(key)), "unknown key", allowed)
        values: dict[str, object] = {}
        for name, field in fields.items():
            place = _join(path, name)
            if name not in data:
                if (
                    field.default is dataclasses.MISSING
                    and field.default_factory is dataclasses.MISSING
                ):
                    self.fault(place, "missing", _described(hints[name]))
                continue
            values[name] = self.value(hints[name], data[name], place)
        if len(self.faults) > before:
            return None
        try:
            return cls(**values)
        except ContractError as error:
            inner = error.faults or (Fault("", str(error), error.action or "see the message"),)
            for item in inner:
                self.fault(_join(path, item.path), item.got, item.allowed)
            return None


def _join(path: str, name: str) -> str:
    if not name:
        return path
    return f"{path}.{name}" if path else name


def _shown(value: object) -> str:
    """A short repr; bounded also for nested YAML aliases, whose full repr would never end."""
    text = _SHORT.repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 60, 60


def _one_of(items: Any) -> str:
    return ", ".join(str(item) for item in items)


def _described(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _described(arguments[0])
    if origin is Literal:
        return _one_of(arguments)
    if origin is tuple:
        return "a list"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a table of keys and values"
    if dataclasses.is_dataclass(hint):
        names = ", ".join(field.name for field in dataclasses.fields(typing.cast(Any, hint)))
        return f"a table with the keys {names}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _one_of(item.value for item in hint)
    words = {str: "a text", int: "a whole number", float: "a number", bool: "true, false"}
    return words.get(hint, str(hint))


def _limits(hint: Any) -> tuple[Limit, ...]:
    """The limits on the value itself: those of `Annotated`, also inside a union with None."""
    if typing.get_origin(hint) is Annotated:
        own = tuple(item for item in typing.get_args(hint)[1:] if isinstance(item, Limit))
        return own + _limits(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(limit for item in typing.get_args(hint) for limit in _limits(item))
    return ()
