"""Latency of the station's stages on this machine: `forge-station bench`.

A few trays are scanned once (simulated, or recorded as the station file says), then inspected again
and again: so the run is long and no simulator is in its figures. Every part goes through the whole
loop: decoding, scene, views, model, rules, outbox, and with the extra `demo` over MQTT to an
embedded broker on loopback, until the broker has confirmed it.

Figures that are sums: `model` is everything that asks the model, `orchestration` all that is
neither scan decoding (with the fusing of its poses), scene, views nor model: gates, sizes, rules,
messages and the outbox on disk.
`puback` runs from the verdict to the broker's confirmation of its last message, the outbox
included.

Repeats of a scan must give the same verdict to the last digit, and memory must not grow: both are
reported. Speed differs from machine to machine; figures mean something beside each other in one
run, and beside the load that is printed with them.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np

from forge_station.capture.base import PatternStack, Trigger
from forge_station.capture.calibration import Calibration
from forge_station.config import StationConfig
from forge_station.contract.verdict import Verdict
from forge_station.contract.views import VIEWS
from forge_station.errors import CaptureError, ConfigError
from forge_station.geometry import render
from forge_station.line import open_line
from forge_station.mes.outbox import Outbox
from forge_station.station import open_station
from forge_station.timing import Latency, by_stage, latency

WARM_UP = 3
MODEL = ("read", "judge", "surface")
NOT_ORCHESTRATION = ("capture", "decode", "fuse", "scene", "views", *MODEL)
PUBACK_S = 30.0
_EACH_TIME_NEW = ("result_id", "serial", "begin_time", "end_time", "timings_ms")


Scan = tuple[Trigger, list[PatternStack], Mapping[str, Calibration]]


@dataclass
class Kept:
    """Scans taken once: a scanner that gives that of the trigger's number again."""

    scans: list[Scan]
    number: int = 0

    @property
    def calibrations(self) -> Mapping[str, Calibration]:
        return self.scans[self.number][2]

    def capture(self, trigger: Trigger) -> list[PatternStack]:
        return self.scans[self.number][1]

    def close(self) -> None: ...

    def triggers(self, count: int) -> Iterator[Trigger]:
        """Every scan in turn, each time as a new part."""
        for part, number in enumerate(
            itertools.islice(itertools.cycle(range(len(self.scans))), count)
        ):
            self.number = number
            yield Trigger(f"bench-{part:06d}", self.scans[number][0].part_number)


@dataclass
class Measured:
    """What a run gave. `verdicts`: scan -> its first verdict, as compared with the later ones."""

    timings: list[dict[str, float]] = field(default_factory=list)
    puback_ms: list[float] = field(default_factory=list)
    verdicts: dict[int, str] = field(default_factory=dict)
    repeats: int = 0
    different: int = 0
    unconfirmed: int = 0

    def compare(self, scan: int, verdict: Verdict) -> None:
        """Count a repeat, and whether it says something else than the first of its scan."""
        said = {k: v for k, v in verdict.to_dict().items() if k not in _EACH_TIME_NEW}
        text = json.dumps(said, sort_keys=True)
        if scan not in self.verdicts:
            self.verdicts[scan] = text
            return
        self.repeats += 1
        self.different += text != self.verdicts[scan]


def run(
    config: StationConfig,
    count: int,
    out: TextIO = sys.stdout,
    *,
    scans: int = 12,
    views: bool = False,
) -> int:
    """Print p50/p95/p99/max a stage over `count` parts, then one JSON object."""
    if count < 1 or scans < 1:
        raise ConfigError("bench: parts and scans", expected="1 or more", got=f"{count}, {scans}")
    line = open_line(config)
    line.warm_up()
    taken: list[Scan] = []
    for trigger in line.triggers(min(scans, count)):
        _progress(out, f"scan {len(taken) + 1}/{min(scans, count)}")
        scanner = line.scanner_of(trigger)
        try:
            stacks = cast("list[PatternStack]", scanner.capture(trigger))  # or scans of 3D heads
            taken.append((trigger, stacks, scanner.calibrations))
        except CaptureError:
            if not taken:
                raise
            break  # no more recordings: those that there are come again
    kept, found = Kept(taken), Measured()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        config = replace(config, outbox=Path(folder) / "outbox.sqlite", broker="none")
        sent = find_spec("iotcore") is not None
        if sent:
            from forge_station.mes.broker import EmbeddedBroker

            started = stack.enter_context(EmbeddedBroker("127.0.0.1", 0))
            mqtt = replace(config.mqtt, host="127.0.0.1", port=started.port)
            config = replace(config, mqtt=mqtt, broker="external")
        station = stack.enter_context(open_station(config, lambda trigger: kept, store=False))
        outbox = station.outbox
        before_mb = 0.0
        for number, done in enumerate(station.run(kept.triggers(count + WARM_UP))):
            yielded = time.perf_counter()
            confirmed = not sent or _confirmed(outbox)
            waited_ms = (time.perf_counter() - yielded) * 1000
            if number == WARM_UP + len(taken) or before_mb == 0.0:
                before_mb = _resident_mb()  # after each scan was seen once
            if number >= WARM_UP:
                timings = done.verdict.timings_ms
                found.timings.append(_with_sums(timings))
                found.compare(kept.number, done.verdict)
                found.unconfirmed += not confirmed
                if sent and confirmed:
                    found.puback_ms.append(round(timings.get("deliver", 0.0) + waited_ms, 2))
            _progress(out, f"part {number + 1}/{count + WARM_UP}")
        provider = station.inspector.model.provider
        grown_mb = _resident_mb() - before_mb
    stages = by_stage(found.timings)
    puback = latency(found.puback_ms)
    if puback is not None:
        stages["puback"] = puback
    result = {
        "parts": count,
        "scans": len(taken),
        "provider": provider,
        "threads": config.runtime.threads,
        "load": round(os.getloadavg()[0], 1),
        "stages_ms": {name: _figures(s) for name, s in stages.items()},
        "repeats": found.repeats,
        "repeats_different": found.different,
        "unconfirmed": found.unconfirmed,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "memory_grown_mb": round(grown_mb, 1),
    }
    if views:
        result["views"] = time_views(config.runtime.threads)
    print(f"\r{_text(result)}", file=out)
    print(json.dumps(result), file=out)
    return 0


