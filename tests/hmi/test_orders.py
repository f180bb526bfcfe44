"""Orders from the panel: signed, through a real broker, to a real command service and alarms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

pytest.importorskip("rfc8785", reason="commands need the extra commands")

from starlette.testclient import TestClient

from forge_station.hmi.app import TOKEN, build, table
from forge_station.hmi.context import Context
from forge_station.hmi.users import Role
from forge_station.mes.alarms import Alarms
from forge_station.mes.command_store import CommandStore
from forge_station.mes.commands import CommandServer
from forge_station.mes.outbox import Outbox
from forge_station.mes.publisher import Publisher, Timing
from forge_station.mes.topics import MqttConfig
from tests.hmi.conftest import wait_for
from tests.hmi.stage import Stage
from tests.mes import signing_rig
from tests.mes.rig import MOSQUITTO, Mosquitto

ORIGIN = "http://127.0.0.1"
needs_mosquitto = pytest.mark.skipif(MOSQUITTO is None, reason="no mosquitto on this machine")


class Panel:
    """A panel with its operator, and what the station was told."""

    def __init__(self, folder: Path, stack: ExitStack, *, answered: bool = True) -> None:
        broker = stack.enter_context(Mosquitto(folder))
        mqtt = MqttConfig(port=broker.port, keepalive_s=5, line="fasteners")
        key = folder / "panel.pem"
        key.write_bytes(
            signing_rig.KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        )
        stage = stack.enter_context(Stage(folder / "station", {"commands": {"key": str(key)}}))
        self.context = Context.of(replace(stage.config, mqtt=mqtt))
        self.context.users.add("anna", Role.ADMIN, "246801")
        self.context.users.add("ben", Role.OPERATOR, "135790")
        outbox = stack.enter_context(Outbox(stage.config.outbox, ballast_bytes=0))
        self.alarms = Alarms(outbox, mqtt)
        self.told: list[tuple[str, Mapping[str, Any]]] = []
        publisher = stack.enter_context(
            Publisher(outbox, mqtt, timing=Timing(reconnect_s=(0.05, 0.2), settle_s=0.0))
        )
        if answered:
            store = stack.enter_context(CommandStore(folder / "commands.db"))
            stack.enter_context(
                CommandServer(
                    mqtt, signing_rig.settings("operator"),
                    {"stop": self._take("stop"), "start": self._take("start"),
                     "ackAlarm": self._acknowledge},
                    publisher, outbox, store,
                )
            )  # fmt: skip
        self.client = stack.enter_context(TestClient(build(self.context), base_url=ORIGIN))

    def login(self) -> None:
        answer = self.client.post(
            "/api/session/login", json={"name": "ben", "pin": "135790"}, headers={"origin": ORIGIN}
        )
        self.client.headers.update({"origin": ORIGIN, TOKEN: answer.json()["token"]})

    def order(self, name: str, **given: Any) -> tuple[int, dict[str, Any]]:
        answer = self.client.post(f"/api/order/{name}", json=given, headers={"origin": ORIGIN})
        return answer.status_code, answer.json()

    def _take(self, name: str) -> Any:
        return lambda args: self.told.append((name, args))

    def _acknowledge(self, args: Mapping[str, Any]) -> None:
        if not self.alarms.acknowledge(args["instanceId"]):
            from forge_station.contract.error import ContractError

            raise ContractError("no alarm to acknowledge", got=args["instanceId"])


@pytest.fixture
def panel(tmp_path: Path) -> Iterator[Panel]:
    with ExitStack() as stack:
        yield Panel(tmp_path, stack)


@needs_mosquitto
def test_an_operator_acknowledges_an_alarm_and_pauses_the_line(panel: Panel) -> None:
    panel.alarms.raise_("CAMERA_LOST", "no camera answers")
    (alarm,) = panel.alarms.active()
    assert panel.order("stop")[0] == 403  # a viewer commands nothing
    panel.login()
    assert panel.order("ack", instance=alarm.instance_id) == (200, {"status": "SUCCEEDED"})
    assert panel.alarms.active()[0].acked
    shown = wait_for(lambda: [a for a in panel.client.get("/api/live").json()["alarms"]
                              if a["acked"]])  # fmt: skip
    assert [item["instance_id"] for item in shown] == [alarm.instance_id]
    status, said = panel.order("ack", instance=alarm.instance_id)
    assert (status, said["error"]) == (409, "refused") and "no alarm" in said["text"]
    assert panel.order("stop")[0] == panel.order("start")[0] == 200
    assert panel.told == [("stop", {"reason": "at the panel, by ben"}), ("start", {})]
    assert panel.order("deploy")[0] == 404
    lines = [(line["action"], line["who"]) for line in panel.context.audit.lines()]
    assert lines[-2:] == [("order.stop", "ben"), ("order.start", "ben")]


@needs_mosquitto
def test_a_station_that_takes_no_commands_is_told_of(tmp_path: Path) -> None:
    with ExitStack() as stack:
        panel = Panel(tmp_path, stack, answered=False)
        panel.login()
        status, said = panel.order("stop")
        assert (status, said["error"]) == (504, "unanswered")


def test_without_a_key_there_are_no_orders(stage: Stage) -> None:
    assert not [path for _, path, _ in table(Context.of(stage.config)) if "order" in path]
