"""Runs many independent jobs, each of which writes one shard: here, in processes, or on Ray.

A job is a number; `make(number)` writes what belongs to it, whole or not at all, and takes its
randomness from that number alone. So the files do not depend on the backend, on how many workers
there are, or on interruptions, and a run that is started again makes what is missing.

    serial(make, jobs)           in this process: for debugging
    processes(make, jobs, n)     n spawned processes on this machine (the default)
    on_ray(make, jobs, address)  a Ray cluster, or n local Ray workers; extra `cluster`

A job that fails is reported with its error and the others go on. Knows nothing of pictures.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from forge_station.contract.error import StationError

Make = Callable[[int], None]
"""Writes the shard of a number. Must be picklable: a function of a module, or a partial of one."""


class EngineError(StationError):
    """A run that cannot start."""


@dataclass(frozen=True)
class Done:
    """One finished job; `error` is empty when its shard is there."""

    number: int
    error: str = ""
    detail: str = ""


Backend = Callable[[Make, Sequence[int]], Iterator[Done]]


def attempt(make: Make, number: int) -> Done:
    """Run one job; an exception becomes its `error` and, with the traceback, its `detail`."""
    try:
        make(number)
    except Exception as error:  # noqa: BLE001 - any failure of a job is reported, the rest goes on
        return Done(number, f"{type(error).__name__}: {error}", traceback.format_exc())
    return Done(number)


def serial(make: Make, jobs: Sequence[int]) -> Iterator[Done]:
    """One after the other in this process."""
    return (attempt(make, number) for number in jobs)


def processes(make: Make, jobs: Sequence[int], workers: int) -> Iterator[Done]:
    """In `workers` spawned processes. A worker that dies fails the jobs in hand, not the run."""
    todo = list(reversed(jobs))
    while todo:
        # One job in hand a worker: when a worker dies, we know which jobs were lost with it.
        in_hand: dict[concurrent.futures.Future[Done], int] = {}
        pool = concurrent.futures.ProcessPoolExecutor(
            workers, multiprocessing.get_context("spawn"), initializer=_start_worker
        )
        try:
            while todo or in_hand:
                while todo and len(in_hand) < workers:
                    number = todo.pop()
                    in_hand[pool.submit(attempt, make, number)] = number
                for future in concurrent.futures.wait(in_hand, None, "FIRST_COMPLETED").done:
                    done = future.result()
                    del in_hand[future]
                    yield done
        except BrokenProcessPool:
            # A broken pool loses what every worker had in hand: by itself, each job is tried again.
            for number in in_hand.values():
                yield _alone(make, number)
        finally:
            for child in multiprocessing.active_children():
                child.terminate()
            pool.shutdown(cancel_futures=True)


def _alone(make: Make, number: int) -> Done:
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context, initializer=_start_worker) as pool:
        try:
            return pool.submit(attempt, make, number).result()
        except BrokenProcessPool:
            return Done(number, "its worker died (killed, or out of memory)")


def _start_worker() -> None:
    """Ctrl-C ends a worker without a word; and when the parent is killed, it ends as well."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def on_ray(
    make: Make, jobs: Sequence[int], workers: int, address: str | None = None
) -> Iterator[Done]:
    """On a Ray cluster at `address` ("auto", "host:port"), else on `workers` local Ray workers.

    Every node needs this checkout and the pool's folder at the same path (shared storage), and the
    environment of the extras `training` and `cluster`. Without an address Ray listens on loopback
    only, has no dashboard, reports nothing and keeps its files in a temporary folder.
    """
    # Read when Ray is imported: no usage report, no token file in the home folder.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    if address is None:  # despite its name, on every system: addresses of this host are loopback
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        import ray
    except ImportError:
        raise EngineError(
            "the backend ray is not installed",
            action="pip install 'forge-station[cluster]', or use --backend processes",
        ) from None
    paths = os.pathsep.join(path for path in sys.path if path)
    runtime = {"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}}
    with contextlib.ExitStack() as stack:
        if address is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-"))
            ray.init(
                num_cpus=workers,
                include_dashboard=False,
                object_store_memory=80 * 2**20,
                _node_ip_address="127.0.0.1",
                _temp_dir=folder,
                runtime_env=runtime,
                log_to_driver=False,
                configure_logging=False,
            )
        else:
            ray.init(address=address, runtime_env=runtime, log_to_driver=False)
        stack.callback(ray.shutdown)
        remote = ray.remote(num_cpus=1, max_retries=1)(attempt)
        todo = list(reversed(jobs))
        in_hand: dict[Any, int] = {}
        # Two jobs for every core that the cluster has now: it may grow while we run.
        while todo or in_hand:
            most = 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))
            while todo and len(in_hand) < most:
                number = todo.pop()
                in_hand[remote.remote(make, number)] = number
            for reference in ray.wait(list(in_hand), num_returns=1)[0]:
                number = in_hand.pop(reference)
                try:
                    yield ray.get(reference)
                except ray.exceptions.RayError as error:
                    yield Done(number, f"lost on the cluster: {type(error).__name__}")


def refuse_small_disk(folder: Path, needed: int) -> None:
    """EngineError where `folder`'s disk has not `needed` bytes and a twentieth of it to spare."""
    place = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < needed * 1.05:
        raise EngineError(
            "the disk is too small",
            which=folder,
            expected=f"{needed * 1.05 / 1e9:.2f} GB free for what is missing",
            got=f"{free / 1e9:.2f} GB",
            action="free some space, take another --out, or ask for a smaller --count",
        )


def run(
    make: Make,
    jobs: Sequence[int],
    backend: Backend,
    *,
    samples: int,
    made: int = 0,
    seed_of: Callable[[int], str] = str,
    name: str = "samples",
    quiet: bool = False,
) -> list[Done]:
    """Do `jobs` of `samples` each, with a progress bar; returns those that failed.

    `made`: jobs done earlier, for the bar. `seed_of`: how a failed job's randomness is named, so
    that it can be run again by itself.
    """
    failed: list[Done] = []
    total = (made + len(jobs)) * samples
    bar = tqdm(
        total=total, initial=made * samples, unit="sample", desc=name, disable=quiet, smoothing=0.1
    )
    with bar:
        for done in backend(make, jobs):
            if done.error:
                failed.append(done)
                text = f"shard {done.number:05d} (seed {seed_of(done.number)}): {done.error}"
                bar.write(f"{text}\n{done.detail}".rstrip(), file=sys.stderr)
            else:
                bar.update(samples)
    return failed
