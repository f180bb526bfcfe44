"""Is the new bundle better on parts that nobody trained or chose anything with?

    python -m training.evaluate --bundle OLD --cases HELD --out old.jsonl
    python -m training.evaluate --bundle NEW --cases HELD --out new.jsonl
    python -m training.loop.gain old.jsonl new.jsonl --out gain.png

Takes rows of the same surface cases and sets outcomes side by side: overkill, UNSURE and escape of
both, each with its exact 95 % interval, and the parts that changed sides with McNemar's exact test.
`reduction` is the share of the overkill that is gone, with a paired bootstrap interval over parts.
The picture shows good parts stopped (FAIL or UNSURE) against escapes over all limits, with those in
use: FAIL alone is cut by calling it UNSURE.
`training.compare` has all other figures. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forge_station.assurance.agreement import Rate
from forge_station.contract.error import StationError
from training.calibration import plots
from training.calibration.keys import write_whole
from training.evaluation import paired
from training.evaluation.rows import Row, read_rows
from training.loop.error import LineError

Pairs = Sequence[tuple[Row, Row]]
RESAMPLES = 10_000
_LONG = ("cells", "cells_true", "cells_part", "marks", "probes", "exchanges")


def gain(pairs: Pairs) -> dict[str, Any]:
    """Figures of both runs and their difference; pairs of rows of one case each."""
    good = [pair for pair in pairs if pair[0].expected == "PASS"]
    bad = [pair for pair in pairs if pair[0].expected == "FAIL"]
    if not good or not bad:
        raise LineError(
            "both good and defective parts are needed",
            got=f"{len(good)} good, {len(bad)} defective",
        )
    told: dict[str, Any] = {"good": len(good), "defective": len(bad)}
    for name, own, outcome in (
        ("overkill", good, "FAIL"),
        ("unsure", good, "UNSURE"),
        ("escape", bad, "PASS"),
    ):
        told[name] = {
            "first": _rate(own, 0, outcome),
            "second": _rate(own, 1, outcome),
            "test": paired.flips(own, lambda row, outcome=outcome: row.outcome != outcome),  # type: ignore[misc]
        }
        del told[name]["test"]["lost"], told[name]["test"]["won"]
    told["reduction"] = _reduction(good)
    return told


def _rate(pairs: Pairs, which: int, outcome: str) -> dict[str, Any]:
    found = Rate(sum(pair[which].outcome == outcome for pair in pairs), len(pairs))
    low, high = found.interval
    return {"count": found.count, "of": found.of, "share": found.share, "low": low, "high": high}


def _reduction(good: Pairs) -> dict[str, float] | None:
    """1 - overkill after / overkill before; None where there was none before."""
    failed = np.array([[row.outcome == "FAIL" for row in pair] for pair in good], float)
    if not failed[:, 0].any():
        return None
    chosen = np.random.default_rng(0).integers(0, len(failed), (RESAMPLES, len(failed)))
    sums = failed[chosen].sum(1)
    sums = sums[sums[:, 0] > 0]
    low, high = np.percentile(1.0 - sums[:, 1] / sums[:, 0], (2.5, 97.5))
    whole = failed.sum(0)
    share = {"share": 1.0 - whole[1] / whole[0], "low": float(low), "high": float(high)}
    return {name: round(float(value), 4) for name, value in share.items()}


def table(told: dict[str, Any]) -> str:
    """For a person."""
    lines = [f"{told['good']} good and {told['defective']} defective parts, the same for both"]
    lines.append(f"{'':<28}{'first':<30}{'second':<30}changed sides")
    for name, text in (
        ("overkill", "overkill P(FAIL | good)"),
        ("unsure", "UNSURE of the good"),
        ("escape", "escape P(PASS | defective)"),
    ):
        own, test = told[name], told[name]["test"]
        rates = "".join(f"{_text(own[which]):<30}" for which in ("first", "second"))
        lines.append(
            f"{text:<28}{rates}{test['only_second']} better, {test['only_first']} worse, "
            f"p = {test['mcnemar_p']:.3g}"
        )
    if told["reduction"] is not None:
        own = told["reduction"]
        lines.append(
            f"overkill cut by {100 * own['share']:.0f} % "
            f"(95 % interval {100 * own['low']:.0f} to {100 * own['high']:.0f} %, over parts)"
        )
    return "\n".join(lines)


def _text(rate: dict[str, Any]) -> str:
    span = f"{100 * rate['low']:.1f}-{100 * rate['high']:.1f}"
    return f"{100 * rate['share']:.1f} % ({span}), {rate['count']} of {rate['of']}"


def curve(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """(escape, good parts stopped) over all limits of the defect probability, one for both."""
    good = [row.defect_probability or 0.0 for row in rows if row.expected == "PASS"]
    bad = [row.defect_probability or 0.0 for row in rows if row.expected == "FAIL"]
    limits = sorted({0.0, *good, *bad, 1.01})
    return [
        (float(np.mean([p < limit for p in bad])), float(np.mean([p >= limit for p in good])))
        for limit in limits
    ]


def picture(pairs: Pairs, told: dict[str, Any], names: Sequence[str]) -> bytes:
    """PNG of both curves with the points in use."""
    runs = {}
    for which, (key, name) in enumerate(zip(("first", "second"), names, strict=True)):
        stopped = told["overkill"][key]["share"] + told["unsure"][key]["share"]
        point = (told["escape"][key]["share"], stopped)
        runs[name] = (curve([pair[which] for pair in pairs]), point)
    return plots.stopped_against_escape(runs, told["good"], told["defective"])


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m training.loop.gain",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("first", type=Path, help="rows of the old bundle")
    parser.add_argument("second", type=Path, help="rows of the new one, over the same cases")
    parser.add_argument("--out", type=Path, metavar="PNG", help="draw both curves")
    parser.add_argument("--names", nargs=2, default=("old bundle", "new bundle"))
    args = parser.parse_args(words)
    try:
        rows = [
            [row for row in read_rows(path, _LONG) if row.task == "surface"]
            for path in (args.first, args.second)
        ]
        pairs = paired.aligned(*rows)
        told = gain(pairs)
        print(table(told))
        if args.out is not None:
            write_whole(args.out, picture(pairs, told, args.names))
    except StationError as error:
        print(f"training.loop.gain: {error}", file=sys.stderr)
        return 1
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
