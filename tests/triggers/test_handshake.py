"""The handshake with a PLC: no lost part, no result for another part, never OK and NG together."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from forge_station.capture.base import Trigger
from forge_station.contract.verdict import Outcome
from forge_station.triggers import registers
from forge_station.triggers.gate import Gate, Refusal
from forge_station.triggers.handshake import Facts, Handshake, Phase
from forge_station.triggers.registers import PLC, STATION, Code, Command, Result, Status
from tests.triggers.simulated_plc import (
    CODE,
    Clock,
    MemoryBus,
    Order,
    Plc,
    look,
    part_registers,
    truth,
    verdict_of,
)

CYCLE_S = 0.02
ON, TRIGGER = Command.ENABLE, Command.ENABLE | Command.TRIGGER


@dataclass
class Rig:
    """Station and PLC on one clock. `work`: cycles that the part in work still takes."""

    order: Order = "block"
    facts: Facts = field(default_factory=Facts)
    boot: int = 1

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.refused: list[tuple[str, Refusal]] = []
        self.lives: list[bool] = []
        self.verdicts: Counter[str] = Counter()
        self.start()
        self.bus = MemoryBus(self.handshake, self.clock)
        self.plc = Plc(self.bus, self.order)

    def start(self) -> None:
        """The station starts (again): nothing of before is known to it."""
        self.gate = Gate(on_refused=lambda t, why, text: self.refused.append((t.serial, why)))
        self.gate.open()
        self.handshake = Handshake(
            self.gate, boot=self.boot, facts=lambda: self.facts, on_alive=self.lives.append
        )
        self.boot += 1
        self.part: Trigger | None = None
        self.work = 0

    def restart_station(self) -> None:
        self.start()
        self.bus.handshake = self.handshake

    def cycle(self, *, work: int = 2) -> None:
        """One cycle of the PLC, and the station's loop beside it."""
        self.clock.now += CYCLE_S
        self.handshake.tick(self.clock.now)
        self.plc.scan()
        if self.part is None:
            self.part, self.work = self.gate.take(0.0), work
        elif self.work > 0:
            self.work -= 1
        else:
            self.verdicts[self.part.serial] += 1
            self.gate.finish(verdict_of(self.part.serial))
            self.part = None

    def until(self, done, limit: int = 500, **keys: int) -> None:
        for _ in range(limit):
            if done():
                return
            self.cycle(**keys)
        raise AssertionError(f"not in {limit} cycles: {self.plc}, {self.handshake.phase}")

    def ready(self) -> Rig:
        self.until(lambda: Status.READY in look(self.bus).status)
        return self

    # by hand, without the PLC's program
    def beat(self, command: Command = ON) -> None:
        self.plc.heartbeat += 1
        self.bus.write(0, [command, self.plc.heartbeat])

    def ask(self, counter: int, serial: str, end: int | None = None) -> None:
        self.bus.write(PLC["COUNTER"].address, part_registers(counter, "NUT", serial, end))
        self.beat(TRIGGER)

    def finish(self) -> None:
        part = self.gate.take(0.0)
        assert part is not None
        self.gate.finish(verdict_of(part.serial))

    def status(self) -> Status:
        return look(self.bus).status

    def reason(self) -> Refusal:
        return Refusal(look(self.bus).values["REASON"])


@pytest.fixture
def rig() -> Rig:
    return Rig().ready()


def passing(prefix: str = "p") -> str:
    """A serial whose part passes."""
    return next(f"{prefix}{n}" for n in range(100) if truth(f"{prefix}{n}") is Outcome.PASS)


@pytest.mark.parametrize("order", ["block", "data first", "status first"])
def test_every_part_gets_its_own_result_in_whatever_order_the_plc_reads(order):
    rig = Rig(order=order).ready()
    for number in range(60):
        rig.plc.place(f"s{number}")
        rig.until(lambda: not rig.plc.serial and rig.plc.step == "ready", work=number % 4)
    assert rig.plc.decisions == {f"s{n}": CODE[truth(f"s{n}")].name for n in range(60)}
    assert rig.plc.mismatches == 0, "data stood before the bit came"
    assert set(rig.verdicts.values()) == {1}


