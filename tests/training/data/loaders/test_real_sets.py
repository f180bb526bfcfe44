"""The loaders on real sets beside the checkout: what a person counted in them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from training.data.loaders import masks, names, regions, yolo
from training.data.loaders.sample import Grouping, Problems

DATA = Path(__file__).parents[4].parent / "shared" / "data"
pytestmark = [
    pytest.mark.realdata,
    pytest.mark.skipif(not DATA.is_dir(), reason="recorded data not beside the checkout"),
]


def test_magnetic_tiles() -> None:
    problems = Problems(skip=True)
    grouping = Grouping(r"num_(?P<run>\d+)", 300)
    found = masks.load(DATA / "magnetic_tile", "magnetic_tile", grouping, problems)
    labels = Counter(sample.labels[0] for sample in found.samples)
    assert labels == {
        "normal": 300, "blowhole": 81, "uneven": 70, "break": 60, "crack": 40, "fray": 23,
    }  # fmt: skip
    assert len(problems.faults) == 3
    assert all("MT_Uneven" in fault.path and "empty" in fault.got for fault in problems.faults)
    vanished = found.figures["vanished"]
    assert vanished["crack"] == {"masks": 40, "lanczos": 38, "area_before_one_cell": 3}
    assert vanished["blowhole"] == {"masks": 81, "lanczos": 71, "area_before_one_cell": 5}
    assert vanished["break"] == {"masks": 60, "lanczos": 29, "area_before_one_cell": 0}
    answers = [sample.messages[-1].content for sample in found.samples if not sample.clean]
    assert not any("photo: none" in answer for answer in answers)
    # One tile under five exposures: exp1_num_4727, exp2_num_4748, 4764, 4801, 4841.
    runs = {sample.id.rsplit("_", 1)[1]: sample.group for sample in found.samples}
    assert len({runs[number] for number in ("4727", "4748", "4764", "4801", "4841")}) == 1


def test_missing_screws() -> None:
    problems = Problems()
    pattern = r"^[0-9]+_(?P<A>[01])(?P<B>[01])(?P<C>[01])(?P<D>[01])$"
    values = {"1": "screw", "0": "none"}
    found = names.load(
        DATA / "screws_missing" / "images", pattern, values, Grouping(None), problems
    )
    assert not problems.faults
    answers = {sample.id: sample.messages[-1].content for sample in found.samples}
    assert len(answers) == 100
    assert answers["12_0011"] == "A: none\nB: none\nC: screw\nD: screw"


def test_screws_with_boxes() -> None:
    problems = Problems()
    folder = DATA / "screws_amv"
    classes = dict(enumerate(("black", "long", "medium", "short")))
    reading = regions.Reading("marks", "screw")
    places = folder / "images", folder / "labels"
    found = yolo.load(folder, *places, classes, reading, Grouping(None), problems)
    assert not problems.faults
    assert found.figures["pictures"] == 17 and found.figures["regions"] == 62
    lines = [s.messages[-1].content.count("\n") + 1 for s in found.samples]
    assert sum(lines) == 62 and max(lines) == 6
