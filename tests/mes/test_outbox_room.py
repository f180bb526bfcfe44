"""What goes first when there is no room, what must never go, and what is refused to begin with."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_station.errors import OutboxError
from forge_station.mes import outbox_file, streams
from forge_station.mes.outbox import Outbox, OutboxFull
from forge_station.mes.outbox_figures import Growth
from tests.mes.rig import wait_for

TOPIC = "e/s/a/l/st/insp/v1/evt/x"
BODY = b'{"x":"%s"}' % (b"y" * 1500)
QUOTA = 400_000


def a_small_outbox(folder: Path, results: str = "refuse") -> Outbox:
    table = streams.policies(results)  # type: ignore[arg-type]
    return Outbox(folder / "o.db", max_bytes=QUOTA, ballast_bytes=0, policies=table)


def put_until_full(outbox: Outbox, stream: str = "verdict") -> list[int]:
    found: list[int] = []
    while True:
        try:
            found.append(outbox.put(stream, TOPIC, BODY))
        except OutboxFull:
            return found


def pending(outbox: Outbox, stream: str) -> list[int]:
    return [row.seq for row in outbox.fetch(stream, 0, 10**6)]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Outbox]:
    with a_small_outbox(tmp_path) as outbox:
        yield outbox


def test_results_and_alarms_that_nobody_has_are_never_given_up(small: Outbox) -> None:
    alarms = [small.put("alarm", TOPIC, BODY) for _ in range(3)]
    audit = [small.put("audit", TOPIC, BODY) for _ in range(3)]
    other = [small.put("whatever", TOPIC, BODY) for _ in range(3)]
    verdicts = put_until_full(small)
    assert small.counts().full
    assert pending(small, "verdict") == verdicts
    assert (pending(small, "alarm"), pending(small, "audit")) == (alarms, audit)
    assert pending(small, "whatever") == other
    assert small.counts().dropped == 0
    assert small.counts().fill_pct > 90


def test_delivered_rows_go_first_then_pictures_then_nothing(small: Outbox) -> None:
    images = [small.put("image", TOPIC, BODY) for _ in range(40)]
    delivered = [small.put("verdict", TOPIC, BODY) for _ in range(40)]
    for seq in delivered:
        small.mark(seq, "acked", 0)
    assert wait_for(lambda: not small._writer.marks)
    while small.counts().acked:
        small.put("verdict", TOPIC, BODY)
    assert pending(small, "image") == images
    kept = put_until_full(small)
    assert pending(small, "image") == []
    assert small.counts().dropped == 40
    assert set(kept) <= set(pending(small, "verdict"))


def test_the_site_may_choose_to_give_up_the_oldest_results(tmp_path: Path) -> None:
    with a_small_outbox(tmp_path, "overwrite") as outbox:
        alarm = outbox.put("alarm", TOPIC, BODY)
        verdicts = [outbox.put("verdict", TOPIC, BODY) for _ in range(600)]
        left = pending(outbox, "verdict")
        assert left == verdicts[-len(left) :]
        assert outbox.counts().dropped == 600 - len(left) > 300
        assert pending(outbox, "alarm") == [alarm]
        assert not outbox.counts().full
        numbers = [row.stream_seq for row in outbox.fetch("verdict", 0, 9999)]
        assert numbers == list(range(numbers[0], 601))  # a consumer sees what it does not get


def test_a_site_without_a_consumer_does_not_stop_its_line(small: Outbox) -> None:
    verdicts = [small.put("verdict", TOPIC, BODY) for _ in range(100)]
    small.mark(verdicts[0], "held", 0x10)  # the broker: nobody is subscribed
    assert wait_for(lambda: not small._writer.marks)
    more = [small.put("verdict", TOPIC, BODY) for _ in range(400)]
    assert pending(small, "verdict")[-1] == more[-1]
    assert small.counts().dropped > 100
    small.mark(more[-1], "acked", 0)  # somebody came: from now on nothing may be lost
    assert wait_for(lambda: not small._writer.marks)
    last = put_until_full(small)
    assert pending(small, "verdict")[-1] == last[-1]


def test_a_quota_of_the_broker_is_no_sign_that_nobody_listens(small: Outbox) -> None:
    verdicts = [small.put("verdict", TOPIC, BODY) for _ in range(100)]
    small.mark(verdicts[0], "held", 0x97)
    assert wait_for(lambda: not small._writer.marks)
    put_until_full(small)
    assert pending(small, "verdict")[: len(verdicts)] == verdicts


def test_room_comes_back_without_a_restart_and_is_said(small: Outbox) -> None:
    verdicts = put_until_full(small)
    small.release("verdict", 50)  # a consumer has them
    assert wait_for(lambda: small.counts().acked == 50)
    assert pending(small, "verdict") == verdicts[50:]
    small.put("verdict", TOPIC, BODY)
    assert not small.counts().full


def test_the_file_does_not_grow_while_the_disk_has_little_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    low = [False]
    monkeypatch.setattr(outbox_file, "below_floor", lambda *_: low[0])
    monkeypatch.setattr("forge_station.mes.outbox_writer.FLOOR_CHECK_S", 0.0)
    with Outbox(tmp_path / "o.db", ballast_bytes=0) as outbox:
        first = [outbox.put("verdict", TOPIC, BODY) for _ in range(50)]
        low[0] = True
        put_until_full(outbox)
        assert outbox.counts().disk_low
        for seq in first:
            outbox.mark(seq, "acked", 0)
        outbox.put("verdict", TOPIC, BODY)  # delivered rows make room inside the file
        low[0] = False
        for _ in range(100):
            outbox.put("verdict", TOPIC, BODY)
        assert not outbox.counts().disk_low


def test_floor_is_a_share_of_a_small_disk(tmp_path: Path) -> None:
    assert not outbox_file.below_floor(tmp_path / "x", 0)
    import shutil

    usage = shutil.disk_usage(tmp_path)
    if usage.free > usage.total // outbox_file.FLOOR_SHARE:
        assert not outbox_file.below_floor(tmp_path / "x", 1 << 62)


def test_pages_of_deleted_rows_go_back_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forge_station.mes.outbox_writer.VACUUM_PAGES", 16)
    path = tmp_path / "o.db"
    with Outbox(path, ballast_bytes=0, keep_acked_s=0.0) as outbox:
        for _ in range(300):
            outbox.mark(outbox.put("verdict", TOPIC, BODY), "acked", 0)
        assert wait_for(lambda: not outbox._writer.marks)
        before = path.stat().st_size
        monkeypatch.setattr("forge_station.mes.outbox_writer.MAINTENANCE_S", 0.0)
        assert wait_for(lambda: outbox.put("verdict", TOPIC, BODY) and outbox.counts().acked == 0)
        assert wait_for(lambda: outbox.put("verdict", TOPIC, BODY) and _size(path) < before // 2)


def _size(path: Path) -> int:
    return path.stat().st_size


# Refused and recovered


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("/data/station/outbox.db", "nfs4"),
        ("/data/other", "ext4"),
        ("/data/with space/x", "cifs"),
        ("/", "ext4"),
    ],
)
def test_file_system_of_a_folder_is_that_of_its_nearest_mount(place: str, kind: str) -> None:
    mounts = (
        "/dev/sda1 / ext4 rw 0 0\nserver:/x /data/station nfs4 rw 0 0\n"
        "//s/y /data/with\\040space cifs rw 0 0\nbroken\n"
    )
    assert outbox_file.file_system_of(Path(place), mounts) == kind


@pytest.mark.parametrize("kind", ["nfs", "cifs", "9p", "fuse.sshfs"])
def test_network_file_system_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(outbox_file, "_mounts", lambda: f"server:/x / {kind} rw 0 0")
    with pytest.raises(OutboxError, match=f"network file system.*{kind}"):
        Outbox(tmp_path / "o.db")


def test_rows_of_a_damaged_file_become_dead_letters_and_can_be_sent(tmp_path: Path) -> None:
    path = tmp_path / "o.db"
    with Outbox(path, ballast_bytes=0) as outbox:
        for number in range(200):
            outbox.put("verdict", TOPIC, BODY, id=f"r{number}")
    content = bytearray(path.read_bytes())
    content[4096 * 20 : 4096 * 22] = b"\xff" * 8192
    path.write_bytes(bytes(content))
    with Outbox(path, ballast_bytes=0) as outbox:
        assert outbox.quarantined is not None
        letters = outbox.dead_letters()
        assert outbox.recovered == len(letters) > 100
        assert {letter.body for letter in letters} == {BODY}
        assert {letter.reason for letter in letters} == {None}
        assert outbox.put("verdict", TOPIC, BODY) == 1  # numbers of the new epoch begin anew
        assert outbox.requeue_dead() == len(letters)
        rows = outbox.fetch("verdict", 0, 999)
        assert [row.stream_seq for row in rows] == list(range(1, len(letters) + 2))
        assert [row.id for row in rows[1:]] == [letter.id for letter in letters]


def test_outbox_of_the_release_before_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "o.db"
    with Outbox(path, ballast_bytes=0) as outbox:
        outbox.put("verdict", TOPIC, BODY)
        epoch = outbox.epoch
    db = sqlite3.connect(path)
    db.executescript(
        "drop index numbers; drop index pending_numbers;"
        "create index pending_rows on outbox(stream, seq) where state = 'pending';"
        "pragma user_version=1;"
    )
    db.close()
    with Outbox(path, ballast_bytes=0) as outbox:
        assert outbox.epoch == epoch
        assert outbox.put("verdict", TOPIC, BODY) == 2
        assert [row.stream_seq for row in outbox.fetch("verdict", 0, 9)] == [1, 2]
        names = {name for (name,) in outbox._read("select name from sqlite_master")}
        assert "pending_rows" not in names and "pending_numbers" in names


# Replay


def test_replay_says_what_is_not_held_any_more(tmp_path: Path) -> None:
    with Outbox(tmp_path / "o.db", ballast_bytes=0) as outbox:
        for _ in range(10):
            outbox.mark(outbox.put("verdict", TOPIC, BODY), "acked", 0)
        assert wait_for(lambda: outbox.counts().acked == 10 and not outbox._writer.marks)
        outbox._writer.do(_deleting((3, 4, 8)), 5.0)
        replayed = outbox.replay(2, 9, outbox.epoch)
        assert (replayed.rows, replayed.missing) == (5, ((3, 4), (8, 8)))
        assert pending(outbox, "verdict") == [2, 5, 6, 7, 9]
        assert outbox.replay(2, 9, outbox.epoch).rows == 0  # they wait already


def _deleting(seqs: tuple[int, ...]):  # type: ignore[no-untyped-def]
    from forge_station.mes.outbox_writer import Job

    def run(db: sqlite3.Connection, change: object, numbers: object) -> int:
        return db.execute(f"delete from outbox where seq in {seqs}").rowcount

    return Job(run)


# Figures


def test_growth_tells_when_the_outbox_will_be_full() -> None:
    now = [0.0]
    growth = Growth(lambda: now[0])
    assert growth.eta_full_s(10.0) is None
    now[0] = 100.0
    assert growth.eta_full_s(20.0) == pytest.approx(800.0)
    now[0] = 200.0
    assert growth.eta_full_s(20.0) == pytest.approx(1600.0)
    now[0] = 900.0
    assert growth.eta_full_s(20.0) is None  # it does not grow any more


def test_time_of_the_last_commit_does_not_grow_with_the_backlog(tmp_path: Path) -> None:
    """The counts are kept, not counted: a look at 20,000 rows costs what one at none costs."""
    with Outbox(tmp_path / "o.db", ballast_bytes=0) as outbox:
        outbox.put("verdict", TOPIC, b"{}")
    db = sqlite3.connect(tmp_path / "o.db")
    db.execute(
        "with recursive n(i) as (select 2 union all select i + 1 from n where i < 20000)"
        " insert into outbox(id, stream, stream_seq, topic, body, created_utc, created_mono,"
        " boot_id) select 'r' || i, 'verdict', i, 't', '{}', '2026-01-01T00:00:00.000Z', 0, 'b'"
        " from n"
    )
    db.execute("update streams set last = 20000")
    db.commit()
    db.close()
    with Outbox(tmp_path / "o.db", ballast_bytes=0) as outbox:
        assert outbox.counts().pending == 20_000
        statements: list[str] = []
        outbox._reader.set_trace_callback(statements.append)
        outbox.counts()
        assert all("count(" not in text for text in statements)
        began = time.perf_counter()
        assert outbox.confirmed_upto("verdict") == 0
        outbox.release("verdict", 19_990)
        assert wait_for(lambda: outbox.counts().pending == 10)
        assert outbox.confirmed_upto("verdict") == 19_990
        assert time.perf_counter() - began < 30.0
