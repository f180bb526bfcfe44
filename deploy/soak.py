"""`make soak`: the demo line for an hour, against a real broker; does anything grow?

The station runs as on a line (`forge-station run`, a process of its own) on simulated trays. This
process triggers it, listens as its MES, and looks at it from outside, in /proc. Memory,
descriptors, threads and files are sampled; the end is a table, a plot and a verdict over limits.

    python -m deploy.soak --minutes 60 --out out/soak

Exit code: 0 within all limits, 1 over one, 64 wrong usage.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import platform
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import yaml

from forge_station import demo_files
from forge_station.config import StationConfig, load_station
from forge_station.errors import ConfigError, StationError, TriggerError
from forge_station.mes.listen import Listener
from forge_station.mes.machine import memory_bytes
from forge_station.triggers import local
from forge_station.triggers.settings import SoftwareSource

OUTBOX_MB = 8
EVIDENCE_GB = 0.05
"""Small quotas, so that a run reaches them and shows what happens there."""
WAL_MB = 8
"""The write-ahead log beside the outbox, at most."""
OWN_PCT_PER_H = 0.1
BESIDE_THE_FIELD = {"TOO_MANY_PARTS", "PART_OUT_OF_FIELD"}
"""A simulated tray with parts too many may reach over the field: ERROR is its right verdict."""
BLOCKS = 12
T_95 = 2.228
"""Student's t, two-sided 95 %, BLOCKS - 2 degrees of freedom."""
START_S, ANSWER_S, DRAIN_S = 600.0, 300.0, 60.0


@dataclass(frozen=True)
class Sample:
    """The station at one moment. Files without those that are open but deleted."""

    seconds: float
    parts: int
    rss_mb: float
    own_mb: float
    """Resident memory that the process made itself (RssAnon). The rest are pages of files, of
    libraries and of the model: the kernel takes them away and reads them again."""
    descriptors: int
    threads: int
    outbox_mb: float
    """Database and write-ahead log."""
    evidence_mb: float


@dataclass(frozen=True)
class Slope:
    """Growth in per cent of the mean an hour, with half of its 95 % interval."""

    pct_per_h: float
    half: float


@dataclass
class Found:
    """What came of the parts, as the trigger's answers and the MES tell it."""

    outcomes: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    failed: int = 0
    """Of those that ended in ERROR, all but trays that did not fit the field."""
    latency_s: list[float] = field(default_factory=list)
    received: int = 0
    """Verdicts at the MES, repeats not counted."""
    missing: int = 0
    unreadable: int = 0

    @property
    def parts(self) -> int:
        """Parts that were inspected, or ended in ERROR."""
        return sum(self.outcomes.values())


def slope(seconds: Sequence[float], values: Sequence[float]) -> Slope:
    """Least squares over the means of BLOCKS blocks: samples that follow each other are alike."""
    if len(values) < 2 * BLOCKS:
        return Slope(math.nan, math.inf)
    hours = np.array([block.mean() for block in np.array_split(np.array(seconds), BLOCKS)]) / 3600
    means = np.array([block.mean() for block in np.array_split(np.array(values, float), BLOCKS)])
    centred = hours - hours.mean()
    spread = float(centred @ centred)
    rate = float(centred @ means) / spread
    rest = means - means.mean() - rate * centred
    error = math.sqrt(float(rest @ rest) / (BLOCKS - 2) / spread)
    scale = 100.0 / float(means.mean())
    return Slope(rate * scale, T_95 * error * scale)


def settled(samples: Sequence[Sample], warm_up_s: float) -> list[Sample]:
    """Those after the warm-up."""
    return [sample for sample in samples if sample.seconds >= warm_up_s]


