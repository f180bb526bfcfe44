"""Where the publisher's thread waits: events of its connection, and the nudge that there is work.

Any thread may put; one takes. It does not know what an event means.
"""

from __future__ import annotations

import queue
import threading

from forge_station.mes.link import Event


class Mailbox:
    """Events carry the number of their connection; those of an earlier one are thrown away."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[tuple[int, Event] | None] = queue.SimpleQueue()
        self._woken = threading.Event()

    def put(self, connection: int, event: Event) -> None:
        """Leave an event; never blocks."""
        self._events.put((connection, event))

    def wake(self) -> None:
        """Let the thread look again. One nudge waits at most: hours without a broker add none."""
        if not self._woken.is_set():
            self._woken.set()
            self._events.put(None)

    def waiting(self) -> int:
        """How much lies here."""
        return self._events.qsize()

    def take(self, connection: int, timeout_s: float) -> list[Event]:
        """All events of the connection; waits for the first one, or for a nudge."""
        found: list[tuple[int, Event] | None] = []
        try:
            found.append(self._events.get(timeout=max(0.001, timeout_s)))
            while True:
                found.append(self._events.get_nowait())
        except queue.Empty:
            pass
        if None in found:
            self._woken.clear()
        return [item[1] for item in found if item is not None and item[0] == connection]
