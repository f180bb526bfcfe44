"""The queue and the pictures of the page, made when they are first asked for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from forge_station.config import StationConfig
from forge_station.hmi.parts import Evidence, gone
from forge_station.hmi.review import pictures
from forge_station.hmi.review.pictures import Shown
from forge_station.hmi.review.queue import Look, Queue

_KEPT = 12
"""Parts whose pictures are kept in memory, 100 to 500 kB each."""
LOOK, OWN = "look", "own"
"""Scales of the pictures: all parts of a tray alike, to compare them; each filling its picture, so
that cells are the model's."""


class Desk:
    """The queue of a page, opened when it is first asked for. May be used from any thread."""

    def __init__(
        self, config: StationConfig, folder: Path, on_screen: Callable[[], str] = lambda: ""
    ) -> None:
        """`folder`: of labels and log. `on_screen`: the part that the live screen shows."""
        self._config, self._folder, self._on_screen = config, folder, on_screen
        self._guard = threading.Lock()
        self._queue: Queue | None = None
        self._drawn: OrderedDict[str, dict[str, list[Shown]]] = OrderedDict()
        self.evidence = Evidence(config.evidence.folder)

    @property
    def queue(self) -> Queue:
        """Raises ReviewError when its folder cannot be used."""
        with self._guard:
            if self._queue is None:
                config = self._config
                golden = config.drift.golden if config.drift is not None else {}
                self._queue = Queue(
                    self._folder,
                    self.evidence,
                    config.hmi.review,
                    pass_share=config.evidence.pass_share,
                    masters={
                        serial: "OK" if outcome == "PASS" else "NG"
                        for serial, outcome in golden.items()
                    },
                    on_screen=self._on_screen,
                )
            return self._queue

    def close(self) -> None:
        with self._guard:
            if self._queue is not None:
                self._queue.close()
                self._queue = None

    def shown(self, result_id: str) -> dict[str, list[Shown]]:
        """Pictures of a part at both scales. Raises EvidenceError when it is gone."""
        with self._guard:
            if result_id in self._drawn:
                self._drawn.move_to_end(result_id)
                return self._drawn[result_id]
        row = self.evidence.one(result_id)
        if row is None:
            raise gone(result_id)
        parts = self.evidence.case(row).parts
        own = pictures.drawn(parts)
        found = {OWN: own, LOOK: pictures.drawn(parts, together=True) if len(parts) > 1 else own}
        with self._guard:
            self._drawn[result_id] = found
            while len(self._drawn) > _KEPT:
                self._drawn.popitem(last=False)
        return found

    def digests(self, look: Look) -> dict[str, str]:
        return pictures.digests(self.shown(look.result_id)[LOOK])


__all__ = ["LOOK", "OWN", "Desk"]
