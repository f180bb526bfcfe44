"""Stand in for the PLC: send parts to a station over Modbus TCP and print what the line would do.

    pip install 'pymodbus>=3.16,<3.17'
    python try_plc.py --host 127.0.0.1 --port 502 A1 A2 A3
    python try_plc.py --port 15020 --part-number NUT-M8-5 A1

The program of docs/TRIGGERS.md, step by step, for commissioning and as a text to translate. The
station file must have `trigger: {source: plc}`. No PLC may be connected at the same time.
Exit code: 0 when every part got its result, whatever it was; 1 when one had to be held.
"""

from __future__ import annotations

import argparse
import sys
import time

from pymodbus.client import ModbusTcpClient
from pymodbus.exceptions import ModbusException

ENABLE, TRIGGER = 1, 2
READY, RESULT_VALID, REFUSED, ADVISORY = 1 << 0, 1 << 2, 1 << 7, 1 << 9
OUTCOMES = {1 << 3: "OK", 1 << 4: "NG", 1 << 5: "UNSURE", 1 << 6: "ERROR"}
REASONS = (
    "NONE", "BUSY", "NOT_READY", "NOT_ENABLED", "NO_HEARTBEAT", "TORN_REQUEST", "REPEATED_COUNTER",
    "BAD_TEXT", "REQUEST_CHANGED", "TRIGGER_ON",
)  # fmt: skip
STATUS, REASON, RESULT_COUNTER, RESULT_SERIAL, RESULT_REASON, RESULT_COUNTER_END = (
    0, 3, 7, 9, 29, 68,
)  # fmt: skip
"""Offsets in the station's 69 registers from address 100."""
CYCLE_S = 0.05


class Line:
    """The PLC's side: one `cycle` writes what it has to say and reads the station's block."""

    def __init__(self, client: ModbusTcpClient) -> None:
        self.client = client
        self.command = ENABLE
        self.beat = 0

    def cycle(self) -> list[int]:
        """The station's registers after one exchange. Raises ModbusException."""
        time.sleep(CYCLE_S)
        self.beat = (self.beat + 1) % 65536
        self.write(0, [self.command, self.beat])
        answer = self.client.read_holding_registers(100, count=69)
        if answer.isError():
            raise ModbusException(f"the station refuses to be read: {answer}")
        return list(answer.registers)

    def write(self, address: int, values: list[int]) -> None:
        """Raises ModbusException."""
        answer = self.client.write_registers(address, values)
        if answer.isError():
            raise ModbusException(f"the station refuses to be written: {answer}")

    def wait(self, bits: int, on: bool, limit_s: float) -> list[int]:
        """Cycles until one of the bits is on, or all are off. Raises TimeoutError."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            block = self.cycle()
            if bool(block[STATUS] & bits) is on:
                return block
        why = REASONS[block[REASON]] if block[REASON] < len(REASONS) else str(block[REASON])
        raise TimeoutError(f"STATUS {block[STATUS]:#06x} for {limit_s:g} s, REASON {why}")

    def part(self, serial: str, part_number: str, limit_s: float) -> str:
        """One part through the station: the outcome, or why it has to be held."""
        before = self.wait(READY, True, limit_s)
        counter = before[4] % 65535 + 1
        data = [counter, *text(part_number, 16), *text(serial, 20), counter]
        self.write(2, data)  # the data first, then the trigger
        self.command = ENABLE | TRIGGER
        try:
            block = self.wait(RESULT_VALID | REFUSED, True, limit_s)
        finally:
            self.command = ENABLE
        self.wait(RESULT_VALID | REFUSED, False, limit_s)
        if block[STATUS] & REFUSED:
            return f"HOLD: refused, {REASONS[block[REASON]]}"
        mine = (counter, counter, serial)
        found = words(block[RESULT_SERIAL : RESULT_SERIAL + 20])
        if (block[RESULT_COUNTER], block[RESULT_COUNTER_END], found) != mine:
            return f"HOLD: the result is of {found!r}, not of this part"
        outcome = next(name for bit, name in OUTCOMES.items() if block[STATUS] & bit)
        reason = words(block[RESULT_REASON : RESULT_REASON + 20])
        advisory = " (advisory: OK never comes)" if block[STATUS] & ADVISORY else ""
        return f"{outcome} {reason}".rstrip() + advisory


def text(value: str, count: int) -> list[int]:
    """Two characters a register, the first in the high byte, filled up with zeros."""
    raw = value.encode("ascii").ljust(2 * count, b"\0")
    return [raw[i] << 8 | raw[i + 1] for i in range(0, 2 * count, 2)]


def serial_number(value: str) -> str:
    """The station's limits, before anything is sent. Raises ArgumentTypeError."""
    return _ascii(value, 1, 40)


def product(value: str) -> str:
    """Raises ArgumentTypeError."""
    return _ascii(value, 0, 32)


def _ascii(value: str, least: int, most: int) -> str:
    if not (least <= len(value) <= most and value.isascii() and value.isprintable()):
        raise argparse.ArgumentTypeError(
            f"{value!r}: expected {least} to {most} printable ASCII characters"
        )
    return value


def words(values: list[int]) -> str:
    """The same backwards."""
    return b"".join(value.to_bytes(2, "big") for value in values).rstrip(b"\0").decode("ascii")


def main(arguments: list[str] | None = None) -> int:
    """Every part of the command line, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "serials", nargs="+", type=serial_number, metavar="SERIAL", help="1 to 40 characters each"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="of the station (default: this machine)"
    )
    parser.add_argument("--port", type=int, default=502, help="`trigger.port` (default 502)")
    parser.add_argument(
        "--part-number",
        type=product,
        default="",
        metavar="P",
        help="default: that of the station file",
    )
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="a step (120)")
    options = parser.parse_args(arguments)
    client = ModbusTcpClient(options.host, port=options.port, timeout=5)
    if not client.connect():
        print(f"no station listens on {options.host}:{options.port}; see its log", file=sys.stderr)
        return 1
    held = False
    with client:
        line = Line(client)
        for serial in options.serials:
            try:
                said = line.part(serial, options.part_number, options.timeout)
            except (TimeoutError, ModbusException) as error:
                said = f"HOLD: {error}"
            held |= said.startswith("HOLD")
            print(f"{serial}  {said}", flush=True)
    return int(held)


if __name__ == "__main__":
    sys.exit(main())
