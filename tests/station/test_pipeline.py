"""One part through the checks with a model that answers from a script: every way to a verdict."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("scipy", reason="part shapes need the extra demo")

from forge_station.capture.base import Cloud, ScanQuality
from forge_station.checks import Thresholds
from forge_station.contract import verdict as verdicts
from forge_station.contract.spec import Product, Rules
from forge_station.contract.verdict import Outcome, ScanSummary
from forge_station.errors import CaptureError
from forge_station.geometry.problem import Problem
from forge_station.permit import CHECKS_ALONE
from forge_station.pipeline import Inspector, Job, gate_result
from tests.station.fake_model import PIXEL_MM, FakeModel, part_cloud, tray_points

NUT, BIG_NUT, WASHER, BOLT = "hex_nut M8", "hex_nut M16", "flat_washer M8", "hex_bolt M8x30"
BATCH = Product("NUTS", "batch", ("workpiece",), {NUT: 3})
KIT = Product("KIT", "assembly", ("assembly",), {BOLT: 1, NUT: 1, WASHER: 1})
SINGLE = Product("NUT", "single", ("workpiece", "surface"), {NUT: 1})
SUMMARY = ScanSummary(points=1000)


def job(product: Product | None) -> Job:
    return Job("result-1", "serial-1", product, station="s1", line="l1")


def inspect(model: FakeModel, product: Product | None, parts: list[str], problems=(), **settings):
    clouds = [part_cloud(part, seed) for seed, part in enumerate(parts)]
    found = Inspector(model, permit=CHECKS_ALONE, **settings).inspect_parts(
        job(product), clouds, SUMMARY, problems
    )
    assert not verdicts.unknown_reasons(found.verdict.reasons)
    assert verdicts.Verdict.from_dict(found.verdict.to_dict()) == found.verdict
    return found


def codes(found) -> list[str]:
    return [reason.code for reason in found.verdict.reasons]


def nuts(**changes: tuple[str, float]) -> dict[str, tuple[str, float]]:
    return {mark: changes.get(mark, (NUT, 0.98)) for mark in "ABC"}


def test_a_right_batch_passes_with_every_part_read_and_measured():
    found = inspect(FakeModel(nuts()), BATCH, [NUT] * 3)
    verdict = found.verdict
    assert (verdict.outcome, codes(found)) == (Outcome.PASS, [])
    assert [check.check for check in verdict.checks] == ["scan", "workpiece"]
    assert [(part.mark, part.part, part.outcome) for part in verdict.parts] == [
        (mark, NUT, Outcome.PASS) for mark in "ABC"
    ]
    assert all(part.size_mm and 5.5 < part.size_mm[2] < 7.0 for part in verdict.parts)
    assert all(part.points and part.points > 5000 for part in verdict.parts)
    assert verdict.model is not None
    assert (verdict.model.name, verdict.model.provider) == ("script", "script")
    assert set(verdict.timings_ms) == {"gauge", "views", "read", "judge", "total"}
    assert verdict.checks[1].answer == "none"
    assert not verdict.surface


@pytest.mark.parametrize(
    ("reading", "code"), [((BIG_NUT, 0.98), "WRONG_MODEL"), ((WASHER, 0.98), "WRONG_WORKPIECE")]
)
def test_a_wrong_reading_fails_the_batch_and_its_mark(reading, code):
    model = FakeModel(nuts(B=reading), letter={"B": 0.97})
    parts = [NUT, reading[0], NUT]
    found = inspect(model, BATCH, parts)
    assert (found.verdict.outcome, codes(found)) == (Outcome.FAIL, [code])
    assert found.verdict.reasons[0].mark == "B"
    outcomes = {part.mark: part.outcome for part in found.verdict.parts}
    assert outcomes == {"A": Outcome.PASS, "B": Outcome.FAIL, "C": Outcome.PASS}


def test_an_improbable_reading_is_unsure_whatever_it_says():
    found = inspect(FakeModel(nuts(C=(NUT, 0.4))), BATCH, [NUT] * 3)
    assert (found.verdict.outcome, codes(found)) == (Outcome.UNSURE, ["LOW_PROBABILITY"])
    assert found.verdict.reasons[0].mark == "C"


def test_an_improbable_wrong_reading_is_unsure_not_fail():
    model = FakeModel(nuts(C=(BIG_NUT, 0.4)), letter={"C": 0.9})
    found = inspect(model, BATCH, [NUT] * 3)
    assert found.verdict.outcome is Outcome.UNSURE
    assert "LOW_PROBABILITY" in codes(found)


def test_a_reading_that_the_measured_size_contradicts_is_unsure():
    """Three equal large nuts that read as the right ones."""
    found = inspect(FakeModel(nuts()), BATCH, [NUT, BIG_NUT, NUT])
    assert (found.verdict.outcome, codes(found)) == (Outcome.UNSURE, ["SIZE_CONTRADICTS"])
    assert found.verdict.reasons[0].mark == "B"
    assert "measures 2" in found.verdict.reasons[0].text


def test_a_fail_stays_a_fail_beside_doubts():
    model = FakeModel(nuts(A=(WASHER, 0.9)), letter={"A": 0.97})
    found = inspect(model, BATCH, [NUT] * 3)
    assert found.verdict.outcome is Outcome.FAIL
    assert codes(found) == ["WRONG_WORKPIECE", "SIZE_CONTRADICTS"]


def test_a_wrong_count_fails_even_when_every_reading_is_right():
    model = FakeModel(dict.fromkeys("AB", (NUT, 0.99)))
    found = inspect(model, BATCH, [NUT] * 2)
    assert (found.verdict.outcome, codes(found)) == (Outcome.FAIL, ["WRONG_COUNT"])


def test_a_letter_that_contradicts_the_readings_is_unsure():
    found = inspect(FakeModel(nuts(), letter={"B": 0.95}), BATCH, [NUT] * 3)
    assert (found.verdict.outcome, codes(found)) == (Outcome.UNSURE, ["ANSWERS_DISAGREE"])
    assert found.verdict.checks[1].answer == "B"


def test_a_weak_contradiction_of_the_letter_does_not_count():
    found = inspect(FakeModel(nuts(), letter={"B": 0.6}), BATCH, [NUT] * 3)
    assert found.verdict.outcome is Outcome.PASS
    found = inspect(
        FakeModel(nuts(), letter={"B": 0.6}), BATCH, [NUT] * 3,
        thresholds=Thresholds(answer_disagree=0.5),
    )  # fmt: skip
    assert found.verdict.outcome is Outcome.UNSURE


def test_a_complete_kit_passes_with_the_models_conformity():
    readings = {"A": (BOLT, 0.99), "B": (NUT, 0.99), "C": (WASHER, 0.99)}
    model = FakeModel(readings, score={"10/10": 0.8, "7/10": 0.2})
    found = inspect(model, KIT, [BOLT, NUT, WASHER])
    assert found.verdict.outcome is Outcome.PASS
    assert found.verdict.checks[1].check == "assembly"
    assert found.verdict.checks[1].score == pytest.approx(9.4)


def test_a_kit_with_a_missing_part_fails():
    model = FakeModel({"A": (BOLT, 0.99), "B": (NUT, 0.99)}, missing={WASHER: 0.99})
    found = inspect(model, KIT, [BOLT, NUT])
    assert (found.verdict.outcome, codes(found)) == (Outcome.FAIL, ["MISSING_PART"])


def test_a_low_conformity_score_makes_a_right_kit_unsure():
    strict = replace(KIT, rules=Rules(min_conformity_score=8.0))
    readings = {"A": (BOLT, 0.99), "B": (NUT, 0.99), "C": (WASHER, 0.99)}
    model = FakeModel(readings, score={"4/10": 1.0})
    found = inspect(model, strict, [BOLT, NUT, WASHER])
    assert (found.verdict.outcome, codes(found)) == (Outcome.UNSURE, ["LOW_CONFORMITY"])


def test_a_clean_surface_passes_and_its_grid_is_not_decoded():
    model = FakeModel({"A": (NUT, 0.98)})
    found = inspect(model, SINGLE, [NUT])
    assert found.verdict.outcome is Outcome.PASS
    assert found.verdict.grids == ()
    (surface,) = found.verdict.surface
    assert (surface.defect_class, surface.score) == ("normal", 9.0)
    assert not any("r1:" in key for key in model.keys)
    assert "judge" in found.verdict.timings_ms
    assert not any(key == "answer:" for key in model.keys), "one part alone has no odd one"


def test_a_defect_fails_with_its_class_and_grids_in_mm():
    model = FakeModel(
        {"A": (NUT, 0.98)},
        surface={"dent": 0.9, "normal": 0.05},
        surface_score={"3/10": 1.0},
        rows={"top r5:": "5,6", "top r6:": "5", "front r1:": "16"},
    )
    found = inspect(model, SINGLE, [NUT])
    assert (found.verdict.outcome, codes(found)) == (Outcome.FAIL, ["SURFACE_DENT"])
    assert [grid.view for grid in found.verdict.grids] == ["front", "side", "top"]
    front, side, top = found.verdict.grids
    assert (front.cells, side.cells, top.cells) == (((0, 15),), (), ((4, 4), (4, 5), (5, 4)))
    picture = found.surface_pictures["A"]
    assert top.mm_per_cell == pytest.approx(picture.mm_per_px * 224 / 16, abs=1e-4)
    assert top.origin_mm == pytest.approx((-8 * top.mm_per_cell, 8 * top.mm_per_cell), abs=0.2)
    assert "top" in found.verdict.reasons[0].text
    assert model.images[1].shape == (224, 672, 3)


def test_a_defect_between_the_limits_is_unsure_with_its_grids():
    model = FakeModel({"A": (NUT, 0.98)}, surface={"crack": 0.4, "normal": 0.58})
    found = inspect(model, SINGLE, [NUT])
    assert (found.verdict.outcome, codes(found)) == (Outcome.UNSURE, ["SURFACE_CRACK"])
    assert len(found.verdict.grids) == 3


def test_a_class_without_a_marked_cell_fails_and_says_that_they_contradict():
    model = FakeModel({"A": (NUT, 0.98)}, surface={"cut": 0.9, "normal": 0.05})
    found = inspect(model, SINGLE, [NUT])
    assert found.verdict.outcome is Outcome.FAIL
    assert codes(found) == ["SURFACE_CUT", "GRID_CONTRADICTS"]


def test_a_low_surface_score_fails_where_the_product_has_a_limit():
    strict = replace(SINGLE, rules=Rules(min_surface_score=7.0))
    model = FakeModel({"A": (NUT, 0.98)}, surface_score={"6/10": 1.0})
    found = inspect(model, strict, [NUT])
    assert (found.verdict.outcome, codes(found)) == (Outcome.FAIL, ["LOW_SURFACE_SCORE"])


@pytest.mark.parametrize(
    "failing",
    ["trunk", "score_lines", "A:", "answer:", "score:"],
)
def test_a_model_that_fails_is_an_error_never_a_pass(failing):
    found = inspect(FakeModel(nuts(), fails=frozenset({failing})), BATCH, [NUT] * 3)
    assert (found.verdict.outcome, codes(found)) == (Outcome.ERROR, ["MODEL_FAILED"])
    assert failing in found.verdict.reasons[0].text


def test_a_model_that_fails_at_the_surface_is_an_error_of_every_check():
    model = FakeModel({"A": (NUT, 0.98)}, fails=frozenset({"class:"}))
    found = inspect(model, SINGLE, [NUT])
    assert found.verdict.outcome is Outcome.ERROR
    assert [check.outcome for check in found.verdict.checks[1:]] == [Outcome.ERROR] * 2


@pytest.mark.parametrize("failing", ["trunk", "class:"])
def test_a_model_that_fails_without_a_product_is_an_error(failing):
    model = FakeModel({"A": (NUT, 0.98)}, fails=frozenset({failing}))
    found = inspect(model, None, [NUT])
    assert (found.verdict.outcome, codes(found)) == (Outcome.ERROR, ["MODEL_FAILED"])


@pytest.mark.parametrize(
    "broken", [{"surface": {"normal": np.nan}}, {"surface_score": {"9/10": np.nan}}]
)
def test_surface_figures_that_are_not_numbers_never_pass(broken):
    found = inspect(FakeModel({"A": (NUT, 0.98)}, **broken), SINGLE, [NUT])
    assert found.verdict.outcome is Outcome.ERROR


def test_a_grid_line_over_its_budget_is_not_hidden():
    model = FakeModel(
        {"A": (NUT, 0.98)},
        surface={"dent": 0.4, "normal": 0.6},
        overruns=frozenset({"side r3:"}),
    )
    found = inspect(model, SINGLE, [NUT])
    assert found.verdict.outcome is Outcome.UNSURE
    assert codes(found) == ["SURFACE_DENT", "MODEL_OVERRUN"]


def test_a_doubtful_scan_never_passes_though_everything_reads_right():
    problem = Problem("SATURATED", "too bright", "UNSURE")
    found = inspect(FakeModel(nuts()), BATCH, [NUT] * 3, [problem])
    assert (found.verdict.outcome, codes(found)) == (Outcome.UNSURE, ["SATURATED"])
    assert len(found.verdict.parts) == 3, "a person sees what was read"


def test_a_doubtful_scan_with_a_wrong_part_fails():
    problem = Problem("SATURATED", "too bright", "UNSURE")
    model = FakeModel(nuts(B=(WASHER, 0.98)), letter={"B": 0.97})
    found = inspect(model, BATCH, [NUT, WASHER, NUT], [problem])
    assert found.verdict.outcome is Outcome.FAIL
    assert codes(found) == ["WRONG_WORKPIECE", "SATURATED"]


def test_a_scan_that_cannot_be_used_is_not_shown_to_the_model():
    model = FakeModel(nuts())
    problem = Problem("NO_DATA", "nothing", "ERROR")
    found = inspect(model, BATCH, [NUT] * 3, [problem])
    assert (found.verdict.outcome, codes(found)) == (Outcome.ERROR, ["NO_DATA"])
    assert model.texts == []


def test_no_part_and_no_problem_is_an_error_of_the_missing_check():
    found = inspect(FakeModel(), BATCH, [])
    assert (found.verdict.outcome, codes(found)) == (Outcome.ERROR, ["CHECK_MISSING"])


def test_more_parts_than_marks_are_never_read_in_part():
    model = FakeModel()
    found = inspect(model, BATCH, [NUT] * 7)
    assert found.verdict.outcome is Outcome.ERROR
    assert model.texts == []


def test_without_a_product_everything_is_read_and_nothing_decided():
    model = FakeModel({"A": (NUT, 0.98)}, surface={"dent": 0.9, "normal": 0.05})
    found = inspect(model, None, [NUT])
    assert (found.verdict.outcome, codes(found)) == (Outcome.UNSURE, ["NOT_CHECKED"])
    assert found.verdict.product == "none"
    assert found.verdict.surface[0].defect_class == "dent"
    assert not any("answer:" in key for key in model.keys)


def test_a_product_without_the_workpiece_check_is_not_failed_by_a_reading():
    look_only = replace(SINGLE, checks=("surface",))
    found = inspect(FakeModel({"A": (BIG_NUT, 0.98)}), look_only, [NUT])
    assert found.verdict.outcome is Outcome.PASS
    assert [check.check for check in found.verdict.checks] == ["scan", "surface"]
    assert found.verdict.parts[0].part == BIG_NUT


def test_the_first_turn_never_shows_what_is_expected():
    model = FakeModel(nuts())
    inspect(model, BATCH, [NUT] * 3)
    assert NUT not in model.texts[0]
    assert model.texts[1].startswith(f"A: {NUT}\nB: {NUT}\nC: {NUT}\n")
    assert f"batch {NUT}" in model.texts[1]


def test_the_same_parts_give_the_same_picture_and_verdict():
    first, again = (inspect(FakeModel(nuts()), BATCH, [NUT] * 3) for _ in range(2))
    same = replace(again.verdict, timings_ms=first.verdict.timings_ms)
    assert first.verdict == same
    models = [FakeModel(nuts()), FakeModel(nuts())]
    for model in models:
        inspect(model, BATCH, [NUT] * 3)
    assert np.array_equal(models[0].images[0], models[1].images[0])


def cloud_of(points: np.ndarray, frame: str = "tray", **quality) -> Cloud:
    return Cloud(
        points,
        None,
        PIXEL_MM,
        poses=4,
        frame=frame,
        quality=ScanQuality(valid_share=0.9, **quality),
    )


@pytest.fixture(scope="module")
def three_nuts() -> np.ndarray:
    return tray_points([part_cloud(NUT, seed, 40_000) for seed in range(3)])


def test_a_cloud_of_the_tray_is_separated_read_and_passed(three_nuts):
    found = Inspector(FakeModel(nuts()), permit=CHECKS_ALONE).inspect_cloud(
        job(BATCH), cloud_of(three_nuts)
    )
    assert (found.verdict.outcome, codes(found)) == (Outcome.PASS, [])
    assert found.verdict.scan.points == len(three_nuts)
    assert found.verdict.scan.quality["valid_share"] == 0.9
    assert set(found.verdict.timings_ms) >= {"scene", "gate", "read"}


def test_an_empty_tray_is_an_error():
    model = FakeModel()
    found = Inspector(model).inspect_cloud(job(BATCH), cloud_of(tray_points([])))
    assert (found.verdict.outcome, codes(found)) == (Outcome.ERROR, ["EMPTY_SCENE"])
    assert model.texts == []


def test_a_scan_without_points_is_an_error():
    nothing = np.zeros((0, 3), np.float32)
    found = Inspector(FakeModel()).inspect_cloud(job(BATCH), cloud_of(nothing))
    assert (found.verdict.outcome, set(codes(found))) == (Outcome.ERROR, {"NO_DATA"})


def test_seven_parts_on_the_tray_are_an_error():
    model = FakeModel()
    found = Inspector(model).inspect_cloud(
        job(BATCH), cloud_of(tray_points([part_cloud(NUT, 0, 40_000)] * 7))
    )
    assert found.verdict.outcome is Outcome.ERROR
    assert "TOO_MANY_PARTS" in codes(found)
    assert len(found.parts) == 7
    assert model.texts == []


def test_an_overexposed_scan_is_unsure(three_nuts):
    cloud = cloud_of(three_nuts, saturated_share=0.2, flags=("SATURATED",))
    found = Inspector(FakeModel(nuts()), permit=CHECKS_ALONE).inspect_cloud(job(BATCH), cloud)
    assert (found.verdict.outcome, codes(found)) == (Outcome.UNSURE, ["SATURATED"])
    assert found.verdict.scan.flags == ("SATURATED",)


def test_stacks_that_cannot_be_decoded_are_an_error_with_their_code():
    found = Inspector(FakeModel()).inspect_stacks(job(BATCH), [], {})
    assert found.verdict.outcome is Outcome.ERROR
    assert codes(found) == [CaptureError.code]
    assert found.parts == ()


def test_gate_result_is_as_bad_as_its_worst_problem():
    unsure, error = Problem("TOO_DARK", "dark", "UNSURE"), Problem("NO_TRAY", "none", "ERROR")
    assert gate_result([]).outcome is Outcome.PASS
    assert gate_result([unsure]).outcome is Outcome.UNSURE
    worst = gate_result([unsure, error])
    assert (worst.outcome, len(worst.reasons)) == (Outcome.ERROR, 2)
