"""Photo examples of one split -> case files that `training.evaluate` scores on a bundle.

A surface example becomes a case of the task `surface`, places become one of the task `assembly`,
whose product asks for the part that the place usually has. Reads the example format, writes the
case format (CASES.md); knows no model.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from forge_station.contract import grid_text, tasks
from forge_station.contract.spec import Product
from forge_station.contract.views import PHOTO
from training.data import conversations, examples
from training.data.examples import IMAGE, Example, ExampleError
from training.evaluation import case_files
from training.evaluation.case_files import Case, CaseInput, Truth

_ROW = re.compile(rf"{PHOTO} r(\d+):")
_MARK = re.compile(r"([A-Z]):")


def write_cases(source: Path, out: Path, split: str = "test") -> int:
    """Write `out`/cases.jsonl and the photos it names; the number of cases.

    Raises ExampleError for an example that is no photo, and where the split is empty.
    """
    every = list(examples.read(source))
    chosen = [example for example in every if example.split == split]
    if not chosen:
        raise ExampleError("no examples of this split", which=f"{source}, {split}")
    usual = _usual_parts(every)
    (out / "images").mkdir(parents=True, exist_ok=True)
    lines = []
    for example in chosen:
        case = _case(example, usual)
        shutil.copyfile(source.parent / example.images[-1], out / str(case.input.photo))
        lines.append(case_files.write_line(case))
    partial = out / f"{case_files.FILE}.partial"
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    partial.replace(out / case_files.FILE)
    return len(lines)


def _answers(example: Example) -> dict[str, str]:
    """Key -> answer of the last turn, grid rows written out."""
    last = example.messages[-1].content
    lines = conversations.expanded(examples.branches(last))
    return {line.key: line.answer for line in lines}


def _places(answers: Mapping[str, str]) -> dict[str, str]:
    found = ((_MARK.fullmatch(key), answer) for key, answer in answers.items())
    return {match[1]: answer for match, answer in found if match}


def _usual_parts(every: Sequence[Example]) -> dict[str, str]:
    """Mark -> what stands there most often when the place is not empty."""
    counts: dict[str, Counter[str]] = {}
    for example in every:
        for mark, what in _places(_answers(example)).items():
            counts.setdefault(mark, Counter()).update([] if what == tasks.NONE else [what])
    return {mark: count.most_common(1)[0][0] for mark, count in counts.items() if count}


def _case(example: Example, usual: Mapping[str, str]) -> Case:
    answers = _answers(example)
    photo = f"images/{Path(example.images[-1]).name}" if example.images else None
    places = _places(answers)
    if places:
        return _places_case(example.id, photo, places, usual)
    defect = answers.get(tasks.CLASS_KEY)
    if photo is None or defect is None:
        got = ", ".join(answers)
        raise ExampleError("not a photo example", which=example.id, expected="class:", got=got)
    part = example.messages[-2].content.replace(IMAGE, "").split("\n")[-1]
    rows = {int(m[1]) - 1: text for key, text in answers.items() if (m := _ROW.fullmatch(key))}
    cells = tuple(
        (row, column) for row, text in rows.items() for column in grid_text.parse_columns(text)
    )
    score = answers.get(tasks.SCORE_KEY)
    return Case(
        id=example.id,
        task="surface",
        input=CaseInput(photo=photo),
        product=Product("SURFACE", "single", ("surface",), parts={part: 1}, photo=True),
        truth=Truth(
            defect=defect,
            grids={PHOTO: cells} if rows else None,
            score=float(score.split("/")[0]) if score else None,
        ),
    )


def _places_case(
    name: str, photo: str | None, places: Mapping[str, str], usual: Mapping[str, str]
) -> Case:
    required = Counter(usual[mark] for mark in places if mark in usual)
    there = Counter(what for what in places.values() if what != tasks.NONE)
    missing = tuple(sorted((required - there).elements()))
    extra = sum((there - required).values())
    return Case(
        id=name,
        task="assembly",
        input=CaseInput(photo=photo, marks=tuple(sorted(places))),
        product=Product("PLACES", "assembly", ("assembly",), parts=dict(required), photo=True),
        truth=Truth(readings=dict(places), missing=missing, violations=max(len(missing), extra)),
    )
