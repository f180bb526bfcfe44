"""GRPO of the nano model on the station's own answers: a group a part, rewards, advantages, step.

Each prompt is the trunk of one surface sample. A group of answers is drawn (`answers.sample`):
class, score and all 48 grid rows, each as its branch, by the station's grammar and with the weight
of `none` undone, so that the policy that is trained is the one that the station reads. One update a
batch, so the policy that is trained is the one that was sampled: no ratio, no clipping, no KL.

Two ways of credit. `answer`, as published: every token of an answer carries the advantage of the
whole answer. `row`: branches are drawn independently behind the trunk, so the reward of a row is
averaged over putting it into every answer of the group; the same expected gradient with a fraction
of its noise.

The control arm (`control="sft"`) sees the same prompts at the same rate with the supervised loss.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

from forge_station.contract import tasks
from training.data.strata import strata, stratified
from training.nano import answers, sft
from training.nano.answers import Answers, Prompts, Vision
from training.nano.pools import SurfacePool
from training.rewards import Recipe, RewardError, counted_dice

TINY = 1e-4
"""Added to a deviation before dividing by it, as TRL does."""
WARM_UP = 10


@dataclass(frozen=True)
class Settings:
    """One run. `rate`: share of supervised training's learning rates, falling linearly to 0."""

    prompts: int = 640
    batch: int = 16
    group: int = 4
    rate: float = 0.3
    credit: Literal["row", "answer"] = "row"
    scale: Literal["group", "none"] = "group"
    control: Literal["", "sft"] = ""
    vision: bool = False
    """Train the vision tower too; else its output is computed once a picture."""
    clean_share: float | None = None
    """Share of clean prompts; None: that of the pool."""
    longest_row: int = answers.LONGEST_ROW
    seed: int = 0
    recipe: Recipe = field(default_factory=Recipe)

    def __post_init__(self) -> None:
        if self.group < 2 or self.batch < 1 or self.prompts < self.batch:
            raise RewardError(
                "no group to compare in",
                expected="group >= 2 and prompts >= batch >= 1",
                got=f"group {self.group}, prompts {self.prompts}, batch {self.batch}",
            )

    @property
    def steps(self) -> int:
        return self.prompts // self.batch


def audit(pool: SurfacePool, index: np.ndarray, settings: Settings) -> dict[str, int]:
    """Refuse a run whose targets cannot be reached: figures of the longest target otherwise.

    A cap below the longest target silently earns 0 for every dense grid. Also refused: a defect
    without a cell, which is not labelled rather than clean.
    """
    meta = pool.shards.meta
    chosen = np.unique(index)
    grid = meta["grid"][chosen]
    longest = int(grid.sum(-1).max()) + 1  # and the newline
    if longest > settings.longest_row:
        raise RewardError(
            "targets are longer than an answer may be",
            which=f"{int((grid.sum(-1).max((1, 2)) + 1 > settings.longest_row).sum())} prompts",
            expected=f"rows of at most {settings.longest_row} tokens",
            got=f"{longest} tokens",
            action="raise longest_row: a row that is cut off earns nothing",
        )
    unlabelled = chosen[(meta["defect"][chosen] > 0) & ~grid.any((1, 2, 3))]
    if len(unlabelled):
        raise RewardError(
            "prompts with a defect but without a grid",
            which=f"samples {unlabelled[:5].tolist()}",
            expected="at least one cell",
            action="leave them out: not labelled is not clean",
        )
    # Each line is a choice, and each cell one more: the columns behind the first and the newline.
    tokens = answers.LINES + grid.sum((1, 2, 3))
    return {"longest_row": longest, "longest_target": int(tokens.max()), "prompts": len(index)}


@dataclass(frozen=True)
class Credit:
    """advantage float64 [B, G, lines] (see `answers.LINES`); rewards: component -> [B, G]."""

    advantage: np.ndarray
    rewards: dict[str, np.ndarray]