def test_the_data_is_there_a_whole_poll_before_the_bit(rig):
    rig.ask(1, "s1")
    assert rig.status() & (Status.BUSY | Status.READY) == Status.BUSY
    rig.finish()
    first, second = look(rig.bus), look(rig.bus)
    assert Status.RESULT_VALID not in first.status and Status.BUSY in first.status
    assert first.values["RESULT_COUNTER"] == 1 and first.values["RESULT_SERIAL"] == "s1"
    assert Status.RESULT_VALID in second.status
    changed = {k for k in first.values if first.values[k] != second.values[k]}
    assert changed <= {"STATUS", "HEARTBEAT"}


def test_the_result_goes_when_the_trigger_does_and_another_part_may_come(rig):
    rig.ask(1, "s1")
    rig.finish()
    rig.status()
    assert Status.RESULT_VALID in rig.status()
    rig.beat(ON)
    view = look(rig.bus)
    assert view.status & (Status.READY | Status.RESULT_VALID) == Status.READY
    assert view.values["RESULT_CODE"] == 0 and view.values["RESULT_SERIAL"] == ""
    rig.ask(2, "s2")
    assert Status.BUSY in rig.status()


@pytest.mark.parametrize("outcome", list(Outcome))
def test_each_outcome_has_its_bit(rig, outcome):
    serial = next(f"x{n}" for n in range(100) if truth(f"x{n}") is outcome)
    rig.ask(7, serial)
    rig.finish()
    rig.status()
    view = look(rig.bus)
    assert view.outcome is Status[CODE[outcome].name]
    assert view.values["RESULT_CODE"] == CODE[outcome]
    assert view.values["RESULT_REASON"] == ("" if outcome is Outcome.PASS else "WRONG_MODEL")
    assert view.values["RESULT_ID"] == f"result-of-{serial}" and view.values["RESULT_MS"] == 12


class TestAnAdvisoryStation:
    """OK needs a certificate: of the verdict, and of the station at that moment."""

    @pytest.mark.parametrize("mode", ["advisory", "checks_alone"])
    def test_whose_verdict_names_no_certificate_never_says_ok(self, mode):
        found = Result.of(verdict_of(passing(), mode=mode))
        assert (found.code, found.reason) == (Code.UNSURE, "NO_CERTIFICATE")
        assert Result.of(verdict_of(passing())).code is Code.OK

    def test_that_lost_its_certificate_shows_no_ok(self, rig):
        rig.facts = Facts(advisory=True)
        rig.ask(1, passing())
        rig.finish()
        rig.status()
        assert rig.status() & (Status.OK | Status.UNSURE | Status.ADVISORY) == (
            Status.UNSURE | Status.ADVISORY
        )

    def test_a_result_does_not_change_while_it_is_valid(self, rig):
        rig.ask(1, passing())
        rig.finish()
        rig.status()
        assert Status.OK in rig.status()
        rig.beat(ON)
        assert not rig.status() & Status.OK


def test_a_part_that_was_given_up_is_an_error_for_the_line():
    assert Result.of(None).code is Code.ERROR


