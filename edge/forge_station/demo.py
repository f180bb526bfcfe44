"""The demo: simulated trays through the whole station, then truth against verdict.

Composes broker, scanner and station. The simulated scanner projects patterns and the station
decodes them; nothing is handed over but camera images. Needs the extra `demo`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

import numpy as np

from forge_station.capture.base import Scanner, Trigger
from forge_station.capture.replay import ReplayScanner
from forge_station.config import ReplayScanner as ReplayConfig
from forge_station.config import SimScanner, StationConfig
from forge_station.contract.catalogue import CATALOGUE
from forge_station.contract.spec import Product
from forge_station.contract.verdict import Outcome, Verdict
from forge_station.errors import ConfigError
from forge_station.mes.outbox import Outbox
from forge_station.mes.publisher import Publisher
from forge_station.station import Done, Station, birth_of, open_station_inspector
from forge_station.timing import by_stage

_DRAIN_S = 20.0


@dataclass
class SimulatedLine:
    """Trays by serial number, and the scanner whose field is set to each tray's product."""

    config: StationConfig
    settings: SimScanner
    trays: dict[str, Any] = field(default_factory=dict)
    scanners: dict[str, Any] = field(default_factory=dict)

    def warm_up(self) -> None:
        """Compile the simulator's loops (seconds, on the first run only) before a part waits."""
        from forge_station.sim import fasteners, scanner

        part = fasteners.build(CATALOGUE[0])
        pose = scanner.rig(0.3, image_size=(64, 64))[0]
        scanner.simulate([part], pose, np.random.default_rng(0), exposures=(1.0,))

    def triggers(self, count: int, first: int = 1) -> Iterator[Trigger]:
        """One trigger a part; products in turn, right and wrong trays at random."""
        from forge_station.sim import trays

        products = self.config.line.products
        for number in range(first, first + count):
            rng = np.random.default_rng([self.settings.seed, number])
            product = products[(number - 1) % len(products)]
            wrong = bool(rng.random() < self.settings.wrong_share)
            serial = f"{self.config.station}-{number:06d}"
            self.trays[serial] = trays.make(product, rng, wrong=wrong)
            yield Trigger(serial, product.part_number)
            # The truth is kept for the summary; the shapes of a long run would fill the memory.
            self.trays[serial] = replace(self.trays[serial], meshes=())

    def scanner_of(self, trigger: Trigger) -> Scanner:
        """The simulated head, set to the product's field; made once a product."""
        from forge_station.capture.sim import SimulatedScanner
        from forge_station.sim import scanner

        product = self.config.line.product(trigger.part_number)
        if product.part_number not in self.scanners:
            width, depth, height = product.field_mm or self._field_of(product)
            scale = scanner.scale_for(
                width, depth, height, self.settings.poses, self.settings.image_size
            )
            self.scanners[product.part_number] = SimulatedScanner(
                lambda trigger: self.trays[trigger.serial].meshes,
                scanner.rig(scale, self.settings.poses, self.settings.image_size),
                seed=self.settings.seed,
                exposures=self.settings.exposures,
            )
        found: Scanner = self.scanners[product.part_number]
        return found

    def _field_of(self, product: Product) -> tuple[float, float, float]:
        """The field that ten sample trays of the product need."""
        from forge_station.sim import trays

        rng = np.random.default_rng(self.settings.seed)
        boxes = [trays.field_mm(trays.make(product, rng, wrong=False).meshes) for _ in range(10)]
        width, depth, height = np.max(boxes, axis=0).tolist()
        return width, depth, height


@dataclass
class Recorded:
    """A folder of recorded pattern stacks in place of the simulated line."""

    config: StationConfig
    settings: ReplayConfig
    trays: dict[str, Any] = field(default_factory=dict)
    scanner: ReplayScanner | None = None

    def warm_up(self) -> None:
        """Nothing to prepare: recordings are read when their trigger comes."""

    def triggers(self, count: int, first: int = 1) -> Iterator[Trigger]:
        products = self.config.line.products
        for number in range(first, first + count):
            product = products[(number - 1) % len(products)]
            yield Trigger(f"{self.config.station}-{number:06d}", product.part_number)

    def scanner_of(self, trigger: Trigger) -> Scanner:
        if self.scanner is None:
            self.scanner = ReplayScanner(self.settings.folder, self.settings.mode)
        return self.scanner


def open_line(config: StationConfig) -> SimulatedLine | Recorded:
    """The source of trays that the station file names. Raises CaptureError without the extra."""
    if isinstance(config.scanner, SimScanner):
        import forge_station.capture.sim  # noqa: F401  says which extra is missing

        return SimulatedLine(config, config.scanner)
    return Recorded(config, config.scanner)


