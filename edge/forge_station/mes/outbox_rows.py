"""The rows of the outbox as SQL: what one transaction does to them. Also what a row is.

Every function takes the writer's connection inside a transaction that somebody else began and will
commit. It knows no thread, no file and no policy.

A row is `pending` until it is delivered, then `acked` until it is deleted; a refused one is moved
to `dead`. At level 1 delivered means confirmed by the broker, at level 2 by the consumer.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from forge_station.mes.stamp import utc_now

DELETE_ROWS = 64
"""Rows deleted in one transaction: on a full disk a larger one finds no room in the log."""
NO_SUBSCRIBERS = 0x10
FORMAT_INVALID = 0x99
"""Reason code of a message whose content is at fault (MQTT 5: payload format invalid)."""

Mark = Literal["acked", "held", "dead"]
Marks = Mapping[int, tuple[Mark, int | None]]
"""seq -> the broker's answer and its reason code."""
Ranges = Sequence[tuple[int, int]]
"""First and last number of each."""

_COPIED = "id, stream, topic, body, created_utc, created_mono, boot_id, tries"


@dataclass(frozen=True)
class Row:
    """One message to send. `seq` is unique in the station, `stream_seq` counts 1, 2, 3 without
    holes inside its stream, so that a consumer of one stream sees what it missed."""

    seq: int
    id: str
    stream: str
    stream_seq: int
    topic: str
    body: bytes
    created_utc: str
    boot_id: str
    tries: int
    """Times that the broker has answered."""


ROW_COLUMNS = "seq, id, stream, stream_seq, topic, body, created_utc, boot_id, tries"


@dataclass(frozen=True)
class DeadLetter:
    """A row that was refused for good, with the MQTT reason code; none: it was recovered from a
    damaged file and nobody knows whether it had been delivered."""

    seq: int
    id: str
    stream: str
    topic: str
    body: bytes
    reason: int | None
    tries: int
    died_utc: str


@dataclass
class Change:
    """By how much a transaction changes the counts, and what it learned of the streams."""

    pending: int = 0
    acked: int = 0
    dead: int = 0
    dropped: int = 0
    unclaimed: dict[str, bool] | None = None
    """Streams whose rows the broker answered: True when it said that nobody is subscribed."""

    def add(self, other: Change) -> None:
        """Sum up."""
        self.pending += other.pending
        self.acked += other.acked
        self.dead += other.dead
        self.dropped += other.dropped
        if other.unclaimed:
            self.unclaimed = {**(self.unclaimed or {}), **other.unclaimed}


def find(db: sqlite3.Connection, row_id: str) -> int | None:
    """The seq of the message with this id, delivered, waiting or dead."""
    for table in ("outbox", "dead"):
        found = db.execute(f"select seq from {table} where id = ?", (row_id,)).fetchone()
        if found:
            return int(found[0])
    return None


def insert(
    db: sqlite3.Connection, row_id: str, stream: str, topic: str, body: bytes, boot_id: str
) -> tuple[int, int]:
    """Add a pending row; its seq and its number in the stream."""
    number = _next_number(db, stream)
    cursor = db.execute(
        "insert into outbox(id, stream, stream_seq, topic, body, created_utc, created_mono,"
        " boot_id) values (?, ?, ?, ?, ?, ?, ?, ?)",
        (row_id, stream, number, topic, body, utc_now(), time.monotonic(), boot_id),
    )
    return int(cursor.lastrowid or 0), number


def apply_marks(db: sqlite3.Connection, marks: Marks, now: float) -> Change:
    """Write the broker's answers to pending rows. `now` is of the writer's clock."""
    change = Change(unclaimed={})
    assert change.unclaimed is not None
    for seq, (state, reason) in marks.items():
        acked_utc = now if state == "acked" else None
        found = db.execute(
            "update outbox set state = ?, tries = tries + 1, last_reason = ?, acked_utc = ?"
            " where seq = ? and state = 'pending' returning stream",
            ("acked" if state == "acked" else "pending", reason, acked_utc, seq),
        ).fetchone()
        if found is None:
            continue
        if state == "acked":
            change.acked += 1
            change.pending -= 1
            change.unclaimed[found[0]] = False
        elif state == "held":
            change.unclaimed[found[0]] = reason == NO_SUBSCRIBERS
        else:
            bury(db, seq)
            change.dead += 1
            change.pending -= 1
    return change