class TestRefused:
    @pytest.mark.parametrize(
        ("counter", "serial", "end", "why"),
        [
            (5, "s", 4, Refusal.TORN_REQUEST),
            (0, "s", 0, Refusal.TORN_REQUEST),
            (5, "", 5, Refusal.BAD_TEXT),
            (5, "   ", 5, Refusal.BAD_TEXT),
        ],
    )
    def test_a_request_that_is_not_whole(self, rig, counter, serial, end, why):
        rig.ask(counter, serial, end)
        view = look(rig.bus)
        assert Status.REFUSED in view.status and view.values["REASON"] == why
        assert view.values["REFUSED_COUNT"] == 1
        assert rig.refused == [(serial.strip(), why)] and rig.gate.take(0.0) is None
        rig.beat(ON)
        assert rig.status() & (Status.REFUSED | Status.READY) == Status.READY

    def test_bytes_that_are_no_text(self, rig):
        data = part_registers(5, "NUT", "s")
        data[1 + 16] = 0xC3A9
        rig.bus.write(PLC["COUNTER"].address, data)
        rig.beat(TRIGGER)
        assert rig.reason() is Refusal.BAD_TEXT

    def test_the_data_of_the_part_before(self, rig):
        """The trigger came, the write of the new data was lost: the counter tells."""
        rig.ask(1, "s1")
        rig.finish()
        rig.status()
        rig.beat(ON)
        rig.beat(TRIGGER)
        assert rig.reason() is Refusal.REPEATED_COUNTER and rig.gate.take(0.0) is None

    def test_a_trigger_into_a_part_that_was_given_up_is_an_overrun(self, rig):
        rig.ask(1, "s1")
        rig.beat(ON)
        assert Status.BUSY in rig.status() and Status.READY not in rig.status()
        rig.ask(2, "s2")
        view = look(rig.bus)
        assert view.status & (Status.REFUSED | Status.BUSY) == Status.REFUSED | Status.BUSY
        assert view.values["REASON"] == Refusal.BUSY and view.values["REFUSED_COUNTER"] == 2
        rig.finish()
        for _ in range(3):
            assert not rig.status() & Status.RESULT_VALID, "s1 was given up, s2 was refused"
        rig.beat(ON)
        rig.ask(2, "s2")
        rig.finish()
        rig.status()
        assert look(rig.bus).values["RESULT_SERIAL"] == "s2"

    def test_without_enable_heartbeat_or_a_station_that_is_ready(self, rig):
        rig.beat(Command(0))
        rig.beat(Command.TRIGGER)
        assert rig.reason() is Refusal.NOT_ENABLED
        rig.beat(ON)
        rig.gate.shut("the outbox is full")
        assert rig.reason() is Refusal.NOT_READY and Status.READY not in rig.status()
        rig.ask(1, "s1")
        assert Status.REFUSED in rig.status() and rig.reason() is Refusal.NOT_READY
        rig.beat(ON)
        rig.gate.open()
        rig.facts = Facts(alive=False)
        assert rig.reason() is Refusal.NOT_READY
        rig.ask(1, "s1")
        assert rig.reason() is Refusal.NOT_READY and rig.gate.take(0.0) is None

    def test_data_that_changes_under_the_trigger_gets_no_result(self, rig):
        rig.ask(1, "s1")
        rig.bus.write(PLC["COUNTER"].address, part_registers(2, "NUT", "s2"))
        rig.finish()
        for _ in range(3):
            assert rig.status() & (Status.REFUSED | Status.RESULT_VALID) == Status.REFUSED
        assert rig.reason() is Refusal.REQUEST_CHANGED
        assert rig.refused == [("s2", Refusal.REQUEST_CHANGED)]
        rig.beat(ON)
        assert Status.READY in rig.status()

    def test_a_level_from_before_the_start_is_no_edge(self, rig):
        rig.ask(1, "s1")
        rig.restart_station()
        rig.beat(TRIGGER)
        rig.beat(TRIGGER)
        assert rig.reason() is Refusal.TRIGGER_ON and rig.gate.take(0.0) is None
        rig.beat(ON)
        rig.ask(2, "s1")
        assert Status.BUSY in rig.status()


