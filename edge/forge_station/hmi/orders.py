"""Orders of people at the panel, as signed commands: alarm seen, pause, go on.

The station verifies them like everybody's (docs/MES.md, commands): the page's key must be enrolled
in `commands.keys` with the role operator. A page without a key has no such buttons.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from forge_station import private_key
from forge_station.errors import LinkError
from forge_station.hmi.context import Context, body_of, refusal
from forge_station.hmi.settings import PageCommands
from forge_station.hmi.users import Role
from forge_station.mes.command_client import Commander
from forge_station.mes.topics import MqttConfig

ANSWER_S = 8.0
_ORDERS = {"ack": "ackAlarm", "stop": "stop", "start": "start"}


def routes(context: Context) -> list[tuple[Route, Role]]:
    """None without a key."""
    settings = context.settings.commands
    if settings is None:
        return []
    sender = Sender(context.config.mqtt, settings)

    async def order(request: Request) -> Response:
        name = _ORDERS.get(request.path_params["name"])
        if name is None:
            return refusal(404, "gone", "no such order")
        given = await body_of(request)
        user = context.user(request)
        args: dict[str, Any] = {}
        if name == "ackAlarm":
            args = {"instanceId": str(given.get("instance", ""))}
        elif name == "stop":
            args = {"reason": f"at the panel, by {user.name}"}
        await run_in_threadpool(context.note, request, f"order.{name}", after=args or None)
        try:
            reply = await run_in_threadpool(sender.send, name, args, user.name)
        except LinkError as error:
            return refusal(504, "unanswered", str(error))
        if reply["status"] != "SUCCEEDED":
            return refusal(409, "refused", f"{reply['detail']}")
        return JSONResponse({"status": reply["status"]})

    return [(Route("/api/order/{name}", order, methods=["POST"]), Role.OPERATOR)]


class Sender:
    """One command at a time, each over a connection of its own: orders are rare."""

    def __init__(self, station: MqttConfig, settings: PageCommands) -> None:
        names = ("username", "password_file", "tls_cert", "tls_key")
        own = {name: getattr(settings, name) for name in names}
        self._mqtt = replace(station, **{k: value for k, value in own.items() if value is not None})
        self._path = settings.key
        self._lock = threading.Lock()

    def send(self, name: str, args: Mapping[str, Any], issuer: str) -> Mapping[str, Any]:
        """The station's reply. Raises LinkError without one, StationError for a key."""
        with self._lock:
            key = private_key.read(self._path)
            try:
                with Commander(self._mqtt, key, f"panel: {issuer}", ANSWER_S) as commander:
                    return commander.send(name, args, ANSWER_S)
            except OSError as error:
                raise LinkError("no connection to the broker", got=error) from error


__all__ = ["Sender", "routes"]
