"""The command `forge-station msa`: studies of the measurement system, and what is needed for them.

It parses and hands over: figures are `agreement`'s and `gauge_study`'s.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_station.assurance import (
    agreement,
    attribute_report,
    gauge_report,
    gauge_study,
    report,
    study_files,
)
from forge_station.assurance.error import AssuranceError

_TEACH = """\
A study answers: does the station judge, and measure, a part the same way each time, the same way
as people do, and right? Take 50 parts or more for decisions (a third to a half near the limit, 15
or more clearly bad), 10 for sizes. Every part is REMOVED AND FED AGAIN for each trial, in random
order, and nobody sees an earlier result.

  1. forge-station msa template attribute --parts 50 --appraisers station,anna,bert --out study.csv
     the order of work; people fill in their lines, blind, and an expert panel the reference
  2. feed the parts, each with its serial; then take the station's own lines from its evidence:
     forge-station msa collect attribute --evidence /var/lib/station/evidence --out station.csv
  3. forge-station msa attribute study.csv --out report/
     forge-station msa gauge sizes.csv --tolerance 0.4 --out report/

Decisions: PASS (OK), FAIL (NG), UNSURE. The last line of the output is one JSON object.
Exit codes: 0 acceptable, 1 marginal or unacceptable, 64 the study is refused. docs/QUALITY.md"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Arguments of `forge-station msa`."""
    command.description = _TEACH
    kinds = command.add_subparsers(title="studies", required=True, metavar="WHAT")
    own = kinds.add_parser("attribute", help="agreement of decisions with people and reference")
    _files(own)
    own.set_defaults(run=attribute)
    own = kinds.add_parser("gauge", help="repeatability, reproducibility, bias of measured sizes")
    _files(own)
    own.add_argument("--tolerance", type=float, metavar="MM", help="width of the tolerance: %%Tol")
    own.add_argument("--unit", default="mm", help="of the values (default mm)")
    own.set_defaults(run=gauge)
    own = kinds.add_parser("template", help="write a study to fill in, in random order")
    own.add_argument("kind", choices=("attribute", "gauge"))
    own.add_argument("--parts", type=_count, default=50, metavar="N", help="default 50")
    own.add_argument("--trials", type=_count, default=3, metavar="N", help="default 3")
    own.add_argument(
        "--appraisers", type=_names, default=["station", "anna", "bert"], metavar="A,B",
        help="default station,anna,bert",
    )  # fmt: skip
    own.add_argument("--seed", type=int, default=1, metavar="N", help="of the order (default 1)")
    own.add_argument("--out", type=Path, required=True, metavar="FILE.csv")
    own.set_defaults(run=template)
    own = kinds.add_parser("collect", help="write a study from stored verdicts of re-fed parts")
    own.add_argument("kind", choices=("attribute", "gauge"))
    own.add_argument("--evidence", type=Path, required=True, metavar="FOLDER")
    own.add_argument(
        "--serials", type=_names, default=[], metavar="S,T", help="of the study (default all)"
    )
    own.add_argument(
        "--appraisers", type=_names, default=[], metavar="A,B",
        help="who fed the parts: the runs of a serial, oldest first, are shared out to them in "
        "this order (default: the station)",
    )  # fmt: skip
    own.add_argument(
        "--reference", type=Path, metavar="FILE.csv",
        help="columns part,reference[,feature]: the truth of the serials",
    )  # fmt: skip
    own.add_argument("--out", type=Path, required=True, metavar="FILE.csv")
    own.set_defaults(run=collect)


def _files(command: argparse.ArgumentParser) -> None:
    command.add_argument("study", type=Path, metavar="FILE.csv")
    command.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write NAME.html, NAME.csv, NAME.json there"
    )
    command.add_argument("--title", default="", help="a word on the study, for the report")


def attribute(args: argparse.Namespace) -> int:
    """Agreement of a study of decisions."""
    found = agreement.analyse(study_files.attribute_study(args.study))
    print("\n".join(attribute_report.lines(found)))
    told = attribute_report.result(found)
    if args.out is not None:
        text = attribute_report.html(found, _facts(args))
        rows = attribute_report.rows(found)
        told = {**told, "files": report.write(args.out, args.study.stem, text, rows, told)}
    print(json.dumps(told))
    bands = [agreement.worst_band(item) for item in found.appraisers]
    return int(any(band not in ("acceptable", None) for band in bands))


def gauge(args: argparse.Namespace) -> int:
    """Repeatability and reproducibility of a study of sizes, by feature."""
    if args.tolerance is not None and not args.tolerance > 0:
        raise AssuranceError("a tolerance is a width above 0", got=args.tolerance)
    studies = study_files.gauge_studies(args.study, args.unit)
    for feature, study in studies.items():
        print("\n".join(gauge_report.lines(study, feature, args.tolerance)))
    results = [gauge_report.result(s, name, args.tolerance) for name, s in studies.items()]
    told: dict[str, Any] = {"study": "gauge", "features": results}
    if args.out is not None:
        text = gauge_report.html(studies, args.tolerance, _facts(args))
        rows = [
            row for name, s in studies.items() for row in gauge_report.rows(s, name, args.tolerance)
        ]
        told = {**told, "files": report.write(args.out, args.study.stem, text, rows, told)}
    print(json.dumps(told))
    decisions = {gauge_study.by_variance(study).decision for study in studies.values()}
    return int(decisions != {"acceptable"})


def template(args: argparse.Namespace) -> int:
    """A study to fill in."""
    text = study_files.template(args.kind, args.parts, args.appraisers, args.trials, args.seed)
    _new(args.out, text)
    print(json.dumps({"file": str(args.out), "lines": text.count("\n") - 1}))
    return 0


def collect(args: argparse.Namespace) -> int:
    """The station's own lines of a study."""
    print(f"reading the verdicts below {args.evidence}", file=sys.stderr)
    verdicts = study_files.verdicts_below(args.evidence)
    rows, left_out = study_files.collect(
        verdicts, args.kind, args.appraisers, frozenset(args.serials), _reference(args.reference)
    )
    if not rows:
        raise AssuranceError(
            "no part was fed again", which=args.evidence,
            expected="two or more verdicts of one serial", got=f"{len(verdicts)} verdicts",
        )  # fmt: skip
    columns = study_files.ATTRIBUTE if args.kind == "attribute" else study_files.GAUGE
    _new(args.out, study_files.to_csv(rows, columns))
    told = {"file": str(args.out), "lines": len(rows), "left_out": left_out}
    print(json.dumps(told))
    return 0


def _reference(path: Path | None) -> Mapping[str, str]:
    """Serial -> truth; of sizes 'serial/feature' too."""
    if path is None:
        return {}
    found = {}
    for row in study_files.read_rows(path, ("part", "reference")):
        feature = row.get("feature", "")
        found[f"{row['part']}/{feature}" if feature else row["part"]] = row["reference"]
    return found


def _new(path: Path, text: str) -> None:
    """Write a file that is not there yet: what people filled in is not written over."""
    if path.exists():
        raise AssuranceError("the file exists already", which=path, action="name another one")
    report.put(path, text)


def _facts(args: argparse.Namespace) -> dict[str, str]:
    return {"file": str(args.study), "title": args.title or "\u2013"}


def _names(text: str) -> Sequence[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len(set(names)) != len(names):
        raise argparse.ArgumentTypeError("names with commas between, each once")
    return names


def _count(text: str) -> int:
    value = int(text) if text.isdigit() else 0
    if not 1 <= value <= 10_000:
        raise argparse.ArgumentTypeError("a whole number from 1 to 10000")
    return value
