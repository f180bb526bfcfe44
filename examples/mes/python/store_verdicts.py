"""Store a station's verdicts in SQLite, each once, trusting no memory: the core of an MES side.

    pip install 'paho-mqtt>=2.2'
    python store_verdicts.py acme/berlin/hall2/l3/station-1 verdicts.db --host broker

A message is confirmed to the broker only after it is on disk, and the broker keeps what comes while
this program is away (a week). A repeat finds its `id` there. Holes in `streamSeq` are what you have
not got: ask for them with the command `replay` (send_command.py). With receipts the station sends
them by itself: `forge-station listen --receipts` is the reference.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
from typing import Any

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

TABLE = """
create table if not exists verdicts(
    id text primary key, source text, epoch text, streamSeq integer, partId text, verdict text,
    good integer, body text);
create index if not exists flow on verdicts(source, epoch, streamSeq);
"""


def store(db: sqlite3.Connection, body: bytes) -> dict[str, Any] | None:
    """On disk when it returns. None: it was there already."""
    message: dict[str, Any] = json.loads(body)
    with db:
        added = db.execute(
            "insert or ignore into verdicts values (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                message["id"],
                message["source"],
                message["epoch"],
                message["streamSeq"],
                message["partId"],
                message["verdict"],
                message["verdict"] == "PASS",  # only this word is good
                body.decode(),
            ),
        ).rowcount
    return message if added else None


def holes(db: sqlite3.Connection) -> list[tuple[str, int, int]]:
    """(epoch, first, last) of numbers that are missing between those that are there."""
    return db.execute(
        "select epoch, streamSeq + 1, following - 1 from (select epoch, streamSeq,"
        " lead(streamSeq) over (partition by source, epoch order by streamSeq) following"
        " from verdicts) where following > streamSeq + 1"
    ).fetchall()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("root", help="topic root of the station, the levels before insp/v1")
    parser.add_argument("database", help="SQLite file; made when it is not there")
    parser.add_argument("--host", default="127.0.0.1", help="broker (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=1883, help="default 1883")
    parser.add_argument("--id", default="store-verdicts", help="one for each copy that runs")
    parser.add_argument("--ca", help="CA of the broker; with --cert and --key: TLS")
    parser.add_argument("--cert", help="your certificate at the broker (PEM)")
    parser.add_argument("--key", help="its key (PEM)")
    parser.add_argument("--count", type=int, help="stop after so many new verdicts")
    args = parser.parse_args()

    db = sqlite3.connect(args.database, check_same_thread=False)
    db.execute("pragma journal_mode=wal")
    db.execute("pragma synchronous=full")
    db.executescript(TABLE)
    # All events, although only verdicts are stored: what nobody subscribes to waits at the station.
    topic = f"{args.root}/insp/v1/evt/#"
    client = mqtt.Client(
        CallbackAPIVersion.VERSION2, args.id, protocol=mqtt.MQTTv5, manual_ack=True
    )
    if args.ca:
        client.tls_set(args.ca, args.cert, args.key)
    stored = 0

    def on_connect(client: mqtt.Client, _: Any, __: Any, reason: Any, ___: Any) -> None:
        print(f"connected: {reason}", file=sys.stderr)
        client.subscribe(topic, 1)

    def on_message(client: mqtt.Client, _: Any, message: mqtt.MQTTMessage) -> None:
        nonlocal stored
        verdict = message.topic.endswith("/evt/verdict")
        found = store(db, message.payload) if verdict else None
        client.ack(message.mid, message.qos)  # not before it is on disk
        if found is None:
            return
        print(f"{found['verdict']:<7} part {found['partId']}  #{found['streamSeq']}", flush=True)
        for epoch, first, last in holes(db):
            print(f"missing: {first} to {last} of epoch {epoch}", file=sys.stderr)
        stored += 1
        if args.count and stored >= args.count:
            client.disconnect()

    client.on_connect = on_connect
    client.on_message = on_message
    properties = Properties(PacketTypes.CONNECT)
    properties.SessionExpiryInterval = 7 * 86400
    client.connect(args.host, args.port, 15, clean_start=False, properties=properties)
    client.loop_forever(retry_first_connection=True)
    db.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
