"""What is inside the messages: a verdict becomes JSON bodies, a verdict message becomes grids.

It knows neither outbox nor broker. The outbox adds id, stream, epoch, seq, streamSeq and bootId
when a message is sent (`stamp.stamped`). Field names follow OPC 40100-1 (resultId, partId,
productId, isSimulated ...) and CloudEvents (id, source, type, time); sizes and the meaning of each
are in `schemas/`.

A verdict stays small: its grids are inlined as far as they fit in `INLINE_BYTES`: in full, else
without the base64 data (the cells say the same), else as counts, with a `grid` message besides.
Three views with six cells each take 1,597 bytes in all, at most.
"""

from __future__ import annotations

import base64
import binascii
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from forge_station.contract.error import ContractError
from forge_station.contract.grid import DefectGrid
from forge_station.mes import schema
from forge_station.mes.stamp import time_quality, utc_now, uuid7
from forge_station.mes.topics import GridEncoding

INLINE_BYTES = 1600
"""A verdict body with its delivery fields is not longer, unless it is so without any grid."""
INLINE_JSON_BYTES = 8000
"""The same for grids as rows of numbers, which a site asks for (`mqtt.grid_encoding: json`)."""
DELIVERY_BYTES = 145
"""What the delivery fields add: 36 characters of id, two of 8, numbers of ten digits, names."""
DEFECTIVE = 128
"""A byte of grid data from here on means a defective cell; the station writes 0 or 255."""

Json = dict[str, Any]
InlineLevel = Literal["full", "cells", "summary"]

CONTEXT_FIELDS = (
    "jobId", "measId", "recipe", "orderId", "lotId", "carrier", "actuation", "images", "retryOf",
    "supersedes",
)  # fmt: skip
"""What only the caller can know of a result, see verdict-1.0.json."""


@dataclass(frozen=True)
class Message:
    """An event for the outbox: `put(stream, topic, body, id)`."""

    stream: str
    id: str
    body: bytes


def messages_of(
    verdict: Mapping[str, Any],
    source: str,
    *,
    sw_version: str = "",
    context: Mapping[str, Any] | None = None,
    grid_encoding: GridEncoding = "base64",
) -> tuple[Message, ...]:
    """The messages of one verdict (`Verdict.to_dict()`), to be put in this order.

    One `verdict`, whose id is the result id, so that a repeated put is no second result; before
    it a `grid` when the grids did not fit in full. `source` is `MqttConfig.root`. Raises
    ContractError when a message would break its schema.
    """
    body = verdict_body(
        verdict, source, sw_version=sw_version, context=context, grid_encoding=grid_encoding
    )
    result_id = body["resultId"]
    encoded = encode(body)
    messages = [Message("verdict", result_id, encoded)]
    if "ref" in body.get("grid", {}):
        grid = grid_body(verdict, source, grid_encoding)
        messages.insert(0, Message("grid", body["grid"]["ref"], encode(grid)))
    return tuple(messages)


def verdict_body(
    verdict: Mapping[str, Any],
    source: str,
    *,
    sw_version: str = "",
    context: Mapping[str, Any] | None = None,
    grid_encoding: GridEncoding = "base64",
) -> Json:
    """The verdict message as a dict, grids inlined as far as they fit."""
    unknown = set(context or ()) - set(CONTEXT_FIELDS)
    if unknown:
        raise ContractError(
            "unknown context of a result",
            expected=f"fields among {', '.join(CONTEXT_FIELDS)}",
            got=", ".join(sorted(unknown)),
        )
    decisive = _decisive(verdict)
    body = _without_none(
        {
            **envelope("verdict", source),
            "swVersion": sw_version or None,
            "resultId": verdict["result_id"],
            "partId": verdict["serial"],
            "partIdSource": verdict.get("serial_source", "none"),
            "productId": verdict["product"],
            **(context or {}),
            "verdict": verdict["outcome"],
            "reasons": [_reason(item) for item in verdict["reasons"]],
            "checks": {item["check"]: item["outcome"] for item in verdict["checks"]},
            "score": _rounded(decisive.get("confidence") or decisive.get("score"), 4),
            "threshold": _rounded(decisive.get("threshold"), 4),
            "certification": _certification(verdict.get("certification")),
            "parts": [_part(item) for item in verdict.get("parts", ())] or None,
            "surface": [_surface(item) for item in verdict.get("surface", ())] or None,
            "resultState": "failed" if verdict["outcome"] == "ERROR" else "completed",
            "isPartial": False,
            "isSimulated": verdict.get("simulated", False),
            "model": _model(verdict.get("model")),
            "calibrationId": (verdict["scan"].get("calibration") or "")[:16] or None,
            "beginTime": verdict.get("begin_time") or None,
            "endTime": verdict.get("end_time") or None,
            "timings": _timings(verdict.get("timings_ms", {})) or None,
        }
    )
    grids = verdict.get("grids", ())
    levels: tuple[InlineLevel, ...] = ("full", "cells", "summary")
    limit = INLINE_BYTES if grid_encoding == "base64" else INLINE_JSON_BYTES
    for level in levels if grids else ():
        body["grid"] = _inline(grids, level, str(verdict["result_id"]), grid_encoding)
        if len(encode(body)) + DELIVERY_BYTES <= limit:
            break
    schema.require(body, stamped=False)
    return body


