"""Logins: server-side sessions that end by themselves, and the lock after wrong PINs.

A session that ends leaves a viewer, never a login page: the live screen stays as it is. All in
memory: a restart of the page logs everybody out. Times are of a monotonic clock that is given.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from forge_station.errors import StationError
from forge_station.hmi.users import Role, User, Users, UsersError
from forge_station.mes import state_file
from forge_station.mes.stamp import utc_now

log = logging.getLogger(__name__)

IDLE_S = {Role.OPERATOR: 300.0, Role.LEAD: 300.0, Role.ENGINEER: 180.0, Role.ADMIN: 180.0}
"""So long may nothing be done before a session ends, by role."""
LONGEST_S = 12 * 3600.0
WRONG_PINS, LOCK_S, LONGEST_LOCK_S = 5, 60.0, 900.0
"""So many wrong PINs in a row lock; the time doubles with each further one, up to the longest.

Longer would lock people out for the malice of one and gain nothing: one try in 15 minutes is
`most_tries` a day, of a million PINs and more.
"""
_MOST = 10_000


def most_tries(days: float) -> int:
    """How many PINs of one user, or at one panel, can be tried in so many days."""
    left, wait, tries = days * 86_400.0, LOCK_S, WRONG_PINS
    while left >= wait:
        if wait >= LONGEST_LOCK_S:
            return tries + int(left // wait)
        left, wait, tries = left - wait, min(2 * wait, LONGEST_LOCK_S), tries + 1
    return tries


class LockedError(StationError):
    """Too many wrong PINs."""

    def __init__(self, left_s: float) -> None:
        super().__init__("too many wrong PINs", expected=f"a try in {left_s:.0f} s")
        self.left_s = left_s


class RefusedError(StationError):
    """Name or PIN is wrong; it is not said which."""


@dataclass
class Session:
    """One login. `id` is the cookie, `token` must come with every POST."""

    user: User
    panel: str
    begun: float
    used: float
    id: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))

    def left_s(self, now: float) -> float:
        """Until it ends, if nothing is done."""
        idle = self.used + IDLE_S[self.user.role] - now
        return min(idle, self.begun + LONGEST_S - now)


class Lock:
    """Counts wrong PINs by key: a user's name, a panel's address."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._wrong: dict[str, tuple[int, float]] = {}

    def left_s(self, key: str) -> float:
        """How long it is still locked."""
        return max(0.0, self._wrong.get(key, (0, 0.0))[1] - self._clock())

    def wrong(self, key: str) -> None:
        """One more wrong PIN."""
        count = self._wrong.get(key, (0, 0.0))[0] + 1
        doubled = LOCK_S * 2.0 ** min(count - WRONG_PINS, 16)
        locked_s = min(doubled, LONGEST_LOCK_S) if count >= WRONG_PINS else 0.0
        if len(self._wrong) >= _MOST and key not in self._wrong:
            self._wrong.pop(next(iter(self._wrong)))
        self._wrong[key] = (count, self._clock() + locked_s)

    def right(self, key: str) -> None:
        self._wrong.pop(key, None)

    def forget(self) -> None:
        """All counts: everybody may try again at once."""
        self._wrong.clear()


class Sessions:
    """May be called from several threads.

    What `unlock` writes beside the file of users ends all locks, of whatever process holds them.
    """

    def __init__(self, users: Users, clock: Callable[[], float]) -> None:
        self._users = users
        self._clock = clock
        self._lock = Lock(clock)
        self._unlocked = _stamp(unlock_file(users))
        self._open: dict[str, Session] = {}
        self._guard = threading.Lock()

    def login(self, name: str, pin: str, panel: str) -> Session:
        """Raises LockedError, RefusedError. A PIN is not even looked at while locked, and counts as
        wrong until it was: who guesses many at once gets no more of them."""
        keys = (f"user {name}", f"panel {panel}")
        with self._guard:
            if (stamp := _stamp(unlock_file(self._users))) != self._unlocked:
                self._unlocked = stamp
                self._lock.forget()
            left = max(self._lock.left_s(key) for key in keys)
            if left > 0:
                raise LockedError(left)
            for key in keys:
                self._lock.wrong(key)
        user = self._users.check(name, pin)
        if user is None:
            raise RefusedError("name or PIN is wrong")
        with self._guard:
            for key in keys:
                self._lock.right(key)
            now = self._clock()
            self._open = {k: item for k, item in self._open.items() if item.left_s(now) > 0}
            session = Session(user, panel, now, now)
            self._open[session.id] = session
            return session

    def find(self, session_id: str, *, use: bool) -> Session | None:
        """The session of a cookie, None when it has ended. `use`: this counts as doing something.

        A user who was removed, or has another role now, has none; nobody has one while the file of
        users is damaged.
        """
        with self._guard:
            session = self._open.get(session_id)
            if session is None:
                return None
            now = self._clock()
            if session.left_s(now) <= 0 or self._now(session.user.name) != session.user:
                del self._open[session_id]
                return None
            if use:
                session.used = now
            return session

    def _now(self, name: str) -> User | None:
        try:
            return self._users.get(name)
        except UsersError as error:
            log.error("%s", error)
            return None

    def logout(self, session_id: str) -> None:
        with self._guard:
            self._open.pop(session_id, None)

    def left_s(self, session: Session) -> float:
        return session.left_s(self._clock())


def unlock(users: Users) -> None:
    """End the locks of all users and panels, of whatever process serves the page."""
    try:
        state_file.write(unlock_file(users), {"time": utc_now()})
    except OSError as error:
        raise UsersError(
            "nobody could be unlocked", which=unlock_file(users), got=error.strerror
        ) from error


def unlock_file(users: Users) -> Path:
    return users.path.with_name("unlocked.json")


def _stamp(path: Path) -> tuple[int, int] | None:
    """Of the file as it is now; None: there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


__all__ = ["IDLE_S", "LOCK_S", "LONGEST_LOCK_S", "LONGEST_S", "WRONG_PINS", "LockedError",
           "RefusedError", "Session", "Sessions", "most_tries", "unlock"]  # fmt: skip
