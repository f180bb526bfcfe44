"""Supervised fine-tuning of a Qwen2.5-VL checkpoint with TRL.

The recipe (the `run` of `training.sft --model ...`): LoRA r 32, alpha 16 on all linear layers of
the language model, lr 2e-4, 5 epochs; or full, lr 1e-5, AdamW without decay, batch 32. Both: loss
on target tokens only, cosine with 3 % warm-up, gradients clipped at 1, bf16 on a GPU, gradient
checkpointing, early stop on the held-out split, the best weights merged into `OUT/merged`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback
from trl import SFTConfig

from training.large import checkpoint, rows, sharding
from training.large.branches import NONE_WEIGHT, BranchCollator, Layout
from training.large.checkpoint import RunError
from training.large.processor import load_processor
from training.large.trainers import BranchTrainer, SequentialTrainer


@dataclass(frozen=True)
class Method:
    """What differs between the two ways to fine-tune."""

    rate: float
    epochs: float


METHODS = {"lora": Method(2e-4, 5), "full": Method(1e-5, 3)}
LAYOUTS = ("branches", "sequential")
SETTINGS = "run.json"
FREE = frozenset(
    [
        "out",
        "resume",
        "micro",
        "workers",
        "fsdp",
        "sharded_state",
        "no_checkpointing",
        "max_length",
        "dry_run",
        "gpus",
        "gpu_gib",
        "dry_tokens",
        "dry_pictures",
    ]
)
"""Settings that a resumed run may change: none of them changes what is learned."""


def use_bf16(precision: str) -> bool:
    """`auto` is bf16 on a GPU that has it, else float32."""
    if precision == "auto":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return precision == "bf16"


def processes() -> int:
    """Processes of this launch (torchrun, accelerate)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def accumulation(batch: int, micro: int) -> int:
    """Micro-batches a process adds up to one step."""
    share = micro * processes()
    if batch % share:
        raise RunError(
            "the batch does not divide",
            which="--batch",
            expected=f"a multiple of --micro x processes = {micro} x {processes()}",
            got=batch,
        )
    return batch // share


def shared_config(args: argparse.Namespace) -> dict[str, Any]:
    """Settings that SFT and GRPO have in common, for SFTConfig and GRPOConfig."""
    bf16 = use_bf16(args.precision)
    fsdp = args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    states = "SHARDED_STATE_DICT" if args.sharded_state else "FULL_STATE_DICT"
    return {
        "output_dir": str(args.out),
        "per_device_train_batch_size": args.micro,
        "max_steps": args.max_steps,
        "learning_rate": args.lr,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.03,
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "optim": "adamw_torch_fused" if torch.cuda.is_available() else "adamw_torch",
        "bf16": bf16,
        "use_cpu": not torch.cuda.is_available(),
        "activation_checkpointing": not args.no_checkpointing,
        "ddp_find_unused_parameters": False,  # every row has a picture: all weights are used
        "remove_unused_columns": False,
        "dataloader_num_workers": args.workers,
        "save_total_limit": 2,
        "logging_steps": 1,
        "report_to": "none",
        "seed": args.seed,
        "data_seed": args.seed,
        "restore_callback_states_from_checkpoint": True,
        **({"fsdp": True, "fsdp_config": sharding.fsdp_config(states)} if fsdp else {}),
    }


def sft_config(args: argparse.Namespace, validated: bool) -> SFTConfig:
    """TRL's settings; `validated`: there is a held-out split."""
    steps = args.every > 0
    pace = {"save_strategy": "steps" if steps else "epoch", "save_steps": args.every or 500}
    held = {"eval_strategy": pace["save_strategy"], "eval_steps": args.every or None}
    best = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
        "per_device_eval_batch_size": args.micro,
        "prediction_loss_only": True,
    }
    return SFTConfig(
        **shared_config(args),
        **pace,
        **(held | best if validated else {}),
        num_train_epochs=args.epochs,
        gradient_accumulation_steps=accumulation(args.batch, args.micro),
        max_length=None,  # TRL would cut the answer off silently; `rows.check_lengths` refuses
        dataset_kwargs={"skip_prepare_dataset": True},
    )


