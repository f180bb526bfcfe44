"""What commands do to a station, and that they wait for the part in work."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba", reason="the simulator needs the extra demo")

from forge_station import control
from forge_station.capture.base import Trigger
from forge_station.contract.error import ContractError
from forge_station.contract.spec import LineSpec, Product
from forge_station.contract.verdict import Outcome
from forge_station.control import Control, served
from forge_station.errors import StationError
from forge_station.mes.alarms import Alarms
from forge_station.mes.command import CommandConfig
from forge_station.mes.link import Inbound
from forge_station.mes.outbox import Outbox
from forge_station.mes.publisher import Publisher
from forge_station.mes.topics import MqttConfig, topic_of
from forge_station.permit import Permit
from forge_station.pipeline import Inspector
from forge_station.station import Station
from tests.mes import signing_rig
from tests.mes.rig import ScriptedBroker, wait_for
from tests.station.certificates import certified
from tests.station.fake_model import FakeModel
from tests.station.test_station import NUT, Bench, PartInspector

OPEN = CommandConfig(thresholds={"defect_fail": (0.4, 0.6), "size_tolerance": (0.5, 1.0)})
TWO = LineSpec(
    "l1",
    (
        Product("NUT", "single", ("workpiece",), {NUT: 1}),
        Product("OTHER", "single", ("workpiece",), {"hex_nut M10": 1}),
    ),
)


@pytest.fixture
def bench(tmp_path: Path) -> Any:
    with Outbox(tmp_path / "outbox.sqlite", ballast_bytes=0) as outbox:
        yield Bench(tmp_path, outbox)


def make(bench: Bench, **changes: Any) -> Station:
    return bench.make(["ok"] * 9, config=bench.config(**{"commands": OPEN, **changes}))


def test_stopped_station_calls_no_part_good_and_goes_on_after_start(bench: Bench) -> None:
    station = make(bench)
    told: list[str | None] = []
    does = Control(station, stopped=told.append).handlers()
    assert station.inspect(Trigger("1", "NUT")).verdict.outcome is Outcome.PASS
    assert does["stop"]({"reason": "tray changed"}) == {
        "before": {"stopped": None},
        "after": {"stopped": "tray changed"},
    }
    verdict = station.inspect(Trigger("2", "NUT")).verdict
    assert (verdict.outcome, verdict.reasons[0].code) == (Outcome.ERROR, "STATION_STOPPED")
    does["start"]({})
    assert station.inspect(Trigger("3", "NUT")).verdict.outcome is Outcome.PASS
    assert told == ["tray changed", None]


def test_start_does_not_end_a_hold(bench: Bench) -> None:
    station = make(bench)
    does = Control(station).handlers()
    station.tell("the outbox is full")
    for command in ("stop", "start"):
        does[command]({})
        assert (station.state["state"], station.state["text"]) == ("ERROR", "the outbox is full")
        assert station.state["flags"].get("stopped", False) is (command == "stop")


def test_selected_product_is_that_of_triggers_without_one(bench: Bench) -> None:
    station = make(bench, line=TWO)
    does = Control(station).handlers()
    assert station.inspect(Trigger("1", "")).verdict.outcome is Outcome.ERROR
    does["selectRecipe"]({"productId": "NUT"})
    assert station.inspect(Trigger("2", "")).verdict.product == "NUT"
    assert station.inspect(Trigger("3", "OTHER")).verdict.product == "OTHER"
    with pytest.raises(StationError, match="NUT, OTHER"):
        does["selectRecipe"]({"productId": "BOLT"})
    assert station.selected == "NUT"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("defect_fail", 0.61, "defect_fail from 0.4 to 0.6"),
        ("defect_fail", 0.39, "defect_fail from 0.4 to 0.6"),
        ("defect_unsure", 0.3, "not open to commands"),
        ("no_such", 0.3, "not open to commands"),
    ],
)
def test_threshold_outside_what_the_file_opens_is_refused(
    bench: Bench, name: str, value: float, said: str
) -> None:
    station = make(bench)
    before = station.inspector
    with pytest.raises(ContractError, match=said):
        Control(station).handlers()["setThreshold"]({"name": name, "value": value})
    assert station.inspector is before


def test_second_look_is_not_opened_for_a_model_that_has_not_learnt_it(bench: Bench) -> None:
    station = make(bench, commands=CommandConfig(thresholds={"look_again": (0.0, 1.0)}))
    with pytest.raises(ContractError, match="not trained on closer looks"):
        Control(station).handlers()["setThreshold"]({"name": "look_again", "value": 0.5})
    assert station.inspector.thresholds.look_again == 1.0
    assert not station.in_work.locked()


def test_threshold_is_changed_and_the_certificate_held_against_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def read_permit(bundle: Path, manifest: Any, keys: Any, *rest: Any) -> Permit:
        asked.extend(rest)
        return Permit(refusal="the recipe was changed")

    monkeypatch.setattr(control, "read_permit", read_permit)
    station = make(bench, changed_since_certificate=("light",))
    found = Control(station).handlers()["setThreshold"]({"name": "defect_fail", "value": 0.45})
    assert found is not None
    assert (found["before"], found["after"]) == ({"defect_fail": 0.5}, {"defect_fail": 0.45})
    released, used, changed = asked
    assert (released.defect_fail, used.defect_fail) == (0.5, 0.45)
    assert changed == ("light", "recipe")
    assert station.inspector.thresholds.defect_fail == 0.45
    verdict = station.inspect(Trigger("1", "NUT")).verdict
    assert verdict.outcome is Outcome.UNSURE  # what passed before is no longer certified
    assert verdict.reasons[0].code == "NO_CERTIFICATE"


def test_threshold_waits_for_the_part_in_work(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "read_permit", lambda *_: certified())
    station = make(bench)
    does = Control(station).handlers()["setThreshold"]
    done = threading.Event()

    def change() -> None:
        does({"name": "defect_fail", "value": 0.45})
        done.set()

    with station.in_work:
        thread = threading.Thread(target=change)
        thread.start()
        assert not done.wait(0.1)
        assert station.inspector.thresholds.defect_fail == 0.5
    assert done.wait(5)
    thread.join()


def test_part_that_does_not_end_lets_the_command_fail(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "PART_WAIT_S", 0.05)
    station = make(bench)
    with station.in_work, pytest.raises(StationError, match="does not end"):
        Control(station).handlers()["setThreshold"]({"name": "defect_fail", "value": 0.45})


def test_capture_puts_a_part_of_the_right_product(bench: Bench) -> None:
    put: list[Trigger] = []

    def capture(part: Trigger) -> Trigger:
        put.append(part)
        return replace(part, serial=part.serial or "s1-000007")

    does = Control(make(bench, line=TWO), capture=capture).handlers()["capture"]
    with pytest.raises(ContractError, match="NUT, OTHER"):
        does({})
    assert does({"productId": "NUT"}) == {"partId": "s1-000007", "productId": "NUT"}
    does({"productId": "OTHER", "partId": "x"})
    assert [(part.serial, part.part_number) for part in put] == [("", "NUT"), ("x", "OTHER")]
    assert all(part.t_utc_ns for part in put), "a part that waits too long is refused by its time"


def test_alarm_is_acknowledged_once(bench: Bench) -> None:
    station = make(bench)
    alarms = Alarms(bench.outbox, station.config.mqtt)
    alarms.raise_("LINK_DOWN", "no broker")
    does = Control(station, alarms).handlers()["ackAlarm"]
    (active,) = alarms.active()
    does({"instanceId": active.instance_id})
    assert alarms.active()[0].acked
    with pytest.raises(ContractError, match="no alarm to acknowledge"):
        does({"instanceId": active.instance_id})


def test_replay_says_what_it_cannot_give(bench: Bench) -> None:
    station = make(bench)
    does = Control(station).handlers()["replay"]
    station.inspect(Trigger("1", "NUT"))
    epoch = bench.outbox.epoch
    with pytest.raises(ContractError, match="the smaller first"):
        does({"fromSeq": 2, "toSeq": 1, "epoch": epoch})
    with pytest.raises(StationError):
        does({"fromSeq": 1, "toSeq": 1, "epoch": "ffffffff"})


def test_only_what_is_there_is_offered(bench: Bench) -> None:
    names = set(Control(make(bench, commands=CommandConfig())).handlers())
    assert names == {"ping", "rebirth", "replay", "start", "stop", "selectRecipe"}


def test_threshold_that_does_not_exist_cannot_be_opened(bench: Bench) -> None:
    station = make(bench, commands=CommandConfig(thresholds={"defects": (0.0, 1.0)}))
    with pytest.raises(ContractError, match="defects"), served(Control(station)):
        pass


def test_command_over_the_link_stops_the_station_and_is_answered(bench: Bench) -> None:
    pytest.importorskip("rfc8785", reason="commands need the extra commands")
    config = bench.config(
        mqtt=MqttConfig(line="l1", station="s1"),
        commands=replace(OPEN, keys=signing_rig.settings("operator").keys),
    )
    broker = ScriptedBroker()
    publisher = Publisher(bench.outbox, config.mqtt, connect=broker.connect)
    inspector = PartInspector(FakeModel({"A": (NUT, 0.98)}), permit=certified())  # type: ignore[arg-type]
    assert isinstance(inspector, Inspector)
    station = Station(
        config, inspector, lambda _: None, bench.outbox, publisher  # type: ignore[arg-type,return-value]
    )  # fmt: skip
    with publisher, served(Control(station)):
        listening = topic_of(config.mqtt, "command", "+")
        assert wait_for(lambda: listening in broker.filters)

        def births() -> list[bytes]:
            return [item.body for item in broker.got if item.topic.endswith("sts/birth")]

        assert wait_for(lambda: any(b"command:stop" in body for body in births()))
        assert not any(b"command:deploy" in body for body in births())
        body = signing_rig.message(
            "stop", now=time.time(),
            target={"root": config.mqtt.root, "epoch": bench.outbox.epoch},
        )  # fmt: skip
        topic = topic_of(config.mqtt, "command", "stop")
        broker.sessions[-1].emit(Inbound(topic, json.dumps(body).encode()))
        assert wait_for(lambda: station.stopped)
        reply = topic_of(config.mqtt, "reply", str(body["cmdId"]))
        assert wait_for(lambda: any(item.topic == reply for item in broker.got))
    assert (bench.folder / "outbox-commands.sqlite").exists()
