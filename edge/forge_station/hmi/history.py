"""The routes of the history: parts with filters, page by page, and all that is known of one part.

Who has seen a verdict here is not asked to judge that part blind any more.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from forge_station.contract import record
from forge_station.contract.verdict import Outcome
from forge_station.contract.views import VIEWS
from forge_station.errors import StationError
from forge_station.evidence.index import Query, Row
from forge_station.hmi.context import Context, body_of, refusal
from forge_station.hmi.parts import gone
from forge_station.hmi.review import labels as words
from forge_station.hmi.review.desk import OWN
from forge_station.hmi.users import Role

log = logging.getLogger(__name__)
PAGE = 50
"""Parts on a page."""
NO_STORE = {"cache-control": "no-store"}


@dataclass(frozen=True)
class Marked:
    """What a person wants of a part's evidence."""

    mark: Literal["none", "review", "held"]


def routes(context: Context) -> list[tuple[Route, Role]]:
    """Of the history."""
    review = context.review

    def parts(request: Request) -> Response:
        found = review.evidence.find(query_of(request.query_params))
        more = len(found) > PAGE
        found = found[:PAGE]
        after = f"{found[-1].time} {found[-1].result_id}" if more else None
        told = {"parts": [_row(row) for row in found], "after": after}
        return JSONResponse(told, headers=NO_STORE)

    def choices(_: Request) -> Response:
        told = {
            "products": [item.part_number for item in context.config.line.products],
            "outcomes": [item.value for item in Outcome],
            "reasons": review.evidence.reasons(),
        }
        return JSONResponse(told, headers=NO_STORE)

    def seen(request: Request, result_id: str) -> None:
        """Before anything of the part goes out: also a picture alone, with the list, tells all."""
        try:
            review.queue.seen(context.user(request).name, result_id)
        except StationError as error:  # the history is shown without the review
            log.warning("history: %s", error)

    def part(request: Request) -> Response:
        row = review.evidence.one(request.path_params["id"])
        if row is None:
            return refusal(404, "gone", "there is no evidence of this part any more")
        user = context.user(request)
        seen(request, row.result_id)
        verdict = review.evidence.verdict(row)
        said: list[dict[str, Any]] = []
        gold = False
        try:
            if user.role >= Role.LEAD:
                own = [item for item in review.queue.labels() if item.result_id == row.result_id]
                said = [_label(item) for item in own if not item.more.get("gold")]
                known = row.result_id in review.queue.golden()
                gold = not known and words.truth(own) is not None
        except StationError as error:  # the history is shown without the review
            log.warning("history: %s", error)
        told = {**_row(row), "verdict": verdict, "parts": _parts(row, verdict), "labels": said,
                "may_be_gold": gold, "calibration": row.calibration,
                "certificate": row.certificate}  # fmt: skip
        return JSONResponse(told, headers=NO_STORE)

    def view(request: Request) -> Response:
        mark, name = request.path_params["mark"], request.path_params["view"]
        shown = review.shown(request.path_params["id"])[OWN]
        found = next((item for item in shown if item.mark == mark), None)
        if found is None or name not in VIEWS:
            return refusal(404, "gone", "no such view")
        seen(request, request.path_params["id"])
        return Response(found.views[name], media_type="image/png", headers=NO_STORE)

    async def mark(request: Request) -> Response:
        given = record.read(Marked, await body_of(request))
        result_id = request.path_params["id"]

        def act() -> Response:
            row = review.evidence.one(result_id)
            if row is None:
                raise gone(result_id)
            after = {"result_id": result_id, "mark": given.mark}
            context.note(request, "evidence.mark", before={"mark": row.label}, after=after)
            return JSONResponse(_row(review.evidence.mark(result_id, given.mark)))

        return await run_in_threadpool(act)

    base = "/api/history"
    return [
        (Route(f"{base}/parts", parts), Role.OPERATOR),
        (Route(f"{base}/choices", choices), Role.OPERATOR),
        (Route(f"{base}/part/{{id}}", part), Role.OPERATOR),
        (Route(f"{base}/part/{{id}}/{{mark}}/{{view}}", view), Role.OPERATOR),
        (Route(f"{base}/part/{{id}}/mark", mark, methods=["POST"]), Role.OPERATOR),
    ]


def query_of(given: QueryParams) -> Query:
    """What the address asks for. Raises StationError for an outcome that there is not."""
    outcomes = tuple(item for item in given.get("outcome", "").split(",") if item)
    unknown = sorted(set(outcomes) - {item.value for item in Outcome})
    if unknown:
        raise StationError("no such outcome", which="outcome", got=", ".join(unknown))
    time, _, result_id = given.get("after", "").partition(" ")
    return Query(
        since=given.get("since") or None,
        until=given.get("until") or None,
        outcomes=outcomes,
        product=given.get("product") or None,
        last=PAGE + 1,
        reason=given.get("reason") or None,
        containing=given.get("serial") or None,
        before=(time, result_id) if result_id else None,
    )


def _row(row: Row) -> dict[str, Any]:
    return {
        "result_id": row.result_id,
        "time": row.time,
        "outcome": row.outcome,
        "product": row.product,
        "serial": row.serial,
        "reasons": row.reasons,
        "mark": row.label,
        "bundle": row.bundle,
        "bytes": row.bytes,
    }


def _parts(row: Row, verdict: Any) -> list[dict[str, Any]]:
    """Parts of the tray of which there are points to draw, with the cells that the model marked."""
    if not any(name.endswith(".case.npz") for name in row.files):
        return []
    grids = [item for item in verdict["grids"] if item["cells"]]
    return [
        {
            "mark": part["mark"],
            "views": {
                view: f"/api/history/part/{row.result_id}/{part['mark']}/{view}" for view in VIEWS
            },
            "grids": {
                item["view"]: item["cells"] for item in grids if item["mark"] == part["mark"]
            },
        }
        for part in verdict["parts"]
    ]


def _label(label: Any) -> dict[str, Any]:
    """A label for the lead; who gave it is not told."""
    return {
        "label": label.label,
        "blind": label.blind,
        "adjudicates": label.adjudicates,
        "defect": label.defect,
        "sure": label.more.get("sure"),
        "time": label.more.get("time"),
        "origin": label.more.get("origin"),
    }


__all__ = ["PAGE", "query_of", "routes"]
