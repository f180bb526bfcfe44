"""Serves bundle files to stations while a rollout runs: HTTP with ranges, a few files, no folder.

`python -m http.server` knows no ranges, so a transfer that breaks off would begin anew each time.
Not encrypted and open to whoever asks: what a station takes it verifies, and weights that must stay
secret need a server of the site's own (`url`, with https).
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from urllib.parse import quote, unquote, urlsplit

from forge_station.errors import ConfigError

log = logging.getLogger(__name__)
_CHUNK = 1 << 18
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")
TIMEOUT_S = 30.0


class FileServer:
    """A context manager: serves `files` by their names at `address` (http://HOST:PORT)."""

    def __init__(self, address: str, files: Iterable[Path]) -> None:
        parts = urlsplit(address)
        self._host, self._port = parts.hostname or "", parts.port or 0
        self._files = {path.name: path for path in files}
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """As stations reach it; the port is the one that was free where 0 was asked for."""
        port = self._port if self._server is None else self._server.server_address[1]
        return f"http://{self._host}:{port}"

    def url(self, path: Path) -> str:
        return f"{self.address}/{quote(path.name)}"

    def __enter__(self) -> FileServer:
        files = self._files

        class Handler(_Handler):
            served = files

        try:
            server = ThreadingHTTPServer((self._host, self._port), Handler)
        except OSError as error:
            raise ConfigError(
                "the bundle cannot be served here",
                which=f"http://{self._host}:{self._port}",
                expected="an address of this machine and a free port",
                got=error.strerror,
            ) from error
        server.daemon_threads = True
        self._server = server
        self._thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="serve", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        server, self._server = self._server, None
        if server is not None and self._thread is not None:
            server.shutdown()
            server.server_close()
            self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    served: dict[str, Path]
    protocol_version = "HTTP/1.1"
    timeout = TIMEOUT_S

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.served.get(unquote(urlsplit(self.path).path).removeprefix("/"))
        if path is None:
            self.send_error(404)
            return
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                first, last = 0, size - 1
                wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
                if wanted:
                    first = int(wanted[1])
                    last = min(last, int(wanted[2])) if wanted[2] else last
                    if first > last:
                        self.send_response(416)
                        self.send_header("Content-Range", f"bytes */{size}")
                        self.send_header("Content-Length", "0")
                        self.end_headers()
                        return
                self.send_response(206 if wanted else 200)
                if wanted:
                    self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
                self.send_header("Accept-Ranges", "bytes")
                self.send_header("Content-Type", "application/octet-stream")
                self.send_header("Content-Length", str(last - first + 1))
                self.end_headers()
                file.seek(first)
                left = last - first + 1 if body else 0
                while left and (chunk := file.read(min(_CHUNK, left))):
                    self.wfile.write(chunk)
                    left -= len(chunk)
                self.close_connection |= left > 0  # the file became shorter: do not let it wait
        except OSError as error:  # the station went away, and comes back for the rest
            log.info("%s: the transfer of %s broke off: %s", self.client_address, self.path, error)
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        log.info("%s %s", self.client_address[0], format % args)
