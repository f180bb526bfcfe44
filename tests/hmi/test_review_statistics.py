"""Figures about the people: against counts made by hand, and nobody named."""

from __future__ import annotations

import json
from datetime import timezone
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra hmi is not installed")

from forge_station.contract.label import Label
from forge_station.hmi.review import statistics
from forge_station.hmi.review.draw import Draw
from forge_station.hmi.review.queue import Gold
from forge_station.hmi.review.statistics import FAST_MS, STAMPED

SHIFTS = ("06:00", "14:00", "22:00")


class Book:
    """Labels in their order, and the parts that they are about."""

    def __init__(self) -> None:
        self.labels: list[Label] = []
        self.draws: dict[str, Draw] = {}
        self.gold: dict[str, Gold] = {}

    def part(self, name: str, outcome: str = "FAIL") -> str:
        self.draws[name] = Draw(name, name, "NUT", outcome, "", "", "harvested", 1.0, False)
        return name

    def known(self, name: str, truth: str) -> str:
        self.gold[name] = Gold(name, "NUT", truth, "lea")  # type: ignore[arg-type]
        return name

    def say(self, who: str, part: str, said: Any, *, blind: bool = True, **more: Any) -> None:
        facts = {
            "ms": 3000, "time": "2026-11-30T08:00:00.000Z", "look": f"{who} {part}",
            "gold": part in self.gold,
        }  # fmt: skip
        self.labels.append(Label(part, said, who, blind, more={**facts, **more}))

    def figures(self, since: str = "") -> statistics.Figures:
        return statistics.figures(
            self.labels, self.draws, self.gold, tasks={"NUT": "surface"}, shifts=SHIFTS,
            zone=timezone.utc, since=since,
        )  # fmt: skip


def test_kappa_of_two_people_is_the_one_by_hand():
    """20 NG-NG, 60 OK-OK, 20 apart: Po 0.8, share of OK 0.7, Pe 0.58; kappa (0.8-0.58)/0.42."""
    book = Book()
    words = [("NG", "NG")] * 20 + [("OK", "OK")] * 60 + [("OK", "NG")] * 10 + [("NG", "OK")] * 10
    for number, (one, other) in enumerate(words):
        part = book.part(f"p{number}")
        book.say("anna", part, one)
        book.say("ben", part, other)
    found = book.figures()
    assert found.pairs == 100 and found.kappa is not None
    assert found.kappa.value == pytest.approx((0.8 - 0.58) / 0.42)
    assert found.kappa.interval is not None and found.kappa.interval[0] < 0.524


def test_misses_on_gold_have_their_own_denominator_and_an_interval():
    book = Book()
    bad = [book.known(f"b{n}", "NG") for n in range(20)]
    good = [book.known(f"g{n}", "OK") for n in range(10)]
    for number, part in enumerate(bad):
        book.say("anna", part, "OK" if number < 2 else "NG")
    for number, part in enumerate(good):
        book.say("anna", part, ("NG", "cannot_tell", "OK")[min(number, 2)])
    (task, found), = book.figures().gold.items()  # fmt: skip
    assert task == "surface" and found.cannot_tell == 1
    assert (found.miss.count, found.miss.of) == (2, 20)
    assert found.miss.interval == pytest.approx((0.0123, 0.3170), abs=1e-3), "Clopper-Pearson"
    assert (found.false_alarm.count, found.false_alarm.of) == (1, 10)
    assert book.figures().pace.reviews == 0, "gold is no review"


def test_overrides_are_counted_by_shift_against_what_the_station_said():
    book = Book()
    for number, (outcome, said, time) in enumerate([
        ("FAIL", "OK", "2026-11-30T06:00:00.000Z"), ("PASS", "NG", "2026-11-30T13:59:59.000Z"),
        ("FAIL", "NG", "2026-11-30T13:00:00.000Z"), ("UNSURE", "OK", "2026-11-30T13:00:00.000Z"),
        ("FAIL", "cannot_tell", "2026-11-30T13:00:00.000Z"),
        ("PASS", "OK", "2026-11-30T05:59:00.000Z"),
    ]):  # fmt: skip
        book.say("anna", book.part(f"p{number}", outcome), said, time=time)
    found = {name: (rate.count, rate.of) for name, rate in book.figures().shifts.items()}
    assert found == {"2026-11-29 22:00": (0, 1), "2026-11-30 06:00": (2, 3)}


def test_two_hundred_answers_without_one_against_the_station_are_a_rubber_stamp():
    book = Book()
    for number in range(STAMPED):
        assert not statistics.own(book.labels, book.draws, "anna").stamped
        book.say("anna", book.part(f"p{number}"), "NG")
    assert statistics.own(book.labels, book.draws, "anna").stamped
    book.say("ben", book.part("other"), "OK")
    found = book.figures()
    assert (found.stamps, found.pace.stamped) == (1, False), "one person, not all"
    book.say("anna", book.part("last"), "OK")
    assert not statistics.own(book.labels, book.draws, "anna").stamped


def test_answers_faster_than_a_look_are_flagged_by_their_median():
    book = Book()
    for number in range(21):
        book.say("anna", book.part(f"p{number}"), "NG", ms=FAST_MS - 1 if number < 11 else 9000)
    assert statistics.own(book.labels, book.draws, "anna").fast
    book.labels[0] = Label("p0", "NG", "anna", True, more={**book.labels[0].more, "ms": FAST_MS})
    assert not statistics.own(book.labels, book.draws, "anna").fast


def test_what_is_changed_skipped_or_said_twice_counts_once():
    book = Book()
    part = book.part("p")
    book.say("anna", part, "NG", look="l1", cells="asked")
    book.say("anna", part, "NG", look="l1", cells="skipped")
    book.say("anna", part, "OK", look="l1", blind=False)
    found = book.figures()
    assert found.pace.reviews == 1 and found.said == {"OK": 0, "NG": 1, "cannot_tell": 0}
    assert found.cells == {"given": 0, "skipped": 1, "asked": 0} and found.changed == 1
    assert book.figures(since="2026-12-01").pace.reviews == 0


def test_the_figures_for_the_lead_name_nobody():
    book = Book()
    for number in range(3):
        book.say("anna", book.part(f"p{number}"), "NG")
        book.say("ben", f"p{number}", "OK")
    told = json.dumps(statistics.plain(book.figures()))
    assert "anna" not in told and "ben" not in told
