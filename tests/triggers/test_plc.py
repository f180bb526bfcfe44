"""The Modbus TCP server: a simulated PLC over a real connection, which is cut or not allowed."""

from __future__ import annotations

import random
import runpy
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

pytest.importorskip("pymodbus", reason="the PLC needs the extra plc")

from pymodbus.client import ModbusTcpClient
from pymodbus.exceptions import ModbusException

from forge_station.errors import TriggerError
from forge_station.triggers import plc, registers
from forge_station.triggers.gate import Gate
from forge_station.triggers.handshake import Handshake
from forge_station.triggers.plc import PlcTrigger
from forge_station.triggers.registers import PLC, Command, Status
from forge_station.triggers.settings import PlcSource
from tests.triggers.simulated_plc import CODE, Plc, look, part_registers, truth, verdict_of


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class ModbusBus:
    """The PLC's side of a connection. `drop`: chance that a request finds the cable out; `delay_s`:
    longest time that one is on its way."""

    port: int
    drop: float = 0.0
    delay_s: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    client: ModbusTcpClient | None = None

    def write(self, address: int, values: Sequence[int]) -> None:
        self._ask(lambda client: client.write_registers(address, list(values)))

    def read(self, address: int, count: int) -> list[int]:
        return self._ask(lambda client: client.read_holding_registers(address, count=count))

    def _ask(self, request) -> list[int]:
        time.sleep(self.rng.random() * self.delay_s)
        if self.rng.random() < self.drop:
            self.close()
            raise ConnectionError("the cable is out")
        if self.client is None:
            self.client = ModbusTcpClient("127.0.0.1", port=self.port, timeout=5, retries=0)
            if not self.client.connect():
                raise ConnectionError("no connection")
        try:
            answer = request(self.client)
        except (ModbusException, OSError) as error:
            self.close()
            raise ConnectionError(str(error)) from error
        if answer.isError():
            raise PermissionError(str(answer))
        return answer.registers

    def close(self) -> None:
        if self.client is not None:
            self.client.close()
            self.client = None


@dataclass
class Served:
    gate: Gate
    handshake: Handshake
    port: int
    seen: list[str]


@pytest.fixture
def served() -> Iterator[Served]:
    """A server, and a loop that inspects what comes."""
    gate = Gate()
    gate.open()
    port = free_port()
    handshake = Handshake(gate, heartbeat_s=5.0, boot=7)
    source = PlcTrigger(PlcSource("plc", port=port), handshake)
    source.start()
    seen: list[str] = []
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            part = gate.take(0.05)
            if part is not None:
                seen.append(part.serial)
                time.sleep(0.005 * (len(seen) % 3))
                gate.finish(verdict_of(part.serial))

    loop = threading.Thread(target=work)
    loop.start()
    yield Served(gate, handshake, port, seen)
    stop.set()
    loop.join()
    source.close()


def through(plc: Plc, serial: str, limit_s: float = 60.0) -> None:
    plc.place(serial)
    until = time.monotonic() + limit_s
    while plc.serial or plc.step != "ready":
        assert time.monotonic() < until, plc
        plc.scan()


@pytest.mark.parametrize("order", ["block", "data first"])
def test_parts_go_through_a_connection(served, order):
    plc = Plc(ModbusBus(served.port), order, patience=5000)
    for number in range(6):
        through(plc, f"{order[0]}{number}")
    assert plc.decisions == {s: CODE[truth(s)].name for s in plc.decisions}
    assert len(plc.decisions) == 6 and plc.mismatches == 0
    assert served.seen == list(plc.decisions)
    plc.bus.close()


def test_the_example_sends_parts_and_tells_what_the_line_does(served, repository, capsys):
    example = runpy.run_path(str(repository / "examples/plc/try_plc.py"))
    port = str(served.port)
    assert example["main"](["--port", port, "e1", "e2", "e3"]) == 0
    said = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert said == [[serial, CODE[truth(serial)].name] for serial in ("e1", "e2", "e3")]
    served.gate.shut("the test is over")
    assert example["main"](["--port", port, "--timeout", "0.5", "e4"]) == 1
    assert "e4  HOLD: STATUS" in capsys.readouterr().out
    assert example["main"](["--port", str(free_port()), "e5"]) == 1
    assert "no station listens" in capsys.readouterr().err
    for wrong in ("", "ö", "x" * 41):  # longer would run into the registers behind it
        with pytest.raises(SystemExit):
            example["main"](["--port", port, wrong])
        assert "1 to 40 printable ASCII characters" in capsys.readouterr().err