def grid_body(
    verdict: Mapping[str, Any], source: str, grid_encoding: GridEncoding = "base64"
) -> Json:
    """The grid message as a dict: every grid of the verdict with text, cells, data and frame."""
    body = {
        **envelope("grid", source),
        "resultId": verdict["result_id"],
        "partId": verdict["serial"],
        "rows": 16,
        "cols": 16,
        "order": "row-major",
        "origin": "top-left",
        "encoding": "uint8-base64" if grid_encoding == "base64" else "json-rows",
        "threshold": DEFECTIVE,
        "views": [_view(item, grid_encoding) for item in verdict["grids"]],
    }
    schema.require(body, stamped=False)
    return body


def last_body(verdict: Mapping[str, Any]) -> Json:
    """The fields of the retained `last` status: flat, for consumers that keep no history."""
    reasons = verdict["reasons"]
    return _without_none(
        {
            "resultId": verdict["result_id"],
            "partId": verdict["serial"],
            "productId": verdict["product"],
            "verdict": verdict["outcome"],
            "reason": reasons[0]["code"] if reasons else None,
            "endTime": verdict.get("end_time") or None,
        }
    )


def alarm_message(
    code: str,
    text: str,
    source: str,
    *,
    severity: int,
    active: bool = True,
    params: Mapping[str, Any] | None = None,
    instance_id: str | None = None,
    since: str | None = None,
    acked: bool = False,
) -> Message:
    """An alarm raised (or, with `active` False and the same instance, gone). Severity 1..1000.

    `since` is when it was raised, None: now.
    """
    body: Json = {
        **envelope("alarm", source),
        "code": code,
        "severity": severity,
        "active": active,
        "acked": acked,
        "since": since or utc_now(),
        "text": text[:1000],
        "params": dict(params or {}),
        "instanceId": instance_id or uuid7(),
    }
    schema.require(body, stamped=False)
    return Message("alarm", uuid7(), encode(body))


def audit_message(source: str, fields: Mapping[str, Any]) -> Message:
    """What became of a command, see audit-1.0.json."""
    body = _without_none({**envelope("audit", source), **fields})
    schema.require(body, stamped=False)
    return Message("audit", uuid7(), encode(body))


def status_body(name: str, source: str, fields: Mapping[str, Any]) -> bytes:
    """A message past the outbox (`conn`, `birth`, `state`, `last`, `health`, `reply`), complete."""
    body = {**envelope(name, source), **fields}
    schema.require(body)
    return encode(body)


def envelope(name: str, source: str) -> Json:
    """What every message of the station begins with."""
    return _without_none(
        {
            "schema": f"{name}/1.0",
            "type": f"forge-station.{name}",
            "source": source,
            "time": utc_now(),
            "timeQuality": time_quality(),
        }
    )


def grids_of(message: Mapping[str, Any] | bytes) -> dict[tuple[str, str], DefectGrid]:
    """(mark, view) -> grid of a verdict or grid message, empty without any grid.

    Raises ContractError when the message is malformed, when data and cells contradict each other,
    or when it only counts the cells (then the message `grid.ref` has them).
    """
    content = json.loads(message) if isinstance(message, bytes) else message
    grid = content if content.get("schema") == "grid/1.0" else content.get("grid")
    if grid is None:
        return {}
    if grid.get("inline") == "summary":
        raise ContractError(
            "the verdict only counts the defective cells",
            which=f"result {content.get('resultId')}",
            action=f"take the grids from the grid message {grid.get('ref')}",
        )
    return {(item["mark"], item["view"]): _grid(item) for item in grid["views"]}


