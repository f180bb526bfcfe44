"""A station under load in a process of its own, and the consumer that counts what reaches it.

The station is forked from a process that has everything imported, so that 200 starts take seconds.
'Committed' are the ids that it reported after `put` had returned.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

from forge_station.errors import LinkError
from forge_station.mes.consumer import Consumer
from forge_station.mes.outbox import Outbox
from forge_station.mes.publisher import Publisher, Timing
from forge_station.mes.report import put_verdict
from forge_station.mes.stamp import uuid7
from forge_station.mes.topics import MqttConfig
from tests.mes.rig import Mosquitto, verdict, wait_for

TIMING = Timing(settle_s=0.5, resend_s=2.0, reconnect_s=(0.2, 1.0), no_consumer_s=(0.2, 1.0))
CLONE_NEWNET = 0x40000000
_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload(["tests.mes.faults.load", "tests.mes.faults.rows_store"])


def serve(
    path: Path,
    config: MqttConfig,
    rate_hz: float,
    netns: str | None,
    timing: Timing,
    reports: Connection,
) -> None:
    """The station's process: put, report, until killed. It also reports when the link goes."""
    logging.disable(logging.ERROR)
    enter(netns)
    sample = verdict(front=[(4, 5), (4, 6)]).to_dict()
    with (
        Outbox(path, ballast_bytes=0) as outbox,
        Publisher(outbox, config, timing=timing) as publisher,
    ):
        told = threading.Lock()

        def watch() -> None:
            connected = False
            while True:
                if publisher.stats().connected != connected:
                    connected, now = not connected, time.monotonic()
                    with told:
                        reports.send_bytes(f"{'up' if connected else 'down'} {now}".encode())
                time.sleep(0.02)

        threading.Thread(target=watch, daemon=True).start()
        while True:
            result_id = uuid7()
            put_verdict(outbox, config, {**sample, "result_id": result_id})
            with told:
                reports.send_bytes(result_id.encode())
            time.sleep(1.0 / rate_hz)


class Station:
    """The process under load; ids that it committed are in `committed`."""

    def __init__(
        self,
        config: MqttConfig,
        outbox: Path,
        rate_hz: float = 100.0,
        netns: str | None = None,
        timing: Timing = TIMING,
    ) -> None:
        self.config, self.outbox, self.timing = config, outbox, timing
        self.rate_hz, self.netns = rate_hz, netns
        self.committed: list[str] = []
        self.link: list[tuple[str, float]] = []
        """`up` or `down`, and when (time.monotonic)."""

    def start(self, rows: int = 3) -> None:
        """Start it and wait until it has committed some rows."""
        reading, writing = _FORK.Pipe(duplex=False)
        self.process = _FORK.Process(
            target=serve,
            args=(self.outbox, self.config, self.rate_hz, self.netns, self.timing, writing),
            daemon=True,
        )
        self.process.start()
        writing.close()
        self.reader = threading.Thread(target=self._read, args=(reading,), daemon=True)
        self.reader.start()
        before = len(self.committed)
        if not wait_for(lambda: len(self.committed) >= before + rows, 30.0):
            raise RuntimeError("the station commits nothing")

    def _read(self, reading: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                text = reading.recv_bytes().decode()
                if " " in text:
                    state, at = text.split()
                    self.link.append((state, float(at)))
                else:
                    self.committed.append(text)
        reading.close()

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.join()
        self.reader.join()


@dataclass(frozen=True)
class Counted:
    """What a run came to. `gaps`: numbers that the consumer missed at some time."""

    committed: int
    delivered: int
    lost: int
    duplicated: int
    gaps: int
    left: int


class Mes:
    """A consumer in a thread, that can be sent away and called back; it counts ids."""

    def __init__(self, config: MqttConfig, folder: Path, netns: str | None = None) -> None:
        self.config, self.file, self.netns = config, folder / "mes.watermark.json", netns
        self.seen: Counter[str] = Counter()
        self.repeats = self.gaps = self.gone = self.missing = 0
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Mes:
        self.come()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()

    def come(self) -> None:
        """Subscribe, with the session of before if the broker still has it."""
        if self._thread is None:
            self._ending.clear()
            ready = threading.Event()
            self._thread = threading.Thread(target=self._take, args=(ready,))
            self._thread.start()
            if not ready.wait(30.0):
                raise RuntimeError("the consumer does not get a connection")

    def leave(self) -> None:
        """Go away."""
        if self._thread is not None:
            self._ending.set()
            self._thread.join()
            self._thread = None

    def _take(self, ready: threading.Event) -> None:
        enter(self.netns)
        while not self._ending.is_set():
            try:
                with Consumer(self.config, "mes", self.file, timeout_s=2.0) as consumer:
                    ready.set()
                    self._take_all(consumer)
            except LinkError:
                time.sleep(0.1)

    def _take_all(self, consumer: Consumer) -> None:
        before = self.repeats, self.gone
        while not self._ending.is_set():
            delivery = consumer.next(0.1)
            if delivery is not None and delivery.stream == "verdict":
                self.seen[delivery.id] += 1
            figures = consumer.figures()
            self.gaps = max(self.gaps, figures.missing)
            self.missing = figures.missing
            self.repeats = before[0] + figures.repeats
            self.gone = before[1] + figures.gone


def enter(netns: str | None) -> None:
    """Let this thread, and those it starts, live in a network namespace."""
    if netns is not None:
        with open(f"/run/netns/{netns}", "rb") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")


def settle(station: Station, mes: Mes, timeout_s: float = 60.0) -> Counted:
    """Let a last station deliver everything, and count."""
    mes.come()
    committed = set(station.committed)
    with (
        Outbox(station.outbox, ballast_bytes=0) as outbox,
        Publisher(outbox, station.config, timing=TIMING) as publisher,
    ):
        wait_for(
            lambda: not outbox.pending and not mes.missing and committed <= mes.seen.keys(),
            timeout_s,
        )
        publisher.drain(1.0)
        left = outbox.pending
    mes.leave()
    return Counted(
        committed=len(committed),
        delivered=len(mes.seen),
        lost=len(committed - mes.seen.keys()),
        duplicated=mes.repeats + sum(count - 1 for count in mes.seen.values()),
        gaps=mes.gaps,
        left=left,
    )


def restart(broker: Mosquitto, down_s: float = 0.2) -> None:
    """kill -9 of the broker, which then comes back without its memory."""
    broker.close()
    time.sleep(down_s)
    broker.start()


def config_of(broker: Mosquitto, receipts: str | None = None) -> MqttConfig:
    """A station at this broker."""
    return MqttConfig(port=broker.port, station="st1", keepalive_s=2, receipts=receipts)


@contextlib.contextmanager
def fork(target: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """Run `target(*arguments, connection)` in a process; the other end of the connection."""
    ours, theirs = _FORK.Pipe()
    process = _FORK.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()
        ours.close()


def rss_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
