"""Run case files through a bundle, a checkpoint or an endpoint and print how well it does.

    python -m training.evaluate --bundle station_config/demo/bundle --cases .work/cases
    python -m training.evaluate --checkpoint runs/nano --cases DIR --html report.html
    python -m training.evaluate --endpoint http://host:8000/v1 --model NAME --cases DIR --jobs 8

A bundle takes every case along the path of the station: separation, gate, views, model,
specification. A checkpoint is exported first, in full precision, and kept. An endpoint is asked the
papers' questions in plain words (`--style` says what it is shown), and every raw reply is kept, so
that a second run costs nothing.

Writes one JSON row a case, prints a table a task with 95 % intervals and trivial baselines, and as
the last line one JSON object of all figures (also written to --figures, for `export.bundle
--evaluation`). A case that cannot be used gives one message and counts as ERROR. A run that is
interrupted goes on where it stopped. `training.compare` sets two runs side by side. CASES.md
describes files, settings and figures.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2

from forge_station.checks import Thresholds
from forge_station.contract import tasks
from forge_station.contract.error import StationError
from forge_station.errors import InputError
from forge_station.vlm.grid_readout import READOUTS
from training.calibration import outcomes
from training.evaluation import (
    by_endpoint,
    by_station,
    html,
    paired,
    promised,
    published,
    report,
    scoring,
)
from training.evaluation.by_endpoint import Asking, defects_of
from training.evaluation.by_station import BUNDLE, CAD, WITHOUT, Settings
from training.evaluation.case_files import SETTINGS, BadCase, Case, read_cases
from training.evaluation.checkpoint import bundle_of
from training.evaluation.endpoint import ChatClient, Endpoint, ReplyFile
from training.evaluation.examples import Examples
from training.evaluation.pictures import STYLES
from training.evaluation.replies import VERSION
from training.evaluation.rows import Row
from training.evaluation.run import (
    in_processes,
    in_threads,
    one_by_one,
    run,
    run_digest,
    selected,
)
from training.evaluation.worst import Drawer

Cases = Sequence[Case | BadCase]


@dataclass(frozen=True)
class Evaluated:
    """Rows with what is said of them: `head` names who answered."""

    head: dict[str, Any]
    rows: list[Row]
    defect_fail: float
    kept: int
    drawer: Drawer


def by_bundle(
    bundle: Path, cases: Cases, settings: Settings, args: argparse.Namespace
) -> Evaluated:
    """Rows of a bundle, from the station's own code."""
    with ExitStack() as stack:
        inspector = by_station.opened(bundle, args.threads, settings)
        model = stack.enter_context(inspector.model)
        by_station.refuse(inspector, settings, cases)
        manifest = model.manifest
        head = {
            "bundle": f"{manifest.name} {manifest.version}",
            "bundle_sha256": manifest.sha256,
            "precision": manifest.precision,
            "provider": model.provider,
        }
        limit = inspector.thresholds.defect_fail
        asked = {**asdict(settings), "folder": "", "file": _file_digest(args.references)}
        digest = run_digest({**head, "limits": asdict(inspector.thresholds), **asked})
        if args.jobs > 1:
            mapper = stack.enter_context(in_processes(bundle, args.threads, settings, args.jobs))
        else:
            mapper = one_by_one(partial(by_station.run_case, inspector, settings=settings))
        ran = run(cases, mapper, _out(args, settings.sizes), digest, fresh=args.fresh)
    drawer = Drawer(args.cases, inspector, settings)
    return Evaluated(head, ran.rows, limit, ran.kept, drawer)


def by_model(cases: Cases, asking: Asking, args: argparse.Namespace) -> Evaluated:
    """Rows of a model behind an endpoint."""
    extra = json.loads(args.extra)
    endpoint = Endpoint(args.endpoint, args.model, args.key_env, args.max_tokens, extra=extra)
    replies = ReplyFile(args.replies or args.out.with_suffix(".replies.jsonl"))
    head = {"model": args.model, "endpoint": args.endpoint, "style": asking.style,
            "parser": VERSION}  # fmt: skip
    asked = {**asdict(replace(asking, folder=Path(), examples=Examples(Path(), Path(), ())))}
    examples = [case.id for case in asking.examples.cases]
    digest = run_digest({**head, **asked, "body": endpoint.body([]), "examples": examples})
    with ChatClient(endpoint, replies, offline=args.offline) as client:
        answer = partial(by_endpoint.run_case, client, asking=asking)
        mapper = in_threads(answer, args.jobs) if args.jobs > 1 else one_by_one(answer)
        ran = run(cases, mapper, _out(args, asking.sizes), digest, fresh=args.fresh)
        head["asked"] = client.asked
    drawer = Drawer(args.cases, None, None, asking.style)
    return Evaluated(head, ran.rows, Thresholds().defect_fail, ran.kept, drawer)


