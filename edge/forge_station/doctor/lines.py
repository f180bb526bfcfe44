"""One line of the doctor's report, and how a check is kept from breaking or blocking the report."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from forge_station.errors import StationError

Level = Literal["pass", "warn", "fail"]
LEVELS: tuple[Level, ...] = ("pass", "warn", "fail")


@dataclass(frozen=True)
class Line:
    """`what` was found; `action`: what to do, empty where nothing is."""

    level: Level
    topic: str
    what: str
    action: str = ""

    def __str__(self) -> str:
        advice = f". {self.action}" if self.action else ""
        return f"{self.level:4}  {self.topic:12}  {self.what}{advice}"


Check = Callable[[], Iterable[Line]]


def worst(lines: Iterable[Line]) -> Level:
    """The level of the report: that of its worst line."""
    return max((line.level for line in lines), key=LEVELS.index, default="pass")


def guarded(topic: str, check: Check) -> list[Line]:
    """The lines of a check; one that breaks is a line as well, never a pass."""
    try:
        return list(check())
    except StationError as error:
        return [Line("fail", topic, " ".join(str(error).split()))]
    except Exception as error:  # the other checks must still be made
        return [Line("warn", topic, f"could not be checked: {error!r}", "Report this as a bug.")]


def probe(words: list[str], limit_s: float) -> dict[str, Any]:
    """Run `doctor.probe` in a process of its own: a native library may hang or crash there.

    Returns its JSON object; {"error": ...} when it has none within the limit.
    """
    command = [sys.executable, "-m", "forge_station.doctor.probe", *words]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {limit_s:g} s: the driver hangs"}
    except OSError as error:
        return {"error": f"cannot be started: {error}"}
    try:
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        said = " ".join(done.stderr.split())[-300:]
        return {"error": f"ended with code {done.returncode}: {said or 'nothing was said'}"}
    return found if isinstance(found, dict) else {"error": f"unexpected answer {found!r}"}
