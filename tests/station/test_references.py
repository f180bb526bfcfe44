"""The station's surface picture: with the difference where the bundle asks for it, or UNSURE."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("scipy", reason="part shapes need the extra demo")

from forge_station.contract.spec import Product
from forge_station.contract.verdict import Outcome, ScanSummary, unknown_reasons
from forge_station.contract.views import NANO_LAYOUT, SURFACE_CHANNELS
from forge_station.geometry.surface import look
from forge_station.permit import CHECKS_ALONE
from forge_station.pipeline import Inspector, Job, misfit_reasons
from forge_station.sim.references import CadReferences
from tests.station.fake_model import FakeModel, part_cloud

NUT = "hex_nut M8"
SINGLE = Product("NUT", "single", ("workpiece", "surface"), {NUT: 1})


def model(compares: bool) -> FakeModel:
    made = FakeModel({"A": (NUT, 0.98)})
    if compares:
        made.manifest = replace(FakeModel.manifest, surface_channels=SURFACE_CHANNELS)
    return made


def inspect(used: FakeModel, references):
    inspector = Inspector(used, permit=CHECKS_ALONE, references=references)
    job = Job("result-1", "serial-1", SINGLE, station="s1", line="l1")
    return inspector.inspect_parts(
        job, [part_cloud(NUT, count=200_000)], ScanSummary(points=1000), ()
    )


@pytest.fixture(scope="module")
def known() -> CadReferences:
    return CadReferences()


def test_a_model_that_compares_sees_the_difference(known):
    used = model(compares=True)
    found = inspect(used, known)
    assert found.verdict.outcome is Outcome.PASS
    picture = used.images[-1]
    inside = picture[..., 0] > 0
    levels = picture[..., 2][inside]
    assert abs(float(np.median(levels)) - 128) < 6, np.bincount(levels // 16)
    assert np.array_equal(found.surface_pictures["A"].image, picture)


def test_a_part_without_a_reference_is_unsure():
    used = model(compares=True)
    found = inspect(used, {})
    assert found.verdict.outcome is Outcome.UNSURE
    assert [reason.code for reason in found.verdict.reasons] == ["NO_REFERENCE"]
    assert not unknown_reasons(found.verdict.reasons)
    assert not used.images[-1][..., 2].any()


def test_a_model_that_does_not_compare_needs_none():
    used = model(compares=False)
    assert inspect(used, {}).verdict.outcome is Outcome.PASS
    assert used.images[-1][..., 2].any()


@pytest.mark.parametrize(("kept", "fits"), [(1, True), (400, False)])
def test_a_defect_counts_only_where_the_part_lies_on_its_reference(kept, fits, known):
    """The few points of a thin file differ from a dense reference everywhere."""
    used = model(compares=True)
    used.surface = {"dent": 0.95}
    used.rows = {"top r5": "4,5"}
    inspector = Inspector(used, permit=CHECKS_ALONE, references=known)
    whole = part_cloud(NUT, count=200_000)
    part = replace(whole, points=whole.points[::kept])
    job = Job("result-1", "serial-1", SINGLE, station="s1", line="l1")
    verdict = inspector.inspect_parts(job, [part], ScanSummary(points=1000), ()).verdict
    (surface,) = [item for item in verdict.checks if item.check == "surface"]
    codes = [reason.code for reason in surface.reasons]
    if fits:
        assert (surface.outcome, codes[0]) == (Outcome.FAIL, "SURFACE_DENT")
    else:
        assert (surface.outcome, codes) == (Outcome.UNSURE, ["REFERENCE_MISFIT"])
        assert surface.reasons[0].mark == "A" and "limit 1" in surface.reasons[0].text


def test_a_dense_part_far_off_its_reference_is_another_part(known):
    seen = look(part_cloud(NUT, count=200_000).points, NANO_LAYOUT, known[NUT])
    assert seen.fit is not None and seen.fit.misfit < 1.0
    assert misfit_reasons("A", NUT, seen) == []
    bent = replace(seen, fit=replace(seen.fit, misfit=3.9))
    assert misfit_reasons("A", NUT, bent) == []
    other = replace(seen, fit=replace(seen.fit, misfit=4.1))
    (reason,) = misfit_reasons("A", NUT, other)
    assert (reason.code, reason.mark) == ("REFERENCE_MISFIT", "A") and "4.1" in reason.text
    assert misfit_reasons("A", NUT, replace(seen, fit=None)) == []
