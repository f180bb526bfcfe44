"""Figures of the read-outs on rows whose figures are known by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from training.evaluation import readout_figures as rf
from training.readouts import answered


def spent(passes: int, ms: float = 1.0) -> dict:
    return {"passes": passes, "tokens": 2 * passes, "ms": ms}


def row(truth, read, soft, *, text=12, rows=3) -> dict:
    """Two views of 16 x 16 cells would be 512; 48 rows as the station has them."""
    p = np.zeros(48 * 16)
    p[list(soft)] = list(soft.values())
    marked = [cell for cell, value in soft.items() if value >= 0.4]
    return {
        "id": f"case-{truth}", "truth": truth, "part": [0, 1, 2, 3],
        "rows": {**spent(rows), "overrun": False, "cells": read},
        "soft": {**spent(2), "overrun": False, "cells": marked, "p": p.tolist()},
        "text": {**spent(text), "overrun": True, "cells": []},
        "rows, truth": spent(rows, 10.0), "text, truth": spent(text, 40.0),
    }  # fmt: skip


ROWS = [
    row([0, 1], [0, 1], {0: 0.9, 1: 0.6}),
    row([0, 1], [1, 2], {1: 0.3, 2: 0.5}, text=30, rows=5),
    row([], [], {5: 0.2}, text=1, rows=1),
    row([], [7], {}),
]


def test_agreement_is_counted_by_picture_and_by_cell():
    found = rf.figures(ROWS)
    assert found["told"] == 4 and found["defective"] == 2
    assert found["rows"]["iou"] == pytest.approx((1 + 1 / 3) / 2, abs=1e-4)
    assert found["rows"]["f1"] == pytest.approx(2 * 3 / (2 * 3 + 2 + 1), abs=1e-4)
    assert (found["rows"]["clean_alarms"], found["rows"]["empty_on_defect"]) == (0.5, 0.0)
    assert found["soft"]["iou"] == pytest.approx(0.5)
    assert (found["soft"]["clean_alarms"], found["text"]["empty_on_defect"]) == (0.0, 1.0)
    assert (found["rows"]["overruns"], found["text"]["overruns"]) == (0, 4)


def test_the_curve_trades_alarms_against_empty_grids():
    points = {point["threshold"]: point for point in rf.figures(ROWS)["curve"]}
    assert (points[0.1]["clean_alarms"], points[0.1]["empty_on_defect"]) == (0.5, 0.0)
    assert (points[0.25]["clean_alarms"], points[0.25]["empty_on_defect"]) == (0.0, 0.0)
    assert (points[0.8]["clean_alarms"], points[0.8]["empty_on_defect"]) == (0.0, 0.5)
    alarms = [point["clean_alarms"] for point in points.values()]
    assert alarms == sorted(alarms, reverse=True)


def test_costs_and_ratios_are_measured_values():
    found = rf.figures(ROWS)
    assert found["cost"]["rows"]["passes"] == {"mean": 3.0, "p50": 3.0, "p95": 5.0, "max": 5.0}
    assert found["ratio"]["passes p95"] == 6.0
    assert found["ratio"]["ms median, defective"] == 4.0
    assert found["ratio"]["passes median, defective"] == pytest.approx(5.0)


def test_calibration_is_the_gap_between_probability_and_share():
    rows = [
        row([0], [], dict.fromkeys(range(4), 0.5)),
        row([2], [], dict.fromkeys(range(4), 0.5)),
    ]
    found = rf.figures(rows)["calibration"]
    assert found["ece_on_part"] == pytest.approx(
        0.25
    )  # one of four is defective, one half was said
    assert found["ece_all"] == pytest.approx(0.25 * 4 / 768, abs=1e-5)
    assert found["base_rate"] == pytest.approx(1 / 768, abs=1e-5)


def test_without_known_grids_only_costs_are_told():
    found = rf.figures([{**ROWS[0], "truth": None}])
    assert found["told"] == 0 and "rows" not in found
    assert "passes" in rf.table(found)


def test_the_table_shows_every_way_and_the_knob():
    text = rf.table(rf.figures(ROWS))
    for name in (*rf.WAYS, "soft >= 0.35", "ECE"):
        assert name in text


def test_a_line_that_was_cut_off_is_answered_again(tmp_path):
    file = tmp_path / "rows.jsonl"
    assert answered(file) == {}
    file.write_text(json.dumps({"id": "a"}) + '\n{"id": "b", "ro')
    assert list(answered(file)) == ["a"]