def _file_digest(name: str) -> str:
    path = Path(name)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _out(args: argparse.Namespace, sizes: bool) -> Path:
    """The row file; the half without sizes of `--sizes both` has one of its own."""
    path: Path = args.out
    apart = args.sizes == "both" and not sizes
    return path.with_name(f"{path.stem}.sizes-off{path.suffix}") if apart else path


def evaluated(cases: Cases, args: argparse.Namespace, *, sizes: bool) -> Evaluated:
    """The rows of one run."""
    if args.endpoint:
        asking = Asking(
            args.cases,
            Examples.of(args.cases, args.examples),
            defects_of(cases),
            args.setting,
            args.style,
            args.request,
            sizes,
            args.probes,
            args.shots,
            args.strict_first_letter,
        )
        return by_model(cases, asking, args)
    bundle = args.bundle or bundle_of(args.checkpoint)
    settings = Settings(
        args.cases,
        args.strict_first_letter,
        args.request,
        args.setting,
        sizes,
        args.probes,
        args.references,
        tuple(args.threshold),
        args.grid,
    )
    return by_bundle(bundle, cases, settings, args)


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    who = parser.add_argument_group("who answers").add_mutually_exclusive_group(required=True)
    who.add_argument("--bundle", type=Path, help="bundle folder")
    who.add_argument("--checkpoint", type=Path, help="checkpoint folder, exported in fp32 first")
    who.add_argument("--endpoint", metavar="URL", help="root of an OpenAI-compatible API (…/v1)")
    parser.add_argument("--cases", type=Path, required=True, help="folder with cases.jsonl")
    parser.add_argument(
        "--out", type=Path, default=Path("out/evaluation.jsonl"), help="rows, one a case"
    )
    parser.add_argument("--figures", type=Path, help="also write the JSON of the last line here")
    parser.add_argument(
        "--promised",
        type=Path,
        metavar="JSON",
        help="smallest promised defect per class: its figures apart (mm, or what pod wrote)",
    )
    parser.add_argument("--html", type=Path, help="write a report to look at, one file")
    parser.add_argument("--limit", type=int, help="at most so many cases a task")
    parser.add_argument("--jobs", type=int, default=1, help="processes, or questions at a time")
    parser.add_argument("--threads", type=int, default=1, help="of ONNX Runtime in each process")
    parser.add_argument("--fresh", action="store_true", help="answer again what --out has already")
    asked = parser.add_argument_group("how it is asked")
    asked.add_argument(
        "--setting",
        choices=SETTINGS,
        help="instead of each case's own: nothing, pictures of what is right, or two solved "
        "examples shown before (examples: endpoints only)",
    )
    asked.add_argument(
        "--references",
        default=BUNDLE,
        metavar="bundle|cad|none|FILE",
        help="references of surfaces for a bundle that is shown the difference from them: its own, "
        "the catalogue's modelled shapes (also of parts that its line does not have), none, or a "
        "file of training.references",
    )
    asked.add_argument(
        "--threshold",
        type=_threshold,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an operating point in place of the bundle's, as look_again=1 (no second look)",
    )
    asked.add_argument("--shots", type=int, default=1, help="pictures of the setting reference")
    asked.add_argument("--examples", type=Path, help="folder of cases to show; default: --cases")
    asked.add_argument(
        "--request",
        choices=tasks.REQUESTS,
        default="joint",
        help="what surface cases are asked: score, grid or both (default joint)",
    )
    asked.add_argument(
        "--grid",
        choices=READOUTS,
        default="rows",
        help="how a bundle's defect grid is read: rows in parallel, cell probabilities, or one "
        "text (a model must be trained to write it); training.readouts compares them",
    )
    asked.add_argument(
        "--sizes",
        choices=("on", "off", "both"),
        default="on",
        help="measured sizes in the prompt; both: two runs and their difference",
    )
    asked.add_argument("--probes", action="store_true", help="grounding questions as well")
    asked.add_argument(
        "--strict-first-letter",
        action="store_true",
        help="take the first capital letter of the direct answer, as published",
    )
    asked.add_argument(
        "--by",
        choices=("workpiece",),
        action="append",
        default=[],
        help="the figures of every workpiece apart",
    )
    model = parser.add_argument_group("endpoint")
    model.add_argument("--model", help="name of the model")
    model.add_argument("--style", choices=STYLES, default=STYLES[0], help="what it is shown")
    model.add_argument("--key-env", default="OPENAI_API_KEY", help="variable that holds the key")
    model.add_argument("--max-tokens", type=int, default=1024, help="of a reply")
    model.add_argument("--extra", default="{}", help="JSON object: further fields of the request")
    model.add_argument("--replies", type=Path, help="raw replies; default: beside --out")
    model.add_argument("--offline", action="store_true", help="stored replies only, ask nobody")
    return parser


