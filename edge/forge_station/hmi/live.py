"""The live screen's routes: the stream of events, and the views of a part."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from forge_station.hmi.context import Context
from forge_station.hmi.users import Role


def routes(context: Context) -> list[tuple[Route, Role]]:
    """Of the live screen."""

    async def snapshot(_: Request) -> Response:
        return JSONResponse(context.feed.snapshot(), headers={"cache-control": "no-store"})

    return [(Route("/api/live", snapshot), Role.VIEWER)]
