"""A station's evidence folder and the labels that people gave -> examples of its own questions.

The pictures and facts are those that the model was given (`<name>.input.json`), to the bit. A label
supervises what it says and nothing else:

    OK                      every surface picture it is about: normal, 10/10, empty grids; the marks
                            sheet as it was read, if the station found it to meet the specification
    NG with `defect`        the surface of that mark: the class; score and grids only with `cells`
    any with `readings`     the marks sheet, read as the label says

Blind labels only: whoever has seen the verdict agrees with it. One blind label weighs 0.9, two that
say the same or an adjudicated one 0.98; blind labels that disagree wait for adjudication, blind as
well; `cannot_tell` is dropped, and so is what tested a reviewer on a part of known truth.
All inspections of one serial number are one group.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forge_station.contract import grid, record, tasks
from forge_station.contract.error import ContractError
from forge_station.contract.grid import SIDE
from forge_station.contract.label import Label, settle
from forge_station.contract.verdict import Outcome, Verdict
from forge_station.contract.views import VIEWS
from training.data import conversations
from training.data.loaders.documents import entries, read_json, text_of
from training.data.loaders.sample import (
    Grouping,
    Loaded,
    LoadError,
    Picture,
    Problems,
    Sample,
    class_name,
    inside,
    part_name,
)

HELP = """A station's evidence folder and what people said about the parts.

  python -m training.load evidence /var/lib/station/evidence --labels labels.jsonl \\
      --out .work/line

One JSON object a line of the labels file:

  {"result_id": "01a2...", "label": "NG", "reviewer": "anna", "blind": true, "mark": "A",
   "defect": "dent", "cells": {"top": [[4, 5], [4, 6]]}}

label: OK, NG or cannot_tell. mark: which part; may be left out with one part on the tray, and in an
OK means all. cells: view -> [row, column] from 0 at the upper left. readings: mark -> part, of all
marks. "adjudicates": true settles a disagreement. "blind": false does not count. Other things to
keep go into "more": {...}."""


@dataclass(frozen=True)
class Evidence:
    """One inspection: its verdict and the pictures that the model was given, with their facts."""

    verdict: Verdict
    sheet: tuple[Picture, str] | None
    surfaces: Mapping[str, tuple[Picture, str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="evidence folder of a station")
    parser.add_argument("--labels", type=Path, nargs="+", required=True, help="JSON lines")
    parser.add_argument(
        "--classes", default=",".join(tasks.DEFECT_CLASSES), help="defect classes (%(default)s)"
    )


def run(args: argparse.Namespace, grouping: Grouping, problems: Problems) -> Loaded:
    if grouping.pattern is not None:
        raise LoadError("evidence has groups already", which="--group", action="leave it out")
    classes = [class_name(name) for name in args.classes.split(",")]
    return load(args.folder, args.labels, classes, problems)


def load(
    folder: Path, label_files: Sequence[Path], classes: Sequence[str], problems: Problems
) -> Loaded:
    """Examples of every labelled inspection below `folder`."""
    if not folder.is_dir():
        raise LoadError("no such folder", which=folder, expected="evidence of a station")
    labels = [label for path in label_files for label in read_labels(path, classes, problems)]
    settled, counted = settle(labels)
    places = index_of(folder, {label.result_id for label in labels}, problems)
    samples: list[Sample] = []
    for label, weight in settled:
        with problems.of(f"result {label.result_id}"):
            if label.result_id not in places:
                raise LoadError("no evidence of this result", expected=f"its files in {folder}")
            made = examples_of(label, weight, read_evidence(places[label.result_id]))
            samples += made
            counted["labels_without_example"] += not made
    return Loaded("evidence", _unique(samples), {"labels": len(labels), **counted})


def read_labels(path: Path, classes: Sequence[str], problems: Problems) -> list[Label]:
    """All labels of a file; faults carry file and line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a text may hold U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError("labels cannot be read", which=path, got=error) from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        with problems.of(f"{path.name}:{number}"):
            label = parse_label(line)
            if label.defect is not None and label.defect not in classes:
                raise LoadError(
                    "unknown class", which="defect", expected=", ".join(classes), got=label.defect
                )
            found.append(label)
    return found


def parse_label(line: str) -> Label:
    """One line of a labels file."""
    try:
        label = record.read(Label, json.loads(line))
    except ContractError as error:
        text = "; ".join(str(fault) for fault in error.faults) or str(error)
        raise LoadError("not a label", which="field", got=text, expected="see --help") from error
    except (ValueError, RecursionError) as error:
        raise LoadError("not a line of JSON", got=error) from error
    _check(label)
    return label


def _check(label: Label) -> None:
    """What the types of its fields do not say; LoadError names the field."""
    if label.defect is not None:
        class_name(label.defect)
    for part in (label.readings or {}).values():
        part_name(part)
    if label.label != "NG" and (label.defect or label.cells):
        raise LoadError("a defect in a label that is not NG", which="defect", got=label.label)
    if label.cells and not label.defect:
        raise LoadError("cells without a class", which="defect", expected="its class")
    for view, cells in (label.cells or {}).items():
        if view not in VIEWS:
            raise LoadError("unknown view", which="cells", expected=", ".join(VIEWS), got=view)
        for row, column in cells:
            if not (0 <= row < SIDE and 0 <= column < SIDE):
                raise LoadError(
                    "cell outside the grid", which=f"cells.{view}",
                    expected=f"0..{SIDE - 1}", got=(row, column),
                )  # fmt: skip


