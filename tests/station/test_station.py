"""The loop: every trigger ends in a verdict in the outbox, whatever happens on the way."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba", reason="the simulator needs the extra demo")

from forge_station.capture.base import PatternStack, Trigger
from forge_station.capture.calibration import Calibration
from forge_station.capture.sim import SimulatedScanner
from forge_station.config import EvidenceConfig, Runtime, SimScanner, StationConfig
from forge_station.contract.catalogue import by_id
from forge_station.contract.spec import LineSpec, Product
from forge_station.contract.verdict import Outcome, ScanSummary, Verdict
from forge_station.errors import BundleError, CaptureError, ConfigError, OutboxError
from forge_station.evidence.keeper import Keeper
from forge_station.geometry.pose import PartCloud
from forge_station.mes import payloads
from forge_station.mes.outbox import Outbox
from forge_station.mes.publisher import Publisher
from forge_station.mes.topics import MqttConfig
from forge_station.permit import CHECKS_ALONE, Permit
from forge_station.pipeline import Inspection, Inspector, Job
from forge_station.sim import fasteners, rest_pose, scanner
from forge_station.station import Done, Station, birth_of, open_station_inspector
from forge_station.timing import Stopwatch
from tests.station.certificates import NOW, certified
from tests.station.fake_model import FakeModel, part_cloud

NUT = "hex_nut M8"
LINE = LineSpec("l1", (Product("NUT", "single", ("workpiece", "surface"), {NUT: 1}),))


@dataclass
class Script:
    """A scanner that does what is next in its list: raise, or hand out nothing but its name."""

    steps: list[BaseException | str]
    captured: list[Trigger] = field(default_factory=list)

    @property
    def calibrations(self) -> Mapping[str, Calibration]:
        return {}

    def capture(self, trigger: Trigger) -> list[PatternStack]:
        self.captured.append(trigger)
        step = self.steps.pop(0)
        if isinstance(step, BaseException):
            raise step
        return []

    def close(self) -> None: ...


@dataclass(frozen=True)
class PartInspector(Inspector):
    """Sees one nut in place of decoded stacks."""

    part: PartCloud | None = None

    def inspect_stacks(
        self,
        job: Job,
        stacks: Sequence[PatternStack],
        calibrations: Mapping[str, Calibration],
        watch: Stopwatch | None = None,
    ) -> Inspection:
        part = self.part or part_cloud(NUT)
        return self.inspect_parts(job, [part], ScanSummary(points=len(part.points)), [], watch)


@dataclass
class Bench:
    """A station on a temporary folder; `make` builds it around a scanner and an inspector."""

    folder: Path
    outbox: Outbox
    stack: ExitStack = field(default_factory=ExitStack)

    def config(self, **changes: object) -> StationConfig:
        config = StationConfig(
            line=LINE,
            bundle=self.folder / "bundle",
            scanner=SimScanner("sim"),
            outbox=self.folder / "outbox.sqlite",
            evidence=EvidenceConfig(self.folder / "evidence"),
            mqtt=MqttConfig(line="l1", station="s1"),
            broker="none",
        )
        return replace(config, **changes)  # type: ignore[arg-type]

    def make(
        self,
        steps: list[BaseException | str],
        *,
        inspector: Inspector | None = None,
        config: StationConfig | None = None,
        scanner_of: Callable[[Trigger], Script] | None = None,
        store: bool = False,
    ) -> Station:
        config = config or self.config()
        script = Script(steps)
        return Station(
            config,
            inspector or PartInspector(FakeModel({"A": (NUT, 0.98)}), permit=certified()),  # type: ignore[arg-type]
            scanner_of or (lambda trigger: script),
            self.outbox,
            Publisher(self.outbox, config.mqtt),
            simulated=True,
            keeper=self.keep(config) if store else None,
        )

    def keep(self, config: StationConfig) -> Keeper:
        """A keeper that writes until the test ends."""
        keeper = Keeper(config.evidence)
        self.stack.enter_context(keeper)
        return keeper

    def stored(self) -> list[dict[str, object]]:
        """Bodies of all verdicts in the outbox, oldest first."""
        return [json.loads(row.body) for row in self.outbox.fetch("verdict", 0, 100)]


@pytest.fixture
def bench(tmp_path):
    with Outbox(tmp_path / "outbox.sqlite", ballast_bytes=0) as outbox, ExitStack() as stack:
        yield Bench(tmp_path, outbox, stack)


def triggers(count: int, part_number: str = "NUT") -> list[Trigger]:
    return [Trigger(f"s1-{n:06d}", part_number) for n in range(1, count + 1)]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CaptureError("no answer from the head"), "CAPTURE_FAILED"),
        (ValueError("a bug in a driver"), "STATION_ERROR"),
        (MemoryError(), "STATION_ERROR"),
        (ZeroDivisionError(), "STATION_ERROR"),
    ],
)
def test_a_failing_scanner_gives_an_error_verdict_and_the_loop_goes_on(bench, error, code):
    station = bench.make([error, "fine", error, "fine"])
    done = list(station.run(triggers(4)))
    outcomes = [item.verdict.outcome for item in done]
    assert outcomes == [Outcome.ERROR, Outcome.PASS, Outcome.ERROR, Outcome.PASS]
    assert [body["verdict"] for body in bench.stored()] == ["ERROR", "PASS", "ERROR", "PASS"]
    (reason,) = done[0].verdict.reasons
    assert reason.code == code
    assert done[0].verdict.product == "NUT"


def test_an_unexpected_failure_names_the_part_and_the_cause(bench, caplog):
    (done,) = bench.make([ValueError("phase is a string")]).run(triggers(1))
    text = done.verdict.reasons[0].text
    assert "s1-000001" in text
    assert "ValueError('phase is a string')" in text
    assert "Traceback" in caplog.text


def test_stopping_the_station_is_not_swallowed(bench):
    with pytest.raises(KeyboardInterrupt):
        list(bench.make([KeyboardInterrupt()]).run(triggers(1)))


def test_an_unknown_part_number_is_an_error_that_names_the_known_ones(bench):
    (done,) = bench.make(["fine"]).run([Trigger("s1-1", "BOLT")])
    assert done.verdict.outcome is Outcome.ERROR
    assert "NUT" in done.verdict.reasons[0].text


def test_a_scanner_that_cannot_be_opened_is_an_error(bench):
    def broken(trigger: Trigger) -> Script:
        raise CaptureError("no head", which=trigger.part_number)

    (done,) = bench.make([], scanner_of=broken).run(triggers(1))
    assert done.verdict.reasons[0].code == "CAPTURE_FAILED"


def test_every_verdict_is_in_the_outbox_before_it_is_yielded(bench):
    station = bench.make(["fine"] * 3)
    for number, done in enumerate(station.run(triggers(3)), start=1):
        rows = bench.outbox.fetch("verdict", 0, 10)
        assert len(rows) == number
        assert rows[-1].id == done.verdict.result_id
        assert json.loads(rows[-1].body)["partId"] == done.trigger.serial


def test_nothing_is_captured_before_it_is_asked_for(bench):
    """The consumer sets the pace: part two is not scanned while part one is being handled."""
    script = Script(["fine"] * 2)
    station = bench.make([], scanner_of=lambda trigger: script)
    running = station.run(triggers(2))
    next(running)
    assert len(script.captured) == 1


def test_result_ids_are_unique_and_times_in_order(bench):
    done = list(bench.make(["fine"] * 3).run(triggers(3)))
    verdicts = [item.verdict for item in done]
    assert len({verdict.result_id for verdict in verdicts}) == 3
    assert all(verdict.begin_time <= verdict.end_time for verdict in verdicts)
    assert verdicts[0].end_time <= verdicts[1].begin_time
    assert all({"capture", "deliver", "total"} <= set(v.timings_ms) for v in verdicts)
    assert verdicts[0].simulated
    assert (verdicts[0].station, verdicts[0].line) == ("s1", "l1")


def test_an_outbox_that_cannot_store_stops_the_station(bench):
    """Going on would lose verdicts."""
    station = bench.make(["fine"] * 2)
    running = station.run(triggers(2))
    next(running)
    bench.outbox.close()
    with pytest.raises(OutboxError):
        next(running)


def test_evidence_is_stored_beside_the_verdict(bench):
    station = bench.make(["fine"], store=True)
    (done,) = station.run(triggers(1))
    assert done.warnings == () and station.keeper is not None and station.keeper.drain(60)
    files = {path.name.partition(".")[2]: path for path in (bench.folder / "evidence").glob("s1-*")}
    assert sorted(files) == [
        "case.npz", "input.json", "png", "sheet.png", "surface-A.png", "verdict.json"
    ]  # fmt: skip
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert Verdict.from_dict(json.loads(files["verdict.json"].read_text())) == done.verdict


def test_evidence_that_cannot_be_written_is_told_and_stops_nothing(bench, caplog):
    (bench.folder / "full").write_text("a file where a folder should be")
    config = bench.config(evidence=EvidenceConfig(bench.folder / "full" / "evidence"))
    station = bench.make(["fine"] * 2, config=config, store=True)
    done = list(station.run(triggers(2)))
    assert [item.verdict.outcome for item in done] == [Outcome.PASS] * 2
    assert station.keeper is not None and station.keeper.drain(60)
    facts = station.keeper.facts()
    assert facts.dropped == 2 and "evidence not written" in str(facts.fault)
    assert "evidence not written" in caplog.text
    assert len(bench.stored()) == 2


def test_a_picture_that_cannot_be_drawn_stops_nothing(bench):
    """The verdict is out already: a fault of the drawing must not stop the loop."""
    part = part_cloud(NUT)
    broken = replace(part, points=np.full_like(part.points, np.nan))

    @dataclass(frozen=True)
    class Broken(PartInspector):
        def inspect_stacks(self, job, stacks, calibrations, watch=None):
            found = super().inspect_stacks(job, stacks, calibrations, watch)
            return replace(found, parts=(broken,))

    inspector = Broken(FakeModel({"A": (NUT, 0.98)}), permit=certified())  # type: ignore[arg-type]
    station = bench.make(["fine"] * 2, inspector=inspector, store=True)
    assert [item.verdict.outcome for item in station.run(triggers(2))] == [Outcome.PASS] * 2
    assert station.keeper is not None and station.keeper.drain(60)
    assert station.keeper.facts().dropped == 2
    assert "not drawn" in str(station.keeper.facts().fault)


@pytest.mark.parametrize(
    ("serial", "reported", "outcome"),
    [
        ("", "none", Outcome.ERROR),
        ("x" * 300, "x" * 200, Outcome.ERROR),
        ("Stück 7/äß\n", "Stück 7/äß\n", Outcome.PASS),
    ],
)
def test_a_serial_that_mes_would_not_take_is_an_error_not_the_end(bench, serial, reported, outcome):
    done = list(bench.make(["fine"] * 2).run([Trigger(serial, "NUT"), *triggers(1)]))
    assert [item.verdict.outcome for item in done] == [outcome, Outcome.PASS]
    assert done[0].verdict.serial == reported
    assert [body["verdict"] for body in bench.stored()] == [outcome, Outcome.PASS]
    if outcome is Outcome.ERROR:
        assert done[0].verdict.reasons[0].code == "INPUT_WRONG"


def test_a_cloud_with_two_parts_of_a_single_is_a_wrong_count(bench):
    @dataclass(frozen=True)
    class Two(PartInspector):
        def inspect_stacks(self, job, stacks, calibrations, watch=None):
            parts = [part_cloud(NUT), part_cloud(NUT, 1)]
            return self.inspect_parts(job, parts, ScanSummary(points=1), [], watch)

    model = FakeModel({"A": (NUT, 0.98), "B": (NUT, 0.98)})
    (done,) = bench.make(["fine"], inspector=Two(model)).run(triggers(1))  # type: ignore[arg-type]
    assert done.verdict.outcome is Outcome.FAIL
    assert [reason.code for reason in done.verdict.reasons] == ["WRONG_COUNT"]


def test_images_of_a_simulated_head_become_a_pass(bench):
    """Pattern images -> decoder -> parts -> verdict -> outbox, only the model is a script."""
    rng = np.random.default_rng(5)
    mesh = fasteners.build(by_id(NUT), rng)
    mesh = rest_pose.settle(mesh.transformed(rest_pose.rest_poses(mesh)[0].rotation))
    rig = scanner.rig(scanner.scale_for(30.0, 30.0, 10.0))
    head = SimulatedScanner(lambda trigger: [mesh], rig, seed=1)
    inspector = Inspector(FakeModel({"A": (NUT, 0.98)}), permit=certified())  # type: ignore[arg-type]
    station = bench.make([], inspector=inspector, scanner_of=lambda trigger: head, store=True)
    (done,) = station.run(triggers(1))
    assert (done.verdict.outcome, done.verdict.reasons) == (Outcome.PASS, ())
    assert done.verdict.scan.poses == 4
    assert done.verdict.scan.calibration is not None
    stages = ["capture", "decode", "fuse", "scene", "gate", "gauge", "views", "read", "judge"]
    assert [*done.verdict.timings_ms][:9] == stages
    assert station.keeper is not None and station.keeper.drain(60)
    assert station.keeper.facts().parts == 1


def test_a_dark_scan_is_an_error_not_a_pass(bench):
    rig = scanner.rig(0.2)[:2]

    class Dark(SimulatedScanner):
        def capture(self, trigger: Trigger) -> list[PatternStack]:
            return [replace(s, images=np.zeros_like(s.images)) for s in super().capture(trigger)]

    head = Dark(lambda trigger: [], rig, seed=1)
    inspector = Inspector(FakeModel())  # type: ignore[arg-type]
    (done,) = bench.make([], inspector=inspector, scanner_of=lambda t: head).run(triggers(1))
    assert done.verdict.outcome is Outcome.ERROR
    assert {"NO_DATA", "TOO_DARK"} & {reason.code for reason in done.verdict.reasons}


def test_a_station_without_its_bundle_says_so_before_the_first_part(bench):
    with pytest.raises(BundleError, match="bundle"):
        open_station_inspector(bench.config())


def test_done_is_what_a_line_of_the_demo_needs(bench):
    (done,) = bench.make(["fine"]).run(triggers(1))
    assert isinstance(done, Done)
    assert done.trigger.serial == done.verdict.serial


@pytest.fixture
def told(monkeypatch) -> list[dict[str, object]]:
    """The state messages that the station sets, each held against its schema."""
    found: list[dict[str, object]] = []

    def set_status(self, name, fields):
        payloads.status_body(name, "a/b/c/d/e", fields)
        if name == "state":
            found.append(dict(fields))

    monkeypatch.setattr(Publisher, "set_status", set_status)
    return found


def test_an_advisory_station_says_so_everywhere_and_passes_nothing(bench, told, caplog):
    permit = Permit(refusal="the bundle has no certificate.json")
    inspector = PartInspector(FakeModel({"A": (NUT, 0.98)}), permit=permit)  # type: ignore[arg-type]
    (done,) = bench.make(["fine"], inspector=inspector).run(triggers(1))
    assert done.verdict.outcome is Outcome.UNSURE
    assert [reason.code for reason in done.verdict.reasons] == ["NO_CERTIFICATE"]
    (body,) = bench.stored()
    assert body["certification"]["mode"] == "advisory" and body["checks"]["certificate"] == "UNSURE"
    (state,) = told
    assert state["flags"] == {"advisory": True} and "no certificate.json" in state["text"]
    assert "ADVISORY" in caplog.text


def test_a_certificate_that_expires_on_the_way_ends_the_passes_and_is_told(bench, told):
    now = [NOW]
    permit = replace(certified(), clock=lambda: now[0])

    def coming() -> Iterator[Trigger]:
        first, second = triggers(2)
        yield first
        now[0] += timedelta(days=400)
        yield second

    inspector = PartInspector(FakeModel({"A": (NUT, 0.98)}), permit=permit)  # type: ignore[arg-type]
    done = list(bench.make(["fine"] * 2, inspector=inspector).run(coming()))
    assert [item.verdict.outcome for item in done] == [Outcome.PASS, Outcome.UNSURE]
    assert [state["flags"] for state in told] == [{"advisory": False}, {"advisory": True}]
    passed = bench.stored()[0]["certification"]
    assert passed["mode"] == "certified" and passed["score"] < passed["limitPass"]


def test_a_station_refuses_an_inspector_that_asks_for_no_certificate(bench):
    inspector = PartInspector(FakeModel({}), permit=CHECKS_ALONE)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="asks for a certificate"):
        bench.make([], inspector=inspector)


def test_a_run_begins_with_a_warm_model_of_the_pictures_sizes(bench):
    inspector = PartInspector(FakeModel({"A": (NUT, 0.98)}), permit=certified())  # type: ignore[arg-type]
    config = bench.config(runtime=Runtime(keep_warm_s=0.01))
    run = bench.make(["part", "part"], inspector=inspector, config=config).run(triggers(2))
    next(run)
    layout = inspector.layout
    assert inspector.model.warmed[0] == (layout.sheet_size, layout.surface_size)
    until = time.monotonic() + 30
    while len(inspector.model.warmed) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    assert inspector.model.warmed[1:3] == [(), ()], "kept warm while the next trigger is awaited"
    assert [done.verdict.outcome for done in run] == [Outcome.PASS]


def test_the_birth_message_says_where_the_model_runs():
    model = birth_of(PartInspector(FakeModel({"A": (NUT, 0.98)})))["model"]  # type: ignore[arg-type]
    assert model["provider"] == "script"
    assert model["runtime"].startswith("onnxruntime 1.")
