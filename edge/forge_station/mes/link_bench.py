"""How fast the MES link is here, beside an outbox that commits every row by itself, in one run.

`forge-station bench --link`. Bodies have 1.6 KB, as a verdict with its grids. The broker is a
mosquitto of its own on loopback (else the embedded one); its subscriber throws everything away.

* put: until the row is on disk, at 50 messages a second; PUBACK: until the broker has confirmed it.
* sustained: 16 threads put as fast as they can, until all is confirmed.
* drain: a backlog is sent, until all is confirmed.

The peer is the same code with groups of one: a flush of the disk for every put and for every
confirmation. Figures of different machines, or under different load, do not compare; the load is
printed with them. The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

from forge_station.errors import LinkError
from forge_station.mes.broker import EmbeddedBroker
from forge_station.mes.outbox import Outbox
from forge_station.mes.outbox_rows import Mark, Marks
from forge_station.mes.outbox_writer import Job, Writer
from forge_station.mes.publisher import Publisher, Timing
from forge_station.mes.topics import MqttConfig, topic_of

BODY = b'{"schema":"verdict/1.0","text":"%s"}' % (b"x" * 1560)
RATE_HZ = 50.0
THREADS = 16
ROUNDS = 3
"""Both take turns, so that a change of the load meets both."""
TIMING = Timing(settle_s=0.0, resend_s=0.0, reconnect_s=(0.1, 0.5))


class OneByOne(Writer):
    """The peer: one transaction and one flush for each put and each confirmation."""

    flush_answers = True

    def _next_work(self) -> tuple[list[Job], Marks, Mapping[str, int]]:
        with self.lock:
            while not self._jobs and not self.marks and not self._closing:
                self.lock.wait()
            if self.marks:
                seq = next(iter(self.marks))
                return [], {seq: self.marks[seq]}, {}
            return ([self._jobs.popleft()] if self._jobs else []), {}, {}


class Timed(Outbox):
    """Notes when the broker's confirmation of each row came."""

    def __init__(self, path: Path) -> None:
        self.acked_at: dict[int, float] = {}
        super().__init__(path, ballast_bytes=0, max_bytes=4 << 30)

    def mark(self, seq: int, state: Mark, reason: int | None) -> None:
        """Of the publisher."""
        if state == "acked":
            self.acked_at[seq] = time.perf_counter()
        super().mark(seq, state, reason)

    def wait_empty(self, timeout_s: float = 600.0) -> None:
        """Until every row is confirmed and that is committed, too."""
        deadline = time.monotonic() + timeout_s
        while self._writer.tally.pending and time.monotonic() < deadline:
            time.sleep(0.002)


class TimedOneByOne(Timed):
    """The same over the peer."""

    writer_type = OneByOne


@dataclass(frozen=True)
class Figures:
    """Of one kind of outbox. Milliseconds, and messages a second."""

    put_p50_ms: float
    put_p99_ms: float
    puback_p50_ms: float
    puback_p99_ms: float
    sustained_per_s: float
    drain_per_s: float


@dataclass
class Samples:
    """What the rounds gave."""

    puts_ms: list[float] = field(default_factory=list)
    pubacks_ms: list[float] = field(default_factory=list)
    sustained_per_s: list[float] = field(default_factory=list)
    drain_per_s: list[float] = field(default_factory=list)

    def figures(self) -> Figures:
        """Percentiles over all rounds; the median round's rates."""
        return Figures(
            put_p50_ms=round(_percentile(self.puts_ms, 50), 2),
            put_p99_ms=round(_percentile(self.puts_ms, 99), 2),
            puback_p50_ms=round(_percentile(self.pubacks_ms, 50), 2),
            puback_p99_ms=round(_percentile(self.pubacks_ms, 99), 2),
            sustained_per_s=round(_percentile(self.sustained_per_s, 50), 1),
            drain_per_s=round(_percentile(self.drain_per_s, 50), 1),
        )


KINDS: Mapping[str, type[Timed]] = {"group_commit": Timed, "one_by_one": TimedOneByOne}


