"""The durable outbox: what the station has decided and the broker has not yet confirmed.

It does not know MQTT, nor what is inside a body: `publisher` sends, `payloads` composes.

`put` returns after the row is on disk (SQLite, WAL, `synchronous=FULL`); one writer thread commits
all waiting puts together, so that ten callers share one disk flush. Confirmations are committed
along with puts, or 20 ms later without a flush of their own: losing one in a power cut costs a
duplicate, never a verdict. Confirmed rows are kept for `keep_acked_s` and are the first to go
when the quota is reached.
"""

from __future__ import annotations

import logging
import os
import secrets
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from forge_station.errors import OutboxError
from forge_station.mes import outbox_file
from forge_station.mes.outbox_file import Counts, DeadLetter, OutboxFull, OutboxInUse, Row
from forge_station.mes.stamp import utc_now, uuid7

log = logging.getLogger(__name__)

FORMAT_INVALID = 0x99
"""Reason code of a message whose content is at fault (MQTT 5: payload format invalid)."""
GROUP_ROWS = 256
"""Most puts in one transaction."""
MARK_DELAY_S = 0.02
MARK_ROWS = 64
DELETE_ROWS = 64
"""Rows deleted in one transaction: on a full disk a larger one finds no room in the log."""
MAINTENANCE_S = 30.0

Mark = Literal["acked", "held", "dead"]
Marks = Mapping[int, tuple[Mark, int | None]]
"""seq -> the broker's answer and its reason code."""
PreviousShutdown = Literal["first", "clean", "crash", "power"]

_COPIED = "seq, id, stream, stream_seq, topic, body, created_utc, created_mono, boot_id, tries"


@dataclass
class _Job:
    """Work for the writer thread. `run` happens inside the transaction; it returns the result
    and sets by how much the counts change once that is committed."""

    run: Callable[[sqlite3.Connection, _Job], int]
    stream: str | None = None
    pending: int = 0
    acked: int = 0
    dead: int = 0
    result: int = 0
    error: OutboxError | None = None
    done: threading.Event = field(default_factory=threading.Event)


