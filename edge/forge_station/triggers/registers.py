"""The register map between PLC and station, and the table of it in docs/TRIGGERS.md.

Holding registers of 16 bits, addressed from 0 as on the wire (a PLC that counts from 40001 adds
that). Texts are ASCII, two characters a register, the first in the high byte, padded with zeros.
Two blocks: the PLC writes `PLC`, the station writes `STATION`. It knows no Modbus and no state.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag

from forge_station.contract.verdict import Outcome, Verdict
from forge_station.triggers.gate import Refusal


class Command(IntFlag):
    """Bits that the PLC sets."""

    ENABLE = 1 << 0
    TRIGGER = 1 << 1


class Status(IntFlag):
    """Bits that the station sets. At most one of OK, NG, UNSURE, ERROR, with RESULT_VALID only."""

    READY = 1 << 0
    BUSY = 1 << 1
    RESULT_VALID = 1 << 2
    OK = 1 << 3
    NG = 1 << 4
    UNSURE = 1 << 5
    ERROR = 1 << 6
    REFUSED = 1 << 7
    PLC_ALIVE = 1 << 8
    ADVISORY = 1 << 9


COMMANDS: Mapping[Command, str] = {
    Command.ENABLE: "The line runs: the station may take triggers.",
    Command.TRIGGER: "A part is in place. Stays on until RESULT_VALID or REFUSED was seen.",
}
STATUSES: Mapping[Status, str] = {
    Status.READY: "A trigger raised now is taken.",
    Status.BUSY: "A part is in work; its data was taken over.",
    Status.RESULT_VALID: "The result registers and one outcome bit are those of RESULT_COUNTER.",
    Status.OK: "Passed, under a valid certificate. Never set by an advisory station.",
    Status.NG: "Failed.",
    Status.UNSURE: "A person must look.",
    Status.ERROR: "The station could not inspect the part.",
    Status.REFUSED: "The trigger that is on was not taken, see REASON. Nothing was inspected.",
    Status.PLC_ALIVE: "The station sees the PLC's heartbeat.",
    Status.ADVISORY: "No valid certificate: no part will be OK.",
}
REFUSALS: Mapping[Refusal, str] = {
    Refusal.NONE: "Nothing is in the way.",
    Refusal.BUSY: "Overrun: a part is in work, or the queue is full.",
    Refusal.NOT_READY: "The station starts, stops, or its results cannot be stored.",
    Refusal.NOT_ENABLED: "ENABLE is off.",
    Refusal.NO_HEARTBEAT: "The PLC's HEARTBEAT did not change within the timeout.",
    Refusal.TORN_REQUEST: "COUNTER and COUNTER_END differ, or are 0.",
    Refusal.REPEATED_COUNTER: "COUNTER is that of the part before: its data may be, too.",
    Refusal.BAD_TEXT: "SERIAL is empty, or a text is not printable ASCII.",
    Refusal.REQUEST_CHANGED: "The part's data changed while TRIGGER was on: no result is shown.",
    Refusal.TRIGGER_ON: "TRIGGER is on from before: switch it off first.",
}


class Code(IntEnum):
    """RESULT_CODE."""

    NONE = 0
    OK = 1
    NG = 2
    UNSURE = 3
    ERROR = 4


BIT: Mapping[Code, Status] = {
    Code.NONE: Status(0),
    Code.OK: Status.OK,
    Code.NG: Status.NG,
    Code.UNSURE: Status.UNSURE,
    Code.ERROR: Status.ERROR,
}


@dataclass(frozen=True)
class Register:
    """One value. `count` registers from `address`; `text`: characters, else one number."""

    name: str
    address: int
    count: int
    meaning: str
    text: bool = False


def _block(start: int, *entries: tuple[str, int, str]) -> dict[str, Register]:
    """Registers in a row; a count above 1 is a text of twice so many characters."""
    found, address = {}, start
    for name, count, meaning in entries:
        found[name] = Register(name, address, count, meaning, text=count > 1)
        address += count
    return found


PLC: Mapping[str, Register] = _block(
    0,
    ("COMMAND", 1, "Command bits, see below."),
    ("HEARTBEAT", 1, "Any value that changes within the timeout, e.g. a counter."),
    ("COUNTER", 1, "Number of the part, 1 to 65535; another one for every trigger."),
    ("PART_NUMBER", 16, "Product, up to 32 characters; empty: that of the station file."),
    ("SERIAL", 20, "Serial number of the part, 1 to 40 characters."),
    ("COUNTER_END", 1, "COUNTER again: a part's data that arrived in pieces is noticed."),
)
STATION: Mapping[str, Register] = _block(
    100,
    ("STATUS", 1, "Status bits, see below."),
    ("HEARTBEAT", 1, "Counts up every 0.1 s while the station's loop lives."),
    ("BOOT", 1, "Another number after every start of the station."),
    ("REASON", 1, "Why the trigger was refused or why the station is not READY, see below."),
    ("COUNTER", 1, "COUNTER of the part in work, or of the last one; 0 after a start."),
    ("REFUSED_COUNTER", 1, "COUNTER of the trigger that was refused last."),
    ("REFUSED_COUNT", 1, "How many triggers were refused since the start, modulo 65536."),
    ("RESULT_COUNTER", 1, "COUNTER of the part that the result is for; 0: there is no result."),
    ("RESULT_CODE", 1, "0 none, 1 OK, 2 NG, 3 UNSURE, 4 ERROR."),
    ("RESULT_SERIAL", 20, "SERIAL of the part that the result is for."),
    ("RESULT_REASON", 20, "Code of the first reason, e.g. WRONG_MODEL; empty for OK."),
    ("RESULT_ID", 18, "Id of the result in the messages to the MES (a UUID)."),
    ("RESULT_MS", 1, "Duration of the inspection in ms, 65535 at most."),
    ("RESULT_COUNTER_END", 1, "RESULT_COUNTER again."),
)


def _span(block: Mapping[str, Register]) -> range:
    first, *_, last = block.values()
    return range(first.address, last.address + last.count)


PLC_SPAN, STATION_SPAN = _span(PLC), _span(STATION)
"""All addresses of each block."""


@dataclass(frozen=True)
class Request:
    """What the PLC has written."""

    command: Command = field(default_factory=lambda: Command(0))
    heartbeat: int = 0
    counter: int = 0
    part_number: str = ""
    serial: str = ""
    counter_end: int = 0

    @classmethod
    def of(cls, registers: Sequence[int]) -> Request:
        """From the PLC's block. What is no printable ASCII becomes `\\ufffd`."""
        part = {name: registers[r.address : r.address + r.count] for name, r in PLC.items()}
        return cls(
            cls.bits(part["COMMAND"][0]),
            part["HEARTBEAT"][0],
            part["COUNTER"][0],
            read_text(part["PART_NUMBER"]),
            read_text(part["SERIAL"]),
            part["COUNTER_END"][0],
        )

    @staticmethod
    def bits(command: int) -> Command:
        """The bits that have a meaning."""
        return Command(command & (Command.ENABLE | Command.TRIGGER))

    @property
    def part(self) -> tuple[int, str, str, int]:
        """What belongs to one part and may not change while its trigger is on."""
        return self.counter, self.part_number, self.serial, self.counter_end


