"""Two bundles on the same parts: shares, pairs, and the share of the overkill that is gone."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.training.calibration import sets
from training.evaluation.rows import Row, write_row
from training.loop import gain
from training.loop.error import LineError


def parts(outcomes: str, defective: bool) -> list[Row]:
    """A row a letter: F, U, P."""
    words = {"F": "FAIL", "U": "UNSURE", "P": "PASS"}
    odds = {"F": 2.0, "U": 0.0, "P": -2.0}
    return [
        sets.row(
            f"{defective}{number}", "surface", odds[letter], defective, outcome=words[letter],
            probabilities={"normal": 0.1 if letter == "F" else 0.8, "dent": 0.2},
        )
        for number, letter in enumerate(outcomes)
    ]  # fmt: skip


def test_each_share_has_its_own_denominator_and_pairs_are_counted():
    first = parts("FFFFPPPPUU", False) + parts("FFFP", True)
    second = parts("FPPUPPPPFP", False) + parts("FFPF", True)
    told = gain.gain(list(zip(first, second, strict=True)))
    assert (told["good"], told["defective"]) == (10, 4)
    assert [told["overkill"][which]["count"] for which in ("first", "second")] == [4, 2]
    assert [told["escape"][which]["count"] for which in ("first", "second")] == [1, 1]
    test = told["overkill"]["test"]
    assert (test["only_second"], test["only_first"]) == (3, 1)  # three better, one worse
    assert told["reduction"]["share"] == 0.5
    assert told["reduction"]["low"] < 0.5 < told["reduction"]["high"]
    assert told["overkill"]["first"]["low"] == pytest.approx(0.1216, abs=1e-3)  # 4 of 10, exact


def test_an_overkill_that_stays_is_no_reduction():
    rows = parts("FFPP", False) + parts("F", True)
    told = gain.gain([(row, row) for row in rows])
    assert told["reduction"] == {"share": 0.0, "low": 0.0, "high": 0.0}
    none = [row for row in rows if row.outcome == "PASS" or row.expected == "FAIL"]
    assert gain.gain([(row, row) for row in none])["reduction"] is None


def test_good_parts_alone_say_nothing_of_escapes():
    rows = parts("FP", False)
    with pytest.raises(LineError, match="2 good, 0 defective"):
        gain.gain([(row, row) for row in rows])


def test_the_command_draws_and_refuses_other_parts(tmp_path, capsys):
    rows = parts("FFPP", False) + parts("FP", True)
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    for path, own in zip(files, (rows, rows, [replace(rows[0], id="other")]), strict=True):
        path.write_text("".join(f"{write_row(row)}\n" for row in own))
    words = [str(path) for path in files]
    assert gain.main([*words[:2], "--out", str(tmp_path / "gain.png")]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["good"] == 4
    assert (tmp_path / "gain.png").read_bytes().startswith(b"\x89PNG")
    assert gain.main([words[0], words[2]]) == 1
    assert "not over the same cases" in capsys.readouterr().err
