"""Evidence beside the line: never waited for, bounded, thinned while parts go through, told."""

from __future__ import annotations

import errno
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba", reason="part clouds come from the simulator, extra demo")

from forge_station.capture.base import PatternStack
from forge_station.capture.patterns import PatternSpec
from forge_station.capture.replay import Recording
from forge_station.config import EvidenceConfig
from forge_station.contract.verdict import Outcome, ScanSummary
from forge_station.evidence import folder as folder_module
from forge_station.evidence import keeper as module
from forge_station.evidence.case import Case, Decider
from forge_station.evidence.folder import Folder
from forge_station.evidence.index import Query
from forge_station.evidence.keeper import Item, Keeper
from forge_station.mes.alarms import Alarms
from forge_station.mes.health import EvidenceFacts, Health, Sources, Watch
from forge_station.mes.outbox import Outbox
from forge_station.mes.schema import faults
from forge_station.mes.topics import MqttConfig
from forge_station.pipeline import Inspector, Job
from tests.station.certificates import certified
from tests.station.fake_model import FakeModel, part_cloud
from tests.station.test_station import LINE, NUT, bench, triggers  # noqa: F401  a fixture

CONFIG = MqttConfig(line="l1", station="s1")


def item(number: int, stack: Recording | None = None) -> Item:
    inspector = Inspector(FakeModel({"A": (NUT, 0.98)}), permit=certified())  # type: ignore[arg-type]
    job = Job(f"01a22c2f-3f83-7e64-9cc4-{number:012x}", f"SN-{number}", LINE.products[0])
    found = inspector.inspect_parts(job, [part_cloud(NUT)], ScanSummary(points=1), [])
    return Item(found, inspector.layout, Case.of(job, found, Decider.of(inspector, 1)), stack)


@pytest.fixture
def settings(tmp_path: Path) -> EvidenceConfig:
    return EvidenceConfig(tmp_path / "parts", min_free_gb=0.0, pass_share=0.0)


class Stuck(Folder):
    """A disk that takes nothing until it is told to."""

    def __init__(self, settings: EvidenceConfig) -> None:
        super().__init__(settings.folder, settings)
        self.go, self.entered = threading.Event(), threading.Event()

    def add(self, kept):
        self.entered.set()
        assert self.go.wait(60)
        return super().add(kept)


def test_a_slow_disk_makes_nobody_wait_and_the_queue_does_not_grow(settings):
    disk = Stuck(settings)
    one = item(0)
    with Keeper(settings, disk) as keeper:
        assert keeper.keep(one) and disk.entered.wait(60)
        taken = [keeper.keep(one) for _ in range(20)]
        assert taken == [True] * module.MOST_PARTS + [False] * (20 - module.MOST_PARTS)
        facts = keeper.facts()
        assert (facts.waiting, facts.dropped) == (module.MOST_PARTS, 12)
        assert "does not keep up" in str(facts.fault)
        disk.go.set()
        assert keeper.drain(60)
        assert keeper.facts().fault is None and keeper.facts().dropped == 12


def test_pattern_images_are_given_up_before_a_part_is(settings, monkeypatch):
    images = np.zeros((1, 1, 100, 100), np.uint8)
    stack = Recording((PatternStack(images, (1.0,), PatternSpec(), "", "a"),), {})
    one = item(0)
    monkeypatch.setattr(module, "MOST_BYTES", 3 * one.bytes + 100)
    disk = Stuck(settings)
    with Keeper(settings, disk) as keeper:
        keeper.keep(one)
        assert disk.entered.wait(60)
        keeper.keep(one)
        keeper.keep(one)
        assert keeper.keep(replace(one, stack=stack)), "fits without them"
        assert "pattern images" in str(keeper.facts().fault) and keeper.facts().dropped == 0
        disk.go.set()
        assert keeper.drain(60)
    assert not list(settings.folder.glob("*.stack"))


def test_the_end_does_not_wait_for_a_disk_that_hangs(settings, caplog):
    disk = Stuck(settings)
    keeper = Keeper(settings, disk)
    with keeper:
        keeper.keep(item(0))
        assert disk.entered.wait(60)
        keeper.close(wait_s=0.05)
        assert "not written" in caplog.text
        disk.go.set()
    assert not keeper.keep(item(1)), "closed"


