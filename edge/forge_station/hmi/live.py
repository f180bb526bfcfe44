"""The live screen's routes: the stream of events, the views of a part, commands to the station."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import cv2
import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from forge_station.contract.views import VIEWS
from forge_station.hmi.context import Context, refusal
from forge_station.hmi.feed import Client, Feed
from forge_station.hmi.users import Role

NO_STORE = {"cache-control": "no-store"}
FOR_EVER = {"cache-control": "private, max-age=31536000, immutable"}


def routes(context: Context) -> list[tuple[Route, Role]]:
    """Of the live screen."""
    feed = context.feed

    async def snapshot(_: Request) -> Response:
        return JSONResponse(feed.snapshot(), headers=NO_STORE)

    async def events(_: Request) -> Response:
        client = feed.subscribe()
        if client is None:
            return refusal(503, "busy", "too many pages are open")
        return StreamingResponse(
            stream(feed, client), media_type="text/event-stream", headers=NO_STORE
        )

    def view(request: Request) -> Response:
        part = feed.part(request.path_params["id"])
        name, file = request.path_params["view"], request.path_params["file"]
        if part is None or name not in VIEWS or not file.startswith(f"{part['name']}."):
            return refusal(404, "gone", "no such view")
        found = cut(context.evidence / Path(file).name, VIEWS.index(name))
        if found is None:
            return refusal(404, "gone", "the picture is not there any more")
        return Response(found, media_type="image/png", headers=FOR_EVER)

    return [
        (Route("/api/live", snapshot), Role.VIEWER),
        (Route("/api/events", events), Role.VIEWER),
        (Route("/api/parts/{id}/{file}/{view}", view), Role.VIEWER),
    ]


async def stream(feed: Feed, client: Client) -> AsyncIterator[bytes]:
    """What one page is sent until it goes."""
    try:
        while True:
            yield await client.next()
    finally:
        feed.unsubscribe(client)


def cut(path: Path, number: int) -> bytes | None:
    """One of the three views of a picture of the model, in grey: its first channel is the shading.

    Of a surface picture (one part, three panels in a row) or of the marks sheet (three rows).
    """
    try:
        content = np.frombuffer(path.read_bytes(), np.uint8)
    except OSError:
        return None
    image = cv2.imdecode(content, cv2.IMREAD_COLOR) if content.size else None
    if image is None:
        return None
    axis = 0 if path.name.endswith(".sheet.png") else 1
    shade = np.array_split(image[:, :, 2], len(VIEWS), axis)[number]
    return bytes(cv2.imencode(".png", np.ascontiguousarray(shade))[1])


__all__ = ["cut", "routes", "stream"]
