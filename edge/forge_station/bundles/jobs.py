"""A deployment: one bundle on its way into a station, its state on disk before anything is done.

    QUEUED -> DOWNLOADING -> VERIFYING -> STAGED -> SELF_TEST -> SHADOW -> ACTIVATING -> TRIAL
    -> SUCCEEDED, or on the way REJECTED, FAILED, TIMED_OUT, CANCELED, ROLLED_BACK

A state says what is being done; doing it again after a power cut does no harm. The record does
nothing by itself: `deploy.py` does.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from forge_station.contract import record
from forge_station.contract.error import ContractError
from forge_station.contract.record import Count
from forge_station.errors import BundleError
from forge_station.mes import state_file

log = logging.getLogger(__name__)

State = Literal[
    "QUEUED", "DOWNLOADING", "VERIFYING", "STAGED", "SELF_TEST", "SHADOW", "ACTIVATING", "TRIAL",
    "SUCCEEDED", "REJECTED", "FAILED", "TIMED_OUT", "CANCELED", "ROLLED_BACK",
]  # fmt: skip
FINAL: frozenset[State] = frozenset(
    {"SUCCEEDED", "REJECTED", "FAILED", "TIMED_OUT", "CANCELED", "ROLLED_BACK"}
)
BEFORE_ACTIVE: tuple[State, ...] = (
    "QUEUED", "DOWNLOADING", "VERIFYING", "STAGED", "SELF_TEST", "SHADOW",
)  # fmt: skip
"""In these the active bundle has not been touched."""
KEPT = 20
"""Records of deployments that are over."""


@dataclass(frozen=True)
class Tally:
    """What was counted in SHADOW (`different`) and in TRIAL (the rest)."""

    parts: Count = 0
    different: Count = 0
    fail: Count = 0
    unsure: Count = 0
    slow: Count = 0


@dataclass(frozen=True)
class JobRecord:
    """What is known of a deployment. `version` grows with every change of `state`."""

    id: str
    url: str
    created: float
    """Unix time of the order."""
    state: State = "QUEUED"
    version: Count = 1
    sha256: str = ""
    """Of the manifest that is wanted; empty: whatever the url gives."""
    allow_downgrade: int | None = None
    """Release that may come in although a later one has run here."""
    code: str = ""
    detail: str = ""
    bundle: str = ""
    """Its version in the store, from STAGED on."""
    before: str = ""
    """The version that was active when it was activated, which comes back."""
    name: str = ""
    model_version: str = ""
    release_counter: Count = 0
    tally: Tally = Tally()
    """Of the state it is in; kept when TRIAL is over."""
    shadow: Tally = Tally()
    """What SHADOW found, once it is over."""
    usual_ms: float | None = None
    """Median duration of parts under the bundle before."""
    restarts: Count = 0
    """Starts of the station in the trial."""

    def __post_init__(self) -> None:
        record.check(self)

    @property
    def over(self) -> bool:
        return self.state in FINAL

    @property
    def shadow_over(self) -> bool:
        """Whether `tally` counts parts of the trial."""
        return bool(self.before) and self.state not in BEFORE_ACTIVE

    def message(self, progress: float | None = None) -> dict[str, Any]:
        """Fields of the message `job/1.0`."""
        found: dict[str, Any] = {"jobId": self.id, "state": self.state, "version": self.version}
        if self.code:
            found["code"] = self.code
        if self.detail:
            found["detail"] = self.detail[:1000]
        shadow = self.tally if self.state == "SHADOW" else self.shadow
        if shadow.parts:
            found["shadow"] = {"parts": shadow.parts, "different": shadow.different}
        if self.shadow_over and self.tally.parts:
            counted = self.tally
            found["trial"] = {
                "parts": counted.parts,
                "fail": counted.fail,
                "unsure": counted.unsure,
                "slow": counted.slow,
            }
        if progress is not None:
            found["progress"] = round(min(1.0, max(0.0, progress)), 3)
        if self.name:
            found["model"] = {
                "name": self.name,
                "version": self.model_version[:200],
                "releaseCounter": self.release_counter,
            }
        return found


@dataclass
class Jobs:
    """The records of a store, one file each. `told` is called after a change is on disk."""

    folder: Path
    told: Callable[[JobRecord], object] = lambda _job: None

    def find(self, job_id: str) -> JobRecord | None:
        """By id; None when there is none, or it is damaged."""
        return self._read(self._path(job_id))

    def current(self) -> JobRecord | None:
        """The one that is not over; of several (a file was copied in) the newest."""
        found = [job for job in self.all() if not job.over]
        return found[-1] if found else None

    def all(self) -> list[JobRecord]:
        """Oldest first."""
        found = [self._read(path) for path in self.folder.glob("*.json")]
        return sorted((job for job in found if job is not None), key=lambda job: job.created)

    def change(self, job: JobRecord, state: State | None = None, **changes: Any) -> JobRecord:
        """The job with these changes, on disk when it returns. Raises BundleError."""
        if state is not None:
            changes = {"state": state, "version": job.version + 1, "code": "", **changes}
        return self.write(replace(job, **changes))

    def write(self, job: JobRecord) -> JobRecord:
        """Put the record on disk and tell of it. Raises BundleError."""
        try:
            state_file.write(self._path(job.id), record.write(job))
        except OSError as error:
            raise BundleError(
                "the deployment cannot be noted", which=self.folder, got=error.strerror
            ) from error
        self.told(job)
        return job

    def ask_back(self, job: JobRecord) -> None:
        """Note that a deployment is to be taken back; beside its record, which whoever carries it
        out may be writing just now. On disk when it returns. Raises BundleError."""
        try:
            state_file.write(self._back_path(job.id), {"id": job.id})
        except OSError as error:
            raise BundleError(
                "the deployment cannot be noted", which=self.folder, got=error.strerror
            ) from error

    def asked_back(self, job: JobRecord) -> bool:
        """Whether it is to be taken back."""
        return self._back_path(job.id).exists()

    def prune(self) -> None:
        """Forget the oldest that are over."""
        over = [job for job in self.all() if job.over]
        for job in over[:-KEPT]:
            self._path(job.id).unlink(missing_ok=True)
            self._back_path(job.id).unlink(missing_ok=True)

    def _path(self, job_id: str) -> Path:
        """An id may hold what no file name on every system does; its digest may not."""
        return self.folder / f"{hashlib.sha256(job_id.encode()).hexdigest()[:24]}.json"

    def _back_path(self, job_id: str) -> Path:
        return self._path(job_id).with_suffix(".back")

    def _read(self, path: Path) -> JobRecord | None:
        facts: Mapping[str, Any] = state_file.read(path)
        if not facts:
            return None
        try:
            return record.read(JobRecord, facts)
        except (ContractError, json.JSONDecodeError) as error:
            log.error("%s names no deployment: %s", path, error)
            return None
