"""The same shards from every backend, whatever fails, dies or is interrupted on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("numba", reason="training needs the extra training")

from training.data import engine, pool, shards

RECIPE = pool.Recipe("sheet", seed=5, shard=1)
SHARDS = 3


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("0*"))}


def run(folder: Path, backend: engine.Backend, jobs: list[int]) -> list[engine.Done]:
    return engine.run(partial(pool.make, RECIPE, folder), jobs, backend, samples=1, quiet=True)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one process makes, shard by shard."""
    folder = tmp_path_factory.mktemp("alone") / "sheet"
    assert run(folder, engine.serial, list(range(SHARDS))) == []
    return contents(folder)


def test_processes_make_the_same_bytes_as_one(alone, tmp_path):
    folder = tmp_path / "sheet"
    assert run(folder, partial(engine.processes, workers=2), [2, 0, 1]) == []
    assert contents(folder) == alone


@pytest.fixture
def two_nodes() -> Iterator[str]:
    """Address of a local Ray cluster of two nodes with one core each."""
    # Read when Ray is imported. The last keeps the cluster on loopback, on Linux too.
    os.environ.update(
        RAY_USAGE_STATS_ENABLED="0",
        RAY_AUTH_MODE="disabled",
        RAY_worker_niceness="0",  # else 15: starved where other work runs
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
    )
    pytest.importorskip("ray", reason="a cluster needs the extra cluster")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "node_ip_address": "127.0.0.1"}
    # Not in tmp_path: Ray's sockets have room for short paths only.
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        os.environ["RAY_TMPDIR"] = folder
        own = Path(folder) / "ray"
        own.mkdir()
        cluster = Cluster(
            initialize_head=True,
            head_node_args={**node, "include_dashboard": False, "temp_dir": str(own)},
        )
        cluster.add_node(**node)
        yield cluster.address
        cluster.shutdown()


# Ray leaves sockets to the garbage collector and warns of its own coming changes.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(300)
def test_a_ray_cluster_of_two_workers_makes_the_same_bytes_as_one(alone, two_nodes, tmp_path):
    folder = tmp_path / "sheet"
    assert run(folder, partial(engine.on_ray, workers=2, address=two_nodes), [0, 1, 2]) == []
    assert contents(folder) == alone


def test_without_ray_its_backend_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(engine.EngineError, match=r"forge-station\[cluster\]"):
        list(engine.on_ray(print, [0], 1))


def some_fail(number: int) -> None:
    if number % 2:
        raise ValueError(f"no luck with {number}")


def test_a_job_that_fails_is_named_with_its_seed_and_the_others_go_on(capsys):
    failed = engine.run(
        some_fail, [0, 1, 2, 3], engine.serial, samples=10, seed_of=lambda n: f"[5, {n}]"
    )
    assert [done.number for done in failed] == [1, 3]
    said = capsys.readouterr().err
    assert "shard 00001 (seed [5, 1]): ValueError: no luck with 1" in said
    assert "in some_fail" in said, "the traceback"
    assert "20/40" in said


def test_a_worker_that_is_killed_fails_its_own_job_only():
    quiet = [signal.SIGWINCH, signal.SIGCHLD, signal.SIGURG]
    jobs = [int(number) for number in (quiet[0], signal.SIGKILL, *quiet[1:])]
    done = list(engine.processes(signal.raise_signal, jobs, 2))
    assert sorted(item.number for item in done) == sorted(jobs)
    assert {item.number: item.error for item in done if item.error} == {
        int(signal.SIGKILL): "its worker died (killed, or out of memory)"
    }


def until(what: Callable[[], bool], seconds: float = 90.0) -> None:
    limit = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < limit
        time.sleep(0.05)


def children(parent: int) -> list[int]:
    listed = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(word) for word in listed.read_text().split()]


def running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_leaves_whole_shards_and_no_worker_and_goes_on(alone, tmp_path, how):
    words = ["sheet", "--out", tmp_path, "--count", 400, "--shard", 1, "--seed", 5, "--jobs", 1]
    command = [sys.executable, "-m", "training.synth", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    folder = tmp_path / "sheet"
    # Tests that run in the background inherit an ignored SIGINT.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, preexec_fn=heed)
    until(lambda: len(shards.numbers(folder)) >= 1)
    workers = children(process.pid)
    process.send_signal(how)
    _, said = process.communicate(timeout=90)
    assert process.returncode == (-signal.SIGKILL if how == signal.SIGKILL else 130)
    until(lambda: not any(map(running, workers)))
    assert how == signal.SIGKILL or "the same command goes on" in said.decode()
    made = shards.numbers(folder)
    assert 0 < len(made) < 400
    assert run(folder, engine.serial, [n for n in range(SHARDS) if n not in made]) == []
    shards.without_partials(folder)
    assert alone.items() <= contents(folder).items()


def test_too_small_a_disk_is_refused_before_anything_is_made(monkeypatch, tmp_path):
    monkeypatch.setattr(engine.shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * 10**9))
    engine.refuse_small_disk(tmp_path / "not" / "there" / "yet", 10**9)
    with pytest.raises(engine.EngineError, match=r"expected 2\.10 GB free.*got 2\.00 GB"):
        engine.refuse_small_disk(tmp_path, 2 * 10**9)