class TestHeartbeat:
    def test_a_constant_value_is_no_life(self):
        rig = Rig()
        for _ in range(5):
            rig.bus.write(0, [ON, 7])
            assert not rig.status() & (Status.PLC_ALIVE | Status.READY)

    @pytest.mark.parametrize("phase", list(Phase))
    def test_its_loss_takes_ready_and_every_result_away_at_once(self, rig, phase):
        if phase is not Phase.IDLE:
            rig.ask(1, passing())
        if phase in (Phase.DATA, Phase.VALID):
            rig.finish()
        if phase is Phase.VALID:
            rig.status()
            assert Status.OK in rig.status()
        assert rig.handshake.phase is phase
        rig.clock.now += 2.01
        rig.handshake.tick(rig.clock.now)
        assert rig.lives == [True, False]
        for _ in range(3):
            view = look(rig.bus)
            safe = Status.READY | Status.RESULT_VALID | Status.OK | Status.PLC_ALIVE
            assert not view.status & safe
            assert view.values["RESULT_CODE"] == 0 and view.values["RESULT_SERIAL"] == ""
            assert view.values["REASON"] == Refusal.NO_HEARTBEAT

    def test_a_plc_that_was_only_cut_off_gets_the_result_of_its_part(self, rig):
        rig.ask(1, passing())
        rig.clock.now += 10.0
        rig.finish()
        assert not rig.status() & Status.RESULT_VALID
        rig.beat(TRIGGER)
        assert not rig.status() & Status.RESULT_VALID, "one write may be an old image"
        rig.beat(TRIGGER)
        assert not rig.status() & Status.RESULT_VALID, "data first"
        assert look(rig.bus).status & (Status.RESULT_VALID | Status.OK)

    def test_enable_off_is_the_safe_state_as_well(self, rig):
        rig.ask(1, passing())
        rig.finish()
        rig.status()
        assert Status.OK in rig.status()
        rig.beat(Command.TRIGGER)
        assert not rig.status() & (Status.READY | Status.RESULT_VALID | Status.OK)

    def test_the_stations_own_counts_on_while_its_loop_lives(self, rig):
        before = look(rig.bus).values["HEARTBEAT"]
        rig.clock.now += 1.0
        assert (look(rig.bus).values["HEARTBEAT"] - before) & 0xFFFF == 10
        rig.facts = Facts(alive=False)
        still = look(rig.bus).values["HEARTBEAT"]
        rig.clock.now += 30.0
        assert look(rig.bus).values["HEARTBEAT"] == still


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("who", ["plc", "station", "both"])
def test_a_restart_in_every_state_of_the_handshake(rig, who, phase):
    """The part is held, or asked for again; the next one gets its own result."""
    rig.plc.place("s1")
    if phase is not Phase.IDLE:
        rig.until(lambda: rig.handshake.phase is phase)
    if who != "station":
        rig.plc.restart()
    if who != "plc":
        rig.restart_station()
    rig.until(lambda: rig.plc.step == "ready" and not rig.plc.serial, limit=2000)
    rig.plc.place("s2")
    rig.until(lambda: not rig.plc.serial)
    assert set(rig.plc.decisions) == {"s1", "s2"}
    assert rig.plc.decisions["s1"] in ("HOLD", CODE[truth("s1")].name)
    assert rig.plc.decisions["s2"] == CODE[truth("s2")].name
    assert rig.plc.mismatches == 0


