"""The evidence folder: what goes first, what a crash leaves, what is no part's, two at once."""

from __future__ import annotations

import errno
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forge_station.config import EvidenceConfig
from forge_station.evidence import folder as module
from forge_station.evidence.folder import INDEX, Bundle, EvidenceError, Folder
from forge_station.evidence.index import Index, Query, Row
from forge_station.evidence.retention import drawn

KB = 1000


def verdict(number: int, outcome: str = "PASS") -> dict[str, object]:
    return {
        "schema": "forge-station.verdict/1.0",
        "result_id": f"01a22c2f-3f83-7e64-9cc4-{number:012x}",
        "serial": f"SN-{number:04d}",
        "product": "NUT",
        "outcome": outcome,
        "end_time": f"2026-11-30T10:00:{number:02d}.000Z",
        "model": {"sha256": "b" * 64},
        "scan": {"calibration": "c" * 16},
    }


def kept(number: int, outcome: str = "PASS", size: int = 100 * KB) -> Bundle:
    said = verdict(number, outcome)
    name = f"{said['serial']}-{str(said['result_id'])[-8:]}"
    return Bundle(said, {f"{name}.case.npz": bytes(size - 2 * KB), f"{name}.png": bytes(KB)})


def settings(path: Path, **changes: object) -> EvidenceConfig:
    return EvidenceConfig(path, **{"min_free_gb": 0.0, "pass_share": 0.0, **changes})  # type: ignore[arg-type]


def serials(folder: Folder, query: Query | None = None) -> list[int]:
    return [int(row.serial[3:]) for row in folder.find(query or Query())]


def on_disk(path: Path) -> set[int]:
    return {int(file.name[3:7]) for file in path.glob("SN-*")}


@pytest.fixture
def make(tmp_path):
    opened: list[Folder] = []

    def build(**changes: object) -> Folder:
        opened.append(Folder.of(settings(tmp_path / "parts", **changes)))
        return opened[-1]

    yield build
    for folder in opened:
        folder.close()


def test_pass_goes_first_then_error_and_the_oldest_of_each(make, tmp_path):
    outcomes = ["FAIL", "PASS", "ERROR", "UNSURE", "PASS", "FAIL"]
    folder = make(quota_gb=0.00065)
    for number, outcome in enumerate(outcomes):
        folder.add(kept(number, outcome))
    gone = []
    for number in range(6, 11):
        before = set(serials(folder))
        folder.add(kept(number, "FAIL"))
        gone += sorted(before - set(serials(folder)))
    assert gone == [1, 4, 2, 0, 3]
    assert folder.totals().deleted == {"PASS": 2, "ERROR": 1, "FAIL": 1, "UNSURE": 1}
    assert on_disk(tmp_path / "parts") == set(serials(folder)) == {5, 6, 7, 8, 9, 10}
    size = sum(file.stat().st_size for file in (tmp_path / "parts").glob("SN-*"))
    assert folder.totals().bytes == size <= 650 * KB


def test_a_share_of_pass_outlives_the_others(make):
    folder = make(quota_gb=0.001, pass_share=0.3)
    for number in range(40):
        folder.add(kept(number))
    left = serials(folder)
    ids = {number: str(verdict(number)["result_id"]) for number in range(40)}
    first = [number for number in range(40) if drawn(ids[number], 0.3)]
    assert 5 < len(first) < 20, "a share, the same at every try"
    assert set(first[-5:]) <= set(left) and len(left) == 10
    assert min(left) in first


def test_what_is_marked_is_never_deleted_and_the_rest_is_refused_not_the_line(make, tmp_path):
    folder = make(quota_gb=0.00035)
    for number in range(3):
        row = folder.add(kept(number))
        folder.mark(row, "held" if number else "review")
    with pytest.raises(EvidenceError, match="marked review or held"):
        folder.add(kept(3, "FAIL"))
    assert serials(folder) == [0, 1, 2] and on_disk(tmp_path / "parts") == {0, 1, 2}
    folder.mark(folder.get("SN-0001-00000001"), "none")
    folder.add(kept(3, "FAIL"))
    assert serials(folder) == [0, 2, 3]


