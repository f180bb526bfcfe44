"""Rows 4 and 6 to 8: a large backlog, no room, power cuts, damage. What the outbox is for."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from forge_station.errors import OutboxError
from forge_station.mes import payloads
from forge_station.mes.listen import Listener
from forge_station.mes.outbox import Outbox, OutboxFull
from forge_station.mes.publisher import Publisher
from forge_station.mes.topics import MqttConfig, topic_of
from tests.mes.faults.load import TIMING, config_of, fork, rss_bytes
from tests.mes.faults.table import Checks, Result, Row, Skip
from tests.mes.rig import Mosquitto

TOPIC = "e/s/a/l/st/insp/v1/evt/verdict"
GROWTH_BYTES = 30 << 20


def fill(path: Path, config: MqttConfig, rows: int) -> None:
    """An outbox with a backlog of a day, written at once; the alarm is the newest row."""
    with Outbox(path, ballast_bytes=0, max_bytes=4 << 30):
        pass
    topic, began = topic_of(config, "verdict"), int(time.time()) - 86_400
    db = sqlite3.connect(path)
    db.execute("pragma cache_size=-200000")
    db.execute("pragma synchronous=off")
    body = b'{"schema":"verdict/1.0","text":"%s"}' % (b"x" * 600)
    db.execute(
        "with recursive n(i) as (select 1 union all select i + 1 from n where i < :rows)"
        " insert into outbox(id, stream, stream_seq, topic, body, created_utc, created_mono,"
        " boot_id) select printf('r-%09d', i), 'verdict', i, :topic, :body,"
        " strftime('%Y-%m-%dT%H:%M:%fZ', :began + 86400.0 * i / :rows, 'unixepoch'), 0.0,"
        " 'deadbeef' from n",
        {"rows": rows, "topic": topic, "body": body, "began": began},
    )
    db.execute("insert or replace into streams values ('verdict', ?)", (rows,))
    db.commit()
    db.close()


def drain(
    path: Path, config: MqttConfig, waits_s: float, seconds: float, reports: Connection
) -> None:
    """The station's process: how much memory it takes with the backlog, waiting and sending."""
    with Outbox(path, ballast_bytes=0, max_bytes=4 << 30) as outbox:
        alarm = payloads.alarm_message("DRIFT", "first of all", config.root, severity=500)
        outbox.put("alarm", topic_of(config, "alarm"), alarm.body, alarm.id)
        opened, before = rss_bytes(), outbox.pending
        with Publisher(outbox, config, timing=TIMING) as publisher:
            time.sleep(waits_s)  # no broker yet
            waiting = rss_bytes()
            reports.send(("waiting", before, waiting - opened))
            reports.recv()
            began, most = time.monotonic(), waiting
            while time.monotonic() - began < seconds and not publisher.drain(0.2):
                most = max(most, rss_bytes())
            took = time.monotonic() - began
            reports.send((before - outbox.pending, took, most - opened, outbox.pending))


