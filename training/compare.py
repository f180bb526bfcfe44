"""Is the second run better than the first? Every figure's difference with a 95 % interval.

    python -m training.compare before.jsonl after.jsonl
    python -m training.compare before.jsonl after.jsonl --all --out difference.json

Takes two row files of `training.evaluate` over the same cases, of whatever models. Intervals are
from a paired bootstrap (2,000 resamples of cases, the same for both); one that does not hold 0 is
marked `*`. With some 40 figures one or two are marked by chance: decide beforehand which figure
counts. Verdict flips are tested with McNemar's exact test. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_station.checks import Thresholds
from forge_station.contract.error import StationError
from training.evaluation import paired
from training.evaluation.report import LABELS
from training.evaluation.rows import Row, read_rows


def table(found: Mapping[str, Any], *, everything: bool = False) -> str:
    """Plain text, one block a task; `everything`: also figures without a label."""
    lines: list[str] = []
    for task, own in found.items():
        lines += [
            "",
            f"{task or 'unknown task'}: {own['cases']} cases",
            f"  {'':<44}{'first':>8}{'second':>8}{'diff.':>9}   95 % interval",
        ]
        figures = own["figures"]
        names = [name for name in LABELS if name in figures]
        names += [name for name in figures if name not in LABELS] if everything else []
        lines += [_line(LABELS.get(name, name.replace("_", " ")), figures[name]) for name in names]
        for name, flip in own["flips"].items():
            lines.append(
                f"  {name + ' flips':<44}{flip['only_first']} only right in the first, "
                f"{flip['only_second']} only in the second, McNemar p = {flip['mcnemar_p']:.3g}"
            )
    return "\n".join(lines)


def _line(label: str, figure: Mapping[str, Any]) -> str:
    low, high = figure["interval"]
    sign = ""
    if low > 0 or high < 0:
        better = (low > 0) is not figure["lower_is_better"]
        sign = " * better" if better else " * worse"
    return (
        f"  {label:<44}{figure['first']:>8.3f}{figure['second']:>8.3f}"
        f"{figure['difference']:>+9.3f}   [{low:+.3f}, {high:+.3f}]{sign}"
    )


def _limit(rows: Sequence[Row], given: float | None) -> float:
    own = [row.defect_fail for row in rows if row.defect_fail is not None]
    return given if given is not None else own[0] if own else Thresholds().defect_fail


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", type=Path, help="rows of the one run")
    parser.add_argument("second", type=Path, help="rows of the other run")
    parser.add_argument("--out", type=Path, help="also write the JSON of the last line here")
    parser.add_argument("--all", action="store_true", help="show every figure")
    parser.add_argument(
        "--defect-fail", type=float, metavar="P",
        help="limit of the defect probability for both runs (default: each bundle's own)",
    )  # fmt: skip
    args = parser.parse_args()
    try:
        first, second = read_rows(args.first), read_rows(args.second)
        limits = (_limit(first, args.defect_fail), _limit(second, args.defect_fail))
        found = paired.compare(first, second, limits)
    except StationError as error:
        print(f"training.compare: {error}", file=sys.stderr)
        return 1
    print(table(found, everything=args.all))
    line = json.dumps({"first": str(args.first), "second": str(args.second), **found})
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        partial = args.out.with_name(f"{args.out.name}.partial")
        partial.write_text(f"{line}\n", encoding="utf-8")
        partial.replace(args.out)
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
