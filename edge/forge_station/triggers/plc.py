"""The Modbus TCP server that a PLC polls: pymodbus around `handshake`.

The station is the server, because that is what PLCs expect of a vision system: the PLC decides
when to ask, its program holds the one address there is, and nothing at the station needs to know
the PLC. Function codes 3, 4 (read), 6, 16 (write), 22 (mask) and 23 (both in one) on every unit id.

It knows registers and connections, not what they mean. Modbus has no password: only the addresses
that the station file names may connect.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import cast

from forge_station.errors import TriggerError
from forge_station.triggers import registers
from forge_station.triggers.handshake import Handshake
from forge_station.triggers.settings import PlcSource

try:
    from pymodbus.constants import ExcCodes
    from pymodbus.server import ModbusTcpServer
    from pymodbus.server.requesthandler import ServerRequestHandler
    from pymodbus.simulator import DataType, SimData, SimDevice
except ModuleNotFoundError as missing:
    raise TriggerError(
        f"a PLC needs {missing.name}", action="install the extra: pip install forge-station[plc]"
    ) from missing

log = logging.getLogger(__name__)

TICK_S = 0.05
START_S = 10.0
_READ, _WRITE = (3, 4), (6, 16, 22)
_BOTH = 23
MOST_CLIENTS = 8


class PlcTrigger:
    """Serves the handshake between `start` and `close`, in a thread of its own."""

    def __init__(
        self,
        settings: PlcSource,
        handshake: Handshake,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._handshake, self._clock = settings, handshake, clock
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._listening = threading.Event()
        self._bound = False

    def start(self) -> None:
        """Listen. Raises TriggerError when the address is not free or not of this machine."""
        self._thread = threading.Thread(target=self._run, name="plc", daemon=True)
        self._thread.start()
        if not self._listening.wait(START_S) or not self._bound:
            self.close()
            raise TriggerError(
                "the Modbus TCP server cannot listen",
                which=f"{self._settings.host}:{self._settings.port}",
                expected="a free port and an address of this machine",
                action="below 1024 the service needs CAP_NET_BIND_SERVICE",
            )
        log.info("plc: listening on %s:%d", self._settings.host, self._settings.port)

    def close(self) -> None:
        """End all connections and the thread; may be called twice."""
        loop, stop, thread = self._loop, self._stop, self._thread
        if loop is not None and stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                loop.call_soon_threadsafe(stop.set)
        if thread is not None:
            thread.join(timeout=5.0)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        finally:
            self._listening.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        size = registers.STATION_SPAN.stop
        blank = SimData(0, values=[0] * size, datatype=DataType.REGISTERS)
        device = SimDevice(0, simdata=[blank], action=self._asked)
        server = _Server(device, self._settings.clients, (self._settings.host, self._settings.port))
        if not await server.listen():
            return
        self._bound = True
        self._listening.set()
        try:
            while not self._stop.is_set():
                self._handshake.tick(self._clock())
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), TICK_S)
        finally:
            await server.shutdown()  # type: ignore[no-untyped-call]

    async def _asked(
        self,
        function: int,
        start: int,
        address: int,
        count: int,
        current: list[int],
        values: list[int] | list[bool] | None,
    ) -> ExcCodes | None:
        """Called by pymodbus before it answers. No `await` inside: one request is one moment."""
        writing = values is not None
        if function != _BOTH and function not in (_WRITE if writing else (*_READ, *_WRITE)):
            return ExcCodes.ILLEGAL_FUNCTION
        now = self._clock()
        try:
            if values is not None:
                self._handshake.write(address, [int(value) for value in values], now)
            else:
                found = self._handshake.read(address, count, now)
                current[address - start : address - start + count] = found
        except ValueError as error:
            log.warning("plc: %s", error)
            return ExcCodes.ILLEGAL_ADDRESS
        return None


class _Server(ModbusTcpServer):
    """Refuses connections from addresses that may not connect."""

    def __init__(
        self, device: SimDevice, clients: tuple[str, ...], address: tuple[str, int]
    ) -> None:
        super().__init__(device, address=address)
        self.clients = clients

    def callback_new_connection(self) -> ServerRequestHandler:
        tracers = self.trace_packet, self.trace_pdu, self.trace_connect
        return _Connection(self, *tracers)  # type: ignore[no-untyped-call]


class _Connection(ServerRequestHandler):
    """One of a few: where there is one too many, the one that is silent for longest goes. A PLC
    that lost its power or cable leaves a connection that nobody ends, and comes with another."""

    heard_at = 0.0

    def callback_connected(self) -> None:
        peer = self.transport.get_extra_info("peername")[0]
        allowed = self.server.clients
        if allowed and peer not in allowed:
            log.warning("plc: a connection from %s is refused", peer)
            cast(asyncio.Transport, self.transport).abort()
            return
        others = [item for item in self.server.active_connections.values() if item is not self]
        if len(others) >= MOST_CLIENTS:
            silent = min(others, key=lambda item: cast(_Connection, item).heard_at)
            cast(asyncio.Transport, silent.transport).abort()
            silent.close()
        super().callback_connected()

    def callback_data(self, data: bytes, addr: tuple[object, ...] | None = None) -> int:
        self.heard_at = time.monotonic()
        return super().callback_data(data, addr)