def run(seconds: float, backlog: int, folder: Path | None = None, out: TextIO = sys.stdout) -> int:
    """Measure both and print; exit code 0. `seconds` of each timed part and `backlog` rows to
    drain, over all rounds.

    `folder` is on the disk to measure. Raises LinkError when there is no broker to be had.
    """
    load, samples = os.getloadavg(), {kind: Samples() for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="forge-bench-", dir=folder) as name, _broker() as port:
        for number in range(1, ROUNDS + 1):
            for kind, outbox in KINDS.items():
                print(f"round {number} of {ROUNDS}: {kind} ...", file=out, flush=True)
                place = Path(name) / f"{kind}{number}"
                waiting = backlog // (10 if kind == "one_by_one" else 1) // ROUNDS
                _measure(outbox, place, port, seconds / ROUNDS, waiting, samples[kind])
        disk_ms = _flush_ms(Path(name))
    found = {kind: item.figures() for kind, item in samples.items()}
    ours, peer = found["group_commit"], found["one_by_one"]
    rows = [
        ("put p50, ms", ours.put_p50_ms, peer.put_p50_ms, True),
        ("put p99, ms", ours.put_p99_ms, peer.put_p99_ms, True),
        ("put to PUBACK p50, ms", ours.puback_p50_ms, peer.puback_p50_ms, True),
        ("put to PUBACK p99, ms", ours.puback_p99_ms, peer.puback_p99_ms, True),
        ("sustained, msg/s", ours.sustained_per_s, peer.sustained_per_s, False),
        ("drain, msg/s", ours.drain_per_s, peer.drain_per_s, False),
    ]
    print(f"{'':24}{'group commit':>14}{'one by one':>14}{'ratio':>9}", file=out)
    ratios = {}
    for title, own, other, less in rows:
        ratio = (other / own if less else own / other) if own and other else 0.0
        ratios[title.split(",")[0].replace(" ", "_")] = round(ratio, 2)
        print(f"{title:24}{own:14.1f}{other:14.1f}{ratio:8.1f}x", file=out)
    print(f"one flush of this disk takes {disk_ms:.1f} ms (median); ratio: times better", file=out)
    summary = {
        **{kind: asdict(figures) for kind, figures in found.items()},
        "ratios": ratios,
        "flush_p50_ms": disk_ms,
        "seconds": seconds,
        "backlog": backlog,
        "body_bytes": len(BODY),
        "load_before": [round(item, 2) for item in load],
        "load_after": [round(item, 2) for item in os.getloadavg()],
        "cpus": os.cpu_count(),
        "nice": os.nice(0),
    }
    print(json.dumps(summary), file=out)
    return 0