@pytest.mark.slow
def test_ten_thousand_cycles_with_overruns_cuts_restarts_and_torn_writes():
    """No part without a decision, none with that of another, every taken trigger one verdict."""
    rng = random.Random(5)
    rig = Rig().ready()
    injected: Counter[str] = Counter()
    taken = 0
    for number in range(10_000):
        plc = rig.plc
        plc.order = rng.choice(["block", "data first", "status first"])
        serial = f"part-{number}"
        plc.place(serial)
        fault = rng.choices(
            ["none", "early drop", "cut", "plc restart", "station restart", "torn"],
            [80, 8, 6, 2, 1, 3],
        )[0]
        at = rng.randrange(8)
        for cycle in range(300):
            if cycle == at and plc.serial == serial and fault != "none":
                injected[fault] += 1
                if fault == "early drop" and plc.step == "wait":
                    plc.decide("HOLD")  # the belt did not wait: the next part is there already
                    rig.bus.write(0, [ON, plc.heartbeat])
                    plc.step = "ready"
                    counter = plc.counter % 65535 + 1
                    next_part = part_registers(counter, "NUT", f"{serial}-next")
                    rig.bus.write(PLC["COUNTER"].address, next_part)
                    rig.bus.write(0, [TRIGGER, plc.heartbeat])
                    rig.bus.write(0, [ON, plc.heartbeat])
                    plc.counter = counter
                    break
                if fault == "cut":
                    rig.bus.cut = rng.choice([1, 3, 130])
                if fault == "plc restart":
                    plc.restart()
                    break
                if fault == "station restart":
                    taken += rig.gate.counts().accepted
                    rig.restart_station()
                if fault == "torn" and plc.step == "ready":
                    torn = part_registers(plc.counter + 1, "NUT", "torn", end=plc.counter)
                    rig.bus.write(PLC["COUNTER"].address, torn)
                    rig.bus.write(0, [TRIGGER, plc.heartbeat])
                    rig.bus.write(0, [ON, plc.heartbeat])
            rig.cycle(work=rng.randrange(4))
            if not plc.serial:
                break
        else:
            raise AssertionError(f"{serial} after {fault}: {plc}, {rig.handshake.phase}")
        rig.bus.cut = 0
    taken += rig.gate.counts().accepted
    decisions = rig.plc.decisions
    assert len(decisions) == 10_000
    wrong = {s: d for s, d in decisions.items() if d not in ("HOLD", CODE[truth(s)].name)}
    assert wrong == {} and rig.plc.mismatches == 0
    held = Counter(decisions.values())["HOLD"]
    assert 0 < held < 2_000, "most parts had no fault and got their result"
    assert max(rig.verdicts.values()) <= 1 + injected["station restart"]
    assert set(injected) == {"early drop", "cut", "plc restart", "station restart", "torn"}
    seen = {why for _, why in rig.refused}
    assert {Refusal.BUSY, Refusal.TORN_REQUEST} <= seen
    assert sum(rig.verdicts.values()) >= taken - injected["station restart"] - 1


@pytest.mark.parametrize("gap_s", [1.0, 10.0, 600.0, 3600.0, 8 * 3600.0])
def test_a_gap_of_any_length_is_no_fault_while_both_beat(gap_s):
    rig = Rig().ready()
    for number in range(2):
        for _ in range(max(1, int(gap_s / 1.9))):
            rig.clock.now += min(1.9, gap_s)
            rig.handshake.tick(rig.clock.now)
            rig.beat(ON)
        assert Status.READY in rig.status()
        rig.plc.place(f"g{number}")
        rig.until(lambda: not rig.plc.serial and rig.plc.step == "ready")
        assert rig.plc.decisions[f"g{number}"] == CODE[truth(f"g{number}")].name
    assert rig.lives == [True] and rig.refused == []


class TestRegisters:
    def test_do_not_overlap_and_one_request_reads_all(self):
        for block, span in ((PLC, registers.PLC_SPAN), (STATION, registers.STATION_SPAN)):
            addresses = [a for r in block.values() for a in range(r.address, r.address + r.count)]
            assert addresses == list(span) and len(addresses) <= 121

    @pytest.mark.parametrize(
        ("address", "count"), [(40, 1), (99, 2), (100, 0), (100, 100), (39, 2), (170, 1)]
    )
    def test_others_are_refused(self, rig, address, count):
        with pytest.raises(ValueError, match="registers"):
            rig.bus.read(address, count)

    @pytest.mark.parametrize(("address", "count"), [(100, 1), (39, 2), (41, 1)])
    def test_those_of_the_station_cannot_be_written(self, rig, address, count):
        with pytest.raises(ValueError, match="read only"):
            rig.bus.write(address, [1] * count)

    def test_texts_are_ascii_high_byte_first(self):
        assert registers.write_text("AB1", 3) == [0x4142, 0x3100, 0]
        assert registers.write_text("ä" + "x" * 9, 2) == [0x3F78, 0x7878]
        assert registers.read_text([0x4142, 0x3100, 0x4444]) == "AB1"

    def test_every_bit_and_number_has_its_meaning_in_the_document(self, repository):
        assert list(registers.COMMANDS) == list(Command)
        assert list(registers.STATUSES) == list(Status)
        assert list(registers.REFUSALS) == list(Refusal)
        document = (repository / "docs/TRIGGERS.md").read_text(encoding="utf-8")
        assert registers.table() in document, "python -m forge_station.triggers.registers"
