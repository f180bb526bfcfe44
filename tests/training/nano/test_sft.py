"""Fine-tuning runs, stops and goes on: tiny pools of random pictures, a model of a few thousand
weights."""

from __future__ import annotations

import argparse
import json
import resource
import signal
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="training needs the extra training")

import torch

from forge_station.contract import tasks
from forge_station.contract.views import MARKS, SURFACE_CHANNELS
from tests.training.nano.tiny_pools import write_pools
from training.nano import model as nano
from training.nano import pack, sft
from training.nano.pools import SheetPool, SurfacePool


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pools")
    write_pools(folder)
    return folder


def tiny_trainer(seed: int) -> sft.Trainer:
    torch.manual_seed(seed)
    model = nano.build_model(vision_width=32, vision_depth=1, text_width=64, text_depth=1)
    return sft.Trainer(model, sft.AuxiliaryHeads(64), 0.5, np.random.default_rng(seed))


def steps(trainer: sft.Trainer, data: Path, first: int, last: int) -> list[dict[str, float]]:
    sheets, surfaces = SheetPool.open(data, "sheet"), SurfacePool.open(data, "surface")
    return [
        sft.train_step(
            trainer, sheets, surfaces, batch=2, surface_share=0.5, rate=sft.rate_of(step, 0.0, 0.3)
        )
        for step in range(first, last)
    ]


def weights(trainer: sft.Trainer) -> dict[str, torch.Tensor]:
    named = {**trainer.model.state_dict(), **trainer.heads.state_dict(prefix="heads.")}
    return {name: value.clone() for name, value in named.items()}


def test_a_killed_and_resumed_run_has_the_weights_of_an_uninterrupted_one(data, tmp_path):
    whole = tiny_trainer(1)
    steps(whole, data, 0, 3)
    first = tiny_trainer(1)
    steps(first, data, 0, 1)
    sft.save_state(tmp_path / "state.pt", first, 12.5, 1)
    second = tiny_trainer(99)  # other weights and another generator: all must come from the file
    assert sft.resume(tmp_path / "state.pt", second) == (12.5, 1)
    steps(second, data, 1, 3)
    expected, found = weights(whole), weights(second)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


def test_a_kill_while_the_state_is_written_leaves_the_old_one(data, tmp_path):
    trainer = tiny_trainer(1)
    sft.save_state(tmp_path / "state.pt", trainer, 1.0, 1)
    (tmp_path / "state.partial").write_bytes(b"half a file")
    assert sft.resume(tmp_path / "state.pt", tiny_trainer(2)) == (1.0, 1)


def test_a_full_disk_is_said_to_be_one_and_leaves_the_old_state(tmp_path):
    trainer = tiny_trainer(1)
    sft.save_state(tmp_path / "state.pt", trainer, 1.0, 1)
    before = (tmp_path / "state.pt").read_bytes()
    unheard = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            sft.save_state(tmp_path / "state.pt", trainer, 2.0, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, unheard)
    assert (tmp_path / "state.pt").read_bytes() == before


def test_both_pools_are_drawn_and_every_weight_moves(data):
    trainer = tiny_trainer(3)
    before = weights(trainer)
    figures = steps(trainer, data, 0, 4)
    kinds = {name for row in figures for name in row}
    assert {"sheet", "letters", "rule", "surface", "cells"} < kinds
    assert all(np.isfinite(value) for row in figures for value in row.values())
    after = weights(trainer)
    still = {n for n in before if torch.equal(before[n], after[n]) and "inv_freq" not in n}
    assert not still


def test_the_loss_of_one_batch_falls(data):
    """Eight times the same two samples: the model can learn them by heart."""
    trainer = tiny_trainer(4)
    surfaces = SurfacePool.open(data, "surface")
    losses = []
    for _ in range(8):
        trainer.generator = np.random.default_rng(0)
        trainer.set_rate(1.0)
        loss, _ = trainer.step_loss("surface", surfaces, 2)
        trainer.step(loss)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    ("step", "share", "rate"),
    [
        (0, 0.0, 0.01),
        (49, 0.0, 0.5),
        (99, 0.0, 1.0),
        (5000, 0.69, 1.0),
        (5000, 0.85, 0.5),
        (5000, 1.0, 0.02),
        (5000, 1.5, 0.02),
    ],
)
def test_learning_rate_warms_up_stays_and_falls(step, share, rate):
    assert sft.rate_of(step, share, 0.3) == pytest.approx(rate)


def test_auroc_of_hand_made_scores():
    positive = np.array([False, False, True, True])
    assert sft.auroc(np.array([0.1, 0.2, 0.3, 0.4]), positive) == 1.0
    assert sft.auroc(np.array([0.4, 0.3, 0.2, 0.1]), positive) == 0.0
    assert sft.auroc(np.array([0.1, 0.3, 0.2, 0.4]), positive) == 0.75
    assert sft.auroc(np.array([0.5, 0.5, 0.5, 0.5]), positive) == 0.5
    assert np.isnan(sft.auroc(np.array([0.1, 0.2]), np.array([True, True])))