def backlog(folder: Path, short: bool) -> Result:
    """Row 4."""
    rows, seconds, checks = (2_000, 60.0, Checks()) if short else (500_000, 90.0, Checks())
    broker = Mosquitto(folder)
    config, path = config_of(broker), folder / "outbox.db"
    fill(path, config, rows)
    with fork(drain, path, config, 0.5 if short else 2.0, seconds) as reports:
        reports.recv()
        with broker, Listener(config, client_id="mes", statuses=False) as listener:
            reports.send("go")
            first, got = "", 0
            while not reports.poll():
                arrived = listener.arrived(0.2)
                got += arrived is not None
                if arrived is not None and not first:
                    first = arrived[0].rsplit("/", 1)[-1]
            drained, took, growth, left = reports.recv()
            while got < drained and listener.arrived(20.0) is not None:
                got += 1
    checks.that(first == "alarm", f"the first message was of stream {first}")
    checks.that(growth < GROWTH_BYTES, f"memory grew by {growth >> 20} MiB")
    checks.that(got >= drained, f"{drained - got} confirmed but not received")
    checks.that(drained > 0, "nothing was sent")
    note = (
        f"backlog {rows}, {drained / took:.0f} msg/s for {took:.0f} s with the consumer on the same"
        f" CPU, {left} left, memory +{growth / 2**20:.1f} MiB, alarm first"
    )
    return Result(drained, got, max(0, drained - got), None, note, tuple(checks.faults))


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """A tmpfs of its own."""
    disk = folder / f"disk-{random.randrange(10**9)}"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)],
        capture_output=True, check=False,
    )  # fmt: skip
    if mounted.returncode:
        raise Skip("mounting a small disk is not permitted here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def fill_disk(hog: Path) -> None:
    """Use up the disk, as a program that logs too much would."""
    with hog.open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            pass


def no_room(folder: Path, short: bool) -> Result:
    """Row 6: quota, disk filled by others, read-only disk, no inodes left."""
    checks, committed, held = Checks(), 0, 0

    def put_until_full(outbox: Outbox, ids: list[int]) -> None:
        while True:
            ids.append(outbox.put("verdict", TOPIC, b"x" * 1500))

    def recovers(outbox: Outbox, ids: list[int], case: str, hog: Path | None = None) -> None:
        nonlocal committed, held
        try:
            put_until_full(outbox, ids)
        except OutboxFull as error:
            checks.that("committed results are intact" in str(error), f"{case}: {error}")
        for seq in ids[: len(ids) // 2]:
            outbox.mark(seq, "acked", 0)
        if hog is not None:
            hog.unlink()
        ids.append(outbox.put("verdict", TOPIC, b"x" * 1500))
        rows = {row.seq for row in outbox.fetch("verdict", 0, 10**6)}
        missing = set(ids[len(ids) // 2 :]) - rows
        checks.that(not missing, f"{case}: {len(missing)} committed rows are gone")
        committed += len(ids)
        held += len(ids) - len(missing)

    with Outbox(folder / "quota.db", max_bytes=400_000, ballast_bytes=0) as outbox:
        recovers(outbox, [], "quota")
    with (
        small_disk(folder, "size=10m") as disk,
        Outbox(disk / "outbox.db", ballast_bytes=600_000) as outbox,
    ):
        ids = [outbox.put("verdict", TOPIC, b"x" * 1500) for _ in range(100)]
        fill_disk(disk / "hog")
        recovers(outbox, ids, "disk", hog=disk / "hog")
    with small_disk(folder, "size=10m,nr_inodes=8") as disk:
        with Outbox(disk / "outbox.db", ballast_bytes=0) as outbox:
            for number in range(8):
                try:
                    (disk / f"f{number}").touch()
                except OSError:
                    break
            ids = [outbox.put("verdict", TOPIC, b"x" * 1500) for _ in range(20)]
            checks.that(len(outbox.fetch("verdict", 0, 99)) == 20, "inodes: rows are missing")
            committed, held = committed + 20, held + 20
        for number in range(8):
            (disk / f"f{number}").unlink(missing_ok=True)
    with small_disk(folder, "size=10m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        try:
            Outbox(disk / "outbox.db").close()
            checks.that(False, "read-only: the outbox opened")
        except OutboxError as error:
            checks.that("cannot be" in str(error), f"read-only: {error}")
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        with Outbox(disk / "outbox.db", ballast_bytes=0) as outbox:
            outbox.put("verdict", TOPIC, b"x")
            committed, held = committed + 1, held + 1
    note = "quota, full disk, no inodes, read-only: each said, each recovered without a restart"
    return Result(committed, held, committed - held, None, note, tuple(checks.faults))


def power_cut(folder: Path, short: bool) -> Result:
    """Row 7: the file and a log cut at any byte behind the last flush, as a power cut leaves it."""
    cuts, rng, checks = 8 if short else 100, random.Random(7), Checks()
    committed = survived = 0
    path = folder / "outbox.db"
    with Outbox(path, ballast_bytes=0) as outbox:
        for cut in range(cuts):
            for _ in range(rng.randrange(1, 4)):
                outbox.put("verdict", TOPIC, rng.randbytes(rng.randrange(100, 3000)))
            database = path.read_bytes()
            flushed = len(log) if (log := _log_of(path)) else 0
            known = {row.seq for row in outbox.fetch("verdict", 0, 10**6)}
            for _ in range(rng.randrange(1, 4)):
                outbox.put("verdict", TOPIC, rng.randbytes(rng.randrange(100, 3000)))
            later = _log_of(path)
            if len(later) <= flushed:
                continue  # the log was written back meanwhile
            copy = folder / f"cut{cut}.db"
            copy.write_bytes(database)
            end = rng.randrange(flushed, len(later) + 1)
            copy.with_name(copy.name + "-wal").write_bytes(later[:end])
            with Outbox(copy, ballast_bytes=0) as after:
                found = {row.seq for row in after.fetch("verdict", 0, 10**6)}
                checks.that(after.quarantined is None, f"cut {cut}: moved aside")
                (answer,) = after._read("pragma quick_check")[0]
                checks.that(answer == "ok", f"cut {cut}: {answer}")
                following = after.put("verdict", TOPIC, b"{}")
                checks.that(following == max(found) + 1, f"cut {cut}: seq {following} follows")
            committed += len(known)
            survived += len(known & found)
            for file in folder.glob(f"cut{cut}.db*"):
                file.unlink()
    checks.that(committed == survived, f"{committed - survived} committed rows are gone")
    note = f"{cuts} cuts; opens, quick_check ok, numbers go on"
    return Result(committed, survived, committed - survived, None, note, tuple(checks.faults))


def _log_of(path: Path) -> bytes:
    return path.with_name(path.name + "-wal").read_bytes()


def damage(folder: Path, short: bool) -> Result:
    """Row 8: pages overwritten at random. Never a crash, never a mixed-up epoch."""
    cases, rng, checks = 5 if short else 40, random.Random(8), Checks()
    original, rows = folder / "original.db", 200
    with Outbox(original, ballast_bytes=0) as outbox:
        ids = {f"r{number}" for number in range(rows)}
        for row_id in sorted(ids):
            outbox.put("verdict", TOPIC, b'{"x":"%s"}' % (b"y" * 1000), id=row_id)
        epoch = outbox.epoch
    aside = recovered = intact = 0
    for case in range(cases):
        path = folder / f"case{case}.db"
        shutil.copy(original, path)
        with path.open("r+b") as file:
            pages = os.path.getsize(path) // 4096
            for page in rng.sample(range(pages), rng.randrange(1, 4)):
                file.seek(4096 * page)
                file.write(rng.randbytes(4096))
        with Outbox(path, ballast_bytes=0) as outbox:
            moved = outbox.quarantined is not None
            checks.that(moved == (outbox.epoch != epoch), f"case {case}: epoch {outbox.epoch}")
            checks.that(outbox.put("verdict", TOPIC, b"{}") > 0, f"case {case}: no put")
            if moved:
                aside += 1
                recovered += outbox.recovered
                checks.that(outbox.quarantined.exists(), f"case {case}: the old file is gone")  # type: ignore[union-attr]
                known = {letter.id for letter in outbox.dead_letters()}
                checks.that(known <= ids, f"case {case}: unknown rows recovered")
            else:
                intact += 1
        for file in folder.glob(f"case{case}.db*"):
            file.unlink()
    checks.that(aside > 0, "no damage was found")
    note = (
        f"{aside} of {cases} files moved aside under a new epoch, {intact} damaged where it does"
        f" not matter; {recovered} of {aside * rows} rows back as dead letters; the line went on"
    )
    return Result(None, None, None, None, note, tuple(checks.faults))


ROWS = [
    Row("4", "broker away for a day: 500,000 rows wait",
        "memory +30 MB at most, alarms first, nothing lost", backlog),
    Row("6", "quota, full disk, no inodes, read-only disk",
        "said loudly, policy applied, recovers without a restart", no_room, False),
    Row("7", "power cut: log cut at any byte", "no committed row lost", power_cut, False),
    Row("8", "damaged pages", "moved aside, new epoch, the line goes on", damage, False),
]  # fmt: skip
