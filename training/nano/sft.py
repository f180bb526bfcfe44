"""Supervised fine-tuning of the nano model on packed conversations.

    python -m training.sft --data .work/data --out .work/checkpoints/nano --minutes 60
    python -m training.sft ... --resume            # continue after an interruption

Two pools (see `training.synth`): marks sheets and surface pictures. Every step draws one of them,
plus a small text-only batch for the symbolic rule of turn two. The learning rate is constant and
falls linearly to zero over the last `--decay` share of the time: the decay gives the last ten
points, so only a decayed checkpoint is exported. `--out` receives a Hugging Face folder, an
undecayed state to continue from, and the curve as JSON lines.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm
from transformers import Qwen2_5_VLForConditionalGeneration

from forge_station.contract import tasks
from forge_station.contract.catalogue import WORKPIECES
from forge_station.contract.views import MARKS, NANO_LAYOUT, VIEWS
from training.data.surface_samples import LARGE, PROMISED_SURFACE
from training.nano import model as nano
from training.nano import pack
from training.nano.pools import NO_REFERENCE, SheetPool, SurfacePool

TEXT_BATCH = 64
DEFECT_SIZES = (
    "of the part length, log-uniform: crack 1.1-7.3 % wide and 35-60 % long, cut 1.5-22 % deep, "
    "deformation 1.4-28 %, dent 2-22 % in radius; on the front, side or top that the views show"
)
"""What `training.data.surface_samples` draws, for the model card."""


class AuxiliaryHeads(nn.Module):
    """Dense targets on vision tokens while training; never exported.

    letter: which mark stands in a token's column; workpiece: what stands in a column; cells: the
    defect class of the four grid cells under a surface token. Without them the letters are not
    bound to their columns for a long time.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.letter = nn.Linear(width, len(MARKS) + 1)
        self.workpiece = nn.Sequential(
            nn.Linear(3 * width, 256), nn.GELU(), nn.Linear(256, len(WORKPIECES))
        )
        self.cells = nn.Linear(width, 4 * len(tasks.SURFACE_CLASSES))

    def sheet_loss(
        self, embeds: torch.Tensor, letters: torch.Tensor, pieces: torch.Tensor
    ) -> torch.Tensor:
        """embeds [B, T, W]; letters, pieces int [B, columns], len(MARKS) / -1 where empty."""
        batch, _, width = embeds.shape
        columns = NANO_LAYOUT.columns
        grid = embeds.float().view(batch, len(VIEWS), 2, columns, 2, width)
        target = letters[:, None, None, :, None].expand(grid.shape[:-1])
        loss = F.cross_entropy(self.letter(grid).flatten(0, -2), target.flatten())
        pooled = grid.mean((2, 4)).permute(0, 2, 1, 3).flatten(2)
        filled = pieces >= 0
        return loss + F.cross_entropy(self.workpiece(pooled[filled]), pieces[filled])

    def surface_loss(
        self,
        embeds: torch.Tensor,
        grid: torch.Tensor,
        defect: torch.Tensor,
        marked: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """embeds [B, T, W] in raster order of 3 panels; grid bool [B, 3, 16, 16]; defect [B];
        marked bool [B]: whose grid is known (None: all), the others have no say."""
        batch = embeds.shape[0]
        side = NANO_LAYOUT.panel // 28
        out = self.cells(embeds.float()).view(batch, side, len(VIEWS), side, 2, 2, -1)
        out = out.permute(0, 2, 1, 4, 3, 5, 6).reshape(batch, 3, 16, 16, -1)
        target = torch.where(grid, defect[:, None, None, None].expand(grid.shape), 0)
        weight = torch.where(grid, 8.0, 1.0)
        if marked is not None:
            weight = weight * marked[:, None, None, None]
        loss = F.cross_entropy(out.flatten(0, -2), target.flatten(), reduction="none")
        return (loss * weight.flatten()).sum() / weight.sum().clamp(min=1.0)


@dataclass
class PackedTrainer:
    """Model, auxiliary heads, optimisers and the loss of packed sequences."""

    model: Qwen2_5_VLForConditionalGeneration
    heads: nn.Module
    auxiliary: float
    generator: np.random.Generator
    compiled: bool = False

    def __post_init__(self) -> None:
        self.forward = nano.Forward(self.model, compiled=self.compiled)
        named = [*self.model.named_parameters(), *self.heads.named_parameters(prefix="heads")]
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in named:
            wide = parameter.ndim == 2 and not any(
                part in name for part in ("embed_tokens", "lm_head", "heads.")
            )
            (matrices if wide else others).append(parameter)
        self.parameters = [parameter for _, parameter in named]
        # Muon on the matrices reached twice the accuracy of AdamW alone at equal steps.
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=1.2e-3, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01),
        ]
        self.base_rates = [[g["lr"] for g in o.param_groups] for o in self.optimizers]

    def set_rate(self, factor: float) -> None:
        for optimizer, rates in zip(self.optimizers, self.base_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor

    def hidden(self, batch: pack.Batch, embeds: torch.Tensor | None) -> torch.Tensor:
        """Hidden states [B, T, W] of packed sequences; `embeds` replace the image tokens."""
        language = self.model.model.language_model
        inputs = language.embed_tokens(batch.tokens)
        if embeds is not None:
            image_id = self.model.config.image_token_id
            start = int((batch.tokens[0] == image_id).nonzero()[0, 0])
            end = start + embeds.shape[1]
            inputs = torch.cat([inputs[:, :start], embeds.to(inputs.dtype), inputs[:, end:]], 1)
        return self.forward.text(inputs, batch.position, batch.mask)

    def branch_loss(
        self, batch: pack.Batch, embeds: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weighted loss, and which supervised tokens are right (for the curve)."""
        chosen = batch.target != pack.IGNORE
        logits = self.model.lm_head(self.hidden(batch, embeds)[chosen]).float()
        target, weight = batch.target[chosen], batch.weight[chosen]
        loss = F.cross_entropy(logits, target, reduction="none")
        return (loss * weight).sum() / weight.sum(), logits.argmax(-1) == target

    def step(self, loss: torch.Tensor) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()


@dataclass
class Trainer(PackedTrainer):
    """Trains on the two pools of scans."""

    heads: AuxiliaryHeads

    def step_loss(
        self, kind: str, pool: SheetPool | SurfacePool, size: int
    ) -> tuple[torch.Tensor, dict[str, float]]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if isinstance(pool, SheetPool):
                index = self.generator.integers(0, len(pool), size)
                drawn = pool.batch(index, self.generator)
                embeds = self.forward.vision(drawn.images)
                loss, right = self.branch_loss(drawn.packed, embeds)
                extra = self.heads.sheet_loss(embeds, drawn.letters, drawn.pieces)
                text = pack.collate(
                    [
                        pack.pack_judgement(readings, self.generator)
                        for readings in pool.random_readings(TEXT_BATCH, self.generator)
                    ]
                )
                text_loss, _ = self.branch_loss(text, None)
                total = loss + self.auxiliary * extra + 0.5 * text_loss
                shown = {"sheet": loss, "letters": extra, "rule": text_loss}
            else:
                surface = pool.batch(pool.draw(size, self.generator), self.generator)
                embeds = self.forward.vision(surface.images)
                loss, right = self.branch_loss(surface.packed, embeds)
                extra = self.heads.surface_loss(
                    embeds, surface.grid, surface.defect, surface.marked
                )
                total = loss + self.auxiliary * extra
                shown = {"surface": loss, "cells": extra}
        figures = {name: float(value.detach()) for name, value in shown.items()}
        figures[f"{kind}_tokens_right"] = float(right.float().mean())
        return total, figures


@torch.no_grad()
def validate(
    trainer: Trainer, sheets: SheetPool, surfaces: SurfacePool, count: int
) -> dict[str, float]:
    """Readings exactly right, surface five-class accuracy and AUROC on a validation pool."""
    trainer.model.eval()
    rng = np.random.default_rng(0)
    figures: dict[str, float] = {}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found: dict[str, list[bool]] = {"readings": [], "marks": [], "answer": []}
        for start in range(0, min(count, len(sheets)), 50):
            drawn = sheets.batch(np.arange(start, min(start + 50, len(sheets))), rng)
            embeds = trainer.forward.vision(drawn.images)
            for (_, kind, _), ok in _branch_hits(trainer, drawn.packed, embeds).items():
                found[kind].append(ok)
        figures |= {kind: float(np.mean(oks)) if oks else 0.0 for kind, oks in found.items()}
        hits: list[bool] = []
        normal: list[float] = []
        truth: list[int] = []
        ids = [pack.encode(name)[0] for name in tasks.SURFACE_CLASSES]
        key = pack.encode(tasks.CLASS_KEY)[0]
        for start in range(0, min(count, len(surfaces)), 25):
            surface = surfaces.batch(np.arange(start, min(start + 25, len(surfaces))), rng)
            embeds = trainer.forward.vision(surface.images)
            hidden = trainer.hidden(surface.packed, embeds)[surface.packed.tokens == key]
            odds = trainer.model.lm_head(hidden).float()[:, ids].softmax(-1)
            hits += (odds.argmax(-1) == surface.defect).tolist()
            normal += odds[:, 0].tolist()
            truth += surface.defect.tolist()
        figures["five_class"] = float(np.mean(hits))
        defect_odds, defective = 1 - np.array(normal), np.array(truth) > 0
        figures["auroc"] = auroc(defect_odds, defective)
        right_class = np.array(hits)
        if "defect_scale" in surfaces.shards.meta:
            large = surfaces.shards.meta["defect_scale"][: len(hits)] >= LARGE
            figures["auroc_large"] = auroc(
                defect_odds[large | ~defective], (defective & large)[large | ~defective]
            )
            figures["five_class_large"] = float(right_class[large | ~defective].mean())
        for i, name in enumerate(tasks.SURFACE_CLASSES):
            chosen = np.array(truth) == i
            figures[f"recall_{name}"] = float(right_class[chosen].mean()) if chosen.any() else 0.0
    trainer.model.train()
    return {name: round(value, 4) for name, value in figures.items()}


def _branch_hits(
    trainer: Trainer, packed: pack.Batch, embeds: torch.Tensor
) -> dict[tuple[int, str, int], bool]:
    """Per (row, kind, segment): all tokens of the branch are right.

    kind: `readings` (a mark in turn one), `marks` (right or wrong, turn two) or `answer`.
    """
    hidden = trainer.hidden(packed, embeds)
    chosen = packed.target != pack.IGNORE
    predicted = trainer.model.lm_head(hidden[chosen]).argmax(-1)
    rows, columns = chosen.nonzero(as_tuple=True)
    words = nano.vocabulary()
    kinds: dict[tuple[int, int], str] = {}
    hits: dict[tuple[int, str, int], bool] = {}
    marks = {tasks.mark_key(mark) for mark in MARKS}
    for row, column, token in zip(rows.tolist(), columns.tolist(), predicted.tolist(), strict=True):
        segment = int(packed.segment[row, column])
        target = int(packed.target[row, column])
        key = words[int(packed.tokens[row, column])]
        if (row, segment) not in kinds:
            verdict = words[target] in (tasks.RIGHT, tasks.WRONG)
            reading = "marks" if verdict else "readings"
            kinds[row, segment] = reading if key in marks else ""
            if key == tasks.ANSWER_KEY:
                kinds[row, segment] = "answer"
        kind = kinds[row, segment]
        if kind:
            name = (row, kind, segment)
            hits[name] = hits.get(name, True) and token == target
    return hits


def auroc(score: np.ndarray, positive: np.ndarray) -> float:
    """Area under the ROC curve with tied ranks averaged (Mann-Whitney)."""
    order = np.argsort(score, kind="stable")
    ranks = np.empty(len(score))
    ranks[order] = np.arange(1, len(score) + 1)
    for value in np.unique(score):
        tied = score == value
        ranks[tied] = ranks[tied].mean()
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives:
        return float("nan")
    return float(
        (ranks[positive].sum() - positives * (positives + 1) / 2) / (positives * negatives)
    )


def rate_of(step: int, share: float, decay: float) -> float:
    """Factor of the learning rates: 100 steps of warm-up, constant, then linear down to 0.02.

    `share` of the time is over; the last `decay` of it falls.
    """
    return min(1.0, (step + 1) / 100) * min(1.0, max(0.02, (1 - share) / decay))


def train_step(
    trainer: Trainer,
    sheets: SheetPool,
    surfaces: SurfacePool,
    *,
    batch: int,
    surface_share: float,
    rate: float,
) -> dict[str, float]:
    """One step on a batch of one of the pools, drawn by chance; its figures."""
    trainer.set_rate(rate)
    kind = "surface" if trainer.generator.random() < surface_share else "sheet"
    loss, figures = trainer.step_loss(kind, surfaces if kind == "surface" else sheets, batch)
    trainer.step(loss)
    return figures


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    state_file = args.out / "state.pt"
    trainer = Trainer(
        nano.build_model(),
        AuxiliaryHeads(192),
        args.auxiliary,
        np.random.default_rng(args.seed),
        compiled=args.compile,
    )
    used, step = 0.0, 0
    if args.resume and state_file.exists():
        used, step = resume(state_file, trainer)
        print(f"resumed at step {step}, {used / 60:.1f} of {args.minutes} minutes", flush=True)
    elif args.init:
        _load_weights(torch.load(args.init, weights_only=False), trainer)
    trainer.model.train()
    validated = used
    recent: dict[str, list[float]] = {}
    sheets = SheetPool.open(args.data, "sheet", args.without)
    shown = tuple(args.surface_channels)
    surfaces = _surfaces(args)
    held = (
        SheetPool.open(args.data, "sheet-val"),
        SurfacePool.open(args.data, "surface-val", shown),
    )
    layout = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
    bar = tqdm(total=100, mininterval=5, desc="sft", bar_format=layout)
    share = _share(args, used, step)
    while share < 1:
        begun = time.perf_counter()
        rate = args.rate * rate_of(step, share, args.decay)
        figures = train_step(
            trainer, sheets, surfaces, batch=args.batch, surface_share=args.surface, rate=rate
        )
        for name, value in figures.items():
            recent.setdefault(name, []).append(value)
        step += 1
        spent = time.perf_counter() - begun
        used += spent
        share = _share(args, used, step)
        bar.update(min(100 * share, 100) - bar.n)
        bar.set_postfix(step=step, refresh=False)
        if step % 200 == 0:  # the pools may still grow
            sheets = SheetPool.open(args.data, "sheet", args.without)
            surfaces = _surfaces(args)
        if used - validated >= args.every * 60 or share >= 1:
            validated = used
            row: dict[str, float] = {"step": step, "seconds": round(used), "rate": round(rate, 3)}
            row |= {k: round(float(np.mean(v[-100:])), 4) for k, v in recent.items()}
            row |= {"sheets": len(sheets), "surfaces": len(surfaces)}
            row |= validate(trainer, *held, count=args.validate)
            with (args.out / "curve.jsonl").open("a") as curve:
                curve.write(json.dumps(row) + "\n")
            tqdm.write(json.dumps(row))
            save_state(state_file, trainer, used, step)
    bar.close()
    card = {
        "minutes": args.minutes,
        "steps": step,
        "batch": args.batch,
        "seed": args.seed,
        "none_weight": pack.NONE_WEIGHT,
        "grid": args.grid,
        "train_sheets": len(sheets),
        "train_surfaces": len(surfaces),
        "closer_looks": surfaces.closer_looks,
        "labelled": surfaces.labelled_pictures,
        "surface_channels": list(shown),
        "surface_promised_for": ", ".join(PROMISED_SURFACE),
        "defect_sizes": DEFECT_SIZES,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "validation": validate(trainer, *held, count=1000),
    }
    nano.save_checkpoint(trainer.model, args.out, card)
    print(json.dumps(card))


def _surfaces(args: argparse.Namespace) -> SurfacePool:
    shown = tuple(args.surface_channels)
    return SurfacePool.open(args.data, "surface", shown, NO_REFERENCE, args.grid, args.labelled)


def _share(args: argparse.Namespace, used_s: float, step: int) -> float:
    """How much of the run is over, by steps where they are given, else by time."""
    return step / args.steps if args.steps else used_s / (60 * args.minutes)


def save_state(path: Path, trainer: PackedTrainer, used: float, step: int) -> None:
    """Write the resumable state through a temporary file: a kill leaves the old one whole. Raises
    OSError."""
    partial = path.with_suffix(".partial")
    state = {
        "model": trainer.model.state_dict(),
        "heads": trainer.heads.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "generator": trainer.generator.bit_generator.state,
        "used_s": used,
        "step": step,
    }
    try:
        with partial.open("wb") as file:
            torch.save(state, file)
            os.fsync(file.fileno())
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # torch hides what the disk has said
            raise error.__context__ from None
        raise
    partial.replace(path)


def resume(path: Path, trainer: PackedTrainer) -> tuple[float, int]:
    """Put the trainer where `save_state` left it; the seconds used and the steps made."""
    state = torch.load(path, weights_only=False)
    trainer.generator.bit_generator.state = state["generator"]
    for optimizer, saved in zip(trainer.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    _load_weights(state, trainer)
    return state["used_s"], state["step"]


def _load_weights(state: dict[str, Any], trainer: PackedTrainer) -> None:
    trainer.model.load_state_dict(state["model"])
    trainer.heads.load_state_dict(state["heads"])
