"""A deployment ends with the better bundle active, whatever happens on the way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, get_args

import pytest

from forge_station.bundles import archive, deploy, fetch, local
from forge_station.bundles.jobs import BEFORE_ACTIVE, FINAL, JobRecord, State
from forge_station.bundles.store import BundleStore
from forge_station.contract.error import ContractError
from forge_station.errors import BundleError
from forge_station.mes import payloads
from tests.bundles import rig
from tests.bundles.deploy_rig import ANYBODY, QUICK, WAYS, FakeStation

ACTIVE_STATES = ("ACTIVATING", "TRIAL")


def bundle(folder: Path, release: int, says: str = "PASS", **changes: Any) -> str:
    """A bundle file; what its model says of every part stands in its version."""
    place = folder / f"bundle{release}{says.replace('@', '')}"
    rig.write(place, release=release, version=f"1.{release}.0-{says}", **changes)
    archive.pack(place, out := folder / f"{place.name}.fsb")
    return str(out)


def new_store(root: Path, folder: Path) -> BundleStore:
    """A store in which release 1 has proved itself."""
    store = BundleStore.create(root, "l1")
    name = store.install(Path(bundle(folder, 1)), ANYBODY).name
    store.activate(name, ANYBODY, good=True)
    return store


@pytest.fixture
def store(tmp_path: Path) -> BundleStore:
    return new_store(tmp_path / "store", tmp_path)


def release_of(station: FakeStation) -> int:
    active = station.store.active
    assert active is not None
    counter = active.manifest.release_counter
    assert station.in_use.model.manifest.release_counter == counter, "pointer and station agree"
    return counter


def deployed(station: FakeStation, url: str, **order: Any) -> JobRecord:
    with station.deployer:
        station.deployer.deploy("job-1", url, **order)
        return station.until_over("job-1")


def test_a_good_bundle_goes_through_every_state(store: BundleStore, tmp_path: Path) -> None:
    station = FakeStation(store.root)
    first = station.in_use
    job = deployed(station, bundle(tmp_path, 2))
    assert [state for _, state in station.told] == [
        "QUEUED", *BEFORE_ACTIVE[1:], *ACTIVE_STATES, "SUCCEEDED",
    ]  # fmt: skip
    assert job.version == 9, "one more with each state"
    assert (release_of(station), job.release_counter) == (2, 2)
    assert first.model.closed == 1 and station.in_use.model.closed == 0
    assert station.in_use.model.warmed == 1, "warm before its first part"
    assert store.active is not None and store.active.good


@pytest.mark.parametrize(
    ("says", "limits", "code"),
    [
        ("FAIL", QUICK, "SHADOW_DISAGREES"),
        ("UNSURE", QUICK, "SHADOW_DISAGREES"),
        ("PASS", replace(QUICK, golden_required=True), "GOLDEN_MISSING"),
    ],
)
def test_a_worse_bundle_never_judges_a_part(
    store: BundleStore, tmp_path: Path, says: str, limits: Any, code: str
) -> None:
    station = FakeStation(store.root, limits)
    first = station.in_use
    job = deployed(station, bundle(tmp_path, 2, says))
    assert (job.state, job.code) == ("FAILED", code)
    assert station.in_use is first and release_of(station) == 1
    assert first.model.closed == 0
    assert all(item.model.closed == 1 for item in station.opened if item is not first)


@pytest.mark.parametrize("says", ["FAIL", "UNSURE", "ERROR", "PASS@100"])
def test_a_bundle_that_is_bad_on_trial_is_taken_back(
    store: BundleStore, tmp_path: Path, says: str
) -> None:
    station = FakeStation(store.root, replace(QUICK, shadow_parts=0, trial_parts=5))
    first = station.in_use
    for _ in range(12):
        station.part()  # what is usual
    job = deployed(station, bundle(tmp_path, 2, says))
    assert (job.state, job.code) == ("ROLLED_BACK", "TRIAL_FAILED")
    assert station.in_use is first and release_of(station) == 1
    assert job.tally.parts == 5
    assert [item.model.closed for item in station.opened] == [0, 1]
    assert station.part() == "PASS"


def cut(path: str) -> str:
    content = Path(path).read_bytes()
    Path(path).write_bytes(content[:1700])  # a tar ends in kilobytes of zeros
    return path


def damaged(path: str) -> str:
    content = Path(path).read_bytes().replace(b'"release": 2', b'"release": 7')
    Path(path).write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("make", "order", "said"),
    [
        (lambda folder: cut(bundle(folder, 2)), {}, "Copy it again|incomplete|not a bundle"),
        (lambda folder: damaged(bundle(folder, 2)), {}, "was changed"),
        (lambda folder: bundle(folder, 2, line="l9"), {}, "another product line"),
        (lambda folder: bundle(folder, 0), {}, "release 1 or later"),
        (lambda folder: bundle(folder, 1, "FAIL"), {}, "another bundle has run here"),
        (lambda folder: bundle(folder, 2), {"sha256": "0" * 64}, "than the one that was ordered"),
        (lambda folder: str(folder / "nothing.fsb"), {}, "there is no bundle"),
        (lambda folder: bundle(folder, 2, files={"a.so": b"x"}), {}, "does not open"),
    ],
)
def test_a_refused_bundle_leaves_the_running_one_alone(
    store: BundleStore, tmp_path: Path, make: Any, order: Any, said: str
) -> None:
    station = FakeStation(store.root)
    job = deployed(station, make(tmp_path), **order)
    assert job.state == "REJECTED"
    assert any(word in job.detail for word in said.split("|")), job.detail
    assert release_of(station) == 1 and len(station.opened) == 1


def test_a_signed_order_lets_an_older_release_in(store: BundleStore, tmp_path: Path) -> None:
    job = deployed(FakeStation(store.root), bundle(tmp_path, 0), allow_downgrade=0)
    assert job.state == "SUCCEEDED"


def test_an_order_is_one_deployment_and_there_is_one_at_a_time(
    store: BundleStore, tmp_path: Path
) -> None:
    station = FakeStation(store.root)
    url = bundle(tmp_path, 2)
    with station.deployer:
        first = station.deployer.deploy("job-1", url)
        assert station.deployer.deploy("job-1", "/elsewhere").url == first.url
        with pytest.raises(ContractError, match="another deployment is under way"):
            station.deployer.deploy("job-2", url)
        with pytest.raises(ContractError, match="another deployment is under way"):
            station.deployer.rollback("job-3")
        assert station.until_over("job-1").state == "SUCCEEDED"
        with pytest.raises(ContractError, match="no place"):
            station.deployer.deploy("job-4", "ftp://x/y")


def test_commands_take_a_deployment_back(store: BundleStore, tmp_path: Path) -> None:
    station = FakeStation(store.root, replace(QUICK, trial_parts=100_000))
    with station.deployer:
        station.deployer.deploy("one", bundle(tmp_path, 2))
        while ("one", "SHADOW") not in station.told:
            time.sleep(0.01)  # no part comes: it waits
        station.deployer.rollback("one")
        assert station.until_over("one").state == "CANCELED"
        assert release_of(station) == 1

        station.deployer.deploy("two", bundle(tmp_path, 3))
        station.run_until(lambda: ("two", "TRIAL") in station.told)
        station.deployer.rollback("two")
        assert station.until_over("two").state == "ROLLED_BACK"
        assert release_of(station) == 1


def test_back_to_the_bundle_before_by_command(store: BundleStore, tmp_path: Path) -> None:
    station = FakeStation(store.root)
    with station.deployer:
        station.deployer.deploy("one", bundle(tmp_path, 2))
        assert station.until_over("one").state == "SUCCEEDED"
        station.deployer.rollback("back")
        assert station.until_over("back").state == "ROLLED_BACK"
        assert release_of(station) == 1
        station.deployer.rollback("back-2")
        assert station.until_over("back-2").state == "FAILED"
        assert release_of(station) == 1


def test_a_deployment_that_takes_too_long_is_given_up(store: BundleStore, tmp_path: Path) -> None:
    station = FakeStation(store.root, replace(QUICK, timeout_s=1.0))
    with station.deployer:
        station.deployer.deploy("slow", bundle(tmp_path, 2))
        deadline = time.monotonic() + 20
        while ("slow", "TIMED_OUT") not in station.told:  # no part comes
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert release_of(station) == 1


def test_what_was_counted_is_told(store: BundleStore, tmp_path: Path) -> None:
    station = FakeStation(store.root, replace(QUICK, shadow_disagree=1.0, trial_fail_share=1.0))
    job = deployed(station, bundle(tmp_path, 2, "FAIL"))
    assert job.shadow.parts == job.shadow.different == 3
    assert job.message()["shadow"] == {"parts": 3, "different": 3}
    assert job.message()["trial"] == {"parts": 3, "fail": 3, "unsure": 0, "slow": 0}
    assert job.code == "TRIAL_FAILED"
    payloads.status_body("job", "a/b", job.message())  # as its schema says


def test_a_running_station_finds_the_order_that_a_stick_left(
    store: BundleStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploy, "LOOK_S", 0.01)
    url = Path(bundle(tmp_path, 2))
    station = FakeStation(store.root)
    with station.deployer:
        left = local.order(store.root, url, "stick-1", ANYBODY)
        assert (left.state, left.release_counter) == ("STAGED", 2)
        with pytest.raises(BundleError, match="another deployment is under way"):
            local.order(store.root, url, "stick-2", ANYBODY)
        url.unlink()
        assert station.until_over("stick-1").state == "SUCCEEDED"
    assert release_of(station) == 2
    assert local.order(store.root, url, "stick-1", ANYBODY).state == "SUCCEEDED", "told again"


def test_a_stick_gets_in_nothing_that_a_command_would_not(
    store: BundleStore, tmp_path: Path
) -> None:
    url = Path(bundle(tmp_path, 2))
    other = local.order(store.root, url, "j-1", ANYBODY, sha256="0" * 64)
    assert (other.state, "another bundle" in other.detail) == ("REJECTED", True)
    cut(str(url))
    assert local.order(store.root, url, "j-2", ANYBODY).state == "REJECTED"
    assert release_of(FakeStation(store.root)) == 1


@pytest.fixture
def in_trial(store: BundleStore, tmp_path: Path) -> BundleStore:
    """Its station went down in the trial of release 2."""
    station = FakeStation(store.root, replace(QUICK, trial_parts=100_000))
    with station.deployer:
        station.deployer.deploy("job-1", bundle(tmp_path, 2))
        station.run_until(lambda: ("job-1", "TRIAL") in station.told)
    assert release_of(station) == 2
    return store


def test_a_trial_goes_on_after_a_start_and_ends_after_too_many(in_trial: BundleStore) -> None:
    limits = replace(QUICK, trial_parts=100_000)
    for start in (1, 2):
        station = FakeStation(in_trial.root, limits)
        assert release_of(station) == (2 if start == 1 else 1)
    job = station.deployer.jobs.find("job-1")
    assert job is not None and job.state == "ROLLED_BACK"
    assert station.restarted is not None and "taken back" in station.restarted


def test_a_bundle_on_trial_that_does_not_open_is_taken_back(in_trial: BundleStore) -> None:
    station = FakeStation(in_trial.root, refuses="1.2.0-PASS")
    assert release_of(station) == 1
    job = station.deployer.jobs.find("job-1")
    assert job is not None and (job.state, job.code) == ("ROLLED_BACK", "TRIAL_FAILED")


def killed(repository: Path, url: str, stores: list[Path]) -> dict[str, int]:
    """Name of the store's folder -> how the process ended there."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.bundles.deploy_rig", url, *map(str, stores)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=repository,
        env={**os.environ, "PYTHONPATH": "edge:."},
    )
    assert done.returncode == 0, done.stderr
    return {line.split()[0]: int(line.split()[1]) for line in done.stdout.splitlines()}


