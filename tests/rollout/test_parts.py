"""Of a rollout without a broker: plans, decisions cut off anywhere, the file server, the table."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from forge_station import private_key
from forge_station.bundles import fetch
from forge_station.bundles.jobs import JobRecord, Tally
from forge_station.errors import ConfigError
from forge_station.mes.topics import MqttConfig, topic_of
from forge_station.rollout import stick
from forge_station.rollout.plan import read_plan
from forge_station.rollout.record import OVER, Folder, Release, RolloutRecord, StationRecord
from forge_station.rollout.runner import ABORT, UNSIGNED, Runner
from forge_station.rollout.serve import FileServer
from forge_station.rollout.table import Screen, table
from forge_station.rollout.ways import Answer, MqttWay, Seen, StickWay

NEW, OLD = "b" * 64, "a" * 64
RELEASE = Release("b.fsb", "nuts", "1.2.0", 2, NEW)


def plan_file(folder: Path, **changes: Any) -> Path:
    (folder / "b.fsb").write_bytes(b"x")
    plan: dict[str, Any] = {
        "name": "test",
        "bundle": "b.fsb",
        "url": "https://files/{file}",
        "mqtt": {"host": "127.0.0.1", "line": "l1"},
        "stations": [{"name": f"s{number}"} for number in range(1, 9)],
        "groups": [
            {"name": "canary", "stations": ["s3"]},
            {"name": "quarter", "share": 0.25, "gates": {"approval": True}},
            {"name": "all", "share": 1},
        ],
        "gates": {"max_failed": 0.5, "wait_s": 60},
        **changes,
    }
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(plan))
    return path


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


class Clock:
    now = 1e9

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


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


def begun(folder: Folder, plan: Path) -> None:
    members = read_plan(plan).members()
    stations = tuple(
        StationRecord(name, group, f"t.{name}", RELEASE)
        for group, names in members.items()
        for name in names
    )
    folder.create(plan.read_bytes(), RolloutRecord("t", "test", 0.0, stations))


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


@pytest.mark.parametrize(
    "report",
    [
        {"version": 1}, {"jobId": "j", "version": 1, "state": 5}, {"jobId": "j", "version": "x"},
        {"jobId": "j", "version": 1, "state": "TRIAL", "progress": "half"},
        {"jobId": "j", "version": 1, "state": "TRIAL", "progress": float("nan")},
        {"jobId": "j", "version": float("inf"), "state": "TRIAL"},
        {"jobId": "j", "version": 1, "state": "TRIAL", "trial": {"parts": "many"}},
        [], None, "x", {"schema": "conn/1.0", "state": "ONLINE", "reason": "started"},
    ],
)  # fmt: skip
def test_a_report_that_is_none_is_not_taken_from_a_stick(tmp_path: Path, report: object) -> None:
    good = {"jobId": "good", "state": "SHADOW", "version": 3}
    for name, content in (("good", json.dumps(good)), ("j", json.dumps(report)), ("k", "[" * 9999)):
        place = stick.place_of(tmp_path, name)
        place.mkdir()
        (place / stick.REPORT).write_text(content)
    digest = hashlib.sha256(json.dumps(good).encode()).hexdigest()
    wanted = stick.Report(good, "it is not signed", digest=digest)
    assert stick.read_reports(tmp_path, None) == {"good": wanted}


def signed_report(folder: Path, key: private_key.PrivateKey | None, **changes: Any) -> JobRecord:
    """What a station leaves on its stick."""
    job = JobRecord("t.s1", "file:///b.fsb", 1e9, state="SUCCEEDED", version=9, sha256=NEW)
    job = replace(job, **changes)
    place = stick.place_of(folder, job.id)
    place.mkdir(exist_ok=True)
    stick.write_report(place, job, key)
    return job


def forge(folder: Path, **changes: Any) -> None:
    path = stick.place_of(folder, "t.s1") / stick.REPORT
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def digest_on(folder: Path) -> str:
    body = (stick.place_of(folder, "t.s1") / stick.REPORT).read_bytes()
    return hashlib.sha256(body).hexdigest()


KEY, OTHER = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
PUBLIC = private_key.public_half(KEY)


def test_a_signed_report_is_the_word_of_its_station(tmp_path: Path) -> None:
    job = signed_report(tmp_path, KEY, tally=Tally(3), before="b")
    found = stick.read_reports(tmp_path, PUBLIC)["t.s1"]
    assert (found.doubt, found.forged) == ("", False)
    assert found.message == {**job.message(), "sha256": NEW}


@pytest.mark.parametrize(
    ("changes", "doubt", "forged"),
    [
        ({"state": "FAILED"}, "altered after it was signed", True),
        ({"trial": {"parts": 9, "fail": 0, "unsure": 0, "slow": 0}}, "altered", True),
        ({"sha256": OLD}, "altered", True),
        ({"more": 1}, "altered", True),
        ({"sig": {"keyId": PUBLIC.id, "alg": "ed25519", "value": "AA=="}}, "altered", True),
        ({"sig": {"keyId": "0" * 16, "value": ""}}, "signed with the key 0000", True),
        ({"sig": {}}, "signed with the key None", True),
        ({"sig": None}, "not signed", False),
    ],
)
def test_a_report_that_was_altered_is_not_its_word(
    tmp_path: Path, changes: dict[str, Any], doubt: str, forged: bool
) -> None:
    signed_report(tmp_path, KEY)
    forge(tmp_path, **changes)
    found = stick.read_reports(tmp_path, PUBLIC)["t.s1"]
    assert doubt in found.doubt and found.forged == forged


@pytest.mark.parametrize("sig", [5, "x", [], {"keyId": PUBLIC.id, "value": "A"}])
def test_what_is_no_signature_is_passed_over(tmp_path: Path, sig: object) -> None:
    signed_report(tmp_path, KEY)
    forge(tmp_path, sig=sig)
    found = stick.read_reports(tmp_path, PUBLIC)
    assert not found or found["t.s1"].forged


def test_a_report_beside_that_of_its_deployment_replaces_nothing(tmp_path: Path) -> None:
    job = signed_report(tmp_path, KEY)
    for name in ("a", "z"):
        place = stick.place_of(tmp_path, name)
        place.mkdir()
        stick.write_report(place, replace(job, state="FAILED"))
    assert stick.read_reports(tmp_path, PUBLIC)["t.s1"].message["state"] == "SUCCEEDED"


@pytest.mark.parametrize("begun", [False, True])
def test_no_order_is_laid_beside_that_of_another_rollout_that_is_not_over(
    tmp_path: Path, begun: bool
) -> None:
    """`begun`: the process was killed while it wrote its own."""
    (bundle := tmp_path / "b.fsb").write_bytes(b"x")
    way, other = StickWay(tmp_path, bundle, PUBLIC), StationRecord("s1", "all", "t.s1", RELEASE)
    assert way.deploy(other, "", False).taken
    own = replace(other, job="u.s1")
    if begun:
        stick.place_of(tmp_path, own.job).mkdir()
    answer = way.deploy(own, "", False)
    assert (answer.code, answer.later) == ("NOT_ALONE", True)
    assert "got one of rollout t" in answer.detail
    signed_report(tmp_path, OTHER, state="ROLLED_BACK")
    assert way.deploy(own, "", False).later, "a forged end is none"
    signed_report(tmp_path, KEY, state="ROLLED_BACK")
    assert way.deploy(replace(own, name="s2", job="u.s2"), "", False).taken, "another station"
    assert way.deploy(own, "", False).taken


def test_a_key_that_the_plan_does_not_name_proves_nothing(tmp_path: Path) -> None:
    signed_report(tmp_path, KEY)
    found = stick.read_reports(tmp_path, None)["t.s1"]
    assert "the plan names none" in found.doubt and not found.forged


@pytest.mark.parametrize(
    ("signer", "named", "changes", "counts"),
    [
        (KEY, False, {}, True),
        (None, False, {}, False),
        (None, True, {}, True),
        (OTHER, True, {}, False),
        (KEY, True, {"sha256": OLD}, False),
        (None, True, {"sha256": OLD}, False),
    ],
)
def test_only_a_report_that_counts_ends_the_rollout(
    tmp_path: Path, signer: Any, named: bool, changes: dict[str, Any], counts: bool
) -> None:
    """`named`: a person asked for the report of s1 though it is not signed."""
    (tmp_path / "m").mkdir()
    stations = [{"name": "s1", "stick": "m", "key": base64.b64encode(PUBLIC.raw).decode()}]
    plan = plan_file(tmp_path, stations=stations, groups=[{"name": "all", "share": 1}], gates={})
    folder = Folder(tmp_path / "r")
    begun(folder, plan)
    found = read_plan(plan)
    way = StickWay(tmp_path / "m", found.bundle_of(found.stations[0]), found.stations[0].key)
    runner = Runner(folder, found, {"s1": way}, lambda name: "", clock=Clock())
    runner.step()
    signed_report(tmp_path / "m", signer, **changes)
    if named:
        folder.ask(UNSIGNED + "s1", {"by": "me", "report": digest_on(tmp_path / "m")})
    for _ in range(3):
        runner.step()
    item = runner.record.station("s1")
    assert (runner.record.phase == "SUCCEEDED") == counts == (item.state == "SUCCEEDED")
    assert item.unsigned == (counts and signer is None)
    assert counts or "its report does not count" in item.detail


def test_who_asks_for_an_unsigned_report_gets_that_one_and_none_later(tmp_path: Path) -> None:
    """And what counted still does, in another process too."""
    (tmp_path / "m").mkdir()
    stations = [{"name": "s1", "stick": "m", "key": base64.b64encode(PUBLIC.raw).decode()}]
    plan = plan_file(tmp_path, stations=stations, groups=[{"name": "all", "share": 1}], gates={})
    folder = Folder(tmp_path / "r")
    begun(folder, plan)
    found = read_plan(plan)
    way = StickWay(tmp_path / "m", found.bundle_of(found.stations[0]), found.stations[0].key)
    news: list[str] = []

    def resumed() -> StationRecord:
        runner = Runner(
            folder, found, {"s1": way}, lambda name: "",
            told=lambda text, name: news.append(text), clock=Clock(),
        )  # fmt: skip
        for _ in range(3):
            runner.step()
        return runner.record.station("s1")

    resumed()
    signed_report(tmp_path / "m", None, state="SHADOW", version=5)
    digest = digest_on(tmp_path / "m")
    folder.ask(UNSIGNED + "s1", {"by": "me", "report": digest})
    assert resumed().state == "SHADOW" and folder.asked(UNSIGNED + "s1") is None
    assert news[-1] == f"SHADOW  (report {digest[:16]}... counts unsigned: me asked)"
    assert resumed().state == "SHADOW" and "counts unsigned" in news[-1], "no news"
    signed_report(tmp_path / "m", OTHER)
    assert "signed with the key" in resumed().detail
    forge(tmp_path / "m", sig=None)
    for _ in range(2):
        item = resumed()
        assert (item.step, item.state) == ("UNDER_WAY", "SHADOW")
        assert news[-1].startswith("its report does not count: it is not signed"), "each time"
        news.clear()
    folder.ask(UNSIGNED + "s1", {"by": "me"})
    assert resumed().state == "SHADOW", "as an earlier version left it"
    folder.ask(UNSIGNED + "s1", {"by": "me", "report": digest_on(tmp_path / "m")})
    assert resumed().step == "DONE"


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