@dataclass(frozen=True)
class Result:
    """What the PLC is told of a part."""

    code: Code
    reason: str = ""
    result_id: str = ""
    ms: int = 0

    @classmethod
    def of(cls, verdict: Verdict | None, *, advisory: bool = False) -> Result:
        """OK only for a PASS under a certificate. None, a part that was given up, is an ERROR.

        `advisory`: the station has no certificate now, whatever the verdict says.
        """
        if verdict is None:
            return cls(Code.ERROR, "STATION_ERROR")
        said = verdict.certification
        certified = not advisory and said is not None and said.mode == "certified"
        codes = {
            Outcome.PASS: Code.OK if certified else Code.UNSURE,
            Outcome.FAIL: Code.NG,
            Outcome.UNSURE: Code.UNSURE,
            Outcome.ERROR: Code.ERROR,
        }
        code = codes[verdict.outcome]
        reason = verdict.reasons[0].code if verdict.reasons else ""
        if verdict.outcome is Outcome.PASS and code is Code.UNSURE:
            reason = "NO_CERTIFICATE"
        ms = min(65535, round(verdict.timings_ms.get("total", 0.0)))
        return cls(code, reason, verdict.result_id, ms)


def write_text(text: str, count: int) -> list[int]:
    """`count` registers; what does not fit is cut, what is not ASCII becomes `?`."""
    raw = text.encode("ascii", "replace")[: 2 * count].ljust(2 * count, b"\0")
    return list(struct.unpack(f">{count}H", raw))


def read_text(registers: Sequence[int]) -> str:
    """The characters up to the first zero, without spaces around them."""
    raw = struct.pack(f">{len(registers)}H", *registers).split(b"\0", 1)[0]
    return "".join(chr(c) if 32 <= c < 127 else "\ufffd" for c in raw).strip()


def table() -> str:
    """The map in Markdown, as docs/TRIGGERS.md has it; running this module prints it."""
    lines: list[str] = []
    for title, block in (("The PLC writes", PLC), ("The station writes", STATION)):
        lines += [
            f"**{title}**",
            "",
            "| address | registers | name | meaning |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {r.address} | {r.count}{' (text)' if r.text else ''} | `{r.name}` | {r.meaning} |"
            for r in block.values()
        ]
        lines.append("")
    lines += ["**Bits of `COMMAND`**", "", "| bit | name | meaning |", "|---|---|---|"]
    lines += [f"| {_bit(flag)} | `{flag.name}` | {text} |" for flag, text in COMMANDS.items()]
    lines += ["", "**Bits of `STATUS`**", "", "| bit | name | meaning |", "|---|---|---|"]
    lines += [f"| {_bit(flag)} | `{flag.name}` | {text} |" for flag, text in STATUSES.items()]
    lines += ["", "**Numbers of `REASON`**", "", "| number | name | meaning |", "|---|---|---|"]
    lines += [f"| {item.value} | `{item.name}` | {text} |" for item, text in REFUSALS.items()]
    return "\n".join([*lines, ""])


def _bit(flag: Command | Status) -> int:
    return flag.value.bit_length() - 1


if __name__ == "__main__":
    print(table(), end="")
