"""The SQLite file of the outbox: tables, lock, opening, check, quarantine, room on the disk.

It does not read or write rows; `outbox_rows` does.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import sqlite3
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from forge_station.errors import OutboxError
from forge_station.mes import outbox_recovery

log = logging.getLogger(__name__)

PAGE_BYTES = 4096
VERSION = 2
"""Of the tables, kept as SQLite's user_version."""
CHECK_LIMIT_S = 2.0
"""A large file is checked for this long at the start, then used."""
NETWORK_FILE_SYSTEMS = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "lustre", "ncpfs", "nfs", "nfs4",
     "ocfs2", "smb2", "smb3", "smbfs"}
)  # fmt: skip
NETWORK_FUSE = ("fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.rclone", "fuse.s3", "fuse.smb")
FLOOR_SHARE = 16
"""The free-space floor is at most this part of the disk: small disks have a small one."""

_TABLES = """
begin immediate;
create table if not exists meta(key text primary key, value text not null) without rowid;
create table if not exists streams(name text primary key, last integer not null) without rowid;
create table if not exists outbox(
    seq integer primary key autoincrement, id text not null unique, stream text not null,
    stream_seq integer not null, topic text not null, body blob not null,
    created_utc text not null, created_mono real not null, boot_id text not null,
    state text not null default 'pending', tries integer not null default 0,
    last_reason integer, acked_utc real);
create index if not exists numbers on outbox(stream, stream_seq);
create index if not exists pending_numbers on outbox(stream, stream_seq) where state = 'pending';
drop index if exists pending_rows;
create index if not exists acked_rows on outbox(acked_utc) where state = 'acked';
create table if not exists dead(
    seq integer primary key, id text not null unique, stream text not null,
    stream_seq integer not null, topic text not null, body blob not null,
    created_utc text not null, created_mono real not null, boot_id text not null,
    tries integer not null, last_reason integer, died_utc text not null);
commit;
"""


class OutboxFull(OutboxError):
    """No room for another row: the quota or the disk is used up. What was committed is intact."""

    code = "OUTBOX_FULL"


class OutboxInUse(OutboxError):
    """Another process has the outbox open; two would publish under one name."""

    code = "OUTBOX_IN_USE"


def take_lock(path: Path) -> int:
    """A file descriptor that holds the lock until it is closed or the process dies.

    Raises OutboxError on a network file system: locks and flushes cannot be relied on there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = file_system_of(path.parent, _mounts())
    if kind in NETWORK_FILE_SYSTEMS or kind.startswith(NETWORK_FUSE):
        raise OutboxError(
            "the outbox must not lie on a network file system",
            which=path,
            expected="a local disk",
            got=kind,
            action="set `outbox` in the station file to a folder of a local disk",
        )
    handle = os.open(_beside(path, ".lock"), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise OutboxInUse(
            "the outbox is open in another process",
            which=path,
            action="stop the other station process, or give this one its own outbox",
        ) from error
    return handle


@dataclass(frozen=True)
class Opened:
    """The writer's connection; where a damaged file was moved to, if there was one, and how many
    rows of it that were not yet delivered are now dead letters."""

    db: sqlite3.Connection
    quarantined: Path | None = None
    recovered: int = 0


def open_file(path: Path, max_pages: int) -> Opened:
    """Open or create the file. A damaged one is moved aside, never deleted, and a new one begun."""
    try:
        return Opened(_open(path, max_pages))
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError) or not path.exists():
            raise
        stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S%f")
        aside = _beside(path, f".damaged-{stamp}")
        for suffix in ("-wal", "-shm", ""):
            source = _beside(path, suffix)
            if source.exists():
                source.rename(_beside(aside, suffix))
        log.error("outbox %s is damaged (%s): moved to %s, a new one is begun", path, error, aside)
        db = _open(path, max_pages)
        return Opened(db, aside, outbox_recovery.recover(aside, db))


def connect(path: Path, max_pages: int) -> sqlite3.Connection:
    """A connection in autocommit mode, usable from any thread."""
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    try:
        db.execute("pragma auto_vacuum=incremental")
        db.execute("pragma journal_mode=wal")
        db.execute("pragma synchronous=full")
        db.execute(f"pragma max_page_count={max_pages}")
    except sqlite3.Error:
        db.close()
        raise
    return db


def close(db: sqlite3.Connection, path: Path, *, clean: bool) -> None:
    """Close the writer's connection; `clean` is noted for the next start."""
    try:
        if clean:
            db.execute("update meta set value = '1' where key = 'clean'")
        db.close()
    except sqlite3.Error as error:
        log.warning("outbox %s: not closed cleanly: %s", path, error)


