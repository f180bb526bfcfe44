"""Remembers the part in work in a file, so that a crash or a power cut loses no part.

At the next start a part that is still in it gets an ERROR verdict under the result id it had. It
does not know what a verdict is.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from forge_station.mes import state_file
from forge_station.pipeline import Job

log = logging.getLogger(__name__)

_FIELDS = (
    "result_id", "serial", "serial_source", "begin_time", "line", "station", "source",
)  # fmt: skip


@dataclass
class Journal:
    """`current`: the part in work of this process. A file that cannot be written is a warning:
    it protects from a second fault, and a full disk must not stop the line."""

    path: Path
    current: Job | None = field(default=None, init=False)

    def begin(self, job: Job, part_number: str) -> None:
        """A part is in work."""
        self.current = job
        facts = {name: getattr(job, name) for name in _FIELDS}
        self._write({**facts, "simulated": job.simulated, "part_number": part_number})

    def end(self) -> None:
        """Its verdict is stored."""
        self.current = None
        self._write({})

    def left(self) -> tuple[Job, str] | None:
        """The part that a process before this one did not finish, and its part number."""
        facts = state_file.read(self.path)
        if not facts:
            return None
        try:
            texts = {name: str(facts[name]) for name in _FIELDS}
            job = Job(product=None, simulated=bool(facts["simulated"]), **texts)
            return job, str(facts["part_number"])
        except KeyError as error:
            log.error("%s names no part: %s is missing", self.path, error)
            return None

    def _write(self, facts: dict[str, object]) -> None:
        try:
            state_file.write(self.path, facts)
        except OSError as error:
            log.warning("the part in work cannot be noted in %s: %s", self.path, error)
