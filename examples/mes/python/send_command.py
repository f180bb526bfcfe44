"""Send a signed command to a station and print its answer, with nothing of forge-station installed.

pip install 'paho-mqtt>=2.2' cryptography rfc8785
openssl genpkey -algorithm ed25519 -out mes.pem
openssl pkey -in mes.pem -pubout -out mes.pub    # into commands.keys of the station file
python send_command.py acme/berlin/hall2/l3/station-1 ping --key mes.pem --host broker
python send_command.py ... replay --args '{"fromSeq": 17, "toSeq": 20, "epoch": "5f0c2a91"}'
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import queue
import sys
import time
import uuid
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import paho.mqtt.client as mqtt
import rfc8785
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from paho.mqtt.enums import CallbackAPIVersion

WAIT_S = 30.0


def signed(
    key: Ed25519PrivateKey, root: str, epoch: str, name: str, args: dict[str, Any]
) -> dict[str, Any]:
    """The command message: who, what, for whom, until when, and the signature over all of it."""
    now = datetime.now(timezone.utc)
    body: dict[str, Any] = {
        "schema": "command/1.0",
        "cmdId": str(uuid.uuid4()),
        "name": name,
        "args": args,
        "issuedAt": rfc3339(now),
        "expiresAt": rfc3339(now + timedelta(seconds=WAIT_S)),
        "issuer": "send_command.py",
        "counter": time.time_ns() // 1000,  # grows with every command of this key
        "target": {"root": root, "epoch": epoch},
    }
    raw = key.public_key().public_bytes_raw()
    return {
        **body,
        "sig": {
            "keyId": hashlib.sha256(raw).hexdigest()[:16],
            "alg": "ed25519",
            "value": base64.b64encode(key.sign(rfc8785.dumps(body))).decode(),
        },
    }


def rfc3339(time_: datetime) -> str:
    return time_.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("root", help="topic root of the station, the levels before insp/v1")
    parser.add_argument("name", help="ping, stop, start, replay, capture ... (docs/MES.md)")
    parser.add_argument("--args", type=json.loads, default={}, help="a JSON object")
    parser.add_argument("--key", type=Path, required=True, help="that signs: Ed25519, PEM")
    parser.add_argument("--host", default="127.0.0.1", help="broker (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=1883, help="default 1883")
    parser.add_argument("--ca", help="CA of the broker; with --cert and --tls-key: TLS")
    parser.add_argument("--cert", help="your certificate at the broker (PEM)")
    parser.add_argument("--tls-key", help="its key (PEM)")
    given = parser.parse_args()

    key = load_pem_private_key(given.key.read_bytes(), None)
    if not isinstance(key, Ed25519PrivateKey):
        sys.exit(f"{given.key} is no Ed25519 key")
    base = f"{given.root}/insp/v1"
    arrived: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    client = mqtt.Client(CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
    if given.ca:
        client.tls_set(given.ca, given.cert, given.tls_key)
    client.on_connect = lambda client, *_: client.subscribe(
        [(f"{base}/sts/conn", 1), (f"{base}/rsp/+", 1)]
    )
    client.on_message = lambda _, __, item: arrived.put(json.loads(item.payload))
    client.connect(given.host, given.port, 15)
    client.loop_start()

    wanted = None
    deadline = time.monotonic() + WAIT_S
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            message = arrived.get(timeout=left_s)
        except queue.Empty:
            break
        if message["schema"] == "conn/1.0" and wanted is None:
            command = signed(key, given.root, message["epoch"], given.name, given.args)
            wanted = command["cmdId"]
            client.publish(f"{base}/in/cmd/{given.name}", json.dumps(command), qos=1)
        elif message.get("cmdId") == wanted and message["status"] != "IN_PROGRESS":
            print(json.dumps(message, indent=2))
            client.disconnect()
            return 0 if message["status"] == "SUCCEEDED" else 1
    sys.exit("no station there" if wanted is None else "the station does not answer")


if __name__ == "__main__":
    sys.exit(main())