def test_marks_outlive_the_index(make, tmp_path):
    folder = make()
    for number in range(3):
        folder.add(kept(number))
    folder.mark(folder.get(verdict(1)["result_id"]), "held")
    folder.close()
    (tmp_path / "parts" / INDEX).unlink()
    assert make().rebuild() == (3, 0)
    assert serials(make(), Query(label="held")) == [1]


def test_old_evidence_goes_though_there_is_room(make):
    folder = make(keep_days=1.0)
    for number in range(3):
        old = {**verdict(number, "FAIL"), "end_time": f"2020-01-01T00:00:0{number}.000Z"}
        row = folder.add(Bundle(old, {}))
        if number == 1:
            folder.mark(row, "review")
    folder.add(Bundle({**verdict(9), "end_time": "2999-01-01T00:00:00.000Z"}, {}))
    folder.expire()
    assert serials(folder) == [1, 9]
    assert folder.totals().deleted == {"FAIL": 2}


def test_free_space_is_kept_when_others_take_it(make, monkeypatch):
    folder = make(min_free_gb=0.001)
    for number in range(4):
        folder.add(kept(number))

    def statvfs(path: object) -> os.statvfs_result:
        """A disk of others: too little is free until no more than two parts are left."""
        free = 1_000 if len(serials(folder)) > 2 else 10_000
        return os.statvfs_result((KB, KB, 10**6, free, free, 0, 0, 0, 0, 255))

    monkeypatch.setattr(os, "statvfs", statvfs)
    folder.add(kept(4, "FAIL"))
    assert serials(folder) == [2, 3, 4]
    assert folder.totals().deleted == {"PASS": 2}


