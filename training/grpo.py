"""GRPO: sample a group of answers to a part, reward them against its truth, favour the better ones.

    python -m training.grpo --data .work/data --init .work/checkpoints/nano --out .work/grpo
    python -m training.grpo ... --resume                # continue after an interruption
    python -m training.grpo ... --seeds 0 1 2           # against equal extra SFT, seed by seed
    python -m training.grpo --model 3b --help           # options of large models (TRL)

Nano (the default, on a CPU): prompts are surface samples of the pool `surface`, stratified by class
and number of defective cells. An answer is class, score and all 48 grid rows, sampled as the
station reads them. Reward = 1.0 dice + 0.3 score + 0.1 format + 1.0 class (training/rewards.py).
`--credit row` gives every grid row its own advantage, `answer` is the published way. Clean parts:
a false alarm earns 1 - cells/`--clean-cells` less `--alarm-cost`; `--clean-share` sets how many of
the prompts are clean; a checkpoint whose clean alarms rose on `surface-val` is not written
(`--alarm-gate`). Printed and kept: the audit of answer lengths, the reward and alarm curve
(curve.jsonl), figures before and after (figures.json).
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from forge_station.contract.error import StationError
from training.rewards import Recipe

NANO = "nano"


def nano_parser() -> argparse.ArgumentParser:
    """Options of the nano loop; their defaults are the recipe that was measured."""
    parser = argparse.ArgumentParser(
        prog="python -m training.grpo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default=NANO, help="nano, or a large model: folder, hub name, 3b, 7b")
    add("--data", type=Path, required=True, help="folder written by training.synth")
    add("--init", type=Path, required=True, help="checkpoint folder of training.sft to start from")
    add("--out", type=Path, required=True, help="folder of this run")
    add("--prompts", type=int, default=640, help="prompts of the run, stratified")
    add("--batch", type=int, default=16, help="prompts a step")
    add("--group", type=int, default=4, help="answers a prompt")
    add("--rate", type=float, default=0.3, help="share of SFT's learning rates, falling to 0")
    add("--credit", choices=("row", "answer"), default="row", help="what an advantage belongs to")
    add("--scale", choices=("group", "none"), default="group", help="advantages over deviation")
    add("--vision", action="store_true", help="train the vision tower too (slower)")
    add("--clean-share", type=float, help="share of clean prompts (default: that of the pool)")
    add("--longest-row", type=int, default=17, help="tokens a grid row may have")
    for field in fields(Recipe):
        value, name = field.default, f"--{field.name.replace('_', '-')}"
        text = f"reward setting, see training/rewards.py (default {value})"
        add(name, type=float, default=value, metavar="X", help=text)
    add("--published", action="store_true", help="clean parts as published: any alarm earns 0")
    add("--seed", type=int, default=0)
    add("--seeds", type=int, nargs="+", help="compare GRPO with equal extra SFT over these seeds")
    add("--sft-prompts", type=int, help="prompts of the SFT arm (default: as many as GRPO)")
    add("--control", choices=("sft",), help="run the SFT arm alone")
    add("--every", type=int, default=25, help="steps between states and rows of the curve")
    add("--validate", type=int, default=500, help="validation samples before and after")
    add("--alarm-gate", type=float, default=0.02, help="rise of clean alarms that is let pass")
    add("--threads", type=int, default=2)
    add("--resume", action="store_true", help="continue an interrupted run")
    return parser


def run_nano(words: Sequence[str] | None) -> None:
    """One nano run, or a comparison over seeds."""
    args = nano_parser().parse_args(words)
    import torch

    from training.nano import grpo, trial

    values = {field.name: getattr(args, field.name) for field in fields(Recipe)}
    recipe = Recipe(**{**values, **({"clean_cells": None} if args.published else {})})
    names = {field.name for field in fields(grpo.Settings)} - {"recipe", "control"}
    chosen = {name: getattr(args, name) for name in names}
    settings = grpo.Settings(**chosen, recipe=recipe, control=args.control or "")
    torch.set_num_threads(args.threads)
    shared = {"every": args.every, "validate": args.validate}
    if args.seeds:
        done = trial.trial(
            args.data,
            args.init,
            args.out,
            settings,
            args.seeds,
            sft_prompts=args.sft_prompts,
            **shared,
        )
    else:
        done = trial.train(
            args.data,
            args.init,
            args.out,
            settings,
            resume=args.resume,
            alarm_gate=args.alarm_gate,
            **shared,
        )
    print(json.dumps(done))


def run_large(words: Sequence[str] | None) -> None:
    """GRPO of a Qwen2.5-VL checkpoint with TRL."""
    from training.large import grpo

    parser = argparse.ArgumentParser(
        prog="python -m training.grpo",
        description=grpo.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    grpo.add_options(parser)
    args = parser.parse_args(words)
    missing = [f"--{name}" for name in ("examples", "out") if getattr(args, name) is None]
    if missing:
        parser.error(f"needed: {', '.join(missing)}")
    done = grpo.run(args)
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(done), flush=True)


def main(words: Sequence[str] | None = None) -> None:
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--model", default=NANO)
    chosen, _ = first.parse_known_args(words)
    try:
        (run_nano if chosen.model == NANO else run_large)(words)
    except StationError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
