"""Random nano checkpoints as training writes them, one of each shape, made once a session."""

from __future__ import annotations

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
