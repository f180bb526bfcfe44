"""GRPO as a release sees it: figures before and after, an alarm gate, and the same start with SFT.

`train` is one run that ends in a checkpoint folder; it refuses to write one whose clean alarms
rose. `trial` runs GRPO and equal extra SFT from the same start for several seeds and compares them
in pairs. Both measure with `validate.surface_figures` on the pool `surface-val`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from training.nano import grpo
from training.nano import model as nano
from training.nano.answers import Vision
from training.nano.grpo import Settings
from training.nano.pools import SurfacePool
from training.nano.validate import surface_figures
from training.rewards import RewardError

ALARMS = ("clean_alarms_grid", "clean_alarms_class")
Figures = dict[str, float]


class _Lab:
    """Pools, and vision tokens where the tower is frozen: the same for every run of a start."""

    def __init__(self, data: Path, init: Path, settings: Settings, count: int) -> None:
        self.init, self.count = init, count
        self.pool, self.held = (SurfacePool.open(data, name) for name in ("surface", "surface-val"))
        self.start = grpo.load(init, settings)
        frozen = not settings.vision
        self.seen = Vision(self.start.forward, self.pool, frozen=True) if frozen else None
        self.held_seen = Vision(self.start.forward, self.held, frozen=True) if frozen else None
        self.before = self.figures(self.start)

    def figures(self, trainer: Any) -> Figures:
        return surface_figures(trainer.model, self.held, self.count, vision=self.held_seen)

    def run(self, out: Path, settings: Settings, every: int, resume: bool) -> tuple[Any, Figures]:
        trainer = grpo.load(self.init, settings)
        last = grpo.run(
            trainer, self.pool, out, settings, resume=resume, every=every, vision=self.seen
        )
        return trainer, {**self.figures(trainer), "cpu_s": last["cpu_s"], "steps": last["step"]}


def train(
    data: Path,
    init: Path,
    out: Path,
    settings: Settings,
    *,
    resume: bool = False,
    every: int = 25,
    validate: int = 500,
    alarm_gate: float = 0.02,
) -> dict[str, Any]:
    """One run; a Hugging Face folder at the end unless clean alarms rose above the gate."""
    lab = _Lab(data, init, settings, validate)
    trainer, after = lab.run(out, settings, every, resume)
    done = {"before": lab.before, "after": after, "settings": asdict(settings)}
    _write(out / "figures.json", done)
    for name in ALARMS:
        if after[name] > lab.before[name] + alarm_gate:
            raise RewardError(
                "GRPO raised the alarms on clean parts, so no checkpoint is written",
                which=f"{name} on {lab.count} validation samples",
                expected=f"at most {lab.before[name] + alarm_gate:.3f}",
                got=f"{after[name]:.3f}",
                action="raise clean_share, lower rate, or allow more with --alarm-gate",
            )
    card_file = init / "training_card.json"
    card = json.loads(card_file.read_text()) if card_file.exists() else {}
    nano.save_checkpoint(trainer.model, out, {**card, "grpo": done})
    return done


def trial(
    data: Path,
    init: Path,
    out: Path,
    settings: Settings,
    seeds: Sequence[int],
    *,
    sft_prompts: int | None = None,
    every: int = 25,
    validate: int = 500,
) -> dict[str, Any]:
    """GRPO and SFT from one start, a run each a seed; finished runs are not repeated.

    The SFT arm sees the same prompts at the same rate, or `sft_prompts` of them for equal time.
    """
    lab = _Lab(data, init, settings, validate)
    arms: dict[str, list[Figures]] = {"grpo": [], "sft": []}
    for seed in seeds:
        ours = replace(settings, seed=seed, control="")
        theirs = replace(ours, control="sft", prompts=sft_prompts or ours.prompts)
        for arm, chosen in (("grpo", ours), ("sft", theirs)):
            folder = out / f"{arm}-{seed}"
            file = folder / "figures.json"
            if not file.exists():
                _, figures = lab.run(folder, chosen, every, True)
                _write(file, figures)
            arms[arm].append(json.loads(file.read_text()))
    done: dict[str, Any] = {"before": lab.before}
    done |= {arm: mean_of(runs) for arm, runs in arms.items()}
    done["grpo_less_sft"] = paired(arms["grpo"], arms["sft"])
    _write(out / "trial.json", {**done, "runs": arms, "settings": asdict(settings)})
    return done


def mean_of(runs: Sequence[Figures]) -> Figures:
    """Mean of each figure over runs."""
    return {name: round(float(np.mean([run[name] for run in runs])), 4) for name in runs[0]}


def paired(first: Sequence[Figures], second: Sequence[Figures]) -> dict[str, dict[str, Any]]:
    """Differences seed by seed: mean, deviation over seeds (n - 1) and the differences."""
    out = {}
    for name in first[0]:
        each = np.array([a[name] - b[name] for a, b in zip(first, second, strict=True)])
        spread = float(each.std(ddof=1)) if len(each) > 1 else float("nan")
        out[name] = {
            "mean": round(float(each.mean()), 4),
            "deviation": round(spread, 4),
            "each": each.round(4).tolist(),
        }
    return out


def _write(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(data, indent=1))
    partial.replace(path)
