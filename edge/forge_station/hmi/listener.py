"""The socket that the page is served from: whoever connects and says nothing is let go.

A web server counts a connection from its first packet, and waits for ever for a request. Here a
connection is silent until the head of a request has come whole; then it is let go when that takes
longer than `HEAD_S` (RFC 9110 calls it 408, a browser tries again by itself), or when room is
needed for another one: the oldest silent one goes first. So it needs no good will of others that a
panel reaches its page. All of one address together have `MOST_OF_ONE`. It counts sockets, so that
a TLS handshake that stops half way is a silent connection, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

HEAD_S = 10.0
"""Until the head of a request must be there."""
MOST, MOST_SILENT = 200, 64
MOST_OF_ONE = 32
"""Connections of one address. A browser opens six, one of them the stream of events."""


class Connection(socket.socket):
    """One that was accepted. Tells its listener when it is closed."""

    listener: Listener
    address: str

    def close(self) -> None:
        self.listener.gone(self)
        super().close()


class Listener(socket.socket):
    """Listens at once; `accept` is called by the event loop that serves. Raises OSError."""

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__(fileno=socket.create_server((host, port), family=family).detach())
        self._silent: dict[Connection, asyncio.TimerHandle] = {}
        """The oldest first."""
        self._open: dict[int, Connection] = {}
        self._of: Counter[str] = Counter()

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection; ConnectionAbortedError for one that has no room."""
        plain, peer = super().accept()
        found = Connection(fileno=plain.detach())
        found.listener, found.address = self, str(peer[0])
        if not self._has_room(found.address):
            found.close()
            raise ConnectionAbortedError(f"no room for one more connection of {found.address}")
        self._open[found.fileno()] = found
        self._of[found.address] += 1
        self.waits(found.fileno())
        return found, peer

    def waits(self, number: int) -> None:
        """The connection of this file number has no whole request now."""
        found = self._open.get(number)
        if found is not None and found not in self._silent:
            loop = asyncio.get_running_loop()
            self._silent[found] = loop.call_later(HEAD_S, self._let_go, found)

    def heard(self, number: int) -> None:
        """It has sent the whole head of a request."""
        found = self._open.get(number)
        if found is not None and (timer := self._silent.pop(found, None)) is not None:
            timer.cancel()

    def gone(self, connection: Connection) -> None:
        """It is closed, or as good as closed. May be said twice."""
        if (timer := self._silent.pop(connection, None)) is not None:
            timer.cancel()
        if self._open.get(connection.fileno()) is connection:
            del self._open[connection.fileno()]
            self._of[connection.address] -= 1
            self._of += Counter()  # forget addresses that have none

    def _has_room(self, address: str) -> bool:
        """Whether one more of this address may come, if need be in the place of a silent one."""
        if self._of[address] >= MOST_OF_ONE and not self._make_room(address):
            return False
        if len(self._silent) >= MOST_SILENT:
            self._make_room(None)
        return len(self._open) < MOST or self._make_room(None)

    def _make_room(self, address: str | None) -> bool:
        """Let the oldest silent one go, of this address; False when there is none."""
        found = [item for item in self._silent if address in (None, item.address)]
        if not found:
            return False
        self._let_go(next((item for item in found if not _has_spoken(item)), found[0]))
        return True

    def _let_go(self, connection: Connection) -> None:
        """The server reads an end, and closes it as if the other side had."""
        self.gone(connection)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def speaking_to(listener: Listener) -> type[asyncio.Protocol]:
    """The server's side of one connection, which tells its listener when a request has come."""

    class Protocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.number: int = transport.get_extra_info("socket").fileno()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                listener.waits(self.number)
            else:
                listener.heard(self.number)

    return Protocol


def _has_spoken(connection: Connection) -> bool:
    """Whether something has come that the server has not read yet."""
    try:
        return bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:
        return False


__all__ = ["HEAD_S", "MOST", "MOST_OF_ONE", "MOST_SILENT", "Listener", "speaking_to"]