def test_a_connection_that_is_slow_and_breaks_again_and_again_mixes_no_parts(served):
    plc = Plc(ModbusBus(served.port, drop=0.2, delay_s=0.02), patience=5000)
    for number in range(8):
        through(plc, f"d{number}")
    assert plc.decisions == {f"d{n}": CODE[truth(f"d{n}")].name for n in range(8)}
    assert plc.mismatches == 0
    plc.bus.close()


def test_one_request_writes_command_and_data_and_reads_the_answer(served):
    """Function code 23, as a PLC that exchanges both blocks in one cycle does it."""
    bus = ModbusBus(served.port)
    for beat in range(3):
        bus.write(0, [Command.ENABLE, beat])
    client = bus.client
    block = [Command.ENABLE | Command.TRIGGER, 3, *part_registers(1, "NUT", "one")]
    station = registers.STATION_SPAN
    answer = client.readwrite_registers(
        read_address=station.start, read_count=len(station), address=0, values=block
    )
    assert not answer.isError()
    assert Status(answer.registers[0]) & (Status.BUSY | Status.READY) == Status.BUSY
    until = time.monotonic() + 30
    while Status.RESULT_VALID not in (view := look(bus)).status:
        assert time.monotonic() < until
    assert view.values["RESULT_SERIAL"] == "one" and view.values["BOOT"] == 7
    assert client.read_input_registers(100, count=1).registers == [view.status]
    bus.close()


def test_what_is_not_the_plcs_cannot_be_written_or_read(served):
    bus = ModbusBus(served.port)
    for address, values in ((100, [1]), (39, [1, 1]), (41, [1])):
        with pytest.raises(PermissionError):
            bus.write(address, values)
    for address, count in ((40, 1), (99, 2), (160, 20)):
        with pytest.raises(PermissionError):
            bus.read(address, count)
    assert bus.client.write_coil(0, True).isError(), "bits are in registers"
    assert bus.client.read_coils(100, count=8).isError()
    written = bus.client.write_register(PLC["COUNTER"].address, 9)
    assert not written.isError() and bus.read(PLC["COUNTER"].address, 1) == [9]
    bus.close()


def test_a_flood_of_bytes_that_are_no_modbus_leaves_the_others_alone(served):
    for junk in (b"\0" * 4000, b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 300, b"\0\1\0\0\0\6\1"):
        with socket.create_connection(("127.0.0.1", served.port)) as wild:
            wild.sendall(junk)
    plc = Plc(ModbusBus(served.port), patience=5000)
    through(plc, "after")
    assert plc.decisions == {"after": CODE[truth("after")].name}
    plc.bus.close()


def test_connections_that_a_plc_left_behind_keep_it_out_never(served):
    """As after a cable that was pulled: nobody ends them."""
    left = [ModbusBus(served.port) for _ in range(2 * plc.MOST_CLIENTS)]
    silent = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(3)]
    for bus in left:
        assert len(bus.read(100, 69)) == 69
    bus = left[-1]
    assert len(bus.read(100, 69)) == 69, "who speaks is not sent away"
    for wild in silent:
        wild.settimeout(20.0)
        assert wild.recv(1) == b"", "who has never spoken goes first"
        wild.close()
    for bus in left:
        bus.close()


def test_only_the_addresses_that_are_named_may_connect():
    port = free_port()
    source = PlcTrigger(PlcSource("plc", port=port, clients=("192.0.2.1",)), Handshake(Gate()))
    source.start()
    try:
        with pytest.raises(ConnectionError):
            ModbusBus(port).read(100, 1)
    finally:
        source.close()


def test_a_port_that_is_taken_is_one_clear_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        source = PlcTrigger(PlcSource("plc", port=port), Handshake(Gate()))
        with pytest.raises(TriggerError, match=rf"cannot listen \(127.0.0.1:{port}\)"):
            source.start()


def test_closing_ends_the_thread_and_frees_the_port():
    port = free_port()
    for _ in range(2):
        source = PlcTrigger(PlcSource("plc", port=port), Handshake(Gate()))
        source.start()
        source.close()
        source.close()
    assert not [t for t in threading.enumerate() if t.name == "plc"]
