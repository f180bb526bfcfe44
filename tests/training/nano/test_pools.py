"""Pools on disk: shards appear whole, batches shuffle letters and columns and keep the truth."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="training needs the extra training")

import torch

from forge_station.contract import tasks
from forge_station.contract.catalogue import CATALOGUE, WORKPIECES
from forge_station.contract.views import MARKS, NANO_LAYOUT
from forge_station.geometry import sheet
from tests.training.nano.tiny_pools import SAMPLES, write_sheets, write_surfaces
from training.nano import model as nano
from training.nano import pack
from training.nano.pools import SheetPool, SurfacePool

CELL, STRIP = NANO_LAYOUT.cell, NANO_LAYOUT.strip
WORDS = nano.vocabulary()


def test_a_pool_that_is_not_there_says_how_to_write_it(tmp_path):
    with pytest.raises(SystemExit, match=r"no shards found; write it with `python -m training"):
        SheetPool.open(tmp_path, "sheet")


def test_a_half_written_shard_is_ignored(tmp_path):
    """A writer killed between images and meta, or in the middle of the meta file."""
    write_sheets(tmp_path / "sheet", 0, 1)
    np.save(tmp_path / "sheet" / "00001.images.npy", np.zeros((3, 168, 336, 3), np.uint8))
    (tmp_path / "sheet" / "00002.partial.npz").write_bytes(b"PK half a file")
    assert len(SheetPool.open(tmp_path, "sheet")) == SAMPLES


def test_a_pool_may_grow_while_it_is_read(tmp_path):
    write_surfaces(tmp_path / "surface", 0, 1)
    before = SurfacePool.open(tmp_path, "surface")
    write_surfaces(tmp_path / "surface", 1, 1)
    assert len(before) == SAMPLES
    assert before.batch(np.array([SAMPLES - 1]), np.random.default_rng(0)).images.any()
    assert len(SurfacePool.open(tmp_path, "surface")) == 2 * SAMPLES


def test_samples_are_found_across_shards(tmp_path):
    first = write_surfaces(tmp_path / "surface", 0, 1)
    second = write_surfaces(tmp_path / "surface", 1, 1)
    pool = SurfacePool.open(tmp_path, "surface")
    drawn = pool.batch(np.array([0, SAMPLES - 1, SAMPLES, SAMPLES + 3]), np.random.default_rng(0))
    expected = [*first["defect"][[0, -1]], *second["defect"][[0, 3]]]
    assert drawn.defect.tolist() == expected
    images = np.load(tmp_path / "surface" / "00001.images.npy")
    assert np.array_equal(drawn.images[2].numpy(), images[0][..., [0, 1, 3]])
    assert np.array_equal(drawn.images[3].numpy(), images[3][..., [0, 1, 3]])


def test_a_channel_can_be_taken_away_and_a_missing_one_is_named(tmp_path):
    write_surfaces(tmp_path / "surface", 0, 1)
    rng = np.random.default_rng(0)
    shown = SurfacePool.open(tmp_path, "surface").pictures(np.arange(4), rng)
    blank = SurfacePool.open(tmp_path, "surface", ("shade", "blank", "difference"))
    assert not blank.pictures(np.arange(4), rng)[..., 1].any()
    assert np.array_equal(blank.pictures(np.arange(4), rng)[..., [0, 2]], shown[..., [0, 2]])
    images = np.load(tmp_path / "surface" / "00000.images.npy")
    np.save(tmp_path / "surface" / "00000.images.npy", images[..., :3])
    assert SurfacePool.open(tmp_path, "surface").channels == ("shade", "relief", "height")
    with pytest.raises(SystemExit, match="difference"):
        SurfacePool.open(tmp_path, "surface", ("shade", "relief", "difference"))


def test_parts_without_a_reference_have_a_blank_difference(tmp_path):
    write_surfaces(tmp_path / "surface", 0, 1)
    pool = SurfacePool.open(tmp_path, "surface", no_reference=0.5)
    drawn = pool.pictures(np.tile(np.arange(8), 25), np.random.default_rng(0))
    without = ~drawn[..., 2].any(axis=(1, 2))
    assert 0.35 < without.mean() < 0.65 and drawn[without][..., 0].any()


@pytest.fixture(scope="module")
def sheets(tmp_path_factory) -> tuple[SheetPool, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("pools")
    meta = write_sheets(folder / "sheet", 0, 1)
    return SheetPool.open(folder, "sheet"), meta


def test_a_sheet_keeps_part_letter_and_column_together(sheets):
    """Cell, letter, target of the dense heads and the reading in text: all of one part."""
    pool, meta = sheets
    index = np.arange(SAMPLES)
    drawn = pool.batch(index, np.random.default_rng(3))
    for row in range(SAMPLES):
        count = int(meta["count"][row])
        readings = readings_of(drawn.packed, row)
        filled = [c for c in range(NANO_LAYOUT.columns) if drawn.letters[row, c] < len(MARKS)]
        assert len(filled) == len(readings) == count
        assert sorted(drawn.letters[row, filled].tolist()) == list(range(count))
        for column in filled:
            mark = MARKS[int(drawn.letters[row, column])]
            cell = drawn.images[row, :, column * CELL : (column + 1) * CELL].numpy()
            (source,) = {int(v) - 1 - 10 * row for v in np.unique(cell[STRIP:CELL])}
            part = CATALOGUE[int(meta["part"][row, source])]
            assert readings[mark] == part.id.replace(" ", "")
            assert WORKPIECES[int(drawn.pieces[row, column])] == part.workpiece
            strip = np.zeros((STRIP, CELL, 3), np.uint8)
            sheet.draw_letter(strip, mark, 0, 0, NANO_LAYOUT)
            for top in range(0, 3 * CELL, CELL):
                assert np.array_equal(cell[top : top + STRIP], strip)
        empty = [c for c in range(NANO_LAYOUT.columns) if c not in filled]
        assert all(not drawn.images[row, :, c * CELL : (c + 1) * CELL].any() for c in empty)
        assert (drawn.pieces[row, empty] == -1).all()


def readings_of(batch: pack.Batch, row: int) -> dict[str, str]:
    """Mark -> answer of turn one, tokens joined."""
    found: dict[str, str] = {}
    segments = batch.segment[row]
    for segment in range(pack.FIRST_BRANCH, int(segments.max()) + 1):
        places = (segments == segment).nonzero()[:, 0]
        key = WORDS[int(batch.tokens[row, places[0]])]
        wanted = [int(t) for t in batch.target[row, places] if t != pack.IGNORE]
        if key.rstrip(":") in MARKS and WORDS[wanted[0]] not in (tasks.RIGHT, tasks.WRONG):
            found[key.rstrip(":")] = "".join(WORDS[token] for token in wanted).strip()
    return found


def test_letters_and_columns_are_shuffled_anew_for_every_draw(sheets):
    pool, _ = sheets
    generator = np.random.default_rng(0)
    layouts = {tuple(pool.batch(np.array([0]), generator).letters[0].tolist()) for _ in range(12)}
    assert len(layouts) > 6


def test_sizes_differ_a_little_from_draw_to_draw_and_stay_positive(sheets):
    pool, _ = sheets
    generator = np.random.default_rng(0)
    texts = set()
    for _ in range(5):
        drawn = pool.batch(np.array([1]), generator)
        trunk = drawn.packed.segment[0] == pack.TRUNK
        texts.add(tuple(drawn.packed.tokens[0][trunk].tolist()))
    assert len(texts) > 1


def test_the_same_generator_gives_the_same_batch(sheets):
    pool, _ = sheets
    first, again = (pool.batch(np.arange(4), np.random.default_rng(9)) for _ in range(2))
    assert torch.equal(first.images, again.images)
    assert torch.equal(first.packed.tokens, again.packed.tokens)


def test_a_batch_leaves_the_stored_pictures_alone(sheets):
    pool, _ = sheets
    before = pool.shards.image(0).copy()
    pool.batch(np.array([0, 0]), np.random.default_rng(1))
    assert np.array_equal(pool.shards.image(0), before)


def test_text_only_readings_are_of_one_to_six_marks_of_the_catalogue(sheets):
    pool, _ = sheets
    found = pool.random_readings(100, np.random.default_rng(2))
    assert {len(readings) for readings in found} >= {2, 3, 4, 5, 6}
    for readings in found:
        assert list(readings) == list(MARKS[: len(readings)])
        assert set(readings.values()) <= set(pack.PART_IDS)


def test_a_surface_batch_has_class_grid_and_text_of_its_samples(tmp_path):
    meta = write_surfaces(tmp_path / "surface", 0, 1)
    pool = SurfacePool.open(tmp_path, "surface")
    index = np.array([0, 1, 4])
    drawn = pool.batch(index, np.random.default_rng(0))
    assert torch.equal(drawn.grid, torch.from_numpy(meta["grid"][index]))
    assert drawn.defect.tolist() == [0, 1, 4]
    key = WORDS.index(tasks.CLASS_KEY)
    for row, defect in enumerate(drawn.defect.tolist()):
        (place,) = (drawn.packed.tokens[row] == key).nonzero()[:, 0].tolist()
        assert WORDS[int(drawn.packed.target[row, place])] == tasks.SURFACE_CLASSES[defect]
