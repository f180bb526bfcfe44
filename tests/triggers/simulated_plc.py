"""A PLC program and a line in front of the station, for the tests of the handshake.

`Plc` is what docs/TRIGGERS.md tells a PLC programmer to write: one `scan` a cycle, a state machine,
and every result compared with the part that is in place. It reads and writes over a bus: memory,
or Modbus TCP. Every read is held against the rules that no moment may break.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, Protocol

from forge_station.contract.verdict import (
    Certification,
    CheckResult,
    Outcome,
    Reason,
    ScanSummary,
    Verdict,
    decide,
)
from forge_station.triggers import registers
from forge_station.triggers.gate import Refusal
from forge_station.triggers.handshake import Handshake
from forge_station.triggers.registers import PLC, STATION, Code, Command, Status

OUTCOME_BITS = Status.OK | Status.NG | Status.UNSURE | Status.ERROR
Order = Literal["block", "data first", "status first"]


def truth(serial: str) -> Outcome:
    """What the station finds of a part: so a result of another part is noticed."""
    return list(Outcome)[zlib.crc32(serial.encode()) % 4]


@lru_cache(maxsize=1000)
def verdict_of(serial: str, *, mode: str = "certified") -> Verdict:
    outcome = truth(serial)
    reasons = () if outcome is Outcome.PASS else (Reason("WRONG_MODEL", serial),)
    return decide(
        required=("workpiece",),
        checks=[CheckResult("scan", Outcome.PASS), CheckResult("workpiece", outcome, reasons)],
        scan=ScanSummary(points=1),
        result_id=f"result-of-{serial}",
        serial=serial,
        product="NUT",
        certification=Certification(mode, "a test"),  # type: ignore[arg-type]
        timings_ms={"total": 12.0},
    )


CODE = {
    Outcome.PASS: Code.OK,
    Outcome.FAIL: Code.NG,
    Outcome.UNSURE: Code.UNSURE,
    Outcome.ERROR: Code.ERROR,
}


class Bus(Protocol):
    """Raises ConnectionError while the line between PLC and station is cut."""

    def write(self, address: int, values: Sequence[int]) -> None: ...
    def read(self, address: int, count: int) -> list[int]: ...


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class MemoryBus:
    """Straight into the handshake. `cut`: so many further calls fail."""

    handshake: Handshake
    clock: Clock
    cut: int = 0

    def write(self, address: int, values: Sequence[int]) -> None:
        self._pass()
        self.handshake.write(address, values, self.clock.now)

    def read(self, address: int, count: int) -> list[int]:
        self._pass()
        return self.handshake.read(address, count, self.clock.now)

    def _pass(self) -> None:
        if self.cut:
            self.cut -= 1
            raise ConnectionError("the cable is out")


@dataclass(frozen=True)
class View:
    """The station's registers as the PLC has them in one cycle."""

    status: Status
    values: dict[str, int | str]

    @property
    def outcome(self) -> Status:
        return self.status & OUTCOME_BITS


def part_registers(
    counter: int, part_number: str, serial: str, end: int | None = None
) -> list[int]:
    return [
        counter,
        *registers.write_text(part_number, PLC["PART_NUMBER"].count),
        *registers.write_text(serial, PLC["SERIAL"].count),
        counter if end is None else end,
    ]


_text = lru_cache(1024)(registers.read_text)  # polled again and again


