"""The page's HTTP server: uvicorn, one process, until told to stop."""

from __future__ import annotations

import logging

import uvicorn

from forge_station.config import StationConfig
from forge_station.errors import ConfigError
from forge_station.hmi.app import build
from forge_station.hmi.context import Context
from forge_station.hmi.listener import Listener, speaking_to
from forge_station.notify import notify

log = logging.getLogger(__name__)

END_S = 2
"""Open streams are cut after so long when told to stop."""


def serve(config: StationConfig) -> int:
    """Raises ConfigError when the port or the certificate cannot be used."""
    host, port = config.hmi.host, config.hmi.port
    tls = config.hmi.tls_cert is not None
    try:
        listener = Listener(host, port)
        server = _Server(
            uvicorn.Config(
                build(Context.of(config)),
                http=speaking_to(listener),
                loop="asyncio",  # its accept() is called; another loop would do that itself
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=END_S,
                ssl_certfile=config.hmi.tls_cert,
                ssl_keyfile=config.hmi.tls_key,
            )
        )
        server.config.load()  # reads the certificate
    except OSError as error:
        raise ConfigError(
            "the page cannot be served",
            which=f"{host}:{port}",
            got=error,
            action="set hmi.port to a free port; check hmi.tls_cert and hmi.tls_key",
        ) from error
    with listener:
        name = f"[{host}]" if ":" in host else host
        print(f"the page: http{'s' if tls else ''}://{name}:{port}/", flush=True)
        server.run(sockets=[listener])
    return 0


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup(sockets)  # type: ignore[arg-type]
        notify("READY=1\nSTATUS=serving the page")


__all__ = ["serve"]
