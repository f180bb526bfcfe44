"""Tells systemd that the station is ready, alive, or stopping (sd_notify(3)). Knows no station.

One datagram to the socket that NOTIFY_SOCKET names; without it nothing happens. The watchdog of a
unit (WatchdogSec=) restarts a process that stops saying that it is alive.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType

log = logging.getLogger(__name__)

SEND_S = 1.0


def notify(state: str) -> bool:
    """Send `READY=1`, `WATCHDOG=1`, `STOPPING=1` or `STATUS=...`; False when nobody listens."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(SEND_S)
            sender.sendto(state.encode(), address.replace("@", "\0", 1))
    except OSError as error:
        log.warning("systemd cannot be told %s: %s", state, error)
        return False
    return True


def watchdog_s() -> float | None:
    """How often systemd must hear of this process; None: it does not ask."""
    usec, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not usec.isdigit() or int(usec) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 1e6


class Liveness:
    """The loop's pulse: it lives while `beat` was called within `limit_s`. Any thread may ask."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._at = clock()

    def beat(self) -> None:
        self._at = self._clock()

    @property
    def alive(self) -> bool:
        return self._clock() - self._at <= self._limit_s


class Watchdog:
    """A context manager that tells systemd three times a period while the loop lives."""

    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        period_s = watchdog_s()
        if period_s is not None:
            self._thread = threading.Thread(
                target=self._run, args=(period_s / 3,), name="watchdog", daemon=True
            )
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

    def _run(self, every_s: float) -> None:
        silent = False
        while not self._stop.wait(every_s):
            if self._liveness.alive:
                notify("WATCHDOG=1")
            elif not silent:
                log.critical("the loop does not answer; systemd is told nothing more")
                silent = True
