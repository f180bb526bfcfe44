"""Alarms: each change is told once, whatever fails between, and a restart forgets nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forge_station.errors import OutboxError
from forge_station.mes import schema, stamp
from forge_station.mes.alarms import CODES, Alarms
from forge_station.mes.outbox import Outbox
from forge_station.mes.topics import MqttConfig

CONFIG = MqttConfig(station="s1")


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    with Outbox(tmp_path / "outbox.sqlite", ballast_bytes=0) as found:
        yield found


def told(outbox: Outbox) -> list[dict[str, Any]]:
    """The alarm messages so far, each checked against its schema as it would be sent."""
    bodies = []
    for row in outbox.fetch("alarm", 0, 1000):
        sent = stamp.stamped(
            row.body, id=row.id, stream=row.stream, epoch=outbox.epoch, seq=row.seq,
            streamSeq=row.stream_seq, bootId=row.boot_id,
        )  # fmt: skip
        schema.require(json.loads(sent))
        bodies.append(json.loads(row.body))
    return bodies


def changes(outbox: Outbox) -> list[tuple[str, bool]]:
    return [(body["code"], body["active"]) for body in told(outbox)]


def test_a_condition_is_told_once_when_it_begins_and_once_when_it_ends(outbox: Outbox) -> None:
    alarms = Alarms(outbox, CONFIG)
    said = [alarms.set(True, "LINK_DOWN", "no broker", params={"host": "b"}) for _ in range(3)]
    assert said == [True, False, False]
    said = [alarms.set(False, "LINK_DOWN", "connected again") for _ in range(3)]
    assert said == [True, False, False]
    raised, cleared = told(outbox)
    assert raised["active"] and not cleared["active"]
    assert raised["instanceId"] == cleared["instanceId"] and raised["since"] == cleared["since"]
    assert (raised["text"], cleared["text"]) == ("no broker", "connected again")
    assert raised["params"] == {"host": "b"} and raised["severity"] == CODES["LINK_DOWN"].severity
    assert alarms.active() == ()
    alarms.raise_("LINK_DOWN", "again")
    assert told(outbox)[2]["instanceId"] != raised["instanceId"]


def test_keys_tell_alarms_of_one_code_apart_and_the_worst_comes_first(outbox: Outbox) -> None:
    alarms = Alarms(outbox, CONFIG)
    alarms.raise_("NO_CONSUMER", "stream grid", key="grid")
    alarms.raise_("NO_CONSUMER", "stream verdict", key="verdict")
    alarms.raise_("CAMERA_LOST", "unplugged")
    assert [item.code for item in alarms.active()] == ["CAMERA_LOST", "NO_CONSUMER", "NO_CONSUMER"]
    alarms.clear("NO_CONSUMER", key="grid")
    assert {item.key for item in alarms.active()} == {"", "verdict"}


def test_a_restart_neither_forgets_nor_repeats(outbox: Outbox) -> None:
    first = Alarms(outbox, CONFIG)
    first.raise_("DISK_LOW", "300 MB free")
    second = Alarms(outbox, CONFIG)
    assert [item.code for item in second.active()] == ["DISK_LOW"]
    assert not second.raise_("DISK_LOW", "still")
    assert second.clear("DISK_LOW", "2 GB free")
    assert changes(outbox) == [("DISK_LOW", True), ("DISK_LOW", False)]
    assert Alarms(outbox, CONFIG).active() == ()


class Refusing:
    """An outbox that is full for the next so many puts; `kill` True dies inside the put."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self.path = outbox.path
        self.refuse = 0
        self.kill = False

    def put(self, stream: str, topic: str, body: bytes, id: str | None = None) -> int:
        if self.refuse:
            self.refuse -= 1
            raise OutboxError("full")
        seq = self.outbox.put(stream, topic, body, id)
        if self.kill:
            raise KeyboardInterrupt
        return seq


def test_a_full_outbox_only_delays_what_is_told(outbox: Outbox) -> None:
    full = Refusing(outbox)
    alarms = Alarms(full, CONFIG)
    full.refuse = 3
    assert alarms.raise_("OUTBOX_FULL", "no room")
    assert [item.code for item in alarms.active()] == ["OUTBOX_FULL"]
    assert changes(outbox) == [] and not alarms.flush()
    restarted = Alarms(full, CONFIG)
    assert changes(outbox) == [], "the third refusal"
    assert restarted.flush() and changes(outbox) == [("OUTBOX_FULL", True)]
    full.refuse = 1
    restarted.clear("OUTBOX_FULL", "room again")
    assert restarted.active() == () and changes(outbox) == [("OUTBOX_FULL", True)]
    assert restarted.flush()
    assert changes(outbox) == [("OUTBOX_FULL", True), ("OUTBOX_FULL", False)]


