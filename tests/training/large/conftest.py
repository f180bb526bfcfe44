"""A tiny Qwen2.5-VL checkpoint of random weights and a file of examples, made once a session."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("trl", reason="large models need the extra training")

import torch
from PIL import Image

from tests import nano_checkpoint
from tests.training.large.small import sheet_example, surface_example
from training.data import examples
from training.large.processor import VisionTextProcessor, load_processor


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Of the session: runs that are made once must be as repeatable as those they are held to."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights; a byte-level tokenizer that reads and writes any text."""
    folder = tmp_path_factory.mktemp("large") / "base"
    nano_checkpoint.write_checkpoint(folder, nano_checkpoint.byte_tokenizer(), depth=1, tied=True)
    return folder


@pytest.fixture(scope="session")
def processor(checkpoint: Path) -> VisionTextProcessor:
    return load_processor(str(checkpoint))


@pytest.fixture(scope="session")
def example_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six examples to learn, two held out; pictures of 56 x 56 and 84 x 56 px."""
    folder = tmp_path_factory.mktemp("examples")
    made = [surface_example(f"s{n}", defect=n % 2 == 0) for n in range(4)]
    made += [sheet_example(f"m{n}") for n in range(2)]
    made += [surface_example("v0", "val"), surface_example("v1", "val", defect=False)]
    rng = np.random.default_rng(0)
    for number, one in enumerate(made):
        wide = 84 if number % 3 == 0 else 56
        picture = rng.integers(0, 256, (56, wide, 3), dtype=np.uint8)
        Image.fromarray(picture).save(folder / one.images[0])
    examples.write(folder / examples.FILE, made)
    return folder / examples.FILE
