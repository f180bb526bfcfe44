"""The writer thread of the outbox: commits what waits in groups, and makes room when there is none.

All puts that wait share one transaction and one disk flush. Confirmations are committed along with
them, or 20 ms later without a flush of their own: losing one in a power cut costs a duplicate,
never a verdict. It knows rows only through `outbox_rows`, and no broker.

When a row finds no room, others make it, in this order: confirmed rows, oldest first; rows of
streams that may be dropped; rows of streams that nobody subscribes to; rows of streams that the
site chose to overwrite. Only then is it refused.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forge_station.errors import OutboxError
from forge_station.mes import outbox_file, outbox_rows
from forge_station.mes.outbox_file import Ballast, OutboxFull
from forge_station.mes.outbox_rows import Change, Mark, Marks
from forge_station.mes.streams import Policy, policy_of

log = logging.getLogger(__name__)

GROUP_ROWS = 256
"""Most puts in one transaction."""
MARK_DELAY_S = 0.02
MARK_ROWS = 64
MAINTENANCE_S = 30.0
FLOOR_CHECK_S = 1.0
VACUUM_PAGES = 1024
"""Free pages given back to the disk in one step, so that no put waits long for it; as many stay."""
MAKE_ROOM_ROUNDS = 8

Work = Callable[[sqlite3.Connection, Change, dict[str, int]], int]
"""Runs inside the transaction; returns the job's result, sets what it changed and the numbers that
it gave out. It knows nothing of its job: a cycle would keep every message until a collection."""


@dataclass
class Job:
    """Work for the writer thread."""

    run: Work
    rewinds: bool = False
    """Rows older than those already sent may become pending."""
    change: Change = field(default_factory=Change)
    numbers: dict[str, int] = field(default_factory=dict)
    """Highest number that it gave out, by stream."""
    result: int = 0
    error: OutboxError | None = None
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Tally:
    """Rows by state. `dropped`: undelivered ones given up for room since the start."""

    pending: int
    acked: int
    dead: int
    dropped: int = 0

    def after(self, change: Change) -> Tally:
        """With a committed change."""
        return Tally(
            self.pending + change.pending,
            self.acked + change.acked,
            self.dead + change.dead,
            self.dropped + change.dropped,
        )


@dataclass(frozen=True)
class Limits:
    """Room for the outbox; see `Outbox`."""

    max_pages: int
    min_free_bytes: int
    keep_acked_s: float
    policies: Mapping[str, Policy]


class Writer:
    """Owns the writing connection. `lock` guards everything that other threads read."""

    flush_answers = False
    """Whether a confirmation is worth a flush of the disk of its own."""

    def __init__(self, db: sqlite3.Connection, path: Path, limits: Limits, ballast: Ballast):
        self.lock = threading.Condition()
        self.broken: OutboxError | None = None
        self.rewinds = 0
        self.tally = Tally(
            _count(db, "outbox where state = 'pending'"),
            _count(db, "outbox where state = 'acked'"),
            _count(db, "dead"),
        )
        self.last_numbers: dict[str, int] = dict(
            db.execute("select name, last from streams").fetchall()
        )
        self.unclaimed: set[str] = set()
        """Streams whose rows the broker last answered with 'no matching subscribers'."""
        self.full = False
        """The last put found no room."""
        self.disk_low = False
        self.used_pages = outbox_file.pages(db)[1]
        self._db = db
        self._path = path
        self._limits = limits
        self._ballast = ballast
        self._jobs: deque[Job] = deque()
        self.marks: dict[int, tuple[Mark, int | None]] = {}
        self.releases: dict[str, int] = {}
        self._began = max(time.time(), outbox_rows.last_confirmed(db)) - time.monotonic()
        self._due = 0.0
        self._closing = False
        self._listeners: list[Callable[[], None]] = []
        self._floor_checked_at = -FLOOR_CHECK_S
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)

    def start(self) -> None:
        """Begin to take work."""
        self._thread.start()

    def close(self) -> bool:
        """Commit what waits and end; True when everything is on disk. May be called twice."""
        with self.lock:
            self._closing = True
            self.lock.notify_all()
        self._thread.join()
        return self.broken is None and not self.marks

    def do(self, job: Job, timeout_s: float) -> int:
        """Wait for the job's commit; its result. Raises its error."""
        with self.lock:
            if self._closing or self.broken:
                raise self.broken or OutboxError("the outbox is closed", which=self._path)
            self._jobs.append(job)
            self.lock.notify_all()
        if not job.done.wait(timeout_s):
            raise OutboxError(
                "the disk did not confirm in time",
                which=self._path,
                expected=f"{timeout_s:g} s",
                action="check the disk; repeating the put with the same id is safe",
            )
        if job.error:
            raise job.error
        return job.result

    def mark(self, seq: int, state: Mark, reason: int | None) -> None:
        """Note an answer of the broker; it is committed soon."""
        with self.lock:
            self._note()
            self.marks[seq] = (state, reason)
            if len(self.marks) in (1, MARK_ROWS):
                self.lock.notify_all()

    def release(self, stream: str, upto: int) -> None:
        """Note how far the consumer has a stream; it is committed soon."""
        with self.lock:
            self._note()
            self.releases[stream] = max(upto, self.releases.get(stream, 0))
            self.lock.notify_all()

    def on_commit(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after rows to send were committed; returns how to take it off."""
        self._listeners = [*self._listeners, listener]

        def remove() -> None:
            self._listeners = [item for item in self._listeners if item is not listener]

        return remove

    def _note(self) -> None:
        if not self.marks and not self.releases:
            self._due = time.monotonic() + MARK_DELAY_S

    def _now(self) -> float:
        """Seconds since 1970 by the clock of the start, or of the last confirmation: it never goes
        back. What was confirmed last must be found again even when the machine's clock jumps."""
        return self._began + time.monotonic()

    # The thread

    def _run(self) -> None:
        maintained_at = time.monotonic()
        try:
            while True:
                jobs, marks, releases = self._next_work()
                if jobs or marks or releases:
                    self._commit_or_report(jobs, marks, releases)
                elif self._closing:
                    return
                if time.monotonic() - maintained_at > MAINTENANCE_S:
                    maintained_at = time.monotonic()
                    self.maintain()
        finally:
            if not self._closing:
                self._fail(OutboxError("the writer of the outbox ended", which=self._path))

    def _next_work(self) -> tuple[list[Job], Marks, Mapping[str, int]]:
        """Wait for puts, or for marks old or many enough, or for maintenance; take what is there.

        All empty while closing: nothing is left to do.
        """
        with self.lock:
            while not self._jobs and not self._closing:
                left_s = MAINTENANCE_S
                if self.marks or self.releases:
                    left_s = self._due - time.monotonic()
                    if left_s <= 0 or (len(self.marks) >= MARK_ROWS and left_s <= MARK_DELAY_S):
                        break
                if not self.lock.wait(left_s) and not self.marks and not self.releases:
                    break
            jobs = [self._jobs.popleft() for _ in range(min(len(self._jobs), GROUP_ROWS))]
            failed_lately = self._due - time.monotonic() > MARK_DELAY_S
            if failed_lately and (jobs or self._closing):
                return jobs, {}, {}
            return jobs, dict(self.marks), dict(self.releases)

    def _commit_or_report(
        self, jobs: Sequence[Job], marks: Marks, releases: Mapping[str, int]
    ) -> None:
        """Commit all together; when that fails, each by itself: confirmations first, since the
        rows they confirm may make room, and so that one large row takes no others with it."""
        answers = bool(marks or releases)
        try:
            self._commit_with_room(jobs, marks, releases)
        except OutboxError as error:
            if len(jobs) + answers > 1:
                if answers:
                    self._commit_or_report([], marks, releases)
                for job in jobs:
                    self._commit_or_report([job], {}, {})
                return
            for job in jobs:
                self.full = isinstance(error, OutboxFull)
                job.error = error
                job.done.set()
            if answers:
                log.error("outbox %s: confirmations wait: %s", self._path, error)
                with self.lock:
                    self._due = time.monotonic() + 1.0

    def _commit_with_room(
        self, jobs: Sequence[Job], marks: Marks, releases: Mapping[str, int]
    ) -> None:
        for _ in range(2 * MAKE_ROOM_ROUNDS):
            try:
                self._commit(jobs, marks, releases)
                return
            except sqlite3.Error as error:
                self._roll_back()
                failure = outbox_file.translated(error, self._path)
                failure.__cause__ = error
                self.used_pages = outbox_file.pages(self._db)[1]
            if not isinstance(failure, OutboxFull) or not self._make_room(bool(marks or releases)):
                break
        raise failure

    def _commit(self, jobs: Sequence[Job], marks: Marks, releases: Mapping[str, int]) -> None:
        db = self._db
        if jobs:
            self._keep_floor()
        durable = (
            bool(jobs) or self.flush_answers or any(state == "dead" for state, _ in marks.values())
        )
        db.execute("pragma synchronous=" + ("full" if durable else "normal"))
        db.execute("begin immediate")
        now = self._now()
        total = outbox_rows.apply_marks(db, marks, now)
        for stream, upto in releases.items():
            total.add(outbox_rows.release(db, stream, upto, now))
        for job in jobs:
            job.change, job.numbers = Change(), {}
            job.result = job.run(db, job.change, job.numbers)
            total.add(job.change)
        db.execute("commit")
        self._committed(jobs, marks, releases, total)

    def _committed(
        self, jobs: Sequence[Job], marks: Marks, releases: Mapping[str, int], total: Change
    ) -> None:
        with self.lock:
            for seq, mark in marks.items():
                if self.marks.get(seq) is mark:
                    del self.marks[seq]
            for stream, upto in releases.items():
                if self.releases.get(stream) == upto:
                    del self.releases[stream]
            self._due = time.monotonic() + MARK_DELAY_S
            self.tally = self.tally.after(total)
            for stream, nobody in (total.unclaimed or {}).items():
                (self.unclaimed.add if nobody else self.unclaimed.discard)(stream)
            self.rewinds += sum(job.rewinds for job in jobs)
            for job in jobs:
                self.last_numbers.update(job.numbers)
            if any(job.numbers for job in jobs):
                self.full = False
        for job in jobs:
            job.done.set()
        if any(job.change.pending > 0 for job in jobs):
            for listener in self._listeners:
                listener()

    def _fail(self, error: OutboxError) -> None:
        log.error("%s", error)
        with self.lock:
            self.broken = error
            waiting, self._jobs = list(self._jobs), deque()
        for job in waiting:
            job.error = error
            job.done.set()

    # Room

    def maintain(self) -> None:
        """Delete confirmed rows past their time, give free pages back, set the ballast aside."""
        before = self._now() - self._limits.keep_acked_s
        deleted = False
        try:
            while self._changed(outbox_rows.delete_acked, before):
                deleted = True
                if self._jobs or self._closing:
                    return
            while self._free_pages() > VACUUM_PAGES and not (self._jobs or self._closing):
                self._db.execute(f"pragma incremental_vacuum({VACUUM_PAGES})").fetchall()
                deleted = True
            if deleted:
                self._checkpoint()
        except sqlite3.Error as error:
            self._roll_back()
            log.warning("outbox %s: old rows could not be deleted: %s", self._path, error)
        self._ballast.make()

    def _keep_floor(self) -> None:
        """Freeze the size of the file while the disk has less free than the floor."""
        now = time.monotonic()
        if now - self._floor_checked_at < FLOOR_CHECK_S:
            return
        self._floor_checked_at = now
        low = outbox_file.below_floor(self._path, self._limits.min_free_bytes)
        count, self.used_pages = outbox_file.pages(self._db)
        if low != self.disk_low:
            log.log(
                logging.ERROR if low else logging.WARNING,
                "outbox %s: the disk has %s; the file %s grow",
                self._path,
                "little space left" if low else "space again",
                "must not" if low else "may",
            )
        self.disk_low = low
        limit = min(count, self._limits.max_pages) if low else self._limits.max_pages
        self._db.execute(f"pragma max_page_count={limit}").fetchone()

    def _make_room(self, for_answers: bool) -> bool:
        """Delete up to 512 delivered rows, or else a few that may go; True when room was made.

        On a disk filled by others even a deletion finds no room in the log: then the ballast is
        given up, and the log written back and truncated. It is not given up to puts: they would
        use it up with nothing to delete afterwards.
        """
        freed = False
        for _ in range(MAKE_ROOM_ROUNDS):
            try:
                deleted = self._changed(outbox_rows.delete_acked)
                if not deleted and not freed:
                    return self._give_up_some() or self._give_up_ballast(for_answers)
            except sqlite3.Error:
                self._roll_back()
                if not self._give_up_ballast(True):
                    break
                continue
            freed = freed or deleted
            if not deleted:
                break
        return freed

    def _give_up_ballast(self, wanted: bool) -> bool:
        if not wanted or not self._ballast.release():
            return False
        self._checkpoint()
        return True

    def _give_up_some(self) -> bool:
        """Delete some undelivered rows of the first stream that may lose them, if there is one."""
        for stream in self._expendable():
            if self._changed(outbox_rows.delete_pending, stream):
                log.error(
                    "outbox %s is full: the oldest rows of stream %s, not delivered, are dropped",
                    self._path,
                    stream,
                )
                return True
        return False

    def _expendable(self) -> list[str]:
        """Streams whose undelivered rows may go, the first to go first."""
        with self.lock:
            unclaimed, known = set(self.unclaimed), list(self.last_numbers)
        table = self._limits.policies
        ranked = sorted(known, key=lambda name: -policy_of(table, name).urgency)
        rules = {name: policy_of(table, name).when_full for name in ranked}
        return [
            *(name for name in ranked if rules[name] == "drop"),
            *(name for name in ranked if rules[name] != "drop" and name in unclaimed),
            *(name for name in ranked if rules[name] == "overwrite" and name not in unclaimed),
        ]

    def _changed(self, delete: Callable[..., Change], *arguments: object) -> bool:
        """Run one deletion as a transaction of its own; whether it deleted anything."""
        self._db.execute("begin immediate")
        change = delete(self._db, *arguments)
        self._db.execute("commit")
        with self.lock:
            self.tally = self.tally.after(change)
        return change != Change()

    def _free_pages(self) -> int:
        count, used = outbox_file.pages(self._db)
        return count - used

    def _checkpoint(self) -> None:
        try:
            self._db.execute("pragma wal_checkpoint(truncate)").fetchall()
        except sqlite3.Error as error:
            log.warning("outbox %s: the log could not be written back: %s", self._path, error)

    def _roll_back(self) -> None:
        if self._db.in_transaction:
            self._db.execute("rollback")


def put(
    row_id: str, stream: str, topic: str, body: bytes, boot_id: str, refused: int | None
) -> Job:
    """The job that stores one message; its result is the seq. `refused`: among the dead letters."""

    def run(db: sqlite3.Connection, change: Change, numbers: dict[str, int]) -> int:
        known = outbox_rows.find(db, row_id)
        if known is not None:
            return known
        seq, numbers[stream] = outbox_rows.insert(db, row_id, stream, topic, body, boot_id)
        if refused is None:
            change.pending = 1
        else:
            outbox_rows.bury(db, seq, refused)
            change.dead = 1
        return seq

    return Job(run)


def changing(change_rows: Callable[[sqlite3.Connection], Change]) -> Job:
    """The job that makes rows pending again; its result is their number."""

    def run(db: sqlite3.Connection, change: Change, _: dict[str, int]) -> int:
        done = change_rows(db)
        change.add(done)
        return done.pending

    return Job(run, rewinds=True)


def _count(db: sqlite3.Connection, of: str) -> int:
    return int(db.execute(f"select count(*) from {of}").fetchone()[0])
