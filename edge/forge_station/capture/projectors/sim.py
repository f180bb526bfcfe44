"""A projector without light: it remembers what it was asked to show, for tests and simulations."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forge_station.capture.projector import Prepared, ProjectorInfo, ProjectorSettings, stepping_of
from forge_station.errors import ProjectorNotFoundError

NOTHING = -1


class SimProjector:
    """`shown` is the index that is up, NOTHING when dark.

    address: a file that always holds `shown` as text, so that a simulated camera in another process
    can look at it; empty: none. option `stepping` "camera" or "projector" plays a projector that
    steps by itself.
    """

    def __init__(self, settings: ProjectorSettings) -> None:
        self._sequence = Prepared("sim", None)
        self._file = Path(settings.address) if settings.address else None
        self._stepping = stepping_of(settings, "host")
        self.shown = NOTHING
        self._tell(NOTHING)

    def describe(self) -> ProjectorInfo:
        return ProjectorInfo("sim", "simulated projector", None, self._stepping)

    def prepare(self, images: NDArray[np.uint8]) -> None:
        self._sequence.take(images)

    def show(self, index: int) -> None:
        self._sequence.image(index)
        self._tell(index)

    def close(self) -> None:
        if not self._sequence.closed:
            self._tell(NOTHING)
            self._sequence.close()

    def _tell(self, index: int) -> None:
        self.shown = index
        if self._file is None:
            return
        fresh = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        try:
            fresh.write_text(str(index), encoding="ascii")
            fresh.replace(self._file)
        except OSError as error:
            raise ProjectorNotFoundError(
                "the simulated projector cannot write its file",
                which=self._file,
                got=error.strerror,
            ) from error


def open_sim(settings: ProjectorSettings) -> SimProjector:
    """Entry point of the driver `sim`."""
    return SimProjector(settings)