def _measure(
    kind: type[Timed], folder: Path, port: int, seconds: float, backlog: int, samples: Samples
) -> None:
    folder.mkdir()
    config = MqttConfig(port=port, station="bench")
    topic = topic_of(config, "verdict")
    outbox = kind(folder / "paced.db")
    with outbox, Publisher(outbox, config, timing=TIMING) as publisher:
        _wait_connected(publisher)
        puts, pubacks = _paced(outbox, topic, seconds)
        samples.puts_ms += puts
        samples.pubacks_ms += pubacks
    outbox = kind(folder / "full.db")
    with outbox, Publisher(outbox, config, timing=TIMING) as publisher:
        _wait_connected(publisher)
        samples.sustained_per_s.append(_sustained(outbox, topic, seconds))
    outbox = kind(folder / "backlog.db")
    with outbox:
        _together(outbox, topic, max(1, backlog // THREADS))
        rows = outbox.pending
        with Publisher(outbox, config, timing=TIMING) as publisher:
            _wait_connected(publisher)
            began = time.perf_counter()
            left = rows - len(outbox.acked_at)
            outbox.wait_empty()
            samples.drain_per_s.append(left / (time.perf_counter() - began))


def _paced(outbox: Timed, topic: str, seconds: float) -> tuple[list[float], list[float]]:
    """Durations in ms of the put, and until the PUBACK."""
    began_at: dict[int, float] = {}
    puts, due = [], time.perf_counter()
    for _ in range(max(1, int(seconds * RATE_HZ))):
        due += 1.0 / RATE_HZ
        time.sleep(max(0.0, due - time.perf_counter()))
        began = time.perf_counter()
        seq = outbox.put("verdict", topic, BODY)
        puts.append(1e3 * (time.perf_counter() - began))
        began_at[seq] = began
    outbox.wait_empty()
    return puts, [1e3 * (outbox.acked_at[seq] - began) for seq, began in began_at.items()]


def _sustained(outbox: Timed, topic: str, seconds: float) -> float:
    ends_at = time.perf_counter() + seconds
    began = time.perf_counter()

    def work() -> None:
        while time.perf_counter() < ends_at:
            outbox.put("verdict", topic, BODY, timeout_s=60.0)

    _threads(work)
    outbox.wait_empty()
    return len(outbox.acked_at) / (time.perf_counter() - began)


def _together(outbox: Outbox, topic: str, each: int) -> None:
    def work() -> None:
        for _ in range(each):
            outbox.put("verdict", topic, BODY, timeout_s=60.0)

    _threads(work)


def _threads(work: Callable[[], None]) -> None:
    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _wait_connected(publisher: Publisher) -> None:
    deadline = time.monotonic() + 10.0
    while not publisher.stats().connected:
        if time.monotonic() > deadline:
            raise LinkError("the broker of the benchmark does not answer")
        time.sleep(0.01)


def _percentile(values: list[float], share: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * share // 100)]


def _flush_ms(folder: Path) -> float:
    """Median time of writing 4 KB and flushing, what every commit must at least take."""
    durations = []
    handle = os.open(folder / "flush", os.O_CREAT | os.O_WRONLY)
    try:
        for _ in range(50):
            began = time.perf_counter()
            os.write(handle, b"x" * 4096)
            os.fdatasync(handle)
            durations.append(1e3 * (time.perf_counter() - began))
    finally:
        os.close(handle)
    return round(_percentile(durations, 50), 2)


@contextmanager
def _broker() -> Iterator[int]:
    """The port of a broker with a subscriber to everything."""
    program = shutil.which("mosquitto", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        with EmbeddedBroker() as embedded, _sink(embedded.port):
            yield embedded.port
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="forge-bench-broker-") as folder:
        file = Path(folder) / "mosquitto.conf"
        file.write_text(
            f"listener {port} 127.0.0.1\nallow_anonymous true\npersistence false\n"
            "log_dest none\nmax_queued_messages 0\nset_tcp_nodelay true\n"
        )
        process = subprocess.Popen([program, "-c", str(file)], stderr=subprocess.DEVNULL)
        try:
            with _sink(port):
                yield port
        finally:
            process.kill()
            process.wait()


@contextmanager
def _sink(port: int) -> Iterator[None]:
    """A subscriber, QoS 0, in a process of its own that reads and throws away."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SINK, str(port)], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise LinkError("the subscriber of the benchmark cannot subscribe", got=port)
        yield
    finally:
        process.kill()
        process.wait()


# CONNECT and SUBSCRIBE of MQTT 5 by hand: a client library would cost more CPU than the broker.
_CONNECT = b"\x00\x04MQTT\x05\x02" + struct.pack(">H", 0) + b"\x00\x00\x04sink"
_SUBSCRIBE = b"\x00\x01\x00\x00\x01#\x00"
_SINK = f"""
import socket, sys, time
deadline = time.time() + 10
while True:
    try:
        link = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
        break
    except OSError:
        if time.time() > deadline:
            raise
        time.sleep(0.05)
link.sendall(b"\\x10" + bytes([{len(_CONNECT)}]) + {_CONNECT!r})
link.recv(1000)
link.sendall(b"\\x82" + bytes([{len(_SUBSCRIBE)}]) + {_SUBSCRIBE!r})
link.recv(1000)
print("ready", flush=True)
while link.recv(1 << 20):
    pass
"""
