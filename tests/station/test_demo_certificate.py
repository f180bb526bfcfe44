"""The shipped bundle carries a certificate that lets the demo say PASS for every product."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import pytest

from forge_station.checks import Thresholds
from forge_station.config import StationConfig, load_station
from forge_station.contract.certificate import uncovered
from forge_station.permit import Permit, read_permit
from forge_station.vlm.bundle_files import read_manifest


@pytest.fixture(scope="module")
def config(repository) -> StationConfig:
    return load_station(repository / "station_config/demo/station.yaml")


@pytest.fixture(scope="module")
def permit(config) -> Permit:
    """At the start of its validity: a test must not fail because time goes by."""
    manifest = read_manifest(config.bundle)
    released = Thresholds.read(manifest.thresholds)
    used = Thresholds.read(manifest.thresholds, config.thresholds)
    found = read_permit(config.bundle, manifest, config.trusted_keys, released, used)
    assert found.certificate is not None, f"{found.refusal}; see training/CALIBRATION.md"
    begin = datetime.fromisoformat(found.certificate.valid_from.replace("Z", "+00:00"))
    return replace(found, clock=lambda: begin)


def test_it_holds_and_is_for_simulated_scans(permit):
    assert permit.objection is None
    assert permit.certificate.simulated and permit.certificate.confidence >= 0.9


def test_every_product_of_the_demo_is_covered_when_simulated_and_never_when_real(config, permit):
    for product in config.line.products:
        families = {part.partition(" ")[0] for part in product.parts}
        assert uncovered(permit.certificate, product, families, True) is None, product.part_number
        assert uncovered(permit.certificate, product, families, False) is not None