def size_bytes(path: Path) -> int:
    """Of the file with its write-ahead log."""
    return sum(item.stat().st_size for item in (path, _beside(path, "-wal")) if item.exists())


def machine_boot() -> str:
    """The kernel's id of this boot of the machine: it tells a crash from a power cut."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def translated(error: sqlite3.Error, path: Path) -> OutboxError:
    """The station's error for SQLite's."""
    text = str(error)
    if "is full" in text:
        return OutboxFull(
            "the outbox is full",
            which=path,
            got=text,
            action="connect the MES so that it drains, free the disk, or raise the quota;"
            " committed results are intact",
        )
    return OutboxError(
        "the outbox cannot be written", which=path, got=text, action="check the disk"
    )


def file_system_of(folder: Path, mounts: str) -> str:
    """The type of the file system that the folder is on; `mounts` is /proc/self/mounts."""
    place = str(folder.resolve())
    best, kind = "", "unknown"
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        inside = place == point or place.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind


def below_floor(path: Path, min_free_bytes: int) -> bool:
    """Whether the disk has less free than the floor: then the file must not grow."""
    if not min_free_bytes:
        return False
    usage = shutil.disk_usage(path.parent)
    return usage.free < min(min_free_bytes, usage.total // FLOOR_SHARE)


def pages(db: sqlite3.Connection) -> tuple[int, int]:
    """Pages of the file, and how many of them are in use."""
    (count,) = db.execute("pragma page_count").fetchone()
    (free,) = db.execute("pragma freelist_count").fetchone()
    return int(count), int(count) - int(free)


class Ballast:
    """Disk space set aside, given up when other programs have filled the disk.

    Without it a full disk could not even be relieved: deleting rows needs room in the log.
    """

    def __init__(self, outbox: Path, size: int) -> None:
        self._path = _beside(outbox, ".ballast")
        self._size = size

    def make(self) -> None:
        """Set it aside, unless it is there or the disk has not four times as much free."""
        if not self._size or self._path.exists():
            return
        try:
            if shutil.disk_usage(self._path.parent).free < 4 * self._size:
                return
            handle = os.open(self._path, os.O_CREAT | os.O_WRONLY, 0o600)
            try:
                os.posix_fallocate(handle, 0, self._size)
            finally:
                os.close(handle)
        except OSError as error:
            log.warning("outbox: no ballast of %d bytes at %s: %s", self._size, self._path, error)

    def release(self) -> bool:
        """Give it up; False when there is none."""
        if not self._path.exists():
            return False
        log.error("outbox: the disk is full, the ballast %s is released", self._path)
        self._path.unlink()
        return True


def _open(path: Path, max_pages: int) -> sqlite3.Connection:
    created = not path.exists()
    db = connect(path, max_pages)
    try:
        _quick_check(db)
        (version,) = db.execute("pragma user_version").fetchone()
        if version > VERSION:
            raise OutboxError(
                "the outbox was written by a newer release",
                which=path,
                expected=f"version {VERSION}",
                got=version,
                action="run that release, or give this one its own outbox",
            )
        db.executescript(_TABLES)
        db.execute(f"pragma user_version={VERSION}")
        db.execute("insert or ignore into meta values ('epoch', ?)", (secrets.token_hex(4),))
    except (sqlite3.Error, OutboxError):
        db.close()
        raise
    if created:
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    return db


def _quick_check(db: sqlite3.Connection) -> None:
    """Raise DatabaseError for a damaged file."""
    deadline = time.monotonic() + CHECK_LIMIT_S
    db.set_progress_handler(lambda: int(time.monotonic() > deadline), 10_000)
    try:
        (answer,) = db.execute("pragma quick_check(1)").fetchone()
        if answer != "ok":
            raise sqlite3.DatabaseError(answer)
    except sqlite3.OperationalError as error:
        if "interrupted" not in str(error):
            raise
        log.info("outbox: the file is large, it was checked in part only")
    finally:
        db.set_progress_handler(None, 0)


def _mounts() -> str:
    try:
        return Path("/proc/self/mounts").read_text(errors="replace")
    except OSError:
        return ""


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