def test_letters_and_workpieces_are_looked_for_in_their_columns():
    """A head that reads the letter from a token scores only if the token is in the right column."""
    heads = sft.AuxiliaryHeads(8)
    with torch.no_grad():
        heads.letter.weight.zero_()
        heads.letter.bias.zero_()
        heads.letter.weight[: len(MARKS) + 1, : len(MARKS) + 1] = 20 * torch.eye(len(MARKS) + 1)
    letters = torch.tensor([[2, 6, 0, 6, 1, 6]])
    pieces = torch.tensor([[3, -1, 0, -1, 5, -1]])
    grid = torch.zeros(1, 3, 2, 6, 2, 8)
    for column, letter in enumerate(letters[0].tolist()):
        grid[:, :, :, column, :, letter] = 1.0
    right = heads.sheet_loss(grid.reshape(1, 72, 8), letters, pieces)
    wrong = heads.sheet_loss(grid.reshape(1, 72, 8), letters.roll(1, 1), pieces)
    assert wrong - right > 10


def test_a_surface_token_stands_for_four_cells_of_its_panel():
    heads = sft.AuxiliaryHeads(8)
    with torch.no_grad():
        heads.cells.weight.zero_()
        heads.cells.bias.zero_()
        classes = len(tasks.SURFACE_CLASSES)
        for cell in range(4):  # feature k of a token says: cell k is a dent
            heads.cells.weight[cell * classes + 4, cell] = 20.0
    grid = torch.zeros(1, 3, 16, 16, dtype=torch.bool)
    grid[0, 2, 5, 8] = True  # top view, row 5, column 8: token row 2, column 4; lower left cell
    embeds = torch.zeros(1, 8, 3, 8, 8)
    embeds[0, 2, 2, 4, 2] = 1.0
    dent = torch.tensor([4])
    right = heads.surface_loss(embeds.reshape(1, 192, 8), grid, dent)
    blind = heads.surface_loss(torch.zeros(1, 192, 8), grid, dent)
    moved = heads.surface_loss(embeds.roll(1, 3).reshape(1, 192, 8), grid, dent)
    assert right < blind < moved


def test_validation_tells_readings_from_right_or_wrong(data):
    """Mark keys occur in both turns; only those of turn one are readings."""
    trainer = tiny_trainer(5)
    sheets = SheetPool.open(data, "sheet-val")
    drawn = sheets.batch(np.arange(3), np.random.default_rng(0))
    embeds = trainer.forward.vision(drawn.images)
    hits = sft._branch_hits(trainer, drawn.packed, embeds)
    count = int(sheets.shards.meta["count"][:3].sum())
    kinds = [kind for _, kind, _ in hits]
    assert kinds.count("readings") == kinds.count("marks") == count
    assert kinds.count("answer") == 3


def arguments(data: Path, out: Path, minutes: float, **more: object) -> argparse.Namespace:
    defaults: dict[str, object] = {"data": data, "out": out, "minutes": minutes, "batch": 2}
    defaults |= {"surface": 0.5, "auxiliary": 0.5, "decay": 0.3, "every": 5.0, "validate": 4}
    defaults |= {"compile": False, "threads": 1, "seed": 0, "init": None, "resume": False}
    defaults |= {"steps": None, "without": [], "surface_channels": SURFACE_CHANNELS}
    defaults |= {"grid": "rows", "rate": 1.0, "labelled": 0.0}
    return argparse.Namespace(**{**defaults, **more})


def test_a_run_can_be_given_in_steps(data, tmp_path):
    """Equal steps, whatever the machine: what a comparison of two runs needs."""
    sft.train(arguments(data, tmp_path / "out", 60.0, steps=2))
    card = json.loads((tmp_path / "out" / "training_card.json").read_text())
    assert card["steps"] == 2


def test_a_grid_can_be_learned_as_one_text(data, tmp_path):
    """The card tells it apart: a station's rows cannot be read from such a model."""
    sft.train(arguments(data, tmp_path / "out", 60.0, steps=1, surface=1.0, grid="text"))
    card = json.loads((tmp_path / "out" / "training_card.json").read_text())
    assert card["grid"] == "text"


def test_a_run_without_pools_says_how_to_write_them(tmp_path):
    with pytest.raises(SystemExit, match=r"python -m training\.synth sheet"):
        sft.train(arguments(tmp_path, tmp_path / "out", 0.0001))


def test_a_run_leaves_a_checkpoint_a_state_and_a_curve_and_goes_on(data, tmp_path):
    sft.train(arguments(data, tmp_path, 0.0001))
    files = {path.name for path in tmp_path.iterdir()}
    assert {"config.json", "tokenizer.json", "training_card.json", "state.pt"} < files
    card = json.loads((tmp_path / "training_card.json").read_text())
    assert card["steps"] == 1
    assert card["none_weight"] == pack.NONE_WEIGHT
    assert {"readings", "answer", "five_class", "auroc"} < set(card["validation"])
    used = torch.load(tmp_path / "state.pt", weights_only=False)["used_s"]
    sft.train(arguments(data, tmp_path, (used + 0.01) / 60, resume=True))
    rows = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
