"""A random bundle and a few simulated cases, made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from export.bundle import Release, write_bundle
from forge_station.opening import open_inspector
from forge_station.pipeline import Inspector
from tests import nano_checkpoint
from training.cases import write_cases
from training.evaluation.case_files import TASKS

SEED = 4711


@pytest.fixture(scope="session")
def inspector(tmp_path_factory: pytest.TempPathFactory) -> Inspector:
    """A float32 bundle of random weights that can read and write any text."""
    folder = tmp_path_factory.mktemp("evaluate")
    tokenizer = nano_checkpoint.byte_tokenizer()
    nano_checkpoint.write_checkpoint(folder / "checkpoint", tokenizer, depth=1)
    write_bundle(folder / "checkpoint", folder / "bundle", Release("nano", "0.1.0", 1, "fp32"))
    return open_inspector(folder / "bundle", checks_alone=True)


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A case of every task, through the full decode path; the surface has a defect."""
    folder = tmp_path_factory.mktemp("cases")
    write_cases(folder, TASKS, 1, SEED, 1, quiet=True)
    return folder
