"""Supervised fine-tuning of the nano model on the photos of a product line.

Class, score and grid of a surface photo, and what stands at fixed places, from a few hundred
labelled pictures. The words of the line (its classes, its parts) are added behind the fixed
vocabulary. The budget is CPU time of this process, so that a busy machine trains the same.
Dense targets on the vision tokens (defect cells, class of the whole, what stands at a place) lead
the first steps, as in `training.nano.sft`; they are not exported.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm
from transformers import Qwen2_5_VLForConditionalGeneration

from forge_station.contract import tasks
from forge_station.contract.manifest import PhotoInput, Vocabulary
from forge_station.contract.views import MARKS
from training.nano import model as nano
from training.nano import pack
from training.nano.photo_samples import (
    SIDE,
    PhotoSample,
    PhotoSet,
    Variation,
    images_of,
    packed,
    read_samples,
    texts_of,
)
from training.nano.sft import PackedTrainer, auroc, resume, save_state

_SAVE_EVERY_S = 30.0
SIZES: dict[str, dict[str, int]] = {
    "nano": {},
    "small": {"vision_width": 96, "vision_depth": 4, "text_width": 128, "text_depth": 3},
}
"""Sizes of the model, as `build_model` takes them. `small` has 1.3 M parameters and trains about
five times as fast; a line has too few photos for more."""
CHANNELS = ("rgb", "detail", "where")
SQUARE = PhotoInput(224, 224)
ANY_WAY = Variation()


@dataclass(frozen=True)
class PhotoRun:
    """One training run, of `minutes` CPU minutes of this process or, if given, of `steps`."""

    examples: tuple[Path, ...]
    out: Path
    minutes: float = 5.0
    steps: int | None = None
    photo: PhotoInput = SQUARE
    variation: Variation = ANY_WAY
    size: str = "small"
    """A key of SIZES; `init` needs that of the checkpoint, usually `nano`."""
    batch: int = 24
    auxiliary: float = 0.5
    decay: float = 0.4
    full_attention: tuple[int, ...] = ()
    init: Path | None = None
    seed: int = 0
    threads: int = 1
    resume: bool = False
    compiled: bool = False

    def share(self, used_s: float, step: int) -> float:
        """How much of the run is over, 0..1 and beyond."""
        return used_s / (60 * self.minutes) if self.steps is None else step / self.steps


def rate_at(share: float, decay: float) -> float:
    """Factor of the learning rates: the first twentieth rises, the last `decay` falls to 0.02."""
    return min(1.0, 0.02 + share / 0.05) * min(1.0, max(0.02, (1 - share) / decay))


def vocabulary_of(samples: Sequence[PhotoSample]) -> Vocabulary:
    """What the line's model may answer; `normal` first, `none` last."""
    defects = sorted({s.defect for s in samples if s.defect} - {tasks.NORMAL})
    parts = sorted({what for s in samples for what in s.places.values()} - {tasks.NONE})
    return Vocabulary(
        classes=(tasks.NORMAL, *defects) if defects else tasks.SURFACE_CLASSES,
        parts=(*parts, tasks.NONE) if parts else (),
    )


