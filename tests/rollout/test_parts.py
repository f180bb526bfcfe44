"""Of a rollout without a broker: plans, decisions cut off anywhere, the file server, the table."""

from __future__ import annotations

import io
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from forge_station.bundles import fetch
from forge_station.errors import ConfigError
from forge_station.mes.topics import MqttConfig, topic_of
from forge_station.rollout.plan import read_plan
from forge_station.rollout.record import OVER, Folder, RolloutRecord, StationRecord
from forge_station.rollout.runner import ABORT, Runner
from forge_station.rollout.serve import FileServer
from forge_station.rollout.table import Screen, table
from forge_station.rollout.ways import Answer, MqttWay, Seen
from tests.rollout.plans import NEW, OLD, RELEASE, Clock, begun, plan_file


def test_shares_count_the_groups_before(tmp_path: Path) -> None:
    plan = read_plan(plan_file(tmp_path))
    assert plan.members() == {
        "canary": ("s3",), "quarter": ("s1",), "all": ("s2", "s4", "s5", "s6", "s7", "s8"),
    }  # fmt: skip
    quarter = plan.groups[1].gates
    assert (quarter.max_failed, quarter.wait_s, quarter.approval) == (0.5, 60, True)
    assert plan.stations[2].mqtt is not None
    assert plan.stations[2].mqtt.root == "enterprise/site/area/l1/s3"
    assert plan.url_of(plan.stations[0]) == "https://files/b.fsb"
    served = read_plan(plan_file(tmp_path, url=None, serve="http://10.0.0.1:8900"))
    assert served.url_of(served.stations[0]) == "http://10.0.0.1:8900/b.fsb"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stations": [{"name": "s1"}, {"name": "s1"}]}, "a name that is not given yet"),
        ({"stations": [{"name": "s/1"}]}, "1 to 24 letters"),
        ({"stations": []}, "one station, or more"),
        ({"stations": [{"name": "s1", "stick": "m", "url": "/x"}]}, "a stick and a broker"),
        ({"stations": [{"name": "s1", "key": "A" * 43 + "="}]}, "with a stick alone"),
        ({"stations": [{"name": "s1", "stick": "m", "key": "no.pem"}]}, "key cannot be read"),
        ({"groups": [{"name": "a", "stations": ["s9"]}]}, "s9, unknown"),
        ({"groups": [{"name": "a", "share": 0.5}]}, "a last group of share: 1"),
        ({"groups": [{"name": "a", "share": 1}, {"name": "b", "share": 1}]}, "no station"),
        ({"url": None}, "url or serve"),
        ({"serve": "10.0.0.1:80"}, "http://ADDRESS:PORT"),
        ({"bundle": None}, "bundle, here or for all"),
        ({"bundle": "none.fsb"}, r"\n  bundle: \S*none.fsb: no file"),
        (
            {"stations": [{"name": "s1", "bundle": "own.fsb"}]},
            r"stations\[0\].bundle: \S*own.fsb: no file",
        ),
        ({"gates": {"max_failed": 2}}, "0.0 to 1.0"),
        ({"gates": {"max_faild": 0}}, "max_failed"),
        ({"mqtt": {"host": "broker.plant"}}, "tls: true"),
    ],
)
def test_a_wrong_plan_is_one_error_that_says_what_is_right(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        read_plan(plan_file(tmp_path, **changes))


@dataclass
class Scripted:
    """A station that takes one step of its deployment at each look."""

    states: tuple[str, ...] = ("DOWNLOADING", "SHADOW", "TRIAL", "SUCCEEDED")
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    running: str = OLD
    orders: list[str] = field(default_factory=list)

    def look(self) -> Seen:
        for job, message in self.jobs.items():
            path = ("ROLLED_BACK",) if job.endswith(".back") else self.states
            at = message["version"] - 1
            if message["state"] != "CANCELED" and at < len(path):
                message["state"], message["version"] = path[at], at + 2
                if path[at] == "SUCCEEDED":
                    self.running = NEW
                elif path[at] == "ROLLED_BACK":
                    self.running = OLD
        shown = {job: dict(message) for job, message in self.jobs.items()}
        return Seen(True, True, self.running, jobs=shown)

    def deploy(self, item: StationRecord, url: str, downgrade: bool) -> Answer:
        return self._take(item.job)

    def take_back(self, item: StationRecord, job: str) -> Answer:
        known = self.jobs.get(job)
        if known is not None and known["state"] not in ("SUCCEEDED", "ROLLED_BACK", "FAILED"):
            known["state"] = "CANCELED"
            return Answer(True)
        assert known is not None or job.endswith(".back"), "it would lose the bundle before"
        return self._take(job)

    def _take(self, job: str) -> Answer:
        if job not in self.jobs:
            self.orders.append(job)
            self.jobs[job] = {"jobId": job, "state": "QUEUED", "version": 1}
        return Answer(True)

    def close(self) -> None: ...


class Cut(Exception):
    """The process is killed here."""


class CutFolder(Folder):
    """Killed right after (or right before) its n-th write."""

    left = 1_000_000
    before = False

    def write(self, found: RolloutRecord) -> None:
        self.left -= 1
        if self.left < 0 and self.before:
            raise Cut
        super().write(found)
        if self.left < 0:
            raise Cut


def run(
    folder: Folder,
    plan: Path,
    stations: Mapping[str, Any],
    clock: Callable[[], float],
    at: Callable[[Runner], object] = lambda _: None,
) -> Runner:
    runner = Runner(folder, read_plan(plan), stations, lambda name: "/b.fsb", clock=clock)
    for _ in range(400):
        if runner.record.phase in OVER:
            return runner
        at(runner)
        runner.step()
    raise AssertionError(table(runner.record, runner.seen, runner.waits_for))


THREE: dict[str, Any] = {
    "stations": [{"name": "s1"}, {"name": "s2"}, {"name": "s3"}],
    "groups": [{"name": "canary", "stations": ["s1"]}, {"name": "all", "share": 1}],
    "gates": {},
}
BAD = ("DOWNLOADING", "SHADOW", "TRIAL", "ROLLED_BACK")


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    ("bad", "phase", "running"),
    [(False, "SUCCEEDED", [NEW] * 3), (True, "ROLLED_BACK", [OLD] * 3)],
)
def test_killed_at_any_write_it_ends_the_same(
    tmp_path: Path, before: bool, bad: bool, phase: str, running: list[str]
) -> None:
    plan = plan_file(tmp_path, **THREE)
    for left in range(200):
        folder = CutFolder(tmp_path / f"{left}")
        begun(folder, plan)
        stations = {
            "s1": Scripted(), "s2": Scripted(), "s3": Scripted(BAD) if bad else Scripted(),
        }  # fmt: skip
        clock = Clock()
        folder.left, folder.before = left, before
        try:
            found = run(folder, plan, stations, clock)
            assert left > 20, "it was cut off at every write"
            break
        except Cut:
            pass
        found = run(Folder(folder.path), plan, stations, clock)
        assert found.record.phase == phase, left
        assert [item.running for item in stations.values()] == running, left
        for name, item in stations.items():
            assert item.orders.count(f"t.{name}") == 1, "one deployment, whatever happened"


