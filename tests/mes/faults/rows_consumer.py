"""Rows 17 and 19: a consumer that forgot its session, and a long run in short."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

from forge_station.mes import outbox_writer
from forge_station.mes.consumer import Consumer
from forge_station.mes.listen import Listener
from forge_station.mes.outbox import Outbox
from forge_station.mes.publisher import Publisher
from forge_station.mes.topics import MqttConfig, topic_of
from tests.mes.faults.load import TIMING, config_of, fork, restart, rss_bytes
from tests.mes.faults.table import Checks, Result, Row
from tests.mes.rig import Mosquitto, wait_for


def new_session(folder: Path, short: bool) -> Result:
    """Row 17."""
    missed, checks = 30 if short else 3_000, Checks()
    file = folder / "mes.json"
    with Mosquitto(folder) as broker, Outbox(folder / "o.db", ballast_bytes=0) as outbox:
        config = config_of(broker)
        topic = topic_of(config, "verdict")

        def put(count: int) -> None:
            for _ in range(count):
                outbox.put("verdict", topic, b'{"schema":"verdict/1.0"}')

        with Publisher(outbox, config, timing=TIMING) as publisher:
            numbers: list[int] = []
            with Consumer(config, "mes", file) as consumer:
                put(10)
                _take(consumer, numbers, 10)
                consumer.next(0.01)
                wait_for(  # it is told where it began, and writes that down
                    lambda: (
                        consumer.next(0.02) is None
                        and file.exists()
                        and '"upto": 10' in file.read_text()
                    ),
                    5.0,
                )
            restart(broker)  # its session is gone
            checks.that(wait_for(lambda: publisher.stats().connected, 10.0), "no connection")
            with Listener(config, statuses=False):  # the broker has somebody to give it to
                put(missed)
                checks.that(publisher.drain(60.0), "not drained")
            with Consumer(config, "mes", file) as consumer:
                put(1)
                _take(consumer, numbers, missed + 1)
                consumer.next(1.0)
                repeats = consumer.figures().repeats
            every = outbox.replay(1, outbox.span()[1] - 1, outbox.epoch)
            checks.that(every.missing == (), f"not held any more: {every.missing}")
    expected = list(range(1, 12 + missed))
    lost = sorted(set(expected) - set(numbers))[:5]
    twice = len(numbers) - len(set(numbers))
    text = f"not exactly what was missing: lost {lost}, {twice} twice"
    checks.that(sorted(numbers) == expected, text)
    note = f"{missed} missed, sent again without those it had, {repeats} repeats"
    return Result(
        len(expected), len(set(numbers)), len(set(expected) - set(numbers)),
        len(numbers) - len(set(numbers)) + repeats, note, tuple(checks.faults),
    )  # fmt: skip


def _take(consumer: Consumer, numbers: list[int], count: int) -> None:
    deadline = time.monotonic() + 60
    while count and time.monotonic() < deadline:
        delivery = consumer.next(1.0)
        if delivery is not None:
            numbers.append(delivery.number)
            count -= 1


def run_on(path: Path, config: MqttConfig, seconds: float, reports: Connection) -> None:
    """The station's process: everything as fast as it goes; memory, handles and file over time."""
    outbox_writer.MAINTENANCE_S = 0.5  # delete rows past their time so often
    body = b'{"schema":"verdict/1.0","text":"%s"}' % (b"x" * 1500)
    topic = topic_of(config, "verdict")
    with (
        Outbox(path, ballast_bytes=0, keep_acked_s=2.0, max_bytes=64 << 20) as outbox,
        Publisher(outbox, config, timing=TIMING) as publisher,
    ):
        count, began, sampled_at = 0, time.monotonic(), 0.0
        while time.monotonic() - began < seconds:
            outbox.put("verdict", topic, body)
            count += 1
            if count % 200 == 0:
                wait_for(lambda: outbox.pending < 400, 30.0)
            if time.monotonic() - sampled_at > seconds / 20:
                sampled_at = time.monotonic()
                handles = len(os.listdir("/proc/self/fd"))
                reports.send((count, rss_bytes(), handles, outbox.counts().bytes))
        drained = publisher.drain(30.0)
        reports.send((count, outbox.pending, drained))


def soak(folder: Path, short: bool) -> Result:
    """Row 19."""
    seconds, checks = 2.0 if short else 60.0, Checks()
    with Mosquitto(folder) as broker:
        config = config_of(broker)
        samples, got = [], 0
        with (
            Listener(config, client_id="mes", statuses=False) as listener,
            fork(run_on, folder / "o.db", config, seconds) as reports,
        ):
            while not samples or len(samples[-1]) != 3:  # the last word of a process that ends
                got += listener.arrived(0.05) is not None
                if reports.poll():
                    samples.append(reports.recv())
            while listener.arrived(1.0) is not None:
                got += 1
    committed, left, drained = samples.pop()
    half = len(samples) // 2
    memory = max(item[1] for item in samples[half:]) - max(item[1] for item in samples[:half])
    handles = samples[-1][2] - samples[half][2]
    size = max(item[3] for item in samples) >> 20
    checks.that(drained and not left, f"{left} left")
    checks.that(got >= committed, f"{committed - got} lost")
    checks.that(memory < 8 << 20, f"memory grew by {memory >> 20} MiB in the second half")
    checks.that(handles <= 1, f"{handles} more open files")
    checks.that(size <= 80, f"the file has {size} MiB")
    note = (
        f"{committed / seconds:.0f} msg/s; second half: memory {memory / 2**20:+.1f} MiB, open"
        f" files {handles:+d}; database at most {size} MiB"
    )
    return Result(committed, got, max(0, committed - got), max(0, got - committed), note,
                  tuple(checks.faults))  # fmt: skip


ROWS = [
    Row("17", "consumer comes back without a session", "exactly the missing set", new_session),
    Row("19", "long run in short: memory, handles, file", "flat", soak),
]
