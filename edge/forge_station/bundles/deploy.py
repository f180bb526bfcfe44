"""Brings a bundle into a running station, tries it out, and takes it back when it is worse.

One deployment at a time, in a thread of its own; the line goes on with the bundle it has. The only
thing that waits for the part in work is the exchange of two models that are both open and warm.
What a state means is in `jobs.py`, where bundles lie in `store.py`; docs/BUNDLES.md is for people.
"""

from __future__ import annotations

import logging
import queue
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from forge_station import golden
from forge_station.bundles import fetch
from forge_station.bundles.jobs import BEFORE_ACTIVE, JobRecord, Jobs, State, Tally
from forge_station.bundles.settings import ReleaseConfig
from forge_station.bundles.store import INCOMING, JOBS, BundleStore, Version, is_store
from forge_station.bundles.trust import Trust
from forge_station.contract.error import ContractError
from forge_station.contract.verdict import Outcome, Verdict
from forge_station.errors import BundleError, StationError
from forge_station.pipeline import Inspector, Job

log = logging.getLogger(__name__)

JUDGED_FROM = 10
"""Parts of a trial before which no share says anything."""
USUAL = 50
"""Parts whose durations say what is usual."""
LOOK_S = 5.0
"""An idle station looks so often for a deployment that was left in its store (`local.py`)."""
_RETRY_S = 60.0
_TELL_S = 1.0


@dataclass(frozen=True)
class Seen:
    """A part that the active bundle has judged, and what it was judged from."""

    job: Job
    stacks: Sequence[Any]
    calibrations: Mapping[str, Any]
    verdict: Verdict


class _Ended(Exception):
    """The deployment ends here."""

    def __init__(self, state: State, code: str, detail: str) -> None:
        super().__init__(detail)
        self.state: State = state
        self.code, self.detail = code, detail


class _Closing(Exception):
    """The station stops; the deployment goes on at its next start."""


@dataclass(frozen=True)
class Host:
    """What a deployment needs of its station.

    `open` gives the inspector of a bundle folder, verified and with the station's own settings;
    `use` makes it the one that judges from the next part on, and tells MES; `tell` publishes how
    far a deployment is (a share of its state, or None).
    """

    inspector: Callable[[], Inspector]
    open: Callable[[Path], Inspector]
    use: Callable[[Inspector, Path], object]
    tell: Callable[[JobRecord, float | None], object] = lambda _job, _progress: None


