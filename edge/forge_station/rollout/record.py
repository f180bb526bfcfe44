"""What was done in a rollout, on disk before it is done: the folder beside its plan.

    state.json        the record below, replaced as a whole
    plan.yaml         the plan as it was when the rollout began; a later change does nothing
    log.jsonl         what happened, a line each
    lock              held by the process that carries it out
    pause, abort, approved-GROUP, unsigned-STATION      what people asked for, from any shell;
                      the last names one report, and is gone once that has counted

Whoever holds the lock carries on from here, so a process that was killed is only late.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from forge_station.contract import record
from forge_station.contract.error import ContractError
from forge_station.contract.record import Count
from forge_station.errors import ConfigError
from forge_station.mes import state_file

Step = Literal["WAITING", "ORDERED", "UNDER_WAY", "DONE", "FAILED", "TAKING_BACK", "BACK"]
ENDED: frozenset[Step] = frozenset({"WAITING", "DONE", "FAILED", "BACK"})
"""Nothing is under way at the station."""
Phase = Literal["RUNNING", "TAKING_BACK", "SUCCEEDED", "STOPPED", "ROLLED_BACK", "ABORTED"]
OVER: frozenset[Phase] = frozenset({"SUCCEEDED", "STOPPED", "ROLLED_BACK", "ABORTED"})


@dataclass(frozen=True)
class Release:
    """A bundle file of the rollout, as it was when the rollout began."""

    file: str
    name: str
    version: str
    release_counter: Count
    sha256: str
    """Of its manifest: what stations are told to take, and nothing else."""


@dataclass(frozen=True)
class StationRecord:
    """Where a station is. `step` is the rollout's word, `state` the station's own."""

    name: str
    group: str
    job: str
    """Id of its deployment. It stays the same however often the order is sent."""
    release: Release
    step: Step = "WAITING"
    state: str = ""
    version: Count = 0
    progress: float | None = None
    code: str = ""
    detail: str = ""
    failed: bool = False
    """It counts against `max_failed`, wherever its bundle is now."""
    sent: float = 0.0
    """When the order was last sent, Unix time; 0: never."""
    begun: float = 0.0
    """When it was given its order (or told to go back), for the time limit."""
    accepted: bool = False
    """It has answered that it took what was sent last."""
    taken: bool = False
    """It has, or had, a deployment of the id `job`."""
    unsigned: bool = False
    """`state` is from a report that nobody signed; a person asked for it to count."""
    unsigned_report: str = ""
    """SHA-256 of the file of that report: no other counts."""
    shadow: tuple[int, ...] = ()
    """Parts, and how many were judged differently."""
    trial: tuple[int, ...] = ()
    """Parts, FAIL, UNSURE or ERROR, too slow."""

    @property
    def back_job(self) -> str:
        """Id of the deployment that brings the bundle before back, once this one succeeded."""
        return f"{self.job}.back"


@dataclass(frozen=True)
class RolloutRecord:
    """All of it. Times are Unix seconds."""

    id: str
    plan: str
    begun: float
    stations: tuple[StationRecord, ...]
    phase: Phase = "RUNNING"
    ends_as: Phase = "ROLLED_BACK"
    """What TAKING_BACK ends as."""
    group: Count = 0
    """Number of the group that is at it."""
    group_done: float = 0.0
    """Since when all its stations are done; 0: they are not."""
    why: str = ""
    ended: float = 0.0

    def station(self, name: str) -> StationRecord:
        return next(item for item in self.stations if item.name == name)

    def with_station(self, changed: StationRecord) -> RolloutRecord:
        found = tuple(changed if item.name == changed.name else item for item in self.stations)
        return replace(self, stations=found)


class Folder:
    """The folder of a rollout. `record` is read anew each time: another process may write it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def plan(self) -> Path:
        return self.path / "plan.yaml"

    @property
    def exists(self) -> bool:
        return (self.path / "state.json").is_file()

    def require_new(self) -> None:
        """Raise ConfigError where a rollout was begun."""
        if self.exists:
            raise ConfigError(
                "this rollout was begun already",
                which=self.path,
                action="go on with `forge-station rollout resume`, or name another folder (--state)"
                " to begin it anew",
            )

    def create(self, plan: bytes, first: RolloutRecord) -> None:
        """The plan, then the state, with which it exists. Raises ConfigError where one is."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error
        with self.alone() as free:
            if free:
                self.require_new()
                self.plan.write_bytes(plan)
                self.write(first)
                return
        raise ConfigError(
            "another process begins this rollout", which=self.path, action="leave it to that one"
        )

    def read(self) -> RolloutRecord:
        """Raises ConfigError."""
        if not self.exists:
            raise ConfigError(
                "no rollout was begun here",
                which=self.path,
                action="begin it: forge-station rollout start PLAN --key KEY",
            )
        try:
            return record.read(RolloutRecord, state_file.read(self.path / "state.json"))
        except ContractError as error:
            raise ConfigError(
                "the state of the rollout cannot be read",
                which=self.path / "state.json",
                faults=error.faults,
            ) from error

    def write(self, found: RolloutRecord) -> None:
        """On disk when it returns. Raises ConfigError."""
        try:
            state_file.write(self.path / "state.json", record.write(found))
        except OSError as error:
            raise self._unwritable(error) from error

    def log(self, text: str, station: str = "") -> None:
        """For people; a line that is lost is no harm."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        entry = {"time": now, "station": station, "text": text}
        line = json.dumps({key: value for key, value in entry.items() if value})
        try:
            with (self.path / "log.jsonl").open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        except OSError as error:
            logging.getLogger(__name__).warning("%s/log.jsonl: %s", self.path, error.strerror)

    def ask(self, name: str, facts: Mapping[str, Any]) -> None:
        """Leave a request for whoever carries the rollout out."""
        state_file.write(self.path / name, facts)

    def asked(self, name: str) -> dict[str, Any] | None:
        """The request of that name; None when there is none."""
        if not (self.path / name).is_file():
            return None
        return state_file.read(self.path / name)

    def forget(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Whether this process is the one that carries the rollout out, while the block runs."""
        try:
            with (self.path / "lock").open("a") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    yield False
                    return
                file.truncate(0)
                file.write(f"{os.getpid()}\n")
                file.flush()
                yield True
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError("the rollout cannot be noted", which=self.path, got=error.strerror)
