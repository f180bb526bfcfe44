"""What may stand in a certification set, and how parts are counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forge_station.checks import CERTAIN
from tests.training.calibration.sets import row, rows
from training.calibration import parts
from training.calibration.error import CalibrationError

RULE = {"min_reading_probability": 0.6}


def test_every_row_with_a_truth_is_a_part_and_errors_are_only_counted():
    given = rows(3, 2)
    given += [replace(given[0], id="e", outcome="ERROR"), replace(given[0], id="u", expected=None)]
    found = parts.gather(given, None)
    assert len(found.parts) == 5 and len(found.of(defective=True)) == 2
    assert found.left_out == {"ERROR": 1, "truth not told": 1}
    assert found.simulated and found.parts[0].rules == RULE


def test_parts_that_the_station_selected_are_barred():
    harvested = rows(30, 30, provenance="harvested")
    with pytest.raises(CalibrationError, match=r"selected itself.*60 of 60 parts"):
        parts.gather(harvested, None)
    with pytest.raises(CalibrationError, match="1 of 6 parts"):
        parts.gather([*rows(3, 2, provenance="manual"), harvested[0]], "manual")


@pytest.mark.parametrize(
    ("given", "stated", "said"),
    [
        (rows(2, 2, provenance=""), None, "where parts come from is not told"),
        (rows(2, 2, provenance="somewhere"), None, "unknown provenance.*somewhere"),
        ([*rows(2, 2), *rows(1, 1, seed=1, provenance="audit")], None, "simulated and real"),
        (rows(2, 2, log_odds={}), None, "have no scores"),
        ([], None, "have no scores"),
        ([*rows(2, 2), row("x", "surface", -1.0, True, log_odds={})], None, "without a score"),
    ],
)
def test_a_set_that_no_claim_may_rest_on_is_refused(given, stated, said):
    with pytest.raises(CalibrationError, match=said):
        parts.gather(given, stated)


def test_the_stated_provenance_fills_in_and_does_not_replace():
    found = parts.gather([*rows(1, 1, provenance=""), *rows(1, 1, seed=1)], "simulated")
    assert {part.provenance for part in found.parts} == {"simulated"}
    with pytest.raises(CalibrationError, match="simulated and real"):
        parts.gather([*rows(1, 1, provenance=""), *rows(1, 1, seed=1)], "manual")


def test_a_part_counts_once():
    captures = [
        row("a", "surface", -7.0, True, part="P1"),
        row("b", "surface", 3.0, True, part="P1"),
        row("c", "surface", -7.0, False, part="P2"),
        row("d", "surface", -1.0, False, part="P2"),
        row("e", "surface", 1.0, False, part="P2"),
        row("f", "surface", 2.0, True),
    ]
    with pytest.raises(CalibrationError, match=r"more than once.*2 part ids"):
        parts.gather(captures, None)
    found = parts.gather(captures, None, "worst")
    scores = {part.id: part.log_odds["surface"] for part in found.parts}
    assert scores == {"P1": -7.0, "P2": 1.0, "f": 2.0}, "each time the one that speaks against us"
    two = [row("a", "surface", 1.0, True, part="P"), row("b", "surface", 1.0, False, part="P")]
    with pytest.raises(CalibrationError, match="two truths"):
        parts.gather(two, None, "worst")


def test_a_part_that_a_check_stops_has_no_reach():
    passes, fails = row("a", "surface", -4.0, True), row("b", "surface", 3.0, True)
    unsure = row("c", "surface", -4.0, True, outcome="UNSURE")
    gate = row("d", "surface", 0.0, True, outcome="UNSURE", log_odds={})
    found = parts.gather([passes, fails, unsure, gate], None).parts
    assert [part.reach({"surface": 2.0}) for part in found] == [-2.0, CERTAIN, CERTAIN, CERTAIN]
    assert [part.score({"surface": 2.0}) for part in found] == [-2.0, 1.5, -2.0, CERTAIN]


def test_a_part_fits_or_claims_and_never_both():
    found = parts.gather(rows(400, 400), None)
    fit, claims = parts.split(found, 0.25)
    assert len(fit.parts) + len(claims.parts) == 800 and 150 < len(fit.parts) < 250
    parts.refuse_shared(fit, claims)
    again, _ = parts.split(parts.gather(rows(400, 400)[::-1], None), 0.25)
    assert {part.id for part in again.parts} == {part.id for part in fit.parts}
    with pytest.raises(CalibrationError, match="same parts would fit"):
        parts.refuse_shared(found, claims)


def test_the_digest_names_parts_and_truths_and_not_scores():
    found = parts.gather(rows(5, 5), None)
    assert parts.gather(rows(5, 5)[::-1], None).sha256 == found.sha256
    other = [replace(item, log_odds={"surface": -1.0}, outcome="PASS") for item in rows(5, 5)]
    assert parts.gather(other, None).sha256 == found.sha256
    assert parts.gather(rows(5, 4), None).sha256 != found.sha256
    flipped = [replace(rows(5, 5)[0], expected="FAIL"), *rows(5, 5)[1:]]
    assert parts.gather(flipped, None).sha256 != found.sha256


def test_defects_below_the_promised_size_are_not_claimed():
    given = [
        row(f"{name}{size}", "surface", 1.0, True, defect_true=name, defect_size_mm=size)
        for name, size in (("crack", 1.0), ("crack", 3.0), ("dent", 1.0), ("crack", None))
    ]
    given.append(row("good", "surface", -1.0, False, defect_true="normal"))
    found = parts.promised(parts.gather(given, None), {"crack": 2.0})
    assert {part.id for part in found.parts} == {"crack3.0", "dent1.0", "good"}
    assert found.left_out == {"defect below the promised size": 2}


def test_a_promise_in_camera_pixels_counts_pixels():
    given = [
        row(f"crack{size}", "surface", 1.0, True, defect_true="crack", defect_size_px=size)
        for size in (4.0, 8.0)
    ]
    found = parts.promised(parts.gather(given, None), {"crack": 6.0}, "px")
    assert {part.id for part in found.parts} == {"crack8.0"}
    assert not parts.promised(parts.gather(given, None), {"crack": 6.0}).parts


def test_a_workpiece_with_a_handful_of_parts_is_not_certified():
    given = rows(20, 20)
    given += rows(20, 4, seed=1, families=("pin",))
    given += rows(20, 20, seed=2, families=("rivet", "pin"))
    given += rows(20, 3, seed=3, families=("rivet",))
    found = parts.common_families(parts.gather(given, None), 5)
    assert {family for part in found.parts for family in part.families} == {
        "hex_nut",
        "pin",
        "rivet",
    }
    fewer = parts.common_families(parts.gather(given[:64], None), 5)
    assert {family for part in fewer.parts for family in part.families} == {"hex_nut"}
    assert fewer.left_out == {"workpiece with too few parts": 24}