def test_an_abort_in_between_leaves_nothing_under_way(tmp_path: Path) -> None:
    plan = plan_file(tmp_path, **THREE)
    for at in range(40):
        folder = Folder(tmp_path / f"{at}")
        begun(folder, plan)
        stations = {name: Scripted() for name in ("s1", "s2", "s3")}
        looks = iter(range(1000))

        def ask(_: Runner, folder: Folder = folder, looks: Any = looks, at: int = at) -> None:
            if next(looks) == at:
                folder.ask(ABORT, {"by": "me", "back": True})

        found = run(folder, plan, stations, Clock(), ask)
        if found.record.phase == "SUCCEEDED":
            assert at > 8
            return
        assert found.record.phase == "ABORTED"
        assert [item.running for item in stations.values()] == [OLD] * 3, at


def test_a_station_that_was_never_ordered_is_back_however_late_it_is_looked_at(
    tmp_path: Path,
) -> None:
    class Away(Scripted):
        def look(self) -> Seen:
            return Seen(False)

    changes = {**THREE, "stations": [{"name": "s1"}], "groups": [{"name": "all", "share": 1}]}
    plan = plan_file(tmp_path, **{**changes, "gates": {"timeout_s": 1}})
    folder = Folder(tmp_path / "r")
    begun(folder, plan)
    slow = Clock()
    found = run(folder, plan, {"s1": Away()}, lambda: slow() + 5 * (slow.now - 1e9))
    item = found.record.station("s1")
    assert (item.step, item.code, item.failed) == ("BACK", "TOO_LATE", True)


