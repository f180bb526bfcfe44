"""A line to practise with: simulated cases become a station's evidence and an operator's labels.

    python -m training.cases --out W/cases --task surface --count 60 --seed 5001 \\
        --parts "hex_bolt M10x50,flange_nut M10" --clean-share 0.6 --roughness 0.6
    python -m training.loop.practice --cases W/cases --bundle station_config/demo/bundle \\
        --out W/evidence --labels W/labels.jsonl

Every case is inspected as a station inspects it, and kept as a station keeps it. The operator is
simulated as well: blind and never wrong, for the truth is known. `--most N` labels the first N
parts in the order in which they came, whatever the station said of them (origin `manual`).
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from tqdm import tqdm

from forge_station.contract.error import StationError
from forge_station.evidence.case import Case as StoredCase
from forge_station.evidence.case import Decider
from forge_station.evidence.files import default_name, inputs_of, store_files
from forge_station.evidence.pictures import picture_of
from forge_station.geometry import cloud_io
from forge_station.opening import open_inspector
from forge_station.pipeline import Inspector, Job
from forge_station.signing import public_key
from training.evaluation.case_files import BadCase, Case, read_cases
from training.loop.error import LineError

REVIEWER = "simulated"


def inspect(inspector: Inspector, case: Case, cases: Path, folder: Path, time: str) -> str:
    """Judge a case and keep its evidence; the outcome."""
    if case.input.scene is None:
        raise LineError("a case without a scan", which=case.id, expected="input.scene")
    cloud = cloud_io.read_cloud(cases / case.input.scene, frame="tray")
    job = Job(
        case.id, case.id, case.product, time, line=inspector.model.manifest.line,
        serial_source="scanner", simulated=True, source="simulated",
    )  # fmt: skip
    found = inspector.inspect_cloud(job, cloud)
    name = default_name(found.verdict)
    kept = StoredCase.of(job, found, Decider.of(inspector, 1))
    files = {f"{name}.case.npz": kept.to_bytes(), **inputs_of(found, name)}
    picture = picture_of(found, inspector.layout)
    stored = store_files(folder, name, found.verdict, picture, files)
    if stored.warnings:
        raise LineError("evidence not written", which=folder, got=stored.warnings[0])
    return found.verdict.outcome.value


def label_of(case: Case, model: str) -> dict[str, Any]:
    """What an operator who is never wrong says of a case."""
    said: dict[str, Any] = {
        "result_id": case.id,
        "label": "OK" if case.truth.expected == "PASS" else "NG",
        "reviewer": REVIEWER,
        "blind": True,
        "more": {"origin": "manual", "bundleDigest": model},
    }
    if case.task == "surface" and said["label"] == "NG":
        said["defect"] = case.truth.defect
        drawn = {
            view: [list(cell) for cell in cells] for view, cells in (case.truth.grids or {}).items()
        }
        said["cells"] = {view: cells for view, cells in drawn.items() if cells}
    return said


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Evidence and labels of all cases."""
    cases = read_cases(args.cases)
    bad = [case for case in cases if isinstance(case, BadCase)]
    if bad:
        raise LineError("not a case", which=bad[0].id, got=bad[0].message)
    trusted = () if args.trusted_key is None else (public_key(args.trusted_key, Path()),)
    inspector = open_inspector(args.bundle, trusted_keys=trusted, time_budget_s=1e9)
    outcomes: Counter[str] = Counter()
    labels = []
    begun = datetime.now(timezone.utc)
    with inspector.model:
        model = inspector.model.manifest.sha256
        for number, case in enumerate(tqdm(cases, unit="part", desc="station", mininterval=2)):
            moment = begun + timedelta(seconds=10 * number)
            time = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
            outcomes[inspect(inspector, case, args.cases, args.out, time)] += 1  # type: ignore[arg-type]
            labels.append(label_of(case, model))  # type: ignore[arg-type]
    labels = labels[: args.most]
    args.labels.parent.mkdir(parents=True, exist_ok=True)
    args.labels.write_text("".join(f"{json.dumps(label)}\n" for label in labels), encoding="utf-8")
    said = Counter(label["label"] for label in labels)
    return {"parts": sum(outcomes.values()), "outcomes": dict(outcomes), "labels": dict(said)}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m training.loop.practice",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cases", type=Path, required=True, help="folder of training.cases")
    parser.add_argument("--bundle", type=Path, required=True, help="what the station judges with")
    parser.add_argument("--trusted-key", help="of its certificate; else nothing is PASS")
    parser.add_argument("--out", type=Path, required=True, help="evidence folder to write")
    parser.add_argument("--labels", type=Path, required=True, help="labels file to write")
    parser.add_argument("--most", type=int, help="label the first so many parts (default: all)")
    try:
        print(json.dumps(run(parser.parse_args(words))))
    except StationError as error:
        print(f"training.loop.practice: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
