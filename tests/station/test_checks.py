"""The checks by themselves: prompts, thresholds, doubts; the model answers from a script."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest

pytest.importorskip("scipy", reason="part shapes need the extra demo")

from forge_station import checks
from forge_station.checks import Judged, SurfaceRead, Thresholds
from forge_station.contract import spec, tasks
from forge_station.contract.error import ContractError
from forge_station.contract.spec import Product, Reading, Rules
from forge_station.contract.verdict import (
    CheckResult,
    GridReading,
    Outcome,
    PartReading,
    Reason,
    SurfaceReading,
)
from forge_station.contract.views import LARGE_LAYOUT, MARKS, NANO_LAYOUT
from forge_station.geometry import sheet
from forge_station.geometry.gauge import Size
from forge_station.geometry.surface import look, suspicious
from tests.station.fake_model import FakeModel, part_cloud

NUT, BOLT = "hex_nut M8", "hex_bolt M8x30"
NUT_SIZE = Size(14.9, 13.0, 6.6, 0.1)
BATCH = Product("NUTS", "batch", ("workpiece",), {NUT: 3})
SINGLE = Product("NUT", "single", ("workpiece", "surface"), {NUT: 1})


def test_an_unknown_threshold_is_refused_with_the_known_ones():
    known = "one of answer_disagree, closer_weight, defect_fail"
    with pytest.raises(ContractError, match=f"defect_fial.*{known}"):
        Thresholds.read({"defect_fail": 0.4}, {"defect_fial": 0.5})


def test_the_station_file_replaces_the_bundle_which_replaces_the_defaults():
    found = Thresholds.read({"defect_fail": 0.4, "grid_row": 0.3}, {"grid_row": 0.6})
    assert (found.defect_fail, found.grid_row) == (0.4, 0.6)
    assert found.defect_unsure == Thresholds().defect_unsure


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1])
@pytest.mark.parametrize("name", [field.name for field in fields(Thresholds)])
def test_a_threshold_that_no_figure_can_reach_is_refused(name, value):
    with pytest.raises(ContractError, match=f"{name}: "):
        Thresholds.read({name: value})


def test_an_unsure_limit_above_the_fail_limit_is_refused():
    """A part between the two would fail without its grid."""
    with pytest.raises(ContractError, match=r"defect_unsure: 0.35; .* at most defect_fail, 0.3"):
        Thresholds.read({"defect_fail": 0.3})


@pytest.mark.parametrize("layout", [NANO_LAYOUT, LARGE_LAYOUT])
def test_marks_stand_in_distinct_columns_and_never_all_in_order(layout):
    for count in range(1, len(MARKS) + 1):
        columns = checks.columns_of(count, layout)
        assert len(set(columns)) == len(columns) == count
        assert set(columns) <= set(range(layout.columns))
        assert count == 1 or columns != tuple(range(count))
        assert columns == checks.columns_of(count, layout)


def picture_of(*parts: str) -> sheet.Sheet:
    clouds = [part_cloud(part).points for part in parts]
    return sheet.marks_sheet(clouds, checks.columns_of(len(parts), NANO_LAYOUT), NANO_LAYOUT)


def test_marks_are_read_from_one_trunk_with_scale_and_sizes():
    model = FakeModel({"A": (NUT, 0.9), "B": (BOLT, 0.8)})
    picture = picture_of(NUT, BOLT)
    sizes = {"A": NUT_SIZE, "B": Size(35.4, 13.0, 13.0, 0.1)}
    read = checks.read_marks(model, picture, sizes, {"A": 11, "B": 12})
    assert [(p.mark, p.workpiece, p.model_number) for p in read.parts] == [
        ("A", "hex_nut", "M8"),
        ("B", "hex_bolt", "M8x30"),
    ]
    assert [read.seen[mark][p.part] for mark, p in zip("AB", read.parts, strict=True)] == [0.9, 0.8]
    assert [p.points for p in read.parts] == [11, 12]
    assert model.keys == ["A:", "B:"]
    (text,) = model.texts
    image = f"{tasks.IMAGE_OPEN}{tasks.IMAGE_TOKEN}{tasks.IMAGE_CLOSE}"
    facts = f"marks scale {picture.mm_per_px:.2f}\nA: 14.9 13.0 6.6\nB: 35.4 13.0 13.0"
    assert text == tasks.TRUNK_OPEN + image + facts + tasks.ASSISTANT


def test_turn_two_of_a_majority_batch_names_no_part():
    model = FakeModel({"A": (NUT, 0.9), "B": (NUT, 0.9), "C": (NUT, 0.9)}, letter={"C": 0.7})
    read = checks.read_marks(model, picture_of(NUT), dict.fromkeys("ABC", NUT_SIZE), {})
    product = Product("ANY", "batch", ("workpiece",), count=3)
    judged = checks.judge_marks(model, read, product)
    assert (judged.letter, judged.letter_probability) == ("C", 0.7)
    assert (judged.missing, judged.score) == ("none", 10.0)
    assert model.texts[-1].endswith(f"batch majority{tasks.ASSISTANT}")
    assert "missing:" not in model.keys


def test_the_score_is_the_mean_of_its_distribution():
    model = FakeModel({"A": (NUT, 0.9)}, surface_score={"10/10": 0.5, "7/10": 0.5})
    picture, _ = sheet.surface_picture(part_cloud(NUT).points, NANO_LAYOUT)
    read = checks.read_surface(model, picture, "A", NUT, NUT_SIZE, Thresholds(), 1.0)
    assert read.reading.score == 8.5
    assert model.texts[-1].endswith(f"surface joint\n{NUT}\n14.9 13.0 6.6{tasks.ASSISTANT}")


def test_the_grid_can_be_asked_for_in_any_case():
    model = FakeModel({"A": (NUT, 0.9)}, rows={"side r2:": "3"})
    picture, _ = sheet.surface_picture(part_cloud(NUT).points, NANO_LAYOUT)
    read = checks.read_surface(
        model, picture, "A", NUT, NUT_SIZE, Thresholds(), 1.0, always_grid=True
    )
    assert [grid.cells for grid in read.grids] == [(), ((1, 2),), ()]
    assert len([key for key in model.keys if " r" in key]) == 48


NEAR = Thresholds(look_again=0.1, closer_weight=0.5)


def looked(model: FakeModel, thresholds: Thresholds) -> SurfaceRead:
    seen = look(part_cloud(NUT).points, NANO_LAYOUT)
    return checks.read_surface(
        model, seen.picture, "A", NUT, NUT_SIZE, thresholds, 1.0, closer=seen.closer_look
    )


def test_a_suspicious_surface_is_looked_at_again_and_both_looks_decide():
    model = FakeModel(surface={"normal": 0.8, "dent": 0.2}, near={"normal": 0.1, "dent": 0.9})
    read = looked(model, NEAR)
    dent, normal = math.sqrt(0.2 * 0.9), math.sqrt(0.8 * 0.1)
    assert read.probabilities["dent"] == pytest.approx(dent / (dent + normal), abs=1e-4)
    assert sum(read.probabilities.values()) == pytest.approx(1)
    first, closer = model.images
    seen = look(part_cloud(NUT).points, NANO_LAYOUT)
    expected = seen.closer_look(suspicious(_one(2, 5, 9))).picture.image
    assert read.closer is not None and np.array_equal(read.closer.picture.image, closer)
    assert np.array_equal(first, seen.picture.image)
    assert np.array_equal(closer[:, -224:], expected[:, -224:])  # the top view


@pytest.mark.parametrize("thresholds", [Thresholds(), Thresholds(look_again=0.3)])
def test_there_is_no_second_look_below_its_limit(thresholds):
    model = FakeModel(surface={"normal": 0.8, "dent": 0.2}, near={"dent": 1.0})
    read = looked(model, thresholds)
    assert read.probabilities["dent"] == 0.2
    assert len(model.images) == 1


def test_the_grid_is_that_of_the_first_look():
    model = FakeModel(surface={"dent": 0.9}, near={"dent": 0.9}, rows={"top r6:": "10"})
    read = looked(model, NEAR)
    assert {grid.view: grid.cells for grid in read.grids}["top"] == ((5, 9),)


def _one(view: int, row: int, column: int) -> np.ndarray:
    cells = np.zeros((3, 16, 16))
    cells[view, row, column] = 1
    return cells


@pytest.mark.parametrize(
    ("request_", "score", "grids"), [("score", 9.0, 0), ("grid", None, 3), ("joint", 9.0, 3)]
)
def test_the_three_requests_give_what_they_ask_for(request_, score, grids):
    model = FakeModel({"A": (NUT, 0.9)}, surface={"dent": 0.9}, rows={"side r2:": "3"})
    picture, _ = sheet.surface_picture(part_cloud(NUT).points, NANO_LAYOUT)
    read = checks.read_surface(
        model, picture, "A", NUT, NUT_SIZE, Thresholds(), 1.0, request=request_
    )
    assert (read.reading.score, len(read.grids)) == (score, grids)
    assert f"surface {request_}\n" in model.texts[-1]


def seen(**odds: float) -> dict[str, float]:
    """Odds of catalogue parts, written hex_nut_M8=0.5."""
    return {name[::-1].replace("_", " ", 1)[::-1]: value for name, value in odds.items()}


def ranking(odds: dict[str, float], size: Size = NUT_SIZE) -> list[tuple[str, float]]:
    return [(part, round(p, 3)) for part, p in checks.weigh(odds, size).items()]


def test_the_measured_size_decides_between_model_numbers():
    """M6 and M10 look like M8, but do not measure 14.9 x 13.0 x 6.6 mm."""
    found = ranking(seen(hex_nut_M6=0.4, hex_nut_M8=0.25, hex_nut_M10=0.35))
    assert found[0] == ("hex_nut M8", 1.0)
    assert all(probability < 0.01 for _, probability in found[1:])


def test_the_measured_size_makes_no_workpiece_more_certain():
    """A stranger as large as a nut must not become a nut by that."""
    found = ranking(seen(hex_nut_M8=0.3, hex_bolt_M20x80=0.7))
    assert found[0] == ("hex_nut M8", 0.3)


def test_where_nothing_fits_the_model_keeps_its_own_odds():
    odds = seen(hex_bolt_M20x80=0.6, hex_bolt_M20x50=0.4)
    found = ranking(odds)
    assert found[0][0].startswith("hex_bolt M20")
    assert sum(p for _, p in found) == pytest.approx(1.0)
    assert found[0][1] == 0.6


def test_weighed_odds_are_probabilities():
    odds = {part: 1.0 / len(checks.PARTS) for part in checks.PARTS}
    found = checks.weigh(odds, NUT_SIZE)
    assert set(found) == set(checks.PARTS)
    assert all(0.0 <= probability <= 1.0 for probability in found.values())
    assert sum(found.values()) <= 1.0 + 1e-9


def part(mark: str, text: str, probability: float = 0.95) -> PartReading:
    workpiece, _, number = text.partition(" ")
    return PartReading(mark, workpiece, number, probability)


def test_sizes_contradict_only_readings_that_cannot_have_them():
    parts = [part("A", NUT), part("B", "hex_nut M16"), part("C", ""), part("D", NUT)]
    sizes = dict.fromkeys("ABC", NUT_SIZE)
    doubts = checks.size_doubts(parts, sizes, Thresholds())
    assert [(doubt.code, doubt.mark) for doubt in doubts] == [("SIZE_CONTRADICTS", "B")]
    assert doubts[0].text == "B reads hex_nut M16, but measures 14.9 x 13.0 x 6.6 mm"


def test_a_wide_size_tolerance_lets_everything_through():
    parts = [part("B", "hex_nut M10")]
    assert checks.size_doubts(parts, {"B": NUT_SIZE}, Thresholds())
    assert not checks.size_doubts(parts, {"B": NUT_SIZE}, Thresholds(size_tolerance=100.0))


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome.PASS, Outcome.UNSURE),
        (Outcome.UNSURE, Outcome.UNSURE),
        (Outcome.FAIL, Outcome.FAIL),
        (Outcome.ERROR, Outcome.ERROR),
    ],
)
def test_a_doubt_makes_a_pass_unsure_and_nothing_better(outcome, expected):
    reasons = () if outcome is Outcome.PASS else (Reason("NO_DATA", "x"),)
    result = CheckResult("workpiece", outcome, reasons, 5.0, 0.9, 0.6)
    doubted = checks.with_doubts(result, [Reason("LOW_CONFORMITY", "y")])
    assert doubted.outcome is expected
    assert [reason.text for reason in doubted.reasons] == [*("x" for _ in reasons), "y"]
    assert (doubted.score, doubted.confidence, doubted.threshold) == (5.0, 0.9, 0.6)
    assert checks.with_doubts(result, [], 7.0, "B").outcome is outcome
    assert checks.with_doubts(result, [], 7.0, "B").answer == "B"


def judgement(**parts: str) -> spec.Judgement:
    return spec.evaluate(BATCH, {mark: Reading(text, 0.99) for mark, text in parts.items()})


@pytest.mark.parametrize(
    ("letter", "probability", "doubted"),
    [("none", 0.99, False), ("A", 0.95, True), ("A", 0.89, False)],
)
def test_a_letter_against_readings_that_are_all_right(letter, probability, doubted):
    found = checks.judged_doubts(
        Judged(letter, probability, "none", 10.0),
        judgement(A=NUT, B=NUT, C=NUT),
        BATCH,
        Thresholds(),
    )
    assert bool(found) == doubted


@pytest.mark.parametrize(("letter", "doubted"), [("B", False), ("A", True), ("none", True)])
def test_a_letter_against_readings_with_an_odd_one(letter, doubted):
    found = checks.judged_doubts(
        Judged(letter, 0.99, "none", 7.0), judgement(A=NUT, B=BOLT, C=NUT), BATCH, Thresholds()
    )
    assert bool(found) == doubted


def test_a_missing_piece_has_no_letter():
    """With a piece too few no mark is wrong, and `none` agrees."""
    found = checks.judged_doubts(
        Judged("none", 0.99, "none", 7.0), judgement(A=NUT, B=NUT), BATCH, Thresholds()
    )
    assert not found


def surface(mark: str, score: float | None = 9.0, cells=((1, 1),), overrun=False, **odds: float):
    odds = {name: odds.get(name, 0.0) for name in tasks.SURFACE_CLASSES}
    name = max(odds, key=lambda key: odds[key])
    reading = SurfaceReading(mark, name, odds[name], odds, score, "text")
    return SurfaceRead(reading, (GridReading(mark, "top", "", cells),), odds, overrun)


@pytest.mark.parametrize(
    ("odds", "outcome", "codes"),
    [
        ({"normal": 1.0}, Outcome.PASS, []),
        ({"normal": 0.651, "dent": 0.349}, Outcome.PASS, []),
        ({"normal": 0.65, "dent": 0.35}, Outcome.UNSURE, ["SURFACE_DENT"]),
        ({"normal": 0.501, "cut": 0.3, "dent": 0.199}, Outcome.UNSURE, ["SURFACE_CUT"]),
        ({"normal": 0.5, "crack": 0.5}, Outcome.FAIL, ["SURFACE_CRACK"]),
        # normal is the likeliest class, but a defect is likelier still
        (
            {"normal": 0.4, "crack": 0.3, "deformation": 0.3},
            Outcome.FAIL,
            ["SURFACE_CRACK"],
        ),
    ],
)
def test_the_probability_of_any_defect_decides(odds, outcome, codes):
    result = checks.surface_result([surface("A", **odds)], SINGLE, Thresholds())
    assert result.outcome is outcome
    assert [reason.code for reason in result.reasons] == codes
    assert result.confidence == pytest.approx(odds["normal"])


def test_the_worst_of_several_parts_decides_and_all_are_named():
    reads = [
        surface("A", normal=1.0, score=8.0),
        surface("B", normal=0.6, dent=0.4, score=6.0),
        surface("C", normal=0.1, cut=0.9, score=2.0),
    ]
    result = checks.surface_result(reads, SINGLE, Thresholds())
    assert result.outcome is Outcome.FAIL
    assert [(r.code, r.mark) for r in result.reasons] == [
        ("SURFACE_CUT", "C"),
        ("SURFACE_DENT", "B"),
    ]
    assert result.score == 2.0
    assert result.confidence == pytest.approx(0.1)


def test_a_surface_score_at_the_limit_passes():
    product = Product("N", "single", ("surface",), {NUT: 1}, rules=Rules(min_surface_score=7.0))
    for score, outcome in ((7.0, Outcome.PASS), (6.9, Outcome.FAIL), (None, Outcome.PASS)):
        result = checks.surface_result([surface("A", score, normal=1.0)], product, Thresholds())
        assert result.outcome is outcome


def test_an_overrun_is_unsure_and_hides_no_defect():
    result = checks.surface_result([surface("A", overrun=True, normal=1.0)], SINGLE, Thresholds())
    assert (result.outcome, result.reasons[0].code) == (Outcome.UNSURE, "MODEL_OVERRUN")
    result = checks.surface_result(
        [surface("A", overrun=True, cells=(), dent=1.0)], SINGLE, Thresholds()
    )
    assert [reason.code for reason in result.reasons] == [
        "SURFACE_DENT",
        "MODEL_OVERRUN",
        "GRID_CONTRADICTS",
    ]


def test_measured_sizes_are_in_mark_order():
    sizes = checks.measured([part_cloud(NUT), part_cloud(BOLT)])
    assert list(sizes) == ["A", "B"]
    assert sizes["A"].height_mm == pytest.approx(6.5, abs=0.5)
    assert sizes["B"].length_mm > 30
