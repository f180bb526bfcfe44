"""Who may use the page: names, roles and PINs in a file that only `forge-station hmi user` writes.

A PIN is kept as scrypt of itself, keyed with a secret of this device that lies beside the file: a
copy of the file alone does not give a PIN of six digits away. There is no default user or PIN.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

from forge_station.errors import StationError
from forge_station.mes import state_file

_N, _R, _P = 1 << 14, 8, 1
MIN_PIN, MAX_PIN = 6, 12
_NAME = re.compile(r"[\w.-]{1,32}")


class Role(IntEnum):
    """What a person may do; each may do what those below may. `VIEWER` needs no login."""

    VIEWER = 0
    OPERATOR = 1
    LEAD = 2
    ENGINEER = 3
    ADMIN = 4

    @property
    def word(self) -> str:
        return self.name.lower()

    @classmethod
    def of(cls, word: str) -> Role:
        """Raises KeyError for another word."""
        return cls[word.upper()]


@dataclass(frozen=True)
class User:
    """Somebody who has logged in."""

    name: str
    role: Role


class UsersError(StationError):
    """A user cannot be added, removed or read."""


class Users:
    """The file of users; read anew when it changes. `add` and `remove` are for the command line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, int] | None = None
        self._known: dict[str, dict[str, Any]] = {}

    def all(self) -> tuple[User, ...]:
        """By name."""
        found = self._read()
        return tuple(User(name, Role.of(found[name]["role"])) for name in sorted(found))

    def get(self, name: str) -> User | None:
        facts = self._read().get(name)
        return None if facts is None else User(name, Role.of(facts["role"]))

    def check(self, name: str, pin: str) -> User | None:
        """The user whose PIN this is. Takes as long for a name that is not known."""
        facts = self._read().get(name)
        salt = bytes.fromhex(facts["salt"]) if facts else bytes(16)
        found = self._hash(pin, salt)
        good = hmac.compare_digest(found, facts["pin"] if facts else "")
        return User(name, Role.of(facts["role"])) if facts and good else None

    def add(self, name: str, role: Role, pin: str) -> User:
        """Raises UsersError for a name that is taken, a poor PIN, or a first user but admin."""
        found = dict(self._read())
        if not _NAME.fullmatch(name):
            raise UsersError(
                "no name for a user", expected="1 to 32 letters, digits, _ . or -", got=repr(name)
            )
        if name in found:
            raise UsersError(
                "there is such a user", which=name, action="remove it first, or take another name"
            )
        if role is Role.VIEWER:
            raise UsersError("a viewer needs no login", which=name, expected="operator or above")
        if not found and role is not Role.ADMIN:
            raise UsersError(
                "the first user must be an admin",
                which=name,
                got=role.word,
                action=f"run `forge-station hmi user add {name} --role admin`",
            )
        require_good(pin)
        salt = secrets.token_bytes(16)
        found[name] = {"role": role.word, "salt": salt.hex(), "pin": self._hash(pin, salt)}
        self._write(found)
        return User(name, role)

    def remove(self, name: str) -> User:
        """Ends the user's sessions too. Raises UsersError for the last admin, or no such user."""
        found = dict(self._read())
        facts = found.pop(name, None)
        if facts is None:
            raise UsersError("no such user", which=name, expected=", ".join(found) or "none yet")
        if found and all(item["role"] != Role.ADMIN.word for item in found.values()):
            raise UsersError("the last admin stays", which=name, action="make another admin first")
        self._write(found)
        return User(name, Role.of(facts["role"]))

    def _read(self) -> Mapping[str, dict[str, Any]]:
        try:
            status = self.path.stat()
        except FileNotFoundError:
            self._known, self._stamp = {}, None
            return self._known
        except OSError as error:
            raise UsersError(
                "the file of users cannot be read", which=self.path, got=error.strerror
            ) from error
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp != self._stamp:
            users = state_file.read(self.path).get("users")
            if not isinstance(users, dict) or not all(map(_whole, users.values())):
                raise UsersError(
                    "the file of users is damaged",
                    which=self.path,
                    action="bring back a copy, or move it away and add the users anew",
                )
            self._known, self._stamp = users, stamp
        return self._known

    def _write(self, users: Mapping[str, Any]) -> None:
        try:
            before = os.umask(0o077)
            try:
                state_file.write(self.path, {"users": dict(users)})
            finally:
                os.umask(before)
        except OSError as error:
            raise UsersError(
                "the file of users cannot be written", which=self.path, got=error.strerror
            ) from error

    def _hash(self, pin: str, salt: bytes) -> str:
        keyed = hmac.new(self._secret(), pin.encode(), "sha256").digest()
        return hashlib.scrypt(keyed, salt=salt, n=_N, r=_R, p=_P, maxmem=64 << 20).hex()

    def _secret(self) -> bytes:
        path = self.path.with_suffix(".key")
        try:
            return path.read_bytes()
        except FileNotFoundError:
            pass
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return path.read_bytes()
        with os.fdopen(handle, "wb") as file:
            secret = secrets.token_bytes(32)
            file.write(secret)
            file.flush()
            os.fsync(file.fileno())
        return secret


def _whole(facts: object) -> bool:
    """Whether a user of the file is as `add` writes one."""
    return (
        isinstance(facts, dict)
        and facts.get("role") in [role.word for role in Role if role is not Role.VIEWER]
        and re.fullmatch(r"([0-9a-f]{2})+", str(facts.get("salt"))) is not None
        and re.fullmatch(r"[0-9a-f]{128}", str(facts.get("pin"))) is not None
    )


def require_good(pin: str) -> None:
    """Raises UsersError for a PIN that is guessed first."""
    steps = {int(b) - int(a) for a, b in pairwise(pin)} if pin.isdigit() else set()
    if not (pin.isascii() and pin.isdigit() and MIN_PIN <= len(pin) <= MAX_PIN):
        raise UsersError("no PIN", expected=f"{MIN_PIN} to {MAX_PIN} digits", got=f"{len(pin)}")
    if steps in ({0}, {1}, {-1}):
        raise UsersError("a poor PIN", expected="not 111111 or 123456", got="such a one")


__all__ = ["Role", "User", "Users", "UsersError", "require_good"]