class PhotoHeads(nn.Module):
    """Dense targets on vision tokens while training; never exported."""

    def __init__(self, width: int, vocabulary: Vocabulary, photo: PhotoInput) -> None:
        super().__init__()
        self.classes, self.parts = vocabulary.classes, vocabulary.parts
        self.rows = photo.height // (nano.PATCH * nano.MERGE)
        self.columns = photo.width // (nano.PATCH * nano.MERGE)
        self.cells = nn.Linear(width, 4 * len(self.classes))
        self.whole = nn.Linear(2 * width, len(self.classes))
        self.place = nn.Linear(2 * width, max(1, len(self.parts)))
        self.mark = nn.Linear(width, len(MARKS))

    def loss(
        self,
        embeds: torch.Tensor,
        samples: Sequence[PhotoSample],
        places: tuple[int, int] | None,
    ) -> torch.Tensor:
        """embeds [B, T, W] in raster order of the photo's tokens -> loss of all that is known."""
        tokens = embeds.float().view(len(samples), self.rows, self.columns, -1)
        losses = [tokens.sum() * 0]
        graded = [i for i, sample in enumerate(samples) if sample.defect is not None]
        if graded:
            names = [self.classes.index(samples[i].defect or "") for i in graded]
            target = torch.tensor(names)
            losses.append(
                F.cross_entropy(self.whole(_pooled(tokens[graded].flatten(1, 2))), target)
            )
        gridded = [i for i, sample in enumerate(samples) if sample.cells is not None]
        if gridded:
            losses.append(self._cells_loss(tokens[gridded], [samples[i] for i in gridded]))
        placed = [i for i, sample in enumerate(samples) if sample.places]
        if placed and places is not None:
            losses.append(self._places_loss(tokens[placed], [samples[i] for i in placed], places))
        return torch.stack(losses).sum()

    def _places_loss(
        self, tokens: torch.Tensor, samples: Sequence[PhotoSample], layout: tuple[int, int]
    ) -> torch.Tensor:
        """What stands at every place, and of every token at which place it lies.

        Without the second the text is long in finding out where a mark is.
        """
        rows, columns = layout
        row = torch.arange(self.rows) * rows // self.rows
        column = torch.arange(self.columns) * columns // self.columns
        where = row[:, None] * columns + column
        at = self.mark(tokens).flatten(0, 2)
        losses = [F.cross_entropy(at, where.expand(tokens.shape[:3]).flatten())]
        marks = list(samples[0].places)
        for number, mark in enumerate(marks):
            inside = (where == number).flatten()
            area = tokens.flatten(1, 2)[:, inside]
            target = torch.tensor([self.parts.index(sample.places[mark]) for sample in samples])
            losses.append(F.cross_entropy(self.place(_pooled(area)), target) / len(marks))
        return torch.stack(losses).sum()

    def _cells_loss(self, tokens: torch.Tensor, samples: Sequence[PhotoSample]) -> torch.Tensor:
        out = self.cells(tokens).view(*tokens.shape[:3], 2, 2, len(self.classes))
        out = out.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
        if out.shape[-2:] != (SIDE, SIDE):
            out = F.interpolate(out, (SIDE, SIDE), mode="bilinear", align_corners=False)
        grid = torch.from_numpy(np.stack([np.ascontiguousarray(s.cells) for s in samples]))
        kind = torch.tensor([self.classes.index(s.defect or self.classes[-1]) for s in samples])
        target = torch.where(grid, kind[:, None, None].expand(grid.shape), 0)
        weight = torch.where(grid, 4.0, 1.0)
        loss = F.cross_entropy(out, target, reduction="none")
        return (loss * weight).sum() / weight.sum()


def _pooled(tokens: torch.Tensor) -> torch.Tensor:
    """[B, T, W] -> mean and maximum, [B, 2 W]."""
    return torch.cat([tokens.mean(1), tokens.amax(1)], -1)


@dataclass(kw_only=True)
class PhotoTrainer(PackedTrainer):
    """Trains on photos; see `PackedTrainer`."""

    heads: PhotoHeads
    encoder: nano.Encoder
    photo: PhotoInput
    places: tuple[int, int] | None

    def photo_loss(self, samples: Sequence[PhotoSample]) -> tuple[torch.Tensor, dict[str, float]]:
        """Loss of a batch, and its parts for the curve."""
        images = torch.from_numpy(images_of(samples, self.photo))
        rng = self.generator
        batch = pack.collate([packed(sample, self.encoder, rng) for sample in samples])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            embeds = self.forward.vision(images)
            text, right = self.branch_loss(batch, embeds)
            dense = self.heads.loss(embeds, samples, self.places)
        figures = {
            "text": float(text.detach()),
            "dense": float(dense.detach()),
            "tokens_right": float(right.float().mean()),
        }
        return text + self.auxiliary * dense, figures


