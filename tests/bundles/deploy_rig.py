"""A station of which only the bundles are real: models answer from a script.

    python -m tests.bundles.deploy_rig BUNDLE STORE...

runs one deployment in each store and kills its process (SIGKILL) as soon as the state that the
store's folder is named after is on disk, before anything is done in it.
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

    def run_until(self, done: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Parts go through until it is done."""
        deadline = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > deadline:
                raise AssertionError(f"not done: {self.told}")
            self.part()
            time.sleep(0.005)

    def until_over(self, job_id: str) -> JobRecord:
        def over() -> bool:
            job = self.deployer.jobs.find(job_id)
            return job is not None and job.over

        self.run_until(over)
        found = self.deployer.jobs.find(job_id)
        assert found is not None
        return found


def main() -> None:
    """One forked child a store: Python and its packages are loaded once."""
    bundle = sys.argv[1]
    for root in map(Path, sys.argv[2:]):
        child = os.fork()
        if child == 0:
            station = FakeStation(root, kill_at=root.name)
            with station.deployer:
                station.deployer.deploy("job-1", bundle)
                station.until_over("job-1")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(root.name, os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