def examples_of(label: Label, weight: float, seen: Evidence) -> list[Sample]:
    """What a settled label supervises; [] when it says nothing that the model is asked."""
    marks = [part.mark for part in seen.verdict.parts]
    if label.mark is not None and label.mark not in marks:
        raise LoadError("no such mark", which="mark", expected=", ".join(marks), got=label.mark)
    about = [label.mark] if label.mark is not None else marks
    if label.defect is not None and len(about) != 1:
        raise LoadError("defect of which part", which="mark", expected=", ".join(marks))
    out = []
    if label.label == "OK":
        out += [_surface(label, weight, seen, mark) for mark in about if mark in seen.surfaces]
    elif label.defect is not None:
        if about[0] not in seen.surfaces:
            raise LoadError("surface was not inspected", which="mark", got=about[0])
        out.append(_surface(label, weight, seen, about[0]))
    readings = _readings(label, seen.verdict, marks)
    if readings is not None and seen.sheet is not None:
        picture, facts = seen.sheet
        out.append(
            Sample(
                id=f"{label.result_id}-sheet",
                pictures=(picture,),
                messages=conversations.sheet(facts, readings),
                group=_group(seen.verdict),
                labels=("sheet",),
                clean=label.label == "OK",
                weight=weight,
            )
        )
    return out


def _surface(label: Label, weight: float, seen: Evidence, mark: str) -> Sample:
    picture, facts = seen.surfaces[mark]
    if label.readings and mark in label.readings:
        request, _, rest = facts.partition("\n")
        facts = f"{request}\n{label.readings[mark]}\n{rest.partition(chr(10))[2]}"
    grids = {view: np.zeros((SIDE, SIDE), np.bool_) for view in VIEWS}
    score: int | None = 10
    if label.defect is not None:
        score = None
        for view, cells in (label.cells or {}).items():
            grids[view] = grid.DefectGrid.of(cells).cells
        if label.cells:
            marked = sum(int(cells.sum()) for cells in grids.values())
            score = tasks.surface_score(min(1.0, marked / max(1, filled_cells(picture))))
    whole = label.defect is None or label.cells
    return Sample(
        id=f"{label.result_id}-surface-{mark}",
        pictures=(picture,),
        messages=conversations.surface(
            facts, label.defect or tasks.NORMAL, score, grids if whole else None
        ),
        group=_group(seen.verdict),
        labels=(label.defect or tasks.NORMAL,),
        clean=label.defect is None,
        weight=weight,
    )


def filled_cells(picture: Picture) -> int:
    """Cells of the three panels that the part covers by more than half."""
    filled = np.asarray(picture.decoded().convert("RGB"))[..., 0] > 0  # shade: 0 is background
    panels: list[NDArray[np.bool_]] = np.array_split(filled, len(VIEWS), axis=1)
    return sum(int((grid.coverage(panel) > 0.5).sum()) for panel in panels)


def _readings(label: Label, verdict: Verdict, marks: Sequence[str]) -> dict[str, str] | None:
    """What stands at every mark, or None where the label does not say."""
    if label.readings is not None:
        if sorted(label.readings) != sorted(marks):
            raise LoadError(
                "readings of some marks", which="readings", expected=", ".join(marks),
                got=", ".join(sorted(label.readings)),
            )  # fmt: skip
        return dict(label.readings)
    met = any(
        check.check in ("workpiece", "assembly") and check.outcome is Outcome.PASS
        for check in verdict.checks
    )
    if label.label == "OK" and label.mark is None and met:
        return {part.mark: part.part for part in verdict.parts}
    return None


def read_evidence(verdict_file: Path) -> Evidence:
    """The inspection whose verdict this is, with the input that lies beside it."""
    verdict = _verdict(verdict_file)
    path = verdict_file.with_name(verdict_file.name.replace(".verdict.json", ".input.json"))
    if not path.is_file():
        raise LoadError(
            "the model's input was not kept", which=path.name,
            expected="the file beside its verdict",
            action="it is kept since evidence has input.json; an ERROR has none",
        )  # fmt: skip
    data = read_json(path)
    sheet = None
    surfaces = {}
    for number, item in enumerate(entries(data, "pictures", path)):
        which = f"{path.name}: pictures[{number}]"
        found = Picture(inside(path.parent, item.get("file"), which)), text_of(item, "facts", which)
        if "mark" in item:
            surfaces[text_of(item, "mark", which)] = found
        else:
            sheet = found
    return Evidence(verdict, sheet, surfaces)


def _verdict(path: Path) -> Verdict:
    try:
        return Verdict.from_dict(read_json(path))
    except LoadError:
        raise
    except ContractError as error:
        raise LoadError("not a verdict", which=path.name, got=error) from error


def index_of(folder: Path, wanted: set[str], problems: Problems) -> dict[str, Path]:
    """Result id -> verdict file, of the wanted ones."""
    found = {}
    for path in sorted(folder.rglob("*.verdict.json")):
        with problems.of(path.relative_to(folder)):
            name = text_of(read_json(path), "result_id", path.name)
            if name in wanted:
                found[name] = path
    return found


def _group(verdict: Verdict) -> str:
    """One physical part: its serial number; without one, the inspection."""
    known = verdict.serial_source != "none"
    return f"serial {verdict.serial}" if known else f"result {verdict.result_id}"


def _unique(samples: Sequence[Sample]) -> list[Sample]:
    """Of two examples of one picture (labelled as a tray and by its mark) the surer one."""
    best: dict[str, Sample] = {}
    for sample in samples:
        if sample.id not in best or sample.weight > best[sample.id].weight:
            best[sample.id] = sample
    return list(best.values())
