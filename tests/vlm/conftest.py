"""Bundles of random nano checkpoints, written once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from export.bundle import Release, write_bundle
from forge_station.vlm.model import VisionLanguageModel
from tests import nano_checkpoint


@pytest.fixture(scope="session")
def bundle(tmp_path_factory) -> Path:
    """A float32 bundle with the word tokenizer."""
    folder = tmp_path_factory.mktemp("nano")
    tokenizer = nano_checkpoint.word_tokenizer()
    nano_checkpoint.write_checkpoint(folder / "checkpoint", tokenizer)
    write_bundle(folder / "checkpoint", folder / "bundle", Release("nano", "0.1.0", 1, "fp32"))
    return folder / "bundle"


@pytest.fixture(scope="session")
def model(bundle):
    with VisionLanguageModel.open(bundle) as opened:
        yield opened
