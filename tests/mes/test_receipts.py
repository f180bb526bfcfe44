"""Receipts: the consumer's numbers, and what the station makes of them. No network."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_station.mes import schema
from forge_station.mes.outbox_rows import absent
from forge_station.mes.receipts import BATCH_ROWS, Receipts, Wanted
from forge_station.mes.watermark import Position, Watermark

EPOCH = "0123abcd"


# The consumer's side


@given(st.lists(st.integers(1, 40)), st.integers(1, 10))
def test_position_knows_exactly_what_it_took(numbers: list[int], begin: int) -> None:
    position = Position()
    for number in numbers[: len(numbers) // 2]:
        position.take(number)
    position.begin(begin)
    for number in numbers[len(numbers) // 2 :]:
        position.take(number)
    before = numbers[: len(numbers) // 2]
    taken = set(numbers) | set(range(1, min([begin, *before])))
    assert [n for n in range(1, 50) if position.has(n)] == sorted(taken)
    assert position.upto is not None
    assert set(range(1, position.upto + 1)) <= taken
    assert position.upto + 1 not in taken
    holes = {n for first, last in position.missing() for n in range(first, last + 1)}
    assert holes == set(range(1, position.top + 1)) - taken
    again = Watermark.of({"verdict": {EPOCH: {"upto": position.upto, "beyond": position.beyond}}})
    assert again.to_dict()["verdict"][EPOCH]["upto"] == position.upto


@given(st.sets(st.integers(1, 60)), st.integers(1, 60), st.integers(0, 20))
def test_absent_is_what_is_not_present(present: set[int], first: int, length: int) -> None:
    last = first + length
    found = {n for a, b in absent(sorted(present), [(first, last)]) for n in range(a, b + 1)}
    assert found == set(range(first, last + 1)) - present


def test_nothing_is_missing_until_it_is_known_where_to_begin() -> None:
    position = Position()
    position.take(7)
    position.take(9)
    assert position.missing() == ()
    assert position.top == 9
    position.begin(6)
    assert position.missing() == ((6, 6), (8, 8))


def test_what_others_got_meanwhile_is_missing_for_whoever_ended_before_it_was_told() -> None:
    """It took 1 to 10 and ended; 11 to 40 went to others; the station then says: begin at 41."""
    position = Position()
    position.take(1, 10)
    position.begin(41)
    assert (position.upto, position.top) == (10, 10)
    position.take(41)
    assert position.missing() == ((11, 40),)


@settings(deadline=None)
@given(st.lists(st.integers(1, 40)), st.none() | st.integers(0, 9), st.integers(1, 45))
def test_lacking_counts_what_was_not_taken(taken: list[int], upto: int | None, first: int) -> None:
    position = Position(upto)
    for number in taken:
        position.take(number)
    for last in range(first, 50):
        expected = sum(not position.has(number) for number in range(first, last + 1))
        assert position.lacking(first, last) == expected


def test_old_epochs_are_remembered_for_a_while_only() -> None:
    watermark = Watermark()
    for number in range(5):
        watermark.position("verdict", f"0000000{number}").take(1)
    assert list(watermark.to_dict()["verdict"]) == ["00000002", "00000003", "00000004"]
    assert watermark.receipt() == []  # it is not known where the newest begins


def test_receipt_names_no_more_holes_than_its_schema_allows() -> None:
    watermark = Watermark()
    position = watermark.position("verdict", EPOCH)
    position.begin(1)
    for number in range(2, 400, 2):
        position.take(number)
    schema.require(json.loads(receipt(watermark.receipt())))


# The station's side


def receipt(positions: list[dict[str, Any]], consumer: str = "mes", **rest: Any) -> bytes:
    body = {
        "schema": "receipt/1.0",
        "consumer": consumer,
        "time": "2026-11-30T20:00:00.000Z",
        "positions": positions,
        **rest,
    }
    return json.dumps(body).encode()


def at(upto: int, top: int | None = None, missing: list[list[int]] | None = None) -> bytes:
    position: dict[str, Any] = {"stream": "verdict", "epoch": EPOCH, "upto": upto}
    position["top"] = upto if top is None else top
    if missing:
        position["missing"] = missing
    return receipt([position])


def wanted(receipts: Receipts, body: bytes, now: float, confirmed: int = 0) -> list[Wanted]:
    assert receipts.heard("mes", body, retained=False, now=now) is not None
    return receipts.wanted("mes", ["verdict"], lambda _: confirmed, now)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"schema":"receipt/1.0"}',
        b'{"schema":"receipt/2.0","consumer":"mes","time":"2026-11-30T20:00:00.000Z"}',
        receipt([], consumer="other"),
        receipt([{"stream": "verdict", "epoch": EPOCH, "upto": -1, "top": 0}]),
        receipt([{"stream": "verdict", "epoch": EPOCH, "upto": "1", "top": 0}]),
        receipt([{"stream": "verdict", "epoch": EPOCH, "upto": 1, "top": 3, "missing": [[2]]}]),
        b"[" * 70_000,
        b"[" * 60_000,
    ],
)
def test_receipt_that_is_none_changes_nothing(body: bytes) -> None:
    receipts = Receipts(EPOCH, "mes")
    assert receipts.heard("mes", body, retained=False, now=0.0) is None
    assert receipts.consumers(0.0) == ()
    assert not receipts.may_send(0.0)


def test_nothing_is_sent_before_the_consumer_is_heard_nor_after_three_heartbeats() -> None:
    receipts = Receipts(EPOCH, "mes")
    assert not receipts.may_send(0.0)
    receipts.heard("mes", at(0), retained=True, now=0.0)
    assert not receipts.may_send(0.1)  # the broker's memory of it is no sign of life
    receipts.heard("mes", at(0), retained=False, now=1.0)
    assert receipts.may_send(3.9)
    assert not receipts.may_send(4.1)
    receipts.heard("mes", receipt([], heartbeatS=10.0), retained=False, now=5.0)
    assert receipts.may_send(34.0)
    receipts.connected()
    assert not receipts.may_send(5.1)


def test_other_consumers_decide_nothing() -> None:
    receipts = Receipts(EPOCH, "mes")
    receipts.heard("other", receipt([], consumer="other"), retained=False, now=0.0)
    assert not receipts.may_send(0.1)
    assert Receipts(EPOCH, None).may_send(0.0)


def test_a_consumer_that_falls_behind_is_waited_for() -> None:
    receipts = Receipts(EPOCH, "mes")
    receipts.heard("mes", at(0), retained=False, now=0.0)
    for number in range(1, BATCH_ROWS + 1):
        assert receipts.may_send(0.1)
        receipts.sent("verdict", number)
    assert not receipts.may_send(0.1)
    receipts.heard("mes", at(1), retained=False, now=0.2)
    assert receipts.may_send(0.2)


def test_consumer_without_a_position_is_told_where_to_begin_but_not_all_the_time() -> None:
    receipts = Receipts(EPOCH, "mes")
    assert wanted(receipts, receipt([]), 0.0, 7) == [Wanted("mes", "verdict", begin=8)]
    assert wanted(receipts, receipt([]), 1.0, 7) == []
    assert wanted(receipts, receipt([]), 2.1, 7) == [Wanted("mes", "verdict", begin=8)]


def test_position_of_another_epoch_counts_as_none() -> None:
    receipts = Receipts("ffffffff", "mes")
    assert receipts.heard("mes", at(500), retained=False, now=0.0) == {}
    assert receipts.wanted("mes", ["verdict"], lambda _: 0, 0.0)[0].begin == 1


def test_holes_are_served_at_once_then_with_growing_waits() -> None:
    receipts = Receipts(EPOCH, "mes")
    hole = at(3, 9, [[4, 5], [7, 7]])
    assert wanted(receipts, hole, 0.0, 9) == [Wanted("mes", "verdict", ((4, 5), (7, 7)))]
    served = [now for now in range(1, 100) if wanted(receipts, hole, float(now), 9)]
    waits = [b - a for a, b in zip([0, *served], served, strict=False)]
    assert waits[:6] == [2, 4, 8, 16, 30, 30]
    assert wanted(receipts, at(6, 9, [[7, 7]]), 100.0, 9) == []  # it moves: 7 is on its way
    assert wanted(receipts, at(9), 101.0, 9) == []


def test_a_new_hole_is_served_while_an_old_one_waits() -> None:
    receipts = Receipts(EPOCH, "mes")
    wanted(receipts, at(3, 9, [[4, 4]]), 0.0, 12)
    again = wanted(receipts, at(3, 12, [[4, 4], [10, 11]]), 0.1, 12)
    assert again == [Wanted("mes", "verdict", ((10, 11),))]


def test_lost_end_of_a_stream_is_sent_again_once_nothing_moves() -> None:
    receipts = Receipts(EPOCH, "mes")
    assert wanted(receipts, at(5), 0.0, 5) == []
    assert wanted(receipts, at(5), 60.0, 8) == []  # 6 to 8 may be on their way
    assert wanted(receipts, at(5), 61.0, 8) == []
    assert wanted(receipts, at(5), 62.1, 8) == [Wanted("mes", "verdict", ((6, 8),))]
    assert wanted(receipts, at(5), 63.0, 8) == []


def test_more_than_was_sent_is_never_served() -> None:
    receipts = Receipts(EPOCH, "mes")
    lie = at(3, 10**12, [[5, 10**11]])
    assert wanted(receipts, lie, 0.0, 9) == [Wanted("mes", "verdict", ((5, 9),))]


def test_a_long_hole_is_served_in_batches_as_they_arrive() -> None:
    receipts = Receipts(EPOCH, "mes")
    first = wanted(receipts, at(0, 9_000, [[1, 8_999]]), 0.0, 9_000)
    assert first == [Wanted("mes", "verdict", ((1, BATCH_ROWS),))]
    assert wanted(receipts, at(1_000, 9_000, [[1_001, 8_999]]), 0.5, 9_000) == []
    second = wanted(receipts, at(BATCH_ROWS, 9_000, [[BATCH_ROWS + 1, 8_999]]), 0.6, 9_000)
    assert second == [Wanted("mes", "verdict", ((BATCH_ROWS + 1, 2 * BATCH_ROWS),))]
