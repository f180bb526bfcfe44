"""The two small judges: what a consumer has missed, and which message kills the connection."""

from __future__ import annotations

from typing import Any

from forge_station.mes.suspicion import Suspicion
from forge_station.mes.tracking import Observation, Tracker


def event(number: int, stream: str = "verdict", epoch: str = "e1", **rest: Any) -> dict[str, Any]:
    source = rest.get("source", "s")
    return {
        "id": rest.get("id", f"{source}{stream}{epoch}{number}"),
        "source": source,
        "stream": stream,
        "epoch": epoch,
        "streamSeq": number,
    }


def test_repeat_is_known_by_its_id() -> None:
    tracker = Tracker()
    assert tracker.observe(event(1)) == Observation()
    assert tracker.observe(event(1)) == Observation(duplicate=True)


def test_hole_is_reported_once_and_closed_by_late_arrivals() -> None:
    tracker = Tracker()
    tracker.observe(event(4))
    assert tracker.observe(event(8)) == Observation(missing=(5, 6, 7))
    assert tracker.observe(event(9)) == Observation()
    assert tracker.observe(event(6)) == Observation(filled=True)
    assert tracker.missing() == {("s", "verdict"): (5, 7)}
    tracker.observe(event(5))
    tracker.observe(event(7))
    assert tracker.missing() == {}


def test_following_begins_at_the_first_message_seen() -> None:
    tracker = Tracker()
    assert tracker.observe(event(500)) == Observation()
    assert tracker.observe(event(499)) == Observation()
    assert tracker.missing() == {}


def test_streams_and_stations_are_followed_apart() -> None:
    tracker = Tracker()
    tracker.observe(event(1))
    assert tracker.observe(event(7, stream="grid")) == Observation()
    assert tracker.observe(event(3, source="t")) == Observation()
    assert tracker.observe(event(2)) == Observation()


def test_new_epoch_starts_again_and_is_no_hole() -> None:
    tracker = Tracker()
    tracker.observe(event(50))
    assert tracker.observe(event(1, epoch="e2")) == Observation(new_epoch=True)
    assert tracker.observe(event(2, epoch="e2")) == Observation()


def test_one_short_connection_raises_no_suspicion() -> None:
    suspicion = Suspicion()
    assert suspicion.ended({1: 0.1, 2: 0.1}, fruitful=False) is None
    assert not suspicion.active


def test_connections_that_end_late_or_idle_or_confirm_something_raise_no_suspicion() -> None:
    suspicion = Suspicion()
    for _ in range(5):
        assert suspicion.ended({1: 60.0}, fruitful=False) is None
        assert suspicion.ended({}, fruitful=False) is None
        assert suspicion.ended({1: 0.1, 2: 0.1}, fruitful=True) is None
    assert not suspicion.active


def test_row_alone_at_three_ends_is_guilty() -> None:
    suspicion = Suspicion()
    suspicion.ended({1: 0.1, 2: 0.1}, fruitful=False)
    suspicion.ended({1: 0.1, 2: 0.1}, fruitful=False)
    assert suspicion.active
    assert suspicion.ended({2: 0.1}, fruitful=True) is None
    assert suspicion.ended({2: 0.1}, fruitful=False) is None
    assert suspicion.ended({2: 0.1}, fruitful=False) == 2


def test_confirmed_row_is_innocent_and_confirmations_end_the_suspicion() -> None:
    suspicion = Suspicion()
    for _ in range(2):
        suspicion.ended({1: 0.1}, fruitful=False)
    for _ in range(2):
        assert suspicion.ended({1: 0.1}, fruitful=False) is None
    suspicion.confirmed(1)
    assert suspicion.ended({1: 0.1}, fruitful=False) is None
    for seq in range(20):
        suspicion.confirmed(seq)
    assert not suspicion.active
