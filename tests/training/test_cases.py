"""Simulated cases: the full path, true letters, repeatable and resumable."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from forge_station.contract import spec
from forge_station.contract.spec import Reading
from forge_station.geometry import cloud_io, gauge, scene
from tests.training.conftest import SEED
from training import cases
from training.evaluation import lookalikes
from training.evaluation.case_files import FILE, Case, read_cases


def read(folder: Path) -> list[Case]:
    found = read_cases(folder)
    assert all(isinstance(case, Case) for case in found)
    return [case for case in found if isinstance(case, Case)]


def test_marks_are_where_the_station_puts_them(simulated: Path) -> None:
    for case in read(simulated):
        cloud = cloud_io.read_cloud(simulated / (case.input.scene or ""))
        assert cloud.frame == "tray" and cloud.poses == 4
        parts = scene.separate(cloud).parts
        assert len(parts) == len(case.truth.readings)
        for part, name in zip(parts, case.truth.readings.values(), strict=True):
            if case.truth.defect in (None, "normal"):
                assert gauge.consistent(gauge.measure(part), name) is not False


def test_the_specification_agrees_with_the_truth(simulated: Path) -> None:
    for case in read(simulated):
        if case.task == "surface" or case.product is None:
            continue
        readings = {mark: Reading(part, 1.0) for mark, part in case.truth.readings.items()}
        judgement = spec.evaluate(case.product, readings)
        assert judgement.outcome.value == case.truth.expected
        assert (judgement.marks or ("none",))[0] in (case.truth.answers or ())


def test_a_surface_case_knows_its_defective_points(simulated: Path) -> None:
    for case in read(simulated):
        if case.task != "surface":
            continue
        with np.load(simulated / (case.truth.points or "")) as stored:
            assert stored["points"].dtype == np.float32
            assert stored["defect"].shape == stored["points"].shape[:1]
            assert stored["defect"].any()
            assert case.truth.defect != "normal" and (case.truth.score or 0) < 10


def test_cases_are_repeatable_and_a_second_run_fills_gaps_only(
    simulated: Path, tmp_path: Path
) -> None:
    lines = (simulated / FILE).read_text().splitlines()
    first = lines[0]
    cut = tmp_path / FILE
    cut.write_text(f"{lines[1]}\n" + lines[2][:40])  # a killed run leaves half a line
    made = cases.write_cases(tmp_path, ("workpiece",), 1, SEED, 1, quiet=True)
    assert made == 1 and first in cut.read_text().splitlines()
    before = (tmp_path / "scenes" / f"workpiece-{SEED}-00000.npz").read_bytes()
    assert before == (simulated / "scenes" / f"workpiece-{SEED}-00000.npz").read_bytes()
    assert cases.write_cases(tmp_path, ("workpiece",), 1, SEED, 1, quiet=True) == 0


@pytest.mark.parametrize("seed", cases.TRAINING_SEEDS)
def test_seeds_of_training_are_refused(tmp_path: Path, seed: int) -> None:
    with pytest.raises(SystemExit, match="used by training"):
        cases.write_cases(tmp_path, ("workpiece",), 1, seed, 1, quiet=True)


def test_batches_are_half_right_and_half_without_an_expected_part() -> None:
    plans = [cases.plan_batch(np.random.default_rng(i)) for i in range(400)]
    odd = [len(set(plan.parts)) == 2 for plan in plans]
    given = [bool(plan.product.parts) for plan in plans]
    assert 160 < sum(odd) < 240 and 160 < sum(given) < 240
    assert all(3 <= len(plan.parts) <= 6 and len(set(plan.parts)) <= 2 for plan in plans)
    kinds = [len({model.workpiece for model in plan.parts}) == 1 for plan in plans]
    same = sum(a and b for a, b in zip(kinds, odd, strict=True)) / sum(odd)
    assert 0.5 < same < 0.7


def test_kits_have_every_fault_about_equally_often() -> None:
    faults: Counter[str] = Counter()
    for i in range(400):
        plan = cases.plan_kit(np.random.default_rng(i))
        on_tray = Counter(model.id for model in plan.parts)
        surplus, missing = on_tray - Counter(plan.required), Counter(plan.required) - on_tray
        assert 3 <= sum(plan.required.values()) <= 6 and 2 <= len(plan.parts) <= 6
        assert sum(surplus.values()) <= 1 and sum(missing.values()) <= 1
        faults[f"{sum(surplus.values())} extra {sum(missing.values())} missing"] += 1
    assert set(faults) == {f"{a} extra {b} missing" for a in (0, 1) for b in (0, 1)}
    assert faults["1 extra 1 missing"] == pytest.approx(160, abs=40)
    assert min(faults.values()) > 50


def test_a_family_of_its_own_has_no_other_workpiece() -> None:
    nuts = ("hex_nut", "cap_nut", "flange_nut", "wing_nut")
    draw = cases.Draw(nuts)
    for i in range(60):
        rng = np.random.default_rng(i)
        plan = cases.plan_batch(rng, draw) if i % 2 else cases.plan_kit(rng, draw)
        assert {model.workpiece for model in plan.parts} <= set(nuts)
    bolts = cases.Draw(("hex_bolt",))
    assert all(
        {m.workpiece for m in cases.plan_batch(np.random.default_rng(i), bolts).parts}
        == {"hex_bolt"}
        for i in range(20)
    )


def test_the_wrong_part_of_a_look_alike_case_is_a_look_alike() -> None:
    draw, seen = cases.Draw(subset="lookalike"), Counter[str]()
    for i in range(200):
        rng = np.random.default_rng(i)
        plan = cases.plan_batch(rng, draw) if i % 2 else cases.plan_kit(rng, draw)
        on_tray = Counter(model.id for model in plan.parts)
        surplus = list((on_tray - Counter(plan.required)).elements())
        missing = list((Counter(plan.required) - on_tray).elements())
        if not surplus:
            assert not missing
            seen["complete"] += 1
            continue
        ((wrong,), (right,)) = surplus, missing
        kind = lookalikes.kind(right, wrong)
        assert kind is not None
        seen[kind] += 1
    assert 60 < seen["complete"] < 140 and set(seen) == {"complete", *lookalikes.KINDS}


def test_cases_of_another_draw_have_other_ids() -> None:
    draws = [cases.PLAIN, cases.Draw(subset="lookalike"), cases.Draw(("hex_nut",)),
             cases.Draw(("hex_nut", "pin"))]  # fmt: skip
    assert len({cases.case_id("workpiece", 1, 0, draw) for draw in draws}) == len(draws)
    assert cases.case_id("workpiece", 1, 0) == "workpiece-1-00000"
    assert cases.Draw(("hex_nut", "pin")).tag == cases.Draw(("pin", "hex_nut")).tag


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workpieces", "hex_nuts"], "unknown workpieces hex_nuts: expected hex_bolt"),
        (["--workpieces", "pin", "--without", "pin"], "not allowed with"),
        (["--task", "surface", "--subset", "lookalike"], "expected --task workpiece or assembly"),
    ],
)
def test_wrong_options_are_one_message(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["cases", "--out", str(tmp_path), "--seed", "5", "--count", "1", *arguments]
    monkeypatch.setattr("sys.argv", given)
    with pytest.raises(SystemExit):
        cases.main()
    assert words in capsys.readouterr().err


def test_references_show_what_is_right_and_leave_the_case_as_it_is(tmp_path: Path) -> None:
    draw = cases.Draw(("hex_nut",), references=1)
    made = cases.make_case("surface", SEED, 3, draw)
    plain = cases.make_case("surface", SEED, 3, cases.Draw(("hex_nut",)))
    assert np.array_equal(made.cloud.points, plain.cloud.points)
    (reference,) = made.references
    (part,) = scene.separate(reference).parts
    assert gauge.consistent(gauge.measure(part), made.case.truth.readings["A"]) is True
    assert made.case.input.references == (f"scenes/{made.case.id}-reference0.npz",)


def test_the_promised_workpieces_are_those_of_training() -> None:
    from training.data import surface_samples

    assert cases.SURFACE_WORKPIECES == surface_samples.PROMISED_SURFACE
