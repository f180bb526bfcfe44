"""Small examples and runs of the large-model trainers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from forge_station.contract import tasks
from training import sft as command
from training.data import conversations
from training.data.examples import Example

ONE_GRID = np.zeros((16, 16), bool)
ONE_GRID[4, [4, 5]] = True
EMPTY = np.zeros((16, 16), bool)


def surface_example(name: str, split: str = "train", *, defect: bool = True) -> Example:
    """One part: class, score and the grid of one view."""
    grid = ONE_GRID if defect else EMPTY
    facts = tasks.surface_facts("hex_nut M8", (13.0, 13.0, 6.8))
    messages = conversations.surface(
        facts, "dent" if defect else "normal", 4 if defect else 10, {"front": grid}
    )
    return Example(name, messages, (f"{name}.png",), split=split)  # type: ignore[arg-type]


def sheet_example(name: str, split: str = "train") -> Example:
    """Two marks, read in turn one and judged in turn two."""
    readings = {"A": "hex_bolt M8x30", "B": "hex_nut M8"}
    sizes = {"A": (30.0, 13.0, 13.0), "B": (13.0, 13.0, 6.8)}
    judge = (tasks.judge_text("batch", None), "A: right\nB: wrong\nanswer: B\nscore: 7/10")
    messages = conversations.sheet(tasks.sheet_facts(sizes, 0.5), readings, judge)
    return Example(name, messages, (f"{name}.png",), split=split)  # type: ignore[arg-type]


def words(checkpoint: Path, example_file: Path, out: Path, *more: str) -> list[str]:
    """Command line of a small run: full fine-tuning, batch 2, four steps."""
    given = f"--model {checkpoint} --examples {example_file} --out {out} --method full --batch 2"
    given += " --max-steps 4 --every 2 --lr 1e-3"
    return [*given.split(), *more]


def run(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> dict:
    """Call `python -m training.sft`; the JSON object of its last line."""
    command.main(arguments)
    return dict(json.loads(capsys.readouterr().out.strip().split("\n")[-1]))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint folder, by the names they are stored under."""
    return load_file(str(folder / "model.safetensors"))


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """The same names, and every tensor equal to the last bit."""
    assert left.keys() == right.keys()
    differing = [name for name in left if not torch.equal(left[name], right[name])]
    assert not differing