def test_a_station_that_somebody_gives_another_bundle_counts_as_failed(tmp_path: Path) -> None:
    plan = plan_file(tmp_path, **{**THREE, "gates": {"wait_s": 30}})
    folder = Folder(tmp_path / "r")
    begun(folder, plan)
    stations = {name: Scripted() for name in ("s1", "s2", "s3")}

    def meddle(runner: Runner) -> None:
        if runner.record.station("s1").step == "DONE":
            stations["s1"].running = "c" * 64

    found = run(folder, plan, stations, Clock(), meddle)
    item = found.record.station("s1")
    assert (found.record.phase, item.code, item.step) == ("ROLLED_BACK", "NOT_KEPT", "FAILED")
    assert stations["s1"].orders == ["t.s1"], "what somebody else put there is left alone"
    assert stations["s2"].orders == []


def test_only_so_many_are_under_way_at_once(tmp_path: Path) -> None:
    plan = plan_file(tmp_path, groups=[{"name": "all", "share": 1}], at_once=2, gates={})
    folder = Folder(tmp_path / "r")
    begun(folder, plan)
    stations = {f"s{number}": Scripted() for number in range(1, 9)}
    most = []

    def count(runner: Runner) -> None:
        steps = [item.step for item in runner.record.stations]
        most.append(sum(step in ("ORDERED", "UNDER_WAY") for step in steps))

    assert run(folder, plan, stations, Clock(), count).record.phase == "SUCCEEDED"
    assert max(most) == 2


def test_the_file_server_goes_on_where_a_transfer_broke_off(tmp_path: Path) -> None:
    source = tmp_path / "b 1.fsb"
    source.write_bytes(bytes(range(256)) * 100)
    (tmp_path / "secret").write_text("x")
    with FileServer("http://127.0.0.1:0", [source]) as server:
        url = server.url(source)
        assert fetch.fetch(url, tmp_path / "all").read_bytes() == source.read_bytes()
        half = tmp_path / "half"
        half.write_bytes(source.read_bytes()[:10_000])
        came = []
        fetch.fetch(url, half, lambda done, total: came.append((done, total)))
        assert half.read_bytes() == source.read_bytes()
        assert came[-1] == (25_600, 25_600) and came[0][0] > 10_000
        fetch.fetch(url, half)  # complete: 416, and no harm
        part = urllib.request.Request(url, headers={"Range": "bytes=5-9"})
        with urllib.request.urlopen(part) as answer:
            assert (answer.status, answer.read()) == (206, bytes(range(5, 10)))
            assert answer.headers["Content-Range"] == "bytes 5-9/25600"
        for path in ("secret", "../secret", ""):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"{server.address}/{path}")
    with pytest.raises(ConfigError, match="cannot be served here"):
        FileServer("http://192.0.2.1:80", [source]).__enter__()


def test_two_that_begin_one_rollout_at_once_are_one(tmp_path: Path) -> None:
    plan = plan_file(tmp_path, **THREE)
    folder = Folder(tmp_path / "r")
    folder.path.mkdir()
    with folder.alone() as free:
        assert free
        with pytest.raises(ConfigError, match="another process begins"):
            begun(Folder(folder.path), plan)
    assert not folder.exists
    begun(folder, plan)
    with pytest.raises(ConfigError, match="was begun already"):
        begun(folder, plan)


