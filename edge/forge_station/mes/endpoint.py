"""HTTP for whoever watches the station: `/healthz`, `/readyz` and, with the extra, `/metrics`.

Read only, on this machine unless written out, off without a port. It knows no station: what it
tells is asked of the functions it is given.

`/healthz` 200 while the process runs and looks after itself. `/readyz` 200 when the station could
inspect a part and call it PASS, else 503; its body is one JSON object with every check.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from forge_station.errors import LinkError
from forge_station.mes.settings import MonitorConfig

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 5.0
"""For a whole request, however slowly its bytes come."""
MOST_REQUESTS = 16
"""At once; a connection beyond it is closed: a flood takes no file and no thread of the station."""
NO_METRICS = b"no metrics here: install forge-station[metrics]\n"


@dataclass(frozen=True)
class Probes:
    """What is told. A check is None when it holds, else why it does not."""

    alive: Callable[[], str | None]
    ready: Callable[[], Mapping[str, str | None]]
    metrics: Callable[[], tuple[bytes, str]] | None = None
    """The text of all series and its content type; None: the package is not installed."""


class Endpoint:
    """A context manager: serves while the block runs, each request in a thread of its own.

    Raises LinkError when the port cannot be had.
    """

    def __init__(self, config: MonitorConfig, probes: Probes) -> None:
        try:
            self._server = _Server((config.host, config.port or 0), probes)
        except OSError as error:
            raise LinkError(
                "the monitor cannot listen",
                which=f"{config.host}:{config.port}",
                got=error,
                action="set monitor.port to a free port, or leave it out",
            ) from error
        self.port = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1},
            name="endpoint", daemon=True,
        )  # fmt: skip

    def __enter__(self) -> Endpoint:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    """What comes at once is taken or closed: past the queue the kernel lets it wait 1, 3, 7 s."""

    def __init__(self, address: tuple[str, int], probes: Probes) -> None:
        self.probes = probes
        self._places = threading.BoundedSemaphore(MOST_REQUESTS)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        over = threading.Timer(REQUEST_TIMEOUT_S, _hang_up, (request,))
        over.daemon = True
        over.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            over.cancel()
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            log.debug("monitor: the client went away: %s", error)
        else:
            log.error("monitor: a request could not be answered", exc_info=error)


def _hang_up(request: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed already
        request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_TIMEOUT_S
    server_version = "forge-station"
    sys_version = ""

    def do_GET(self) -> None:
        probes = self.server.probes
        path = self.path.partition("?")[0]
        if path == "/healthz":
            fault = probes.alive()
            self._answer_checks({"process": fault})
        elif path == "/readyz":
            self._answer_checks(probes.ready())
        elif path == "/metrics" and probes.metrics is not None:
            text, kind = probes.metrics()
            self._answer(HTTPStatus.OK, text, kind)
        elif path == "/metrics":
            self._answer(HTTPStatus.NOT_IMPLEMENTED, NO_METRICS, "text/plain; charset=utf-8")
        else:
            text = b"/healthz /readyz /metrics\n"
            self._answer(HTTPStatus.NOT_FOUND, text, "text/plain; charset=utf-8")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer_checks(self, checks: Mapping[str, str | None]) -> None:
        good = not any(checks.values())
        body: dict[str, Any] = {
            "status": "ok" if good else "unavailable",
            "checks": {name: fault or "ok" for name, fault in checks.items()},
        }
        status = HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE
        self._answer(status, json.dumps(body).encode() + b"\n", "application/json")

    def _answer(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("monitor: " + format, *args)
