"""What is remembered of commands, on disk: ids with their answers, and the counter of each key.

It knows no message. One SQLite file beside the outbox, flushed before a command is carried out: a
command that was begun is never begun again, whatever happens in between.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from forge_station.errors import OutboxError

log = logging.getLogger(__name__)

KEPT_COMMANDS = 10_000
KEPT_S = 7 * 86400.0
_TABLES = """
create table if not exists commands(
    id text primary key, key_id text not null, name text not null, begun real not null,
    status text not null, code text, detail text not null, result text) without rowid;
create index if not exists by_time on commands(begun);
create table if not exists counters(key_id text primary key, last integer not null) without rowid;
"""


@dataclass(frozen=True)
class Answer:
    """How a command went. `status` IN_PROGRESS: it was begun and has not ended."""

    status: str
    code: str | None
    detail: str
    result: Mapping[str, Any]


class CommandStore:
    """A context manager; any thread may call any method. Raises OutboxError when it has no disk.

    A damaged file is moved aside. Then `renewed_at` is the Unix time of that: counters are lost, so
    a command issued before it must be refused.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.renewed_at: float | None = None
        self._lock = threading.Lock()
        try:
            self._db = self._open()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):  # no disk, no right: not damage
                raise self._failed(error) from error
            aside = self.path.with_name(f"{self.path.name}.damaged-{int(time.time())}")
            log.error("commands: %s is damaged (%s), moved to %s", self.path, error, aside)
            self.path.rename(aside)
            for suffix in ("-wal", "-shm"):
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
            self.renewed_at = time.time()
            self._db = self._open()
        # A command that was begun when the station ended: nobody knows how far it came.
        with self._lock, self._db:
            self._db.execute(
                "update commands set status = 'FAILED', code = 'INTERRUPTED',"
                " detail = 'the station restarted before it ended' where status = 'IN_PROGRESS'"
            )

    def __enter__(self) -> CommandStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def answer(self, command_id: str) -> Answer | None:
        """Of a command that was begun; None for one that is not known."""
        with self._lock:
            row = self._db.execute(
                "select status, code, detail, result from commands where id = ?", (command_id,)
            ).fetchone()
        if row is None:
            return None
        status, code, detail, result = row
        return Answer(status, code, detail, json.loads(result or "{}"))

    def counter(self, key_id: str) -> int:
        """The highest counter that the key has used; 0 at first."""
        with self._lock:
            query = "select last from counters where key_id = ?"
            row = self._db.execute(query, (key_id,)).fetchone()
        return int(row[0]) if row else 0

    def begin(self, command_id: str, key_id: str, counter: int, name: str) -> None:
        """On disk when it returns: the id is known and the counter used up."""
        now = time.time()
        try:
            with self._lock, self._db:
                self._db.execute(
                    "insert into counters values (?, ?)"
                    " on conflict(key_id) do update set last = max(last, excluded.last)",
                    (key_id, counter),
                )
                self._db.execute(
                    "insert into commands values (?, ?, ?, ?, 'IN_PROGRESS', null, '', null)",
                    (command_id, key_id, name, now),
                )
                self._db.execute("delete from commands where begun < ?", (now - KEPT_S,))
                self._db.execute(
                    "delete from commands where begun < (select begun from commands"
                    " order by begun desc limit 1 offset ?)",
                    (KEPT_COMMANDS - 1,),
                )
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def finish(self, command_id: str, answer: Answer) -> None:
        """Remember the answer of a command that was begun."""
        try:
            with self._lock, self._db:
                self._db.execute(
                    "update commands set status = ?, code = ?, detail = ?, result = ? where id = ?",
                    (
                        answer.status,
                        answer.code,
                        answer.detail,
                        json.dumps(dict(answer.result)),
                        command_id,
                    ),
                )
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        db = sqlite3.connect(self.path, check_same_thread=False)
        try:
            db.execute("pragma journal_mode=wal")
            db.execute("pragma synchronous=full")
            db.executescript(_TABLES)
            (found,) = db.execute("pragma quick_check(1)").fetchone()
            if found != "ok":
                raise sqlite3.DatabaseError(found)
        except sqlite3.Error:
            db.close()
            raise
        return db

    def _failed(self, error: sqlite3.Error) -> OutboxError:
        return OutboxError("the memory of commands cannot be used", which=self.path, got=error)
