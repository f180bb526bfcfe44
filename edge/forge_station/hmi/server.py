"""The page's HTTP server: uvicorn, one process, until told to stop."""

from __future__ import annotations

import logging
import socket

import uvicorn

from forge_station.config import StationConfig
from forge_station.errors import ConfigError
from forge_station.hmi.app import build
from forge_station.hmi.context import Context
from forge_station.notify import notify

log = logging.getLogger(__name__)

END_S = 2
"""Open streams are cut after so long when told to stop."""
MOST_CONNECTIONS = 200


def serve(config: StationConfig) -> int:
    """Raises ConfigError when the port or the certificate cannot be used."""
    host, port = config.hmi.host, config.hmi.port
    tls = config.hmi.tls_cert is not None
    server = _Server(
        uvicorn.Config(
            build(Context.of(config)),
            host=host,
            port=port,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=END_S,
            ssl_certfile=config.hmi.tls_cert,
            ssl_keyfile=config.hmi.tls_key,
        )
    )
    try:
        server.config.load()  # reads the certificate
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            "the page cannot be served",
            which=f"{host}:{port}",
            got=error,
            action="set hmi.port to a free port; check hmi.tls_cert and hmi.tls_key",
        ) from error
    with sock:
        name = f"[{host}]" if ":" in host else host
        print(f"the page: http{'s' if tls else ''}://{name}:{port}/", flush=True)
        server.run(sockets=[sock])
    return 0


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup(sockets)  # type: ignore[arg-type]
        notify("READY=1\nSTATUS=serving the page")


__all__ = ["serve"]
