"""What each channel is worth: the figures, what a lever is trained on, and the whole command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="training needs the extra training")

import torch

from forge_station.contract import tasks
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
    """Answers in the order of the pool: class odds and cells from a list."""

    def __init__(self, defect: list[float], kinds: list[int]) -> None:
        super().__init__()
        self.defect, self.kinds, self.at = defect, kinds, 0

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        odds = torch.zeros(len(images), len(tasks.SURFACE_CLASSES))
        cells = torch.full((len(images), 16, 48), -1.0)
        for row in range(len(images)):
            chance = self.defect[self.at + row]
            odds[row, 0] = 1 - chance
            odds[row, self.kinds[self.at + row]] = chance
            cells[row, 4:6, 36:38] = 1.0  # half of them, of the top view, are true
            cells[row, 4:6, 38:40] = 1.0
        self.at += len(images)
        return cells, odds.clamp_min(1e-6).log()


def test_figures_by_hand(tmp_path):
    """Ten clean parts of which one alarms, two open cracks, one closed, one dent."""
    defects, closed = [0] * 10 + [1, 1, 1, 4], [False] * 12 + [True, False]
    write_pool(tmp_path / "surface", defects, closed)
    pool = SurfacePool.open(tmp_path, "surface")
    scripted = Script([0.1] * 9 + [0.8] + [0.9, 0.05, 0.05, 0.95], [1] * 12 + [1, 1])
    found = levers.measure(scripted, pool, levers.Lever("x", ("shade",)))
    assert found["n"] == {"clean": 10, "open": 3, "closed": 1}
    assert found["found"]["crack"] == 0.5 and found["found"]["dent"] == 1.0
    assert found["found"]["closed crack"] == 0.0
    assert found["found"]["cut"] is None
    assert found["five_class"] == round(10 / 13, 4)  # nine clean ones and one crack; dent as crack
    # of 10 x 3 pairs the crack at .05 loses ten
    assert found["auroc"] == round(20 / 30, 4)
    assert found["iou"] == 0.5


def test_closed_cracks_teach_only_who_sees_the_white_image(tmp_path, monkeypatch):
    write_pool(tmp_path / "surface", [0, 1, 1, 0], [False, True, True, False])
    pool = SurfacePool.open(tmp_path, "surface")
    drawn: list[int] = []
    shown = levers.shown
    monkeypatch.setattr(levers, "shown", lambda p, i, v: (drawn.extend(i), shown(p, i, v))[1])
    levers.train(pool, levers.Lever("x", ("shade",), 4), 2, 0)
    assert set(drawn) == {0, 3}
    drawn.clear()
    levers.train(pool, levers.Lever("x", ("shade", "white"), 4), 2, 0)
    assert set(drawn) == {0, 1, 2, 3}


def test_the_command_keeps_what_is_done(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(levers, "LEVERS", (levers.Lever("shading", ("shade",), 4),))

    def ready(out: Path, *_: int) -> tuple[SurfacePool, SurfacePool]:
        if not (out / "data").exists():
            write_pool(out / "data/surface", [0, 1, 2, 3, 4, 0], [False] * 6)
        pool = SurfacePool.open(out / "data", "surface")
        return pool, pool

    monkeypatch.setattr(levers, "pools", ready)
    words = ["--out", str(tmp_path), "--steps", "2"]
    assert levers.main(words) == 0
    said = capsys.readouterr().out
    assert "shading" in said and "closed crack" in said
    first = json.loads(said.splitlines()[-1])
    assert (tmp_path / "levers.png").stat().st_size > 5000
    monkeypatch.setattr(levers, "train", lambda *_: pytest.fail("trained again"))
    assert levers.main(words) == 0
    assert json.loads((tmp_path / "levers.json").read_text())["levers"].keys() == {"shading"}
    assert first["train"] == 6
    # Of a pool that has grown meanwhile, the kept figures say nothing.
    write_pool(tmp_path / "data/surface", [0, 1, 2, 3, 4, 0, 0], [False] * 7)
    monkeypatch.setattr(levers, "train", lambda *_: Script([0.1] * 7, [1] * 7))
    assert levers.main(words) == 0
    again = json.loads((tmp_path / "levers.json").read_text())
    assert again["train"] == 7 and again["levers"]["shading"]["n"]["clean"] == 3


@pytest.mark.parametrize("words", [("--steps", "0"), ("--train", "-1"), ("--jobs", "0")])
def test_a_number_out_of_range_is_refused_before_anything_is_made(tmp_path, capsys, words):
    with pytest.raises(SystemExit) as stopped:
        levers.main(["--out", str(tmp_path / "out"), *words])
    assert stopped.value.code == 2
    assert f"{words[0]}: expected 1 or more, got {words[1]}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