def test_kill_9_in_every_state_resumes_or_keeps_the_old_bundle(
    tmp_path: Path, repository: Path
) -> None:
    states = get_args(State)
    assert set(states) == {*BEFORE_ACTIVE, *ACTIVE_STATES, *FINAL}
    stores = [new_store(tmp_path / state, tmp_path / f"{state}.files") for state in states]
    url = bundle(tmp_path, 2)
    ends = killed(repository, url, [store.root for store in stores])
    assert ends == dict.fromkeys(states, -9)
    for state, store in zip(states, stores, strict=True):
        station = FakeStation(store.root)
        assert release_of(station) == (2 if state in ("TRIAL", "SUCCEEDED") else 1), state
        with station.deployer:
            end = state if state in FINAL else "SUCCEEDED"
            assert station.until_over("job-1").state == end, state
        assert release_of(station) == (2 if end == "SUCCEEDED" else 1)
        assert not list((store.root / "incoming").iterdir()), "nothing half is left"


@pytest.mark.parametrize("way", ["ROLLED_BACK", "TAKEN_BACK"])
def test_kill_9_between_any_two_changes_of_a_way_back_ends_it_all_the_same(
    tmp_path: Path, repository: Path, way: str
) -> None:
    root = new_store(tmp_path / "store", tmp_path).root
    stores = [tmp_path / f"{way}.{number}" for number in range(1, 24)]
    for store in stores:
        shutil.copytree(root, store, symlinks=True)
    ends = list(killed(repository, bundle(tmp_path, 2), stores).values())
    cuts = ends.index(0)
    assert cuts > 15 and set(ends[:cuts]) == {-9} and set(ends[cuts:]) == {0}
    for number, store in enumerate(stores[:cuts], 1):
        station = FakeStation(store, WAYS[way].limits)
        with station.deployer:
            asked = next((store / "jobs").glob("*.back"), None) is not None
            if way == "TAKEN_BACK" and not asked:  # the command was not answered: it is sent again
                station.deployer.rollback("job-1")
                end = station.until_over("job-1").state
                assert end in ("CANCELED", "ROLLED_BACK"), number
            else:
                assert station.until_over("job-1").state == "ROLLED_BACK", number
        assert release_of(station) == 1, number
        assert not list((store / "incoming").iterdir()), "nothing half is left"


