"""Random nano checkpoints as training writes them, one of each shape, made once a session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import nano_checkpoint


@pytest.fixture(scope="session")
def nano(tmp_path_factory) -> Path:
    """The nano shape: windows of 56 px only, untied, word tokenizer."""
    folder = tmp_path_factory.mktemp("nano")
    tokenizer = nano_checkpoint.word_tokenizer()
    nano_checkpoint.write_checkpoint(folder, tokenizer)
    return folder


@pytest.fixture(scope="session")
def large(tmp_path_factory) -> Path:
    """What the 3B shape has: windows of 112 px, full blocks, shared keys, tied, BPE, bfloat16."""
    folder = tmp_path_factory.mktemp("large")
    tokenizer = nano_checkpoint.byte_tokenizer()
    nano_checkpoint.write_checkpoint(
        folder,
        tokenizer,
        window=112,
        full_blocks=(1,),
        kv_heads=1,
        tied=True,
        seed=1,
        depth=3,
        dtype="BF16",
        shards=3,
    )
    return folder


@pytest.fixture(scope="session")
def openvino_python() -> str:
    """A Python that has OpenVINO: FORGE_OPENVINO_PYTHON, or this one. Else the test is skipped.

    Its packages do not fit beside ours, so it is not among them.
    """
    python = os.environ.get("FORGE_OPENVINO_PYTHON", sys.executable)
    found = subprocess.run(
        [python, "-c", "import openvino"], capture_output=True, check=False
    ).returncode
    if found != 0:
        pytest.skip("no OpenVINO: pip install openvino, and name its FORGE_OPENVINO_PYTHON")
    return python
