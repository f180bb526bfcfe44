"""GRPO of a Qwen2.5-VL checkpoint with TRL, rewards from `training.rewards`.

VIEScore2's recipe: groups of 4, 8 prompts a step, lr 1e-5, no KL, advantages scaled by their
group, token-level loss (dapo), one update a batch; prompts stratified by class and number of
cells. Answers are sampled in the sequential form, so start from a checkpoint that can write it:
one of `training.sft --layout sequential`. Checked before the first step: no target is longer than
an answer may be, padding is on the left, no dropout while sampling.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from trl import GRPOConfig, GRPOTrainer

from forge_station.contract import tasks
from training.data.strata import CELL_EDGES, stratified
from training.large import checkpoint, rows, sft, sharding
from training.large.checkpoint import FullResume, RunError
from training.large.processor import (
    VISION_TOKENS,
    VisionTextProcessor,
    load_processor,
    require_left_padding,
    suppressed_tokens,
)
from training.large.rows import Placed
from training.rewards import Fields, Recipe, read_target, trl_rewards


class Trainer(FullResume, GRPOTrainer):
    """TRL's trainer, resumed with its weights."""


def target_of(one: Placed) -> str:
    """The answer that an example ends in."""
    return one.example.messages[-1].content


def longest_target(processor: VisionTextProcessor, placed: Sequence[Placed], most: int) -> int:
    """Tokens of the longest target with its end. RunError where one is longer than `most`.

    A cap below the longest target earns 0 for every dense grid, without a word.
    """
    eos = processor.tokenizer.eos_token
    counts = [
        len(processor.tokenizer(target_of(one) + eos, add_special_tokens=False)["input_ids"])
        for one in placed
    ]
    over = [one.example.id for one, count in zip(placed, counts, strict=True) if count > most]
    if over:
        raise RunError(
            "targets are longer than an answer may be",
            which=f"{len(over)} of {len(placed)}, the first is {over[0]}",
            expected=f"at most {most} tokens",
            got=f"{max(counts)} tokens",
            action=f"give --max-completion {max(counts)}: an answer that is cut off earns nothing",
        )
    return max(counts)


def stratum(wanted: Fields) -> str:
    """Name of the stratum of a target: its class or decision, and how many cells are marked."""
    decision = wanted.choices.get(tasks.CLASS_KEY) or wanted.choices.get(tasks.ANSWER_KEY, "")
    if wanted.grids is None:
        return f"{decision or 'readings'}, no grid"
    cells = sum(int(grid.cells.sum()) for grid in wanted.grids.values())
    return f"{decision}, {int(np.digitize(cells, CELL_EDGES))}"


def is_clean(wanted: Fields) -> bool:
    """The target says that nothing is wrong. A grid that nobody drew is no such word."""
    said = {tasks.CLASS_KEY: tasks.NORMAL, tasks.ANSWER_KEY: tasks.NONE}
    found = [wanted.choices[key] == good for key, good in said.items() if key in wanted.choices]
    if found:
        return all(found)
    return wanted.grids is not None and not any(g.cells.any() for g in wanted.grids.values())


def choose(placed: Sequence[Placed], count: int, share: float | None, seed: int) -> list[Placed]:
    """`count` prompts in random order, stratified; `share` of them clean (None: as they come)."""
    wanted = [read_target(target_of(one)) for one in placed]
    labels = np.array([stratum(fields) for fields in wanted])
    clean = np.array([is_clean(fields) for fields in wanted])
    drawn = stratified(labels, count, np.random.default_rng(seed), clean, share)
    return [placed[number] for number in drawn]


