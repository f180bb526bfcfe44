"""Keeps a model warm in the gaps of a line.

After seconds without work a GPU lowers its clocks and the first part pays for it (a hundred
milliseconds where ten are usual). It knows no model and no station.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from forge_station.errors import StationError

log = logging.getLogger(__name__)


class KeepWarm:
    """Runs `touch` whenever no part came for `every_s` seconds; 0: never. A context manager.

    `touch` runs in a thread of its own and never beside a part: `with keep.part():` waits for the
    one that runs, so it must be short.
    """

    def __init__(self, touch: Callable[[], None], every_s: float) -> None:
        self._touch = touch
        self._every_s = every_s
        self._busy = threading.Lock()
        self._stop = threading.Event()
        self._last = time.monotonic()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> KeepWarm:
        if self._every_s > 0:
            self._thread = threading.Thread(target=self._run, name="keep-warm", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    @contextmanager
    def part(self) -> Iterator[None]:
        """While a part is inspected; the gap starts again behind it."""
        with self._busy:
            try:
                yield
            finally:
                self._last = time.monotonic()

    def _run(self) -> None:
        while not self._stop.wait(max(0.0, self._last + self._every_s - time.monotonic())):
            with self._busy:
                if time.monotonic() - self._last < self._every_s:
                    continue
                try:
                    self._touch()
                except StationError as error:  # the next part meets the same and says so
                    log.warning("keep-warm: %s", error)
                self._last = time.monotonic()
