"""A station of which only the bundles are real: models answer from a script.

    python -m tests.bundles.deploy_rig BUNDLE STORE...

runs one deployment in each store and kills its process (SIGKILL). The folder of a store says when:
`TRIAL` as soon as this state is on disk, before anything is done in it; `ROLLED_BACK.7` on the way
to this end, right after the seventh rename, which is what makes a change in a store.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forge_station.bundles import deploy
from forge_station.bundles.deploy import Deployer, Host, Seen
from forge_station.bundles.jobs import JobRecord
from forge_station.bundles.settings import ReleaseConfig
from forge_station.bundles.store import BundleStore
from forge_station.bundles.trust import Trust
from forge_station.contract.manifest import Manifest
from forge_station.contract.verdict import (
    GATE,
    CheckResult,
    Outcome,
    Reason,
    ScanSummary,
    Verdict,
    decide,
)
from forge_station.contract.views import NANO_LAYOUT
from forge_station.errors import ModelError
from forge_station.pipeline import Job
from forge_station.vlm.bundle_files import read_manifest

ANYBODY = Trust(unsigned=True)
QUICK = ReleaseConfig(golden_required=False, shadow_parts=3, trial_parts=3, trial_restarts=1)


def verdict(outcome: str, ms: float = 10.0) -> Verdict:
    reasons = () if outcome == "PASS" else (Reason("SCRIPT", "as the script says"),)
    return decide(
        required=("workpiece",),
        checks=[
            CheckResult(GATE, Outcome.PASS),
            CheckResult("workpiece", Outcome(outcome), reasons),
        ],
        scan=ScanSummary(points=1),
        result_id="r",
        serial="s",
        product="N",
        timings_ms={"total": ms},
    )


@dataclass
class ScriptModel:
    manifest: Manifest
    closed: int = 0
    warmed: int = 0

    def warm_up(self, sizes: Any = ()) -> None:
        self.warmed += 1

    def close(self) -> None:
        self.closed += 1


@dataclass
class ScriptInspector:
    """Judges every part as its bundle's version says: `1.2.0-FAIL` gives FAIL."""

    model: ScriptModel
    layout: Any = NANO_LAYOUT

    @property
    def says(self) -> str:
        return self.model.manifest.version.partition("-")[2] or "PASS"

    def inspect_stacks(self, job: Job, stacks: Any, calibrations: Any) -> Any:
        return replace(Found(), verdict=verdict(self.says.partition("@")[0]))


@dataclass(frozen=True)
class Found:
    verdict: Any = None


@dataclass
class FakeStation:
    """`parts` go through it until stopped; `in_use` is the inspector that judges them."""

    root: Path
    limits: ReleaseConfig = QUICK
    told: list[tuple[str, str]] = field(default_factory=list)
    opened: list[ScriptInspector] = field(default_factory=list)
    kill_at: str = ""
    refuses: str = ""
    """Version of a bundle that does not open."""

    def __post_init__(self) -> None:
        self.store = BundleStore(self.root)
        self.restarted = deploy.before_start(self.root, ANYBODY, self.limits)
        active = self.store.active
        assert active is not None
        try:
            self.in_use = self.open(active.folder)
        except ModelError as error:
            self.restarted = deploy.failed_start(self.root, ANYBODY, error)
            if self.restarted is None:
                raise
            active = self.store.active
            assert active is not None
            self.in_use = self.open(active.folder)
        self._lock = threading.Lock()
        host = Host(lambda: self.in_use, self.open, self.use, self.tell)  # type: ignore[arg-type,return-value]
        self.deployer = Deployer(self.store, ANYBODY, self.limits, host)

    def open(self, folder: Path) -> Any:
        manifest = read_manifest(folder)
        if self.refuses and manifest.version == self.refuses:
            raise ModelError("the model does not open", which=folder)
        found = ScriptInspector(ScriptModel(manifest))
        self.opened.append(found)
        return found

    def use(self, inspector: Any, folder: Path) -> None:
        with self._lock:
            self.in_use = inspector

    def tell(self, job: JobRecord, progress: float | None) -> None:
        if not self.told or self.told[-1] != (job.id, job.state):
            self.told.append((job.id, job.state))
        if job.state == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def part(self) -> str:
        """One part through the loop; what was said of it."""
        with self._lock:
            says, _, slow = self.in_use.says.partition("@")
            assert self.in_use.model.closed == 0, "the model that judges is closed"
        found = verdict(says, float(slow or 10))
        job = Job(result_id="r", serial="s", product=None)
        self.deployer.part(Seen(job, ["stack"], {}, found))
        return says

    def run_until(
        self, done: Callable[[], bool], timeout_s: float = 30.0, *, parts: bool = True
    ) -> None:
        """Parts go through (or none does) until it is done."""
        deadline = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > deadline:
                raise AssertionError(f"not done: {self.told}")
            if parts:
                self.part()
            time.sleep(0.005)

    def until_over(self, job_id: str, *, parts: bool = True) -> JobRecord:
        def over() -> bool:
            job = self.deployer.jobs.find(job_id)
            return job is not None and job.over

        self.run_until(over, parts=parts)
        found = self.deployer.jobs.find(job_id)
        assert found is not None
        return found


@dataclass(frozen=True)
class Way:
    """How a deployment comes to an end."""

    limits: ReleaseConfig = QUICK
    sha256: str = ""
    back_at: str = ""
    """The state in which it is taken back by a command."""
    parts: bool = True
    """Whether any go through."""


WAYS = {
    "SUCCEEDED": Way(),
    "REJECTED": Way(sha256="0" * 64),
    "FAILED": Way(replace(QUICK, golden_required=True)),
    "TIMED_OUT": Way(replace(QUICK, timeout_s=1.0), parts=False),
    "CANCELED": Way(back_at="SHADOW", parts=False),
    "ROLLED_BACK": Way(replace(QUICK, shadow_parts=1, trial_parts=1, trial_fail_share=0.0)),
    "TAKEN_BACK": Way(replace(QUICK, shadow_parts=1, trial_parts=1000), back_at="TRIAL"),
}
"""By its last state; TAKEN_BACK is ROLLED_BACK by a command."""


def go(station: FakeStation, way: Way, bundle: str) -> None:
    """The deployment, to its end."""
    with station.deployer:
        station.deployer.deploy("job-1", bundle, sha256=way.sha256)
        if way.back_at:
            station.run_until(lambda: ("job-1", way.back_at) in station.told, parts=way.parts)
            station.deployer.rollback("job-1")
        station.until_over("job-1", parts=way.parts)


def kill_after(number: int) -> None:
    """Kill this process right after so many renames."""
    left = iter(range(number - 1, -1, -1))

    def counted(rename: Callable[[Path, Any], Path]) -> Callable[[Path, Any], Path]:
        def replacement(path: Path, target: Any) -> Path:
            found = rename(path, target)
            if next(left, 0) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        return replacement

    Path.replace, Path.rename = counted(Path.replace), counted(Path.rename)  # type: ignore[method-assign,assignment]


def main() -> None:
    """One forked child a store: Python and its packages are loaded once."""
    bundle = sys.argv[1]
    for root in map(Path, sys.argv[2:]):
        child = os.fork()
        if child == 0:
            state, _, number = root.name.partition(".")
            way = WAYS.get(state, Way())
            station = FakeStation(root, way.limits, kill_at="" if number else state)
            if number:
                kill_after(int(number))
            go(station, way, bundle)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(root.name, os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