def grpo_config(args: argparse.Namespace, processor: VisionTextProcessor) -> GRPOConfig:
    """TRL's settings of the recipe."""
    if args.vllm and importlib.util.find_spec("vllm") is None:
        raise RunError("vLLM is not installed", which="--vllm", action="pip install vllm, or omit")
    no_pictures: dict[str, Any] = {"suppress_tokens": suppressed_tokens(processor)}
    if args.vllm:  # vLLM names it differently
        no_pictures = {"bad_words": list(VISION_TOKENS)}
    answers = args.prompts_a_step * args.group
    shared = sft.shared_config(args) | {"max_steps": max(1, args.prompts // args.prompts_a_step)}
    if args.max_steps > 0:
        shared["max_steps"] = min(shared["max_steps"], args.max_steps)
    return GRPOConfig(
        **shared,
        gradient_accumulation_steps=sft.accumulation(answers, args.micro),
        num_generations=args.group,
        max_completion_length=args.max_completion,
        temperature=args.temperature,
        beta=0.0,
        scale_rewards="group",
        loss_type="dapo",
        reward_weights=trl_rewards(recipe_of(args))[1],
        generation_kwargs=no_pictures,
        disable_dropout=True,  # answers are sampled in training mode: LoRA would drop out
        shuffle_dataset=False,  # `choose` has shuffled within its strata
        use_vllm=args.vllm,
        save_strategy="steps",
        save_steps=args.every,
    )


def recipe_of(args: argparse.Namespace) -> Recipe:
    """The published reward, or ours with a cost of alarms on clean parts."""
    return Recipe(
        clean_cells=None if args.published else args.clean_cells,
        alarm_cost=0.0 if args.published else args.alarm_cost,
    )


def build(args: argparse.Namespace) -> tuple[Trainer, dict[str, Any]]:
    """The trainer with model and prompts, and figures of the prompts."""
    processor = load_processor(args.model, args.min_pixels, args.max_pixels)
    require_left_padding(processor)
    found = list(rows.by_turn(rows.read_split(args.examples, "train")))
    if not found:
        raise RunError("no prompts", which=", ".join(map(str, args.examples)), got="0 of train")
    longest = longest_target(processor, found, args.max_completion)
    quiet = int(os.environ.get("RANK", "0")) > 0
    length = rows.sequential_length(processor)
    tokens = rows.check_lengths(found, length, args.max_length, quiet=quiet)
    chosen = choose(found, args.prompts, args.clean_share, args.seed)
    lora = args.method == "lora"
    low = lora and sft.use_bf16(args.precision)
    model = checkpoint.load_model(args.model, torch.bfloat16 if low else torch.float32)
    config = grpo_config(args, processor)
    watch = sharding.ShardingCheck()
    trainer = Trainer(
        model=model,
        reward_funcs=list(trl_rewards(recipe_of(args))[0]),
        args=config,
        train_dataset=rows.trl_rows(chosen, target=[target_of(one) for one in chosen]),
        processing_class=processor,
        peft_config=checkpoint.lora_config(args.rank, args.alpha, 0.0) if lora else None,
        callbacks=[watch] if config.fsdp else [],
    )
    watch.trainer = trainer
    return trainer, {"longest_target": longest, "longest_tokens": tokens, "prompts": len(chosen)}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train, write `OUT/merged`; what was done, for the last line of the command."""
    begun = time.perf_counter()
    args.lr = args.lr or 1e-5
    resumed: Path | None = sft.start(args)
    trainer, figures = build(args)
    return sft.finish(trainer, args, resumed, figures, begun)


def add_options(parser: argparse.ArgumentParser) -> None:
    """All options of `training.grpo --model PATH`."""
    sft.add_model_options(parser)
    add = parser.add_argument
    parser.set_defaults(micro=4)
    add("--prompts", type=int, default=2400, help="prompts of the run, stratified")
    add("--prompts-a-step", type=int, default=8)
    add("--group", type=int, default=4, help="answers to one prompt")
    add("--temperature", type=float, default=1.0)
    add("--max-completion", type=int, default=768, help="tokens an answer may have")
    add("--max-length", type=int, default=4096, help="tokens that no example may exceed")
    add("--clean-share", type=float, help="share of clean prompts (default: as in the examples)")
    add("--published", action="store_true", help="the published reward: any alarm on clean is 0")
    add("--clean-cells", type=float, default=16.0, help="false cells that cost a clean part all")
    add("--alarm-cost", type=float, default=0.0, help="taken off when a clean part is marked")
    add("--vllm", action="store_true", help="sample with vLLM (not proven here)")
    add("--every", type=int, default=25, help="steps between checkpoints")
