"""The durable outbox: what the station has decided and has not delivered yet.

It does not know MQTT, nor what is inside a body: `publisher` sends, `payloads` composes.

`put` returns after the row is on disk (SQLite, WAL, `synchronous=FULL`). Delivered rows are kept
for `keep_acked_s`, so that a consumer can have them again, and are the first to go when the quota
is reached. `outbox_writer` says how rows are committed and how room is made, `outbox_file` how the
file is opened, `streams` which rows must never go.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal

from forge_station.errors import OutboxError
from forge_station.mes import outbox_file, outbox_rows, outbox_writer
from forge_station.mes.outbox_figures import Counts
from forge_station.mes.outbox_file import OutboxFull, OutboxInUse
from forge_station.mes.outbox_rows import FORMAT_INVALID, ROW_COLUMNS, DeadLetter, Mark, Ranges, Row
from forge_station.mes.outbox_writer import Limits, Writer
from forge_station.mes.stamp import uuid7
from forge_station.mes.streams import POLICIES, Policy

PreviousShutdown = Literal["first", "clean", "crash", "power"]
REPLAY_ROWS = 2_000
"""Rows made pending again in one transaction, so that no put waits long for it."""


@dataclass(frozen=True)
class Replayed:
    """`rows` will be sent again; the seqs in `missing` are not held (any more)."""

    rows: int
    missing: tuple[tuple[int, int], ...]


class Outbox:
    """The open outbox; a context manager. Any thread may call any method.

    `max_bytes` is the quota of the database file; it does not grow while the disk has less than
    `min_free_bytes` free (or a 16th of the disk, if that is less). `ballast_bytes` of disk are set
    aside so that delivered rows can be deleted even when other programs have filled it. `policies`:
    see `streams`. Raises OutboxInUse when another process has it open, OutboxError on a network
    file system. A damaged file is moved aside (see `quarantined`) and a new one begun, under a new
    `epoch`: numbers of the old one must not be taken for its own.
    """

    writer_type: ClassVar[type[Writer]] = Writer
    """A benchmark puts another in its place."""

    def __init__(
        self,
        path: Path | str,
        *,
        max_bytes: int = 1 << 30,
        max_body_bytes: int = 256 << 10,
        min_free_bytes: int = 512 << 20,
        keep_acked_s: float = 7 * 86400.0,
        ballast_bytes: int = 16 << 20,
        policies: Mapping[str, Policy] = POLICIES,
    ) -> None:
        self.path = Path(path).absolute()
        self.boot_id = secrets.token_hex(4)
        self._max_body_bytes = max_body_bytes
        self._closed = False
        self._reading = threading.Lock()
        max_pages = self._max_pages = max(16, max_bytes // outbox_file.PAGE_BYTES)
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
            opened = outbox_file.open_file(self.path, max_pages)
            self._db, self.quarantined, self.recovered = (
                opened.db, opened.quarantined, opened.recovered,
            )  # fmt: skip
            self._reader = outbox_file.connect(self.path, max_pages)
            self._read_meta()
            ballast = outbox_file.Ballast(self.path, ballast_bytes)
            ballast.make()
            limits = Limits(max_pages, min_free_bytes, keep_acked_s, policies)
            self._writer = self.writer_type(self._db, self.path, limits, ballast)
        except OutboxError:
            os.close(self._lock_fd)
            raise
        except sqlite3.Error as error:
            os.close(self._lock_fd)
            raise outbox_file.translated(error, self.path) from error
        self._writer.start()

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
        if self._closed:
            return
        self._closed = True
        clean = self._writer.close()
        with self._reading:
            self._reader.close()
        outbox_file.close(self._db, self.path, clean=clean)
        os.close(self._lock_fd)

    # Writing

    def put(
        self,
        stream: str,
        topic: str,
        body: bytes,
        id: str | None = None,
        timeout_s: float = 10.0,
        refused: int | None = None,
    ) -> int:
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
        job = outbox_writer.put(id or uuid7(), stream, topic, body, self.boot_id, refused)
        return self._writer.do(job, timeout_s)

    def mark(self, seq: int, state: Mark, reason: int | None) -> None:
        """Note the broker's answer to a row; returns at once, the writer commits it.

        `acked`: delivered. `held`: not taken, stays to be sent. `dead`: to the dead letters.
        """
        self._writer.mark(seq, state, reason)

    def release(self, stream: str, upto: int) -> None:
        """The consumer has the stream's numbers up to `upto`; returns at once."""
        self._writer.release(stream, upto)

    def resend_recent(self, within_s: float) -> int:
        """Make pending again what was confirmed in the `within_s` before the last confirmation.

        For a broker that came back without its memory: what it confirmed last may have reached
        nobody. All of it, however much: while a backlog drains it is thousands. Returns the number
        of rows.
        """
        return self._change(partial(outbox_rows.resend_recent, within_s=within_s))

    def replay(self, from_seq: int, to_seq: int, epoch: str) -> Replayed:
        """Make the delivered rows of these seqs pending again, as far as they are still held.

        Raises OutboxError for numbers that this outbox never gave out under this epoch.
        """
        following = self.span()[1]
        if epoch != self.epoch or not 1 <= from_seq <= to_seq < following:
            raise OutboxError(
                "these numbers cannot be replayed",
                which=f"seq {from_seq} to {to_seq} of epoch {epoch}",
                expected=f"1 to {following - 1} of epoch {self.epoch}",
            )
        held = self._read(
            "select seq from outbox where seq between ? and ? order by seq", from_seq, to_seq
        )
        missing = outbox_rows.absent((seq for (seq,) in held), [(from_seq, to_seq)])
        rows = 0
        for first in range(from_seq, to_seq + 1, REPLAY_ROWS):
            last = min(to_seq, first + REPLAY_ROWS - 1)
            rows += self._change(partial(outbox_rows.replay, first=first, last=last))
        return Replayed(rows, missing)

    def requeue_dead(self) -> int:
        """Make every dead letter pending again, with its id, under new numbers; returns how many.

        For when the cause is gone, e.g. the broker's access rules were put right. What was refused
        for its own content (`FORMAT_INVALID`) stays: it would only be refused again.
        """
        return self._change(outbox_rows.requeue_dead)

    def _change(self, change_rows: Callable[[sqlite3.Connection], outbox_rows.Change]) -> int:
        return self._writer.do(outbox_writer.changing(change_rows), 10.0)

    # Reading

    def fetch(self, stream: str, after: int, limit: int) -> list[Row]:
        """The next rows to send of one stream, with numbers above `after`, in order, without
        those already answered."""
        while True:
            found = self._read(
                f"select {ROW_COLUMNS} from outbox where stream = ? and state = 'pending'"
                " and stream_seq > ? order by stream_seq limit ?",
                stream,
                after,
                limit,
            )
            with self._writer.lock:
                marks, released = self._writer.marks, self._writer.releases.get(stream, 0)
                answered = {seq for seq, (state, _) in marks.items() if state != "held"}
            rows = [Row(*item) for item in found]
            rows = [row for row in rows if row.seq not in answered and row.stream_seq > released]
            if rows or len(found) < limit:
                return rows
            after = found[-1][3]

    def numbered(
        self, stream: str, ranges: Ranges, limit: int
    ) -> tuple[list[Row], tuple[tuple[int, int], ...]]:
        """Rows of the stream with numbers in `ranges` (ascending), delivered ones too, at most
        `limit`; and the numbers up to the last of them that are not held any more."""
        rows: list[Row] = []
        looked: list[tuple[int, int]] = []
        for first, last in ranges:
            left = limit - len(rows)
            if left <= 0:
                break
            found = self._read(
                f"select {ROW_COLUMNS} from outbox where stream = ? and stream_seq between ? and ?"
                " order by stream_seq limit ?",
                stream,
                first,
                last,
                left,
            )
            rows.extend(Row(*item) for item in found)
            looked.append((first, rows[-1].stream_seq if len(found) == left else last))
        return rows, outbox_rows.absent((row.stream_seq for row in rows), looked)

    def confirmed_upto(self, stream: str) -> int:
        """Every number of the stream up to it was delivered, is dead or was given up."""
        found = self._read(
            "select stream_seq from outbox where stream = ? and state = 'pending'"
            " order by stream_seq limit 1",
            stream,
        )
        return int(found[0][0]) - 1 if found else self.last_number(stream)

    def streams(self) -> tuple[str, ...]:
        """The streams that were ever used."""
        with self._writer.lock:
            return tuple(self._writer.last_numbers)

    def last_number(self, stream: str) -> int:
        """The highest `stream_seq` of the stream; 0 when it was never used."""
        with self._writer.lock:
            return self._writer.last_numbers.get(stream, 0)

    @property
    def rewinds(self) -> int:
        """Grows when older rows became pending again."""
        return self._writer.rewinds

    @property
    def pending(self) -> int:
        """Rows that are not delivered."""
        with self._writer.lock:
            answered = sum(state != "held" for state, _ in self._writer.marks.values())
            return self._writer.tally.pending - answered

    def counts(self) -> Counts:
        """How much waits, is kept, was refused. Cheap: no row is counted in the file."""
        oldest = [
            created
            for stream in self.streams()
            for (created,) in self._read(
                "select created_utc from outbox where stream = ? and state = 'pending'"
                " order by stream_seq limit 1",
                stream,
            )
        ]
        with self._writer.lock:
            writer, tally = self._writer, self._writer.tally
            states = [state for state, _ in writer.marks.values()]
            acked, dead = states.count("acked"), states.count("dead")
            pending = tally.pending - acked - dead
            rows = max(1, tally.pending + tally.acked + tally.dead)
            needed = writer.used_pages * pending / rows
            return Counts(
                pending=pending,
                acked=tally.acked + acked,
                dead=tally.dead + dead,
                dropped=tally.dropped,
                bytes=outbox_file.size_bytes(self.path),
                fill_pct=round(100.0 * needed / self._max_pages, 1),
                oldest_pending_utc=min(oldest) if oldest and pending else None,
                full=writer.full,
                disk_low=writer.disk_low,
            )

    def dead_letters(self) -> list[DeadLetter]:
        """What was refused for good, oldest first."""
        found = self._read(
            "select seq, id, stream, topic, body, last_reason, tries, died_utc from dead"
            " order by abs(seq)"
        )
        return [DeadLetter(*item) for item in found]

    def span(self) -> tuple[int, int]:
        """The lowest seq still held, and the next one to be given out."""
        ((lowest,),) = self._read("select min(seq) from outbox")
        found = self._read("select seq from sqlite_sequence where name = 'outbox'")
        following = int(found[0][0]) + 1 if found else 1
        return (lowest or following, following)

    def on_commit(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener`, which must not block, after rows to send were committed.

        Returns the function that takes it off again.
        """
        return self._writer.on_commit(listener)

    def _read(self, query: str, *arguments: str | int) -> list[Any]:
        try:
            with self._reading:
                return self._reader.execute(query, arguments).fetchall()
        except sqlite3.Error as error:
            raise OutboxError("the outbox cannot be read", which=self.path, got=error) from error

    def _read_meta(self) -> None:
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


__all__ = [
    "FORMAT_INVALID",
    "Counts",
    "DeadLetter",
    "Outbox",
    "OutboxFull",
    "OutboxInUse",
    "Replayed",
    "Row",
]