def credit(found: Answers, given: Prompts, settings: Settings) -> Credit:
    """Rewards of sampled answers and the advantage of every branch within its group."""
    recipe = settings.recipe
    count, group = found.defect.shape
    cells = found.cells.reshape(count, group, -1, tasks.GRID_ROWS)
    truth = given.grid.reshape(count, 1, -1, tasks.GRID_ROWS)
    hits, false = (cells & truth).sum(-1), (cells & ~truth).sum(-1)
    missed = (truth & ~cells).sum(-1)
    cut = found.overrun.astype(np.int64)
    readable = cut.sum(-1) == 0
    dice = counted_dice(hits.sum(-1), missed.sum(-1), false.sum(-1), recipe)
    rewards = {
        "dice": readable * dice,
        "score": 1 - np.abs(found.score - given.score[:, None]) / 10,
        "format": readable.astype(np.float64),
        "choice": (found.defect == given.defect[:, None]).astype(np.float64),
    }
    weights = recipe.weights
    total = sum(weights[name] * value for name, value in rewards.items())
    rewards["total"] = np.asarray(total)
    if settings.credit == "answer":
        own = advantages(rewards["total"], settings.scale)
        return Credit(np.repeat(own[:, :, None], answers.LINES, axis=2), rewards)
    # Row r of member i in the answer of member j: [B, i, j, r], averaged over j.
    parts = [
        part.sum(-1)[:, None, :, None] - part[:, None] + part[:, :, None]
        for part in (hits, missed, false, cut)
    ]
    whole = parts[3] == 0
    dice = counted_dice(parts[0], parts[1], parts[2], recipe)
    value = whole * (weights["dice"] * dice + weights["format"])
    lines = np.empty((count, group, answers.LINES))
    lines[..., : answers.ROWS] = value.mean(2)
    lines[..., answers.CLASS_LINE] = weights["choice"] * rewards["choice"]
    lines[..., answers.SCORE_LINE] = weights["score"] * rewards["score"]
    lines = _centred(lines)
    if settings.scale == "group":
        # Lines are independent: the variance of the total is the sum of theirs.
        variance = (lines**2).sum((1, 2), keepdims=True) / (group - 1)
        lines = lines / (np.sqrt(variance) + TINY)
    return Credit(lines, rewards)


def advantages(rewards: np.ndarray, scale: str) -> np.ndarray:
    """Rewards [B, G] less the mean of the group, over its deviation; equal rewards give 0."""
    out = _centred(rewards)
    if scale == "group":
        out = out / (rewards.std(axis=1, ddof=1, keepdims=True) + TINY)
    return np.asarray(out)


def _centred(values: np.ndarray) -> np.ndarray:
    """Less the mean over the group (axis 1); exactly 0 where all are equal."""
    spread = values.max(axis=1, keepdims=True) - values.min(axis=1, keepdims=True)
    return np.where(spread > 1e-12, values - values.mean(axis=1, keepdims=True), 0.0)


def policy_loss(found: Answers, earned: Credit) -> torch.Tensor:
    """Minus the sum over all choices of advantage x log-probability, over their number ("dapo")."""
    weight = torch.from_numpy(earned.advantage).float()[tuple(found.made)]
    return -(weight * found.logprobs).sum() / len(weight)


def rate_of(step: int, settings: Settings) -> float:
    """Factor of the learning rates: warm-up, then linear to 0 at the end."""
    return settings.rate * min(1.0, (step + 1) / WARM_UP) * (1 - step / settings.steps)


def train_step(
    trainer: sft.Trainer, pool: SurfacePool, index: np.ndarray, vision: Vision, settings: Settings
) -> dict[str, float]:
    """One update on the prompts `index`; its figures."""
    rng = trainer.generator
    with torch.autocast("cpu", dtype=torch.bfloat16):
        embeds = vision(index)
        if settings.control == "sft":
            drawn = pool.batch(index, rng)
            loss, right = trainer.branch_loss(drawn.packed, embeds)
            if settings.vision:
                loss = loss + trainer.auxiliary * trainer.heads.surface_loss(
                    embeds, drawn.grid, drawn.defect, drawn.marked
                )
            figures = {"tokens_right": float(right.float().mean())}
        else:
            given = answers.prompts(pool, index, rng)
            found = answers.sample(
                trainer.model,
                given,
                embeds,
                settings.group,
                rng,
                settings.longest_row,
            )
            earned = credit(found, given, settings)
            loss = policy_loss(found, earned)
            figures = {name: float(value.mean()) for name, value in earned.rewards.items()}
            clean = given.defect == 0
            if clean.any():
                alarms = found.cells[clean].any((2, 3, 4))
                figures["sampled_clean_alarms"] = float(alarms.mean())
            figures["groups_with_advantage"] = float(earned.advantage.any((1, 2)).mean())
            figures["tokens"] = float(found.tokens.mean())
    trainer.step(loss)
    return figures


