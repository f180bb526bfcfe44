"""Plans, and records of rollouts that have begun, for tests without a broker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from forge_station.rollout.plan import read_plan
from forge_station.rollout.record import Folder, Release, RolloutRecord, StationRecord

NEW, OLD = "b" * 64, "a" * 64
RELEASE = Release("b.fsb", "nuts", "1.2.0", 2, NEW)


def plan_file(folder: Path, **changes: Any) -> Path:
    (folder / "b.fsb").write_bytes(b"x")
    plan: dict[str, Any] = {
        "name": "test",
        "bundle": "b.fsb",
        "url": "https://files/{file}",
        "mqtt": {"host": "127.0.0.1", "line": "l1"},
        "stations": [{"name": f"s{number}"} for number in range(1, 9)],
        "groups": [
            {"name": "canary", "stations": ["s3"]},
            {"name": "quarter", "share": 0.25, "gates": {"approval": True}},
            {"name": "all", "share": 1},
        ],
        "gates": {"max_failed": 0.5, "wait_s": 60},
        **changes,
    }
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(plan))
    return path


class Clock:
    now = 1e9

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def begun(folder: Folder, plan: Path) -> None:
    members = read_plan(plan).members()
    stations = tuple(
        StationRecord(name, group, f"t.{name}", RELEASE)
        for group, names in members.items()
        for name in names
    )
    folder.create(plan.read_bytes(), RolloutRecord("t", "test", 0.0, stations))
