"""What every route of the page is given, and how a route asks who is there.

A module with routes has `routes(context) -> list[tuple[Route, Role]]`; `app` mounts them, and
refuses whoever has not the role before the route is called. A route that changes something is a
POST, and writes the audit before it acts: `context.note(request, "review.label", after=...)`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response

from forge_station.config import StationConfig
from forge_station.errors import StationError
from forge_station.hmi.audit import Audit
from forge_station.hmi.feed import Feed
from forge_station.hmi.review.desk import Desk
from forge_station.hmi.sessions import Session, Sessions
from forge_station.hmi.settings import HmiConfig
from forge_station.hmi.users import Role, User, Users

COOKIE = "forge_hmi"
MOST_BYTES = 64 << 10
"""Of a request's body."""
BODY_S = 10.0
"""In which it must come."""
VIEWER = User("", Role.VIEWER)


@dataclass(frozen=True)
class Context:
    """`folder` holds users, audit and labels; `evidence` is the station's folder of evidence."""

    config: StationConfig
    folder: Path
    users: Users
    sessions: Sessions
    audit: Audit
    feed: Feed
    review: Desk
    clock: Callable[[], float] = field(default=time.monotonic)

    @classmethod
    def of(cls, config: StationConfig, clock: Callable[[], float] = time.monotonic) -> Context:
        folder = folder_of(config)
        users = Users(folder / "users.json")
        audit = Audit(folder / "audit.jsonl")
        feed = Feed.of(config)
        sessions, desk = Sessions(users, clock), Desk(config, folder / "review", feed.newest)
        return cls(config, folder, users, sessions, audit, feed, desk, clock)

    @property
    def settings(self) -> HmiConfig:
        return self.config.hmi

    @property
    def evidence(self) -> Path:
        return self.config.evidence.folder

    def session(self, request: HTTPConnection, *, use: bool = False) -> Session | None:
        """The session of a request; its user may do what the role says."""
        return self.sessions.find(request.cookies.get(COOKIE, ""), use=use)

    def user(self, request: HTTPConnection) -> User:
        """Who asks; without a login the viewer, whose name is empty."""
        session = self.session(request)
        return VIEWER if session is None else session.user

    def panel(self, request: HTTPConnection) -> str:
        """Address of the panel that asks."""
        return request.client.host if request.client else "unknown"

    def note(
        self,
        request: HTTPConnection,
        action: str,
        *,
        before: object = None,
        after: object = None,
        reason: str = "",
    ) -> None:
        """Write the audit, before the act. Raises AuditError: then do not act."""
        user = self.user(request)
        self.audit.add(
            action, who=user.name, role=user.role.word, panel=self.panel(request),
            before=before, after=after, reason=reason,
        )  # fmt: skip


def folder_of(config: StationConfig) -> Path:
    """Where users, audit and labels of the page are."""
    return config.hmi.folder or config.outbox.with_name("hmi")


def refusal(status: int, code: str, text: str = "", **more: Any) -> Response:
    """The answer to what is not done. `code` is a message id below `error.` of the locales."""
    return JSONResponse({"error": code, "text": text, **more}, status)


async def body_of(request: Request) -> dict[str, object]:
    """The JSON object of a POST; {} without one. Raises StationError for anything else."""
    try:
        content = await asyncio.wait_for(_content_of(request), BODY_S)
    except asyncio.TimeoutError:
        raise StationError("request too slow", expected=f"its end in {BODY_S:g} s") from None
    try:
        found = json.loads(content or b"{}")
        json.dumps(found, ensure_ascii=False).encode()  # no half characters: no file takes them
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise StationError("request not understood", expected="a JSON object")
    return found


async def _content_of(request: Request) -> bytes:
    content = b""
    async for chunk in request.stream():
        content += chunk
        if len(content) > MOST_BYTES:
            raise StationError("request too large", expected=f"{MOST_BYTES} bytes at most")
    return content


__all__ = ["COOKIE", "VIEWER", "Context", "body_of", "folder_of", "refusal"]