def _threshold(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}") from None


def _checked(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.endpoint and not args.model:
        parser.error("--endpoint needs --model, the name that it serves")
    if args.endpoint and args.threshold:
        parser.error("--threshold: an endpoint decides by its own letter; it is for bundles")
    if args.limit is not None and args.limit < 1:
        parser.error(f"--limit: expected 1 or more, got {args.limit}")
    try:
        if not isinstance(json.loads(args.extra), dict):
            raise ValueError("not an object")
    except ValueError as error:
        parser.error(f"--extra: expected a JSON object such as '{{\"top_p\": 1}}', got {error}")
    if args.jobs < 1 or args.shots < 1:
        parser.error("--jobs and --shots: expected 1 or more")
    if args.references not in (BUNDLE, CAD, WITHOUT) and not Path(args.references).is_file():
        known = f"{BUNDLE}, {CAD}, {WITHOUT} or a file"
        parser.error(f"--references: expected {known}, got {args.references}")


def main() -> int:
    parser = parser_of()
    args = parser.parse_args()
    _checked(parser, args)
    cv2.setNumThreads(max(1, args.threads))
    try:
        cases = selected(read_cases(args.cases), args.limit)
        done = evaluated(cases, args, sizes=args.sizes != "off")
        other = evaluated(cases, args, sizes=False) if args.sizes == "both" else None
        print(_shown(cases, done, other, args))
    except StationError as error:
        print(f"training.evaluate: {error}", file=sys.stderr)
        return 1
    return 0


def _shown(cases: Cases, done: Evaluated, other: Evaluated | None, args: argparse.Namespace) -> str:
    """Print the table, write figures and report; returns the figures as one line of JSON."""
    if done.kept:
        text = f"{done.kept} rows of the same run were kept; --fresh answers all again"
        print(text, file=sys.stderr)
    figures = {
        **done.head,
        "cases": str(args.cases),
        **scoring.figures(done.rows, done.defect_fail, by_workpiece="workpiece" in args.by),
    }
    if args.promised is not None:
        covered = list(filter(promised.read(args.promised).covers, done.rows))
        above = scoring.figures(covered, done.defect_fail).get("surface")
        if above is not None:
            figures["surface_promised"] = above
    if other is not None:
        limits = (done.defect_fail, other.defect_fail)
        figures["without_sizes"] = paired.compare(done.rows, other.rows, limits)
    certified = outcomes.figures(done.rows, args.bundle) if args.bundle is not None else None
    if certified is not None:
        figures["certified"] = certified
    print(report.table(figures))
    if args.html is not None:
        beside = published.beside(done.rows)
        rows_file = Path(os.path.relpath(args.out, args.html.parent))
        _written(args.html, html.page(figures, done.rows, cases, done.drawer, beside, rows_file))
    line = json.dumps(figures)
    if args.figures is not None:
        _written(args.figures, f"{line}\n")
    return line


def _written(path: Path, text: str) -> None:
    """Write a file at once: it appears by rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.partial")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise InputError("cannot write", which=path, got=error.strerror) from error


if __name__ == "__main__":
    sys.exit(main())