def build_trainer(run: PhotoRun, samples: Sequence[PhotoSample]) -> tuple[PhotoTrainer, list[str]]:
    """The trainer before its first step, and the line's own words."""
    own = nano.own_words(texts_of(samples))
    model = nano.build_model(**SIZES[run.size], own=own, full_attention=run.full_attention)
    if run.init is not None:
        start_from(model, torch.load(run.init, weights_only=False)["model"])
    heads = PhotoHeads(model.config.text_config.hidden_size, vocabulary_of(samples), run.photo)
    trainer = PhotoTrainer(
        model=model,
        heads=heads,
        auxiliary=run.auxiliary,
        generator=np.random.default_rng(run.seed),
        compiled=run.compiled,
        encoder=nano.Encoder(tuple(nano.vocabulary(own))),
        photo=run.photo,
        places=run.variation.places,
    )
    return trainer, own


def start_from(model: Qwen2_5_VLForConditionalGeneration, weights: dict[str, torch.Tensor]) -> None:
    """Load weights of a model without these own words; a new word starts at the mean of the old.

    Raises ValueError where the two differ in more than the number of words.
    """
    known = len(nano.vocabulary())
    state = model.state_dict()
    for name, value in weights.items():
        if name not in state or state[name].shape[1:] != value.shape[1:]:
            raise ValueError(f"start: {name} {list(value.shape)} does not fit this model")
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            rows = state[name].normal_(0, 0.02) + value[:known].mean(0)
            rows[:known] = value[:known]
            value = rows
        state[name] = value
    model.load_state_dict(state)


def train_photos(run: PhotoRun) -> dict[str, Any]:
    """Train, write the checkpoint folder `run.out`, return the training card."""
    torch.set_num_threads(run.threads)
    torch.manual_seed(run.seed)
    run.out.mkdir(parents=True, exist_ok=True)
    size = (run.photo.height, run.photo.width)
    samples = [s for path in run.examples for s in read_samples(path, "train", size)]
    trainer, own = build_trainer(run, samples)
    drawn = PhotoSet(samples, run.variation)
    state_file = run.out / "state.pt"
    used, step = 0.0, 0
    if run.resume and state_file.exists():
        used, step = resume(state_file, trainer)
        print(f"resumed at step {step}, {used / 60:.1f} of {run.minutes} minutes", flush=True)
    trainer.model.train()
    saved = used
    recent: dict[str, list[float]] = {}
    bar = tqdm(total=1000, initial=round(1000 * run.share(used, step)), desc="photo", unit="‰")
    while run.share(used, step) < 1:
        begun = time.process_time()
        trainer.set_rate(rate_at(run.share(used, step), run.decay))
        loss, figures = trainer.photo_loss(drawn.draw(run.batch, trainer.generator))
        trainer.step(loss)
        step += 1
        used += time.process_time() - begun
        for name, value in figures.items():
            recent.setdefault(name, []).append(value)
        over = run.share(used, step)
        bar.update(min(1000, round(1000 * over)) - bar.n)
        bar.set_postfix(step=step, text=f"{figures['text']:.2f}", refresh=False)
        if used - saved >= _SAVE_EVERY_S or over >= 1:
            saved = used
            row: dict[str, float] = {"step": step, "cpu_s": round(used)}
            row |= {name: round(float(np.mean(v[-50:])), 4) for name, v in recent.items()}
            with (run.out / "curve.jsonl").open("a") as curve:
                curve.write(json.dumps(row) + "\n")
            save_state(state_file, trainer, used, step)
    bar.close()
    vocabulary = vocabulary_of(samples)
    card: dict[str, Any] = {
        "cpu_minutes": round(used / 60, 2),
        "steps": step,
        "batch": run.batch,
        "seed": run.seed,
        "none_weight": pack.NONE_WEIGHT,
        "train_photos": len(samples),
        "variation": asdict(run.variation),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "vocabulary": asdict(vocabulary),
        "photo": asdict(run.photo),
    }
    nano.save_checkpoint(trainer.model, run.out, card, own)
    return card


