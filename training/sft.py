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
from pathlib import Path

from forge_station.contract.catalogue import WORKPIECES
from training.nano.sft import train


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder written by training.synth")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--minutes", type=float, default=60, help="training time without pauses")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--surface", type=float, default=0.55, help="share of surface steps")
    parser.add_argument("--auxiliary", type=float, default=0.5, help="weight of the dense heads")
    parser.add_argument("--decay", type=float, default=0.3, help="share of time of the decay")
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
    parser.add_argument("--init", type=Path, help="state.pt of an earlier run to start from")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
