"""Detectable sizes: recovered from a known curve, bounded by likelihood ratio, or refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.optimize import brentq, minimize

from tests.training.calibration.sets import row
from training import calibrate
from training.calibration import pod
from training.calibration.error import CalibrationError
from training.evaluation.rows import Row, write_row

B0, B1 = -2.0, 3.0
A90 = float(np.exp((np.log(9) - B0) / B1))


def trial(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Sizes, log-uniform from 0.5 to 20, and whether each was found."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.uniform(np.log(0.5), np.log(20), count))
    return sizes, rng.random(count) < 1 / (1 + np.exp(-(B0 + B1 * np.log(sizes))))


def test_the_curve_is_recovered():
    found = pod.fit(*trial(5000))
    assert (found.b0, found.b1) == (pytest.approx(B0, rel=0.1), pytest.approx(B1, rel=0.1))
    assert found.a90 == pytest.approx(A90, rel=0.05)
    assert found.a90 < found.a90_95 < 1.15 * found.a90
    assert found.pod(np.array([found.a90]))[0] == pytest.approx(0.9)


def test_the_bound_is_that_of_the_likelihood_ratio():
    """Against a direct search in both parameters, another way to the same number."""
    sizes, hits = trial(80, seed=3)
    x = np.log(sizes)

    def loss(b: np.ndarray) -> float:
        line = b[0] + b[1] * x
        return float(np.logaddexp(0, np.where(hits, -line, line)).sum())

    best = minimize(loss, [0.0, 1.0]).fun

    def excess(a: float) -> float:
        held = minimize(lambda s: loss(np.array([np.log(9) - s[0] * a, s[0]])), [1.0]).fun
        return 2 * (held - best) - 2.705543

    found = pod.fit(sizes, hits)
    wanted = np.exp(brentq(excess, np.log(found.a90), np.log(found.a90) + 3))
    assert found.a90_95 == pytest.approx(wanted, rel=1e-3)


def test_the_bound_covers_in_95_percent_of_trials():
    covered = []
    for seed in range(60):
        found = pod.fit(*trial(120, seed))
        covered.append(found.a90_95 is None or found.a90_95 >= A90)
    assert sum(covered) >= 52, "of 60 trials 57 are expected; below 52 has a chance of 1 in 100"


def test_what_tells_nothing_is_refused():
    sizes, hits = trial(300)
    with pytest.raises(CalibrationError, match=r"expected 60 or more, got 59"):
        pod.fit(sizes[:59], hits[:59])
    with pytest.raises(CalibrationError, match="every flaw was found"):
        pod.fit(sizes, np.ones(300, bool))
    with pytest.raises(CalibrationError, match="no flaw was found"):
        pod.fit(sizes, np.zeros(300, bool))
    with pytest.raises(CalibrationError, match="separate by size"):
        pod.fit(sizes, sizes > 3.0)
    with pytest.raises(CalibrationError, match="not found more often"):
        pod.fit(sizes, ~hits)


def flaw_rows(count: int = 200) -> list[Row]:
    sizes, hits = trial(count)
    return [
        row(
            f"d{n}", "surface", 1.0 if hit else -1.0, True,
            defect_true="crack" if n % 2 else "dent", defect_size_mm=float(size),
            defect_size_px=float(size) * 5,
        )
        for n, (size, hit) in enumerate(zip(sizes, hits, strict=True))
    ]  # fmt: skip


def test_classes_and_units_are_apart_and_unsure_is_found_only_where_it_counts():
    given = flaw_rows()
    unsure = [
        row("u", "surface", -1.0, True, outcome="UNSURE", defect_true="cut", defect_size_mm=2.0)
    ]
    clean = [row("g", "surface", -1.0, False, defect_true="normal", defect_size_mm=2.0)]
    error = [
        row("e", "surface", -1.0, True, outcome="ERROR", defect_true="cut", defect_size_mm=2.0)
    ]
    found = pod.flaws([*given, *unsure, *clean, *error], "mm", "stopped")
    assert {name: len(sizes) for name, (sizes, _) in found.items()} == {
        "dent": 100, "crack": 100, "cut": 1, "all": 201,
    }  # fmt: skip
    assert found["cut"][1].tolist() == [True]
    assert pod.flaws([*given, *unsure], "mm", "failed")["cut"][1].tolist() == [False]
    millimetres, pixels = found["crack"][0], pod.flaws(given, "px", "stopped")["crack"][0]
    assert np.allclose(pixels, 5 * millimetres)
    with pytest.raises(CalibrationError, match="no sized defects"):
        pod.flaws(clean, "mm", "stopped")


def test_the_command_writes_table_json_and_picture(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    cut = row("c", "surface", 1.0, True, defect_true="cut", defect_size_mm=1.0)
    path.write_text("".join(write_row(item) + "\n" for item in [*flaw_rows(), cut]))
    assert calibrate.main(["pod", "--rows", str(path), "--out", str(tmp_path)]) == 0
    last = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert last["curves"]["crack"]["a90"] < last["curves"]["crack"]["a90_95"]
    assert "too few sized flaws" in last["curves"]["cut"]["reason"]
    assert (tmp_path / "pod.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "pod.json").read_text())["curves"] == last["curves"]
