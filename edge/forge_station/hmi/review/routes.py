"""The routes of the blind review, and what may go out before and after an answer.

Before it: an opaque id, pictures drawn anew, what the product asks for. Verdict, serial, origin,
gold and the number of people who looked before go out with or after the answer; a lead who decides
a dispute is told the serial, to fetch the part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from forge_station.contract import record, tasks
from forge_station.contract.label import Label
from forge_station.contract.spec import Product
from forge_station.contract.views import VIEWS
from forge_station.errors import InputError
from forge_station.evidence.folder import EvidenceError
from forge_station.evidence.index import Row
from forge_station.hmi.context import Context, body_of, refusal
from forge_station.hmi.parts import gone
from forge_station.hmi.review import pictures, statistics
from forge_station.hmi.review.desk import LOOK, OWN
from forge_station.hmi.review.labels import Answer, Painted
from forge_station.hmi.review.log import ReviewError
from forge_station.hmi.review.pictures import Shown
from forge_station.hmi.review.queue import Look
from forge_station.hmi.users import Role

log = logging.getLogger(__name__)
T = TypeVar("T")
NO_STORE = {"cache-control": "no-store"}


def routes(context: Context) -> list[tuple[Route, Role]]:
    """Of the review."""
    review = context.review
    products = {item.part_number: item for item in context.config.line.products}
    asked = {name: _task(item.checks) for name, item in products.items()}

    def look_of(request: Request) -> Look:
        return review.queue.look(request.path_params["look"], context.user(request).name)

    def state(request: Request) -> Response:
        user = context.user(request)
        queue = review.queue
        queue.refresh()
        disputed = queue.disputed(user.name) if user.role >= Role.LEAD else 0
        mine = statistics.own(queue.labels(), queue.draws(), user.name)
        told = {
            "waiting": queue.waiting(user.name),
            "disputed": disputed,
            "rest_minutes": queue.settings.rest_minutes,
            "mine": record.write(mine),
        }
        return JSONResponse(told, headers=NO_STORE)

    def offered(find: Callable[[], Look | None]) -> Response:
        """The next look at a part that can be drawn."""
        while (look := find()) is not None:
            try:
                row = review.evidence.one(look.result_id)
                if row is None:
                    raise gone(look.result_id)
                return offer(look, row, review.shown(look.result_id))
            except (EvidenceError, InputError) as error:
                log.warning("part %s is not reviewed: %s", look.result_id, error)
                review.queue.unreadable(look)
        return JSONResponse({"look": None}, headers=NO_STORE)

    def offer(look: Look, row: Row, shown: Mapping[str, Sequence[Shown]]) -> Response:
        product = products.get(row.product)
        told: dict[str, Any] = {
            "look": look.id,
            "product": row.product,
            "name": product.name if product is not None else "",
            "wanted": _wanted(product),
            "parts": _views(look, LOOK, shown[LOOK]),
            "close": _views(look, OWN, shown[OWN]),
            "dispute": {"serial": row.serial} if look.kind == "adjudicate" else None,
        }
        return JSONResponse(told, headers=NO_STORE)

    async def following(request: Request) -> Response:
        user = context.user(request)
        return await run_in_threadpool(
            offered, lambda: review.queue.next(user.name, user.role.word)
        )

    async def dispute(request: Request) -> Response:
        user = context.user(request)
        return await run_in_threadpool(
            offered, lambda: review.queue.next_dispute(user.name, user.role.word)
        )

    def view(request: Request) -> Response:
        look = look_of(request)
        parts = review.shown(look.result_id).get(request.path_params["scale"], [])
        known = [str(number) for number in range(len(parts) * len(VIEWS))]
        if request.path_params["number"] not in known:
            return refusal(404, "gone", "no such view")
        number = int(request.path_params["number"])
        part, name = parts[number // len(VIEWS)], VIEWS[number % len(VIEWS)]
        return Response(part.views[name], media_type="image/png", headers=NO_STORE)

    def answered(look: Look, label: Label) -> Response:
        """After an answer: cells are asked for of an NG that is no gold, else all is told."""
        queue = review.queue
        if label.more.get("cells") == "asked" and not queue.told(look):
            row = review.evidence.one(look.result_id)
            if row is not None:
                found = review.evidence.verdict(row)
                shown = review.shown(look.result_id)[OWN]
                cells = {"classes": _classes(found), "parts": _views(look, OWN, shown)}
                return JSONResponse({"saved": label.label, "cells": cells}, headers=NO_STORE)
        return told(look)

    def told(look: Look) -> Response:
        queue = review.queue
        queue.reveal(look)
        given = queue.answers(look)
        row = review.evidence.one(look.result_id)
        shown = review.shown(look.result_id)[OWN]
        verdict = review.evidence.verdict(row) if row is not None else None
        truth = queue.truth_of(look)
        return JSONResponse(
            {
                "saved": given[0].label,
                "reveal": _revealed(verdict) if verdict is not None else None,
                "parts": _views(look, OWN, shown),
                "gold": {"truth": truth, "right": given[0].label == truth} if truth else None,
            },
            headers=NO_STORE,
        )

    async def answer(request: Request) -> Response:
        look = look_of(request)
        given = await _read(request, Answer)

        def act() -> Response:
            queue = review.queue
            before = queue.answers(look)
            if before and all(label.more.get("key") != given.key for label in before):
                raise ReviewError("this part is answered", action="ask for the next part")
            if not before:
                context.note(
                    request, "review.answer", after={"look": look.id, "label": given.label}
                )
            row = review.evidence.one(look.result_id)
            surface = row is not None and asked.get(row.product, "surface") == "surface"
            label = queue.answer(
                look, _timed(given, look), review.digests(look), surface and look.kind != "gold"
            )
            return answered(look, label)

        return await run_in_threadpool(act)

    async def cells(request: Request) -> Response:
        look = look_of(request)
        given = await _read(request, Painted)

        def act() -> Response:
            shown = review.shown(look.result_id)[OWN]
            if given.mark is None and len(shown) > 1 and not given.skipped:
                marks = ", ".join(part.mark for part in shown)
                raise ReviewError("the defect of which part", which="mark", expected=marks)
            review.queue.paint(look, given, pictures.digests(shown))
            return told(look)

        return await run_in_threadpool(act)

    async def reveal(request: Request) -> Response:
        look = look_of(request)
        return await run_in_threadpool(told, look)

    async def change(request: Request) -> Response:
        look = look_of(request)
        given = await _read(request, Answer)

        def act() -> Response:
            context.note(request, "review.change", after={"look": look.id, "label": given.label})
            review.queue.change(look, given, review.digests(look))
            return JSONResponse({"changed": given.label}, headers=NO_STORE)

        return await run_in_threadpool(act)

    async def gold(request: Request) -> Response:
        given = await _read(request, _Named)

        def act() -> Response:
            by = context.user(request).name
            context.note(request, "review.gold", after={"result_id": given.result_id})
            made = review.queue.make_gold(given.result_id, by)
            return JSONResponse({"truth": made.truth}, headers=NO_STORE)

        return await run_in_threadpool(act)

    def figures(request: Request) -> Response:
        days = min(366.0, max(1.0, _number(request.query_params.get("days"), 7.0)))
        since = datetime.now(timezone.utc) - timedelta(days=days)
        queue = review.queue
        found = statistics.figures(
            queue.labels(),
            queue.draws(),
            queue.golden(),
            tasks=asked,
            shifts=context.settings.shifts,
            since=since.strftime("%Y-%m-%dT%H:%M:%S"),
        )
        told = {"days": days, "gold_parts": len(queue.golden()), **statistics.plain(found)}
        return JSONResponse(told, headers=NO_STORE)

    base = "/api/review"
    return [
        (Route(f"{base}/state", state), Role.OPERATOR),
        (Route(f"{base}/next", following, methods=["POST"]), Role.OPERATOR),
        (Route(f"{base}/dispute", dispute, methods=["POST"]), Role.LEAD),
        (Route(f"{base}/figures", figures), Role.LEAD),
        (Route(f"{base}/gold", gold, methods=["POST"]), Role.LEAD),
        (Route(f"{base}/{{look}}/{{scale}}/{{number}}", view), Role.OPERATOR),
        (Route(f"{base}/{{look}}/answer", answer, methods=["POST"]), Role.OPERATOR),
        (Route(f"{base}/{{look}}/cells", cells, methods=["POST"]), Role.OPERATOR),
        (Route(f"{base}/{{look}}/reveal", reveal, methods=["POST"]), Role.OPERATOR),
        (Route(f"{base}/{{look}}/change", change, methods=["POST"]), Role.OPERATOR),
    ]


@dataclass(frozen=True)
class _Named:
    result_id: str


def _views(look: Look, scale: str, shown: Sequence[Shown]) -> list[dict[str, Any]]:
    """The parts of a tray with the addresses of their pictures, which name nothing but the look."""
    return [
        {
            "mark": part.mark,
            "mm": round(part.side_mm, 3),
            "views": {
                view: f"/api/review/{look.id}/{scale}/{number * len(VIEWS) + place}"
                for place, view in enumerate(VIEWS)
            },
        }
        for number, part in enumerate(shown)
    ]


def _wanted(product: Product | None) -> list[str]:
    """What belongs on the tray, for people: "5 x hex nut M8"."""
    if product is None:
        return []
    return [f"{count} x {part.replace('_', ' ')}" for part, count in product.parts.items()]


def _revealed(verdict: Mapping[str, Any]) -> dict[str, Any]:
    """What is told of the verdict."""
    return {
        "result_id": verdict["result_id"],
        "serial": verdict["serial"],
        "outcome": verdict["outcome"],
        "reasons": [
            {"code": item["code"], "text": item["text"], "mark": item["mark"]}
            for item in verdict["reasons"]
        ],
        "grids": [
            {"mark": item["mark"], "view": item["view"], "cells": item["cells"]}
            for item in verdict["grids"]
            if item["cells"]
        ],
    }


def _classes(verdict: Mapping[str, Any]) -> list[str]:
    """Defect classes of the bundle that judged; their order says nothing."""
    known = {name for item in verdict["surface"] for name in item["probabilities"]}
    return sorted((known or set(tasks.DEFECT_CLASSES)) - {tasks.NORMAL})


def _task(checks: Sequence[str]) -> str:
    """What people are asked about a product: the hardest of its checks to see."""
    return next(name for name in ("surface", "assembly", "workpiece") if name in checks)


def _timed(given: Answer, look: Look) -> Answer:
    """No answer can have taken longer than since the look was given out."""
    begun = datetime.fromisoformat(look.time.replace("Z", "+00:00"))
    since = int((datetime.now(timezone.utc) - begun).total_seconds() * 1000)
    return record.read(Answer, {**record.write(given), "ms": max(0, min(given.ms, since))})


async def _read(request: Request, cls: type[T]) -> T:
    return record.read(cls, await body_of(request))


def _number(text: str | None, default: float) -> float:
    try:
        return float(text) if text is not None else default
    except ValueError:
        return default


__all__ = ["routes"]
