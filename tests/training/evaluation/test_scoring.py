"""Figures against values computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from training.evaluation import measures, reliability, report, scoring
from training.evaluation.rows import MarkRow, Probe, Row
from training.evaluation.surface_figures import iou, recall_over_size
from training.evaluation.tray_figures import decision_right, letters_right


def row(**fields: Any) -> Row:
    given = {"id": "x", "task": "assembly", "setting": "zero-shot", "outcome": "PASS", **fields}
    return Row(**given)


def test_wilson_interval_is_the_published_one() -> None:
    assert measures.wilson(95, 100) == pytest.approx((0.8882, 0.9785), abs=1e-4)
    assert measures.wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert measures.wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert measures.wilson(0, 0) == (0.0, 1.0)


def test_share_of_nothing_has_no_value() -> None:
    assert measures.share([]) == {"value": None, "interval": None, "n": 0}


def test_auroc_counts_ties_half() -> None:
    # pairs: (0.9 > 0.5), (0.9 > 0.1), (0.5 = 0.5: half), (0.5 > 0.1)
    assert reliability.auroc([0.9, 0.5, 0.5, 0.1], [True, True, False, False]) == 3.5 / 4
    assert reliability.auroc([0.1, 0.9], [True, True]) is None


def test_calibration_error_is_the_weighted_gap_of_the_bins() -> None:
    # bin 0.9: mean 0.95, right 1/2; bin 0.2: mean 0.25, right 0/2
    error = reliability.calibration_error([0.95, 0.95, 0.25, 0.25], [True, False, False, False])
    assert error == pytest.approx(0.5 * 0.45 + 0.5 * 0.25)
    assert reliability.calibration_error([1.0], [True]) == 0.0
    assert reliability.calibration_error([], []) is None


def test_pooled_share_weighs_marks_and_never_claims_certainty() -> None:
    found = measures.pooled([6, 1], [6, 2])
    assert found["value"] == 0.875 and found["n"] == 8
    certain = measures.pooled([6, 6], [6, 6])
    assert certain["value"] == 1.0 and certain["interval"][0] == pytest.approx(0.7575, abs=1e-4)


def test_grid_iou_takes_all_views_as_one_grid() -> None:
    found = ((0, 1, 1), (1, 1, 1))
    assert iou(found, ((0, 1, 1), (2, 1, 1), (2, 1, 2))) == 1 / 4
    assert iou((), ()) == 1.0
    assert iou((), ((0, 0, 0),)) == 0.0


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
    assert letters_right(case) is right


def test_a_decision_needs_the_missing_parts_too() -> None:
    case = row(answer="none", answers_true=("none",), missing_true=("pin 6x20",), missing=())
    assert letters_right(case) and not decision_right(case)


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
    line = next(line for line in text.splitlines() if "class right" in line)
    assert "1.000" in line and "[0.206, 1.000]" in line and "always normal 1.000" in line
    assert "recall crack" not in text


def test_an_unreadable_case_without_a_task_does_not_break_the_table() -> None:
    figures = scoring.figures([row(task="", outcome="ERROR", error="line 3: not JSON")], 0.5)
    assert "unknown task: 1 cases, 1 with a bad file" in report.table(figures)


def test_equal_mass_error_by_hand() -> None:
    # two bins of two: (.1, .3 | 0, 1) gap .3; (.6, .8 | 1, 1) gap .3
    error = reliability.equal_mass_error([0.8, 0.1, 0.6, 0.3], [True, False, True, True], bins=2)
    assert error == pytest.approx(0.5 * 0.3 + 0.5 * 0.3)
    assert reliability.equal_mass_error([], []) is None


def test_debiased_error_takes_off_what_chance_adds() -> None:
    # one bin of four: mean .5, share .5: gap 0, chance .25/3 -> below 0, so 0
    assert reliability.debiased_error([0.5] * 4, [True, False, True, False], bins=1) == 0.0
    # one bin of four: mean .9, share .25: .65^2 - .1875/3
    found = reliability.debiased_error([0.9] * 4, [True, False, False, False], bins=1)
    assert found == pytest.approx((0.65**2 - 0.0625) ** 0.5)
    assert reliability.debiased_error([0.9], [True]) is None


def test_debiased_error_of_a_calibrated_model_is_smaller() -> None:
    rng = np.random.default_rng(0)
    p = rng.uniform(0.3, 1.0, 1000)
    hits = rng.random(1000) < p
    plain, debiased = reliability.equal_mass_error(p, hits), reliability.debiased_error(p, hits)
    assert plain is not None and debiased is not None
    assert 0.015 < plain < 0.06 and debiased < 0.7 * plain


def test_brier_and_its_skill_by_hand() -> None:
    odds = np.array([[0.8, 0.2], [0.4, 0.6]])
    truth = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert reliability.brier(odds, truth) == pytest.approx((0.08 + 0.32) / 2)
    # the class shares alone give 0.5
    assert reliability.brier_skill(odds, truth) == pytest.approx(1 - 0.2 / 0.5)
    assert reliability.brier_skill(odds[:1], truth[:1]) is None  # one class only


def test_nothing_on_either_side_is_a_perfect_f1() -> None:
    rows = [surface("normal", "normal", 0.9, cells=(), cells_true=())]
    found = scoring.figures(rows, 0.5)["surface"]
    assert found["grid_f1"]["value"] == 1.0 and found["grid_iou"]["value"] is None
    assert found["grid_iou_all"]["value"] == 1.0
    assert found["auroc"]["value"] is None  # one class only


def test_no_hit_is_an_f1_of_zero_and_an_unread_grid_misses_all() -> None:
    rows = [
        surface("dent", "dent", 0.1, cells=((0, 0, 0),), cells_true=((0, 5, 5),)),
        surface("dent", "dent", 0.1, cells=None, cells_true=((0, 5, 5), (0, 5, 6))),
    ]
    found = scoring.figures(rows, 0.5)["surface"]
    assert found["grid_f1"]["value"] == 0.0 and found["grid_recall"] == 0.0
    assert found["grid_iou"]["value"] == 0.0 and found["grid_vanished"]["value"] == 0.5


def test_constant_ranks_and_a_constant_score_have_no_correlation() -> None:
    rows = [surface("dent", "dent", 0.1, score=4.0, score_true=float(n)) for n in range(4)]
    assert scoring.figures(rows, 0.5)["surface"]["score_srcc"]["value"] is None


def test_ties_share_their_rank() -> None:
    pairs = [(1.0, 1.0), (2.0, 2.0), (2.0, 3.0), (3.0, 3.0)]
    rows = [surface("dent", "dent", 0.1, score=a, score_true=b) for a, b in pairs]
    # ranks 1, 2.5, 2.5, 4 and 1, 2, 3.5, 3.5: covariance 1 / sqrt(1.125^2)
    assert scoring.figures(rows, 0.5)["surface"]["score_srcc"]["value"] == pytest.approx(
        3.75 / 4.5, abs=1e-4
    )


def test_precision_recall_and_f1_of_a_class() -> None:
    rows = [surface("dent", "dent", 0.1), surface("dent", "crack", 0.1),
            surface("normal", "dent", 0.9), surface("normal", "normal", 0.9)]  # fmt: skip
    found = scoring.figures(rows, 0.5)["surface"]
    assert found["precision_dent"]["value"] == 0.5 and found["recall_dent"]["value"] == 0.5
    assert found["f1_dent"]["value"] == 0.5
    assert found["f1_crack"]["value"] == 0.0  # true once, never read
    assert found["precision_crack"]["value"] is None and found["f1_cut"]["value"] is None
    assert found["detail"]["confusion"]["counts"][1] == [0, 0, 0, 0, 1]


def test_classes_of_a_photo_line_are_its_own() -> None:
    rows = [
        row(
            task="surface",
            defect=read,
            defect_true=true,
            probabilities={"normal": 0.1, "fray": 0.9},
        )
        for read, true in (("fray", "fray"), ("fray", "blowhole"), ("normal", "normal"))
    ]
    found = scoring.figures(rows, 0.5)["surface"]
    assert found["detail"]["confusion"]["truth"] == ["normal", "blowhole", "fray"]
    assert found["recall_fray"]["value"] == 1.0 and found["binary"]["value"] == 1.0
    assert found["baseline_five_class_random"] == pytest.approx(1 / 3)


def test_confusion_of_workpieces_names_what_was_not_read() -> None:
    own = (*marks(True), MarkRow("B", "pin 6x20"))
    found = scoring.figures([row(marks=own)], 0.5)["assembly"]["detail"]
    assert found["confusion"] == {
        "truth": ["hex_nut", "pin"],
        "read": ["hex_nut", "pin", "not read"],
        "counts": [[1, 0, 0], [0, 0, 1]],
    }
    assert found["classes"]["pin"]["recall"]["value"] == 0.0


def test_errors_are_counted_by_level_and_look_alikes_apart() -> None:
    rows = [
        row(fault="wrong model", lookalike="flat washer", answers_true=("A",), answer="B",
            letters=("B",), violations_true=1),
        row(fault="wrong workpiece", answers_true=("A",), answer="A", letters=("A",),
            violations_true=1),
        row(answers_true=("none",), answer="none"),
    ]  # fmt: skip
    detail = scoring.figures(rows, 0.5)["assembly"]["detail"]
    assert detail["faults"]["wrong model"]["letter"]["value"] == 0.0
    assert detail["faults"]["wrong workpiece"]["letter"]["value"] == 1.0
    assert detail["faults"]["nothing wrong"]["cases"] == 1
    assert detail["lookalikes"]["flat washer"]["cases"] == 1
    assert "other length" not in detail["lookalikes"]


def test_the_missing_part_is_asked_of_cases_that_lack_exactly_one() -> None:
    lacking = {"fault": "missing", "answers_true": ("none",), "missing_options": 4}
    rows = [
        row(**lacking, missing_true=("pin 6x20",), missing=("pin 6x20",), missing_direct="none"),
        row(**lacking, missing_true=("hex_nut M8",), missing=(), missing_direct="hex_nut M8"),
        row(answers_true=("none",), missing_true=(), missing=(), missing_direct="none"),
    ]
    found = scoring.figures(rows, 0.5)["assembly"]
    assert found["missing_part"] == {"value": 0.5, "interval": [0.0945, 0.9055], "n": 2}
    assert found["missing_part_direct"]["value"] == 0.5
    assert found["baseline_missing_part_random"] == 0.25
    assert found["detail"]["missing_part"]["pin"]["missing_part"]["value"] == 1.0


def test_probes_pool_over_marks() -> None:
    probes = (Probe("moved_letters", "A", "pin 6x20", "pin 6x20"),
              Probe("moved_letters", "B", "pin 6x20", "rivet 3x6"))  # fmt: skip
    found = scoring.figures([row(probes=probes), row()], 0.5)["assembly"]
    assert found["probe_moved_letters"]["value"] == 0.5
    assert found["probe_moved_letters"]["n"] == 2


def test_recall_over_size_has_bins_of_equal_numbers() -> None:
    rows = [
        surface("dent", "dent", 0.9 if size < 8 else 0.1, defect_size_mm=float(size))
        for size in range(16)
    ]
    rows.append(surface("normal", "normal", 0.9, defect_size_mm=None))
    found = recall_over_size(rows, 0.5)
    assert list(found) == ["size_mm"] and list(found["size_mm"]) == ["all", "dent"]
    small, large = found["size_mm"]["all"]
    assert (small["from"], small["to"], small["n"], small["found"]) == (0.0, 7.0, 8, 0.0)
    assert (large["found"], large["class_right"]) == (1.0, 1.0)
    assert large["interval"][1] == 1.0


def test_views_are_scored_apart() -> None:
    rows = [surface("dent", "dent", 0.1, cells=((0, 0, 0), (2, 1, 1)), cells_true=((0, 0, 0),)),
            surface("normal", "normal", 0.9, cells=(), cells_true=())]  # fmt: skip
    views = scoring.figures(rows, 0.5)["surface"]["detail"]["views"]
    assert views["front"]["grid_f1"]["value"] == 1.0 and "top" not in views


def test_parse_warnings_are_counted_by_kind() -> None:
    rows = [row(warnings=("MISSING:NO_ANSWER", "ASSYVERI:TWO_ANSWERS")),
            row(warnings=("MISSING:NO_ANSWER",))]  # fmt: skip
    found = scoring.figures(rows, 0.5)["assembly"]["detail"]["warnings"]
    assert found == {"MISSING:NO_ANSWER": 2, "ASSYVERI:TWO_ANSWERS": 1}


def test_a_perfect_ranking_and_a_lone_case_do_not_claim_certainty() -> None:
    rows = [surface("normal", "normal", 0.9 - n / 100) for n in range(8)]
    rows += [surface("dent", "dent", 0.2, cells=((0, 0, 0),), cells_true=((0, 0, 0),))]
    found = scoring.figures(rows, 0.5)["surface"]
    # Wilson's interval of one right of one, the smaller class
    assert found["auroc"] == {"value": 1.0, "interval": [0.2065, 1.0], "n": 9}
    assert found["grid_iou"] == {"value": 1.0, "interval": [0.0, 1.0], "n": 1}
