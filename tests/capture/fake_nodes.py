"""A node map with the behaviour of GenApi's: selectors, access, limits, availability."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_station.capture.cameras.sfnc import NodeError, Value


class FakeNodes:
    """Features by name. An enumeration has its entries, a selected one its value per selector.

    features: {"Gain": 3.0, "PixelFormat": ("Mono8", "RGB8")} (the first entry is set at first).
    selected: {"TriggerMode": "TriggerSelector"}: each entry of the selector has its own value.
    """

    def __init__(
        self,
        features: Mapping[str, Value | tuple[str, ...]],
        selected: Mapping[str, str] | None = None,
        limits: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        self._entries = {k: v for k, v in features.items() if isinstance(v, tuple)}
        self._first = {k: v[0] if isinstance(v, tuple) else v for k, v in features.items()}
        self._selected, self._limits = dict(selected or {}), dict(limits or {})
        self._values: dict[Any, Value] = {}
        self.executed: list[str] = []
        self.written: list[tuple[str, Value]] = []

    def _key(self, name: str) -> Any:
        if name not in self._first:
            raise NodeError(f"no feature {name}")
        selector = self._selected.get(name)
        return name if selector is None else (name, self.get(selector))

    def available(self, name: str) -> bool:
        return name in self._first

    def get(self, name: str) -> Value:
        return self._values.get(self._key(name), self._first[name])

    def set(self, name: str, value: Value) -> None:
        key = self._key(name)
        if name in self._entries and value not in self._entries[name]:
            raise NodeError(f"{value} is no entry of {name}")
        low, high = self._limits.get(name, (float("-inf"), float("inf")))
        if isinstance(value, int | float) and not low <= value <= high:
            raise NodeError(f"{value} is not within {low:g}..{high:g}")
        self._values[key] = value
        self.written.append((name, value))

    def execute(self, name: str) -> None:
        self._key(name)
        self.executed.append(name)

    def entries(self, name: str) -> tuple[str, ...]:
        if name not in self._entries:
            raise NodeError(f"{name} is no enumeration")
        return self._entries[name]
