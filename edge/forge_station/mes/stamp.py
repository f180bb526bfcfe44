"""Ids and times of messages: UUIDv7, RFC 3339, the clock's quality; stamps a stored body.

It does not know what the body says.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
import uuid
from datetime import datetime, timedelta, timezone
from typing import Literal

from forge_station.mes import machine

TimeQuality = Literal["synced", "holdover", "unsynced"]
_synced_once = threading.Event()


def uuid7() -> str:
    """A UUID version 7 (RFC 9562): 48 bits of Unix milliseconds, then random. Sorts by time."""
    value = (time.time_ns() // 1_000_000 & (1 << 48) - 1) << 80 | secrets.randbits(80)
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return str(uuid.UUID(int=value))


def utc_now(later_s: float = 0.0) -> str:
    """RFC 3339, UTC, with milliseconds; such texts sort by time."""
    now = datetime.now(timezone.utc) + timedelta(seconds=later_s)
    return now.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def time_quality() -> TimeQuality | None:
    """Of the clock now. holdover: it was synchronised earlier in the life of this process."""
    found = machine.clock()
    if found is None:
        return None
    if found.synced:
        _synced_once.set()
        return "synced"
    return "holdover" if _synced_once.is_set() else "unsynced"


def stamped(body: bytes, **fields: str | int) -> bytes:
    """The body, a JSON object, with `fields` put in front: the same bytes on every repeat.

    Raises ValueError for a body that is not an object; its inside is not parsed.
    """
    inner = body.strip()
    if not (inner.startswith(b"{") and inner.endswith(b"}")):
        raise ValueError(f"the body is not a JSON object: {body[:40]!r}")
    front = json.dumps(fields, separators=(",", ":")).encode()
    rest = inner[1:-1].strip()
    return front[:-1] + (b"," + rest if rest else b"") + b"}"
