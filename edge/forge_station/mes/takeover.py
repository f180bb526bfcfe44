"""Whether another client uses the station's id: two stations with one id throw each other out.

A broker may say so when it ends a connection (0x8E). Not all do: mosquitto 2.0.11 only closes. Then
the retained `conn` message tells: this process has said ONLINE before, and the broker's memory has
ONLINE of another one. It knows no connection; `publisher` acts on it.
"""

from __future__ import annotations

import json
import math

CHECK_S = 2.0
"""So long a station that comes back waits for that message before it speaks itself, at most: a slow
link or machine must not let both stations speak, and then both wait."""
LONGEST_WAIT = 10
"""The wait grows to so many times its first length."""


class Takeover:
    """What this process knows of others with its id. `boot_id` is its own."""

    def __init__(self, boot_id: str) -> None:
        self._boot_id = boot_id
        self._times = 0
        self._checked_at: float | None = None

    @property
    def active(self) -> bool:
        """Another client had the id when the last connection ended."""
        return self._times > 0

    def connected(self, now: float, *, again: bool) -> None:
        """A connection has begun; `again`: not the first of this process."""
        self._checked_at = now + CHECK_S if again else None

    def may_speak(self, now: float) -> bool:
        """Whether `conn` may be published: not before it was looked at."""
        return self._checked_at is None or now >= self._checked_at

    def heard(self, body: bytes, *, retained: bool) -> bool:
        """Take a `conn` message; True when it is another process's that says it is online."""
        if self._checked_at is None or not retained:
            return False
        try:
            content = json.loads(body)
            other = bool(content["state"] == "ONLINE" and content["bootId"] != self._boot_id)
        except (ValueError, TypeError, KeyError, RecursionError):
            other = False
        # Not a word more in this connection: the other one would hear it and wait as well.
        self._checked_at = math.inf if other else None
        return other

    def ended(self, *, taken_over: bool, lasted: bool) -> None:
        """The connection has ended, thrown out by another client or not; `lasted`: a good while."""
        if taken_over:
            self._times += 1
        elif lasted:
            self._times = 0

    def wait_s(self, first_s: float) -> float:
        """Before the next attempt: doubling."""
        return first_s * min(LONGEST_WAIT, 2.0 ** (self._times - 1))
