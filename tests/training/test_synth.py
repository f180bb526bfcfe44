"""Synthetic samples: what is drawn is what is stated, and truth lies where the defect is."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import cv2
import numpy as np
import pytest

pytest.importorskip("numba", reason="training needs the extra training")
pytest.importorskip("torch", reason="training needs the extra training")

from forge_station.contract import tasks
from forge_station.contract.catalogue import WORKPIECES, by_id
from forge_station.contract.views import NANO_LAYOUT, VIEWS
from forge_station.sim import surrogate
from training import synth
from training.data import decoded, pool, sheet_samples, surface_samples
from training.data.variation import CLEAN, SIMULATED, USUAL
from training.nano.pools import SheetPool, SurfacePool

CELL = NANO_LAYOUT.cell


def rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng(list(seed))


def test_a_batch_has_one_odd_part_in_half_of_the_cases():
    odd = 0
    for seed in range(200):
        parts = [part.id for part in sheet_samples.plan_batch(rng(seed)).parts]
        counts = Counter(parts).most_common()
        assert 3 <= len(parts) <= 6
        assert len(counts) == 1 or (len(counts) == 2 and counts[1][1] == 1)
        odd += len(counts) == 2
    assert 70 < odd < 130


def test_an_odd_part_can_be_asked_for():
    for seed in range(20):
        assert len(set(sheet_samples.plan_batch(rng(seed), correct=1.0).parts)) == 1
        assert len(set(sheet_samples.plan_batch(rng(seed), correct=0.0).parts)) == 2


@pytest.mark.parametrize(
    ("plan", "least"), [(sheet_samples.plan_kit, 2), (sheet_samples.plan_inventory, 1)]
)
def test_kits_and_inventories_have_up_to_six_parts_of_many_kinds(plan, least):
    kinds, sizes = set(), set()
    for seed in range(150):
        parts = plan(rng(seed, 1)).parts
        sizes.add(len(parts))
        kinds |= {part.workpiece for part in parts}
    assert sizes == set(range(least, 7))
    assert kinds == set(WORKPIECES)


def test_parts_of_a_kit_share_their_nominal_size_but_for_a_stranger():
    same = 0
    for seed in range(60):
        sizes = Counter(part.dims.get("d") for part in sheet_samples.plan_kit(rng(seed, 2)).parts)
        same += sizes.most_common(1)[0][1] >= len(list(sizes.elements())) - 1
    assert same > 50


def test_the_surface_check_sees_mostly_the_promised_workpieces():
    drawn = Counter(surface_samples.surface_part(rng(seed, 3)).workpiece for seed in range(300))
    promised = sum(drawn[name] for name in surface_samples.PROMISED_SURFACE)
    assert 230 < promised < 300
    assert set(surface_samples.PROMISED_SURFACE) <= set(drawn)


@pytest.fixture(scope="module")
def kit() -> sheet_samples.ScenePlan:
    return sheet_samples.ScenePlan(
        "kit", tuple(map(by_id, ("hex_nut M8", "hex_bolt M8x30", "pin 6x20")))
    )


def test_a_sheet_has_a_part_in_every_column_and_true_sizes(kit):
    drawn, sizes = sheet_samples.make_sheet(kit, rng(5))
    assert drawn.image.shape == (*NANO_LAYOUT.sheet_size, 3)
    assert sizes.shape == (3, 3)
    for column in range(NANO_LAYOUT.columns):
        field = drawn.image[NANO_LAYOUT.strip : CELL, column * CELL : (column + 1) * CELL]
        assert bool(field.any()) == (column < 3)
    for part, size in zip(kit.parts, sizes, strict=True):
        assert max(size) == pytest.approx(max(part.extents), rel=0.15), part.id


def test_the_same_seed_gives_the_same_sheet(kit):
    first, again, other = (sheet_samples.make_sheet(kit, rng(seed))[0].image for seed in (6, 6, 7))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_whole_part_has_a_full_score_and_no_cell():
    sample = surface_samples.make_surface(by_id("hex_nut M10"), tasks.NORMAL, rng(8))
    assert sample is not None
    assert sample.score == 10
    assert not sample.grid.any()
    assert sample.image.shape == (*NANO_LAYOUT.surface_size, 5)


@pytest.mark.parametrize("defect", tasks.DEFECT_CLASSES)
def test_a_defect_has_cells_on_the_part_and_lowers_the_score(defect):
    found = [
        surface_samples.make_surface(by_id("hex_nut M10"), defect, rng(9, n)) for n in range(6)
    ]
    seen = [sample for sample in found if sample is not None]
    assert seen, "six defects and none visible"
    panel = NANO_LAYOUT.panel
    for sample in seen:
        assert sample.grid.sum() >= 2
        assert sample.score <= 7
        for view in range(3):
            shade = sample.image[:, view * panel : (view + 1) * panel, 0] > 0
            filled = shade.reshape(16, panel // 16, 16, panel // 16).mean((1, 3)) > 0
            assert not (sample.grid[view] & ~filled).any()


def plate(step: float = 0.1) -> np.ndarray:
    """A 32 x 32 x 4 mm block seen from above and from the front (y = -16)."""
    line = np.arange(-16 + step / 2, 16, step)
    u, v = np.meshgrid(line, line)
    top = np.column_stack([u.ravel(), v.ravel(), np.full(u.size, 4.0)])
    w, z = np.meshgrid(line, np.arange(step / 2, 4, step))
    front = np.column_stack([w.ravel(), np.full(w.size, -16.0), z.ravel()])
    return np.concatenate([top, front]).astype(np.float32)


def test_truth_lies_in_the_cell_that_shows_the_flagged_points():
    points = plate()
    part = surface_samples.pose.align(points, 0.1, poses=4)
    middles = dict.fromkeys(VIEWS, (0.0, 0.0, 2.0))
    mm_per_px = 32.0 / NANO_LAYOUT.panel  # a cell is 2 mm
    here = part.points
    flagged = (np.abs(here[:, 0] - 7) < 1) & (np.abs(here[:, 1] - 11) < 1) & (here[:, 2] > 3.5)
    truth = surface_samples.truth_grid(part, flagged.astype(np.float32), mm_per_px, middles)
    assert [tuple(cell) for cell in np.argwhere(truth[2])] == [(2, 11)]
    assert not truth[1].any()


def test_a_few_flagged_points_do_not_make_a_cell():
    part = surface_samples.pose.align(plate(), 0.1, poses=4)
    middles = dict.fromkeys(VIEWS, (0.0, 0.0, 2.0))
    flagged = np.zeros(len(part.points), np.float32)
    flagged[np.random.default_rng(0).integers(len(flagged), size=20)] = 1
    assert surface_samples.truth_grid(part, flagged, 32.0 / 224, middles).sum() == 0
    assert surface_samples.truth_grid(part, np.zeros_like(flagged), 32.0 / 224, middles).sum() == 0


@pytest.mark.parametrize(("share", "cells"), [(0.3, 0), (0.7, 1)])
def test_a_pixel_is_defective_when_most_of_its_points_are(share, cells):
    part = surface_samples.pose.align(plate(0.05), 0.1, poses=4)
    here = part.points
    flagged = (np.abs(here[:, 0] - 7) < 1) & (np.abs(here[:, 1] - 11) < 1) & (here[:, 2] > 3.5)
    flagged &= rng(4).random(len(flagged)) < share
    middles = dict.fromkeys(VIEWS, (0.0, 0.0, 2.0))
    assert (
        surface_samples.truth_grid(part, flagged.astype(np.float32), 32.0 / 224, middles).sum()
        == cells
    )


def test_a_closed_crack_has_no_depth_but_a_colour():
    """Only the white image shows it; an open one is in the difference as well."""
    model = by_id("hex_nut M20")
    vary = replace(CLEAN, closed_cracks=1.0)
    for seed in range(20):
        sample = surface_samples.make_surface(model, "crack", rng(seed), vary)
        if sample is not None and sample.grid.sum() >= 4:
            break
    assert sample is not None and sample.defect.closed
    inside = np.kron(np.concatenate(list(sample.grid), axis=1), np.ones((14, 14))) > 0
    inside &= sample.image[..., 0] > 0
    difference, white = sample.image[..., 3][inside], sample.image[..., 4][inside]
    assert (white < 90).mean() > 0.1
    assert (np.abs(difference.astype(int) - 128) > 40).mean() < 0.05


def test_a_closer_look_shows_the_defect_larger():
    """The window lies over it, so at twice the scale it fills more cells."""
    model = by_id("hex_nut M20")
    far, near = [], []
    for seed in range(12):
        for closer, found in ((False, far), (True, near)):
            sample = surface_samples.make_surface(
                model, "dent", rng(seed), replace(CLEAN), closer=closer
            )
            if sample is not None:
                assert sample.closer is closer
                found.append(int(sample.grid.sum()))
    assert len(near) >= 8 and np.median(near) > 1.5 * np.median(far)


def test_flags_stay_with_their_points_when_flying_points_are_dropped():
    points = plate(0.2)
    flying = rng(1).uniform((-30, -30, 8), (30, 30, 40), (40, 3)).astype(np.float32)
    order = rng(2).permutation(len(points) + 40)
    mixed = np.concatenate([points, flying])[order]
    flagged = mixed[:, 0] > 12
    white = np.where(flagged, 200, 100).astype(np.uint8)
    part, flags = surface_samples.align_with(mixed, flagged, white, 0.2, 4)
    assert len(part.points) == len(flags) < len(mixed)
    back = part.points @ part.tray_from_part[:3, :3].T + part.tray_from_part[:3, 3]
    assert np.array_equal(flags > 0, back[:, 0] > 12)
    assert part.white is not None
    assert np.array_equal(part.white == 200, flags > 0)


RECIPES = [
    pool.Recipe("sheet", "surrogate", 11, 2),
    pool.Recipe("sheet", "decoded", 11, 1),
    pool.Recipe("surface", "surrogate", 11, 1),
    pool.Recipe("surface", "decoded", 11, 1),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{recipe.task} {recipe.path}")
def test_a_shard_follows_from_recipe_and_number_and_training_reads_it(recipe, tmp_path):
    for folder in ("one", "two"):
        pool.make(recipe, tmp_path / folder / recipe.task, 3)
    files = sorted(path.name for path in (tmp_path / "one" / recipe.task).iterdir())
    assert files == ["00003.images.npy", "00003.meta.npz"]
    for name in files:
        first, second = ((tmp_path / f / recipe.task / name).read_bytes() for f in ("one", "two"))
        assert first == second
    if recipe.task == "sheet":
        opened = SheetPool.open(tmp_path / "one", "sheet")
        meta = opened.shards.meta
        assert all((meta["part"][i] >= 0).sum() == meta["count"][i] for i in range(recipe.shard))
        assert opened.batch(np.arange(recipe.shard), rng(0)).images.any()
    else:
        surfaces = SurfacePool.open(tmp_path / "one", "surface")
        assert surfaces.batch(np.arange(recipe.shard), rng(0)).images.any()


def filled(image: np.ndarray) -> np.ndarray:
    """Share of each view that shows the part, [3]."""
    panel = NANO_LAYOUT.panel
    return np.array([(image[:, i * panel : (i + 1) * panel, 0] > 0).mean() for i in range(3)])


@pytest.mark.parametrize("seed", [21, 22])
def test_decoded_surfaces_have_the_statistics_of_the_surrogate(seed):
    """The same seed makes the same damaged part, at the same place, in both."""
    model = by_id("hex_bolt M8x30")  # one long axis: both frames are the same
    fast = surface_samples.make_surface(model, "deformation", rng(seed), CLEAN)
    true = decoded.decoded_surface(model, "deformation", rng(seed), CLEAN)
    assert fast is not None and true is not None
    assert fast.defect == true.defect
    assert fast.size == pytest.approx(true.size, abs=1.5 * true.pixel_mm)
    assert filled(fast.image) == pytest.approx(filled(true.image), abs=0.03)
    both = (fast.grid & true.grid).sum() / (fast.grid | true.grid).sum()
    assert both > 0.5
    shown = (fast.image[..., 0] > 0) & (true.image[..., 0] > 0)
    assert np.abs(fast.image[..., 0].astype(int) - true.image[..., 0])[shown].mean() < 12


def test_decoded_sheets_show_the_same_parts_in_the_same_columns(kit):
    _, fast = sheet_samples.make_sheet(kit, rng(23), CLEAN)
    drawn, true = decoded.decoded_sheet(kit, rng(23), CLEAN)
    assert fast == pytest.approx(true, abs=0.5)
    for column in range(NANO_LAYOUT.columns):
        field = drawn.image[NANO_LAYOUT.strip : CELL, column * CELL : (column + 1) * CELL]
        assert bool(field.any()) == (column < 3)


def test_randomised_scans_stay_around_what_was_measured():
    measured = surrogate.Noise()
    drawn = [USUAL.noise(rng(seed)) for seed in range(200)]
    for name in ("depth", "grazing_keep", "flying", "edge_drop", "registration"):
        values = [getattr(noise, name) for noise in drawn]
        assert min(values) < getattr(measured, name) <= max(values), name
        assert 0.0 <= min(values) <= max(values) < 1.0
    light = [USUAL.lit(rng(seed)) for seed in range(200)]
    usual = SIMULATED.surface
    for name in ("albedo", "specular", "shininess"):
        values = [getattr(item.surface, name) for item in light]
        assert min(values) < getattr(usual, name) < max(values), name


def test_clean_scans_vary_in_nothing():
    assert len({str(CLEAN.noise(rng(seed))) for seed in range(9)}) == 1
    assert CLEAN.noise(rng(0)) == replace(surrogate.Noise(), blind_radius=CLEAN.blind_radius)
    assert CLEAN.lit(rng(1)).surface == SIMULATED.surface
    mesh = sheet_samples.resting(by_id("hex_nut M10"), rng(2), CLEAN)
    rigs = [sheet_samples.poses_for([mesh], rng(seed), CLEAN) for seed in range(20)]
    assert {len(rig) for rig in rigs} == {4}
    assert len({rig[0].range_mm for rig in rigs}) == 1
    varied = [sheet_samples.poses_for([mesh], rng(seed)) for seed in range(60)]
    assert {len(rig) for rig in varied} >= {3, 4}
    assert len({rig[0].range_mm for rig in varied}) == 60


def test_the_command_makes_a_pool_and_extends_it(tmp_path, capsys):
    words = ["sheet", "--out", str(tmp_path), "--shard", "1", "--backend", "serial", "--clean"]
    assert synth.main([*words, "--count", "1"]) == 0
    page = tmp_path / "page.png"
    assert synth.main([*words, "--count", "2", "--contact-sheet", str(page)]) == 0
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(report["made"], report["samples"]) for report in reports] == [(1, 1), (1, 2)]
    assert cv2.imread(str(page)).shape[1] == 2 * (2 * 6 * CELL + 10) + 10
    described = pool.read(tmp_path / "sheet")
    assert described["settings"]["vary"]["lost_pose_share"] == 0.0
    assert described["counts"]["samples"] == 2
    assert synth.main([*words[:-1], "--count", "3"]) == 2
    assert "begun with other settings" in capsys.readouterr().err


def test_a_shard_that_cannot_be_written_is_reported_and_the_rest_is_made(tmp_path, capsys):
    (tmp_path / "sheet" / "00000.images.npy").mkdir(parents=True)
    words = ["sheet", "--out", str(tmp_path), "--shard", "1", "--backend", "serial"]
    assert synth.main([*words, "--count", "2", "--seed", "4"]) == 1
    said = capsys.readouterr()
    assert "shard 00000 (seed [4, 0]): IsADirectoryError" in said.err
    assert json.loads(said.out)["failed"] == [0]
    described = pool.read(tmp_path / "sheet")
    assert described["counts"]["samples"] == 1
    assert list(described["failed"]) == ["00000"]


def test_validation_pools_have_a_seed_of_their_own():
    for name, seed in (("sheet", 0), ("sheet-val", synth.VALIDATION_SEED)):
        args = synth._parser().parse_args([name, "--out", "x"])
        assert synth.recipe_of(args).seed == seed


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--count", "0"), "1 or more, got 0"),
        (("--shard", "-2"), "1 or more, got -2"),
        (("--jobs", "0"), "1 or more, got 0"),
        (("--seed", "-1"), "0 or more, got -1"),
    ],
)
def test_a_number_out_of_range_is_refused_before_a_pool_is_begun(tmp_path, capsys, words, expected):
    with pytest.raises(SystemExit) as stopped:
        synth.main(["surface", "--out", str(tmp_path / "data"), *words])
    assert stopped.value.code == 2
    assert f"{words[0]}: expected {expected}" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()
