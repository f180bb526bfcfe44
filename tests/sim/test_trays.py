"""Trays of the demo: the fault that is stated is the fault that lies there, and no other."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

pytest.importorskip("scipy", reason="the simulator needs the extra demo")

from forge_station.config import load_line
from forge_station.contract import spec
from forge_station.contract.catalogue import CATALOGUE, WORKPIECES, by_id, of_workpiece
from forge_station.contract.spec import Product, Reading
from forge_station.contract.verdict import Outcome
from forge_station.contract.views import MARKS
from forge_station.sim import defects, trays
from forge_station.sim.mesh import Mesh

BATCH = Product("NUTS", "batch", ("workpiece",), {"hex_nut M8": 4})
MAJORITY = Product("ANY", "batch", ("workpiece",), count=4)
KIT = Product(
    "KIT", "assembly", ("assembly",), {"hex_bolt M8x30": 1, "hex_nut M8": 1, "flat_washer M8": 2}
)
FULL_KIT = Product("FULL", "assembly", ("assembly",), {"hex_nut M8": 3, "flat_washer M8": 3})
READ_ONLY = Product("READ", "single", ("workpiece",), {"flange_nut M10": 1})
LOOK_ONLY = Product("LOOK", "single", ("surface",), {"flange_nut M10": 1})
SINGLE = Product("BOTH", "single", ("workpiece", "surface"), {"flange_nut M10": 1})
PRODUCTS = (BATCH, MAJORITY, KIT, FULL_KIT, READ_ONLY, LOOK_ONLY, SINGLE)


def chosen(product: Product, count: int, *, wrong: bool) -> list[tuple[tuple[str, ...], str]]:
    """Parts and fault of many trays; building their meshes would take seconds."""
    return [
        trays.choose(product, np.random.default_rng([seed, 3]), wrong=wrong)
        for seed in range(count)
    ]


def judged(product: Product, parts: tuple[str, ...]) -> spec.Judgement:
    """What the rules say of a reader who reads every part right."""
    marks = dict(zip(MARKS, parts, strict=False))
    return spec.evaluate(product, {mark: Reading(part, 1.0) for mark, part in marks.items()})


@pytest.fixture(scope="module")
def kit() -> trays.Tray:
    return trays.make(KIT, np.random.default_rng(2), wrong=False)


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda p: p.part_number)
def test_a_right_tray_passes_the_rules(product):
    for parts, fault in chosen(product, 6, wrong=False):
        assert fault == trays.RIGHT
        assert judged(product, parts).outcome is Outcome.PASS


@pytest.mark.parametrize(
    ("product", "kinds"),
    [
        (BATCH, {trays.WRONG_MODEL, trays.WRONG_WORKPIECE}),
        (MAJORITY, {trays.WRONG_MODEL, trays.WRONG_WORKPIECE}),
        (KIT, {trays.MISSING, trays.EXTRA, trays.WRONG_MODEL, trays.WRONG_WORKPIECE}),
        (FULL_KIT, {trays.MISSING, trays.WRONG_MODEL, trays.WRONG_WORKPIECE}),
        (READ_ONLY, {trays.WRONG_MODEL}),
        (LOOK_ONLY, set(defects.DEFECTS)),
        (SINGLE, {trays.WRONG_MODEL, *defects.DEFECTS}),
    ],
    ids=lambda value: getattr(value, "part_number", ""),
)
def test_faults_are_those_that_the_checks_of_the_product_can_find(product, kinds):
    assert {fault for _, fault in chosen(product, 60, wrong=True)} == kinds


@pytest.mark.parametrize("product", [BATCH, MAJORITY, KIT, FULL_KIT, READ_ONLY])
def test_a_wrong_tray_fails_the_rules_with_the_stated_fault(product):
    codes = {
        trays.MISSING: "MISSING_PART",
        trays.EXTRA: "EXTRA_PART",
        trays.WRONG_MODEL: "WRONG_MODEL",
        trays.WRONG_WORKPIECE: "WRONG_WORKPIECE",
    }
    for parts, fault in chosen(product, 60, wrong=True):
        found = judged(product, parts)
        assert found.outcome is Outcome.FAIL
        assert [item.code for item in found.violations] == [codes[fault]], parts
        assert len(parts) <= len(MARKS)


def test_a_single_part_has_either_a_defect_or_another_model_number():
    for parts, fault in chosen(SINGLE, 30, wrong=True):
        right = parts == ("flange_nut M10",)
        assert right == (fault in defects.DEFECTS)
        assert by_id(parts[0]).workpiece == "flange_nut"


def test_a_defect_changes_the_mesh_and_nothing_else():
    seed = next(n for n, (_, fault) in enumerate(chosen(SINGLE, 9, wrong=True)) if fault == "cut")
    tray = trays.make(SINGLE, np.random.default_rng([seed, 3]), wrong=True)
    assert not tray.good
    whole = by_id("flange_nut M10").extents
    assert max(tray.meshes[0].extents()) < 1.05 * max(whole)
    assert len(tray.meshes) == len(tray.parts) == 1


def test_the_same_seed_lays_the_same_tray(kit):
    again = trays.make(KIT, np.random.default_rng(2), wrong=False)
    assert (kit.parts, kit.fault, kit.good) == (again.parts, again.fault, True)
    for one, other in zip(kit.meshes, again.meshes, strict=True):
        assert np.array_equal(one.vertices, other.vertices)


def test_parts_do_not_always_lie_in_the_order_of_the_specification():
    assert len({parts for parts, _ in chosen(KIT, 20, wrong=False)}) > 6


def test_meshes_stand_on_the_tray_apart_and_in_the_stated_field(kit):
    width, depth, height = trays.field_mm(kit.meshes)
    boxes = [mesh.bounds() for mesh in kit.meshes]
    assert len(boxes) == len(kit.parts) == 4
    for i, (low, high) in enumerate(boxes):
        assert low[2] == pytest.approx(0.0, abs=1e-6)
        assert np.all(np.abs([low[:2], high[:2]]) <= np.array([width, depth]) / 2 + 1e-9)
        assert high[2] <= height
        for other_low, other_high in boxes[:i]:
            apart = np.maximum(low - other_high, other_low - high)[:2]
            assert apart.max() > 0.4


def test_the_field_is_centred_on_the_tray():
    """A part off the centre needs a field that reaches as far on the other side."""
    corners = np.array([[40.0, -3, 0], [50, -3, 0], [40, 5, 0], [40, -3, 8]])
    mesh = Mesh(corners, np.array([[0, 1, 2], [0, 1, 3], [0, 2, 3], [1, 2, 3]], np.int32))
    assert trays.field_mm([mesh]) == (100.0, 10.0, 8.0)


def test_every_catalogue_part_has_a_neighbour_of_its_kind_and_of_another():
    rng = np.random.default_rng(0)
    for model in CATALOGUE:
        same = trays.other_part(model, rng, same_workpiece=True)
        other = trays.other_part(model, rng, same_workpiece=False)
        assert same.workpiece == model.workpiece
        assert same.id != model.id
        assert other.workpiece != model.workpiece


def test_a_look_alike_is_close_in_size_where_there_is_one():
    rng = np.random.default_rng(0)
    model = by_id("hex_nut M8")
    drawn = {trays.other_part(model, rng, same_workpiece=True).id for _ in range(60)}
    assert drawn == {"hex_nut M6", "hex_nut M10"}
    drawn_other = [trays.other_part(model, rng, same_workpiece=False) for _ in range(60)]
    assert all(0.7 < trays.size_rank(m) / 8 < 1.4 for m in drawn_other)
    assert len({m.workpiece for m in drawn_other}) > 5


def test_spread_draws_workpieces_equally_however_many_models_they_have():
    pool = [*of_workpiece("hex_bolt"), by_id("hex_nut M8")]
    rng = np.random.default_rng(1)
    drawn = Counter(trays.spread(pool, rng).workpiece for _ in range(400))
    assert 150 < drawn["hex_nut"] < 250


def test_near_in_size_contains_the_part_itself_and_many_kinds():
    for workpiece in WORKPIECES:
        model = of_workpiece(workpiece)[0]
        assert model in trays.near_in_size(model, 1.05)


def test_every_product_of_the_demo_line_can_be_laid_wrong(repository):
    line = load_line(repository / "station_config/demo/line.yaml")
    for product in line.products:
        faults = {fault for _, fault in chosen(product, 20, wrong=True)}
        assert trays.RIGHT not in faults
        assert len(faults) > 1