def test_a_full_disk_makes_room_and_tries_once_more(make, monkeypatch, tmp_path):
    folder = make()
    for number in range(3):
        folder.add(kept(number))
    write, room = module.write_whole, [0]

    def full(path: Path, content: bytes) -> None:
        if len(on_disk(tmp_path / "parts") - {7}) > 1 + room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    monkeypatch.setattr(module, "write_whole", full)
    with pytest.raises(EvidenceError, match="No space left"):
        folder.add(kept(7, "FAIL"))
    assert serials(folder) == [1, 2] and on_disk(tmp_path / "parts") == {1, 2}
    room[0] = 1
    folder.add(kept(7, "FAIL"))
    assert serials(folder) == [1, 2, 7]


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk needs root")
def test_a_real_disk_that_is_full(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        with Folder.of(settings(disk)) as folder:
            for number in range(12):
                folder.add(kept(number, "FAIL" if number % 3 == 0 else "PASS", 200 * KB))
            left = serials(folder)
            assert set(on_disk(disk)) == set(left) and 0 in left and 11 in left
            assert folder.totals().deleted.keys() == {"PASS"}
            with pytest.raises(OSError, match="space"):
                (disk / "others").write_bytes(bytes(3_000_000))
            folder.add(kept(12, "FAIL", 200 * KB))
            assert 12 in serials(folder)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_foreign_files_are_left_alone(make, tmp_path):
    folder = make(quota_gb=0.00025)
    folder.add(kept(0))
    parts = tmp_path / "parts"
    foreign = {
        "notes.txt": "x",
        "photo.png": "x",
        "SN-0000-00000000.notes.txt": "beside a part",
        "other.verdict.json": "{}",
        "copy.verdict.json": json.dumps(verdict(5)),
        "broken.verdict.json": "{",
        "list.verdict.json": "[]",
    }
    for name, text in foreign.items():
        (parts / name).write_text(text)
    (parts / "SN-0000-00000000.verdict.json.d").mkdir()
    assert folder.reconcile() == (0, 0)
    assert folder.rebuild() == (1, 4)
    for number in range(1, 4):
        folder.add(kept(number))
    assert serials(folder) == [2, 3]
    assert set(foreign) <= {path.name for path in parts.iterdir()}


def test_an_index_that_is_damaged_is_made_anew_while_it_is_used(make, tmp_path, caplog):
    folder = make()
    for number in range(3):
        folder.add(kept(number))
    folder.close()
    (tmp_path / "parts" / INDEX).write_bytes(b"no database" * 1000)
    folder.add(kept(3))
    assert serials(folder) == [0, 1, 2, 3]
    assert list((tmp_path / "parts").glob(f"{INDEX}.damaged-*")) and "made anew" in caplog.text


@pytest.mark.parametrize("harm", ["cut", "page"])
def test_rebuild_replaces_an_index_of_any_damage(make, tmp_path, harm):
    folder = make()
    for number in range(30):
        folder.add(kept(number, size=3 * KB))
    folder.close()
    path = tmp_path / "parts" / INDEX
    content = bytearray(path.read_bytes())
    if harm == "cut":
        content = content[: len(content) // 2]
    else:
        content[4096 : 3 * 4096] = b"\xff" * 8192
    path.write_bytes(content)
    assert make().rebuild() == (30, 0)
    assert serials(make()) == list(range(30))


def test_files_without_a_row_and_rows_without_files_are_found(make, tmp_path):
    folder = make()
    for number in range(3):
        folder.add(kept(number))
    with sqlite3.connect(tmp_path / "parts" / INDEX) as database:
        database.execute("delete from part where serial = 'SN-0001'")
    (tmp_path / "parts" / "SN-0002-00000002.verdict.json").unlink()
    assert folder.reconcile() == (1, 1)
    assert serials(folder) == [0, 1] == sorted(on_disk(tmp_path / "parts"))
    assert folder.totals().deleted == {"PASS": 1} and folder.totals().parts == {"PASS": 2}


WRITER = """
import sys
from pathlib import Path
sys.path[:0] = [{repository!r}, {edge!r}]
from tests.station.test_evidence_folder import kept, settings
from forge_station.evidence.folder import Folder
with Folder.of(settings(Path({folder!r}), quota_gb=0.0004)) as folder:
    for number in range(*map(int, sys.argv[1:])):
        folder.add(kept(number, "PASS" if number % 2 else "FAIL", 20_000))
        print(number, flush=True)
"""


def writer(repository: Path, folder: Path, first: int, last: int) -> subprocess.Popen[str]:
    code = WRITER.format(
        repository=str(repository), edge=str(repository / "edge"), folder=str(folder)
    )
    command = [sys.executable, "-c", code, str(first), str(last)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def whole(folder: Folder) -> None:
    """Files and rows say the same; a part has all its files."""
    rows = folder.find(Query())
    assert on_disk(folder.path) == {int(row.serial[3:]) for row in rows}
    for row in rows:
        assert sum((folder.path / name).stat().st_size for name in row.files) == row.bytes
    assert folder.totals().bytes == sum(row.bytes for row in rows)


def test_kill_9_while_writing_and_thinning_leaves_nothing_half(repository, make, tmp_path):
    for attempt in range(2):
        with writer(repository, tmp_path / "parts", 0, 1000) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if int(line) == 25 + 4 * attempt:
                    process.send_signal(signal.SIGKILL)
                    break
        folder = make(quota_gb=0.0004)
        folder.reconcile()
        for draft in (tmp_path / "parts").glob(".*.part"):
            os.utime(draft, (0, 0))
        folder.reconcile()
        assert not list((tmp_path / "parts").glob(".*.part"))
        whole(folder)
        folder.close()


OPENS = """
import sys, time
from pathlib import Path
from forge_station.evidence.index import Index
begin = float(sys.argv[2])
for number in range(60):
    while time.time() < begin + 0.01 * number:
        pass
    Index(Path(sys.argv[1]) / f"{number}.sqlite").close()
"""


def test_a_new_index_may_be_opened_by_several_at_once(tmp_path):
    """Each changes it to a write-ahead log, for which SQLite does not wait for the others."""
    arguments = [sys.executable, "-c", OPENS, str(tmp_path), str(time.time() + 2.0)]
    processes = [subprocess.Popen(arguments, stderr=subprocess.PIPE) for _ in range(4)]
    said = [process.communicate(timeout=60)[1].decode() for process in processes]
    assert said == [""] * 4


def test_two_processes_share_a_folder(repository, make, tmp_path):
    first = writer(repository, tmp_path / "parts", 0, 60)
    second = writer(repository, tmp_path / "parts", 100, 160)
    for process in (first, second):
        process.communicate(timeout=120)
    assert (first.returncode, second.returncode) == (0, 0)
    folder = make(quota_gb=0.0004)
    whole(folder)
    totals = folder.totals()
    assert sum(totals.parts.values()) + sum(totals.deleted.values()) == 120


def test_questions(make):
    folder = make()
    for number, outcome in enumerate(["PASS", "FAIL", "UNSURE", "FAIL"]):
        folder.add(kept(number, outcome, 3 * KB))
    ask: list[tuple[Query, list[int]]] = [
        (Query(), [0, 1, 2, 3]),
        (Query(last=2), [2, 3]),
        (Query(outcomes=("FAIL", "UNSURE")), [1, 2, 3]),
        (Query(since="2026-11-30T10:00:01", until="2026-11-30T10:00:03"), [1, 2]),
        (Query(serial="SN-0003"), [3]),
        (Query(product="BOLT"), []),
    ]
    for query, expected in ask:
        assert serials(folder, query) == expected
    assert folder.get("000000000002").serial == "SN-0002"
    for wrong in ("nothing", ""):
        with pytest.raises(EvidenceError, match="id"):
            folder.get(wrong)


def test_threads_of_two_folders_count_every_deletion_once(tmp_path):
    """Both thin at once: each part is deleted, and counted, by one of them."""

    def fill(first: int) -> Callable[[], None]:
        def work() -> None:
            with Folder.of(settings(tmp_path / "parts", quota_gb=0.0001)) as folder:
                for number in range(first, first + 20):
                    folder.add(kept(number, size=10 * KB))

        return work

    threads = [threading.Thread(target=fill(first)) for first in (0, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Folder(tmp_path / "parts") as folder:
        totals = folder.totals()
    assert sum(totals.parts.values()) + totals.deleted["PASS"] == 40


def told(number: int, *reasons: str) -> Bundle:
    said = {**verdict(number, "FAIL"), "reasons": [{"code": code} for code in reasons]}
    return Bundle(said, {})


def test_parts_are_found_by_a_reason_of_their_verdict(make):
    folder = make()
    folder.add(told(1, "SURFACE_DENT", "WRONG_COUNT", "SURFACE_DENT"))
    folder.add(told(2, "WRONG_COUNT"))
    folder.add(told(3, "SURFACE_DENT"))
    assert serials(folder, Query(reason="SURFACE_DENT")) == [1, 3]
    assert serials(folder, Query(reason="SURFACE_DENT", last=1)) == [3]
    assert serials(folder, Query(reason="WRONG_COUNT", until="2026-11-30T10:00:02")) == [1]
    assert folder.find(Query())[0].reasons == ("SURFACE_DENT", "WRONG_COUNT")
    folder.mark(folder.find(Query(containing="0003"))[0], "held")
    folder.delete(folder.find(Query(containing="0001"))[0])
    assert serials(folder, Query(reason="SURFACE_DENT")) == [3], "gone with its part"
    folder.rebuild()
    assert serials(folder, Query(reason="WRONG_COUNT")) == [2], "made anew from the verdicts"


def test_pages_follow_each_other_without_gap_or_overlap(make):
    """Parts of one moment too: time and result id together say where a page ends."""
    folder = make()
    for number in range(7):
        same = {**verdict(number), "end_time": f"2026-11-30T10:00:0{number // 3}.000Z"}
        folder.add(Bundle(same, {}))
    seen: list[int] = []
    before = None
    while page := folder.find(Query(last=2, before=before)):
        seen += [int(row.serial[3:]) for row in reversed(page)]
        before = page[0].time, page[0].result_id
    assert seen == [6, 5, 4, 3, 2, 1, 0]


def test_an_index_from_before_reasons_were_kept_is_taken_as_it_is(tmp_path):
    path = tmp_path / "old.sqlite"
    old = Index(path)
    facts = ("r1", "n1", "SN-1", "P", "FAIL", "2026-11-30T10:00:00.000Z", 1, 0, ("n1",), "", "", "")
    old.put(Row(*facts))
    old.close()
    with sqlite3.connect(path) as db:
        db.executescript("drop trigger part_out_reason; drop table reason")
    db.close()
    found = Index(path)
    assert found.one("r1") == Row(*facts) and found.one("r") is None
    assert found.find(Query(reason="SURFACE_DENT")) == []
    found.close()
