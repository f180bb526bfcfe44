"""The handshake with a PLC: what it has written, the part in work -> what it may read.

No Modbus in here: `write` and `read` take and give registers, time comes from the caller, so that
years of handshakes run in a test. The outputs follow from the inputs alone: a heartbeat that stops,
ENABLE off, or data that changed take READY, RESULT_VALID and every outcome bit away at once.

    IDLE -TRIGGER on, taken-> BUSY -verdict-> DATA -a poll saw it-> VALID -TRIGGER off-> IDLE

In DATA the result registers are written and RESULT_VALID is still off; it comes on for the poll
after the one that could see the data, so that a PLC may read data and status in any order. TRIGGER
off before VALID gives the part up: it is inspected to the end and its verdict goes to the MES, but
its result is never shown.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from forge_station.capture.base import Trigger
from forge_station.contract.verdict import Verdict
from forge_station.triggers import registers
from forge_station.triggers.gate import Gate, Refusal, TriggerRefusedError
from forge_station.triggers.registers import BIT, PLC, STATION, Command, Request, Result, Status

log = logging.getLogger(__name__)

BEAT_S = 0.1
_BASE = STATION["STATUS"].address


class Phase(Enum):
    """Of the part that was taken last."""

    IDLE = "idle"
    BUSY = "busy"
    DATA = "data"
    VALID = "valid"


@dataclass(frozen=True)
class Facts:
    """What the handshake cannot know by itself."""

    alive: bool = True
    """The station's loop lives; otherwise its heartbeat stands still."""
    advisory: bool = False


