"""A verdict on its way into the outbox: durable, in order, and never outside its schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forge_station.mes.outbox import FORMAT_INVALID, Outbox
from forge_station.mes.publisher import Publisher
from forge_station.mes.report import put_verdict, tell_last
from forge_station.mes.topics import FlatTopic, MqttConfig
from tests.mes.rig import verdict

CONFIG = MqttConfig()
EVERY_CELL = [(row, column) for row in range(16) for column in range(16)]


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    with Outbox(tmp_path / "outbox.db", ballast_bytes=0) as opened:
        yield opened


def test_the_grid_comes_before_the_verdict_that_names_it(outbox: Outbox) -> None:
    put_verdict(outbox, CONFIG, verdict(EVERY_CELL, EVERY_CELL, EVERY_CELL).to_dict())
    (grid,) = outbox.fetch("grid", 0, 9)
    (found,) = outbox.fetch("verdict", 0, 9)
    assert grid.seq < found.seq
    assert json.loads(found.body)["grid"]["ref"] == grid.id


def test_same_result_again_is_one_message(outbox: Outbox) -> None:
    record = verdict().to_dict()
    assert put_verdict(outbox, CONFIG, record) == put_verdict(outbox, CONFIG, record)
    assert outbox.pending == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"outcome": "GOOD"}, "verdict"),
        ({"serial": ""}, "partId"),
        ({"timings_ms": {"decode": float("nan")}}, "JSON"),
    ],
)
def test_verdict_that_breaks_its_schema_is_kept_never_sent_and_raises_an_alarm(
    outbox: Outbox, change: dict[str, Any], named: str
) -> None:
    record = {**verdict(result_id="r-0001").to_dict(), **change}
    seq = put_verdict(outbox, CONFIG, record)
    assert outbox.fetch("verdict", 0, 9) == []
    (letter,) = outbox.dead_letters()
    assert (letter.seq, letter.id, letter.reason) == (seq, "r-0001", FORMAT_INVALID)
    assert json.loads(letter.body)["verdict"]["product"] == "clamp-bolts"
    (alarm,) = outbox.fetch("alarm", 0, 9)
    assert json.loads(alarm.body)["code"] == "DEAD_LETTER"
    assert json.loads(alarm.body)["active"] is False, "an event, told and over"
    assert named in json.loads(alarm.body)["text"]
    put_verdict(outbox, CONFIG, verdict(result_id="r-0002").to_dict())
    (good,) = outbox.fetch("verdict", 0, 9)
    assert (good.id, good.stream_seq) == ("r-0002", 2)  # a consumer sees that one is missing


def test_requeue_leaves_what_would_only_be_refused_again(outbox: Outbox) -> None:
    outbox.put("verdict", "t", b"{}", refused=FORMAT_INVALID)
    outbox.put("verdict", "t", b"{}", refused=0x87)
    assert outbox.counts().dead == 2
    assert outbox.requeue_dead() == 1
    assert [item.reason for item in outbox.dead_letters()] == [FORMAT_INVALID]
    assert outbox.pending == 1


class Board:
    """What is retained at the broker."""

    def __init__(self) -> None:
        self.statuses: dict[str, Any] = {}
        self.topics: dict[str, bytes] = {}

    def set_status(self, name: str, fields: Any) -> None:
        self.statuses[name] = fields

    def set_retained(self, topic: str, body: bytes) -> None:
        self.topics[topic] = body


def test_last_verdict_goes_to_the_flat_topics_of_the_site() -> None:
    config = MqttConfig(
        flat=(
            FlatTopic("mes/{line}/last", {"Serial": "partId", "Why": "reasons.0.code"}),
            FlatTopic(
                "tulip", {"good": "verdict", "cells": "cells", "sim": "isSimulated"}, "values"
            ),
        )
    )
    board = Board()
    tell_last(board, config, verdict(front=[(4, 5)]).to_dict())
    assert board.statuses["last"]["verdict"] == "FAIL"
    assert json.loads(board.topics["mes/line/last"]) == {"Serial": "000123", "Why": "SURFACE_DENT"}
    assert board.topics["tulip/good"] == b"FAIL"
    assert board.topics["tulip/cells"] == b"1"
    assert board.topics["tulip/sim"] == b"true"
    tell_last(board, config, verdict().to_dict())
    assert json.loads(board.topics["mes/line/last"])["Why"] is None  # nothing old stays behind


def test_last_verdict_that_breaks_its_schema_is_not_shown_and_stops_nothing(
    tmp_path: Path,
) -> None:
    config = MqttConfig()
    with Outbox(tmp_path / "o.db", ballast_bytes=0) as outbox:
        publisher = Publisher(outbox, config)
        tell_last(publisher, config, {**verdict().to_dict(), "serial": ""})
        tell_last(publisher, config, verdict().to_dict())


def test_grids_are_put_as_the_site_wants_them(outbox: Outbox) -> None:
    put_verdict(outbox, MqttConfig(grid_encoding="json"), verdict(front=[(4, 5)]).to_dict())
    (found,) = outbox.fetch("verdict", 0, 9)
    assert json.loads(found.body)["grid"]["views"][0]["values"][4][5] == 255
