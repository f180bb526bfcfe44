"""Supervised fine-tuning: the nano model on pools, or a Qwen2.5-VL checkpoint on example files.

    python -m training.sft --data .work/data --out .work/checkpoints/nano --minutes 60
    python -m training.sft ... --resume            # continue after an interruption
    python -m training.sft --examples tiles/examples.jsonl --out .work/runs/tiles   # nano, photos
    python -m training.sft --examples --help       # options of nano on photos
    python -m training.sft --model 3b --examples line/examples.jsonl --out .work/runs/line
    python -m training.sft --model 3b --help       # options of large models
    python -m training.sft --model 3b-shape --dry-run --gpus 8

Nano (the default, on a CPU): two pools (see `training.synth`), marks sheets and surface pictures.
Every step draws one of them, plus a small text-only batch for the symbolic rule of turn two. The
learning rate is constant and falls linearly to zero over the last `--decay` share of the time: the
decay gives the last ten points, so only a decayed checkpoint is exported. `--out` receives a
Hugging Face folder, an undecayed state to continue from, and the curve as JSON lines.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from forge_station.contract.catalogue import WORKPIECES
from forge_station.contract.error import StationError
from forge_station.contract.views import CHANNELS, DIFFERENCE, SURFACE_CHANNELS, WHITE

NANO = "nano"
_LARGE = """Supervised fine-tuning of a Qwen2.5-VL checkpoint on example files.

    python -m training.sft --model 3b --examples line/examples.jsonl --out .work/runs/line
    torchrun --nproc-per-node 8 -m training.sft --model 3b --method full --fsdp ...
    python -m training.sft --model 3b-shape --dry-run --gpus 8   # no weights, no GPU: will it fit?

The example format is in training/data/examples.py; commands with hardware, memory and time are in
training/runs/README.md. A run resumes bit for bit with `--resume`; its result, adapters merged, is
the checkpoint folder OUT/merged for `export.bundle`.
"""


def nano_parser() -> argparse.ArgumentParser:
    """Options of the nano trainer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default=NANO, help="nano, or a large model: folder, hub name, 3b, 7b"
    )
    parser.add_argument("--data", type=Path, required=True, help="folder written by training.synth")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--minutes", type=float, default=60, help="training time without pauses")
    parser.add_argument("--steps", type=int, help="train so many steps instead of --minutes")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--surface", type=float, default=0.55, help="share of surface steps")
    parser.add_argument("--auxiliary", type=float, default=0.5, help="weight of the dense heads")
    parser.add_argument("--decay", type=float, default=0.3, help="share of time of the decay")
    parser.add_argument(
        "--rate", type=float, default=1.0, help="share of the learning rates; less to go on gently"
    )
    parser.add_argument(
        "--labelled",
        type=float,
        default=0.0,
        help="share of each surface batch that people labelled (training.line), if there are any",
    )
    parser.add_argument("--every", type=float, default=5, help="minutes between validations")
    parser.add_argument("--validate", type=int, default=300, help="validation samples a pool")
    parser.add_argument("--compile", action="store_true", help="fuse layers (needs a compiler)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--without",
        nargs="*",
        default=[],
        choices=WORKPIECES,
        metavar="WORKPIECE",
        help="leave out sheets that show these (cross-scenario: train without, test on them)",
    )
    parser.add_argument(
        "--surface-channels",
        nargs=3,
        default=SURFACE_CHANNELS,
        choices=[*CHANNELS, DIFFERENCE, WHITE, "blank"],
        metavar="CHANNEL",
        help="what a surface picture shows: shade relief height difference white blank "
        "(ablations; a station draws what its manifest may name: not white)",
    )
    parser.add_argument(
        "--grid",
        choices=("rows", "text"),
        default="rows",
        help="form of the defect grid: rows, as the station reads it, or one text, to compare with",
    )
    parser.add_argument("--init", type=Path, help="state.pt of an earlier run to start from")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run")
    return parser


def large(rest: Sequence[str] | None) -> None:
    """Fine-tune a large model, or check on paper that it fits."""
    from training.large import sft, shapes

    parser = argparse.ArgumentParser(
        prog="python -m training.sft",
        description=_LARGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sft.add_options(parser)
    shapes.add_options(parser)
    args = parser.parse_args(rest)
    if args.dry_run:
        done = shapes.dry_run(args)
    else:
        missing = [name for name in ("examples", "out") if getattr(args, name) is None]
        if missing:
            parser.error(f"needed: {', '.join(f'--{name}' for name in missing)}")
        done = sft.run(args)
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(done), flush=True)


def main(words: Sequence[str] | None = None) -> None:
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--model", default=NANO)
    first.add_argument("--examples", nargs="*")
    chosen, _ = first.parse_known_args(words)
    if chosen.model == NANO and chosen.examples is None:
        from training.nano.sft import train

        train(nano_parser().parse_args(words))
        return
    try:
        if chosen.model == NANO:
            from training.nano import photo

            photo.main(words)
        else:
            large(words)
    except StationError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
