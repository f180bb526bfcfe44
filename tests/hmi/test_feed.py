"""What the page is told: the stream's contract, queues, shifts, texts; and the station's board."""

from __future__ import annotations

import asyncio
import json
import re
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from forge_station.board import Board
from forge_station.contract.verdict import REASONS
from forge_station.hmi import feed as feeds
from forge_station.hmi.app import LOCALES, STATIC, build
from forge_station.hmi.context import Context
from forge_station.hmi.feed import Client, Feed
from forge_station.hmi.shift import Shift, begin_of
from forge_station.mes.alarms import CODES
from tests.hmi.conftest import wait_for
from tests.hmi.stage import FINE, Stage, verdict

ZONE = timezone(timedelta(hours=8))


def events(content: bytes) -> list[tuple[str, str, Any]]:
    """(name, id, data) of each server-sent event."""
    found = []
    for text in content.decode().split("\n\n"):
        if text:
            name, number, data = re.fullmatch(r"event: (\w+)\nid: (\S+)\ndata: (.+)", text).groups()  # type: ignore[union-attr]
            found.append((name, number, json.loads(data)))
    return found


def on_disk(stage: Stage) -> int:
    return sum(
        len(path.read_text().splitlines()) for path in stage.board.folder.glob("parts-*.jsonl")
    )


async def _heard(client: Client, seconds: float) -> bytes:
    """What a page is sent in this time."""
    content = b""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        try:
            content += await asyncio.wait_for(client.next(), left)
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            break
    return content


def test_a_page_hears_a_snapshot_then_each_part_once_and_a_beat(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "BEAT_S", 0.1)
    before = stage.part("PASS")
    assert wait_for(lambda: on_disk(stage) == 1)

    async def run() -> tuple[Feed, bytes, list[str]]:
        feed = Feed.of(stage.config)
        async with feed.followed():
            client = feed.subscribe()
            assert client is not None
            content = await _heard(client, 0.3)
            told = [stage.part("FAIL"), stage.part("ERROR", picture=False)]
            stage.status(link=False)
            stage.alarms("LINK_DOWN")
            content += await _heard(client, 1.2)
            feed.unsubscribe(client)
            assert feed.clients == 0
            return feed, content, told

    feed, content, told = asyncio.run(run())
    heard = events(content)
    assert heard[0][0] == "snapshot"
    assert [part["id"] for part in heard[0][2]["parts"]] == [before]
    assert [name for name, _, _ in heard].count("snapshot") == 1
    assert [data["part"]["id"] for name, _, data in heard if name == "part"] == told
    assert [data["id"] for name, _, data in heard if name == "picture"] == told[:1]
    assert [data["link"] for name, _, data in heard if name == "station"] == [False]
    assert [data[0]["code"] for name, _, data in heard if name == "alarms"] == ["LINK_DOWN"]
    beats = [data["n"] for name, _, data in heard if name == "beat"]
    assert len(beats) >= 4 and beats == list(range(beats[0], beats[0] + len(beats)))
    numbers = [number.split(".") for _, number, _ in heard]
    assert {boot for boot, _ in numbers} == {feed.boot}
    assert [int(n) for _, n in numbers] == sorted(int(n) for _, n in numbers)


def test_a_page_that_does_not_keep_up_gets_a_snapshot_and_no_old_part(stage: Stage) -> None:
    async def run() -> list[tuple[str, str, Any]]:
        feed = Feed.of(stage.config)
        slow = feed.subscribe()
        assert slow is not None
        await slow.next()
        for _ in range(3 * feeds.MOST_QUEUED):
            stage.part("PASS", picture=False)
        assert await asyncio.to_thread(wait_for, lambda: on_disk(stage) == 3 * feeds.MOST_QUEUED)
        feed.look()
        return events(await _heard(slow, 0.1))

    heard = asyncio.run(run())
    assert [name for name, _, _ in heard] == ["snapshot"]
    assert heard[0][2]["parts"][0]["n"] == 3 * feeds.MOST_QUEUED
    assert heard[0][2]["shift"]["total"] == 3 * feeds.MOST_QUEUED