def bury(db: sqlite3.Connection, seq: int, reason: int | None = None) -> None:
    """Move a row to the dead letters, with a reason of its own if one is given."""
    db.execute(
        f"insert into dead(seq, stream_seq, {_COPIED}, last_reason, died_utc)"
        f" select seq, stream_seq, {_COPIED}, coalesce(?, last_reason), ? from outbox"
        " where seq = ?",
        (reason, utc_now(), seq),
    )
    db.execute("delete from outbox where seq = ?", (seq,))


def release(db: sqlite3.Connection, stream: str, upto: int, now: float) -> Change:
    """The consumer has every number of the stream up to and including `upto`."""
    changed = db.execute(
        "update outbox set state = 'acked', acked_utc = ?"
        " where stream = ? and state = 'pending' and stream_seq <= ?",
        (now, stream, upto),
    ).rowcount
    return Change(pending=-changed, acked=changed)


def last_confirmed(db: sqlite3.Connection) -> float:
    """When the last confirmation of a row that is held was committed; 0 when there is none."""
    (found,) = db.execute("select max(acked_utc) from outbox where state = 'acked'").fetchone()
    return float(found or 0.0)


def resend_recent(db: sqlite3.Connection, within_s: float) -> Change:
    """Make pending again what was confirmed in the `within_s` before the last confirmation."""
    changed = db.execute(
        "update outbox set state = 'pending', acked_utc = null where state = 'acked'"
        " and acked_utc >= ?",
        (last_confirmed(db) - within_s,),
    ).rowcount
    return Change(pending=changed, acked=-changed)


def replay(db: sqlite3.Connection, first: int, last: int) -> Change:
    """Make pending again the confirmed rows with these seqs."""
    changed = db.execute(
        "update outbox set state = 'pending', acked_utc = null"
        " where seq between ? and ? and state = 'acked'",
        (first, last),
    ).rowcount
    return Change(pending=changed, acked=-changed)


def requeue_dead(db: sqlite3.Connection) -> Change:
    """Make every dead letter pending again: same id, new numbers.

    New ones, because a consumer may have been told that the old numbers will never come. What was
    refused for its own content (`FORMAT_INVALID`) stays: it would only be refused again.
    """
    which = f"from dead where last_reason is not {FORMAT_INVALID}"
    dead = db.execute(f"select seq, stream {which} order by abs(seq)").fetchall()
    for seq, stream in dead:
        db.execute(
            f"insert into outbox(stream_seq, {_COPIED}, last_reason)"
            f" select ?, {_COPIED}, last_reason from dead where seq = ?",
            (_next_number(db, stream), seq),
        )
    db.execute(f"delete {which}")
    return Change(pending=len(dead), dead=-len(dead))


def delete_acked(db: sqlite3.Connection, before: float | None = None) -> Change:
    """Delete up to DELETE_ROWS confirmed rows, oldest first; only such confirmed before a time."""
    condition, arguments = ("", ()) if before is None else ("and acked_utc < ?", (before,))
    deleted = db.execute(
        "delete from outbox where seq in (select seq from outbox where state = 'acked'"
        f" {condition} order by acked_utc limit {DELETE_ROWS})",
        arguments,
    ).rowcount
    return Change(acked=-deleted)


def delete_pending(db: sqlite3.Connection, stream: str) -> Change:
    """Delete up to DELETE_ROWS rows of the stream that were not delivered, oldest first."""
    deleted = db.execute(
        "delete from outbox where seq in (select seq from outbox where stream = ?"
        f" and state = 'pending' order by stream_seq limit {DELETE_ROWS})",
        (stream,),
    ).rowcount
    return Change(pending=-deleted, dropped=deleted)


def absent(present: Iterable[int], ranges: Ranges) -> tuple[tuple[int, int], ...]:
    """The parts of `ranges` whose numbers are not `present` (ascending)."""
    found: list[tuple[int, int]] = []
    numbers = iter(present)
    number = next(numbers, None)
    for first, last in ranges:
        start = first
        while number is not None and number <= last:
            if number >= start:
                if number > start:
                    found.append((start, number - 1))
                start = number + 1
            number = next(numbers, None)
        if start <= last:
            found.append((start, last))
    return tuple(found)


def _next_number(db: sqlite3.Connection, stream: str) -> int:
    (number,) = db.execute(
        "insert into streams(name, last) values (?, 1)"
        " on conflict(name) do update set last = last + 1 returning last",
        (stream,),
    ).fetchone()
    return int(number)
