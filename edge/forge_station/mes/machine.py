"""The machine and the process as Linux tells them: load, memory, disk, temperature, clock.

It knows nothing of the station. What a system does not tell is None, never a guess.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_STA_UNSYNC = 0x0040
_STA_NANO = 0x2000
_TIME_ERROR = 5


@dataclass(frozen=True)
class Disk:
    """Of the file system that a path lies on, as an unprivileged process may use it."""

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Clock:
    """What the kernel knows of its time source. offset_s positive: the clock is behind."""

    synced: bool
    offset_s: float


def disk(path: Path) -> Disk | None:
    """Of the nearest folder that exists; None when it cannot be asked."""
    folder = path
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return Disk(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


def memory_bytes(statm: Path = Path("/proc/self/statm")) -> int | None:
    """Resident memory of this process."""
    try:
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def temperatures(folder: Path = Path("/sys/class/thermal")) -> dict[str, float]:
    """Sensor -> degrees Celsius; empty where the kernel shows none (a virtual machine)."""
    found = {}
    for zone in sorted(folder.glob("thermal_zone*")):
        try:
            name = (zone / "type").read_text().strip()
            found[f"{zone.name}-{name}"] = int((zone / "temp").read_text()) / 1000.0
        except (OSError, ValueError):
            continue
    return found


class CpuLoad:
    """Share of all cores that was busy between two calls."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._last = self._ticks()

    def percent(self) -> float | None:
        """0 to 100 since the last call (or since the start); None when it cannot be told."""
        now, last = self._ticks(), self._last
        self._last = now
        if now is None or last is None or now[1] <= last[1]:
            return None
        idle, total = now[0] - last[0], now[1] - last[1]
        return round(min(100.0, max(0.0, 100.0 * (1.0 - idle / total))), 1)

    def _ticks(self) -> tuple[int, int] | None:
        """Idle ticks (with waiting for disks) and all ticks."""
        try:
            fields = [int(item) for item in self._stat.read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            return None
        return (fields[3] + fields[4], sum(fields)) if len(fields) == 8 else None


class _Timex(ctypes.Structure):
    """`struct timex` of <sys/timex.h>, up to what is read here; the rest is room for the call."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    )


@cache
def _adjtimex() -> Callable[..., int] | None:
    """The function of the C library, looked up once; None where there is none."""
    try:
        found: Callable[..., int] = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        return None
    return found


def clock() -> Clock | None:
    """Ask the kernel by adjtimex(2), which changes nothing; None where it may not be asked.

    `synced` is set by a time daemon (chrony, ntpd, systemd-timesyncd) and lost 16 s of maximum
    error after it has gone.
    """
    call = _adjtimex()
    if call is None:
        return None
    asked = _Timex()
    state = call(ctypes.byref(asked))
    if state < 0:
        return None
    unit = 1e-9 if asked.status & _STA_NANO else 1e-6
    synced = state != _TIME_ERROR and not asked.status & _STA_UNSYNC
    return Clock(synced, asked.offset * unit)


def process_seconds() -> float:
    """Age of this process by the monotonic clock."""
    return time.monotonic() - _BEGAN


_BEGAN = time.monotonic()
