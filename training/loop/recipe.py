"""How a line's bundle is made: `loop.yaml` beside the line file. Every key has a default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import yaml

from forge_station.contract import record
from forge_station.contract.error import ContractError
from forge_station.contract.record import Count, Limit, NotNegative, Probability
from training.loop.error import LineError

FILE = "loop.yaml"
Positive = Annotated[int, Limit(1)]


@dataclass(frozen=True)
class Synth:
    """Synthetic pools (training.synth), made anew each unless `recipe.data` has them."""

    sheets: Count = 500
    surfaces: Count = 500
    closer: Count = 250
    """Of the surfaces: second looks, a pool of their own."""
    validation: Positive = 250
    seed: Count = 0
    shard: Positive = 50


@dataclass(frozen=True)
class Sft:
    """Supervised fine-tuning (training.sft)."""

    steps: Positive = 150
    batch: Positive = 32
    surface: Probability = 0.85
    """Share of the steps on surfaces; the rest are marks sheets."""
    labelled: Probability = 0.3
    """Share of a surface batch that people labelled; the rest keeps what the model knew."""
    rate: NotNegative = 0.3
    """Of the learning rates of training from scratch."""
    decay: Probability = 0.6
    validate: Positive = 250
    state_minutes: NotNegative = 1.0
    """Between two states to resume from, with a validation each."""
    seed: Count = 0


@dataclass(frozen=True)
class Grpo:
    """GRPO (training.grpo) after it. `prompts` 0: left out."""

    prompts: Count = 64
    batch: Positive = 16
    group: Annotated[int, Limit(2)] = 4
    rate: NotNegative = 0.1
    alarm_gate: NotNegative = 0.02
    validate: Positive = 250
    state_steps: Positive = 10


@dataclass(frozen=True)
class Parts:
    """Parts whose truth is known, for limits, gate, golden set and certificate."""

    cases: str | None = None
    """Folder with cases.jsonl (training/CASES.md); None: simulated ones are made."""
    count: Count = 12
    """Simulated cases a task, where no folder is named."""
    seed: Positive = 20261201
    hold: Probability = 0.25
    """Share of the labelled parts that does not train: limits and certificate rest on them."""


@dataclass(frozen=True)
class Claim:
    """Operating point (training.calibrate). `suggest`: limits on these parts, not `thresholds`."""

    suggest: bool = False
    suggest_escape: Probability = 0.05
    suggest_overkill: Probability = 0.02
    folds: Count = 0
    """From 2 on: limits from the labelled parts that train, each judged by a model that was trained
    without it; so many trainings more."""
    before: str | None = None
    """Folder of the bundle in use: let through the share of defective parts that it lets, on the
    same parts, in place of `suggest_escape`."""
    escape: Probability = 0.1
    confidence: Probability = 0.95
    overkill: Probability = 0.02
    together: bool = False
    promised: str | None = None
    """File of the smallest promised sizes."""
    label_protocol: str = ""
    """How the truth of real parts was found, in words; a certificate of real parts needs it."""
    ledger: str | None = None
    """File of looks at the parts, one for all releases of the line; default: in --out."""


@dataclass(frozen=True)
class Recipe:
    """All that `python -m training.line` decides by, besides the command line."""

    name: str | None = None
    """Of the bundle; default: that of the line."""
    version: str = "0.1.0"
    precision: str = "int8"
    golden: Positive = 8
    threads: Positive = 2
    checkpoint: str | None = None
    """Folder of training.sft to start from; --checkpoint wins."""
    data: tuple[str, ...] = ()
    """Folders of pools that the checkpoint was trained on: trained on again, against forgetting."""
    thresholds: Mapping[str, float] = field(default_factory=dict)
    synth: Synth = Synth()
    sft: Sft = Sft()
    grpo: Grpo = Grpo()
    parts: Parts = Parts()
    calibrate: Claim = Claim()


def line_file(line: Path) -> Path:
    """The line's YAML, of the file or its folder. LineError where there is none."""
    path = line / "line.yaml" if line.is_dir() else line
    if not path.is_file():
        raise LineError(
            "no line", which=path, expected="a line file, or a folder with line.yaml",
            action="station_config/README.md says what is in it",
        )  # fmt: skip
    return path


def read(line: Path) -> tuple[Recipe, Path]:
    """The recipe beside a line file, or the defaults; paths in it are seen from its folder."""
    folder = line_file(line).parent
    path = folder / FILE
    if not path.is_file():
        return Recipe(), folder
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        return record.read(Recipe, data or {}), folder
    except (OSError, yaml.YAMLError, ContractError, ValueError) as error:
        raise LineError("the recipe cannot be read", which=path, got=error) from error