@pytest.mark.parametrize("release", [1, 3])
def test_a_bundle_that_a_person_made_active_in_a_trial_ends_it_and_stays(
    in_trial: BundleStore, tmp_path: Path, release: int
) -> None:
    """Parts that another bundle judged prove nothing of the one on trial."""
    third = in_trial.install(Path(bundle(tmp_path, 3)), ANYBODY).name
    if release == 1:
        in_trial.rollback(ANYBODY)
    else:
        in_trial.activate(third, ANYBODY)
    station = FakeStation(in_trial.root)
    with station.deployer:
        job = station.until_over("job-1")
    assert (job.state, release_of(station)) == ("ROLLED_BACK", release)
    assert "another bundle was made the active one" in job.detail


class Server(BaseHTTPRequestHandler):
    """Serves one file; the first answer breaks off in the middle."""

    content = b""
    ranges: list[str | None]
    broken = 1

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        type(self).ranges.append(wanted)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        if start >= len(self.content):
            self.send_error(416)
            return
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(self.content) - start))
        self.end_headers()
        end = len(self.content) // 2 if type(self).broken else len(self.content)
        type(self).broken = 0
        self.wfile.write(self.content[start:end])

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    Server.content = Path(bundle(tmp_path, 2)).read_bytes()
    Server.ranges, Server.broken = [], 1
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{found.server_address[1]}/b.fsb"
        found.shutdown()
        thread.join()


def test_a_transfer_that_breaks_off_goes_on_where_it_was(store: BundleStore, server: str) -> None:
    job = deployed(FakeStation(store.root), server)
    assert job.state == "SUCCEEDED"
    half = len(Server.content) // 2
    assert Server.ranges == [None, f"bytes={half}-"]


def test_a_complete_file_is_not_fetched_again(server: str, tmp_path: Path) -> None:
    target = tmp_path / "x.fsb"
    target.write_bytes(Server.content)
    fetch.fetch(server, target)
    assert target.read_bytes() == Server.content


def test_a_server_that_does_not_have_it_ends_the_deployment(
    store: BundleStore, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "do_GET", lambda self: self.send_error(404))
    job = deployed(FakeStation(store.root), server)
    assert (job.state, "HTTP 404" in job.detail) == ("FAILED", True)


def test_a_path_that_is_not_absolute_is_no_place() -> None:
    for url in ("bundle.fsb", "http:///x", "ssh://host/x", "file://elsewhere/x"):
        with pytest.raises(BundleError, match="no place"):
            fetch.local(url)
