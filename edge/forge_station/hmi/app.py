"""The web application of the page: every route with the role it needs, checked before it is called.

A route is in one table or it does not exist. A POST needs the origin of the page and the token of
the session (logging in: the origin alone). No answer names a script, style or picture of another
origin, and the browser is told to load none.
"""

from __future__ import annotations

import contextlib
import hmac
import inspect
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forge_station.errors import StationError
from forge_station.hmi import history, live, orders
from forge_station.hmi.audit import AuditError
from forge_station.hmi.context import COOKIE, Context, body_of, refusal
from forge_station.hmi.review import routes as review
from forge_station.hmi.sessions import LONGEST_S, LockedError, RefusedError, Session
from forge_station.hmi.users import Role, UsersError
from forge_station.mes.topics import is_loopback

log = logging.getLogger(__name__)

STATIC = Path(__file__).with_name("static")
LOCALES = Path(__file__).with_name("locale")
TOKEN = "x-forge-token"
LOCAL = ["127.0.0.1", "localhost", "::1", "[::1]"]
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'; object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
Guarded = tuple[Route, Role]


@dataclass(frozen=True)
class Screen:
    """One screen: `static/<module>` exports `default function Screen({api, t, user, page})`; its
    button appears for who has the role."""

    id: str
    module: str
    role: Role


SCREENS: tuple[Screen, ...] = (
    Screen("live", "live.js", Role.VIEWER),
    Screen("review", "review.js", Role.OPERATOR),
    Screen("history", "history.js", Role.OPERATOR),
)
"""In the order of their buttons."""


def routes_of(context: Context) -> list[Guarded]:
    """The table of all routes that answer with more than the page's own files."""
    return [
        *session_routes(context),
        *live.routes(context),
        *orders.routes(context),
        *review.routes(context),
        *history.routes(context),
    ]


def build(context: Context) -> Starlette:
    """The application. Its lifespan follows the station."""
    found: list[BaseRoute] = [guarded(context, route, role) for route, role in routes_of(context)]
    found += [
        Route("/", _index),
        Mount("/static", StaticFiles(directory=STATIC)),
        Mount("/locale", StaticFiles(directory=LOCALES)),
    ]

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with context.feed.followed():
            yield
        context.review.close()

    middleware = [Middleware(Headers)]
    if is_loopback(context.settings.host):  # a foreign name that was bound to this machine
        middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=LOCAL))
    return Starlette(routes=found, middleware=middleware, lifespan=lifespan)


def guarded(context: Context, route: Route, role: Role) -> Route:
    """The route, called only for who has the role; of a plain function in a thread."""
    methods = (route.methods or set()) - {"HEAD"}
    if not methods <= {"GET", "POST"}:
        raise ValueError(f"route {route.path}: GET or POST, not {sorted(methods)}")
    endpoint = route.endpoint

    async def call(request: Request) -> Response:
        session = context.session(request, use=role > Role.VIEWER)
        if request.method == "POST":
            fault = _forged(request, session, role)
            if fault is not None:
                return fault
        if role > (Role.VIEWER if session is None else session.user.role):
            return refusal(403, "role", f"needs the role {role.word}", role=role.word)
        try:
            if inspect.iscoroutinefunction(endpoint):
                answer: Response = await endpoint(request)
            else:
                answer = await run_in_threadpool(endpoint, request)
            return answer
        except ClientDisconnect:
            return refusal(400, "gone", "the request was not sent to its end")
        except AuditError as error:
            return refusal(507, "audit", str(error))
        except StationError as error:
            return refusal(409, "failed", str(error), reason=error.code)

    return Route(route.path, call, methods=sorted(methods), name=route.name)


