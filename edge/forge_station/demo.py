"""The demo: simulated trays through the whole station, then truth against verdict.

The simulated scanner projects patterns and the station decodes them; nothing is handed over but
camera images. Needs the extra `demo`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any, TextIO

from forge_station.config import StationConfig
from forge_station.contract.verdict import Outcome, Verdict
from forge_station.errors import ConfigError
from forge_station.line import open_line
from forge_station.monitor import Monitor
from forge_station.station import Done, open_station
from forge_station.timing import by_stage

_DRAIN_S = 20.0


def run(config: StationConfig, count: int, out: TextIO = sys.stdout, *, store: bool = True) -> int:
    """Inspect `count` parts and print line by line, a summary table and one JSON object."""
    if count < 1:
        raise ConfigError("demo: number of parts", expected="1 or more", got=count)
    line = open_line(config)
    with open_station(config, line.scanner_of, store=store) as station, Monitor(station) as monitor:
        inspector, publisher = station.inspector, station.publisher
        if config.broker == "embedded":
            mqtt = station.config.mqtt
            print(f"demo broker on {mqtt.host}:{mqtt.port} (MQTT 5)", file=out)
        print(station.text, file=out)
        print(inspector.permit.text, file=out)
        line.warm_up()
        done = []
        first = 1 + station.outbox.last_number("verdict")
        for part in station.run(line.triggers(count, first)):
            done.append(part)
            monitor.part(part)
            truth = line.trays.get(part.trigger.serial)
            print(line_of(part, truth.fault if truth else None), file=out, flush=True)
        if config.broker != "none" and not publisher.drain(_DRAIN_S):
            print(f"not all delivered after {_DRAIN_S:g} s; the outbox keeps the rest", file=out)
        stats = publisher.stats()
        print(table(done, line.trays), file=out)
        if store:
            print(f"pictures and verdicts: {config.evidence.folder}", file=out)
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