def test_the_quota_is_reached_while_parts_go_through(bench, settings, monkeypatch):  # noqa: F811
    config = bench.config(evidence=replace(settings, quota_gb=0.001))
    station = bench.make(["fine"] * 12, config=config, store=True)
    outcomes = []
    for done in station.run(triggers(12)):
        outcomes.append(done.verdict.outcome)
        assert station.keeper is not None and station.keeper.drain(60)
    assert outcomes == [Outcome.PASS] * 12 and len(bench.stored()) == 12, "inspected and published"
    facts = station.keeper.facts()
    assert facts.dropped == 0 and facts.fault is None
    assert facts.bytes <= 1_000_000 and facts.deleted == {"PASS": 12 - facts.parts}
    assert 1 <= facts.parts < 12
    with Folder(settings.folder) as folder:
        left = [row.serial for row in folder.find(Query())]
    assert left == [f"s1-{number:06d}" for number in range(13 - facts.parts, 13)], "oldest first"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_refuses_is_told_and_over_when_it_takes_again(settings, monkeypatch, code):
    write = folder_module.write_whole

    def refused(path: Path, content: bytes) -> None:
        raise OSError(code, "refused")

    with Keeper(settings) as keeper:
        monkeypatch.setattr(folder_module, "write_whole", refused)
        assert keeper.keep(item(0)) and keeper.drain(60)
        assert keeper.facts().dropped == 1 and "refused" in str(keeper.facts().fault)
        monkeypatch.setattr(folder_module, "write_whole", write)
        assert keeper.keep(item(1)) and keeper.drain(60)
        assert keeper.facts().fault is None and keeper.facts().parts == 1


def test_what_a_crash_left_is_found_while_no_part_comes(settings):
    with Keeper(settings) as keeper:
        keeper.keep(item(0))
        assert keeper.drain(60)
    (settings.folder / folder_module.INDEX).unlink()
    with Keeper(settings) as keeper:
        until = time.monotonic() + 60
        while keeper.facts().parts != 1 and time.monotonic() < until:
            time.sleep(0.02)
        assert keeper.facts().parts == 1


def test_deletions_and_losses_are_published_and_alarmed(tmp_path):
    facts = [EvidenceFacts(3, 900, 1000, {"PASS": 4})]
    now = [0.0]
    with Outbox(tmp_path / "outbox.sqlite", ballast_bytes=0) as outbox:
        alarms = Alarms(outbox, CONFIG)
        health = Health(CONFIG, Sources(outbox, evidence=lambda: facts[0]))
        watch = Watch(alarms, CONFIG, monotonic=lambda: now[0])

        def look() -> set[str]:
            vitals = health.look()
            watch.judge(vitals)
            said = health.fields(vitals, [])["evidence"]
            assert said["deleted"] == dict(facts[0].deleted) and said["quotaBytes"] == 1000
            return {alarm.code for alarm in alarms.active()} & {
                "EVIDENCE_NOT_STORED",
                "EVIDENCE_THINNED",
            }

        assert look() == set()
        facts[0] = replace(facts[0], deleted={"PASS": 9})
        assert look() == set(), "PASS is there to be thinned"
        facts[0] = replace(facts[0], deleted={"PASS": 9, "FAIL": 1}, fault="no room", dropped=2)
        assert look() == {"EVIDENCE_NOT_STORED", "EVIDENCE_THINNED"}
        facts[0] = replace(facts[0], fault=None)
        now[0] = 10.0
        assert look() == {"EVIDENCE_THINNED"}
        now[0] = 20.0 + 3600.0
        assert look() == set()


def test_the_schema_of_health_takes_the_figures():
    said = {"parts": 1, "bytes": 2, "quotaBytes": 3, "deleted": {"PASS": 1, "stacks": 2},
            "dropped": 0, "waiting": 0}  # fmt: skip
    wrong = {**said, "deleted": {"PASS": -1}}
    found = [
        [item for item in faults({"evidence": each}, "health-1.0.json") if "evidence" in str(item)]
        for each in (said, wrong)
    ]
    assert found[0] == [] and found[1]