def test_no_beat_is_sent_by_who_does_not_see_the_station(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(feeds, "BEAT_S", 0.05)
    monkeypatch.setattr(feeds, "BLIND_S", 0.2)

    async def run() -> tuple[bytes, bytes]:
        feed = Feed.of(stage.config)
        async with feed.followed():
            client = feed.subscribe()
            assert client is not None
            seen = await _heard(client, 0.3)
            monkeypatch.setattr(feed, "_changed", lambda path: {}["gone"])
            await _heard(client, 0.4)
            return seen, await _heard(client, 0.3)

    seen, blind = asyncio.run(run())
    assert b"event: beat" in seen and blind == b""
    assert "cannot be followed" in caplog.text


def test_too_many_pages_are_refused_and_a_closed_one_makes_room(stage: Stage) -> None:
    feed = Feed.of(stage.config)
    clients = [feed.subscribe() for _ in range(feeds.MOST_CLIENTS)]
    assert all(clients) and feed.subscribe() is None
    first = clients[0]
    assert first is not None
    feed.unsubscribe(first)
    assert feed.subscribe() is not None


def test_a_page_that_starts_later_counts_the_shift_from_the_files(stage: Stage) -> None:
    for outcome in ("PASS", "FAIL", "FAIL", "UNSURE"):
        stage.part(outcome, picture=False)
    assert wait_for(lambda: on_disk(stage) == 4)
    for _ in range(2):  # and again: nothing doubled
        feed = Feed.of(stage.config)
        feed._begin()
        facts = feed.snapshot()["shift"]
        assert facts["counts"] == {"PASS": 1, "FAIL": 2, "UNSURE": 1, "ERROR": 0}
        assert list(map(tuple, facts["reasons"])) == [("SURFACE_DENT", 3)]


def test_lines_that_are_none_and_half_lines_harm_nothing(stage: Stage) -> None:
    feed = Feed.of(stage.config)
    stage.board.folder.mkdir(parents=True, exist_ok=True)
    path = stage.board.folder / f"parts-{datetime.now(timezone.utc):%Y-%m-%d}.jsonl"
    path.write_bytes(b'nonsense\n[1]\n{"id": "x"}\n{"half')
    feed.look()
    assert feed.snapshot()["parts"] == []
    result_id = stage.part("FAIL", picture=False)  # the board ends the half line first
    assert wait_for(lambda: (feed.look(), feed.snapshot()["parts"])[1])
    assert [part["id"] for part in feed.snapshot()["parts"]] == [result_id]


def test_a_silent_station_is_told_of(stage: Stage) -> None:
    feed = Feed.of(stage.config)
    assert feed.snapshot()["silent_s"] is None and feed.snapshot()["station"] is None
    stage.status()
    path = stage.board.folder / "status.json"
    assert wait_for(path.exists)
    old = time.time() - 60
    __import__("os").utime(path, (old, old))
    feed.look()
    assert feed.snapshot()["silent_s"] >= 59


def test_the_views_of_a_part_are_cut_from_what_the_model_was_given(stage: Stage) -> None:
    import cv2
    import numpy as np

    result_id = stage.part("FAIL")
    assert wait_for(lambda: on_disk(stage) == 1)
    with TestClient(build(Context.of(stage.config)), base_url="http://127.0.0.1") as client:
        shown = client.get("/api/live").json()
        (mark,) = shown["pictures"][result_id]
        path = f"/api/parts/{result_id}/{mark['file']}"
        answer = client.get(f"{path}/top")
        image = cv2.imdecode(np.frombuffer(answer.content, np.uint8), cv2.IMREAD_GRAYSCALE)
        assert image.shape == (224, 224) and image[112, 50] == 200 and image[0, 0] == 0
        assert "immutable" in answer.headers["cache-control"]
        for wrong in (f"{path}/back", f"/api/parts/none/{mark['file']}/top",
                      f"/api/parts/{result_id}/..%2fusers.json/top"):  # fmt: skip
            assert client.get(wrong).status_code == 404, wrong


@pytest.mark.parametrize(
    ("now", "begin"),
    [("06:00", "06:00"), ("13:59", "06:00"), ("23:30", "22:00"), ("05:59", "-1 22:00")],
)
def test_a_shift_begins_at_its_time(now: str, begin: str) -> None:
    def at(text: str) -> datetime:
        *back, clock = text.split()
        hour, minute = map(int, clock.split(":"))
        day = 15 + int(back[0]) if back else 15
        return datetime(2026, 7, day, hour, minute, tzinfo=ZONE)

    assert begin_of(at(now), ("06:00", "14:00", "22:00")) == at(begin)


def test_takt_and_cycle_are_medians_without_pauses() -> None:
    shift = Shift(datetime(2026, 7, 15, 6, tzinfo=ZONE))
    assert shift.facts()["takt_s"] is None
    moment = shift.begin
    for gap in (2.0, 2.0, 3000.0, 2.2, 2.1):
        moment += timedelta(seconds=gap)
        shift.add({"begin": moment.isoformat(), "end": "", "outcome": "PASS", "reasons": [],
                   "ms": 400.0})  # fmt: skip
    early = {"begin": (shift.begin - timedelta(seconds=1)).isoformat(), "outcome": "FAIL"}
    shift.add({**early, "end": "", "reasons": [], "ms": 1.0})
    facts = shift.facts()
    assert (facts["total"], facts["takt_s"], facts["cycle_s"]) == (5, 2.1, 0.4)


def test_every_code_has_a_text_in_every_language() -> None:
    texts = {path.stem: json.loads(path.read_text()) for path in LOCALES.glob("*.json")}
    assert set(texts) == {"en", "de", "zh"}
    assert len({frozenset(found) for found in texts.values()}) == 1
    wanted = {f"reason.{code}" for code in REASONS} | {f"alarm.{code}" for code in CODES}
    wanted |= {f"alarm.{code}.do" for code in CODES}
    assert wanted <= set(texts["en"])
    places = {
        name: {key: sorted(re.findall(r"\{\w+\}", text)) for key, text in found.items()}
        for name, found in texts.items()
    }
    assert places["en"] == places["de"] == places["zh"]


def test_every_text_that_the_page_asks_for_exists() -> None:
    texts = json.loads((LOCALES / "en.json").read_text())
    for path in STATIC.glob("*.js"):
        for key in re.findall(r"\bt\('([a-zA-Z_.]+)'", path.read_text()):
            assert key in texts, (path.name, key)


def test_nothing_of_the_page_comes_from_elsewhere() -> None:
    for path in [*STATIC.rglob("*.js"), *STATIC.rglob("*.mjs"), *STATIC.rglob("*.css"),
                 STATIC / "index.html"]:  # fmt: skip
        found = set(re.findall(r"https?://[^\s'\"`)]+", path.read_text()))
        assert found <= {
            "http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML",
            "http://www.w3.org/1999/xhtml",
        }, path  # fmt: skip


def test_the_board_keeps_lines_until_the_disk_takes_them(tmp_path: Path) -> None:
    blocked = tmp_path / "outbox.sqlite.board"
    blocked.write_text("a file where the folder belongs")
    with Board(tmp_path / "outbox.sqlite", "0badcafe") as board:
        board.part(verdict("PASS", 1))
        board.part(verdict("FAIL", 2))
        board.status(FINE)
        time.sleep(0.1)
        blocked.unlink()
        assert wait_for(lambda: list(blocked.glob("parts-*.jsonl")), 5.0)
        assert wait_for((blocked / "status.json").exists)
    (path,) = blocked.glob("parts-*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["n"], line["outcome"]) for line in lines] == [(1, "PASS"), (2, "FAIL")]
    status = json.loads((blocked / "status.json").read_text())
    assert status["ended"] is True and status["n"] == 2


def test_the_board_ends_the_half_line_that_a_full_disk_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "outbox.sqlite.board"
    with Board(tmp_path / "outbox.sqlite", "0badcafe") as board:
        board.part(verdict("PASS", 1))
        (path,) = wait_for(lambda: list(folder.glob("parts-*.jsonl")), 5.0)
        assert wait_for(lambda: path.read_bytes().endswith(b"\n"))
        with path.open("ab") as file:
            file.write(b'{"boot":"0bad')
        board.part(verdict("FAIL", 2))
    first, half, last = path.read_text().splitlines()
    assert json.loads(first)["n"] == 1 and half == '{"boot":"0bad'
    assert json.loads(last)["n"] == 2


def test_a_serial_that_is_no_text_does_not_end_the_board(tmp_path: Path) -> None:
    with Board(tmp_path / "outbox.sqlite", "0badcafe") as board:
        board.part({**verdict("PASS", 1), "serial": "W-\ud800"})
        board.part(verdict("FAIL", 2))
        board.status({**FINE, "product": "\udfff"})
    (path,) = board.folder.glob("parts-*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["n"] for line in lines] == [1, 2] and lines[0]["serial"] == "W-?"
    assert json.loads((board.folder / "status.json").read_text())["product"] == "?"


def test_a_clock_that_was_ahead_for_a_while_hides_no_part(stage: Stage) -> None:
    """The file of a day to come is read like any other; parts of today are shown after it."""
    shown = stage.part("PASS")
    assert wait_for(lambda: on_disk(stage) == 1)
    (path,) = stage.board.folder.glob("parts-*.jsonl")
    ahead = {**json.loads(path.read_text()), "id": "ahead"}
    (path.parent / "parts-2099-01-01.jsonl").write_text(json.dumps(ahead) + "\n")
    feed = Feed.of(stage.config)
    assert feed.newest() == ""
    feed._begin()
    later = [stage.part("FAIL") for _ in range(2)]
    assert wait_for(lambda: on_disk(stage) == 4)
    feed.look()
    feed.look()
    assert [part["id"] for part in feed.snapshot()["parts"]] == [*later[::-1], "ahead", shown]
    assert feed.newest() == later[-1]


@pytest.mark.parametrize(
    "line",
    [
        {"id": []}, {"id": None}, {"name": 5}, {"outcome": {}}, {"begin": 5}, {"ms": "1"},
        {"ms": float("nan")}, {"reasons": [5]}, {"reasons": None}, {"reasons": [{"code": []}]},
        {"score": float("inf")}, {"checks": None}, {"grids": None}, {"grids": [{}]},
        {"grids": [{"mark": "A", "view": "top", "cells": [5]}]}, None, [], "x" * 100_000,
    ],
)  # fmt: skip
def test_a_damaged_line_of_the_board_costs_nothing_but_itself(stage: Stage, line: Any) -> None:
    first = stage.part("PASS")
    assert wait_for(lambda: on_disk(stage) == 1)
    (path,) = stage.board.folder.glob("parts-*.jsonl")
    bad = {**json.loads(path.read_text()), "id": "bad", **line} if isinstance(line, dict) else line
    with path.open("a") as file:
        file.write(f"{json.dumps(bad)}\n{'[' * 50_000}\n")
    last = stage.part("FAIL")
    assert wait_for(lambda: on_disk(stage) == 4)
    feed = Feed.of(stage.config)
    feed._begin()
    assert [part["id"] for part in feed.snapshot()["parts"]] == [last, first]


@pytest.mark.parametrize("text", ["{", "[" * 50_000, '{"alarms": 5}', '{"alarms": [{}, 5]}'])
def test_damaged_files_of_the_station_do_not_keep_the_page_from_starting(
    stage: Stage, text: str
) -> None:
    shown = stage.part("PASS")
    assert wait_for(lambda: on_disk(stage) == 1)
    outbox = stage.config.outbox
    for name in ("alarms", "part"):
        outbox.with_name(f"{outbox.name}.{name}.json").write_text(text)
    (stage.board.folder / "status.json").write_text(text)
    with TestClient(build(Context.of(stage.config)), base_url="http://127.0.0.1") as client:
        assert client.get("/api/live").json()["parts"][0]["id"] == shown


def test_the_board_deletes_old_days(tmp_path: Path) -> None:
    folder = tmp_path / "outbox.sqlite.board"
    folder.mkdir()
    (folder / "parts-2020-01-01.jsonl").write_text("{}\n")
    (folder / "other.txt").write_text("not ours")
    with Board(tmp_path / "outbox.sqlite", "0badcafe") as board:
        board.part(verdict("PASS", 1))
    assert not (folder / "status.json").exists()  # nobody said how the station is
    (folder / "status.json").touch()
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == 3 and names[0] == "other.txt" and "2020" not in "".join(names)