class Outbox:
    """The open outbox; a context manager. Any thread may call any method.

    `max_bytes` is the quota of the database file. `ballast_bytes` of disk are set aside so that
    confirmed rows can be deleted even when other programs have filled it. Raises OutboxInUse when
    another process has it open. A damaged file is moved aside (see `quarantined`) and a new one
    begun, under a new `epoch`: numbers of the old one must not be taken for its own.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        max_bytes: int = 1 << 30,
        max_body_bytes: int = 256 << 10,
        keep_acked_s: float = 7 * 86400.0,
        ballast_bytes: int = 16 << 20,
    ) -> None:
        self.path = Path(path).absolute()
        self.boot_id = secrets.token_hex(4)
        self._max_body_bytes = max_body_bytes
        self._keep_acked_s = keep_acked_s
        self._listeners: list[Callable[[], None]] = []
        self._jobs: deque[_Job] = deque()
        self._marks: dict[int, tuple[Mark, int | None]] = {}
        self._marks_due = 0.0
        self._closing = False
        self._broken: OutboxError | None = None
        self._wake = threading.Condition()
        self._reading = threading.Lock()
        try:
            self._lock_fd = outbox_file.take_lock(self.path)
        except OSError as error:
            raise OutboxError(
                "the outbox cannot be created",
                which=self.path,
                got=error,
                action="check that the folder can be written",
            ) from error
        try:
            max_pages = max(16, max_bytes // outbox_file.PAGE_BYTES)
            opened = outbox_file.open_file(self.path, max_pages)
            self._db, self.quarantined = opened.db, opened.quarantined
            self._reader = outbox_file.connect(self.path, max_pages)
            self._read_state()
        except OutboxError:
            os.close(self._lock_fd)
            raise
        except sqlite3.Error as error:
            os.close(self._lock_fd)
            raise outbox_file.translated(error, self.path) from error
        self._ballast = outbox_file.Ballast(self.path, ballast_bytes)
        self._ballast.make()
        self._thread = threading.Thread(target=self._write_loop, name="outbox", daemon=True)
        self._thread.start()

    def __enter__(self) -> Outbox:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Commit what waits and close the file. May be called twice."""
        with self._wake:
            if self._closing:
                return
            self._closing = True
            self._wake.notify_all()
        self._thread.join()
        with self._reading:
            self._reader.close()
        try:
            if self._broken is None and not self._marks:
                self._db.execute("update meta set value = '1' where key = 'clean'")
            self._db.close()
        except sqlite3.Error as error:
            log.warning("outbox %s: not closed cleanly: %s", self.path, error)
        os.close(self._lock_fd)

    # Writing

    def put(
        self, stream: str, topic: str, body: bytes, id: str | None = None, timeout_s: float = 10.0,
        refused: int | None = None,
    ) -> int:  # fmt: skip
        """Make the message durable and return its seq. It takes one disk flush, never a broker.

        The same `id` again is the same message: its seq is returned and nothing is added, so a
        caller may repeat after an error. With `refused`, a reason code, it goes to the dead letters
        at once: kept, numbered, never sent. Raises OutboxFull when there is no room, OutboxError
        when the disk did not confirm in `timeout_s`.
        """
        if not stream or not topic or len(body) > self._max_body_bytes:
            raise OutboxError(
                "the message cannot be stored",
                which=f"stream {stream!r}, topic {topic!r}",
                expected=f"a stream, a topic and at most {self._max_body_bytes} bytes",
                got=f"{len(body)} bytes",
            )
        row_id = id or uuid7()

        def insert(db: sqlite3.Connection, job: _Job) -> int:
            for table in ("outbox", "dead"):
                found = db.execute(f"select seq from {table} where id = ?", (row_id,)).fetchone()
                if found:
                    job.pending = 0
                    return int(found[0])
            (stream_seq,) = db.execute(
                "insert into streams(name, last) values (?, 1)"
                " on conflict(name) do update set last = last + 1 returning last",
                (stream,),
            ).fetchone()
            values = (row_id, stream, stream_seq, topic, body, utc_now(), time.monotonic())
            cursor = db.execute(
                "insert into outbox(id, stream, stream_seq, topic, body, created_utc,"
                " created_mono, boot_id) values (?, ?, ?, ?, ?, ?, ?, ?)",
                (*values, self.boot_id),
            )
            seq = int(cursor.lastrowid or 0)
            if refused is None:
                job.pending = 1
            else:
                db.execute("update outbox set last_reason = ? where seq = ?", (refused, seq))
                _bury(db, seq)
                job.dead = 1
            return seq

        return self._do(_Job(insert, stream=stream), timeout_s)

    def mark(self, seq: int, state: Mark, reason: int | None) -> None:
        """Note the broker's answer to a row; returns at once, the writer commits it.

        `acked`: taken. `held`: not taken, stays to be sent. `dead`: to the dead letters.
        """
        with self._wake:
            if not self._marks:
                self._marks_due = time.monotonic() + MARK_DELAY_S
            self._marks[seq] = (state, reason)
            if len(self._marks) in (1, MARK_ROWS):
                self._wake.notify_all()

    def resend_recent(self, within_s: float, limit: int = 200) -> int:
        """Make pending again what was confirmed in the `within_s` before the last confirmation.

        For a broker that came back without its memory: what it confirmed last may have reached
        nobody. Returns the number of rows.
        """

        def resend(db: sqlite3.Connection, job: _Job) -> int:
            changed = db.execute(
                "update outbox set state = 'pending', acked_utc = null where seq in"
                " (select seq from outbox where state = 'acked' and acked_utc >="
                "   (select max(acked_utc) from outbox where state = 'acked') - ?"
                "  order by acked_utc desc limit ?)",
                (within_s, limit),
            ).rowcount
            job.pending, job.acked = changed, -changed
            return changed

        return self._do(_Job(resend), 10.0)

    def requeue_dead(self) -> int:
        """Make every dead letter pending again, with its id and seq; returns how many.

        For when the cause is gone, e.g. the broker's access rules were put right. What was refused
        for its own content (`FORMAT_INVALID`) stays: it would only be refused again.
        """

        def requeue(db: sqlite3.Connection, job: _Job) -> int:
            columns = f"{_COPIED}, last_reason"
            which = f"from dead where last_reason is not {FORMAT_INVALID}"
            changed = db.execute(f"insert into outbox({columns}) select {columns} {which}").rowcount
            db.execute(f"delete {which}")
            job.pending, job.dead = changed, -changed
            return changed

        return self._do(_Job(requeue), 10.0)

    # Reading

    def fetch(self, stream: str, after: int, limit: int) -> list[Row]:
        """The next rows to send of one stream, in order, without those already answered."""
        while True:
            found = self._read(
                "select seq, id, stream, stream_seq, topic, body, created_utc, boot_id, tries"
                " from outbox where stream = ? and state = 'pending' and seq > ?"
                " order by seq limit ?",
                stream,
                after,
                limit,
            )
            with self._wake:
                answered = {seq for seq, (state, _) in self._marks.items() if state != "held"}
            rows = [Row(*item) for item in found if item[0] not in answered]
            if rows or len(found) < limit:
                return rows
            after = found[-1][0]

    def streams(self) -> tuple[str, ...]:
        """The streams that were ever used."""
        with self._wake:
            return tuple(self._last_seq)

    def last_seq(self, stream: str) -> int:
        """No row of the stream has a higher seq; 0 when it was never used."""
        with self._wake:
            return self._last_seq.get(stream, 0)

    @property
    def rewinds(self) -> int:
        """Grows when older rows became pending again."""
        return self._rewinds

    @property
    def pending(self) -> int:
        """Rows that the broker has not confirmed."""
        with self._wake:
            answered = sum(state != "held" for state, _ in self._marks.values())
            return self._pending - answered

    def counts(self) -> Counts:
        """How much waits, is kept, was refused. Cheap: no row is counted in the file."""
        oldest = [
            created
            for stream in self.streams()
            for (created,) in self._read(
                "select created_utc from outbox where stream = ? and state = 'pending'"
                " order by seq limit 1",
                stream,
            )
        ]
        with self._wake:
            states = [state for state, _ in self._marks.values()]
            acked, dead = states.count("acked"), states.count("dead")
            pending = self._pending - acked - dead
            return Counts(
                pending=pending,
                acked=self._acked + acked,
                dead=self._dead + dead,
                bytes=outbox_file.size_bytes(self.path),
                oldest_pending_utc=min(oldest) if oldest and pending else None,
            )

    def dead_letters(self) -> list[DeadLetter]:
        """What the broker refused for good, oldest first."""
        found = self._read(
            "select seq, id, stream, topic, body, last_reason, tries, died_utc from dead"
            " order by seq"
        )
        return [DeadLetter(*item) for item in found]

    def span(self) -> tuple[int, int]:
        """The lowest seq still held, and the next one to be given out."""
        ((lowest,),) = self._read("select min(seq) from outbox")
        found = self._read("select seq from sqlite_sequence where name = 'outbox'")
        following = int(found[0][0]) + 1 if found else 1
        return (lowest or following, following)

    def _read(self, query: str, *arguments: str | int) -> list[Any]:
        try:
            with self._reading:
                return self._reader.execute(query, arguments).fetchall()
        except sqlite3.Error as error:
            raise OutboxError("the outbox cannot be read", which=self.path, got=error) from error

    def on_commit(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener`, which must not block, after rows to send were committed.

        Returns the function that takes it off again.
        """
        self._listeners = [*self._listeners, listener]

        def remove() -> None:
            self._listeners = [item for item in self._listeners if item is not listener]

        return remove

    # The writer thread

    def _do(self, job: _Job, timeout_s: float) -> int:
        with self._wake:
            if self._closing or self._broken:
                raise self._broken or OutboxError("the outbox is closed", which=self.path)
            self._jobs.append(job)
            self._wake.notify_all()
        if not job.done.wait(timeout_s):
            raise OutboxError(
                "the disk did not confirm in time",
                which=self.path,
                expected=f"{timeout_s:g} s",
                action="check the disk; repeating the put with the same id is safe",
            )
        if job.error:
            raise job.error
        return job.result

    def _write_loop(self) -> None:
        maintained_at = time.monotonic()
        try:
            while True:
                jobs, marks = self._next_work()
                if jobs or marks:
                    self._commit_or_report(jobs, marks)
                elif self._closing:
                    return
                if time.monotonic() - maintained_at > MAINTENANCE_S:
                    maintained_at = time.monotonic()
                    self._maintain()
        finally:
            if not self._closing:
                self._fail(OutboxError("the writer of the outbox ended", which=self.path))

    def _next_work(self) -> tuple[list[_Job], Marks]:
        """Wait for puts, or for marks old or many enough, or for maintenance; take what is there.

        Both empty while closing: nothing is left to do.
        """
        with self._wake:
            while not self._jobs and not self._closing:
                left_s = MAINTENANCE_S
                if self._marks:
                    left_s = self._marks_due - time.monotonic()
                    if left_s <= 0 or (len(self._marks) >= MARK_ROWS and left_s <= MARK_DELAY_S):
                        break
                if not self._wake.wait(left_s) and not self._marks:
                    break
            jobs = [self._jobs.popleft() for _ in range(min(len(self._jobs), GROUP_ROWS))]
            failed_lately = self._marks_due - time.monotonic() > MARK_DELAY_S
            if failed_lately and (jobs or self._closing):
                return jobs, {}
            return jobs, dict(self._marks)

    def _commit_or_report(self, jobs: Sequence[_Job], marks: Marks) -> None:
        """Commit all together; when that fails, each by itself: confirmations first, since the
        rows they confirm may make room, and so that one large row takes no others with it."""
        try:
            self._commit_with_room(jobs, marks)
        except OutboxError as error:
            if len(jobs) + bool(marks) > 1:
                if marks:
                    self._commit_or_report([], marks)
                for job in jobs:
                    self._commit_or_report([job], {})
                return
            for job in jobs:
                job.error = error
                job.done.set()
            if marks:
                log.error("outbox %s: confirmations wait: %s", self.path, error)
                with self._wake:
                    self._marks_due = time.monotonic() + 1.0

    def _commit_with_room(self, jobs: Sequence[_Job], marks: Marks) -> None:
        for _ in range(16):
            try:
                self._commit(jobs, marks)
                return
            except sqlite3.Error as error:
                self._roll_back()
                failure = outbox_file.translated(error, self.path)
                failure.__cause__ = error
            if not isinstance(failure, OutboxFull) or not self._make_room(bool(marks)):
                break
        raise failure

    def _commit(self, jobs: Sequence[_Job], marks: Marks) -> None:
        db = self._db
        durable = bool(jobs) or any(state == "dead" for state, _ in marks.values())
        db.execute("pragma synchronous=" + ("full" if durable else "normal"))
        db.execute("begin immediate")
        acked, dead = self._apply_marks(marks)
        for job in jobs:
            job.result = job.run(db, job)
        db.execute("commit")
        with self._wake:
            for seq, mark in marks.items():
                if self._marks.get(seq) is mark:
                    del self._marks[seq]
            self._marks_due = time.monotonic() + MARK_DELAY_S
            self._pending += sum(job.pending for job in jobs) - acked - dead
            self._acked += sum(job.acked for job in jobs) + acked
            self._dead += sum(job.dead for job in jobs) + dead
            self._rewinds += sum(job.stream is None for job in jobs)
            for job in jobs:
                if job.stream is not None:
                    known = self._last_seq.get(job.stream, 0)
                    self._last_seq[job.stream] = max(known, job.result)
        for job in jobs:
            job.done.set()
        if any(job.pending > 0 for job in jobs):
            for listener in self._listeners:
                listener()

    def _apply_marks(self, marks: Marks) -> tuple[int, int]:
        acked = dead = 0
        for seq, (state, reason) in marks.items():
            changed = self._db.execute(
                "update outbox set state = ?, tries = tries + 1, last_reason = ?, acked_utc = ?"
                " where seq = ? and state = 'pending'",
                (
                    "acked" if state == "acked" else "pending",
                    reason,
                    time.time() if state == "acked" else None,
                    seq,
                ),
            ).rowcount
            if state == "acked":
                acked += changed
            elif state == "dead" and changed:
                _bury(self._db, seq)
                dead += changed
        return acked, dead

    def _fail(self, error: OutboxError) -> None:
        log.error("%s", error)
        with self._wake:
            self._broken = error
            waiting, self._jobs = list(self._jobs), deque()
        for job in waiting:
            job.error = error
            job.done.set()

    # Room

    def _maintain(self) -> None:
        """Delete confirmed rows past their time; set the ballast aside again."""
        try:
            while self._delete_acked("and acked_utc < ?", (time.time() - self._keep_acked_s,)):
                if self._jobs or self._closing:
                    return
        except sqlite3.Error as error:
            self._roll_back()
            log.warning("outbox %s: old rows could not be deleted: %s", self.path, error)
        self._ballast.make()

    def _make_room(self, for_marks: bool) -> bool:
        """Delete up to 512 of the oldest confirmed rows; True when room was made.

        On a disk filled by others even a deletion finds no room in the log: then the ballast is
        given up, and the log written back and truncated. It is not given up to puts: they would
        use it up with nothing to delete afterwards.
        """
        freed = 0
        for _ in range(8):
            try:
                deleted = self._delete_acked()
            except sqlite3.Error:
                self._roll_back()
                if not self._ballast.release():
                    break
                self._checkpoint()
                continue
            freed += deleted
            if not deleted:
                break
        if not freed and for_marks and self._ballast.release():
            self._checkpoint()
            return True
        return freed > 0

    def _delete_acked(self, condition: str = "", arguments: tuple[float, ...] = ()) -> int:
        """Delete up to DELETE_ROWS confirmed rows, oldest first."""
        self._db.execute("begin immediate")
        deleted = self._db.execute(
            "delete from outbox where seq in (select seq from outbox where state = 'acked'"
            f" {condition} order by acked_utc limit {DELETE_ROWS})",
            arguments,
        ).rowcount
        self._db.execute("commit")
        with self._wake:
            self._acked -= deleted
        return deleted

    def _checkpoint(self) -> None:
        try:
            self._db.execute("pragma wal_checkpoint(truncate)").fetchall()
        except sqlite3.Error as error:
            log.warning("outbox %s: the log could not be written back: %s", self.path, error)

    def _roll_back(self) -> None:
        if self._db.in_transaction:
            self._db.execute("rollback")

    def _read_state(self) -> None:
        meta = dict(self._db.execute("select key, value from meta").fetchall())
        self.epoch: str = meta["epoch"]
        machine = outbox_file.machine_boot()
        self.previous_shutdown: PreviousShutdown = "first"
        if meta.get("clean") == "1":
            self.previous_shutdown = "clean"
        elif "clean" in meta:
            self.previous_shutdown = "crash" if meta["machine_boot"] == machine else "power"
        self._db.executemany(
            "insert into meta values (?, ?) on conflict(key) do update set value = excluded.value",
            [("clean", "0"), ("machine_boot", machine)],
        )

        def count(of: str) -> int:
            return int(self._db.execute(f"select count(*) from {of}").fetchone()[0])

        self._pending = count("outbox where state = 'pending'")
        self._acked = count("outbox where state = 'acked'")
        self._dead = count("dead")
        self._rewinds = 0
        highest = self._db.execute("select max(seq) from sqlite_sequence").fetchone()[0] or 0
        names = self._db.execute("select name from streams").fetchall()
        self._last_seq: dict[str, int] = {name: highest for (name,) in names}


__all__ = [
    "Counts",
    "DeadLetter",
    "Outbox",
    "OutboxFull",
    "OutboxInUse",
    "Row",
]


def _bury(db: sqlite3.Connection, seq: int) -> None:
    """Move a row to the dead letters."""
    db.execute(
        f"insert into dead({_COPIED}, last_reason, died_utc)"
        f" select {_COPIED}, last_reason, ? from outbox where seq = ?",
        (utc_now(), seq),
    )
    db.execute("delete from outbox where seq = ?", (seq,))
