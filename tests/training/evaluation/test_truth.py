"""What is wrong on a tray, by rule."""

from __future__ import annotations

import numpy as np
import pytest

from forge_station.contract.views import VIEWS
from forge_station.geometry import pose
from training.evaluation.truth import Wrong, defect_flags, surface_truth, wrong

NUT, BOLT, WASHER, PIN = "hex_nut M8", "hex_bolt M8x30", "flat_washer M8", "pin 6x20"


@pytest.mark.parametrize(
    ("required", "parts", "expected"),
    [
        ({NUT: 2}, [NUT, NUT], Wrong(("none",), (), 0)),
        ({NUT: 2, BOLT: 1}, [NUT, BOLT], Wrong(("none",), (NUT,), 1)),
        ({NUT: 3}, [NUT], Wrong(("none",), (NUT, NUT), 2)),
        ({NUT: 2}, [NUT, PIN, NUT], Wrong(("B",), (), 1)),
        ({NUT: 1, BOLT: 1}, [BOLT, PIN], Wrong(("B",), (NUT,), 1)),
        ({NUT: 1, BOLT: 1}, [NUT, BOLT, NUT], Wrong(("A", "C"), (), 1)),
        ({NUT: 1, BOLT: 1}, [PIN, WASHER], Wrong(("A", "B"), (BOLT, NUT), 2)),
    ],
)
def test_wrong_extra_and_missing_parts(
    required: dict[str, int], parts: list[str], expected: Wrong
) -> None:
    readings = {"ABCDEF"[i]: part for i, part in enumerate(parts)}
    assert wrong(required, readings) == expected


def plate() -> tuple[np.ndarray, np.ndarray]:
    """A plate 40 x 20 x 5 mm with a defective corner of its top, and the tray around it."""
    x, y = np.meshgrid(np.arange(-20, 20.01, 0.2), np.arange(-10, 10.01, 0.2))
    top = np.column_stack([x.ravel(), y.ravel(), np.full(x.size, 5.0)])
    x, y = np.meshgrid(np.arange(-40, 40.01, 0.4), np.arange(-30, 30.01, 0.4))
    tray = np.column_stack([x.ravel(), y.ravel(), np.zeros(x.size)])
    defect = np.concatenate([(top[:, 0] > 12) & (top[:, 1] > 5), np.zeros(len(tray), bool)])
    return np.concatenate([top, tray]).astype(np.float32), defect


def test_flags_follow_the_part_into_its_own_frame_and_mark_the_right_cells() -> None:
    points, defect = plate()
    turn = np.deg2rad(30)
    rotation = np.array(
        [[np.cos(turn), -np.sin(turn), 0], [np.sin(turn), np.cos(turn), 0], [0, 0, 1]]
    )
    points = (points @ rotation.T).astype(np.float32)
    part = pose.align(points[points[:, 2] > 1], 0.2)
    flags = defect_flags(part, points, defect)
    assert flags.sum() == defect.sum()
    found = surface_truth(part, flags)
    top = found.cells[2]
    assert top.sum() >= 4 and not found.cells[0, :, :5].all()
    rows, columns = np.nonzero(top)
    # The corner of the plate, wherever the frame turned it: all cells in one quadrant.
    assert len({(r < 8, c < 8) for r, c in zip(rows, columns, strict=True)}) == 1
    assert (top & found.filled[2]).sum() >= 4 and 0 < found.score < 7


def test_a_clean_part_has_no_cells_and_the_best_score() -> None:
    points, defect = plate()
    part = pose.align(points[points[:, 2] > 1], 0.2)
    found = surface_truth(part, defect_flags(part, points, np.zeros_like(defect)))
    assert not found.cells.any() and found.score == 10 and found.filled[2].sum() > 80


def test_training_and_evaluation_mark_the_same_cells() -> None:
    from forge_station.geometry import sheet
    from training.data import surface_samples

    points, defect = plate()
    part = pose.align(points[points[:, 2] > 1], 0.2)
    flags = defect_flags(part, points, defect)
    picture, _ = sheet.surface_picture(part.points, surface_samples.NANO_LAYOUT)
    middles = dict.fromkeys(VIEWS, sheet.robust_box(part.points).centre)
    expected = surface_samples.truth_grid(part, flags, picture.mm_per_px, middles)
    assert np.array_equal(surface_truth(part, flags).cells, expected)
