"""Rows 1 to 3: kill -9 of the station and of the broker under load."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

from forge_station.mes.link import WINDOW
from tests.mes.faults.load import TIMING, Counted, Mes, Station, config_of, restart, settle
from tests.mes.faults.table import Checks, Result, Row
from tests.mes.rig import Mosquitto, wait_for

DUPLICATES_PER_KILL = 5
"""On the average of many; one kill may meet a full window."""


def judged(counted: Counted, kills: int, checks: Checks, note: str, most: float) -> Result:
    """The counts against: nothing lost, nothing left, at most so many repeats a kill."""
    checks.that(counted.lost == 0, f"{counted.lost} lost")
    checks.that(counted.left == 0, f"{counted.left} left in the outbox")
    checks.that(
        counted.duplicated <= most * kills, f"{counted.duplicated} repeats in {kills} kills"
    )
    return Result(
        counted.committed, counted.delivered, counted.lost, counted.duplicated,
        f"{kills} kills, {counted.duplicated / kills:.1f} repeats each{note}", tuple(checks.faults),
    )  # fmt: skip


def station_killed(folder: Path, short: bool) -> Result:
    """Row 1."""
    kills, rng, checks = 3 if short else 200, random.Random(1), Checks()
    with Mosquitto(folder) as broker:
        config = config_of(broker)
        # The broker says who is not there, so that no station need wait for consumers: it sends
        # from its start, and is killed doing so.
        station = Station(config, folder / "outbox.db", timing=replace(TIMING, settle_s=0.0))
        with Mes(config, folder) as mes:
            for _ in range(kills):
                station.start()
                time.sleep(rng.uniform(0.2, 0.8))
                station.kill()
            counted = settle(station, mes)
    return judged(counted, kills, checks, "", WINDOW if short else DUPLICATES_PER_KILL)


def broker_killed(folder: Path, short: bool) -> Result:
    """Row 2."""
    kills, rng, checks = 1 if short else 50, random.Random(2), Checks()
    with Mosquitto(folder) as broker:
        config = config_of(broker)
        station = Station(config, folder / "outbox.db")
        with Mes(config, folder) as mes:
            station.start()
            for _ in range(kills):
                checks.that(_flows(station, mes), "what is committed does not reach the consumer")
                time.sleep(rng.uniform(0.5, 1.5))
                restart(broker)
            time.sleep(1.0)
            station.kill()
            counted = settle(station, mes)
    return judged(counted, kills, checks, "", WINDOW if short else DUPLICATES_PER_KILL)


def broker_killed_consumer_away(folder: Path, short: bool, receipts: str | None) -> Result:
    """Row 3. At level 1 the broker takes messages for the consumer's session and then dies."""
    kills, checks = 1 if short else 10, Checks()
    with Mosquitto(folder) as broker:
        config = config_of(broker, receipts)
        timing = replace(TIMING, resend_s=0.5)
        station = Station(config, folder / "outbox.db", timing=timing)
        with Mes(config, folder) as mes:
            station.start()
            for _ in range(kills):
                checks.that(_flows(station, mes), "what is committed does not reach the consumer")
                mes.leave()
                away = len(station.committed)
                wait_for(lambda away=away: len(station.committed) > away + 20, 10.0)
                time.sleep(2 * timing.resend_s)  # beyond what such a broker gets again anyway
                restart(broker)
                time.sleep(0.7)
                mes.come()
            station.kill()
            counted = settle(station, mes)
    if receipts is None:
        checks.that(counted.gaps > 0, "the consumer saw no gap: nothing was tried")
    return judged(counted, kills, checks, f", {counted.gaps} missing at worst", 200)


def _flows(station: Station, mes: Mes) -> bool:
    """Whether what is committed from now on arrives."""
    known = len(station.committed)

    def arrived() -> bool:
        fresh = station.committed[known : known + 5]
        return len(fresh) == 5 and mes.seen.keys() >= set(fresh)

    return wait_for(arrived, 20.0)


ROWS = [
    Row("1", "kill -9 of the station, 100 msg/s", "0 lost, at most 5 repeats a kill",
        station_killed),
    Row("2", "kill -9 of the broker, consumer there", "0 lost, at most 5 repeats a kill",
        broker_killed),
    Row("3", "kill -9 of the broker, consumer away, level 1",
        "the consumer sees the gap and gets it back",
        lambda folder, short: broker_killed_consumer_away(folder, short, None)),
    Row("3b", "kill -9 of the broker, consumer away, level 2", "0 lost",
        lambda folder, short: broker_killed_consumer_away(folder, short, "mes")),
]  # fmt: skip