def look(bus: Bus, order: Order = "block") -> View:
    """Read the station's block, in one request or in two; check what must always hold."""
    block = registers.STATION_SPAN
    split = STATION["RESULT_COUNTER"].address
    if order == "block":
        image = bus.read(block.start, len(block))
    elif order == "data first":
        data = bus.read(split, block.stop - split)
        image = bus.read(block.start, split - block.start) + data
    else:
        head = bus.read(block.start, split - block.start)
        image = head + bus.read(split, block.stop - split)
    values: dict[str, int | str] = {}
    for name, r in STATION.items():
        found = image[r.address - block.start :][: r.count]
        values[name] = _text(tuple(found)) if r.text else found[0]
    view = View(Status(values["STATUS"]), values)
    valid = Status.RESULT_VALID in view.status
    assert view.outcome.value.bit_count() == valid, f"outcome bits and RESULT_VALID: {view}"
    assert not (valid and Status.BUSY in view.status), view
    assert not (Status.READY in view.status and view.status & (Status.BUSY | Status.RESULT_VALID))
    if Status.ADVISORY in view.status:
        assert Status.OK not in view.status
    if Status.PLC_ALIVE not in view.status:
        assert not view.status & (Status.READY | Status.RESULT_VALID | OUTCOME_BITS), view
    return view


@dataclass
class Plc:
    """`decisions`: serial -> what the line did with the part; "HOLD" where it had no result.

    `patience`: cycles until a part without an answer is given up.
    """

    bus: Bus
    order: Order = "block"
    part_number: str = "NUT"
    patience: int = 110
    step: str = "ready"
    serial: str = ""
    counter: int = 0
    heartbeat: int = 0
    waited: int = 0
    boot: int | str = 0
    decisions: dict[str, str] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    mismatches: int = 0

    def place(self, serial: str) -> None:
        """A part has come into the station."""
        assert not self.serial, "the place is taken"
        self.serial = serial

    def decide(self, decision: str) -> None:
        assert self.serial and self.serial not in self.decisions, "one decision a part"
        self.decisions[self.serial] = decision
        self.serial = ""

    def restart(self) -> None:
        """Power off and on: memory is gone, and so is what was known of the part in place."""
        if self.serial:
            self.decide("HOLD")
        self.step, self.counter, self.heartbeat, self.waited = "ready", 0, 0, 0

    def scan(self) -> View | None:
        """One cycle: read, think, write. None while there is no connection."""
        self.heartbeat = (self.heartbeat + 1) & 0xFFFF
        try:
            view = look(self.bus, self.order)
            self.think(view)
            command = Command.ENABLE
            if self.step in ("wait", "drop"):
                command |= Command.TRIGGER
            if self.step == "drop":  # the answer was read: acknowledge it
                command = Command.ENABLE
                self.step = "off"
            self.bus.write(PLC["COMMAND"].address, [command, self.heartbeat])
        except ConnectionError:
            self.waited += 1
            return None
        return view

    def think(self, view: View) -> None:
        station_restarted = self.boot not in (0, view.values["BOOT"])
        self.boot = view.values["BOOT"]
        if self.step == "ready":
            if self.serial and Status.READY in view.status:
                self.counter = self.counter % 65535 + 1
                data = part_registers(self.counter, self.part_number, self.serial)
                self.bus.write(PLC["COUNTER"].address, data)
                self.step, self.waited = "wait", 0
        elif self.step == "wait":
            self.waited += 1
            if Status.RESULT_VALID in view.status:
                self.take(view)
                self.step = "drop"
            elif Status.REFUSED in view.status:
                if view.values["REFUSED_COUNTER"] == self.counter:
                    self.refusals.append(Refusal(view.values["REASON"]))
                self.step = "drop"  # and try again with another counter
            elif station_restarted:
                self.step = "drop"
            elif self.waited > self.patience:
                self.decide("HOLD")
                self.step = "drop"
        elif self.step == "off" and not view.status & (Status.RESULT_VALID | Status.REFUSED):
            self.step = "ready"

    def take(self, view: View) -> None:
        values = view.values
        same = values["RESULT_COUNTER"] == values["RESULT_COUNTER_END"] == self.counter
        if not same or values["RESULT_SERIAL"] != self.serial:
            self.mismatches += 1  # never to be acted on
            self.decide("HOLD")
            return
        (flag,) = [name for name in ("OK", "NG", "UNSURE", "ERROR") if Status[name] in view.status]
        assert Code[flag] == values["RESULT_CODE"]
        self.decide(flag)
