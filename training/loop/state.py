"""What a run of the loop has done: one JSON file, a record a step, and whether it still counts.

A step counts while the digest of its inputs is the one it was made from and its outputs are as it
left them. Written by rename after each step; a run that is killed finds the step it was in
unrecorded. One run at a time holds the folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from forge_station.contract import record
from forge_station.contract.error import ContractError
from training.loop.error import LineError

FILE, LOCK = "state.json", ".lock"
SCHEMA = "forge-station.line/1.0"
_WHOLE = 1 << 26
"""Files up to this size are digested; of larger ones name, size and time of change count."""


@dataclass(frozen=True)
class Done:
    """A finished step. `outputs`: path within the folder -> digest. `notes`: what it found."""

    inputs: str
    outputs: Mapping[str, str]
    seconds: float
    time: str
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class State:
    """Records of the finished steps, in the order in which they were done. `begun`: step -> digest
    of the inputs that its files so far were made from, for steps that go on where they stopped."""

    steps: Mapping[str, Done] = field(default_factory=dict)
    begun: Mapping[str, str] = field(default_factory=dict)
    schema: str = SCHEMA

    def without(self, names: Iterable[str]) -> State:
        """As if these steps were never made."""
        gone = set(names)
        return replace(
            self,
            steps={name: done for name, done in self.steps.items() if name not in gone},
            begun={name: inputs for name, inputs in self.begun.items() if name not in gone},
        )

    def with_begun(self, name: str, inputs: str) -> State:
        return replace(self.without([name]), begun={**self.begun, name: inputs})

    def with_done(self, name: str, done: Done) -> State:
        return replace(self.without([name]), steps={**self.steps, name: done})


def read(folder: Path) -> State:
    """The state of a run; an empty one where nothing was done. LineError for a damaged file."""
    path = folder / FILE
    try:
        found = record.read(State, json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return State()
    except (OSError, ValueError, RecursionError, ContractError) as error:
        raise LineError(
            "the state of this run is damaged, so nobody knows which steps were done",
            which=path,
            got=" ".join(str(error).split())[:200],
            action="take another --out, or delete the file: every step is then made again "
            "(training goes on from its own states)",
        ) from error
    if found.schema != SCHEMA:
        raise LineError("state of another release", which=path, expected=SCHEMA, got=found.schema)
    return found


def write(folder: Path, state: State) -> None:
    """Write the state to disk, by rename."""
    draft = folder / f"{FILE}.partial"
    with draft.open("w", encoding="utf-8") as file:
        file.write(json.dumps(record.write(state), indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(folder / FILE)


def finished(inputs: str, outputs: Iterable[Path], folder: Path, seconds: float,
             notes: Mapping[str, Any]) -> Done:  # fmt: skip
    """The record of a step that has just ended."""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    named = {str(path.relative_to(folder)): digest(path) for path in outputs}
    return Done(inputs, named, round(seconds, 1), now, dict(notes))


def objection(done: Done | None, inputs: str, folder: Path) -> str | None:
    """Why a step has to be made (again); None: it counts."""
    if done is None:
        return "not done yet"
    if done.inputs != inputs:
        return "its inputs changed"
    for name, was in done.outputs.items():
        if digest(folder / name) != was:
            return f"{name} is not as the step left it"
    return None


def digest(path: Path) -> str:
    """Of a file, or of all files below a folder with their names; "" where nothing is."""
    if path.is_dir():
        return of(
            [f"{item.relative_to(path)} {digest(item)}" for item in sorted(path.rglob("*"))
             if item.is_file()]
        )  # fmt: skip
    try:
        told = path.stat()
        if told.st_size > _WHOLE:
            return of([path.name, told.st_size, told.st_mtime_ns])
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def of(values: Iterable[object]) -> str:
    """One digest of many things, by their JSON or text."""
    text = json.dumps([str(value) for value in values])
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the folder of a run. LineError while another process does; its death sets it free."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LineError(
                "another run works in this folder", which=folder, action="wait for it, or take "
                "another --out",
            ) from error  # fmt: skip
        yield
