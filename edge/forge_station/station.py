"""The station's only loop: trigger -> capture -> inspect -> store -> publish.

Composes the parts; nothing imports it but the command line. A part always ends in a verdict: what
goes wrong with one part becomes its ERROR verdict, and the loop goes on. A verdict counts as
delivered when the outbox has it on disk; the broker may be away.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from forge_station import version
from forge_station.assurance import drift as drift_watch
from forge_station.bundles import store as bundle_store
from forge_station.bundles.deploy import Seen
from forge_station.capture import fusion, structured_light
from forge_station.capture.base import PatternStack, Scan, Scanner, ScanSource, Trigger
from forge_station.capture.replay import Recording
from forge_station.config import Gates as GateLimits
from forge_station.config import StationConfig
from forge_station.contract.verdict import Outcome, Verdict
from forge_station.errors import ConfigError, InputError, OutboxError, StationError
from forge_station.evidence.case import Case, Decider
from forge_station.evidence.keeper import Item, Keeper
from forge_station.geometry import quality
from forge_station.journal import Journal
from forge_station.mes import report, streams
from forge_station.mes.credentials import Watch
from forge_station.mes.outbox import Outbox, OutboxFull
from forge_station.mes.publisher import Publisher
from forge_station.mes.stamp import utc_now, uuid7
from forge_station.opening import open_inspector
from forge_station.pipeline import Gates, Inspection, Inspector, Job
from forge_station.timing import Stopwatch
from forge_station.vlm import engine
from forge_station.warm import KeepWarm

log = logging.getLogger(__name__)

SERIAL_LENGTH = 200
"""Longest serial number that the messages to MES take."""


class PartInterruptedError(StationError):
    """The station was stopped, or went down, while a part was in work."""

    code: ClassVar[str] = "INTERRUPTED"


@dataclass(frozen=True)
class Done:
    """One part that went through. `warnings`: what could not be kept, never a lost verdict."""

    trigger: Trigger
    verdict: Verdict
    warnings: tuple[str, ...] = ()


def open_station_inspector(config: StationConfig, folder: Path | None = None) -> Inspector:
    """The inspector of a station file. The caller closes `inspector.model`.

    `folder`: of the bundle; None: the one that the file names, of a store the active one.
    """
    if config.fusion.refine:
        fusion.require()
    inspector = open_inspector(
        folder or bundle_store.in_use(config.bundle),
        overrides=config.thresholds,
        threads=config.runtime.threads,
        provider=config.runtime.provider,
        spinning=config.runtime.spinning,
        time_budget_s=config.runtime.time_budget_s,
        grid=config.runtime.grid,
        trusted_keys=config.trusted_keys,
        changed=config.changed_since_certificate,
        trust=config.trust,
    )
    return replace(inspector, fusion=config.fusion, gates=gates_of(config.gates))


def _open_others(config: StationConfig, stack: ExitStack) -> dict[str, Inspector]:
    """The bundles of products that have one of their own, open and warm; each bundle once."""
    found: dict[str, Inspector] = {}
    by_path: dict[Path, Inspector] = {}
    for part_number, path in config.product_bundles.items():
        if path not in by_path:
            opened = open_station_inspector(config, bundle_store.in_use(path))
            stack.callback(opened.model.close)
            opened.model.warm_up([opened.layout.sheet_size, opened.layout.surface_size])
            by_path[path] = opened
        found[part_number] = by_path[path]
    return found


def gates_of(limits: GateLimits) -> Gates:
    """The limits of a station file, where the decoder and the scene look for them."""
    scene = {name.name: getattr(limits, name.name) for name in fields(quality.Limits)}
    return Gates(
        structured_light.Limits(motion_px=limits.motion_px, blur_px=limits.blur_px),
        quality.Limits(**scene),
    )


def birth_of(inspector: Inspector) -> dict[str, Any]:
    """What the retained birth message says of the model, and where it was proved to run."""
    model = inspector.model
    return {
        "model": {
            "name": model.manifest.name,
            "version": model.manifest.version,
            "precision": model.manifest.precision,
            "provider": model.provider,
            "runtime": f"onnxruntime {engine.VERSION}",
        }
    }


@contextmanager
def open_station(
    config: StationConfig,
    scanner_of: Callable[[Trigger], Scanner | ScanSource],
    *,
    store: bool = True,
) -> Iterator[Station]:
    """Open what a station needs beside its scanner, quick things first; close it at the end.

    Its `config` differs where a free port was taken for the embedded broker. Raises StationError.
    """
    with ExitStack() as stack:
        if config.broker == "embedded":
            from forge_station.mes.broker import EmbeddedBroker

            broker = stack.enter_context(EmbeddedBroker(config.mqtt.host, config.mqtt.port))
            config = replace(config, mqtt=replace(config.mqtt, port=broker.port))
        limits = config.outbox_limits
        outbox = stack.enter_context(
            Outbox(
                config.outbox,
                max_bytes=limits.max_mb << 20,
                min_free_bytes=limits.min_free_mb << 20,
                keep_acked_s=limits.keep_days * 86_400.0,
                policies=streams.policies(limits.when_full),
            )
        )
        inspector = open_station_inspector(config)
        stack.callback(inspector.model.close)
        others = _open_others(config, stack)
        publisher = Publisher(outbox, config.mqtt, birth=birth_of(inspector))
        if config.broker != "none":
            stack.enter_context(publisher)
            stack.enter_context(Watch(config.mqtt, publisher.reconnect))
        yield Station(
            config,
            inspector,
            scanner_of,
            outbox,
            publisher,
            simulated=config.simulated,
            waiting=others,
            drift=_open_drift(config, stack),
            keeper=stack.enter_context(Keeper(config.evidence)) if store else None,
        )


def _open_drift(config: StationConfig, stack: ExitStack) -> drift_watch.Watch | None:
    """The drift watch of a station file; its state is stored when the stack is left."""
    if config.drift is None:
        return None
    found = drift_watch.Watch(config.drift, drift_watch.state_path(config.outbox))
    stack.callback(found.save)
    return found


class StationStoppedError(StationError):
    """A part came while a command had stopped the station."""

    code: ClassVar[str] = "STATION_STOPPED"


@dataclass
class Station:
    """A configured station. `scanner_of(trigger)` gives the scanner set to the trigger's product.

    Commands change it while it runs (`control.py`): `inspector` only while nobody holds `in_work`,
    which a part holds; `stopped` says why no part is inspected; `selected` is the product of parts
    whose trigger names none.

    `keeper` None: no evidence is kept (benchmarks). `journal` remembers the part in work over a
    crash. `hold`: called with the error while the outbox has no room; True: try again, False: give
    up, and the error is raised. None: give up at once.
    """

    config: StationConfig
    inspector: Inspector
    scanner_of: Callable[[Trigger], Scanner | ScanSource]
    outbox: Outbox
    publisher: Publisher
    simulated: bool = False
    keeper: Keeper | None = None
    journal: Journal | None = None
    hold: Callable[[OutboxError], bool] | None = None
    watcher: Callable[[Seen], None] | None = None
    """Told of each part and what it was judged from: a deployment compares and counts them."""
    bundle: Path | None = None
    """Folder of the main bundle; None: as the station file names it."""
    waiting: dict[str, Inspector] = field(default_factory=dict)
    """Open bundles that do not judge now: those of products of their own by part number, and the
    main one under "" while one of them judges."""
    judging: str = ""
    """Whose bundle `inspector` is: a part number of `product_bundles`; empty: the main one."""
    stopped: str | None = None
    drift: drift_watch.Watch | None = None
    """Sees every verdict; while it objects, no part is called PASS."""
    selected: str = ""
    in_work: threading.Lock = field(default_factory=threading.Lock)
    state: dict[str, Any] = field(default_factory=lambda: {"state": "PREOPERATIONAL"})
    """The state message as it was told last."""

    def __post_init__(self) -> None:
        if self.inspector.permit.checks_alone:
            raise ConfigError(
                "a station needs an inspector that asks for a certificate",
                expected="open_inspector without checks_alone",
                got="the checks alone",
            )

    @property
    def text(self) -> str:
        """Station, line and model in one line, for people."""
        manifest = self.inspector.model.manifest
        return (
            f"station {self.config.station}, line {self.config.line.line}, bundle {manifest.name} "
            f"{manifest.version} ({manifest.precision}, {self.inspector.model.provider})"
        )

    def run(self, triggers: Iterable[Trigger]) -> Iterator[Done]:
        """Inspect every trigger's part; each `Done` is on disk in the outbox when it is yielded.

        The model is warmed up before the first part, and kept warm while triggers are awaited.
        """
        model, layout = self.inspector.model, self.inspector.layout
        model.warm_up([layout.sheet_size, layout.surface_size])
        told = self._tell_mode()
        every_s = self.config.runtime.keep_warm_s
        with KeepWarm(lambda: self.inspector.model.warm_up(), every_s) as keep:
            for trigger in triggers:
                with keep.part():
                    done = self.inspect(trigger)
                yield done
                if told != self.inspector.permit.text:  # a certificate may expire while it runs
                    told = self._tell_mode()

    def _tell_mode(self) -> str:
        """The state message for MES, and the log: whether this station may say PASS, and why."""
        text, advisory = self.inspector.permit.text, self.inspector.permit.objection is not None
        self.tell(None)
        log.log(logging.WARNING if advisory else logging.INFO, "%s", text)
        return text

    def tell(self, objection: str | None) -> None:
        """The state message for MES. `objection`: why no part can be inspected now."""
        permit = self.inspector.permit
        state: dict[str, Any] = {"state": "OPERATIONAL", "mode": "READY", "text": permit.text}
        if self.stopped is not None:
            state = {**state, "mode": "INITIALIZED", "text": f"stopped: {self.stopped}"}
        if objection is not None:
            state = {"state": "ERROR", "text": objection}
        flags = {"advisory": permit.objection is not None}
        if self.stopped is not None:
            flags["stopped"] = True
        if self.config.mqtt.security == "insecure":
            flags["insecure"] = True
        self.state = {**state, "flags": flags}
        self.publisher.set_status("state", self.state)

    def change_over(self, part_number: str) -> None:
        """Let the bundle of this product judge from now on; the caller holds `in_work`. Both are
        open: nothing is loaded."""
        wanted = part_number if part_number in self.config.product_bundles else ""
        if wanted == self.judging:
            return
        self.waiting[self.judging] = self.inspector
        self.inspector, self.judging = self.waiting.pop(wanted), wanted
        self.publisher.add_birth(birth_of(self.inspector))
        self.tell(str(self.state["text"]) if self.state["state"] == "ERROR" else None)

    @property
    def main(self) -> Inspector:
        """That of `bundle` in the station file, which deployments exchange."""
        return self.inspector if not self.judging else self.waiting[""]

    @main.setter
    def main(self, inspector: Inspector) -> None:
        if self.judging:
            self.waiting[""] = inspector
        else:
            self.inspector = inspector

    def job_of(self, trigger: Trigger) -> Job:
        """A new job, its product still open."""
        return Job(
            result_id=uuid7(),
            serial=trigger.serial[:SERIAL_LENGTH] or "none",
            serial_source="counter" if trigger.serial else "none",
            product=None,
            begin_time=utc_now(),
            line=self.config.line.line,
            station=self.config.station,
            simulated=self.simulated,
            source=self.config.scanner.driver,
        )

    def inspect(self, trigger: Trigger) -> Done:
        """One part, from trigger to outbox."""
        with self.in_work:
            self._heed_drift()
            done = self._inspect(replace(trigger, part_number=trigger.part_number or self.selected))
            if self.drift is not None:
                try:
                    self.drift.part(done.verdict)
                except Exception as error:  # the verdict is out; what nobody watches is not passed
                    log.exception("part %s: the drift watch failed", trigger.serial)
                    self.drift.failed(error)
                self._heed_drift()
            return done

    def _heed_drift(self) -> None:
        """Take the permit back, or give it again, as the drift watch says."""
        if self.drift is None:
            return
        self.drift.obey()
        permit = self.inspector.permit
        if permit.withheld != self.drift.objection:
            permit = replace(permit, withheld=self.drift.objection)
            self.inspector = replace(self.inspector, permit=permit)

    def _inspect(self, trigger: Trigger) -> Done:
        job = self.job_of(trigger)
        serial = job.serial
        watch = Stopwatch()
        recorded: Recording | None = None
        judged_from: tuple[Sequence[Any], Mapping[str, Any]] = ((), {})
        if self.journal is not None:
            self.journal.begin(job, trigger.part_number)
        try:
            if serial != trigger.serial:
                raise InputError(
                    "the serial number of a trigger cannot be reported",
                    which=repr(serial[:40]),
                    expected=f"1 to {SERIAL_LENGTH} characters",
                    got=len(trigger.serial),
                )
            if self.stopped is not None:
                raise StationStoppedError("the station is stopped", got=self.stopped)
            product = self.config.line.product(trigger.part_number)
            job = replace(job, product=product)
            self.change_over(product.part_number)
            scanner = self.scanner_of(trigger)
            with watch.stage("capture"):
                stacks = scanner.capture(trigger)
            judged_from = (stacks, scanner.calibrations)
            recorded = _recording(stacks, scanner)
            found = self.inspector.inspect_stacks(job, stacks, scanner.calibrations, watch)
        except StationError as error:
            found = self.inspector.failed(job, error, watch)
        except Exception as error:  # the loop must go on: the part is an ERROR, with the cause
            log.exception("part %s: unexpected failure", trigger.serial)
            cause = StationError("the station failed", which=trigger.serial, got=repr(error))
            found = self.inspector.failed(job, cause, watch)
        done = self._deliver(job, trigger, found, watch, recorded)
        if self.watcher is not None and not self.judging:
            self.watcher(Seen(job, *judged_from, done.verdict))
        return done

    def interrupted(self, job: Job, part_number: str, why: str) -> Verdict:
        """Store the ERROR verdict of a part that is not inspected to its end.

        Harmless when its verdict is stored already: the first one of a result id counts.
        """
        if any(product.part_number == part_number for product in self.config.line.products):
            job = replace(job, product=self.config.line.product(part_number))
        cause = PartInterruptedError(
            "the part was not inspected to its end", which=job.serial, got=why
        )
        verdict = replace(self.inspector.failed(job, cause).verdict, end_time=utc_now())
        report.put_verdict(self.outbox, self.config.mqtt, verdict.to_dict(), sw_version=version())
        return verdict

    def _deliver(
        self,
        job: Job,
        trigger: Trigger,
        found: Inspection,
        watch: Stopwatch,
        recorded: Recording | None = None,
    ) -> Done:
        """Make the verdict durable first; the evidence may fail, the verdict may not."""
        with watch.stage("deliver"):
            found = self._stored(job, found, watch)
            verdict = found.verdict
            report.tell_last(self.publisher, self.config.mqtt, verdict.to_dict())
            if self.journal is not None:
                self.journal.end()
        verdict = replace(verdict, timings_ms=watch.timings_ms())
        warnings: tuple[str, ...] = ()
        try:
            if not self._keep(job, replace(found, verdict=verdict), recorded):
                warnings = ("evidence dropped: the disk does not keep up",)
        except Exception as error:  # the verdict is out; a fault of the evidence stops nothing
            log.exception("part %s: its evidence failed", trigger.serial)
            warnings = (f"evidence not kept: {error!r}",)
        for warning in warnings:
            log.warning("part %s: %s", trigger.serial, warning)
        log.info(
            "part %s product %s: %s %s in %.0f ms",
            trigger.serial,
            verdict.product,
            verdict.outcome,
            ",".join(reason.code for reason in verdict.reasons) or "-",
            verdict.timings_ms["total"],
        )
        return Done(trigger, verdict, warnings)

    def _keep(self, job: Job, found: Inspection, recorded: Recording | None) -> bool:
        """Hand the evidence over; False: dropped. It is drawn and written beside the line."""
        if self.keeper is None:
            return True
        decider = Decider.of(self.inspector, self.config.runtime.threads)
        stack = recorded if self.keeper.wants_stack(found.verdict.outcome) else None
        case = Case.of(job, found, decider)
        return self.keeper.keep(Item(found, self.inspector.layout, case, stack))

    def _stored(self, job: Job, found: Inspection, watch: Stopwatch) -> Inspection:
        """The inspection whose verdict is in the outbox. A part that had to wait for room there
        was held by the line, so it is an ERROR, whatever was found."""
        while True:
            found = replace(found, verdict=replace(found.verdict, end_time=utc_now()))
            try:
                record = found.verdict.to_dict()
                report.put_verdict(self.outbox, self.config.mqtt, record, sw_version=version())
                return found
            except OutboxError as error:
                if self.hold is None or not self.hold(error):
                    raise
                if found.verdict.outcome is not Outcome.ERROR:
                    found = self.inspector.failed(job, OutboxFull("no room", got=error), watch)


def _recording(
    stacks: Sequence[PatternStack] | Sequence[Scan], scanner: Scanner | ScanSource
) -> Recording | None:
    """The pattern images as they can be stored; None of heads that measure by themselves."""
    raw = tuple(stack for stack in stacks if isinstance(stack, PatternStack))
    if not raw or len(raw) != len(stacks):
        return None
    return Recording(raw, dict(scanner.calibrations))
