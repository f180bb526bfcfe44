"""A deployment without a broker: a bundle file that a person brought to the station.

The order is left in the store, verified; the station, running or at its next start, finds it there
and tries it out like any other (`deploy.py`). So a stick gets in nothing that a command would not.
"""

from __future__ import annotations

import time
from pathlib import Path

from forge_station.bundles.archive import Progress
from forge_station.bundles.jobs import JobRecord, Jobs
from forge_station.bundles.store import JOBS, BundleStore
from forge_station.bundles.trust import Trust
from forge_station.errors import BundleError


def order(
    root: Path,
    source: Path,
    job_id: str,
    trust: Trust,
    *,
    sha256: str = "",
    progress: Progress = lambda _done, _all: None,
) -> JobRecord:
    """Verify the bundle file into the store at `root` and leave a deployment of it there, STAGED.

    The same id again is the same deployment. What is refused is a deployment too, REJECTED: its
    record goes back on the stick. `sha256`: of the manifest that is wanted. Raises BundleError
    where nothing can be noted: no store, or another deployment under way.
    """
    store = BundleStore(root)
    jobs = Jobs(store.root / JOBS)
    known = jobs.find(job_id)
    if known is not None:
        return known
    current = jobs.current()
    if current is not None:
        raise BundleError(
            "another deployment is under way",
            which=current.id,
            got=current.state,
            action="wait for its end, then bring this one again",
        )
    job = JobRecord(job_id, source.absolute().as_uri(), time.time(), sha256=sha256)
    try:
        found = store.install(source, trust, progress=progress)
        if sha256 not in ("", found.manifest.sha256):
            raise BundleError(
                "another bundle than the one that was ordered",
                which=found.text,
                expected=f"sha256 {sha256[:16]}...",
                got=f"{found.manifest.sha256[:16]}...",
            )
    except BundleError as error:
        text = " ".join(str(error).split())[:1000]
        return jobs.change(job, "REJECTED", code=error.code, detail=text)
    return jobs.change(
        job,
        "STAGED",
        bundle=found.name,
        name=found.manifest.name,
        model_version=found.manifest.version,
        release_counter=found.manifest.release_counter,
    )
