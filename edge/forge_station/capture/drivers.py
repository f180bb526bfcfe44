"""Drivers by name: the entry points of installed packages, for cameras and projectors alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Protocol

from forge_station.errors import CameraNotFoundError, ProjectorNotFoundError


class Closable(Protocol):
    def close(self) -> None: ...


@dataclass(frozen=True)
class Registry:
    """The drivers of one entry point group. kind: what they drive, in words."""

    group: str
    kind: str
    not_found: type[CameraNotFoundError | ProjectorNotFoundError]

    def installed(self) -> dict[str, metadata.EntryPoint]:
        """By name; nothing is imported."""
        return {point.name: point for point in metadata.entry_points(group=self.group)}

    def find(self, name: str, where: str = "") -> metadata.EntryPoint:
        """The driver of a name; nothing is imported. `where` is put before the name in the error.

        Raises `not_found` with the names that there are.
        """
        found = self.installed()
        if name not in found:
            raise self.not_found(
                f"no such {self.kind} driver",
                which=where + name,
                expected=", ".join(sorted(found)) or "an installed driver",
                action="check the name, or install the package that has the driver",
            )
        return found[name]


@contextmanager
def closed_on_error(*devices: Closable) -> Iterator[None]:
    """Close what is open already when the rest of an opening fails.

    Whatever fails: a vendor's library raises what it likes, Ctrl-C may come in between, and a
    device that stays open is taken for everybody.
    """
    try:
        yield
    except BaseException:
        for device in devices:
            device.close()
        raise
