"""Suggested limits: what they count, what they promise on other parts, what they refuse."""

from __future__ import annotations

import json

import numpy as np
import pytest

from forge_station.checks import Thresholds
from tests.training.calibration import sets
from training import calibrate
from training.calibration import suggest
from training.calibration.error import CalibrationError
from training.evaluation.rows import write_row

LIMITS = Thresholds(defect_fail=0.5, defect_unsure=0.35)


def test_outcomes_follow_the_limits_and_the_other_checks():
    part = suggest.Scored("a", True, 0.6, "PASS", "manual")
    assert [part.outcome(*limits) for limits in ((0.6, 0.5), (0.7, 0.6), (0.7, 0.65))] == [
        "FAIL", "UNSURE", "PASS",
    ]  # fmt: skip
    held = suggest.Scored("a", True, 0.1, "UNSURE", "manual")
    assert held.outcome(0.7, 0.5) == "UNSURE"


def drawn(count: int, defective: bool, seed: int = 3) -> list[suggest.Scored]:
    """Parts whose probability is right more often than not."""
    found = np.random.default_rng([seed, defective]).beta(*((5, 2) if defective else (2, 5)), count)
    return [
        suggest.Scored(f"{defective}{i}", defective, p, "PASS", "manual")
        for i, p in enumerate(found)
    ]


def test_limits_keep_the_shares_asked_for_on_the_parts_that_choose():
    parts = drawn(200, True) + drawn(300, False)
    fail, unsure = suggest.choose(parts, 0.05, 0.02)
    found = suggest.figures(parts, fail, unsure)
    assert found.escape.count <= 10 and found.overkill.count <= 6
    # neither limit could be moved without breaking what was asked
    assert suggest.figures(parts, fail, min(fail, unsure + 0.02)).escape.count > 10
    assert suggest.figures(parts, fail - 0.03, min(unsure, fail - 0.03)).overkill.count > 6


def test_a_part_that_another_check_stops_does_not_escape_and_lets_the_limit_rise():
    parts = [suggest.Scored(f"b{i}", True, 0.1, "UNSURE", "manual") for i in range(10)]
    parts += [suggest.Scored(f"c{i}", True, 0.8, "PASS", "manual") for i in range(10)]
    parts += [suggest.Scored(f"g{i}", False, 0.2, "PASS", "manual") for i in range(10)]
    fail, unsure = suggest.choose(parts, 0.01, 0.01)
    assert unsure == 0.8 and suggest.figures(parts, fail, unsure).escape.count == 0


def test_other_parts_predict_what_the_choosing_parts_flatter():
    gaps = []
    for seed in range(30):
        done = suggest.suggest(sets.rows(60, 60, seed=seed), LIMITS, escape=0.05, overkill=0.02)
        assert done.chosen_on.escape.of + done.predicted.escape.of == 60
        gaps.append(done.predicted.escape.share - done.chosen_on.escape.share)
    assert np.mean(gaps) > 0.01


def test_of_two_captures_the_one_that_speaks_against_the_station_counts():
    given = [
        ("x", -2.0, True, "p"),
        ("y", 3.0, True, "p"),
        ("z", -2.0, False, "q"),
        ("w", 3.0, False, "q"),
    ]
    rows = [sets.row(name, "surface", odds, bad, part=part) for name, odds, bad, part in given]
    parts, left_out = suggest.scored(rows, LIMITS)
    assert {part.id: part.probability > 0.5 for part in parts} == {"p": False, "q": True}
    assert left_out == {"the same part again": 2}


def test_harvested_parts_say_nothing_of_escapes():
    rows = sets.rows(40, 40, provenance="harvested")
    with pytest.raises(CalibrationError, match="station stopped them"):
        suggest.suggest(rows, LIMITS, escape=0.05, overkill=0.02)
    mixed = sets.rows(40, 40, provenance="manual") + sets.rows(
        0, 40, seed=1, provenance="harvested"
    )
    done = suggest.suggest(mixed, LIMITS, escape=0.05, overkill=0.02)
    assert done.now.escape.of == 40


def test_the_bundle_in_use_may_set_the_share():
    rows = sets.rows(50, 40, gap=2.0)
    passed = sum(row.outcome == "PASS" and row.expected == "FAIL" for row in rows)
    harvested = sets.rows(0, 30, seed=2, provenance="harvested")
    assert suggest.escape_of(rows + harvested) == passed / 40
    with pytest.raises(CalibrationError, match="no defective part"):
        suggest.escape_of(harvested)


def test_too_few_parts_choose_nothing():
    with pytest.raises(CalibrationError, match="too few labelled parts"):
        suggest.suggest(sets.rows(40, 6), LIMITS, escape=0.05, overkill=0.02)


def test_the_command_writes_limits_that_an_export_takes_and_no_certificate(
    repository, tmp_path, capsys
):
    bundle = repository / "station_config" / "demo" / "bundle"
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{write_row(row)}\n" for row in sets.rows(80, 80)))
    words = ["suggest", "--bundle", str(bundle), "--rows", str(rows), "--out", str(tmp_path / "o")]
    assert calibrate.main(words) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["certificate"].startswith("none")
    Thresholds.read(json.loads((tmp_path / "o" / "thresholds.json").read_text()))
    assert (tmp_path / "o" / "suggest.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "o" / "certificate.json").exists()
    assert calibrate.main(words[:3]) == 1
    assert "--rows, or --evidence and --labels" in capsys.readouterr().err
