"""Lose nothing: verdicts into SQLite with forge-station's consumer library and receipts.

    python consumer_of_record.py station.yaml verdicts.db --name mes
    python consumer_of_record.py station.yaml verdicts.db --tls-cert mes.crt --tls-key mes.key

It runs where forge-station is installed, which need not be the station.

The station sends again what is missing here, whatever happens to broker, station or this program.
With `mqtt.receipts: mes` in the station file (level 2) nothing counts as delivered before it is in
the database.
"""

from __future__ import annotations

import argparse
import sqlite3
from pathlib import Path

from forge_station.config import load_station
from forge_station.mes import party
from forge_station.mes.consumer import Consumer


def main() -> None:
    """Store until interrupted, or until `--count` events came."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("station", type=Path, help="station file: the broker, the station's root")
    parser.add_argument("database", type=Path)
    parser.add_argument("--name", default="mes", help="of this consumer, unique at the broker")
    parser.add_argument("--count", type=int, help="stop after so many events")
    party.add_arguments(parser)
    options = parser.parse_args()
    config = party.config_of(options, load_station(options.station).mqtt)
    database = sqlite3.connect(options.database)
    database.execute(
        "create table if not exists events(id text primary key, stream text, number integer,"
        " epoch text, body text)"
    )
    left = options.count
    watermark = options.database.with_suffix(".watermark.json")
    with Consumer(config, options.name, watermark) as consumer:
        for event in consumer:
            with (
                database
            ):  # on disk before the loop goes on; a repeat after a crash changes nothing
                database.execute(
                    "insert or ignore into events values (?, ?, ?, ?, ?)",
                    (event.id, event.stream, event.number, event.epoch, event.body.decode()),
                )
            print(f"{event.stream} {event.number}{' (late)' if event.late else ''}", flush=True)
            if left is not None:
                left -= 1
                if not left:
                    break


if __name__ == "__main__":
    main()
