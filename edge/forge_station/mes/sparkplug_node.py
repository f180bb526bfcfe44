"""The station as a Sparkplug B edge node: its metrics, its messages, their numbers.

It knows no network: `sparkplug` decides when what is sent. One node without devices, as the
specification allows for a device that speaks MQTT itself (chapter 5, MQTT enabled device): NBIRTH,
NDATA, NDEATH, NCMD.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from forge_station.mes.settings import NAMESPACE
from forge_station.mes.sparkplug_payload import DataSet, DataType, Metric, Payload, encode

REBIRTH = "Node Control/Rebirth"
BDSEQ = "bdSeq"
GRIDS = DataSet(("mark", "view", "rows"), (DataType.STRING,) * 3)
"""Without rows. One row a view with defective cells: `A`, `front`, `r5: 8,9; r6: 8`."""


@dataclass(frozen=True)
class Definition:
    """A metric of the birth. `unit` becomes its property `engUnit`."""

    name: str
    datatype: DataType
    unit: str = ""


DEFINITIONS: tuple[Definition, ...] = (
    Definition("Properties/Software Version", DataType.STRING),
    Definition("Properties/Source", DataType.STRING),
    Definition("Model/Name", DataType.STRING),
    Definition("Model/Version", DataType.STRING),
    Definition("Model/Certified", DataType.BOOLEAN),
    Definition("State/Name", DataType.STRING),
    Definition("State/Mode", DataType.STRING),
    Definition("Verdict/Id", DataType.STRING),
    Definition("Verdict/Part Id", DataType.STRING),
    Definition("Verdict/Product Id", DataType.STRING),
    Definition("Verdict/Code", DataType.STRING),
    Definition("Verdict/Reason", DataType.STRING),
    Definition("Verdict/Score", DataType.DOUBLE),
    Definition("Verdict/Time", DataType.DATETIME),
    Definition("Verdict/Duration", DataType.DOUBLE, "ms"),
    Definition("Verdict/Simulated", DataType.BOOLEAN),
    Definition("Verdict/Defective Cells", DataType.INT32),
    Definition("Verdict/Grids", DataType.DATASET),
    Definition("Counters/Total", DataType.INT64),
    Definition("Counters/PASS", DataType.INT64),
    Definition("Counters/FAIL", DataType.INT64),
    Definition("Counters/UNSURE", DataType.INT64),
    Definition("Counters/ERROR", DataType.INT64),
    Definition("Health/Alarms", DataType.STRING),
    Definition("Health/Outbox Depth", DataType.INT64),
    Definition("Health/Outbox Fill", DataType.DOUBLE, "%"),
    Definition("Health/Link", DataType.BOOLEAN),
)
"""Every metric that is ever sent. The alias of each is its place here, from 1 on."""

ALIASES: Mapping[str, int] = {item.name: number for number, item in enumerate(DEFINITIONS, 1)}
VERDICT_METRICS = frozenset(item.name for item in DEFINITIONS if item.name.startswith("Verdict/"))
_TYPES = {item.name: item.datatype for item in DEFINITIONS}


@dataclass(frozen=True)
class Result:
    """The metrics of one verdict, and when it was reached (ms since 1970, UTC)."""

    values: Mapping[str, Any]
    timestamp: int


class Node:
    """One session: from its CONNECT to its death. `bd_seq` is that of its will.

    `types`: repeat in NDATA which data type each metric was born with.
    """

    def __init__(
        self,
        group: str,
        node: str,
        bd_seq: int,
        values: Mapping[str, Any],
        *,
        types: bool = False,
    ) -> None:
        self._place = (group, node)
        self._bd_seq = bd_seq
        self._repeat_types = types
        # Some decoders cannot read a table that is null.
        self._values: dict[str, Any] = {**dict.fromkeys(_TYPES), "Verdict/Grids": GRIDS}
        self._times = dict.fromkeys(_TYPES, now_ms())
        self._seq = 0
        self.update(values)

    def topic(self, kind: str) -> str:
        """`kind` is NBIRTH, NDEATH, NDATA or NCMD."""
        group, node = self._place
        return f"{NAMESPACE}/{group}/{kind}/{node}"

    def update(self, values: Mapping[str, Any], timestamp: int | None = None) -> frozenset[str]:
        """Take note of values; the names of those that changed. KeyError for an unknown name."""
        changed = frozenset(name for name, value in values.items() if self._values[name] != value)
        for name in changed:
            self._values[name] = values[name]
            self._times[name] = timestamp or now_ms()
        return changed

    def birth(self) -> bytes:
        """NBIRTH: every metric with its value, and the sequence begins anew."""
        self._seq = 0
        now = now_ms()
        metrics = [
            Metric(BDSEQ, self._bd_seq, DataType.INT64, now),
            Metric(REBIRTH, False, DataType.BOOLEAN, now),
        ]
        for item in sorted(DEFINITIONS, key=lambda item: self._times[item.name]):
            properties = {"engUnit": item.unit} if item.unit else {}
            metrics.append(
                Metric(
                    item.name, self._values[item.name], item.datatype, self._times[item.name],
                    ALIASES[item.name], properties=properties,
                )
            )  # fmt: skip
        return self._numbered(metrics, now)

    def data(self, names: Collection[str]) -> bytes:
        """NDATA: the values of these metrics, oldest first."""
        ordered = sorted(names, key=lambda name: (self._times[name], ALIASES[name]))
        metrics = [self._short(name, self._values[name], self._times[name]) for name in ordered]
        return self._numbered(metrics, now_ms())

    def history(self, result: Result) -> bytes:
        """NDATA of a verdict from the time when nobody could hear it."""
        metrics = [
            self._short(name, value, result.timestamp, historical=True)
            for name, value in result.values.items()
        ]
        return self._numbered(metrics, now_ms())

    def death(self) -> bytes:
        """NDEATH: the number that tells which birth has ended, and nothing else."""
        return encode(Payload((Metric(BDSEQ, self._bd_seq, DataType.INT64, now_ms()),), now_ms()))

    def _short(self, name: str, value: Any, timestamp: int, historical: bool = False) -> Metric:
        return Metric("", value, _TYPES[name], timestamp, ALIASES[name], historical)

    def _numbered(self, metrics: list[Metric], now: int) -> bytes:
        body = encode(Payload(tuple(metrics), now, self._seq), types=self._repeat_types)
        self._seq = (self._seq + 1) % 256
        return body


def result_of(verdict: Mapping[str, Any]) -> Result:
    """The metrics of a verdict (`Verdict.to_dict()`)."""
    reasons, grids = verdict["reasons"], verdict.get("grids", ())
    ended = verdict.get("end_time") or ""
    when = ms_of(ended) if ended else now_ms()
    scores = [item["score"] for item in verdict["checks"] if item["score"] is not None]
    rows = tuple(
        (item["mark"], item["view"], item["text"].replace("\n", "; "))
        for item in grids
        if item["cells"]
    )
    values = {
        "Verdict/Id": verdict["result_id"],
        "Verdict/Part Id": verdict["serial"],
        "Verdict/Product Id": verdict["product"],
        "Verdict/Code": verdict["outcome"],
        "Verdict/Reason": reasons[0]["code"] if reasons else None,
        "Verdict/Score": min(scores, default=None),
        "Verdict/Time": when,
        "Verdict/Duration": verdict.get("timings_ms", {}).get("total"),
        "Verdict/Simulated": bool(verdict.get("simulated", False)),
        "Verdict/Defective Cells": sum(len(item["cells"]) for item in grids),
        "Verdict/Grids": replace(GRIDS, rows=rows),
    }
    return Result(values, when)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def ms_of(rfc3339: str) -> int:
    """Milliseconds since 1970 of an RFC 3339 time."""
    return round(datetime.fromisoformat(rfc3339.replace("Z", "+00:00")).timestamp() * 1000)
