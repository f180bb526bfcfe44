"""`forge-station evidence`: what is kept of the parts; list, mark, export, make the index anew."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from forge_station.config import EvidenceConfig, load_station
from forge_station.contract.verdict import Outcome
from forge_station.errors import ConfigError
from forge_station.evidence.folder import Folder
from forge_station.evidence.index import Query, Row
from forge_station.evidence.retention import LABELS

_SHOWN = 20

DESCRIPTION = """\
List what is kept of the parts (the newest 20, or those that you ask for), and how much of the
quota it takes. May be used while the station runs.
"""
EPILOG = """\
PART is a result id, its end, or the name of the files without what follows the first dot.
Times are RFC 3339 in UTC and may be cut short: --since 2026-11-30, --until 2026-11-30T12.

Standard output: one line a part (time, outcome, product, serial, size, mark, result id), with
--json one object a part; then the use of the quota and what was deleted so far.

Examples:
  forge-station evidence --outcome FAIL,UNSURE --since 2026-11-30
  forge-station evidence --serial SN-0007 --json
  forge-station evidence --mark held 4cc4-cd44ef9b9b38        never deleted from now on
  forge-station evidence --outcome FAIL --export /media/stick/fails
  python -m training.load evidence /media/stick/fails --labels labels.jsonl --out .work/line
  forge-station evidence --rebuild                            after files were copied or removed

Exit code: 0; 64 wrong usage, no such part, or an index that cannot be used.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command on its parser. Its formatter should keep the line breaks."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("parts", nargs="*", metavar="PART", help="see below; default: by the rest")
    add_query_arguments(parser)
    act = parser.add_mutually_exclusive_group()
    act.add_argument(
        "--mark", choices=LABELS,
        help="review, held: never deleted; labelled: kept as long as FAIL; none: mark taken away",
    )  # fmt: skip
    act.add_argument(
        "--export", type=Path, metavar="DIR", help="copy the files of the parts to a new folder"
    )
    act.add_argument("--rebuild", action="store_true", help="make the index anew from the files")
    parser.add_argument("--json", action="store_true", help="one JSON object a part")


def add_query_arguments(parser: argparse.ArgumentParser) -> None:
    """Which parts; `query_of` reads them."""
    parser.add_argument("--folder", type=Path, metavar="DIR", help="in place of the station's own")
    asked = parser.add_argument_group("which parts")
    asked.add_argument("--since", metavar="TIME", help="from this time on")
    asked.add_argument("--until", metavar="TIME", help="before this time")
    asked.add_argument("--outcome", metavar="A,B", type=_outcomes, default=(), help="e.g. FAIL")
    asked.add_argument("--serial", help="serial number")
    asked.add_argument("--product", metavar="P", help="part number")
    asked.add_argument("--label", choices=LABELS, help="mark")
    asked.add_argument("--last", type=_count, metavar="N", help="the newest N of these")


def query_of(args: argparse.Namespace, last: int | None = None) -> Query:
    """What the arguments ask for; at most the newest `last` unless they say otherwise."""
    return Query(
        args.since, args.until, args.outcome, args.serial, args.product, args.label,
        args.last or last,
    )  # fmt: skip


def settings_of(args: argparse.Namespace) -> EvidenceConfig:
    """The folder that is meant, with the quota of the station."""
    return EvidenceConfig(args.folder) if args.folder else load_station(args.station).evidence


def run(args: argparse.Namespace, out: TextIO = sys.stdout) -> int:
    """Returns the exit code. Raises StationError."""
    settings = settings_of(args)
    with Folder.of(settings) as folder:
        if args.rebuild:
            _rebuild(folder, out)
        elif args.mark:
            _mark(folder, args, out)
        elif args.export:
            _export(folder, _rows(folder, args, None), args.export, out)
        else:
            rows = _rows(folder, args, _SHOWN)
            for row in rows:
                print(json.dumps(asdict(row)) if args.json else _line(row), file=out)
        _use(folder, settings, args.folder is None, sys.stderr if args.json else out)
    return 0


def _rows(folder: Folder, args: argparse.Namespace, last: int | None) -> list[Row]:
    if args.parts:
        return [folder.get(part) for part in args.parts]
    asked = any((args.since, args.until, args.outcome, args.serial, args.product, args.label))
    return folder.find(query_of(args, None if asked else last))


def _line(row: Row) -> str:
    mark = "" if row.label == "none" else f"  {row.label}"
    return (
        f"{row.time}  {row.outcome:<6}  {row.product:<14}  {row.serial:<20}  "
        f"{row.bytes / 1000:>8.0f} kB  {row.result_id}{mark}"
    )


def _use(folder: Folder, settings: EvidenceConfig, own: bool, out: TextIO) -> None:
    totals = folder.totals()
    counted = ", ".join(f"{name} {count}" for name, count in sorted(totals.parts.items()))
    deleted = ", ".join(f"{name} {count}" for name, count in sorted(totals.deleted.items()))
    quota = f" of {settings.quota_gb:g} GB" if own else ""
    print(
        f"{sum(totals.parts.values())} parts ({counted or 'none'}), "
        f"{totals.bytes / 1e9:.3f} GB{quota}; deleted so far: {deleted or 'none'}",
        file=out,
    )


def _rebuild(folder: Folder, out: TextIO) -> None:
    parts, strange = folder.rebuild(
        lambda count: print(f"{count} parts read", file=sys.stderr, flush=True)
    )
    text = f"index made anew: {parts} parts"
    if strange:
        text += f"; {strange} verdict files are of no part of a station and were left alone"
    print(text, file=out)


def _mark(folder: Folder, args: argparse.Namespace, out: TextIO) -> None:
    if not args.parts:
        raise ConfigError("mark which parts?", expected="PART ...", action="list them first")
    for part in args.parts:
        print(_line(folder.mark(folder.get(part), args.mark)), file=out)


def _export(folder: Folder, rows: Sequence[Row], target: Path, out: TextIO) -> None:
    if target.exists() and any(target.iterdir()):
        raise ConfigError(
            "the folder to export to is not empty", which=target, action="name a new one"
        )
    draft = target.with_name(f".{target.name}.part")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        for number, row in enumerate(rows, 1):
            for name in row.files:
                copy = shutil.copytree if name.endswith("/") else shutil.copy2
                copy(folder.path / name, draft / name)
            if number % 100 == 0:
                print(f"{number} of {len(rows)} parts", file=sys.stderr, flush=True)
        if target.exists():
            target.rmdir()
        draft.replace(target)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise ConfigError(
            "the export failed", which=target, got=error, action="try again; a part may be gone"
        ) from error
    print(f"{len(rows)} parts in {target}", file=out)


def _outcomes(text: str) -> tuple[str, ...]:
    found = tuple(text.upper().split(","))
    known = [outcome.value for outcome in Outcome]
    if not set(found) <= set(known):
        raise argparse.ArgumentTypeError(f"{text!r}: expected of {', '.join(known)}")
    return found


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, 1 or more")
    return int(text)