def test_an_end_that_could_not_be_told_comes_before_the_next_begin(outbox: Outbox) -> None:
    full = Refusing(outbox)
    alarms = Alarms(full, CONFIG)
    alarms.raise_("LINK_DOWN", "one")
    full.refuse = 2
    alarms.clear("LINK_DOWN")
    assert not alarms.raise_("LINK_DOWN", "two"), "refused once more"
    assert alarms.raise_("LINK_DOWN", "two")
    assert [active for _, active in changes(outbox)] == [True, False, True]


@pytest.mark.parametrize("step", ["raise", "clear"])
def test_a_crash_between_outbox_and_file_repeats_the_same_message(
    outbox: Outbox, step: str
) -> None:
    """The message was durable, the note of it was not: it is put again under its own id."""
    dying = Refusing(outbox)
    alarms = Alarms(dying, CONFIG)
    if step == "clear":
        alarms.raise_("DRIFT", "scores")
    dying.kill = True
    with pytest.raises(KeyboardInterrupt):
        alarms.set(step == "raise", "DRIFT", "scores")
    dying.kill = False
    restarted = Alarms(dying, CONFIG)
    assert bool(restarted.active()) == (step == "raise")
    assert [active for _, active in changes(outbox)] == [True, False][: 1 + (step == "clear")]


def test_events_are_told_and_over(outbox: Outbox) -> None:
    alarms = Alarms(outbox, CONFIG)
    alarms.event("CMD_REFUSED", "not signed", params={"cmdId": "7"})
    alarms.event("CMD_REFUSED", "not signed", params={"cmdId": "8"})
    assert changes(outbox) == [("CMD_REFUSED", False)] * 2 and alarms.active() == ()
    assert len({body["instanceId"] for body in told(outbox)}) == 2


def test_acknowledging(outbox: Outbox) -> None:
    alarms = Alarms(outbox, CONFIG)
    alarms.raise_("CLOCK_UNSYNCED", "no time server")
    (alarm,) = alarms.active()
    assert not alarms.acknowledge("other")
    assert alarms.acknowledge(alarm.instance_id) and not alarms.acknowledge(alarm.instance_id)
    assert Alarms(outbox, CONFIG).active()[0].acked
    assert [body["acked"] for body in told(outbox)] == [False, True]


@pytest.mark.parametrize(("code", "event"), [("LINK_DOWM", False), ("CMD_REFUSED", False)])
def test_a_code_of_the_wrong_kind_is_a_mistake_of_the_programmer(
    outbox: Outbox, code: str, event: bool
) -> None:
    with pytest.raises(ValueError, match=code):
        Alarms(outbox, CONFIG).raise_(code, "x")
    with pytest.raises(ValueError, match="LINK_DOWN"):
        Alarms(outbox, CONFIG).event("LINK_DOWN", "x")


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{", '{"alarms": [{"code": 1}, 3, {"told": "never"}]}', '{"alarms": []}',
        '{"alarms": null}', '{"alarms": 3}', "[" * 60_000,
        '{"alarms": [{"code": "DRIFT", "key": [], "text": "x", "severity": 600, "since": "x",'
        ' "instance_id": "x", "params": {}, "told": "active"}]}',
        '{"alarms": [{"code": "DRIFT", "key": "", "text": "", "severity": "high", "since": "x",'
        ' "instance_id": "x", "params": {}, "told": "raising"}]}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_begun_anew(outbox: Outbox, content: str) -> None:
    path = outbox.path.with_name("alarms.json")
    path.write_text(content)
    alarms = Alarms(outbox, CONFIG, path)
    assert alarms.active() == ()
    alarms.raise_("DRIFT", "scores")
    assert Alarms(outbox, CONFIG, path).active()[0].code == "DRIFT"


def test_a_file_that_cannot_be_written_stops_nothing(outbox: Outbox, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    alarms = Alarms(outbox, CONFIG, tmp_path / "file" / "alarms.json")
    assert alarms.raise_("DRIFT", "scores") and changes(outbox) == [("DRIFT", True)]
