"""Figures against values computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from training.evaluation import report, scoring
from training.evaluation.scoring import MarkRow, Row


def row(**fields: Any) -> Row:
    given = {"id": "x", "task": "assembly", "setting": "zero-shot", "outcome": "PASS", **fields}
    return Row(**given)


def test_wilson_interval_is_the_published_one() -> None:
    assert scoring.wilson(95, 100) == pytest.approx((0.8882, 0.9785), abs=1e-4)
    assert scoring.wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert scoring.wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert scoring.wilson(0, 0) == (0.0, 1.0)


def test_share_of_nothing_has_no_value() -> None:
    assert scoring.share([]) == {"value": None, "interval": None, "n": 0}


def test_auroc_counts_ties_half() -> None:
    # pairs: (0.9 > 0.5), (0.9 > 0.1), (0.5 = 0.5: half), (0.5 > 0.1)
    assert scoring.auroc([0.9, 0.5, 0.5, 0.1], [True, True, False, False]) == 3.5 / 4
    assert scoring.auroc([0.1, 0.9], [True, True]) is None


def test_calibration_error_is_the_weighted_gap_of_the_bins() -> None:
    # bin 0.9: mean 0.95, right 1/2; bin 0.2: mean 0.25, right 0/2
    error = scoring.calibration_error([0.95, 0.95, 0.25, 0.25], [True, False, False, False])
    assert error == pytest.approx(0.5 * 0.45 + 0.5 * 0.25)
    assert scoring.calibration_error([1.0], [True]) == 0.0
    assert scoring.calibration_error([], []) is None


def test_pooled_share_weighs_marks_and_never_claims_certainty() -> None:
    found = scoring.pooled([6, 1], [6, 2])
    assert found["value"] == 0.875 and found["n"] == 8
    certain = scoring.pooled([6, 6], [6, 6])
    assert certain["value"] == 1.0 and certain["interval"][0] == pytest.approx(0.7575, abs=1e-4)


def test_grid_iou_takes_all_views_as_one_grid() -> None:
    found = ((0, 1, 1), (1, 1, 1))
    assert scoring.iou(found, ((0, 1, 1), (2, 1, 1), (2, 1, 2))) == 1 / 4
    assert scoring.iou((), ()) == 1.0
    assert scoring.iou((), ((0, 0, 0),)) == 0.0


@pytest.mark.parametrize(
    ("answer", "letters", "truth", "violations", "right"),
    [
        ("none", (), ("none",), 0, True),
        ("", (), ("none",), 0, False),  # no majority is no answer
        ("B", ("B",), ("none",), 0, False),
        ("B", ("B",), ("B",), 1, True),
        ("A", ("A",), ("B",), 1, False),
        ("A", ("A", "B"), ("B",), 1, False),  # one too many
        ("none", (), ("B",), 1, False),
        ("A", ("A",), ("A", "C"), 1, True),  # one of alike parts is too many
        ("A", ("A", "C"), ("A", "C"), 1, False),
        ("A", ("A", "C"), ("A", "C"), 2, True),
    ],
)
def test_letters_are_right_only_when_exactly_the_wrong_parts_are_named(
    answer: str, letters: tuple[str, ...], truth: tuple[str, ...], violations: int, right: bool
) -> None:
    case = row(answer=answer, letters=letters, answers_true=truth, violations_true=violations)
    assert scoring.letters_right(case) is right


def test_a_decision_needs_the_missing_parts_too() -> None:
    case = row(answer="none", answers_true=("none",), missing_true=("pin 6x20",), missing=())
    assert scoring.letters_right(case) and not scoring.decision_right(case)


def marks(*right: bool) -> tuple[MarkRow, ...]:
    return tuple(
        MarkRow("ABCDEF"[i], "hex_nut M8", "hex_nut M8" if ok else "hex_nut M10", 0.9)
        for i, ok in enumerate(right)
    )


def test_figures_of_an_assembly_by_hand() -> None:
    rows = [
        row(expected="PASS", marks=marks(True, True), answers_true=("none",), answer="none",
            direct="none", parts_true=2, parts_seen=2, violations_true=0, score=9.0,
            missing=(), missing_true=(), model_ms=10.0, total_ms=20.0),
        row(expected="FAIL", outcome="PASS", marks=marks(True, False), answers_true=("B",),
            answer="B", letters=("B",), direct="A", parts_true=2, parts_seen=3,
            violations_true=1, score=5.0, missing=(), missing_true=("pin 6x20",)),
        row(expected="PASS", outcome="UNSURE", marks=marks(True), answers_true=("none",),
            answer="", direct="none", parts_true=1, parts_seen=1, violations_true=0, score=7.0,
            missing=(), missing_true=()),
        row(expected="FAIL", outcome="ERROR", error="no such file", missing_true=(),
            marks=(MarkRow("A", "pin 6x20"),), answers_true=("A",), parts_true=1,
            violations_true=1),
    ]  # fmt: skip
    found = scoring.figures(rows, defect_fail=0.5)["assembly"]
    values = {
        key: item["value"] for key, item in found.items() if isinstance(item, dict) and "n" in item
    }
    assert found["cases"] == 4 and found["bad_files"] == 1
    assert found["outcomes"] == {"PASS": 2, "FAIL": 0, "UNSURE": 1, "ERROR": 1}
    assert values["count_right"] == 0.5
    assert values["reading"] == pytest.approx(4 / 6, abs=1e-4)
    assert values["reading_workpiece"] == pytest.approx(5 / 6, abs=1e-4)
    assert values["letter"] == 0.5 and values["decision"] == 0.25
    assert values["letter_direct"] == 0.5 and values["missing"] == 0.5
    assert values["pass_fail_right"] == 0.25
    assert values["overkill"] == 0.0 and values["escape"] == 0.5
    assert values["unsure_of_good"] == 0.5 and values["unsure_of_bad"] == 0.0
    assert values["conformity_srcc"] == pytest.approx(0.866, abs=1e-3)
    assert found["baseline_letter_always_none"] == 0.5
    assert found["baseline_pass_fail_always_pass"] == 0.5
    # 1/3, 1/3, 1/2, 1/2: one right letter of the marks and none
    assert found["baseline_letter_random"] == pytest.approx(5 / 12, abs=1e-4)
    assert found["reading_calibration_error"] == pytest.approx(0.1)
    assert found["latency_model_ms"] == {"p50": 10.0, "p95": 10.0}


def surface(name: str, truth: str, normal: float, **fields: Any) -> Row:
    expected = "PASS" if truth == "normal" else "FAIL"
    fields["probabilities"] = {"normal": normal, "dent": 1 - normal}
    return row(task="surface", defect=name, defect_true=truth, expected=expected, **fields)


def test_figures_of_a_surface_by_hand() -> None:
    rows = [
        surface("normal", "normal", 0.9, cells=(), cells_true=(), score=9.0, score_true=10.0),
        surface("dent", "normal", 0.4, outcome="FAIL", cells=((0, 0, 0),), cells_true=(),
                score=6.0, score_true=10.0),
        surface("dent", "dent", 0.2, outcome="FAIL", cells=((0, 0, 0), (0, 0, 1)),
                cells_true=((0, 0, 1), (0, 0, 2)), score=3.0, score_true=4.0),
        surface("dent", "crack", 0.3, outcome="FAIL", cells=(), cells_true=((1, 0, 0),),
                cells_part=((1, 0, 0), (1, 0, 1)), score=4.0, score_true=6.0),
    ]  # fmt: skip
    found = scoring.figures(rows, defect_fail=0.5)["surface"]
    assert found["five_class"]["value"] == 0.5
    assert found["binary"]["value"] == 0.75
    assert found["auroc"]["value"] == 1.0
    assert found["clean_alarms"]["value"] == 0.5 and found["clean_alarms"]["n"] == 2
    assert found["defects_found"]["value"] == 1.0
    assert found["overkill"]["value"] == 0.5 and found["recall_crack"]["value"] == 0.0
    assert found["recall_cut"]["n"] == 0
    # one hit of three cells in the union, and none of one
    assert found["grid_iou"]["value"] == pytest.approx(1 / 6, abs=1e-4)
    # 1 hit, 2 false (one on a clean part), 2 missed
    assert found["grid_f1"]["value"] == pytest.approx(2 / 6, abs=1e-4)
    assert found["grid_precision"] == pytest.approx(1 / 3, abs=1e-4)
    assert found["grid_clean_alarms"]["value"] == 0.5
    assert found["baseline_grid_iou_whole_part"] == 0.25
    assert found["baseline_five_class_always_normal"] == 0.5


def test_the_table_shows_value_interval_count_and_baselines() -> None:
    text = report.table(scoring.figures([surface("normal", "normal", 0.9)], defect_fail=0.5))
    line = next(line for line in text.splitlines() if "five classes" in line)
    assert "1.000" in line and "[0.206, 1.000]" in line and "always normal 1.000" in line
    assert "recall crack" not in text


def test_an_unreadable_case_without_a_task_does_not_break_the_table() -> None:
    figures = scoring.figures([row(task="", outcome="ERROR", error="line 3: not JSON")], 0.5)
    assert "unknown task: 1 cases, 1 with a bad file" in report.table(figures)
