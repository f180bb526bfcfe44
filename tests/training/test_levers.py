"""What each channel is worth: the figures, what a lever is trained on, and the whole command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="training needs the extra training")

import torch

from forge_station.contract.views import NANO_LAYOUT
from training import levers
from training.data import shards
from training.nano.pools import SurfacePool


def write_pool(folder: Path, defects: list[int], closed: list[bool]) -> None:
    """Pictures whose white image alone shows a closed crack."""
    count = len(defects)
    rng = np.random.default_rng(0)
    images = rng.integers(100, 110, (count, *NANO_LAYOUT.surface_size, 5)).astype(np.uint8)
    grid = np.zeros((count, 3, 16, 16), bool)
    for i, kind in enumerate(defects):
        grid[i, 2, 4:6, 4:6] = kind > 0
    meta = {
        "part": np.zeros(count, np.int16),
        "size": np.ones((count, 3), np.float32),
        "defect": np.array(defects, np.uint8),
        "grid": grid,
        "score": np.full(count, 5, np.int8),
        "pixel_mm": np.ones(count, np.float32),
        "defect_mm": np.ones(count, np.float32),
        "defect_scale": np.ones(count, np.float32),
        "closed": np.array(closed, bool),
        "closer": np.zeros(count, bool),
    }
    shards.write_shard(folder, 0, images, meta)


class Script(torch.nn.Module):
    """Scores pictures in their order: `chances` in two cells of the top view, else 0."""

    def __init__(self, chances: list[float]) -> None:
        super().__init__()
        self.chances = chances

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(*seen.shape[:3], 1)
        for row, chance in enumerate(self.chances):
            out[row, 4, 36:38] = chance  # half of the true cells
            out[row, 9, 40] = chance  # and a false one
        return out


def test_figures_by_hand(tmp_path):
    """Ten clean parts of which one alarms, two open cracks, one closed, one dent."""
    defects, closed = [0] * 10 + [1, 1, 1, 4], [False] * 12 + [True, False]
    write_pool(tmp_path / "surface", defects, closed)
    pool = SurfacePool.open(tmp_path, "surface")
    scripted = Script([0.1] * 9 + [0.8] + [0.9, 0.05, 0.05, 0.95])
    found = levers.measure(scripted, pool, levers.Lever("x", ("shade",)))
    assert found["n"] == {"clean": 10, "open": 3, "closed": 1}
    assert found["found"]["crack"] == 0.5 and found["found"]["dent"] == 1.0
    assert found["found"]["closed crack"] == 0.0
    assert found["found"]["cut"] is None
    # of 10 x 3 pairs the crack at .05 loses ten
    assert found["pictures"] == round(20 / 30, 4)
    # True: two cells each at .95, .9, .05 and six at 0. False: one each at .95, .9, .05, thirty of
    # the clean parts at .1 and .8, and 9939 at 0. A tie counts half.
    won = 2 * (9971.5 + 9970.5 + 9939.5) + 6 * 9939 / 2
    assert found["cells"] == round(won / (12 * 9972), 4)


def test_what_a_cell_shows():
    """Mean, deviation and percentiles over 64, then how far the neighbours are from that."""
    image = np.zeros((224, 672, 1), np.float32)
    image[14:28, 28:42] = 64.0  # row 1, column 2
    found = levers._described(image, 14, 1)
    assert found.shape == (16, 48, 25)
    assert found[1, 2, :5].tolist() == [1, 0, 1, 1, 1]
    assert found[1, 2, 5:10].tolist() == [1, 0, 1, 1, 1]  # against the cell above
    assert found[0, 2, 10:15].tolist() == [1, 0, 1, 1, 1]  # and from there the one below
    assert not found[8:].any()
    half = levers._described(image, 14, 2)
    assert half.shape == found.shape and half[1, 2, 0] == 1


def test_closed_cracks_teach_only_who_sees_the_white_image(tmp_path, monkeypatch):
    write_pool(tmp_path / "surface", [0, 1, 1, 0], [False, True, True, False])
    pool = SurfacePool.open(tmp_path, "surface")
    rows: list[int] = []
    scaled = levers._Scaled
    monkeypatch.setattr(levers, "_Scaled", lambda seen: (rows.append(len(seen)), scaled(seen))[1])
    levers.train(pool, levers.Lever("x", ("shade",)), 2, 0)
    levers.train(pool, levers.Lever("x", ("shade", "white")), 2, 0)
    assert rows == [2 * 16 * 48, 4 * 16 * 48]


def test_the_command_prints_a_table_and_draws_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(levers, "LEVERS", (levers.Lever("shading", ("shade",), 2),))

    def ready(out: Path, *_: int) -> tuple[SurfacePool, SurfacePool]:
        write_pool(out / "data/surface", [0, 1, 2, 3, 4, 0], [False] * 6)
        pool = SurfacePool.open(out / "data", "surface")
        return pool, pool

    monkeypatch.setattr(levers, "pools", ready)
    assert levers.main(["--out", str(tmp_path), "--steps", "2"]) == 0
    said = capsys.readouterr().out
    assert "shading" in said and "closed crack" in said
    found = json.loads(said.splitlines()[-1])
    assert found["train"] == found["test"] == 6
    assert found["levers"]["shading"]["found"]["closed crack"] is None
    assert (tmp_path / "levers.png").stat().st_size > 5000
    assert json.loads((tmp_path / "levers.json").read_text()) == found


@pytest.mark.parametrize("words", [("--steps", "0"), ("--train", "-1"), ("--jobs", "0")])
def test_a_number_out_of_range_is_refused_before_anything_is_made(tmp_path, capsys, words):
    with pytest.raises(SystemExit) as stopped:
        levers.main(["--out", str(tmp_path / "out"), *words])
    assert stopped.value.code == 2
    assert f"{words[0]}: expected 1 or more, got {words[1]}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
