"""Latency of the station's stages on this machine: `forge-station bench`.

Runs the demo's simulated trays through the station without pictures and without a broker. The
capture stage is the simulator's time, not a camera's. Speed differs from machine to machine; the
figures mean something beside each other in one run.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from forge_station import demo
from forge_station.config import SimScanner, StationConfig
from forge_station.errors import ConfigError
from forge_station.mes.outbox import Outbox
from forge_station.mes.publisher import Publisher
from forge_station.station import Station, open_station_inspector
from forge_station.timing import by_stage

WARM_UP = 3


def run(config: StationConfig, count: int, out: TextIO = sys.stdout) -> int:
    """Print p50/p95/p99/max a stage over `count` parts, then one JSON object."""
    if count < 1:
        raise ConfigError("bench: number of parts", expected="1 or more", got=count)
    line = demo.open_line(config)
    with tempfile.TemporaryDirectory() as folder:
        config = replace(config, outbox=Path(folder) / "outbox.sqlite", broker="none")
        inspector = open_station_inspector(config)
        try:
            with Outbox(config.outbox) as outbox:
                publisher = Publisher(outbox, config.mqtt)
                station = Station(
                    config, inspector, line.scanner_of, outbox, publisher,
                    simulated=isinstance(config.scanner, SimScanner), store=False,
                )  # fmt: skip
                timings = []
                for number, done in enumerate(station.run(line.triggers(count + WARM_UP))):
                    if number >= WARM_UP:
                        timings.append(done.verdict.timings_ms)
                    if out.isatty():
                        print(f"\r{number + 1}/{count + WARM_UP}", end="", file=out, flush=True)
            provider = inspector.model.provider
        finally:
            inspector.model.close()
    stages = by_stage(timings)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\r{count} parts, {provider}, {config.runtime.threads} threads", file=out)
    print(f"{'stage':<10}{'n':>5}{'p50':>9}{'p95':>9}{'p99':>9}{'max':>9}  ms", file=out)
    for name, s in stages.items():
        print(
            f"{name:<10}{s.count:>5}{s.p50:>9.1f}{s.p95:>9.1f}{s.p99:>9.1f}{s.max:>9.1f}", file=out
        )
    print(f"peak memory {peak_mb:.0f} MB", file=out)
    figures = {
        name: {"n": s.count, "p50": s.p50, "p95": s.p95, "p99": s.p99, "max": s.max}
        for name, s in stages.items()
    }
    result = {"parts": count, "provider": provider, "stages_ms": figures}
    print(json.dumps({**result, "peak_memory_mb": round(peak_mb)}), file=out)
    return 0