def faults(samples: Sequence[Sample], found: Found, rate: float, warm_up_s: float) -> list[str]:
    """Every limit that was not kept, in words; empty: all were."""
    told = []
    late = settled(samples, warm_up_s)
    if not late:
        return ["no sample after the warm-up: run for longer"]
    spent_s = samples[-1].seconds - samples[0].seconds
    reached = (samples[-1].parts - samples[0].parts) / spent_s if spent_s else 0.0
    if reached < rate:
        told.append(f"{reached:.2f} parts a second, at least {rate:g} wanted")
    grown = slope([s.seconds for s in late], [s.own_mb for s in late])
    if grown.pct_per_h > OWN_PCT_PER_H and grown.pct_per_h > grown.half:
        told.append(f"memory grows {grown.pct_per_h:.2f} %/h, at most {OWN_PCT_PER_H} allowed")
    third = max(1, len(late) // 3)
    for name in ("descriptors", "threads"):
        first = np.median([getattr(sample, name) for sample in late[:third]])
        last = np.median([getattr(sample, name) for sample in late[-third:]])
        if last > first + 1:
            told.append(f"{name} grow from {first:g} to {last:g}")
    biggest = max(sample.outbox_mb for sample in samples)
    if biggest > OUTBOX_MB + WAL_MB:
        told.append(f"the outbox took {biggest:.1f} MB, quota {OUTBOX_MB} and log {WAL_MB}")
    evidence = max(sample.evidence_mb for sample in samples)
    if evidence > EVIDENCE_GB * 1000 * 1.1:
        told.append(f"the evidence took {evidence:.1f} MB, quota {EVIDENCE_GB * 1000:g}")
    if found.failed:
        told.append(f"{found.failed} parts ended in ERROR")
    if found.received != found.parts or found.missing or found.unreadable:
        told.append(
            f"of {found.parts} verdicts {found.received} reached the MES, {found.missing} missing, "
            f"{found.unreadable} unreadable"
        )
    return told


def soak(folder: Path, minutes: float, rate: float, every_s: float, warm_up_s: float) -> int:
    """Run, sample, judge, write samples.csv, soak.png and soak.json to `folder`; the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    state = folder / "state"
    shutil.rmtree(state, ignore_errors=True)
    state.mkdir()
    with tempfile.TemporaryDirectory(prefix="soak-") as short:
        port = _free_port()
        station = load_station(_station_file(state, Path(short) / "t.sock", port))
        with (
            _broker(Path(short), port),
            Listener(station.mqtt, statuses=False) as listener,
            _station(state, Path(short) / "t.sock") as process,
        ):
            samples, found = _run(process, station, listener, minutes, rate, every_s)
            _count_rest(listener, found)
    with (folder / "samples.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(item.name for item in fields(Sample))
        writer.writerows(tuple(asdict(sample).values()) for sample in samples)
    broken = faults(samples, found, rate, warm_up_s)
    result = figures(samples, found, warm_up_s, broken)
    text = json.dumps(result, allow_nan=False)
    (folder / "soak.json").write_text(text + "\n", encoding="utf-8")
    plot(samples, warm_up_s, folder / "soak.png")
    print(table(samples, found, warm_up_s))
    for line in broken or ["within all limits"]:
        print(line)
    print(text)
    return 1 if broken else 0


def figures(
    samples: Sequence[Sample], found: Found, warm_up_s: float, broken: Sequence[str]
) -> dict[str, object]:
    """The last line of a run, and soak.json. None: the run was too short to tell."""
    late = settled(samples, warm_up_s)
    seconds = [s.seconds for s in late]
    slopes = {}
    for name in ("own", "rss"):
        grown = slope(seconds, [getattr(s, f"{name}_mb") for s in late])
        known = math.isfinite(grown.half)
        slopes[f"{name}_pct_per_h"] = round(grown.pct_per_h, 3) if known else None
        slopes[f"{name}_pct_per_h_95"] = round(grown.half, 3) if known else None
    spent_s = samples[-1].seconds - samples[0].seconds
    latency = np.percentile(found.latency_s, [50, 99]) if found.latency_s else [0.0, 0.0]
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {platform.release()}",
        "minutes": round(spent_s / 60, 2),
        "parts": found.parts,
        "parts_per_s": round((samples[-1].parts - samples[0].parts) / max(spent_s, 1e-9), 3),
        "outcomes": dict(found.outcomes),
        "failed": found.failed,
        "refused": found.refused,
        "received": found.received,
        "latency_ms": {"p50": round(latency[0] * 1e3), "p99": round(latency[1] * 1e3)},
        **slopes,
        "first": asdict(late[0]) if late else None,
        "last": asdict(samples[-1]),
        "faults": list(broken),
    }


def table(samples: Sequence[Sample], found: Found, warm_up_s: float) -> str:
    """What is sampled: first after the warm-up, last, most, and growth an hour."""
    late = settled(samples, warm_up_s) or list(samples)
    lines = [f"\n{'':<14}{'warm':>10}{'end':>10}{'most':>10}{'growth an hour, 95 %':>26}"]
    for name in ("own_mb", "rss_mb", "descriptors", "threads", "outbox_mb", "evidence_mb"):
        values = [float(getattr(sample, name)) for sample in late]
        grown = slope([sample.seconds for sample in late], values) if min(values) > 0 else None
        text = "-"
        if grown is not None and math.isfinite(grown.half):
            text = f"{grown.pct_per_h:+.2f} % ({grown.half:.2f})"
        lines.append(
            f"{name:<14}{values[0]:>10.1f}{values[-1]:>10.1f}{max(values):>10.1f}{text:>26}"
        )
    outcomes = " ".join(f"{name} {count}" for name, count in sorted(found.outcomes.items()))
    lines.append(f"{found.parts} parts: {outcomes}; {found.received} verdicts at the MES")
    return "\n".join(lines)


def plot(samples: Sequence[Sample], warm_up_s: float, path: Path) -> None:
    """Four curves over time, the warm-up shaded. Needs matplotlib (extra `training`)."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(4, 1, sharex=True, figsize=(9, 8), layout="constrained")
    minutes = [sample.seconds / 60 for sample in samples]
    shown = (
        ("memory, MB", ("own_mb", "rss_mb")),
        ("descriptors, threads", ("descriptors", "threads")),
        ("outbox, MB", ("outbox_mb",)),
        ("evidence, MB", ("evidence_mb",)),
    )
    for axis, (label, names) in zip(axes, shown, strict=True):
        for name in names:
            axis.plot(minutes, [getattr(sample, name) for sample in samples], label=name)
        axis.set_ylabel(label)
        axis.axvspan(0, warm_up_s / 60, alpha=0.15)
        axis.grid(alpha=0.3)
        if len(names) > 1:
            axis.legend()
    axes[-1].set_xlabel(f"minutes; {samples[-1].parts} parts")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _run(
    process: subprocess.Popen[bytes],
    station: StationConfig,
    listener: Listener,
    minutes: float,
    rate: float,
    every_s: float,
) -> tuple[list[Sample], Found]:
    """Trigger part after part, at `rate` at the most by a tenth more, until the time is over."""
    assert isinstance(station.trigger, SoftwareSource) and station.trigger.socket is not None
    path = station.trigger.socket
    products = [product.part_number for product in station.line.products]
    found, samples = Found(), []
    began = due = time.monotonic()
    number, told = 0, began
    samples.append(look(process.pid, 0.0, 0, station))
    while time.monotonic() - began < minutes * 60:
        if process.poll() is not None:
            raise ConfigError("the station has ended", got=f"exit code {process.returncode}")
        time.sleep(max(0.0, due - time.monotonic()))
        due = max(due + 1 / (1.1 * rate), time.monotonic() - 1.0)
        at = time.monotonic()
        product = products[number % len(products)]
        number += 1
        *_, answer = local.ask(path, f"soak-{number:07d}", product, ANSWER_S)
        if "outcome" in answer:
            found.outcomes[answer["outcome"]] += 1
            found.failed += answer["outcome"] == "ERROR" and not BESIDE_THE_FIELD & set(
                answer["reasons"]
            )
            found.latency_s.append(time.monotonic() - at)
        elif "refused" in answer:
            found.refused += 1
        else:
            raise TriggerError("the station ended before its verdict", which=f"part {number}")
        while (received := listener.next(0.0)) is not None:
            _count(found, received.kind, received.fault)
        now = time.monotonic()
        if now - began - samples[-1].seconds >= every_s:
            samples.append(look(process.pid, now - began, found.parts, station))
        if now - told >= 60:
            told = now
            last = samples[-1]
            print(
                f"{(now - began) / 60:6.1f} min  {found.parts:6d} parts  {last.own_mb:.1f} MB  "
                f"{last.descriptors} descriptors  {last.threads} threads",
                flush=True,
            )
    samples.append(look(process.pid, time.monotonic() - began, found.parts, station))
    return samples, found


def _count(found: Found, kind: str, fault: str | None) -> None:
    found.unreadable += fault is not None
    found.received += fault is None and kind == "verdict"


def _count_rest(listener: Listener, found: Found) -> None:
    deadline = time.monotonic() + DRAIN_S
    while found.received < found.parts and time.monotonic() < deadline:
        received = listener.next(1.0)
        if received is not None:
            _count(found, received.kind, received.fault)
    found.missing = sum(len(numbers) for numbers in listener.missing().values())


def look(pid: int, seconds: float, parts: int, station: StationConfig) -> Sample:
    """The process and its files, from outside."""
    proc = Path(f"/proc/{pid}")
    outbox = station.outbox
    return Sample(
        seconds=round(seconds, 2),
        parts=parts,
        rss_mb=round((memory_bytes(proc / "statm") or 0) / 1e6, 3),
        own_mb=_own_mb(proc / "status"),
        descriptors=len(os.listdir(proc / "fd")),
        threads=len(os.listdir(proc / "task")),
        outbox_mb=_size_mb([outbox, outbox.with_name(f"{outbox.name}-wal")]),
        evidence_mb=_size_mb(station.evidence.folder.rglob("*")),
    )


def _own_mb(status: Path) -> float:
    """RssAnon of /proc/PID/status, which the kernel tells in KiB."""
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return round(int(lines["RssAnon"].split()[0]) * 1024 / 1e6, 3)


def _size_mb(files: Iterator[Path] | Sequence[Path]) -> float:
    total = 0
    for path in files:
        with suppress(OSError):  # thinned meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return round(total / 1e6, 3)


def _station_file(folder: Path, trigger: Path, port: int) -> Path:
    """The demo station, with this broker, a software trigger and small quotas."""
    source = demo_files.source()
    data = yaml.safe_load((source / "station.yaml").read_text(encoding="utf-8"))
    data |= {
        "line": str(source / "line.yaml"),
        "bundle": str(source / "bundle"),
        "trusted_keys": [str(source / name) for name in data["trusted_keys"]],
        "broker": "external",
        "outbox": "outbox.sqlite",
        "outbox_limits": {"max_mb": OUTBOX_MB, "min_free_mb": 1},
        "evidence": {"folder": "evidence", "quota_gb": EVIDENCE_GB, "min_free_gb": 0.1},
        "trigger": {"source": "software", "socket": str(trigger)},
        "monitor": {"port": _free_port()},
    }
    data["mqtt"]["port"] = port
    file = folder / "station.yaml"
    file.write_text(yaml.safe_dump(data), encoding="utf-8")
    return file


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _broker(folder: Path, port: int) -> Iterator[None]:
    program = shutil.which("mosquitto", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        raise ConfigError("mosquitto is not installed", action="install it: make system")
    user = pwd.getpwuid(os.getuid()).pw_name
    file = folder / "mosquitto.conf"
    file.write_text(
        f"listener {port} 127.0.0.1\nallow_anonymous true\npersistence false\nuser {user}\n"
    )
    with subprocess.Popen([program, "-c", str(file)], stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                with suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                time.sleep(0.05)
            yield
        finally:
            process.terminate()


@contextmanager
def _station(folder: Path, trigger: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Started, and ready for parts; told to stop at the end."""
    command = [sys.executable, "-m", "forge_station.cli", "run", "--station"]
    ready = threading.Event()
    with (folder / "stderr.txt").open("wb") as errors:
        process = subprocess.Popen(
            [*command, str(folder / "station.yaml")], stdout=subprocess.PIPE, stderr=errors
        )

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as lines, (folder / "stdout.txt").open("wb") as file:
            for line in lines:
                file.write(line)
                if line.startswith(b"ready"):
                    ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        print("the station starts", flush=True)
        if not ready.wait(START_S) or process.poll() is not None or not trigger.is_socket():
            said = (folder / "stderr.txt").read_text(errors="replace")[-500:]
            raise TriggerError("the station does not come up", got=said or "no answer")
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join()


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="default 60")
    parser.add_argument("--out", type=Path, default=Path("out/soak"), help="default out/soak")
    parser.add_argument("--rate", type=float, default=1.0, help="parts a second, at least (1)")
    parser.add_argument("--every", type=float, help="seconds from sample to sample (default 5)")
    args = parser.parse_args(arguments)
    seconds = 60 * args.minutes
    every_s = args.every or min(5.0, seconds / 40)
    try:
        if not (seconds > 0 and args.rate > 0 and every_s > 0):
            raise ConfigError("--minutes, --rate and --every", expected="numbers above 0")
        return soak(args.out, args.minutes, args.rate, every_s, min(600.0, seconds / 4))
    except StationError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 64


if __name__ == "__main__":
    # Told to stop: leave the context managers, which stop station and broker.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