@pytest.mark.parametrize(
    "changed",
    [
        {"stations": [{"name": "s1"}, {"name": "s2"}]},
        {"stations": [{"name": "s1"}, {"name": "s2"}, {"name": "s9"}]},
        {"groups": [{"name": "canary", "stations": ["s2"]}, {"name": "all", "share": 1}]},
        {"groups": [{"name": "all", "share": 1}]},
    ],
)
def test_a_plan_that_was_changed_in_the_folder_is_refused(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    folder = Folder(tmp_path / "r")
    begun(folder, plan_file(tmp_path, **THREE))
    plan = plan_file(tmp_path, **{**THREE, **changed})
    stations = {name: Scripted() for name in ("s1", "s2", "s3", "s9")}
    with pytest.raises(ConfigError, match="was changed after it began"):
        run(folder, plan, stations, Clock())
    assert not any(station.orders for station in stations.values())


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 50_000, '{"id": 5}', "\xff"])
def test_a_damaged_state_is_one_clear_error(tmp_path: Path, text: str) -> None:
    folder = Folder(tmp_path / "r")
    begun(folder, plan_file(tmp_path, **THREE))
    (folder.path / "state.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match="state of the rollout cannot be read"):
        folder.read()


def test_a_log_that_the_disk_does_not_take_stops_no_rollout(tmp_path: Path) -> None:
    plan = plan_file(tmp_path, **THREE)
    folder = Folder(tmp_path / "r")
    begun(folder, plan)
    (folder.path / "log.jsonl").mkdir()
    stations = {name: Scripted() for name in ("s1", "s2", "s3")}
    assert run(folder, plan, stations, Clock()).record.phase == "SUCCEEDED"


def test_what_a_station_says_leads_no_terminal_and_breaks_no_file(tmp_path: Path) -> None:
    class Liar(Scripted):
        def look(self) -> Seen:
            seen = super().look()
            lie = {"detail": "fine\x1b[2J\n\ud800\u202e", "code": "\x07"}
            return replace(seen, jobs={job: {**own, **lie} for job, own in seen.jobs.items()})

    plan = plan_file(tmp_path, **THREE)
    folder = Folder(tmp_path / "r")
    begun(folder, plan)
    told: list[str] = []
    stations = {"s1": Liar(BAD), "s2": Scripted(), "s3": Scripted()}
    runner = Runner(
        folder, read_plan(plan), stations, lambda name: "/b.fsb", clock=Clock(),
        told=lambda text, _: told.append(text),
    )  # fmt: skip
    while runner.record.phase not in OVER:
        runner.step()
    assert folder.read().station("s1").detail == "fine?[2J???"
    assert any("fine" in text for text in told) and all(text.isprintable() for text in told)


@pytest.mark.parametrize("name", ["conn", "birth", "job"])
@pytest.mark.parametrize(
    "body", [b"", b"5", b"[]", b"null", b"[" * 9999, b'"\xff"', b'{"schema": "state/1.0"}', b"{}"]
)
def test_what_is_no_message_at_a_broker_is_passed_over(name: str, body: bytes) -> None:
    config = MqttConfig(host="127.0.0.1", line="l1", station="s1")
    way = MqttWay(config, None, "me")
    before = way._seen
    way._take(topic_of(config, name) if name != "job" else f"{topic_of(config, 'job')}/j", body)
    assert way._seen == before


@pytest.mark.parametrize("wanted", [f"bytes={'9' * 5000}-", f"bytes=0-{'9' * 5000}", "bytes=-5"])
def test_ranges_that_are_none_get_the_whole_file(tmp_path: Path, wanted: str) -> None:
    source = tmp_path / "b.fsb"
    source.write_bytes(b"0123456789")
    with FileServer("http://127.0.0.1:0", [source]) as server:
        part = urllib.request.Request(server.url(source), headers={"Range": wanted})
        with urllib.request.urlopen(part, timeout=5) as answer:
            assert (answer.status, answer.read()) == (200, b"0123456789")


def test_the_table_says_where_everybody_is() -> None:
    first = StationRecord("s1", "canary", "t.s1", RELEASE, step="DONE", state="SUCCEEDED")
    first = replace(first, shadow=(20, 1), trial=(50, 2, 1, 0))
    other = StationRecord("s2", "all", "t.s2", RELEASE, step="UNDER_WAY", state="SHADOW")
    found = RolloutRecord("t", "test", 0.0, (first, replace(other, progress=0.4)), group=1)
    lines = table(found, {"s2": Seen(online=False)}, "a stick").split("\n")
    assert "1 of 20 differ" in lines[1] and "50: 2 FAIL, 1 UNSURE, 0 slow" in lines[1]
    assert "SHADOW 40 % (offline)" in lines[2]
    assert lines[3] == "t  RUNNING, group 2  waits for a stick"


class Terminal(io.StringIO):
    live = True

    def isatty(self) -> bool:
        return self.live


@pytest.mark.parametrize("live", [True, False])
def test_on_a_terminal_the_table_stays_below_the_news(live: bool) -> None:
    out = Terminal()
    out.live = live
    screen = Screen(out)
    item = StationRecord("s1", "all", "t.s1", RELEASE)
    found = RolloutRecord("t", "test", 0.0, (item,))
    screen.show(found, {}, "")
    screen.show(found, {}, "")
    drawn = out.getvalue()
    assert drawn.count("WAITING") == live, "once, as long as nothing changes"
    screen.news("order", "s1")
    screen.show(replace(found, phase="ABORTED"), {}, "")
    news = out.getvalue().removeprefix(drawn)
    assert news.startswith("\x1b[3A\x1b[J") == live, "its three lines make room"
    assert news.index("order") < news.index("ABORTED")