def time_views(threads: int, points: int = 1_000_000, repeats: int = 9) -> dict[str, Any]:
    """Three depth views of a million points: ms, and whether every repeat gives the same bits."""
    rng = np.random.default_rng(0)
    direction = rng.normal(size=(points, 3))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    cloud = (direction * (15.0, 8.0, 5.0)).astype(np.float32)
    digests, spent = set(), []
    for _ in range(repeats):
        start = time.perf_counter()
        drawn = [render.view_depth(cloud, v, 0.15, (224, 224), (0.0, 0.0, 0.0)) for v in VIEWS]
        spent.append((time.perf_counter() - start) * 1000)
        digests.add(b"".join(view.depth.tobytes() for view in drawn))
    return {
        "points": points,
        "p50_ms": round(sorted(spent)[repeats // 2], 1),
        "min_ms": round(min(spent), 1),
        "identical": len(digests) == 1,
    }


def _confirmed(outbox: Outbox) -> bool:
    """Wait until the broker has confirmed every row."""
    deadline = time.monotonic() + PUBACK_S
    while outbox.pending:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0002)
    return True


def _with_sums(timings: Mapping[str, float]) -> dict[str, float]:
    """The stages of a part and the sums that are reported beside them; without the stored scan."""
    stages = {name: value for name, value in timings.items() if name != "capture"}
    total = timings["total"] - timings.get("capture", 0.0)
    others = sum(timings.get(name, 0.0) for name in NOT_ORCHESTRATION if name != "capture")
    return {
        **stages,
        "model": round(sum(timings.get(name, 0.0) for name in MODEL), 2),
        "orchestration": round(total - others, 2),
        "total": round(total, 2),
    }


def _resident_mb() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _figures(s: Latency) -> dict[str, float]:
    return {"n": s.count, "p50": s.p50, "p95": s.p95, "p99": s.p99, "max": s.max}


def _progress(out: TextIO, text: str) -> None:
    if out.isatty():
        print(f"\r{text}", end="", file=out, flush=True)


def _text(result: Mapping[str, Any]) -> str:
    lines = [
        f"{result['parts']} parts of {result['scans']} scans, {result['provider']}, "
        f"{result['threads']} threads, load {result['load']}",
        f"{'stage':<14}{'n':>6}{'p50':>9}{'p95':>9}{'p99':>9}{'max':>9}  ms",
    ]
    for name, s in result["stages_ms"].items():
        values = "".join(f"{s[figure]:>9.1f}" for figure in ("p50", "p95", "p99", "max"))
        lines.append(f"{name:<14}{s['n']:>6}{values}")
    if "puback" not in result["stages_ms"]:
        lines.append("puback not measured: the embedded broker needs the extra `demo`")
    lines += [
        f"repeats of a scan with another verdict: {result['repeats_different']} of "
        f"{result['repeats']}; not confirmed: {result['unconfirmed']}",
        f"peak memory {result['peak_memory_mb']} MB, grown by {result['memory_grown_mb']} MB since "
        "every scan was seen once",
    ]
    if "views" in result:
        own = result["views"]
        same = "same bits every time" if own["identical"] else "NOT the same bits every time"
        lines.append(f"three views of {own['points']} points: p50 {own['p50_ms']} ms, {same}")
    return "\n".join(lines)