def session_routes(context: Context) -> list[Guarded]:
    """Who is there, login and logout."""
    settings = context.settings

    def facts(session: Session | None) -> dict[str, object]:
        if session is None:
            return {"name": "", "role": 0, "token": "", "left_s": 0.0}
        user = session.user
        left = round(context.sessions.left_s(session), 1)
        return {"name": user.name, "role": int(user.role), "token": session.token, "left_s": left}

    async def page(_: Request) -> Response:
        try:
            users = await run_in_threadpool(context.users.all)
        except UsersError as error:  # who only looks needs none of them
            log.error("%s", error)
            users = ()
        return JSONResponse(
            {
                "boot": context.feed.boot,
                "station": context.config.station,
                "line": context.config.line.line,
                "language": settings.language,
                "palette": settings.palette,
                "px_per_mm": round(settings.panel.px_per_mm, 4),
                "takt_s": settings.takt_s,
                "commands": settings.commands is not None,
                "has_users": bool(users),
                "names": [user.name for user in users] if is_loopback(settings.host) else [],
                "roles": {role.word: int(role) for role in Role},
                "screens": [
                    {"id": item.id, "module": item.module, "role": int(item.role)}
                    for item in SCREENS
                ],
            },
            headers={"cache-control": "no-store"},
        )

    async def who(request: Request) -> Response:
        found = facts(context.session(request))
        return JSONResponse(found, headers={"cache-control": "no-store"})

    async def login(request: Request) -> Response:
        given = await body_of(request)
        name, pin = str(given.get("name", ""))[:64], str(given.get("pin", ""))[:64]
        panel = context.panel(request)
        try:
            session = await run_in_threadpool(context.sessions.login, name, pin, panel)
        except LockedError as error:
            return refusal(429, "locked", str(error), left_s=round(error.left_s, 1))
        except RefusedError as error:
            context.audit.add("login.refused", who=name, role="viewer", panel=panel)
            return refusal(401, "pin", str(error))
        try:
            context.audit.add("login", who=name, role=session.user.role.word, panel=session.panel)
        except AuditError:
            context.sessions.logout(session.id)
            raise
        answer = JSONResponse(facts(session))
        answer.set_cookie(
            COOKIE, session.id, max_age=int(LONGEST_S), httponly=True, samesite="strict",
            secure=settings.tls_cert is not None,
        )  # fmt: skip
        return answer

    async def logout(request: Request) -> Response:
        context.note(request, "logout")
        context.sessions.logout(request.cookies.get(COOKIE, ""))
        answer = JSONResponse(facts(None))
        answer.delete_cookie(COOKIE)
        return answer

    async def touch(request: Request) -> Response:
        """Somebody is at the panel: the session goes on."""
        return JSONResponse(facts(context.session(request)))

    return [
        (Route("/api/page", page), Role.VIEWER),
        (Route("/api/session", who), Role.VIEWER),
        (Route("/api/session/login", login, methods=["POST"]), Role.VIEWER),
        (Route("/api/session/logout", logout, methods=["POST"]), Role.OPERATOR),
        (Route("/api/session/touch", touch, methods=["POST"]), Role.OPERATOR),
    ]


class Headers:
    """Adds `HEADERS` to every answer. Plain ASGI, so that a stream stays a stream."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(key.encode(), value.encode()) for key, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        await self.app(scope, receive, sent)


def _forged(request: Request, session: Session | None, role: Role) -> Response | None:
    """The refusal of a POST that another site's page, or no page, has sent; None: it is ours."""
    own = f"{request.url.scheme}://{request.headers.get('host', '')}"
    if request.headers.get("origin") != own:
        return refusal(403, "origin", "the request does not come from this page")
    if role > Role.VIEWER and session is not None:
        token = request.headers.get(TOKEN, "")
        if not hmac.compare_digest(token.encode(), session.token.encode()):
            return refusal(403, "token", "the request lacks the token of the session")
    return None


async def _index(_: Request) -> Response:
    return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})


def table(context: Context) -> Sequence[tuple[str, str, Role]]:
    """(method, path, role) of every guarded route, for tests and docs."""
    return [
        (method, route.path, role)
        for route, role in routes_of(context)
        for method in sorted((route.methods or set()) - {"HEAD"})
    ]


__all__ = ["SCREENS", "Screen", "build", "guarded", "routes_of", "table"]