class Handshake:
    """Made for one PLC. Any thread may call any method; `now` is of one monotonic clock, seconds.

    `boot`: a number that differs from that of the last start. `part_number`: of requests that name
    none. `on_alive` is told when the PLC's heartbeat comes and goes; it must not block.
    """

    def __init__(
        self,
        gate: Gate,
        *,
        heartbeat_s: float = 2.0,
        boot: int = 1,
        part_number: str = "",
        facts: Callable[[], Facts] = Facts,
        on_alive: Callable[[bool], None] | None = None,
    ) -> None:
        self._gate, self._facts, self._on_alive = gate, facts, on_alive
        self._heartbeat_s, self._boot, self._part_number = heartbeat_s, boot, part_number
        self._lock = threading.RLock()
        self._written = [0] * len(registers.PLC_SPAN)
        self._request = Request()
        self._heard: int | None = None
        """The last heartbeat; None: the first one only says where counting begins."""
        self._heard_at: float | None = None
        self._alive = False
        self._phase = Phase.IDLE
        self._part: Request | None = None
        """The part that was taken last, as it was when it was taken."""
        self._result: Result | None = None
        self._wanted = False
        """The PLC still waits for the result of `_part`."""
        self._off_seen = False
        """TRIGGER was seen off since the start: a level from before is no edge."""
        self._refusal = Refusal.NONE
        self._refused_counter = self._refused_count = 0
        self._shown = False
        self._beat = 0

    # The PLC's side

    def write(self, address: int, values: Sequence[int], now: float) -> None:
        """Registers that the PLC wrote in one request. Raises ValueError outside of its block."""
        block = registers.PLC_SPAN
        if address not in block or address + len(values) - 1 not in block:
            raise ValueError(f"registers {address} to {address + len(values) - 1} are read only")
        with self._lock:
            start = address - block.start
            self._written[start : start + len(values)] = values
            before, self._request = self._request, self._read_request(address, values)
            if PLC["HEARTBEAT"].address in range(address, address + len(values)):
                self._hear(self._request.heartbeat, now)
            self._update(now)
            self._follow(before.command)

    def read(self, address: int, count: int, now: float) -> list[int]:
        """Registers as the PLC reads them in one request. Raises ValueError for others."""
        with self._lock:
            self._update(now)
            block, own = registers.STATION_SPAN, registers.PLC_SPAN
            if address in own and address + count - 1 in own:
                return self._written[address - own.start :][:count]
            if count < 1 or address not in block or address + count - 1 not in block:
                raise ValueError(f"there are no registers {address} to {address + count - 1}")
            found = self._image(now)[address - block.start :][:count]
            if self._phase is Phase.DATA and self._shown and address == _BASE:
                self._phase = Phase.VALID
            return found

    def tick(self, now: float) -> None:
        """Notice a heartbeat that stopped, when nobody reads or writes any more."""
        with self._lock:
            self._update(now)

    # The station's side

    def finish(self, part: Request, verdict: Verdict | None) -> None:
        """The verdict of a part that was taken; None when it was given up."""
        with self._lock:
            if self._phase is not Phase.BUSY or self._part is not part:
                log.error("a verdict for part %s, which is not in work", part.serial)
                return
            self._result = Result.of(verdict, advisory=self._facts().advisory)
            self._phase = Phase.DATA if self._wanted else Phase.IDLE
            self._shown = False

    @property
    def phase(self) -> Phase:
        with self._lock:
            return self._phase

    # What follows from the inputs

    def _read_request(self, address: int, values: Sequence[int]) -> Request:
        """Command and heartbeat come many times a second, the part's data once a part."""
        if address + len(values) <= PLC["COUNTER"].address:
            command, heartbeat = self._written[:2]
            return replace(self._request, command=Request.bits(command), heartbeat=heartbeat)
        return Request.of(self._written)

    def _hear(self, heartbeat: int, now: float) -> None:
        if self._heard is not None and heartbeat != self._heard:
            self._heard_at = now
        self._heard = heartbeat

    def _update(self, now: float) -> None:
        """The heartbeat's state, and the result's that hangs on it."""
        alive = self._heard_at is not None and now - self._heard_at <= self._heartbeat_s
        if alive is not self._alive:
            self._alive = alive
            if not alive:
                self._heard = None
            if self._on_alive is not None:
                self._on_alive(alive)
        if self._phase is Phase.VALID and not self._presentable:
            self._phase, self._shown = Phase.DATA, False

    def _follow(self, before: Command) -> None:
        """Edges of TRIGGER, and a request that changes under it."""
        on = Command.TRIGGER in self._request.command
        if not on:
            if self._phase is Phase.VALID or self._phase is Phase.DATA:
                self._phase, self._result = Phase.IDLE, None
            self._off_seen, self._wanted, self._refusal = True, False, Refusal.NONE
        elif Command.TRIGGER not in before:
            self._rise()
        elif self._wanted and self._part is not None and self._request.part != self._part.part:
            self._wanted = False
            if self._phase is not Phase.BUSY:
                self._phase, self._result = Phase.IDLE, None
            self._refuse(Refusal.REQUEST_CHANGED)

    def _rise(self) -> None:
        request = self._request
        found = self._objection(request)
        if found is not None:
            self._refuse(found)
            return
        try:
            self._gate.offer(self._trigger(), lambda verdict: self.finish(request, verdict))
        except TriggerRefusedError as error:
            self._note(error.refusal)
            return
        self._phase, self._part, self._result = Phase.BUSY, request, None
        self._wanted, self._shown = True, False

    def _trigger(self) -> Trigger:
        number = self._request.part_number or self._part_number
        return Trigger(self._request.serial, number, time.time_ns())

    def _objection(self, request: Request) -> Refusal | None:
        """Why a rising TRIGGER is not handed to the gate."""
        if not self._off_seen:
            return Refusal.TRIGGER_ON
        if not self._alive:
            return Refusal.NO_HEARTBEAT
        if Command.ENABLE not in request.command:
            return Refusal.NOT_ENABLED
        if self._phase is not Phase.IDLE:
            return Refusal.BUSY
        if not self._facts().alive:
            return Refusal.NOT_READY
        if request.counter != request.counter_end or request.counter == 0:
            return Refusal.TORN_REQUEST
        if self._part is not None and request.counter == self._part.counter:
            return Refusal.REPEATED_COUNTER
        if not request.serial or "\ufffd" in request.serial + request.part_number:
            return Refusal.BAD_TEXT
        return None

    def _refuse(self, refusal: Refusal) -> None:
        self._gate.refuse(self._trigger(), refusal, registers.REFUSALS[refusal])
        self._note(refusal)

    def _note(self, refusal: Refusal) -> None:
        self._refusal = refusal
        self._refused_counter = self._request.counter
        self._refused_count = (self._refused_count + 1) & 0xFFFF

    @property
    def _presentable(self) -> bool:
        """Whether the PLC may see the result: it lives, runs, and still asks for this very part."""
        asks = self._request.command == Command.ENABLE | Command.TRIGGER
        return self._alive and self._wanted and asks

    def _hindrance(self, facts: Facts) -> Refusal:
        """Why the station is not READY; NONE: it is."""
        if not self._alive:
            return Refusal.NO_HEARTBEAT
        if Command.ENABLE not in self._request.command:
            return Refusal.NOT_ENABLED
        if self._refusal is not Refusal.NONE:
            return self._refusal
        if self._phase is not Phase.IDLE:
            return Refusal.BUSY
        if Command.TRIGGER in self._request.command:
            return Refusal.TRIGGER_ON
        if not facts.alive:
            return Refusal.NOT_READY
        found = self._gate.objection()
        return found[0] if found is not None else Refusal.NONE

    def _image(self, now: float) -> list[int]:
        """All registers of the station's block."""
        facts = self._facts()
        if facts.alive:
            self._beat = int(now / BEAT_S) & 0xFFFF
        reason = self._hindrance(facts)
        status = Status(0)
        if reason is Refusal.NONE:
            status |= Status.READY
        if self._phase is Phase.BUSY:
            status |= Status.BUSY
        if self._refusal is not Refusal.NONE:
            status |= Status.REFUSED
        if self._alive:
            status |= Status.PLC_ALIVE
        if facts.advisory:
            status |= Status.ADVISORY
        values: dict[str, int | str] = {
            "HEARTBEAT": self._beat,
            "BOOT": self._boot,
            "REASON": reason,
            "COUNTER": self._part.counter if self._part is not None else 0,
            "REFUSED_COUNTER": self._refused_counter,
            "REFUSED_COUNT": self._refused_count,
        }
        result = self._result
        if result is not None and self._part is not None and self._presentable:
            values |= {
                "RESULT_COUNTER": self._part.counter,
                "RESULT_CODE": result.code,
                "RESULT_SERIAL": self._part.serial,
                "RESULT_REASON": result.reason,
                "RESULT_ID": result.result_id,
                "RESULT_MS": result.ms,
                "RESULT_COUNTER_END": self._part.counter,
            }
            self._shown = True
            if self._phase is Phase.VALID:
                status |= Status.RESULT_VALID | BIT[result.code]
            else:
                status |= Status.BUSY
        values["STATUS"] = status
        return _encode(values)


def _encode(values: dict[str, int | str]) -> list[int]:
    """The station's block; a register without a value is 0."""
    image = [0] * len(registers.STATION_SPAN)
    for name, value in values.items():
        register = STATION[name]
        start = register.address - _BASE
        if isinstance(value, str):
            text = registers.write_text(value, register.count)
            image[start : start + register.count] = text
        else:
            image[start] = int(value)
    return image
