"""Row 14: commands that must not be obeyed, over a real broker to a station that takes commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from forge_station.mes.command_client import Commander, signed
from forge_station.mes.command_store import CommandStore
from forge_station.mes.commands import CommandServer
from forge_station.mes.outbox import Outbox
from forge_station.mes.publisher import Publisher, Timing
from forge_station.mes.topics import MqttConfig
from tests.mes import signing_rig
from tests.mes.faults.table import Checks, Result, Row
from tests.mes.rig import Mosquitto, wait_for

QUICK = Timing(settle_s=0.0, reconnect_s=(0.1, 0.3))
Sent = tuple[dict[str, Any], bool, str]


def bad(config: MqttConfig, epoch: str) -> dict[str, Callable[[], Sent]]:
    """Code of the refusal -> message, whether it is retained, name of its topic."""

    def made(key: Any = signing_rig.KEY, **changes: Any) -> dict[str, Any]:
        given = {"root": config.root, "epoch": epoch, "issuer": "row 14", **changes}
        return signed("start", {}, key, **given)

    def unsigned() -> dict[str, Any]:
        return {name: value for name, value in made().items() if name != "sig"}

    other = config.root.rsplit("/", 1)[0] + "/other"
    return {
        "MALFORMED": lambda: (unsigned(), False, "start"),
        "UNKNOWN_KEY": lambda: (made(signing_rig.STRANGER), False, "start"),
        "BAD_SIGNATURE": lambda: ({**made(), "issuer": "boss"}, False, "start"),
        "EXPIRED": lambda: (made(lifetime_s=0.001), False, "start"),
        "RETAINED": lambda: (made(), True, "start"),
        "WRONG_TARGET": lambda: (made(root=other), False, "start"),
        "WRONG_NAME": lambda: (made(), False, "stop"),
        "TOO_LARGE": lambda: ({**made(), "pad": "x" * 1_000_000}, False, "start"),
    }


def refused(folder: Path, short: bool) -> Result:
    """Each of them `rounds` times, then one good command and its replay."""
    rounds, checks = 1 if short else 2, Checks()
    done: list[object] = []
    with ExitStack() as stack:
        broker = stack.enter_context(Mosquitto(folder))
        config = MqttConfig(port=broker.port, keepalive_s=5)
        outbox = stack.enter_context(Outbox(folder / "outbox.db", ballast_bytes=0))
        store = stack.enter_context(CommandStore(folder / "commands.db"))
        publisher = Publisher(outbox, config, timing=QUICK)
        handlers = {"start": done.append, "stop": done.append}
        settings = signing_rig.settings()
        server = CommandServer(config, settings, handlers, publisher, outbox, store)
        stack.enter_context(server)
        stack.enter_context(publisher)
        commander = stack.enter_context(Commander(config, signing_rig.KEY, "row 14"))
        cases = bad(config, commander.epoch())
        expected = []
        for code, case in list(cases.items()) * rounds:
            body, retained, name = case()
            commander.publish(name, json.dumps(body).encode(), retain=retained)
            expected.append(code)

        def codes() -> list[str]:
            rows = outbox.fetch("audit", 0, 999)
            return [str(json.loads(row.body).get("code")) for row in rows]

        wait_for(lambda: len(codes()) >= len(expected), 20.0)
        checks.that(codes() == expected, f"audited {codes()}, expected {expected}")
        checks.that(not done, f"{len(done)} were carried out")
        reply = commander.send("start", timeout_s=20.0)
        checks.that(reply["status"] == "SUCCEEDED", f"a good command: {reply}")
        good = signed(
            "start", {}, signing_rig.KEY, root=config.root, epoch=commander.epoch(), issuer="m"
        )
        for _ in range(5):
            commander.publish("start", json.dumps(good).encode())
        wait_for(lambda: len(codes()) >= len(expected) + 6, 20.0)
        checks.that(len(done) == 2, f"two commands, one of them sent 5 times: done {len(done)}")
    note = f"{len(expected)} bad commands refused and audited, 4 repeats known again"
    return Result(note=note, faults=tuple(checks.faults))


ROWS = (
    Row("14", "bad commands", "refused, audited, no state change", refused),
)  # fmt: skip
