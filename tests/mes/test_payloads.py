"""Verdicts as messages, and messages as grids again."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import numpy as np
import pytest

from forge_station.contract.error import ContractError
from forge_station.contract.grid import DefectGrid
from forge_station.contract.verdict import CheckResult, Outcome, Reason, ScanSummary, decide
from forge_station.mes import payloads, stamp
from tests.mes.rig import Cell, verdict

SOURCE = "enterprise/site/area/line/station"


def wire(message: payloads.Message) -> bytes:
    """As it is sent, with numbers of a station that has run for a while."""
    return stamp.stamped(
        message.body,
        id=message.id,
        stream=message.stream,
        epoch="0123abcd",
        seq=1234567,
        streamSeq=1234567,
        bootId="deadbeef",
    )


def grids_everywhere(messages: tuple[payloads.Message, ...]) -> dict[tuple[str, str], DefectGrid]:
    """Grids from the grid message when there is one, else from the verdict."""
    return payloads.grids_of(messages[0].body)


@pytest.mark.parametrize(
    ("view", "named"),
    [
        ({"cells": [[0, 5]]}, "cell outside"),
        ({"cells": [[5, 17]]}, "cell outside"),
        ({"data": "####"}, "no base64"),
        ({"data": base64.b64encode(b"\0" * 255).decode()}, "wrong size"),
        ({"values": [[0] * 16] * 15}, "wrong size"),
        ({"values": [[0] * 16] * 15 + [[0]]}, "no grid"),
        ({"values": [[300] * 16] * 16}, "no grid"),
        ({"data": base64.b64encode(b"\0" * 256).decode(), "cells": [[1, 1]]}, "contradict"),
        ({}, "neither cells nor data"),
    ],
)
def test_malformed_grid_is_refused(view: dict[str, Any], named: str) -> None:
    grid = {"rows": 16, "cols": 16, "inline": "full"}
    message = {
        "schema": "verdict/1.0",
        "grid": {**grid, "views": [{"mark": "A", "view": "top", **view}]},
    }
    with pytest.raises(ContractError, match=named):
        payloads.grids_of(message)


def test_summary_points_to_the_grid_message() -> None:
    everything = [(row, column) for row in range(16) for column in range(16)]
    grid, body = payloads.messages_of(verdict(front=everything).to_dict(), SOURCE)
    with pytest.raises(ContractError, match=grid.id):
        payloads.grids_of(body.body)


def test_data_alone_gives_the_grid_with_cells_from_the_middle_of_the_scale_on() -> None:
    data = np.zeros((16, 16), np.uint8)
    data[0, 1], data[2, 3], data[4, 5] = 127, 128, 255
    text = base64.b64encode(data.tobytes()).decode()
    view = {"mark": "A", "view": "top", "data": text}
    grids = payloads.grids_of({"schema": "grid/1.0", "views": [view]})
    assert grids["A", "top"] == DefectGrid.of([(2, 3), (4, 5)])


@pytest.mark.parametrize("cells", [0, 1, 4, 12, 40, 256])
def test_grids_survive_the_way_through_the_messages(cells: int) -> None:
    rng = random.Random(cells)
    every = [(row, column) for row in range(16) for column in range(16)]
    front, top = (sorted(rng.sample(every, cells)) for _ in range(2))
    messages = payloads.messages_of(verdict(front=front, top=top).to_dict(), SOURCE)
    assert grids_everywhere(messages) == {
        ("A", "front"): DefectGrid.of(front),
        ("A", "side"): DefectGrid(),
        ("A", "top"): DefectGrid.of(top),
    }
    assert [item.stream for item in messages] in (["verdict"], ["grid", "verdict"])


def test_verdict_without_grids_has_none() -> None:
    data = {**verdict().to_dict(), "grids": []}
    (message,) = payloads.messages_of(data, SOURCE)
    assert "grid" not in json.loads(message.body)
    assert payloads.grids_of(message.body) == {}


BLOB: list[Cell] = [(row, column) for row in (6, 7) for column in (3, 4, 5)]


@pytest.mark.parametrize(
    ("front", "side", "top"),
    [((), (), ()), (BLOB[:1], (), ()), (BLOB, (), ()), (BLOB, (), BLOB[:2]), (BLOB, BLOB, BLOB)],
)
def test_verdict_of_one_part_with_inlined_grids_is_at_most_1600_bytes(
    front: list[Cell], side: list[Cell], top: list[Cell]
) -> None:
    messages = payloads.messages_of(verdict(front, side, top).to_dict(), SOURCE, sw_version="0.1.0")
    assert [item.stream for item in messages] == ["verdict"]
    assert len(wire(messages[0])) <= 1600


def test_grids_as_rows_of_numbers_for_who_cannot_decode_base64() -> None:
    record = verdict(BLOB, (), BLOB[:2]).to_dict()
    (message,) = payloads.messages_of(record, SOURCE, grid_encoding="json")
    views = json.loads(message.body)["grid"]["views"]
    assert [sum(map(sum, view.get("values", []))) for view in views] == [6 * 255, 0, 2 * 255]
    assert "data" not in views[0]
    assert payloads.grids_of(message.body)["A", "front"] == DefectGrid.of(BLOB)
    everything = [(row, column) for row in range(16) for column in range(16)]
    record = verdict(*[everything] * 3).to_dict()
    grid = payloads.grid_body(record, SOURCE, "json")
    assert grid["encoding"] == "json-rows"
    assert payloads.grids_of(grid)["A", "side"] == DefectGrid.of(everything)


def test_verdict_stays_small_whatever_the_grids_are() -> None:
    everything = [(row, column) for row in range(16) for column in range(16)]
    grid, body = payloads.messages_of(
        verdict(everything, everything, everything).to_dict(), SOURCE, sw_version="0.1.0"
    )
    assert len(wire(body)) <= 1600
    assert len(wire(grid)) <= 10_000
    counted = json.loads(body.body)["grid"]
    assert counted["ref"] == grid.id
    assert [view["count"] for view in counted["views"]] == [256, 256, 256]


def test_fields_of_a_failed_part() -> None:
    (message,) = payloads.messages_of(
        verdict(front=[(4, 5)], result_id="r-0001").to_dict(),
        SOURCE,
        sw_version="0.1.0",
        context={"orderId": "4711"},
    )
    body = json.loads(message.body)
    assert message.id == "r-0001"
    expected = {
        "schema": "verdict/1.0",
        "source": SOURCE,
        "swVersion": "0.1.0",
        "resultId": "r-0001",
        "partId": "000123",
        "partIdSource": "counter",
        "productId": "clamp-bolts",
        "orderId": "4711",
        "verdict": "FAIL",
        "reasons": [
            {"code": "SURFACE_DENT", "label": "a dent on 1 cells", "mark": "A", "score": 0.9712}
        ],
        "checks": {"scan": "PASS", "workpiece": "PASS", "surface": "FAIL"},
        "score": 0.9712,
        "threshold": 0.7,
        "resultState": "completed",
        "isPartial": False,
        "isSimulated": True,
        "beginTime": "2026-11-30T10:38:36.741Z",
        "endTime": "2026-11-30T10:38:37.741Z",
    }
    assert {key: body[key] for key in expected} == expected
    assert body["parts"][0]["part"] == "hex_bolt M8x30"
    assert body["timings"]["decodeMs"] == 231.2
    assert body["model"]["releaseCounter"] == 3
    assert body["type"] == "forge-station.verdict"
    assert body["grid"]["mmPerCell"] == 0.5123
    assert body["grid"]["views"][0] == {
        "mark": "A", "view": "front", "cells": [[5, 6]], "originMm": [-12.34, 15.67],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("outcome", "state"),
    [("PASS", "completed"), ("FAIL", "completed"), ("UNSURE", "completed"), ("ERROR", "failed")],
)
def test_outcome_words_on_the_wire(outcome: str, state: str) -> None:
    reasons = () if outcome == "PASS" else (Reason("NO_DATA", "the scan has no valid point"),)
    data = decide(
        required=("workpiece",),
        checks=(
            CheckResult("scan", Outcome(outcome), reasons),
            CheckResult("workpiece", Outcome.PASS),
        ),
        scan=ScanSummary(points=0),
        result_id="r1",
        serial="1",
        product="p",
    ).to_dict()
    (message,) = payloads.messages_of(data, SOURCE)
    body = json.loads(message.body)
    assert (body["verdict"], body["resultState"]) == (outcome, state)
    assert "model" not in body


@pytest.mark.parametrize(
    "change", [{"outcome": "GOOD"}, {"serial": ""}, {"result_id": "with space"}]
)
def test_verdict_that_breaks_the_schema_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ContractError):
        payloads.messages_of({**verdict().to_dict(), **change}, SOURCE)


def test_unknown_context_is_refused() -> None:
    with pytest.raises(ContractError, match="order_id"):
        payloads.messages_of(verdict().to_dict(), SOURCE, context={"order_id": "1"})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_a_number_is_no_json(value: float) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        payloads.encode({"score": value})


def test_stamped_body_keeps_its_bytes_and_gains_the_fields() -> None:
    body = '{"text":"ä, {\\"x\\"}"}'.encode()
    stamped = stamp.stamped(body, id="a", seq=3)
    assert json.loads(stamped) == {"id": "a", "seq": 3, "text": 'ä, {"x"}'}
    assert stamped == stamp.stamped(body, id="a", seq=3)
    assert json.loads(stamp.stamped(b" { } ", seq=1)) == {"seq": 1}


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b'{"a":1', b"\xff\xfe"])
def test_body_that_is_no_object_is_not_stamped(body: bytes) -> None:
    with pytest.raises(ValueError, match="JSON object"):
        stamp.stamped(body, seq=1)


def test_uuid7_is_version_7_sorts_by_time_and_does_not_repeat() -> None:
    ids = [stamp.uuid7() for _ in range(2000)]
    assert len(set(ids)) == 2000
    assert {item[14] for item in ids} == {"7"}
    assert {item[19] for item in ids} <= set("89ab")
    assert [item[:13] for item in ids] == sorted(item[:13] for item in ids)