def load(init: Path, settings: Settings) -> sft.Trainer:
    """The trainer with the weights of a checkpoint folder of `training.sft`, fresh optimisers."""
    for name in ("config.json", "state.pt"):
        if not (init / name).exists():
            raise RewardError(
                "no checkpoint to start from",
                which=init,
                expected=f"a folder of `python -m training.sft` with {name}",
            )
    config = AutoConfig.from_pretrained(init)
    config._attn_implementation = config.text_config._attn_implementation = "eager"
    torch.manual_seed(settings.seed)
    model = Qwen2_5_VLForConditionalGeneration(config)
    heads = sft.AuxiliaryHeads(config.text_config.hidden_size)
    trainer = sft.Trainer(model, heads, 0.5, np.random.default_rng(settings.seed))
    sft._load_weights(torch.load(init / "state.pt", weights_only=False), trainer)
    if not settings.vision:
        model.model.visual.requires_grad_(False)
    model.train()
    return trainer


def chosen_prompts(pool: SurfacePool, settings: Settings) -> np.ndarray:
    """The prompts of a run in their order, int [steps * batch]."""
    defect, grid = pool.shards.meta["defect"], pool.shards.meta["grid"]
    return stratified(
        strata(defect, grid.sum((1, 2, 3))),
        settings.steps * settings.batch,
        np.random.default_rng([settings.seed, 1]),
        defect == 0,
        settings.clean_share,
    )


def run(
    trainer: sft.Trainer,
    pool: SurfacePool,
    out: Path,
    settings: Settings,
    *,
    resume: bool = False,
    every: int = 25,
    vision: Vision | None = None,
) -> dict[str, float]:
    """Train to the end of the prompts; the last row of the curve.

    Writes `curve.jsonl` and `state.pt` into `out` every `every` steps; a run that is resumed from
    them ends in the same weights as one that was never stopped.
    """
    index = chosen_prompts(pool, settings)
    print(json.dumps({"audit": audit(pool, index, settings)}), flush=True)
    state_file, used, first = out / "state.pt", 0.0, 0
    _keep_settings(out, settings, resume=resume)
    if resume and state_file.exists():
        used, first = sft.resume(state_file, trainer)
        print(f"resumed at step {first} of {settings.steps}", flush=True)
    vision = vision or Vision(trainer.forward, pool, frozen=not settings.vision)
    recent: dict[str, list[float]] = {}
    row: dict[str, float] = {"step": first, "cpu_s": round(used, 1)}
    name = settings.control or "grpo"
    with tqdm(total=settings.steps, initial=first, unit="step", desc=name, mininterval=5) as bar:
        for step in range(first, settings.steps):
            begun = time.process_time()
            trainer.set_rate(rate_of(step, settings))
            batch = index[step * settings.batch : (step + 1) * settings.batch]
            for key, value in train_step(trainer, pool, batch, vision, settings).items():
                recent.setdefault(key, []).append(value)
            used += time.process_time() - begun
            bar.update()
            shown = {k: f"{np.mean(recent[k][-every:]):.3f}" for k in _SHOWN if k in recent}
            bar.set_postfix(shown, refresh=False)
            if (step + 1) % every == 0 or step + 1 == settings.steps:
                row = {"step": step + 1, "cpu_s": round(used, 1)}
                row |= {k: round(float(np.mean(v)), 4) for k, v in recent.items()}
                recent = {}
                with (out / "curve.jsonl").open("a") as curve:
                    curve.write(json.dumps(row) + "\n")
                sft.save_state(state_file, trainer, used, step + 1)
    return row


_SHOWN = ("total", "dice", "sampled_clean_alarms", "tokens_right")


def _keep_settings(out: Path, settings: Settings, *, resume: bool) -> None:
    """Write `settings.json`; a resumed run must have the settings it was begun with."""
    out.mkdir(parents=True, exist_ok=True)
    file, now = out / "settings.json", asdict(settings)
    if resume and file.exists():
        before = json.loads(file.read_text())
        changed = [key for key, value in now.items() if before.get(key) != value]
        if changed:
            raise RewardError(
                "a resumed run must keep its settings",
                which=f"{out}: {', '.join(changed)}",
                expected=", ".join(str(before.get(key)) for key in changed),
                got=", ".join(str(now[key]) for key in changed),
                action="give the same options, or another --out",
            )
    else:
        (out / "curve.jsonl").unlink(missing_ok=True)
        (out / "state.pt").unlink(missing_ok=True)
    file.write_text(json.dumps(now, indent=1))
