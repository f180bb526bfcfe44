"""A station as the page sees it: the real board, fed with verdicts made here, and other files."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import yaml

from forge_station.board import Board
from forge_station.config import StationConfig, load_station
from forge_station.contract.verdict import SCHEMA, Verdict
from forge_station.mes.stamp import utc_now, uuid7

REPOSITORY = Path(__file__).resolve().parents[2]
PANELS = {(1280, 800): 12.1, (1920, 1080): 15.6}
"""Pixels -> diagonal in inches: usual panel computers."""
BUNDLE = {"name": "line-3", "version": "1.4.0", "sha256": "3f9a17c2" * 8}
CERTIFICATE = {
    "escape": 0.01,
    "confidence": 0.95,
    "expires": "2027-12-31T00:00:00Z",
    "limit_pass": -1.2,
    "simulated": False,
}
FINE = {
    "state": "OPERATIONAL", "mode": "READY", "text": "certified", "stopped": None, "product": "",
    "simulated": False, "link": True, "camera": True, "frames": True, "outbox": 0, "full": False,
    "bundle": BUNDLE, "permit": "certified", "certificate": CERTIFICATE,
    "drift": {"level": 0, "text": "nothing has changed"},
}  # fmt: skip
ADVISORY = {
    **FINE,
    "certificate": None,
    "permit": "ADVISORY, no part will be called PASS: the certificate has expired on 2026-11-30",
}
SHADED = np.uint8(200)


def station_file(folder: Path, **hmi: Any) -> Path:
    """A station file like the demo's, with its outbox and evidence in `folder`."""
    demo = REPOSITORY / "station_config" / "demo"
    content = yaml.safe_load((demo / "station.yaml").read_text())
    shutil.copy(demo / "line.yaml", folder / "line.yaml")
    content |= {
        "bundle": str(demo / "bundle"),
        "outbox": "outbox.sqlite",
        "evidence": "parts",
        "trusted_keys": [],
        "release": {"unsigned": True},
        "hmi": hmi,
    }
    path = folder / "station.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@dataclass
class Stage:
    """`with Stage(folder) as stage:`; what is told is on disk soon."""

    folder: Path
    hmi: dict[str, Any] = field(default_factory=dict)
    number: int = 0

    def __enter__(self) -> Stage:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file = station_file(self.folder, **self.hmi)
        self.config: StationConfig = load_station(self.file)
        self._begin()
        self._alarms = self.config.outbox.with_name(f"{self.config.outbox.name}.alarms.json")
        return self

    def __exit__(self, *_: object) -> None:
        self.board.__exit__(None, None, None)

    def _begin(self) -> None:
        self.board = Board(self.config.outbox, "0badcafe")
        self.board.__enter__()

    def end(self) -> None:
        """The station ends. What is told afterwards is of another run of it."""
        self.board.__exit__(None, None, None)
        self._begin()

    def status(self, **changed: Any) -> None:
        self.board.status({**FINE, **changed})

    def part(self, outcome: str, *, advisory: bool = False, picture: bool = True) -> str:
        """One more part with this outcome; its result id."""
        self.number += 1
        found = verdict(outcome, self.number, advisory=advisory)
        assert Verdict.from_dict(found).outcome.value == outcome
        if picture and outcome != "ERROR":
            self._picture(found)
        self.board.part(found)
        return str(found["result_id"])

    def alarms(self, *codes: str, severity: int = 600) -> None:
        listed = [
            {"code": code, "key": "", "text": f"text of {code}", "severity": severity,
             "since": utc_now(), "instance_id": uuid7(), "params": {}, "acked": False,
             "told": "active"}
            for code in codes
        ]  # fmt: skip
        beside = self._alarms.with_suffix(".new")
        beside.write_text(json.dumps({"alarms": listed}))
        beside.replace(self._alarms)

    def _picture(self, found: dict[str, Any]) -> None:
        """Three panels with a disc in each, as the model was given them."""
        folder = self.config.evidence.folder
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{found['serial']}-{found['result_id'][-8:]}"
        panel = np.zeros((224, 224, 3), np.uint8)
        cv2.circle(panel, (112, 112), 80, (0, 0, int(SHADED)), -1)
        cv2.circle(panel, (112, 112), 40, (0, 0, 90), -1)
        file = f"{name}.surface-A.png"
        cv2.imwrite(str(folder / file), np.concatenate([panel] * 3, axis=1))
        listed = {"pictures": [{"file": file, "mark": "A", "facts": ""}]}
        (folder / f"{name}.input.json").write_text(json.dumps(listed))


def verdict(outcome: str, number: int, *, advisory: bool = False) -> dict[str, Any]:
    """`Verdict.to_dict()` of one nut that ended so."""
    reasons: dict[str, list[dict[str, Any]]] = {
        "PASS": [],
        "FAIL": [
            {"code": "SURFACE_DENT", "text": "A: a dent", "mark": "A", "score": 0.97},
            {"code": "LOW_SURFACE_SCORE", "text": "A: surface score 3.1", "mark": "A"},
        ],
        "UNSURE": [
            {"code": "SURFACE_DENT", "text": "A: perhaps a dent", "mark": "A", "score": 0.31}
        ],
        "ERROR": [{"code": "CAMERA_LOST", "text": "the camera is gone", "mark": None}],
    }
    if advisory:
        reasons["UNSURE"] = [
            {"code": "NO_CERTIFICATE", "text": "the station only advises: expired", "mark": None}
        ]
    blamed = {"ERROR": "scan", "UNSURE": "certificate" if advisory else "surface"}
    blame = blamed.get(outcome, "surface")
    checks = [
        {
            "check": check,
            "outcome": outcome if check == blame else "PASS",
            "reasons": [dict(item) for item in reasons[outcome]] if check == blame else [],
        }
        for check in ("scan", "workpiece", "surface", "certificate")
        if outcome != "ERROR" or check == "scan"
    ]
    if outcome == "FAIL":
        checks = checks[:3]
    score = {"PASS": -3.4, "FAIL": 2.8, "UNSURE": -0.6}.get(outcome)
    marked = outcome == "FAIL" or (outcome == "UNSURE" and not advisory)
    cells = [[9, 6], [9, 7], [10, 5], [10, 6], [10, 7]] if marked else []
    return {
        "schema": SCHEMA,
        "result_id": uuid7(),
        "serial": f"4711-{number:04d}",
        "product": "NUT-M8",
        "outcome": outcome,
        "reasons": [dict(item) for item in reasons[outcome]],
        "required": ["workpiece", "surface"],
        "checks": checks,
        "scan": {"points": 40_000, "source": "head", "poses": 4},
        "parts": [
            {"mark": "A", "workpiece": "hex_nut", "model_number": "M8", "probability": 0.98}
        ]
        if outcome != "ERROR"
        else [],
        "grids": [{"mark": "A", "view": "top", "text": "", "cells": cells}] if cells else [],
        "model": {
            **BUNDLE, "release_counter": 4, "precision": "int8", "provider": "CPUExecutionProvider",
        },
        "certification": {
            "mode": "advisory" if advisory else "certified",
            "text": "",
            "score": score,
            "limit_pass": None if advisory else -1.2,
            "limit_fail": None if advisory else 1.5,
        },
        "line": "fasteners",
        "station": "station-1",
        "begin_time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "end_time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "timings_ms": {"total": 418.0 + number % 7},
    }  # fmt: skip
