"""What is frozen of interface 1.0: every message as this code writes it, and every schema.

`python -m tests.mes.golden` writes the files anew: the examples that the wheel ships and the
AsyncAPI document quotes, and the schemas that later ones are held against. On purpose only.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from forge_station.mes import payloads, schema, stamp
from tests.mes import signing_rig
from tests.mes.rig import Cell, verdict

EXAMPLES = Path(payloads.__file__).parent / "examples"
SCHEMAS = Path(__file__).parent / "golden" / "schemas-1.0.json"
SOURCE = "acme/berlin/hall2/l3/station-1"
EPOCH, BOOT = "5f0c2a91", "9b1e77d4"
NOW = "2026-11-30T10:38:37.912Z"
RESULT = "019ad4b2-6f1d-7c3e-9a50-2b6d1f0e8c47"
BLOB: list[Cell] = [(row, column) for row in (6, 7) for column in (3, 4, 5)]


def delivered(message: payloads.Message, seq: int, number: int) -> dict[str, Any]:
    """An event as the outbox sends it."""
    body = stamp.stamped(
        message.body,
        id=message.id,
        stream=message.stream,
        epoch=EPOCH,
        seq=seq,
        streamSeq=number,
        bootId=BOOT,
    )
    found: dict[str, Any] = json.loads(body)
    return found


def status(kind: str, /, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(payloads.status_body(kind, SOURCE, fields))
    return found


def events() -> dict[str, dict[str, Any]]:
    record = verdict(BLOB, (), BLOB[:2], result_id=RESULT).to_dict()
    (result,) = payloads.messages_of(
        record, SOURCE, sw_version="0.1.0", context={"orderId": "4711"}
    )
    grid = payloads.Message(
        "grid", f"{RESULT}.grid", payloads.encode(payloads.grid_body(record, SOURCE))
    )
    alarm = payloads.alarm_message(
        "CERT_EXPIRING",
        "station-1.crt ends in 29.5 days",
        SOURCE,
        severity=500,
        instance_id="019ad4b2-0000-7000-8000-000000000001",
    )
    audit = payloads.audit_message(
        SOURCE,
        {
            "action": "setThreshold",
            "outcome": "SUCCEEDED",
            "detail": "setThreshold: done",
            "cmdId": "019ad4b2-7000-7000-8000-0000000000aa",
            "keyId": signing_rig.public(signing_rig.KEY).id,
            "keyName": "mes-1",
            "issuer": "j.doe",
            "topic": f"{SOURCE}/insp/v1/in/cmd/setThreshold",
            "args": {"name": "defect_fail", "value": 0.45},
            "before": {"defect_fail": 0.5},
            "after": {"defect_fail": 0.45},
        },
    )
    ids = {"alarm": "019ad4b2-0000-7000-8000-000000000001.raised", "audit": RESULT[:-2] + "a1"}
    found = {"verdict": delivered(result, 1042, 977), "grid": delivered(grid, 1041, 12)}
    for name, message, numbers in (("alarm", alarm, (1040, 31)), ("audit", audit, (1043, 8))):
        named = payloads.Message(message.stream, ids[name], message.body)
        found[name] = delivered(named, *numbers)
    return found


def others() -> dict[str, dict[str, Any]]:
    place = {"bootId": BOOT, "epoch": EPOCH}
    record = verdict(BLOB, (), BLOB[:2], result_id=RESULT).to_dict()
    command = signing_rig.message(
        "setThreshold",
        {"name": "defect_fail", "value": 0.45},
        now=1_796_000_000.0,
        cmdId="019ad4b2-7000-7000-8000-0000000000aa",
        counter=1796000000000000,
        issuer="j.doe",
        target={"root": SOURCE, "epoch": EPOCH},
    )
    return {
        "conn": status("conn", state="ONLINE", **place),
        "birth": status(
            "birth",
            **place,
            firstSeqHeld=12,
            nextSeq=1044,
            schemas=["alarm/1.0", "verdict/1.0", "grid/1.0", "audit/1.0"],
            previousShutdown="clean",
            capabilities=["command:ping", "command:replay", "command:setThreshold"],
            model={"name": "nano-demo", "version": "0.1.0", "precision": "int8"},
        ),
        "state": status(
            "state", state="OPERATIONAL", mode="READY", flags={"advisory": False}, text="certified"
        ),
        "last": status("last", **payloads.last_body(record)),
        "health": status(
            "health",
            bootId=BOOT,
            uptimeS=86400.0,
            state="OPERATIONAL",
            mode="READY",
            alarms=["CERT_EXPIRING"],
            outbox={"depth": 0, "bytes": 1_234_944, "fillPct": 0.1, "dead": 0},
            link={"connected": True, "reconnects": 1},
        ),
        "reply": status(
            "reply",
            cmdId=command["cmdId"],
            name="setThreshold",
            status="SUCCEEDED",
            detail="setThreshold: done",
            result={"before": {"defect_fail": 0.5}, "after": {"defect_fail": 0.45}},
        ),
        "job": status(
            "job", jobId="release-7", state="TRIAL", version=9, progress=0.4,
            model={"name": "nano-demo", "version": "0.2.0", "releaseCounter": 4},
        ),
        "command": command,
        "receipt": {
            "schema": "receipt/1.0",
            "consumer": "historian",
            "time": NOW,
            "positions": [
                {
                    "stream": "verdict", "epoch": EPOCH, "upto": 975, "top": 977,
                    "missing": [[976, 976]],
                }
            ],
        },
        "gone": status(
            "gone", stream="verdict", epoch=EPOCH, consumer="historian", ranges=[[3, 7]]
        ),
    }  # fmt: skip


def build() -> dict[str, dict[str, Any]]:
    """Kind -> message, as this code writes it at a fixed time."""
    with (
        patch("forge_station.mes.payloads.utc_now", lambda: NOW),
        patch("forge_station.mes.payloads.time_quality", lambda: "synced"),
    ):
        return {**events(), **others()}


def read() -> dict[str, dict[str, Any]]:
    """Kind -> message, as it was frozen."""
    return {item.stem: json.loads(item.read_text()) for item in sorted(EXAMPLES.glob("*.json"))}


def write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(say: Callable[[str], None] = print) -> None:
    for name, message in build().items():
        write(EXAMPLES / f"{name}.json", message)
        say(f"{name}: {len(payloads.encode(message))} bytes")
    write(SCHEMAS, {name: schema.load(name) for name in schema.names()})


if __name__ == "__main__":
    main()
