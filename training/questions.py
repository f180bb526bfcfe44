"""Record what the station asks its model over case files, and what the model answers.

    python -m training.questions --bundle .work/fp32 --cases .work/cal --references cad \\
        --count 48 --out .work/questions.npz

Cases go through the station's own code; kept are pictures, texts and answer lines, not the scans.
`export.bundle --quantizer gptq --calibration questions.npz` calibrates with them. Take cases that
are used neither for training nor for evaluation, of every task the line has, and a bundle in full
precision. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from forge_station.contract.error import StationError
from forge_station.errors import InputError
from forge_station.vlm import recorded
from forge_station.vlm.recorded import Question, Recorder
from training.evaluation import by_station
from training.evaluation.by_station import BUNDLE, Settings
from training.evaluation.case_files import BadCase, Case, read_cases


def spread(cases: Sequence[Case | BadCase], count: int) -> list[Case | BadCase]:
    """`count` cases, the same number of every task as far as there are, evenly from its list."""
    by_task: dict[str, list[Case | BadCase]] = {}
    for case in cases:
        by_task.setdefault(case.task, []).append(case)
    share = -(-count // len(by_task))
    chosen = []
    for own in by_task.values():
        step = max(1.0, len(own) / share)
        chosen += [own[int(n * step)] for n in range(min(share, len(own)))]
    return chosen[:count]


def record(
    bundle: Path, cases: Sequence[Case | BadCase], settings: Settings, threads: int = 1
) -> tuple[list[Question], Counter[str]]:
    """Questions of all cases, and how many cases ended how."""
    inspector = by_station.opened(bundle, threads, settings)
    questions: list[Question] = []
    outcomes: Counter[str] = Counter()
    with inspector.model as model:
        recorder = Recorder(model)
        listening = replace(inspector, model=recorder)
        for case in tqdm(cases, unit="case", desc="questions"):
            row = by_station.run_case(listening, case, settings)
            outcomes[row.outcome] += 1
            questions += recorder.questions()
    return questions, outcomes


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, required=True, help="bundle folder, best in fp32")
    parser.add_argument("--cases", type=Path, required=True, help="folder with cases.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="the NPZ file to write")
    parser.add_argument("--count", type=int, default=48, help="cases, spread over the tasks")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--references",
        default=BUNDLE,
        metavar="bundle|cad|none|FILE",
        help="references of surfaces, as for training.evaluate",
    )
    args = parser.parse_args()
    if args.count < 1:
        parser.error("--count: expected 1 or more")
    try:
        cases = spread(read_cases(args.cases), args.count)
        settings = Settings(args.cases, references=args.references)
        questions, outcomes = record(args.bundle, cases, settings, args.threads)
        if not questions:
            raise InputError("no case led to a question", which=args.cases, got=dict(outcomes))
        recorded.save(args.out, questions)
    except StationError as error:
        print(f"training.questions: {error}", file=sys.stderr)
        return 1
    figures = {
        "file": str(args.out),
        "bytes": args.out.stat().st_size,
        "cases": len(cases),
        "outcomes": dict(outcomes),
        "questions": len(questions),
        "lines": sum(len(question.lines) for question in questions),
    }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