@torch.no_grad()
def class_odds(trainer: PhotoTrainer, samples: Sequence[PhotoSample]) -> np.ndarray:
    """Probability of each class of the vocabulary, float64 [N, classes], of surface photos."""
    trainer.model.eval()
    ids = [trainer.encoder.encode(name)[0] for name in trainer.heads.classes]
    key = trainer.encoder.encode(tasks.CLASS_KEY)[0]
    odds = []
    for start in range(0, len(samples), 16):
        part = samples[start : start + 16]
        batch = pack.collate([packed(sample, trainer.encoder) for sample in part])
        embeds = trainer.forward.vision(torch.from_numpy(images_of(part, trainer.photo)))
        hidden = trainer.hidden(batch, embeds)[batch.tokens == key]
        odds.append(trainer.model.lm_head(hidden).double()[:, ids].softmax(-1).numpy())
    trainer.model.train()
    return np.concatenate(odds)


def image_auroc(odds: np.ndarray, samples: Sequence[PhotoSample], classes: Sequence[str]) -> float:
    """Of 1 - P(normal) against the truth."""
    defective = np.array([sample.defect != tasks.NORMAL for sample in samples])
    return auroc(1 - odds[:, list(classes).index(tasks.NORMAL)], defective)


HELP = """Train the nano model on the labelled photos of a line (see `training.load`).

    python -m training.load masks tiles --part magnetic_tile --out .work/tiles
    python -m training.sft --examples .work/tiles/examples.jsonl --out .work/runs/tiles --minutes 5
    python -m export.bundle --checkpoint .work/runs/tiles --out .work/bundles/tiles
    python -m training.sft --examples ... --resume      # continue after an interruption

Examples of the split `train` are learnt. The line's own words join the vocabulary; the bundle then
names its classes and parts, and its results on photos count."""


def parser() -> argparse.ArgumentParser:
    """Options of the nano trainer on photos."""
    own = argparse.ArgumentParser(
        prog="python -m training.sft",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = own.add_argument
    add("--model", default="nano", help="nano; a large model takes other options")
    add("--examples", type=Path, nargs="+", required=True, help="files written by training.load")
    add("--out", type=Path, required=True, help="checkpoint folder")
    add("--minutes", type=float, default=5, help="CPU minutes of this process (default 5)")
    add("--steps", type=int, help="train so many steps instead: the same on every machine")
    add("--size", choices=sorted(SIZES), default="small", help="default small: 1.3 M parameters")
    add("--photo", type=int, nargs=2, default=(224, 224), metavar=("H", "W"), help="pixels, of 56")
    add("--channels", choices=CHANNELS, default="rgb", help="see training/PHOTOS.md")
    add("--places", type=int, nargs=2, metavar=("ROWS", "COLUMNS"), help="how the marks stand")
    add("--no-flips", action="store_true", help="left and right or up and down differ here")
    add("--turns", action="store_true", help="quarter turns change nothing here")
    add("--shift", type=float, default=0.02, help="share of the picture that the part may move")
    add("--full-attention", type=int, nargs="*", default=[1, 3], metavar="BLOCK")
    add("--batch", type=int, default=24)
    add("--auxiliary", type=float, default=0.5, help="weight of the dense heads")
    add("--decay", type=float, default=0.4, help="share of time in which the rate falls")
    add("--compile", action="store_true", help="fuse layers (needs a compiler)")
    add("--threads", type=int, default=1)
    add("--seed", type=int, default=0)
    add("--init", type=Path, help="state.pt of an earlier run of the same size to start from")
    add("--resume", action="store_true", help="continue an interrupted run")
    return own


def main(words: Sequence[str] | None = None) -> None:
    """`training.sft --examples`. The last line is the training card as JSON."""
    args = parser().parse_args(words)
    variation = Variation(
        flips=not args.no_flips,
        turns=args.turns,
        shift=args.shift,
        places=tuple(args.places) if args.places else None,
    )
    run = PhotoRun(
        examples=tuple(args.examples),
        out=args.out,
        minutes=args.minutes,
        steps=args.steps,
        photo=PhotoInput(args.photo[0], args.photo[1], args.channels),
        variation=variation,
        size=args.size,
        batch=args.batch,
        auxiliary=args.auxiliary,
        decay=args.decay,
        full_attention=tuple(args.full_attention),
        init=args.init,
        seed=args.seed,
        threads=args.threads,
        resume=args.resume,
        compiled=args.compile,
    )
    print(json.dumps(train_photos(run)))
