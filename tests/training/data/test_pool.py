"""What a pool says of itself, and what its check finds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

pytest.importorskip("numba", reason="training needs the extra training")

from training import synth
from training.data import contact, pool, shards
from training.data.variation import CLEAN

SURFACE = pool.Recipe("surface", shard=20)
SHEET = pool.Recipe("sheet", shard=20)


def surfaces(count: int = 20) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Grey squares: 6 clean, then the four classes in turn, each with one defective cell."""
    defect = np.array([0] * 6 + [1 + i % 4 for i in range(count - 6)], np.uint8)
    images = np.zeros((count, 224, 672, 4), np.uint8)
    images[:, 60:160, 60:160] = 180
    grid = np.zeros((count, 3, 16, 16), bool)
    grid[defect > 0, 0, 8, 7] = True
    faulty = defect > 0
    meta = {
        "part": np.arange(count, dtype=np.int16),
        "size": np.ones((count, 3), np.float32),
        "defect": defect,
        "grid": grid,
        "score": np.where(faulty, 4, 10).astype(np.int8),
        "pixel_mm": np.full(count, 0.1, np.float32),
        "defect_mm": np.where(faulty, 0.3, 0.0).astype(np.float32),
        "defect_scale": np.where(faulty, 0.5, 0.0).astype(np.float32),
    }
    return images, meta


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound pool of two shards."""
    for number in range(2):
        shards.write_shard(tmp_path / "surface", number, *surfaces())
    pool.write(tmp_path / "surface", SURFACE, {})
    return tmp_path / "surface"


def test_pool_json_counts_what_is_there_and_says_how_it_was_made(folder):
    said = json.loads((folder / pool.FILE).read_text())
    assert said["counts"]["samples"] == 40
    assert said["counts"]["class"] == {
        "normal": 12, "crack": 8, "cut": 8, "deformation": 6, "dent": 6
    }  # fmt: skip
    assert sum(said["counts"]["workpiece"].values()) == 40
    assert said["settings"]["shares"]["clean"] == 0.3
    assert said["settings"]["vary"]["lost_pose_share"] == 0.1
    assert set(said["code"]) == {"revision", "numpy", "opencv-python-headless", "numba", "scipy"}


def test_a_sound_pool_has_no_faults(folder, capsys):
    assert pool.faults(folder) == []
    assert synth.main(["check", str(folder)]) == 0
    assert json.loads(capsys.readouterr().out)["faults"] == 0


def cut_off(folder: Path) -> None:
    path = folder / "00001.images.npy"
    path.write_bytes(path.read_bytes()[:-1000])


def cut_off_meta(folder: Path) -> None:
    path = folder / "00001.meta.npz"
    path.write_bytes(path.read_bytes()[:200])


def no_size(folder: Path) -> None:
    images, meta = surfaces()
    meta["size"][3, 1] = np.nan
    shards.write_shard(folder, 1, images, meta)


def no_content(folder: Path) -> None:
    images, meta = surfaces()
    images[[2, 5]] = 0
    shards.write_shard(folder, 1, images, meta)


def too_few_rows(folder: Path) -> None:
    images, meta = surfaces()
    shards.write_shard(folder, 1, images, {**meta, "score": meta["score"][:-1]})


def gone(folder: Path) -> None:
    (folder / "00000.meta.npz").unlink()


def one_class(folder: Path) -> None:
    images, meta = surfaces()
    shards.write_shard(folder, 1, images, {**meta, "defect": np.full(20, 2, np.uint8)})


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (cut_off, "shard 00001: cannot be read"),
        (cut_off_meta, "shard 00001: cannot be read"),
        (no_size, "shard 00001: size: not finite in samples 3"),
        (no_content, "shard 00001: images without content: samples 2, 5"),
        (too_few_rows, "shard 00001: score: 19 rows for 20 images"),
        (gone, "shard 00000: missing"),
        (one_class, "share of cut: 24 of 40, asked for 0.17"),
    ],
)
def test_check_names_what_is_wrong(folder, spoil, words, capsys):
    spoil(folder)
    assert any(words in fault for fault in pool.faults(folder)), pool.faults(folder)
    assert synth.main(["check", str(folder)]) == 1
    assert words in capsys.readouterr().out


def test_a_pool_is_extended_with_its_own_settings_only(folder):
    pool.refuse_other(folder, SURFACE)
    other = replace(SURFACE, seed=1, shares=pool.Shares(clean=0.5), vary=CLEAN)
    with pytest.raises(pool.PoolError) as caught:
        pool.refuse_other(folder, other)
    for words in ("seed 0 (asked: 1)", "shares.clean 0.3 (asked: 0.5)", "vary.made True (asked: "):
        assert words in str(caught.value)


def test_a_pool_of_unknown_settings_must_be_adopted(folder):
    (folder / pool.FILE).unlink()
    with pytest.raises(pool.PoolError, match="--adopt"):
        pool.refuse_other(folder, SURFACE)
    pool.refuse_other(folder, SURFACE, adopt=True)


@pytest.mark.parametrize("shares", [{"clean": 1.2}, {"correct": -0.1}, {"batch": 0.7, "kit": 0.4}])
def test_bad_shares_are_refused(shares):
    with pytest.raises(pool.PoolError):
        pool.Shares(**shares)


@pytest.mark.parametrize("word", ["no pool here", "cannot be read"])
def test_a_folder_that_is_no_pool_is_refused(tmp_path, word, capsys):
    if word == "cannot be read":
        (tmp_path / pool.FILE).write_text("{}")
    assert synth.main(["look", str(tmp_path)]) == 2
    assert word in capsys.readouterr().err


def test_look_prints_a_table_and_draws_two_pictures(folder, capsys):
    assert synth.main(["look", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "  crack                        8   20.0%" in out
    assert json.loads(out.splitlines()[-1])["samples"] == 40
    for name in ("look.png", "contact.png"):
        assert cv2.imread(str(folder / name)).std() > 10


def test_the_contact_page_outlines_the_defective_cell_and_nothing_else(folder):
    page = contact.page(folder, rows=5)
    red = (page == (255, 64, 64)).all(axis=2)
    height, width = 224 + 30 + 4 + 10, 672 + 10
    assert page.shape[:2] == (5 * height + 10, 2 * width + 10)
    cards = red[10:, 10:].reshape(5, height, 2, width).any(axis=(1, 3)).ravel()
    assert cards.tolist() == [False, False] + [True] * 8  # two clean ones come first
    rows, columns = np.nonzero(red[10 + height : 10 + 2 * height, 10 : 10 + width])
    assert 30 + 8 * 14 - 3 <= rows.min() <= rows.max() <= 30 + 9 * 14 + 3
    assert 7 * 14 - 3 <= columns.min() <= columns.max() <= 8 * 14 + 3


def test_scenes_are_drawn_with_the_stated_shares():
    rng = np.random.default_rng(3)
    shares = pool.Shares(batch=0.2, kit=0.5, correct=0.9, complete=0.1)
    plans = [pool.plan(shares, rng) for _ in range(400)]
    kinds = [plan.kind for plan in plans]
    assert kinds.count("batch") == pytest.approx(80, abs=32)
    assert kinds.count("kit") == pytest.approx(200, abs=40)
    right = {kind: [p.right for p in plans if p.kind == kind] for kind in ("batch", "kit")}
    assert np.mean(right["batch"]) > 0.75
    assert np.mean(right["kit"]) < 0.25
    for plan in plans:
        if plan.kind == "batch":
            assert plan.right == (len(set(plan.parts)) == 1)


def test_partial_files_of_killed_writers_are_swept(folder):
    (folder / "00002.4711.partial").write_bytes(b"half")
    assert shards.without_partials(folder) == 1
    assert shards.numbers(folder) == [0, 1]
    assert pool.faults(folder) == []
