"""Deployments in a station: by command, beside the loop, and told to the MES."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba", reason="the simulator needs the extra demo")

from forge_station import control, run
from forge_station.bundles import archive
from forge_station.bundles.jobs import JobRecord, Jobs
from forge_station.bundles.settings import ReleaseConfig
from forge_station.bundles.store import BundleStore
from forge_station.bundles.trust import Trust
from forge_station.capture.base import Trigger
from forge_station.contract.error import ContractError
from forge_station.contract.spec import LineSpec, Product
from forge_station.control import Control, deployer_of
from forge_station.errors import ModelError
from forge_station.mes.outbox import Outbox
from forge_station.mes.topics import topic_of
from forge_station.station import Station
from forge_station.vlm.bundle_files import read_manifest
from tests.bundles import rig
from tests.station.certificates import certified
from tests.station.fake_model import FakeModel
from tests.station.test_station import NUT, Bench, PartInspector

LIMITS = ReleaseConfig(unsigned=True, golden_required=False, shadow_parts=0, trial_parts=2)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Outbox(tmp_path / "outbox.sqlite", ballast_bytes=0) as outbox:
        yield Bench(tmp_path, outbox)


@pytest.fixture
def store(tmp_path: Path) -> BundleStore:
    store = BundleStore.create(tmp_path / "bundle", "l1")
    rig.write(tmp_path / "b1", release=1)
    trust = Trust(unsigned=True)
    store.activate(store.install(tmp_path / "b1", trust).name, trust, good=True)
    return store


def opened(folder: Path) -> PartInspector:
    model = FakeModel({"A": (NUT, 0.98)})
    model.manifest = read_manifest(folder)  # type: ignore[misc]
    return PartInspector(model, permit=certified())  # type: ignore[arg-type]


@pytest.fixture
def station(bench: Bench, store: BundleStore, monkeypatch: pytest.MonkeyPatch) -> Station:
    monkeypatch.setattr(control, "open_station_inspector", lambda config, folder: opened(folder))
    active = store.active
    assert active is not None
    config = bench.config(release=LIMITS)
    return bench.make(["ok"] * 500, config=config, inspector=opened(active.folder))


def test_a_bundle_comes_by_command_and_every_step_is_told(
    bench: Bench, station: Station, tmp_path: Path
) -> None:
    rig.write(tmp_path / "b2", release=2, version="2.0.0")
    archive.pack(tmp_path / "b2", tmp_path / "b2.fsb")
    deployer = deployer_of(station)
    assert deployer is not None
    station.watcher = deployer.part
    does = Control(station, deployer=deployer).handlers()
    first = station.inspector
    with deployer:
        with pytest.raises(ContractError, match="url"):
            does["deploy"]({"jobId": "job-2"})
        answer = does["deploy"]({"jobId": "job-2", "url": str(tmp_path / "b2.fsb")})
        assert answer is not None and answer["jobId"] == "job-2"
        names, deadline = [], time.monotonic() + 60
        while not (job := deployer.jobs.find("job-2")) or not job.over:
            assert time.monotonic() < deadline
            done = station.inspect(Trigger(f"p{len(names)}", "NUT"))
            assert done.verdict.model is not None
            names.append(done.verdict.model.version)
    assert job.state == "SUCCEEDED", job.detail
    assert names == sorted(names) and set(names[-2:]) == {"2.0.0"}, "each names its bundle"
    assert first.model.closed == 1  # type: ignore[attr-defined]
    topic = topic_of(station.config.mqtt, "job", "job-2")
    told = json.loads(station.publisher._retained[topic])
    assert (told["state"], told["model"]["releaseCounter"]) == ("SUCCEEDED", 2)
    (audit,) = [json.loads(row.body) for row in bench.outbox.fetch("audit", 0, 9)]
    assert (audit["action"], audit["outcome"]) == ("deploy", "SUCCEEDED")
    assert station.publisher._birth["model"]["version"] == "2.0.0"


def test_a_station_with_a_plain_folder_takes_no_deployment(bench: Bench) -> None:
    station = bench.make(["ok"])
    assert deployer_of(station) is None
    assert not {"deploy", "rollback"} & set(Control(station).handlers())


def test_a_bundle_on_trial_that_does_not_open_is_replaced_at_the_start(
    bench: Bench, store: BundleStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = store.active
    assert before is not None
    rig.write(tmp_path / "b2", release=2)
    trust = Trust(unsigned=True)
    name = store.install(tmp_path / "b2", trust).name
    store.activate(name, trust)
    jobs = Jobs(store.root / "jobs")
    jobs.write(JobRecord("j", "/x", time.time(), state="TRIAL", bundle=name, before=before.name))
    tried = []

    def open_inspector(config: Any, folder: Path | None = None) -> PartInspector:
        active = store.active
        assert active is not None
        tried.append(active.name)
        if active.name == name:
            raise ModelError("the provider does not run the graph")
        return opened(active.folder)

    monkeypatch.setattr("forge_station.station.open_station_inspector", open_inspector)
    config = replace(bench.config(release=LIMITS), outbox=tmp_path / "other.sqlite", broker="none")
    lines: list[str] = []

    class Out:
        def write(self, text: str) -> None:
            lines.append(text)

        def flush(self) -> None: ...

    runner = run.Runner(config, Out())  # type: ignore[arg-type]
    with runner._open_station(lambda trigger: None) as station:  # type: ignore[arg-type,return-value]
        assert station.inspector.model.manifest.release_counter == 1
    assert tried == [name, before.name]
    assert "taken back" in "".join(lines)
    found = jobs.find("j")
    assert found is not None and found.state == "ROLLED_BACK"


TWO = LineSpec(
    "l1",
    (
        Product("NUT", "single", ("workpiece",), {NUT: 1}),
        Product("OTHER", "single", ("workpiece",), {"hex_nut M10": 1}),
    ),
)


def test_a_product_with_a_bundle_of_its_own_is_judged_by_it(
    bench: Bench, station: Station, tmp_path: Path
) -> None:
    rig.write(tmp_path / "own", release=9, name="other", version="9.0.0")
    config = replace(station.config, line=TWO, product_bundles={"OTHER": tmp_path / "own"})
    own, main = opened(tmp_path / "own"), station.inspector
    station = replace(station, config=config, waiting={"OTHER": own})
    seen: list[str] = []
    station.watcher = lambda part: seen.append(part.job.serial)

    def judged_by(part_number: str) -> str:
        done = station.inspect(Trigger(f"{part_number}-{len(seen)}", part_number))
        assert done.verdict.model is not None
        return done.verdict.model.version

    assert [judged_by(name) for name in ("NUT", "OTHER", "OTHER", "NUT")] == [
        "1.0.0", "9.0.0", "9.0.0", "1.0.0",
    ]  # fmt: skip
    assert len(seen) == 2, "a deployment watches the main bundle alone"
    Control(station).handlers()["selectRecipe"]({"productId": "OTHER"})
    assert station.inspector is own and station.main is main
    assert station.publisher._birth["model"]["version"] == "9.0.0"
    rig.write(tmp_path / "b3", release=3, version="3.0.0")
    station.main = opened(tmp_path / "b3")
    assert (judged_by(""), judged_by("NUT")) == ("9.0.0", "3.0.0")


def test_a_bundle_for_a_product_that_is_not_made_here_is_refused(bench: Bench) -> None:
    with pytest.raises(ContractError, match=r"product_bundles\.BOLT"):
        bench.config(product_bundles={"BOLT": Path("/x")})
