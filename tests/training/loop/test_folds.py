"""Folds of labelled parts: dealt evenly, for good, and a part with all its labels on one side."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from training.loop import folds, labelled, recipe
from training.loop.error import LineError
from training.loop.steps import Loop

LINE = """
line: nuts
products:
  - {part_number: N, name: nut, kind: single, parts: {flange_nut M10: 1}, checks: [surface]}
"""


@pytest.mark.parametrize(("good", "bad", "count"), [(45, 15, 2), (7, 4, 3), (1, 1, 2), (0, 3, 2)])
def test_no_fold_has_two_more_than_another(good, bad, count):
    parts = {f"serial {n}": n < bad for n in range(good + bad)}
    dealt = folds.deal(parts, count)
    assert dealt == folds.deal(dict(reversed(parts.items())), count) and set(dealt) == set(parts)
    for own in (set(parts), {p for p in parts if parts[p]}, {p for p in parts if not parts[p]}):
        sizes = Counter(dealt[part] for part in own)
        assert max(sizes.values(), default=0) - min(sizes[n + 1] for n in range(count)) <= 1


def told(part: str, label: str) -> labelled.Told:
    """A label about a part; nothing of its evidence is asked but the part."""
    verdict = SimpleNamespace(serial=part, serial_source="scanner", result_id=f"r-{part}")
    said = labelled.Label(f"r-{part}", label, "anna", True)  # type: ignore[arg-type]
    return labelled.Told(said, SimpleNamespace(verdict=verdict), Path())  # type: ignore[arg-type]


def test_all_labels_of_a_part_are_on_one_side_and_every_part_is_judged_once():
    found = [told(f"s{n}", "NG" if n % 3 == 0 else "OK") for n in range(9)]
    found += [told("s1", "NG"), told("s3", "OK")]  # the same parts, seen again
    judged: list[str] = []
    for number in (1, 2):
        trains, judges = folds.split(found, number, 2)
        assert len(trains) + len(judges) == len(found)
        assert not {one.part for one in trains} & {one.part for one in judges}
        judged += {one.part for one in judges}
    assert sorted(judged) == [f"s{n}" for n in range(9)]


@pytest.mark.parametrize("text", ["{folds: 1}", "{folds: 2, suggest: true}"])
def test_a_recipe_that_chooses_limits_in_no_or_two_ways_is_refused(tmp_path, text):
    (tmp_path / "line.yaml").write_text(LINE)
    (tmp_path / recipe.FILE).write_text(f"calibrate: {text}")
    with pytest.raises(LineError, match="cannot be chosen this way"):
        Loop.of(tmp_path, tmp_path / "out")


def test_without_labels_there_are_no_folds(tmp_path):
    (tmp_path / "line.yaml").write_text(LINE)
    (tmp_path / recipe.FILE).write_text("calibrate: {folds: 3}")
    loop = Loop.of(tmp_path, tmp_path / "out")
    assert not [step.name for step in loop.steps() if step.name.startswith("fold")]
    (tmp_path / "labels.jsonl").touch()
    given = {"labels": (tmp_path / "labels.jsonl",), "evidence": tmp_path}
    steps = [step.name for step in Loop.of(tmp_path, tmp_path / "out", **given).steps()]
    assert steps.index("fold-3") + 1 == steps.index("calibrate")
