"""Kill the broker or the station again and again under load, then count what a consumer got.

The consumer sends no receipts (level 1), subscribes before the first message and stays; 'committed'
are the ids that the station reported after `put` had returned. Longer than in the tests:

    PYTHONPATH=edge:. python -m tests.mes.kill_runs station mosquitto --kills 100
    PYTHONPATH=edge:. python -m tests.mes.kill_runs broker iotcore --kills 20
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from forge_station.mes.broker import EmbeddedBroker
from forge_station.mes.listen import Listener, Received
from forge_station.mes.outbox import Outbox
from forge_station.mes.publisher import Publisher, Timing
from forge_station.mes.topics import MqttConfig
from tests.mes.faults.load import Station
from tests.mes.rig import Mosquitto, wait_for


@dataclass(frozen=True)
class Result:
    """`unreported`: committed, but killed before it could be reported; they must arrive too."""

    kills: int
    committed: int
    arrived: int
    lost: int
    duplicates: int
    unreported: int
    missing_numbers: int
    ids_with_two_bodies: int
    left_in_outbox: int


def run(
    victim: str,
    broker: Mosquitto | EmbeddedBroker,
    folder: Path,
    *,
    kills: int,
    rate_hz: float = 100.0,
    between_s: tuple[float, float] = (0.4, 1.2),
    timing: Timing | None = None,
    seed: int = 7,
) -> Result:
    """`victim` is "station", "broker" or "both". The broker must be running."""
    rng = random.Random(seed)
    config = MqttConfig(port=broker.port, station="st1", keepalive_s=2)
    timing = timing or Timing()
    station = Station(config, folder / "outbox.db", rate_hz, timing=timing)
    received: list[Received] = []
    arrived: set[str] = set()
    with Listener(config, client_id="mes", repeats=True, statuses=False) as listener:
        ending = threading.Event()

        def collect() -> None:
            while not ending.is_set():
                item = listener.next(0.2)
                if item is not None:
                    received.append(item)
                    arrived.add(str(item.message["id"]))

        collector = threading.Thread(target=collect)
        collector.start()
        station.start(rows=5)
        for _ in range(kills):
            time.sleep(rng.uniform(*between_s))
            if victim in ("station", "both"):
                station.kill()
            if victim in ("broker", "both"):
                kill_broker(broker)
                time.sleep(0.3)
                broker.start()
            if victim in ("station", "both"):
                station.start(rows=5)
        time.sleep(0.5)
        station.kill()
        with (
            Outbox(station.outbox, ballast_bytes=0) as outbox,
            Publisher(outbox, config, timing=timing) as publisher,
        ):
            publisher.drain(30.0)
            left = outbox.pending
        wait_for(lambda: arrived.issuperset(station.committed), 10.0)
        time.sleep(0.3)  # repeats
        ending.set()
        collector.join()
        missing = sum(len(numbers) for numbers in listener.missing().values())
    bodies: dict[str, set[bytes]] = {}
    for item in received:
        bodies.setdefault(str(item.message["id"]), set()).add(item.body)
    committed = set(station.committed)
    return Result(
        kills=kills,
        committed=len(committed),
        arrived=len(bodies),
        lost=len(committed - bodies.keys()),
        duplicates=len(received) - len(bodies),
        unreported=len(bodies.keys() - committed),
        missing_numbers=missing,
        ids_with_two_bodies=sum(len(item) > 1 for item in bodies.values()),
        left_in_outbox=left,
    )


def kill_broker(broker: Mosquitto | EmbeddedBroker) -> None:
    """kill -9, which is how both of them are closed."""
    broker.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("victim", choices=["station", "broker", "both"])
    parser.add_argument("broker", choices=["mosquitto", "iotcore"])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rate-hz", type=float, default=100.0)
    parser.add_argument("--between-s", type=float, nargs=2, default=(0.4, 1.2))
    parser.add_argument("--settle-s", type=float, default=Timing().settle_s)
    parser.add_argument("--resend-s", type=float, default=Timing().resend_s)
    parser.add_argument("--reconnect-s", type=float, nargs=2, default=Timing().reconnect_s)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        broker = Mosquitto(folder) if options.broker == "mosquitto" else EmbeddedBroker()
        with broker:
            result = run(
                options.victim, broker, folder,
                kills=options.kills, rate_hz=options.rate_hz, seed=options.seed,
                between_s=tuple(options.between_s),
                timing=Timing(
                    settle_s=options.settle_s,
                    resend_s=options.resend_s,
                    reconnect_s=tuple(options.reconnect_s),
                ),
            )  # fmt: skip
    print(asdict(result))


if __name__ == "__main__":
    main()