def run(config: StationConfig, count: int, out: TextIO = sys.stdout, *, store: bool = True) -> int:
    """Inspect `count` parts and print line by line, a summary table and one JSON object."""
    if count < 1:
        raise ConfigError("demo: number of parts", expected="1 or more", got=count)
    line = open_line(config)
    with ExitStack() as stack:
        if config.broker == "embedded":
            from forge_station.mes.broker import EmbeddedBroker

            broker = stack.enter_context(EmbeddedBroker(config.mqtt.host, config.mqtt.port))
            config = replace(config, mqtt=replace(config.mqtt, port=broker.port))
            print(f"demo broker on {broker.host}:{broker.port} (MQTT 5)", file=out)
        inspector = open_station_inspector(config)
        stack.callback(inspector.model.close)
        outbox = stack.enter_context(Outbox(config.outbox))
        first = 1 + outbox.last_seq("verdict")
        manifest = inspector.model.manifest
        publisher = Publisher(outbox, config.mqtt, birth=birth_of(inspector))
        if config.broker != "none":
            stack.enter_context(publisher)
        station = Station(
            config, inspector, line.scanner_of, outbox, publisher,
            simulated=isinstance(config.scanner, SimScanner), store=store,
        )  # fmt: skip
        print(
            f"station {config.station}, line {config.line.line}, bundle {manifest.name} "
            f"{manifest.version} ({manifest.precision}, {inspector.model.provider})",
            file=out,
        )
        print(inspector.permit.text, file=out)
        line.warm_up()
        done = []
        for part in station.run(line.triggers(count, first)):
            done.append(part)
            truth = line.trays.get(part.trigger.serial)
            print(line_of(part, truth.fault if truth else None), file=out, flush=True)
        if config.broker != "none" and not publisher.drain(_DRAIN_S):
            print(f"not all delivered after {_DRAIN_S:g} s; the outbox keeps the rest", file=out)
        stats = publisher.stats()
        print(table(done, line.trays), file=out)
        if store:
            print(f"pictures and verdicts: {config.evidence}", file=out)
        print(json.dumps(summary(done, line.trays, stats.published, stats.acked)), file=out)
    return 0


def line_of(part: Done, truth: str | None) -> str:
    """One line a part: serial, outcome, reasons, latency a stage, and the truth in brackets."""
    verdict = part.verdict
    codes = ", ".join(dict.fromkeys(reason.code for reason in verdict.reasons)) or "-"
    stages = " ".join(
        f"{name} {value:.0f}" for name, value in verdict.timings_ms.items() if name != "total"
    )
    known = f"  [truth: {truth}]" if truth is not None else ""
    return (
        f"{verdict.serial}  {verdict.product:<14} {verdict.outcome.value:<6} {codes}{known}\n"
        f"    {verdict.timings_ms['total']:.0f} ms: {stages}"
    )


def table(done: list[Done], trays: dict[str, Any]) -> str:
    """Truth against verdict, and latency p50/p95 a stage."""
    rows = Counter(
        (trays[part.trigger.serial].fault, part.verdict.outcome.value)
        for part in done
        if part.trigger.serial in trays
    )
    outcomes = [outcome.value for outcome in Outcome]
    lines = [""]
    if rows:
        lines += ["truth             " + "".join(f"{name:>8}" for name in outcomes)]
        for fault in dict.fromkeys(fault for fault, _ in rows):
            counts = "".join(f"{rows[(fault, name)] or '-':>8}" for name in outcomes)
            lines.append(f"{fault:<18}{counts}")
        figures = _against_truth([part.verdict for part in done], trays)
        lines.append(f"overkill {figures['overkill']}   escapes {figures['escapes']}")
    lines += ["", f"{'stage':<10}{'p50 ms':>9}{'p95 ms':>9}{'max ms':>9}"]
    for name, found in by_stage([part.verdict.timings_ms for part in done]).items():
        lines.append(f"{name:<10}{found.p50:>9.1f}{found.p95:>9.1f}{found.max:>9.1f}")
    return "\n".join(lines)


def summary(done: list[Done], trays: dict[str, Any], published: int, acked: int) -> dict[str, Any]:
    """The last line of a demo. overkill: good trays that failed; escapes: bad ones that passed."""
    verdicts = [part.verdict for part in done]
    counts = Counter(verdict.outcome.value for verdict in verdicts)
    stages = by_stage([verdict.timings_ms for verdict in verdicts])
    total = stages.pop("total")
    return {
        "parts": len(done),
        "outcomes": {outcome.value: counts[outcome.value] for outcome in Outcome},
        **_against_truth(verdicts, trays),
        "latency_ms": {
            "p50": total.p50,
            "p95": total.p95,
            "stages": {name: {"p50": s.p50, "p95": s.p95} for name, s in stages.items()},
        },
        "published": published,
        "acked": acked,
    }


def _against_truth(verdicts: list[Verdict], trays: dict[str, Any]) -> dict[str, int]:
    known = [(trays[v.serial], v.outcome) for v in verdicts if v.serial in trays]
    return {
        "overkill": sum(tray.good and outcome is Outcome.FAIL for tray, outcome in known),
        "escapes": sum(not tray.good and outcome is Outcome.PASS for tray, outcome in known),
    }
