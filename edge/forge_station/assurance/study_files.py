"""Study files: CSV in, template out, and the CSV of a station's own trials from its verdicts.

    part,appraiser,trial,decision,reference       of an attribute study
    part,appraiser,trial,value,reference,feature  of a gauge study

`reference` may be empty for all parts, `feature` too. Order of the lines does not matter.
"""

from __future__ import annotations

import csv
import io
import json
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from forge_station.assurance import agreement, gauge_study
from forge_station.assurance.agreement import Decision
from forge_station.assurance.error import AssuranceError
from forge_station.contract.error import ContractError
from forge_station.contract.verdict import Verdict

ATTRIBUTE = ("part", "appraiser", "trial", "decision", "reference")
GAUGE = ("part", "appraiser", "trial", "value", "reference", "feature")
SIZES = ("length", "width", "height")
Row = Mapping[str, str]
_WORDS: Mapping[str, Decision] = {
    "PASS": "PASS", "OK": "PASS", "GOOD": "PASS",
    "FAIL": "FAIL", "NG": "FAIL", "BAD": "FAIL",
    "UNSURE": "UNSURE",
}  # fmt: skip


def read_rows(path: Path, columns: Sequence[str]) -> list[Row]:
    """Lines of a study file, by column. Raises AssuranceError with the line at fault."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
            names = [name.strip() for name in reader.fieldnames or ()]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise AssuranceError("the study cannot be read", which=path, got=error) from error
    required = columns[:4] if len(columns) > 4 else columns
    missing = [name for name in required if name not in names]
    if missing or not rows:
        raise AssuranceError(
            "the study has no such column" if missing else "the study has no lines",
            which=f"{path}: {', '.join(missing)}" if missing else path,
            expected=f"a first line {','.join(columns)}, then one line a trial",
            got=",".join(names) or "nothing",
            action="`forge-station msa template` writes a file to fill in",
        )
    found: list[Row] = []
    for number, row in enumerate(rows, 2):
        texts = {str(k).strip(): str(v or "").strip() for k, v in row.items() if k is not None}
        empty = [name for name in required if not texts.get(name)]
        if empty:
            raise AssuranceError(
                "a line is not filled in", which=f"{path}, line {number}",
                expected=", ".join(required), got=f"no {', '.join(empty)}",
            )  # fmt: skip
        found.append({**dict.fromkeys(columns, ""), **texts, "line": str(number)})
    return found


def attribute_study(path: Path) -> agreement.Study:
    """Raises AssuranceError for what is no complete study of distinct trials."""
    rows = read_rows(path, ATTRIBUTE)
    trials = _trials(rows, path)
    decisions = {
        name: {
            part: tuple(_decision(row, "decision", path) for row in own)
            for part, own in parts.items()
        }
        for name, parts in trials.items()
    }
    parts = tuple(sorted({row["part"] for row in rows}))
    reference = _references(rows, path)
    truth = {part: _truth(text, part, path) for part, text in reference.items() if text}
    count = max(len(own) for parts_of in decisions.values() for own in parts_of.values())
    return agreement.Study(parts, count, decisions, truth)


def gauge_studies(path: Path, unit: str = "mm") -> dict[str, gauge_study.Study]:
    """Feature -> its study; one without a name is ''. Raises AssuranceError."""
    rows = read_rows(path, GAUGE)
    by_feature: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_feature[row["feature"]].append(row)
    return {name: _gauge_study(own, path, unit) for name, own in by_feature.items()}


def _gauge_study(rows: Sequence[Row], path: Path, unit: str) -> gauge_study.Study:
    trials = _trials(rows, path)
    appraisers = tuple(sorted(trials))
    parts = tuple(sorted({row["part"] for row in rows}))
    counts = {(p, a): len(trials[a].get(p, ())) for p in parts for a in appraisers}
    most = max(counts.values())
    short = [key for key, count in counts.items() if count != most]
    if short:
        part, appraiser = short[0]
        raise AssuranceError(
            "the study is not complete", which=f"{path}, part {part}, appraiser {appraiser}",
            expected=f"{most} trials of each part by each appraiser", got=counts[short[0]],
            action="measure the missing ones, or leave out the part",
        )  # fmt: skip
    values = np.array(
        [[[_number(row, "value", path) for row in trials[a][p]] for a in appraisers] for p in parts]
    )
    texts = _references(rows, path)
    given = [part for part in parts if texts[part]]
    if given and len(given) < len(parts):
        raise AssuranceError(
            "some parts have a reference and others none", which=path,
            expected="a reference for all parts, or for none", got=f"{len(given)} of {len(parts)}",
        )  # fmt: skip
    truth = (
        np.array([_number({"reference": texts[p], "line": p}, "reference", path) for p in parts])
        if given
        else None
    )
    return gauge_study.Study(parts, appraisers, values, truth, unit)


def _trials(rows: Sequence[Row], path: Path) -> dict[str, dict[str, list[Row]]]:
    """Appraiser -> part -> rows in the order of their trials."""
    seen: dict[tuple[str, str, str], str] = {}
    found: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in sorted(rows, key=lambda row: (row["trial"].zfill(9), int(row["line"]))):
        key = row["appraiser"], row["part"], row["trial"]
        if key in seen:
            raise AssuranceError(
                "a trial stands there twice", which=f"{path}, lines {seen[key]} and {row['line']}",
                got=f"appraiser {key[0]}, part {key[1]}, trial {key[2]}",
            )  # fmt: skip
        seen[key] = row["line"]
        found[row["appraiser"]][row["part"]].append(row)
    return found


def _references(rows: Sequence[Row], path: Path) -> dict[str, str]:
    """Part -> its reference; it may stand on one line of the part or on all, but once only."""
    found: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        found[row["part"]] |= {row["reference"]} - {""}
    for part, told in found.items():
        if len(told) > 1:
            raise AssuranceError(
                "a part has two references", which=f"{path}, part {part}",
                got=", ".join(sorted(told)),
            )  # fmt: skip
    return {part: next(iter(told), "") for part, told in found.items()}


def _decision(row: Row, column: str, path: Path) -> Decision:
    known = _WORDS.get(row[column].upper())
    if known is None:
        raise AssuranceError(
            "not a decision", which=f"{path}, line {row['line']}: {column}",
            expected="PASS (OK), FAIL (NG) or UNSURE", got=row[column],
        )  # fmt: skip
    return known


def _truth(text: str, part: str, path: Path) -> Decision:
    known = _WORDS.get(text.upper())
    if known not in ("PASS", "FAIL"):
        raise AssuranceError(
            "not a reference", which=f"{path}, part {part}",
            expected="PASS (OK) for a good part, FAIL (NG) for a bad one", got=text,
        )  # fmt: skip
    return known


def _number(row: Row, column: str, path: Path) -> float:
    try:
        value = float(row[column].replace(",", "."))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise AssuranceError(
            "not a number", which=f"{path}, line {row['line']}: {column}", got=row[column]
        )
    return value


def template(
    kind: Literal["attribute", "gauge"],
    parts: int,
    appraisers: Sequence[str],
    trials: int,
    seed: int,
) -> str:
    """CSV to fill in: every part by every appraiser, in a random order within each trial.

    The order is that of the work: nobody judges a part twice in a row, or in the order of parts.
    """
    draw = random.Random(seed)
    columns = ATTRIBUTE if kind == "attribute" else GAUGE
    rows = []
    for trial in range(1, trials + 1):
        for appraiser in appraisers:
            order = [f"P{number:0{len(str(parts))}}" for number in range(1, parts + 1)]
            draw.shuffle(order)
            rows += [{"part": part, "appraiser": appraiser, "trial": trial} for part in order]
    return to_csv(rows, columns)


def to_csv(rows: Iterable[Mapping[str, object]], columns: Sequence[str]) -> str:
    """The text of a CSV file with these columns."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def verdicts_below(folder: Path) -> list[Verdict]:
    """All stored verdicts, the oldest first. Raises AssuranceError for one that cannot be read."""
    if not folder.is_dir():
        raise AssuranceError("no such folder", which=folder, expected="an evidence folder")
    found = []
    for path in sorted(folder.rglob("*.verdict.json")):
        try:
            found.append(Verdict.from_dict(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, RecursionError, ContractError) as error:
            text = " ".join(str(error).split())[:300]
            raise AssuranceError("not a stored verdict", which=path, got=text) from error
    return sorted(found, key=lambda item: (item.begin_time, item.result_id))


def collect(
    verdicts: Sequence[Verdict],
    kind: Literal["attribute", "gauge"],
    appraisers: Sequence[str] = (),
    serials: frozenset[str] = frozenset(),
    reference: Mapping[str, str] | None = None,
) -> tuple[list[dict[str, object]], dict[str, int]]:
    """Rows of a study from the verdicts of serials that were fed again, and what was left out.

    Without `appraisers` the station is the appraiser. With them (who fed the parts, in this order)
    the runs of each serial, oldest first, are shared out evenly: the first third to the first of
    three. Serials fed once say nothing of repeatability. Sizes are those of the one part on the
    tray; `reference` names them serial/feature. Raises AssuranceError where runs cannot be shared.
    """
    left_out = {"ERROR": 0, "fed once": 0, "several parts or no size": 0}
    runs: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        if verdict.serial_source == "none" or (serials and verdict.serial not in serials):
            continue
        if verdict.outcome.value == "ERROR":
            left_out["ERROR"] += 1
        elif kind == "gauge" and (len(verdict.parts) != 1 or verdict.parts[0].size_mm is None):
            left_out["several parts or no size"] += 1
        else:
            runs[verdict.serial].append(verdict)
    rows: list[dict[str, object]] = []
    for serial, own in runs.items():
        if len(own) < 2:
            left_out["fed once"] += 1
            continue
        names = appraisers or (own[0].station or "station",)
        if len(own) % len(names):
            raise AssuranceError(
                "runs cannot be shared out", which=f"serial {serial}",
                expected=f"a multiple of {len(names)} runs, for {', '.join(names)}", got=len(own),
                action="name the serials of the study with --serials",
            )  # fmt: skip
        share = len(own) // len(names)
        for number, verdict in enumerate(own):
            row = {
                "part": serial,
                "appraiser": names[number // share],
                "trial": 1 + number % share,
                "reference": (reference or {}).get(serial, ""),
            }
            if kind == "attribute":
                rows.append({**row, "decision": verdict.outcome.value})
                continue
            size = verdict.parts[0].size_mm or ()
            for name, value in zip(SIZES, size, strict=True):
                truth = (reference or {}).get(f"{serial}/{name}", "")
                told = {"value": f"{value:.6g}", "feature": name, "reference": truth}
                rows.append({**row, **told})
    return rows, {name: count for name, count in left_out.items() if count}
