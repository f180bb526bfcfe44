"""The index of an evidence folder: one row a part, totals, and what was deleted. SQLite.

It knows rows, not files: `folder` keeps both together. The files are the truth, and the index can
be made anew from them; only the counts of deletions live here alone. Several processes may use it.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_station.evidence import retention

_BUSY_S = 5.0
_COLUMNS = (
    "result_id", "name", "serial", "product", "outcome", "time", "bytes", "stack_bytes", "files",
    "bundle", "certificate", "calibration", "label", "audit",
)  # fmt: skip
_REASONS = "(select group_concat(code) from reason own where own.result_id = part.result_id)"
_SELECTED = f"{', '.join(f'part.{name}' for name in _COLUMNS)}, {_REASONS}"
_SCHEMA = """
create table if not exists part (
  result_id text primary key, name text not null unique, serial text not null,
  product text not null, outcome text not null, time text not null, bytes integer not null,
  stack_bytes integer not null, files text not null, bundle text not null,
  certificate text not null, calibration text not null, label text not null,
  audit integer not null, rank integer not null) without rowid;
create index if not exists part_by_rank on part (rank, time);
create index if not exists part_by_time on part (time);
create index if not exists part_by_serial on part (serial);
create index if not exists part_by_stack on part (time) where stack_bytes > 0;
create index if not exists part_by_outcome on part (outcome, time);
create index if not exists part_by_product on part (product, time);
create table if not exists reason (
  code text, time text, result_id text, primary key (code, time, result_id)) without rowid;
create index if not exists reason_by_part on reason (result_id);
create trigger if not exists part_out_reason after delete on part begin
  delete from reason where result_id = old.result_id; end;
create table if not exists total (outcome text primary key, parts integer, bytes integer);
create table if not exists counter (name text primary key, value integer not null);
create trigger if not exists part_in after insert on part begin
  insert into total values (new.outcome, 1, new.bytes) on conflict (outcome) do update
  set parts = parts + 1, bytes = bytes + excluded.bytes; end;
create trigger if not exists part_out after delete on part begin
  update total set parts = parts - 1, bytes = bytes - old.bytes where outcome = old.outcome; end;
create trigger if not exists part_change after update of bytes on part begin
  update total set bytes = bytes + new.bytes - old.bytes where outcome = new.outcome; end;