def start(args: argparse.Namespace) -> Path | None:
    """The checkpoint to go on from. RunError where the folder holds another run."""
    last = checkpoint.last_complete(args.out)
    if not args.resume:
        if last is not None or (args.out / checkpoint.MERGED).exists():
            raise RunError(
                "the folder holds a run",
                which=args.out,
                action="give --resume to go on with it, or another --out",
            )
        return None
    if last is not None and (args.out / SETTINGS).exists():
        before = json.loads((args.out / SETTINGS).read_text(encoding="utf-8"))
        now = settings(args)
        changed = [name for name in now if now[name] != before.get(name, now[name])]
        if changed:
            raise RunError(
                "a resumed run has other settings",
                which=", ".join(f"--{name.replace('_', '-')}" for name in changed),
                expected=[before[name] for name in changed],
                got=[now[name] for name in changed],
                action="resume with the settings of the start, or choose another --out",
            )
    return last


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that decide what is learned, as JSON values."""
    kept = {name: value for name, value in vars(args).items() if name not in FREE}
    return dict(json.loads(json.dumps(kept, default=str)))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train, write `OUT/merged`; what was done, for the last line of the command."""
    begun = time.perf_counter()
    method = METHODS[args.method]
    args.lr = args.lr or method.rate
    args.epochs = args.epochs or method.epochs
    resumed = start(args)
    trainer, longest = build(args)
    return finish(trainer, args, resumed, {"longest_tokens": longest}, begun)


def build(args: argparse.Namespace) -> tuple[Any, int]:
    """The trainer with model and data, and the longest example in tokens."""
    processor = load_processor(args.model, args.min_pixels, args.max_pixels)
    train, held = (rows.read_split(args.examples, split) for split in ("train", "val"))
    if not train:
        raise RunError(
            "nothing to learn from",
            which=", ".join(map(str, args.examples)),
            expected="examples of the split train",
        )
    if args.layout == "branches":
        length = rows.branch_length(Layout(processor))
        make, collator, kind = rows.branch_rows, BranchCollator(processor), BranchTrainer
    else:
        train, held = ([*rows.by_turn(split)] for split in (train, held))
        rows.require_equal_weights([*train, *held])
        length = rows.sequential_length(processor)
        make, collator, kind = rows.trl_rows, None, SequentialTrainer
    quiet = int(os.environ.get("RANK", "0")) > 0
    longest = rows.check_lengths([*train, *held], length, args.max_length, quiet=quiet)
    low = args.method == "lora" and use_bf16(args.precision)
    model = checkpoint.load_model(args.model, torch.bfloat16 if low else torch.float32)
    lora = args.method == "lora"
    watch = sharding.ShardingCheck()
    config = sft_config(args, bool(held))
    callbacks: list[Any] = [watch] if config.fsdp else []
    if held:
        callbacks.append(EarlyStoppingCallback(args.patience))
    trainer = kind(
        model=model,
        args=config,
        data_collator=collator,
        train_dataset=make(train),
        eval_dataset=make(held) if held else None,
        processing_class=processor,
        peft_config=checkpoint.lora_config(args.rank, args.alpha, args.dropout) if lora else None,
        callbacks=callbacks,
    )
    watch.trainer = trainer
    return trainer, longest


