"""One command from a line and what people said about its parts to a signed bundle.

    python -m training.line station_config/demo --out .work/lines/demo --dry-run
    python -m training.line LINE --out DIR --checkpoint .work/checkpoints/nano \\
        --evidence /var/lib/station/evidence --labels labels.jsonl --key line.pem --release 8

LINE is a line file, or a folder with line.yaml; `loop.yaml` beside it is the recipe
(training/LINE.md has every key; all have defaults). The steps are labels, synth, sft, grpo,
references, parts, draft, judge, calibrate, export, verify, certify, sign and selftest; the recipe
`calibrate: {folds: 2}` has fold-1 and fold-2 before calibrate. Each is
recorded in DIR/state.json with the digest of what it was made from: the same command goes on where
a kill, a fault or a power cut left it, and makes again what changed and what depends on it.
Training goes on from its own states. Without parts that carry a certificate the bundle is advisory,
and the reason is told.

The last line is one JSON object. Exit code 0: a bundle was made and tried; 1: a step refused.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge_station.contract.error import StationError
from training.loop import state
from training.loop.error import LineError
from training.loop.steps import Loop, Step

NAMES = (
    "labels", "synth", "sft", "grpo", "references", "parts", "draft", "judge", "calibrate",
    "export", "verify", "certify", "sign", "selftest",
)  # fmt: skip


def plan(loop: Loop, now: state.State) -> list[tuple[Step, str | None]]:
    """Every step, and why it has to be made; None: it counts. What follows a step that has to be
    made is judged again once that is done, so "may follow" is the most that can be said of it."""
    found: list[tuple[Step, str | None]] = []
    for step in loop.steps():
        why = state.objection(now.steps.get(step.name), step.inputs(now), loop.out)
        if why is None and any(reason is not None for _, reason in found):
            why = "may follow from the steps before"
        found.append((step, why))
    return found


def shown(planned: Sequence[tuple[Step, str | None]], now: state.State) -> str:
    """The plan for a person, with the time that each step takes."""
    lines = [f"{'step':<12}{'time':>8}  {'':<44}{'what'}"]
    total = 0.0
    for step, why in planned:
        known = now.steps.get(step.name)
        seconds = known.seconds if known is not None else step.estimate_s
        total += seconds if why is not None else 0.0
        lines.append(
            f"{step.name:<12}{_time(seconds) if why else 'done':>8}  {why or '':<44}{step.what}"
        )
    lines.append(
        f"about {_time(total)} to go; times are those of the last run here, else estimates for two "
        "threads of one core"
    )
    return "\n".join(lines)


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def go(loop: Loop) -> dict[str, Any]:
    """Make every step that does not count. Raises StationError of the step that refuses."""
    steps = loop.steps()
    now = state.read(loop.out)
    for number, step in enumerate(steps, 1):
        inputs = step.inputs(now)
        why = state.objection(now.steps.get(step.name), inputs, loop.out)
        head = f"[{number}/{len(steps)}] {step.name}"
        if why is None:
            print(f"{head}: done before", file=sys.stderr)
            continue
        goes_on = step.goes_on and now.begun.get(step.name) == inputs
        if not goes_on:
            _wipe(step)
        now = now.with_begun(step.name, inputs)
        state.write(loop.out, now)
        text = f"goes on ({step.what})" if goes_on else f"{step.what} ({why})"
        print(f"{head}: {text}", file=sys.stderr, flush=True)
        begun = time.monotonic()
        notes = step.make()
        done = state.finished(inputs, step.outputs, loop.out, time.monotonic() - begun, notes)
        now = now.with_done(step.name, done)
        state.write(loop.out, now)
        print(f"{head}: {done.seconds:.0f} s, {json.dumps(notes)}", file=sys.stderr, flush=True)
    return {
        "bundle": str(loop.bundle),
        **{name: dict(now.steps[name].notes) for name in ("labels", "certify", "sign", "selftest")},
        "seconds": round(sum(done.seconds for done in now.steps.values())),
    }


def _wipe(step: Step) -> None:
    """What an older run of the step left."""
    for path in step.outputs:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.line",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("line", type=Path, help="line file, or a folder with line.yaml")
    parser.add_argument("--out", type=Path, required=True, help="folder of this run")
    parser.add_argument("--labels", type=Path, nargs="+", default=[], help="JSON lines of labels")
    parser.add_argument("--evidence", type=Path, help="evidence folder that they are about")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="folder of training.sft to start from (default: the recipe's)",
    )
    parser.add_argument("--key", type=Path, help="private key (PEM): signs certificate and bundle")
    parser.add_argument("--release", type=int, default=1, help="release number, only ever grows")
    parser.add_argument("--dry-run", action="store_true", help="show the plan, do nothing")
    parser.add_argument(
        "--from", dest="again", metavar="STEP",
        help=f"make this step and all after it again: {', '.join(NAMES)}; or a fold",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="fewer progress bars")
    return parser


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Plan or run. Raises StationError."""
    loop = Loop.of(
        args.line, args.out, labels=tuple(args.labels), evidence=args.evidence,
        checkpoint=args.checkpoint, key=args.key, release=args.release, quiet=args.quiet,
    )  # fmt: skip
    names = [step.name for step in loop.steps()]
    if args.again is not None and args.again not in names:
        raise LineError("no such step", which="--from", expected=", ".join(names), got=args.again)
    again = names[names.index(args.again) :] if args.again is not None else ()
    if args.dry_run:
        now = state.read(loop.out).without(again)
        planned = plan(loop, now)
        print(shown(planned, now))
        return {"to_do": [step.name for step, why in planned if why is not None]}
    with state.held(loop.out):
        if again:
            state.write(loop.out, state.read(loop.out).without(again))
        return go(loop)


def main(words: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(words)
    try:
        print(json.dumps(run(args)))
    except StationError as error:
        print(f"training.line: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        where = error.filename or args.out
        failed = LineError("the disk refuses", which=where, got=error.strerror or error)
        print(f"training.line: {failed}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ntraining.line: stopped; the same command goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
