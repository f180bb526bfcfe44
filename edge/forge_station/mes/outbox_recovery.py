"""What can still be read of a damaged outbox: its undelivered rows become dead letters.

It does not repair the file and never writes to it. A row that was read is whole, but whether it had
been delivered meanwhile is not certain, so a person decides (`Outbox.requeue_dead`).
"""

from __future__ import annotations

import logging
import sqlite3
import time
from pathlib import Path

from forge_station.mes.stamp import utc_now

log = logging.getLogger(__name__)

LIMIT_S = 5.0
"""The line waits for it, so it is not pursued for ever."""
_HIGHEST = 1 << 62
_COLUMNS = "seq, id, stream, stream_seq, topic, body, created_utc, created_mono, boot_id, tries"
_TYPES = (int, str, str, int, str, bytes, str, float, str, int)


def recover(damaged: Path, db: sqlite3.Connection) -> int:
    """Copy the readable pending rows of `damaged` to the dead letters of `db`; how many.

    Their seq is the old one, negative: it cannot be taken for a number of the new epoch.
    """
    deadline = time.monotonic() + LIMIT_S
    try:
        source = sqlite3.connect(f"file:{damaged}?mode=ro", uri=True, isolation_level=None)
    except sqlite3.Error as error:
        log.error("outbox: nothing can be recovered from %s: %s", damaged, error)
        return 0
    found = 0
    try:
        db.execute("begin immediate")
        found = _copy(source, db, deadline)
        db.execute("commit")
    except sqlite3.Error as error:
        if db.in_transaction:
            db.execute("rollback")
        found = 0
        log.error("outbox: the rows of %s could not be stored: %s", damaged, error)
    finally:
        source.close()
    log.error("outbox: %d rows of %s are now dead letters", found, damaged)
    return found


def _copy(source: sqlite3.Connection, db: sqlite3.Connection, deadline: float) -> int:
    """Read on behind each place that cannot be read, in growing steps."""
    found, seq, step = 0, 0, 1
    while seq < _HIGHEST and time.monotonic() < deadline:
        try:
            for row in source.execute(
                f"select {_COLUMNS} from outbox where seq > ? and state = 'pending' order by seq",
                (seq,),
            ):
                seq, step = int(row[0]), 1
                if all(isinstance(item, kind) for item, kind in zip(row, _TYPES, strict=True)):
                    found += db.execute(
                        f"insert or ignore into dead({_COLUMNS}, died_utc)"
                        " values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                        (-row[0], *row[1:], utc_now()),
                    ).rowcount
                if time.monotonic() > deadline:
                    break
            else:
                return found
        except (sqlite3.DatabaseError, ValueError, OverflowError) as error:
            log.debug("outbox: damaged behind row %d: %s", seq, error)
            seq, step = seq + step, step * 2
    return found
