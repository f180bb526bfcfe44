"""The two commands of the README, as far as they can be looked at without installing anything."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


OF_THE_CALLER = ("PARTS", "STATION", "FAULTS_ARGS", "ORT")
"""Make hands the variables of its command line on; these tests may run under a make themselves."""


def dry_run(repository: Path, *arguments: str) -> str:
    """What make would do in a fresh clone (every target counts as out of date)."""
    outside = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("MAKE") and key not in OF_THE_CALLER
    }
    done = subprocess.run(
        ["make", "--always-make", "--dry-run", *arguments],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=30,
        env=outside,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_demo_installs_no_training_framework_and_passes_the_number_of_parts(repository):
    commands = dry_run(repository, "demo", "PARTS=3")
    assert "-e '.[demo]'" in commands
    assert "torch" not in commands and "transformers" not in commands
    assert "demo --station station_config/demo/station.yaml --parts 3" in commands


def test_the_failure_matrix_takes_arguments(repository):
    assert "-m tests.mes.faults --rows 1" in dry_run(repository, "faults", "FAULTS_ARGS=--rows 1")


def test_the_demo_inspects_twelve_parts_by_default(repository):
    assert "--parts 12" in dry_run(repository, "demo")


def test_the_tests_install_torch_before_what_needs_it(repository):
    commands = dry_run(repository, "test")
    assert commands.index("'torch==2.13.0'") < commands.index("export,training,cluster,dev]")
    assert "-m pytest" in commands


def test_help_is_the_first_target(repository):
    done = subprocess.run(["make"], cwd=repository, capture_output=True, text=True, timeout=30)
    assert "make demo" in done.stdout and "make test" in done.stdout


def test_ci_runs_the_tests_and_skips_nothing_for_a_missing_package(repository):
    script = repository / ".ci/run"
    assert os.access(script, os.X_OK)
    lines = script.read_text(encoding="utf-8").splitlines()
    assert lines.index("export CI=1") < lines.index("make test")


def test_the_edge_tests_take_the_release_asked_for_and_no_training_framework(repository):
    commands = dry_run(repository, "test-edge", "ORT=1.23.2")
    assert "'onnxruntime==1.23.2'" in commands
    assert "torch==" not in commands and "transformers" not in commands
    assert "tests/vlm" in commands and "tests/training" not in commands
    assert "onnxruntime==" not in dry_run(repository, "test-edge")