class Deployer:
    """A context manager, beside a station whose bundle is a store.

    `part` is called after each part, by the loop. Deployments that were under way go on.
    """

    def __init__(
        self,
        store: BundleStore,
        trust: Trust,
        limits: ReleaseConfig,
        host: Host,
        *,
        golden_p99_ms: float = 10_000.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._trust, self._limits, self._host = store, trust, limits, host
        self._tolerance = golden.Tolerance(
            limits.golden_grid_iou,
            golden_p99_ms if limits.golden_p99_ms is None else limits.golden_p99_ms,
        )
        self._clock = clock
        self.jobs = Jobs(store.root / JOBS, lambda job: host.tell(job, None))
        self._candidate: tuple[str, Inspector] | None = None
        self._old: tuple[str, Inspector] | None = None
        self._parts: queue.SimpleQueue[Seen] = queue.SimpleQueue()
        self._usual: deque[float] = deque(maxlen=USUAL)
        self._watched: State | None = None
        self._wake, self._stop = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._told_at = 0.0
        self._thread = threading.Thread(target=self._run, name="deploy", daemon=True)

    def __enter__(self) -> Deployer:
        for job in self.jobs.all()[-1:]:
            self._host.tell(job, None)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._wake.set()
        self._thread.join()
        for opened in (self._candidate, self._old):
            if opened is not None and opened[1] is not self._host.inspector():
                opened[1].model.close()

    def deploy(
        self, job_id: str, url: str, *, sha256: str = "", allow_downgrade: int | None = None
    ) -> JobRecord:
        """Take an order; on disk when it returns. The same id again is the same deployment.

        Raises ContractError while another one is under way, or for a url of another kind.
        """
        with self._lock:
            known = self.jobs.find(job_id)
            if known is not None:
                return known
            self._require_idle()
            try:
                fetch.local(url)
            except BundleError as error:
                raise ContractError(str(error)) from error
            job = JobRecord(
                job_id, url, self._clock(), sha256=sha256, allow_downgrade=allow_downgrade
            )
            found = self.jobs.write(job)
        self._wake.set()
        return found

    def rollback(self, job_id: str) -> JobRecord:
        """End the deployment of this id: before it is active it is canceled, in its trial taken
        back. Under a new id: back to the bundle before. On disk when it returns. Raises
        ContractError, BundleError."""
        with self._lock:
            known = self.jobs.find(job_id)
            if known is None:
                self._require_idle()
                active = self._store.active
                before = "" if active is None else active.name
                known = self.jobs.write(JobRecord(job_id, "", self._clock(), before=before))
            elif not known.over:
                self.jobs.ask_back(known)
        self._wake.set()
        return known

    def part(self, seen: Seen) -> None:
        """A part was judged. Returns at once; while the candidate is busy, parts pass it by."""
        if self._watched == "TRIAL":  # every part counts, and what it was judged from does not
            self._parts.put(replace(seen, stacks=(), calibrations={}))
        elif self._watched == "SHADOW":
            if len(seen.stacks) and self._parts.empty():
                self._parts.put(seen)
        elif seen.verdict.outcome is not Outcome.ERROR:
            self._usual.append(_duration(seen.verdict))

    def _require_idle(self) -> None:
        current = self.jobs.current()
        if current is not None:
            raise ContractError(
                "another deployment is under way",
                which=current.id,
                got=current.state,
                action="wait for its end, or take it back: rollback with its jobId",
            )

    # The thread

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.clear()
            job = self.jobs.current()
            if job is None:
                self._wake.wait(LOOK_S)  # an order from a stick comes through the store alone
                continue
            try:
                self._step(job)
            except _Closing:
                return
            except _Ended as end:
                self._finish(job, end.state, end.code, end.detail)
            except StationError as error:
                self._finish(job, "FAILED", error.code, " ".join(str(error).split()))
            except Exception as error:  # a fault of the candidate must not end the station
                log.exception("deployment %s", job.id)
                self._finish(job, "FAILED", "STATION_ERROR", repr(error))

    def _step(self, job: JobRecord) -> None:
        if job.state in BEFORE_ACTIVE:
            self._may_go_on(job)
        steps: Mapping[State, Callable[[JobRecord], object]] = {
            "QUEUED": self._queued,
            "DOWNLOADING": self._download,
            "VERIFYING": self._verify,
            "STAGED": lambda job: self.jobs.change(job, "SELF_TEST"),
            "SELF_TEST": self._self_test,
            "SHADOW": self._shadow,
            "ACTIVATING": self._activate,
            "TRIAL": self._trial,
        }
        steps[job.state](job)

    def _may_go_on(self, job: JobRecord) -> None:
        """Raises _Ended, _Closing."""
        if self._stop.is_set():
            raise _Closing
        if self.jobs.asked_back(job):
            raise _Ended("CANCELED", "CANCELED", "taken back by a command before it was active")
        waited = self._clock() - job.created
        if waited > self._limits.timeout_s:
            text = f"not active {waited:.0f} s after the order"
            raise _Ended("TIMED_OUT", "TIMED_OUT", text)

    def _queued(self, job: JobRecord) -> None:
        if job.url:
            self.jobs.change(job, "DOWNLOADING")
            return
        active = self._store.active
        if active is not None and active.name == job.before:  # not done before a power cut
            active = self._store.rollback(self._trust)
        assert active is not None
        if self._host.inspector().model.manifest.sha256 != active.manifest.sha256:
            _, left = self._exchange(self._host.open(active.folder), active.folder)
            left.model.close()
        text = f"{active.text} by a command"
        self.jobs.change(job, "ROLLED_BACK", bundle=active.name, detail=text)

    def _file(self, job: JobRecord) -> Path:
        return fetch.local(job.url) or self._store.root / INCOMING / f"{_safe(job.id)}.fsb"

    def _download(self, job: JobRecord) -> None:
        if fetch.local(job.url) is None:
            delay_s = 1.0
            while True:
                try:
                    fetch.fetch(
                        job.url,
                        self._file(job),
                        lambda done, total: self._tell(job, done / max(1, total)),
                        lambda: self._stop.is_set() or self.jobs.asked_back(job),
                    )
                    break
                except fetch.Stopped:
                    self._may_go_on(job)
                except fetch.UnreachableError as error:
                    log.warning("deployment %s: %s", job.id, error)
                    self._wake.wait(delay_s)
                    delay_s = min(_RETRY_S, 2 * delay_s)
                    self._may_go_on(job)
        self.jobs.change(job, "VERIFYING")

    def _verify(self, job: JobRecord) -> None:
        source = self._file(job)
        try:
            if not source.exists():
                raise BundleError("there is no bundle", which=source)
            found = self._store.install(
                source,
                self._trust,
                downgrade_to=job.allow_downgrade,
                progress=lambda done, total: self._tell(job, done / max(1, total)),
            )
            if job.sha256 not in ("", found.manifest.sha256):
                raise BundleError(
                    "another bundle than the one that was ordered",
                    which=found.text,
                    expected=f"sha256 {job.sha256[:16]}...",
                    got=f"{found.manifest.sha256[:16]}...",
                )
        except BundleError as error:
            self._forget_download(job)
            text = " ".join(str(error).split())
            raise _Ended("REJECTED", error.code, text) from error
        manifest = found.manifest
        self.jobs.change(
            job,
            "STAGED",
            bundle=found.name,
            name=manifest.name,
            model_version=manifest.version,
            release_counter=manifest.release_counter,
        )
        self._forget_download(job)

    def _self_test(self, job: JobRecord) -> None:
        candidate = self._opened(job)
        found = golden.read(self._store.version(job.bundle).folder)
        if found is None:
            if self._limits.golden_required:
                raise _Ended(
                    "FAILED", "GOLDEN_MISSING",
                    "the bundle has no golden set (export.bundle --golden), and release."
                    "golden_required asks for one",
                )  # fmt: skip
        else:

            def progress(done: int, total: int) -> None:
                self._may_go_on(job)
                self._tell(job, done / total)

            report = golden.run(candidate, *found, self._tolerance, progress)
            if report.fault is not None:
                raise _Ended("FAILED", "GOLDEN_FAILED", report.fault)
        self.jobs.change(job, "SHADOW", tally=Tally())

    def _shadow(self, job: JobRecord) -> None:
        wanted, candidate = self._limits.shadow_parts, self._opened(job)
        with self._watching("SHADOW"):
            while job.tally.parts < wanted:
                self._may_go_on(job)
                seen = self._next_part()
                if seen is None:
                    continue
                own = candidate.inspect_stacks(seen.job, seen.stacks, seen.calibrations).verdict
                tally = replace(
                    job.tally,
                    parts=job.tally.parts + 1,
                    different=job.tally.different + (own.outcome is not seen.verdict.outcome),
                )
                job = self.jobs.change(job, tally=tally)
                allowed = self._limits.shadow_disagree * wanted
                if tally.different > allowed:
                    text = (
                        f"{tally.different} of {tally.parts} live parts judged otherwise, at most "
                        f"{allowed:g} of {wanted} may be"
                    )
                    raise _Ended("FAILED", "SHADOW_DISAGREES", text)
                self._tell(job, tally.parts / wanted)
        active = self._store.active
        usual = statistics.median(self._usual) if len(self._usual) >= JUDGED_FROM else None
        self.jobs.change(
            job,
            "ACTIVATING",
            before="" if active is None else active.name,
            usual_ms=usual,
            shadow=job.tally,
            tally=Tally(),
        )

    def _activate(self, job: JobRecord) -> None:
        """Idempotent: after a power cut the pointer may be at the candidate already, or not."""
        version = self._store.version(job.bundle)
        if self._host.inspector().model.manifest.sha256 != version.manifest.sha256:
            candidate = self._opened(job)
            self._store.activate(job.bundle, self._trust)
            self._old = self._exchange(candidate, version.folder)
            self._candidate = None
        else:
            self._store.activate(job.bundle, self._trust)
        self.jobs.change(job, "TRIAL")

    def _trial(self, job: JobRecord) -> None:
        wanted, active = self._limits.trial_parts, self._store.active
        with self._watching("TRIAL"):
            while True:
                fault = trial_fault(job, self._limits)
                if active is None or active.name != job.bundle:  # by hand, while the station stood
                    fault = "another bundle was made the active one"
                elif self.jobs.asked_back(job):
                    fault = "taken back by a command"
                if fault is not None:
                    self._finish(job, "ROLLED_BACK", "TRIAL_FAILED", fault)
                    return
                if job.tally.parts >= wanted:
                    break
                if self._stop.is_set():
                    raise _Closing
                seen = self._next_part()
                if seen is None:
                    continue
                job = self.jobs.change(job, tally=_counted(job, seen.verdict, self._limits))
                self._tell(job, job.tally.parts / wanted)
        self._store.commit(job.bundle)
        self._store.prune(self._limits.keep)
        if self._old is not None:
            self._old[1].model.close()
            self._old = None
        self.jobs.change(job, "SUCCEEDED", detail=f"kept after {job.tally.parts} parts")
        self.jobs.prune()

    def _finish(self, job: JobRecord, state: State, code: str, detail: str) -> None:
        """End a deployment. One whose bundle may be active takes it back first."""
        job = self.jobs.find(job.id) or job
        if job.state in ("ACTIVATING", "TRIAL"):
            state = "ROLLED_BACK"
            try:
                self._take_back(job)
            except StationError as error:  # the station goes on with what it has, and says so
                detail = f"{detail}; and the bundle before did not come back: {error}"
                state = "FAILED"
        if self._candidate is not None:
            self._candidate[1].model.close()
            self._candidate = None
        if state in ("CANCELED", "TIMED_OUT", "FAILED"):
            self._forget_download(job)
        log.warning("deployment %s: %s %s", job.id, state, detail)
        self.jobs.change(job, state, code=code, detail=" ".join(detail.split())[:1000])
        self.jobs.prune()

    def _take_back(self, job: JobRecord) -> None:
        """The bundle before is active again: on disk, then in the station."""
        if not _may_go_back(job, self._store.active):
            return
        before = self._store.activate(job.before, self._trust, good=True)
        if self._host.inspector().model.manifest.sha256 == before.manifest.sha256:
            return
        known, self._old = self._old, None
        inspector = known[1] if known and known[0] == job.before else self._host.open(before.folder)
        _, failed = self._exchange(inspector, before.folder)
        failed.model.close()

    def _exchange(self, inspector: Inspector, folder: Path) -> tuple[str, Inspector]:
        """From the next part on the other one judges. Returns the one before, still open."""
        active = self._host.inspector()
        sizes = [inspector.layout.sheet_size, inspector.layout.surface_size]
        inspector.model.warm_up(sizes)
        self._host.use(inspector, folder)
        name = next(
            (
                version.name
                for version in self._store.versions()
                if version.manifest.sha256 == active.model.manifest.sha256
            ),
            "",
        )
        return name, active

    def _opened(self, job: JobRecord) -> Inspector:
        """The candidate, open; opened once."""
        if self._candidate is None or self._candidate[0] != job.bundle:
            folder = self._store.version(job.bundle).folder
            self._candidate = (job.bundle, self._host.open(folder))
        return self._candidate[1]

    def _watching(self, state: State) -> _Watch:
        return _Watch(self, state)

    def _next_part(self) -> Seen | None:
        try:
            return self._parts.get(timeout=0.2)
        except queue.Empty:
            return None

    def _tell(self, job: JobRecord, progress: float) -> None:
        """How far a state is, at most once a second: it is news, not a record."""
        now = time.monotonic()
        if now - self._told_at >= _TELL_S:
            self._told_at = now
            self._host.tell(job, progress)

    def _forget_download(self, job: JobRecord) -> None:
        if job.url and fetch.local(job.url) is None:
            self._file(job).unlink(missing_ok=True)


@dataclass
class _Watch:
    """Parts are handed over while the block runs."""

    deployer: Deployer
    state: State

    def __enter__(self) -> None:
        self.deployer._watched = self.state

    def __exit__(self, *_: object) -> None:
        self.deployer._watched = None
        while not self.deployer._parts.empty():
            self.deployer._parts.get()


def trial_fault(job: JobRecord, limits: ReleaseConfig) -> str | None:
    """Why the bundle on trial must go; None: it may stay, as far as it is known."""
    tally = job.tally
    if tally.parts < min(JUDGED_FROM, limits.trial_parts) or not tally.parts:
        return None
    for what, count, limit in (
        ("FAIL", tally.fail, limits.trial_fail_share),
        ("UNSURE or ERROR", tally.unsure, limits.trial_unsure_share),
        (f"over {limits.trial_slower:g} times as slow as usual", tally.slow, 0.5),
    ):
        if count / tally.parts >= limit:
            share = f"{100 * limit:g} %"
            return f"{count} of {tally.parts} parts {what}; from {share} on the bundle goes back"
    return None


def before_start(root: Path, trust: Trust, limits: ReleaseConfig) -> str | None:
    """Before a station opens its bundle: a start within a trial is counted, and one too many takes
    the bundle back. Returns what was done, for people. Raises BundleError."""
    if not is_store(root):
        return None
    store, jobs = BundleStore(root), Jobs(root / JOBS)
    job = jobs.current()
    if job is None or job.state != "TRIAL":
        return None
    job = jobs.change(job, restarts=job.restarts + 1)
    if job.restarts <= limits.trial_restarts:
        return None
    return _taken_back(
        store, jobs, job, trust, f"{job.restarts} starts of the station in its trial"
    )


def failed_start(root: Path, trust: Trust, error: StationError) -> str | None:
    """The station could not open its bundle. One on trial is taken back; then try again.

    Returns what was done, None when the error stands. Raises BundleError.
    """
    if not is_store(root):
        return None
    store, jobs = BundleStore(root), Jobs(root / JOBS)
    job = jobs.current()
    if job is None or job.state not in ("ACTIVATING", "TRIAL"):
        return None
    return _taken_back(store, jobs, job, trust, f"it does not open: {error}")


def _taken_back(
    store: BundleStore, jobs: Jobs, job: JobRecord, trust: Trust, why: str
) -> str | None:
    if not _may_go_back(job, store.active):
        return None
    store.activate(job.before, trust, good=True)
    detail = " ".join(why.split())[:1000]
    jobs.change(job, "ROLLED_BACK", code="TRIAL_FAILED", detail=detail)
    return f"bundle {job.bundle} was taken back: {why}"


def _may_go_back(job: JobRecord, active: Version | None) -> bool:
    """Whether its bundle is the active one. Another one that a person made active stays."""
    if active is None or job.before in ("", job.bundle):
        return False
    return active.name == job.bundle


def _counted(job: JobRecord, verdict: Verdict, limits: ReleaseConfig) -> Tally:
    tally, usual = job.tally, job.usual_ms
    slow = usual is not None and _duration(verdict) > usual * limits.trial_slower
    return replace(
        tally,
        parts=tally.parts + 1,
        fail=tally.fail + (verdict.outcome is Outcome.FAIL),
        unsure=tally.unsure + (verdict.outcome in (Outcome.UNSURE, Outcome.ERROR)),
        slow=tally.slow + slow,
    )


def _duration(verdict: Verdict) -> float:
    """Milliseconds without the capture, which no bundle has a part in."""
    timings = verdict.timings_ms
    return timings.get("total", 0.0) - timings.get("capture", 0.0)


def _safe(job_id: str) -> str:
    """Of a file of the transfer: an id may hold a colon."""
    return job_id.replace(":", "_").strip(".") or "job"