def encode(body: Mapping[str, Any]) -> bytes:
    """Compact UTF-8 JSON. NaN and infinity are refused: they are no JSON."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode()


def _inline(
    grids: Sequence[Mapping[str, Any]], level: InlineLevel, result_id: str, encoding: GridEncoding
) -> Json:
    grid: Json = {"rows": 16, "cols": 16, "inline": level}
    if level == "summary":
        grid["ref"] = str(uuid.uuid5(uuid.NAMESPACE_URL, f"forge-station:{result_id}/grid"))
        counts = [(item, len(item["cells"])) for item in grids]
        views = [{"mark": item["mark"], "view": item["view"], "count": n} for item, n in counts]
        return {**grid, "views": views}
    sizes: set[Any] = {item.get("mm_per_cell") for item in grids}
    if len(sizes) == 1 and None not in sizes:
        grid["mmPerCell"] = round(sizes.pop(), 4)
    views = [_view(item, encoding if level == "full" and item["cells"] else None) for item in grids]
    for view in views:
        if "mmPerCell" in grid:
            del view["mmPerCell"]
        if level == "cells" or not view["cells"]:
            del view["text"]  # the cells say the same
    return {**grid, "views": views}


def _view(grid: Mapping[str, Any], encoding: GridEncoding | None) -> Json:
    """One view of a grid or verdict message; `encoding` None: without the whole grid."""
    cells = [[row + 1, column + 1] for row, column in grid["cells"]]
    found = _array(cells)
    return _without_none(
        {
            "mark": grid["mark"],
            "view": grid["view"],
            "text": grid["text"],
            "cells": cells,
            "data": base64.b64encode(found.tobytes()).decode() if encoding == "base64" else None,
            "values": found.tolist() if encoding == "json" else None,
            "mmPerCell": _rounded(grid.get("mm_per_cell"), 4),
            "originMm": _rounded_all(grid.get("origin_mm"), 2),
        }
    )


def _array(cells: Sequence[Sequence[int]]) -> NDArray[np.uint8]:
    data = np.zeros((16, 16), np.uint8)
    for row, column in cells:
        data[row - 1, column - 1] = 255
    return data


def _grid(view: Mapping[str, Any]) -> DefectGrid:
    which = f"grid of mark {view.get('mark')}, view {view.get('view')}"
    cells = view.get("cells")
    of_cells = None
    if cells is not None:
        of_cells = DefectGrid.of((row - 1, column - 1) for row, column, *_ in cells)
    data = _values(view, which)
    if data is None:
        if of_cells is None:
            raise ContractError("neither cells nor data", which=which)
        return of_cells
    grid = DefectGrid(data >= DEFECTIVE)
    if of_cells is not None and of_cells != grid:
        raise ContractError("cells and data contradict each other", which=which)
    return grid


def _values(view: Mapping[str, Any], which: str) -> NDArray[np.uint8] | None:
    """The 16 x 16 cell values of a view, None when it only lists or counts cells."""
    data, rows = view.get("data"), view.get("values")
    if data is None and rows is None:
        return None
    try:
        raw = base64.b64decode(data, validate=True) if data is not None else None
        found = np.frombuffer(raw, np.uint8) if raw is not None else np.array(rows, np.uint8)
    except binascii.Error as error:
        raise ContractError("the data is no base64", which=which, got=error) from error
    except (ValueError, TypeError, OverflowError) as error:
        raise ContractError("the values are no grid", which=which, got=error) from error
    if found.size != 256:
        raise ContractError(
            "data of a wrong size", which=which, expected="256 bytes", got=found.size
        )
    return found.reshape(16, 16)


def _decisive(verdict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The check that decided: the first with the verdict's outcome that had a limit to keep."""
    same = [item for item in verdict["checks"] if item["outcome"] == verdict["outcome"]]
    limited = [item for item in same if item.get("threshold") is not None]
    return min(limited, key=lambda item: item.get("confidence") or 1.0) if limited else {}


def _reason(reason: Mapping[str, Any]) -> Json:
    return _without_none(
        {
            "code": reason["code"],
            "label": reason["text"],
            "mark": reason.get("mark"),
            "score": _rounded(reason.get("score"), 4),
        }
    )


def _part(part: Mapping[str, Any]) -> Json:
    return _without_none(
        {
            "mark": part["mark"],
            "part": f"{part['workpiece']} {part['model_number']}".strip(),
            "probability": _rounded(part["probability"], 4),
            "outcome": part.get("outcome", "PASS"),
            "sizeMm": _rounded_all(part.get("size_mm"), 2),
        }
    )


def _surface(surface: Mapping[str, Any]) -> Json:
    return _without_none(
        {
            "mark": surface["mark"],
            "class": surface["defect_class"],
            "probability": _rounded(surface["probability"], 4),
            "score": _rounded(surface.get("score"), 2),
        }
    )


def _model(model: Mapping[str, Any] | None) -> Json | None:
    if model is None:
        return None
    return {
        "name": model["name"],
        "version": model["version"],
        "releaseCounter": model["release_counter"],
        "sha256": model["sha256"],
    }


def _certification(found: Mapping[str, Any] | None) -> Json | None:
    if found is None:
        return None
    return _without_none(
        {
            "mode": found["mode"],
            "score": _rounded(found["score"], 3),
            "limitPass": _rounded(found["limit_pass"], 3),
            "limitFail": _rounded(found["limit_fail"], 3),
        }
    )


def _timings(timings_ms: Mapping[str, float]) -> Json:
    return {f"{_camel(stage)}Ms": round(value, 1) for stage, value in timings_ms.items()}


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _rounded_all(values: Sequence[float] | None, digits: int) -> list[float] | None:
    return None if values is None else [round(value, digits) for value in values]


def _without_none(fields: Json) -> Json:
    return {key: value for key, value in fields.items() if value is not None}
