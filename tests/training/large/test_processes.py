"""Several processes and a killed one: the same curve, the same weights. Starts real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.training.large import small

WORKER = Path(__file__).with_name("worker.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def environment(repository: Path) -> dict[str, str]:
    paths = os.pathsep.join(str(repository / name) for name in ("edge", "."))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def torchrun(repository: Path, *words: str) -> str:
    """Output of two gloo processes of the worker."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*start, str(WORKER), *words],
        cwd=repository,
        env=environment(repository),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def curve(out: Path) -> tuple[list[float], list[float]]:
    """Losses of the steps and of the validations."""
    rows = [json.loads(line) for line in (out / "curve.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    return losses, [row["eval_loss"] for row in rows if "eval_loss" in row]


@pytest.fixture(scope="module")
def alone(checkpoint, example_file, tmp_path_factory) -> Path:
    """One process, micro-batches of one, two of them a step."""
    out = tmp_path_factory.mktemp("alone") / "run"
    small.command.main(small.words(checkpoint, example_file, out))
    return out


def assert_close(left: Path, right: Path) -> None:
    """Equal but for rounding. Keys have no use for a bias: its gradient is noise, and AdamW makes
    steps of full size of it."""
    first, second = small.weights(left / "merged"), small.weights(right / "merged")
    assert first.keys() == second.keys()
    apart = {name: float((first[name] - second[name]).abs().mean()) for name in first}
    assert not {
        name: value for name, value in apart.items() if value > 1e-5 and "k_proj.bias" not in name
    }


def test_two_processes_have_the_curve_of_one(
    checkpoint, example_file, repository, alone, tmp_path
) -> None:
    """Data parallel; and asked to shard on a CPU, where accelerate would not, the run refuses."""
    plain = small.words(checkpoint, example_file, tmp_path / "ddp")
    sharded = small.words(checkpoint, example_file, tmp_path / "no", "--fsdp", "--max-steps", "1")
    said = torchrun(repository, "--again", " ".join(sharded), *plain)
    assert curve(tmp_path / "ddp")[0] == pytest.approx(curve(alone)[0], rel=1e-4)
    assert curve(tmp_path / "ddp")[1] == pytest.approx(curve(alone)[1], rel=1e-4)
    assert_close(tmp_path / "ddp", alone)
    assert "the model is not sharded: expected FSDP2" in said
    assert not (tmp_path / "no" / "merged").exists()


def test_two_shards_have_the_curve_of_one_process(
    checkpoint, example_file, repository, alone, tmp_path
) -> None:
    """FSDP2: the run itself checks that every parameter is a shard."""
    words = small.words(checkpoint, example_file, tmp_path / "fsdp", "--fsdp")
    torchrun(repository, "--shim", *words)
    assert curve(tmp_path / "fsdp")[0] == pytest.approx(curve(alone)[0], rel=1e-4)
    assert curve(tmp_path / "fsdp")[1] == pytest.approx(curve(alone)[1], rel=1e-4)
    assert_close(tmp_path / "fsdp", alone)


def test_a_killed_run_resumes_to_the_weights_of_a_whole_one(
    checkpoint, example_file, repository, tmp_path
) -> None:
    more = ("--max-steps", "24", "--every", "4", "--patience", "99")
    small.command.main(small.words(checkpoint, example_file, tmp_path / "whole", *more))
    out = tmp_path / "killed"
    words = small.words(checkpoint, example_file, out, *more)
    running = subprocess.Popen(
        [sys.executable, str(WORKER), *words],
        cwd=repository,
        env=environment(repository),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not (out / "checkpoint-8" / "optimizer.pt").exists():
            assert running.poll() is None, "the run ended before it could be killed"
            time.sleep(0.01)
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
    assert not (out / "merged").exists()
    small.command.main([*words, "--resume"])
    small.assert_same(small.weights(out / "merged"), small.weights(tmp_path / "whole" / "merged"))
    assert torch.isfinite(torch.tensor(curve(out)[0])).all()
