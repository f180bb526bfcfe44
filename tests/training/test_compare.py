"""Two runs side by side, against values computed by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from forge_station.errors import InputError
from training import compare
from training.evaluation import paired
from training.evaluation.rows import Row, write_row


def row(name: str, right: bool, **fields: Any) -> Row:
    """A surface case with a dent, read right or as normal."""
    given: dict[str, Any] = {
        "task": "surface", "setting": "zero-shot", "outcome": "FAIL" if right else "PASS",
        "expected": "FAIL", "defect": "dent" if right else "normal", "defect_true": "dent",
        "probabilities": {"normal": 0.1 if right else 0.9, "dent": 0.9 if right else 0.1},
        **fields,
    }  # fmt: skip
    return Row(name, **given)


def runs(first: str, second: str) -> tuple[list[Row], list[Row]]:
    """From words such as "+-+": right and wrong by case."""
    return tuple(
        [row(str(n), sign == "+") for n, sign in enumerate(signs)] for signs in (first, second)
    )  # type: ignore[return-value]


def test_flips_and_mcnemar_by_hand() -> None:
    first, second = runs("++++------", "+-++++++-+")
    found = paired.compare(first, second, (0.5, 0.5))["surface"]["flips"]["class"]
    assert (found["both_right"], found["only_first"], found["only_second"]) == (3, 1, 5)
    assert found["both_wrong"] == 1 and found["lost"] == ["1"]
    # two-sided exact: 2 (C(6,0) + C(6,1)) / 2^6
    assert found["mcnemar_p"] == pytest.approx(2 * 7 / 64, abs=1e-5)


def test_the_difference_of_a_share_is_paired() -> None:
    first, second = runs("++++------", "+-++++++-+")
    figure = paired.compare(first, second, (0.5, 0.5))["surface"]["figures"]["five_class"]
    assert (figure["first"], figure["second"], figure["difference"]) == (0.4, 0.8, 0.4)
    low, high = figure["interval"]
    # changes are -1, 0 x 4, +1 x 5: mean .4, standard error sqrt(.44 / 10) = .21
    assert low == pytest.approx(0.0, abs=0.11) and high == pytest.approx(0.8, abs=0.11)


def test_a_run_against_itself_differs_in_nothing() -> None:
    first, second = runs("++--", "++--")
    found = paired.compare(first, second, (0.5, 0.5))["surface"]
    assert found["figures"] and found["flips"]["verdict"]["mcnemar_p"] == 1.0
    for figure in found["figures"].values():
        assert figure["difference"] == 0.0 and figure["interval"] == [0.0, 0.0]


def test_rankings_and_cells_are_compared_too() -> None:
    cells = ((0, 0, 0), (0, 0, 1))
    first = [row(str(n), True, cells=cells[:1], cells_true=cells, score=1.0, score_true=float(n))
             for n in range(6)]  # fmt: skip
    second = [row(str(n), True, cells=cells, cells_true=cells, score=float(n), score_true=float(n))
              for n in range(6)]  # fmt: skip
    found = paired.compare(first, second, (0.5, 0.5))["surface"]["figures"]
    assert found["grid_iou"]["difference"] == 0.5 and found["grid_iou"]["interval"] == [0.5, 0.5]
    # a constant score has no rank correlation, so there is nothing to compare
    assert "score_srcc" not in found and "auroc" not in found


def test_each_run_keeps_its_own_limit() -> None:
    first, second = runs("++++", "++++")
    figures = paired.compare(first, second, (0.5, 0.95))["surface"]["figures"]
    assert (figures["defects_found"]["first"], figures["defects_found"]["second"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (["a", "b"], ["a"], ["not over the same cases", "1 only in the first (b)"]),
        (["a"], ["a", "b"], ["1 only in the second (b)"]),
        (["a", "a"], ["a"], ["stands twice", "first file", "got a"]),
    ],
)
def test_other_cases_are_refused(first: list[str], second: list[str], words: list[str]) -> None:
    with pytest.raises(InputError) as raised:
        paired.aligned([row(n, True) for n in first], [row(n, True) for n in second])
    assert all(word in str(raised.value) for word in words)


def test_a_case_that_changed_between_the_runs_is_refused() -> None:
    with pytest.raises(InputError, match="cases changed between"):
        paired.aligned([row("a", True, case="1")], [row("a", True, case="2")])


def test_the_command_prints_a_table_and_one_json_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = []
    for name, rows in zip(("a", "b"), runs("+" * 10 + "-" * 10, "+" * 20), strict=True):
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("".join(f"{write_row(item)}\n" for item in rows))
    given = ["compare", *map(str, paths), "--out", str(tmp_path / "d.json")]
    monkeypatch.setattr(sys, "argv", given)
    assert compare.main() == 0
    lines = capsys.readouterr().out.strip().splitlines()
    found = json.loads(lines[-1])
    assert found == json.loads((tmp_path / "d.json").read_text())
    assert found["surface"]["figures"]["escape"]["lower_is_better"] is True
    escape = next(line for line in lines if "escape" in line)
    assert "-0.500" in escape and escape.endswith("* better")
    assert any("McNemar p = 0.00195" in line for line in lines)
    monkeypatch.setattr(sys, "argv", ["compare", str(paths[0]), str(tmp_path / "none")])
    assert compare.main() == 1 and "cannot read the rows" in capsys.readouterr().err