"""


@dataclass(frozen=True)
class Row:
    """One part of which there is evidence. `bytes` of all its files, `stack_bytes` among them."""

    result_id: str
    name: str
    serial: str
    product: str
    outcome: str
    time: str
    """RFC 3339, UTC."""
    bytes: int
    stack_bytes: int
    files: tuple[str, ...]
    """Names in the folder; the verdict first. A name that ends in `/` is a folder."""
    bundle: str
    certificate: str
    calibration: str
    label: str = "none"
    audit: bool = False
    reasons: tuple[str, ...] = ()
    """Codes of the verdict, in alphabetic order."""

    @property
    def rank(self) -> int:
        return retention.rank_of(self.outcome, self.audit, self.label)


@dataclass(frozen=True)
class Query:
    """Which parts; None: all. Times are compared as RFC 3339 texts, so 2026-11 is a prefix."""

    since: str | None = None
    until: str | None = None
    outcomes: tuple[str, ...] = ()
    serial: str | None = None
    product: str | None = None
    label: str | None = None
    last: int | None = None
    """At most so many, the newest."""
    reason: str | None = None
    """Code that the verdict gives."""
    containing: str | None = None
    """Of the serial number, in any place."""
    before: tuple[str, str] | None = None
    """Time and result id of a part: only those that come before it (the next page)."""


@dataclass(frozen=True)
class Totals:
    """What is there, and what was deleted since the index was begun, by outcome."""

    parts: Mapping[str, int]
    bytes: int
    deleted: Mapping[str, int]


class Index:
    """Raises sqlite3.Error: OperationalError for a disk or a lock, DatabaseError for damage."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
        try:
            _write_ahead(self._db)
            self._db.execute("pragma synchronous = normal")
            self._db.execute("pragma wal_autocheckpoint = 100")
            self._db.executescript(_SCHEMA)
        except sqlite3.Error:
            self._db.close()
            raise

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing; the write lock is taken at once."""
        self._db.execute("begin immediate")
        try:
            yield
        except BaseException:
            self._db.execute("rollback")
            raise
        self._db.execute("commit")

    def put(self, row: Row) -> None:
        """Add a row, in place of one of the same part or the same name."""
        with self.transaction():
            self._put(row)

    def renew(self, rows: Iterable[Row]) -> int:
        """Replace all rows; how many there are now. The counts of deletions stay."""
        with self.transaction():
            self._db.execute("delete from part")
            self._db.execute("delete from total")
            count = 0
            for row in rows:
                self._put(row)
                count += 1
            return count

    def remove(self, row: Row) -> bool:
        """Take a row out and count it as deleted; False when somebody else has done it already."""
        with self.transaction():
            gone = self._db.execute("delete from part where result_id = ?", (row.result_id,))
            if gone.rowcount:
                self._count(f"deleted.{row.outcome}")
            return gone.rowcount > 0

    def without_stack(self, row: Row, files: tuple[str, ...]) -> None:
        """The pattern images of a part are gone, the rest is there."""
        with self.transaction():
            changed = self._db.execute(
                "update part set bytes = bytes - stack_bytes, stack_bytes = 0, files = ? "
                "where result_id = ? and stack_bytes > 0",
                (json.dumps(files), row.result_id),
            )
            if changed.rowcount:
                self._count("deleted.stacks")

    def mark(self, row: Row, label: str, files: tuple[str, ...]) -> None:
        rank = retention.rank_of(row.outcome, row.audit, label)
        with self.transaction():
            self._db.execute(
                "update part set label = ?, rank = ?, files = ? where result_id = ?",
                (label, rank, json.dumps(files), row.result_id),
            )

    def first_to_go(self, count: int, before: str | None = None) -> list[Row]:
        """In the order of `retention`; `before`: only parts older than that time."""
        if before is None:
            return self._rows("rank < ? order by rank, time limit ?", [retention.KEPT, count])
        where = "rank < ? and time < ? order by time limit ?"
        return self._rows(where, [retention.KEPT, before, count])

    def first_stacks_to_go(self, count: int) -> list[Row]:
        """Parts with pattern images whose turn comes after that of all rank 0."""
        where = "stack_bytes > 0 and rank > 0 and rank < ? order by time limit ?"
        return self._rows(where, [retention.KEPT, count])

    def get(self, result_id: str) -> list[Row]:
        """Parts by result id, or by its end, or by name."""
        return self._rows(
            "result_id = ? or name = ? or result_id like ? order by time",
            [result_id, result_id, f"%{result_id.replace('%', '').replace('_', '')}"],
        )

    def names(self) -> dict[str, Row]:
        return {row.name: row for row in self._rows("1", [])}

    def one(self, result_id: str) -> Row | None:
        """By its whole result id."""
        found = self._rows("result_id = ?", [result_id])
        return found[0] if found else None

    def find(self, query: Query) -> list[Row]:
        """The oldest first."""
        where: list[str] = ["1"]
        values: list[object] = []
        if query.reason is not None:
            where = ["code = ?"]
            values.append(query.reason)
        for text, value in (
            ("part.time >= ?", query.since), ("part.time < ?", query.until),
            ("serial = ?", query.serial), ("product = ?", query.product),
            ("label = ?", query.label),
        ):  # fmt: skip
            if value is not None:
                where.append(text)
                values.append(value)
        if query.outcomes:
            where.append(f"outcome in ({','.join('?' * len(query.outcomes))})")
            values += query.outcomes
        if query.containing is not None:
            # The scan of a small index, not of the table.
            within = "select result_id from part indexed by part_by_serial where instr(serial, ?)"
            where.append(f"part.result_id in ({within})")
            values.append(query.containing)
        if query.before is not None:
            where.append("(part.time, part.result_id) < (?, ?)")
            values += query.before
        limit = "" if query.last is None else f" limit {int(query.last)}"
        order = "time desc, result_id desc"
        source = "part"
        if query.reason is not None:  # the index of reasons is in the order of time
            source = "reason r cross join part on part.result_id = r.result_id"
            order = "r.time desc, r.result_id desc"
        return self._rows(f"{' and '.join(where)} order by {order}{limit}", values, source)[::-1]

    def reasons(self) -> list[str]:
        """Codes that occur, in alphabetic order."""
        found = self._db.execute("select distinct code from reason order by code")
        return [code for (code,) in found.fetchall()]

    def totals(self) -> Totals:
        rows = self._db.execute("select outcome, parts, bytes from total").fetchall()
        counted = self._db.execute("select name, value from counter").fetchall()
        return Totals(
            {outcome: parts for outcome, parts, _ in rows if parts},
            sum(size for _, _, size in rows),
            {name.partition(".")[2]: value for name, value in counted},
        )

    def used(self) -> int:
        """Bytes of all files."""
        (found,) = self._db.execute("select coalesce(sum(bytes), 0) from total").fetchone()
        return int(found)

    def sound(self) -> bool:
        """Whether SQLite finds no damage; reads all of it."""
        return bool(self._db.execute("pragma quick_check(1)").fetchone() == ("ok",))

    def _put(self, row: Row) -> None:
        self._db.execute(
            "delete from part where result_id = ? or name = ?", (row.result_id, row.name)
        )
        self._db.execute(
            f"insert into part values ({','.join('?' * 15)})",
            (
                row.result_id, row.name, row.serial, row.product, row.outcome, row.time, row.bytes,
                row.stack_bytes, json.dumps(row.files), row.bundle, row.certificate,
                row.calibration, row.label, int(row.audit), row.rank,
            ),
        )  # fmt: skip
        self._db.executemany(
            "insert into reason values (?, ?, ?)",
            [(code, row.time, row.result_id) for code in set(row.reasons)],
        )

    def _count(self, name: str) -> None:
        self._db.execute(
            "insert into counter values (?, 1) on conflict (name) do update set value = value + 1",
            (name,),
        )

    def _rows(self, where: str, values: list[object], source: str = "part") -> list[Row]:
        found = self._db.execute(f"select {_SELECTED} from {source} where {where}", values)
        rows = []
        for *fact, reasons in found.fetchall():
            facts: dict[str, Any] = dict(zip(_COLUMNS, fact, strict=True))
            facts["files"] = tuple(json.loads(facts["files"]))
            facts["reasons"] = tuple(sorted(reasons.split(","))) if reasons else ()
            rows.append(Row(**{**facts, "audit": bool(facts["audit"])}))
        return rows


def _write_ahead(db: sqlite3.Connection) -> None:
    """Change to a write-ahead log. SQLite itself does not wait while another process does so."""
    until = time.monotonic() + _BUSY_S
    while True:
        try:
            db.execute("pragma journal_mode = wal")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.02)
