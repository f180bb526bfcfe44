"""Labelled data -> examples of the one format, split by group and guarded against leakage.

    python -m training.load masks tiles --part magnetic_tile --out .work/tiles
    python -m training.load check .work/tiles/examples.jsonl other/examples.jsonl

SOURCE is one of the commands below; each explains itself with --help. Every one writes
OUT/examples.jsonl and OUT/images, whole or not at all, and prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from forge_station.contract.error import StationError
from training.data import examples, leakage
from training.data.loaders import (
    coco,
    contact,
    evidence,
    exporting,
    forge,
    labelme,
    masks,
    names,
    splits,
    writing,
    yolo,
)
from training.data.loaders.sample import Grouping, LoadError, Problems
from training.evaluation.photo_cases import write_cases

SOURCES: dict[str, ModuleType] = {
    "forge": forge,
    "evidence": evidence,
    "masks": masks,
    "names": names,
    "coco": coco,
    "labelme": labelme,
    "yolo": yolo,
}


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        report, code = args.command(args)
    except (StationError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report, ensure_ascii=False))
    return int(code)


def load(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """One source -> one folder. Exit code 1 when leaks were only reported."""
    for name, share in (("--clean-share", args.clean_share), ("--val-share", args.val_share)):
        if share is not None and not 0 <= share < 1:
            raise LoadError("not a share", which=name, expected="0 or more, below 1", got=share)
    problems = Problems(skip=args.skip_bad)
    plan = writing.Plan(
        shares=splits.parse_shares(args.split),
        fold=splits.parse_fold(args.fold) if args.fold else None,
        val_share=args.val_share,
        seed=args.seed,
        clean_share=args.clean_share,
        leaks=args.leaks,
        bits=args.bits,
        overwrite=args.overwrite,
        quiet=args.quiet,
    )
    loaded = args.source.run(args, Grouping(args.group, args.run_gap), problems)
    report = writing.write(args.out, loaded, problems, plan)
    if args.contact_sheet:
        contact.page(args.out / examples.FILE, args.contact_sheet, seed=args.seed)
    return report, 1 if report["leaks"] else 0


def check(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """List what files and splits share. Exit code 1 when there is anything."""
    prints = leakage.prints_of(args.files, args.quiet)
    found = leakage.leaks(prints, args.bits)
    for leak in found:
        print(leak)
    sides: dict[str, int] = {}
    for item in prints:
        sides[item.side] = sides.get(item.side, 0) + 1
    report = {"examples": sides, "bits": args.bits, "leaks": len(found)}
    return report, 1 if found else 0


def look(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Draw a page of examples."""
    count = contact.page(args.file, args.out, args.count, args.seed)
    return {"drawn": count, "out": str(args.out)}, 0


def export(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Rows for another trainer."""
    return exporting.write(
        args.file, args.out, args.form, args.split, args.partial, overwrite=args.overwrite
    ), 0


def cases(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Photo examples -> case files."""
    count = write_cases(args.file, args.out, args.split)
    return {"cases": count, "out": str(args.out)}, 0


def _parser() -> argparse.ArgumentParser:
    parser = _described(argparse.ArgumentParser, __doc__ or "", prog="python -m training.load")
    commands = parser.add_subparsers(required=True, metavar="SOURCE")
    for name, module in SOURCES.items():
        own = _command(commands, name, module.HELP, load)
        own.set_defaults(source=module)
        module.add_arguments(own)
        _add_writing(own)
    own = _command(commands, "check", CHECK_HELP, check)
    own.add_argument("files", type=Path, nargs="+", help="examples.jsonl files")
    _add_bits(own)
    for name, form in (("to-qwen", "qwen"), ("to-trl", "trl")):
        own = _command(commands, name, exporting.HELP[form], export)
        own.set_defaults(form=form)
        own.add_argument("file", type=Path, help="examples.jsonl")
        own.add_argument("--out", type=Path, required=True, help="file to write")
        own.add_argument("--split", choices=examples.SPLITS, default="train")
        own.add_argument("--partial", choices=["drop", "keep"], default="drop",
                         help="examples that answer less than their text asks for")  # fmt: skip
        own.add_argument("--overwrite", action="store_true", help="replace the file")
    own = _command(commands, "cases", CASES_HELP, cases)
    own.add_argument("file", type=Path, help="examples.jsonl of photos")
    own.add_argument("--out", type=Path, required=True, help="folder for cases.jsonl and images")
    own.add_argument("--split", choices=examples.SPLITS, default="test")
    own = _command(commands, "look", "A page of examples with their grids and answers.", look)
    own.add_argument("file", type=Path, help="examples.jsonl")
    own.add_argument("--out", type=Path, required=True, help="PNG file")
    own.add_argument("--count", type=int, default=30)
    own.add_argument("--seed", type=int, default=0)
    return parser


CASES_HELP = """Photo examples of a split as case files, which training.evaluate scores on a bundle.

  python -m training.load cases .work/tiles/examples.jsonl --out .work/tiles-cases
  python -m training.evaluate --bundle .work/bundles/tiles --cases .work/tiles-cases"""


CHECK_HELP = """Do splits or files share pictures or groups? Lists the pairs; exit code 1 if so.

  python -m training.load check .work/tiles/examples.jsonl other/examples.jsonl

Every split of every file is compared with every other: pixels (SHA-256), likeness (256-bit dHash)
and group names of the same source. The judged (last) picture of each example counts; reference
pictures may be shared."""


def _command(commands: Any, name: str, text: str, run: Any) -> argparse.ArgumentParser:
    own: argparse.ArgumentParser = _described(
        commands.add_parser, text, name=name, help=text.split("\n")[0]
    )
    own.set_defaults(command=run)
    own.add_argument("--quiet", action="store_true", help="no progress bars")
    return own


def _described(make: Any, text: str, **more: Any) -> Any:
    return make(description=text, formatter_class=argparse.RawDescriptionHelpFormatter, **more)


def _add_writing(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("splits and output").add_argument
    add("--out", type=Path, required=True, help="new folder for examples.jsonl and images")
    add("--split", default="0.8,0.1,0.1", help="train,val,test shares (default %(default)s)")
    add("--fold", help="i/k: fold i of k is test, the rest train; wins over --split")
    add("--val-share", type=float, default=0.0, help="with --fold: share of the rest for val")
    add("--seed", type=int, default=0, help="of the split (default 0)")
    add("--group", help="regular expression on the relative path with (?P<group>...), or (?P<run>"
        "[0-9]+) for a camera's running number; what it groups is never divided")  # fmt: skip
    add("--run-gap", type=int, default=0, help="largest step of `run` within a group")
    add("--clean-share", type=float, help="thin clean examples of train to this share (paper: 0.1)")
    add("--leaks", choices=["error", "merge", "report"], default="error", help="look-alikes across "
        "splits: refuse, join their groups before splitting, or write and list them")  # fmt: skip
    add("--skip-bad", action="store_true", help="leave out entries that cannot be loaded")
    add("--overwrite", action="store_true", help="replace the examples in OUT")
    add("--contact-sheet", type=Path, metavar="PNG", help="draw a page of what was loaded")
    _add_bits(parser)


def _add_bits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bits", type=int, default=leakage.BITS,
        help="of 256, may differ between look-alikes (default %(default)s; 0: exact only)",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