def finish(
    trainer: Any,
    args: argparse.Namespace,
    resumed: Path | None,
    figures: dict[str, Any],
    begun: float,
) -> dict[str, Any]:
    """Train from `resumed` or the start, write checkpoint, card and curve; the figures."""
    main = trainer.accelerator.is_main_process
    trainer.accelerator.wait_for_everyone()
    if main:
        args.out.mkdir(parents=True, exist_ok=True)
        _write(args.out / SETTINGS, json.dumps(settings(args), indent=1))
    trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
    history = trainer.state.log_history
    for name in ("loss", "eval_loss", "reward"):
        curve = [row[name] for row in history if name in row]
        if curve:
            figures[name] = {"first": curve[0], "last": curve[-1], "least": min(curve)}
    seen = [row["num_tokens"] for row in history if "num_tokens" in row]
    spent = [row["train_runtime"] for row in history if "train_runtime" in row]
    if seen and spent:
        figures["tokens_per_s"] = round(seen[-1] / spent[-1], 1)
    figures |= {
        "steps": trainer.state.global_step,
        "epochs": round(float(trainer.state.epoch or 0), 3),
        "processes": processes(),
        "trainable": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    if torch.cuda.is_available():
        figures["peak_gpu_mb"] = torch.cuda.max_memory_allocated() // 2**20
    figures["seconds"] = round(time.perf_counter() - begun, 1)
    card = settings(args) | figures | {"none_weight": none_weight(args)}
    figures["checkpoint"] = str(checkpoint.write_merged(trainer, args.model, args.out, card))
    if main:
        _write(args.out / "curve.jsonl", "".join(f"{json.dumps(row)}\n" for row in history))
    return figures


def none_weight(args: argparse.Namespace) -> float:
    """What the station must undo at read-out: the weight that empty rows had."""
    return NONE_WEIGHT if getattr(args, "layout", "") == "branches" else 1.0


def _write(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Options of every command that trains a large model."""
    add = parser.add_argument
    names = ", ".join(checkpoint.NAMES)
    add("--model", required=True, help=f"checkpoint folder, name on the hub, or {names}")
    add("--examples", type=Path, nargs="+", metavar="FILE", help="example files (JSON lines)")
    add("--out", type=Path, help="folder of the run; the result is its folder `merged`")
    add("--method", choices=METHODS, default="lora", help="adapters, or every weight")
    add("--lr", type=float, help="peak learning rate (lora 2e-4, full 1e-5)")
    add("--micro", type=int, default=1, help="examples a process holds at once")
    add("--max-steps", type=int, default=-1, help="stop after so many steps (-1: by epochs)")
    add("--rank", type=int, default=32, help="LoRA rank")
    add("--alpha", type=int, default=16, help="LoRA alpha; its factor is alpha / rank")
    add("--precision", choices=("auto", "bf16", "fp32"), default="auto")
    add("--no-checkpointing", action="store_true", help="keep activations: faster, more memory")
    add("--fsdp", action="store_true", help="shard over all processes (FSDP2); see training/runs")
    add("--sharded-state", action="store_true", help="each process saves its own shard")
    add("--min-pixels", type=int, default=56 * 56, help="smaller pictures are enlarged")
    add("--max-pixels", type=int, default=1280 * 28 * 28, help="larger pictures are reduced")
    add("--workers", type=int, default=0, help="processes that open pictures")
    add("--seed", type=int, default=0)
    add("--resume", action="store_true", help="go on from the last complete checkpoint of --out")


def add_options(parser: argparse.ArgumentParser) -> None:
    """All options of `training.sft --model PATH`."""
    add_model_options(parser)
    add = parser.add_argument
    add(
        "--layout",
        choices=LAYOUTS,
        default="branches",
        help="branches: every line alone behind the picture, as the station decodes (default); "
        "sequential: the answer as one text, for servers that generate it in one go",
    )
    add("--epochs", type=float, help="passes over the examples (lora 5, full 3)")
    add("--batch", type=int, default=32, help="examples a step, over all processes")
    add("--dropout", type=float, default=0.05, help="LoRA dropout")
    add("--max-length", type=int, default=4096, help="tokens that no example may exceed")
    add("--every", type=int, default=0, help="steps between checkpoints (0: once an epoch)")
    add("--patience", type=int, default=3, help="validations without gain that end the run")
