"""The record of a certificate: its own arithmetic, its text form, and when it is void."""

from __future__ import annotations

import dataclasses
import json
from datetime import timedelta

import pytest

from forge_station.contract import certificate as contract
from forge_station.contract.certificate import Claim, objections, parse, uncovered
from forge_station.contract.error import ContractError
from forge_station.contract.spec import Product, Rules
from tests.station.certificates import MODEL, NOW, certificate, signed

NUT = Product("NUT", "single", ("workpiece", "surface"), {"hex_nut M8": 1})


def claim(**changes: object) -> Claim:
    (found,) = certificate().claims
    return dataclasses.replace(found, **changes)  # type: ignore[arg-type]


def held(found: contract.Certificate, **changes: object) -> tuple[str, ...]:
    facts = {"model_sha256": MODEL, "score_version": found.score_version, "now": NOW, **changes}
    return objections(found, **facts)  # type: ignore[arg-type]


def test_it_reads_back_as_it_was_written():
    found = signed(certificate())
    assert parse(found.to_json()) == found
    assert contract.canonical(parse(found.to_json()).certificate) == contract.canonical(
        found.certificate
    )


def test_every_figure_is_part_of_what_is_signed():
    found = certificate()
    for field in dataclasses.fields(found):
        if field.name == "schema":
            continue
        data = json.loads(contract.canonical(found))
        assert field.name in data
    changed = dataclasses.replace(found, limit_pass=found.limit_pass - 1e-9)
    assert changed.sha256 != found.sha256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"claims": (claim(defective=300),)}, r"claims\[0\].*300 parts"),
        ({"claims": (claim(rank=9),)}, "rank 9"),
        ({"claims": (claim(escapes=4),)}, "escapes below the rank"),
        ({"claims": (claim(delta=0.05, defective=5000),)}, "risk at most 0.0304 at look 1"),
        ({"look": 2}, "at look 2"),
        ({"claims": ()}, "one or more"),
        ({"limit_pass": 0.5, "limit_fail": 1.0}, "the smallest limit of a claim"),
        ({"limit_fail": -3.0}, "at least limit_pass"),
        ({"escape": 0.001}, r"claims\[0\]"),
        ({"families": {"surface": ("hex_nut",)}}, "families"),
        ({"temperatures": {}}, "temperatures"),
        ({"expires": "2026-11-30T00:00:00Z"}, "after 2026-11-30"),
        ({"expires": "tomorrow"}, "UTC, like"),
    ],
)
def test_a_certificate_whose_figures_do_not_carry_its_claim_cannot_be_made(changes, message):
    with pytest.raises(ContractError, match=message):
        certificate(**changes)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b'{"certificate": {}}', b"\xff", b"[" * 100_000]
)
def test_a_malformed_file_is_refused(content):
    with pytest.raises(ContractError):
        parse(content)


def test_an_unknown_key_is_refused():
    data = json.loads(signed(certificate()).to_json())
    data["certificate"]["covers_everything"] = True
    with pytest.raises(ContractError, match="unknown key"):
        parse(json.dumps(data).encode())


def test_it_holds_for_its_model_and_dates_and_until_something_changes():
    found = certificate()
    assert held(found) == ()
    assert "other model files" in held(found, model_sha256="ef" * 32)[0]
    assert "score version" in held(found, score_version=found.score_version + 1)[0]
    assert "expired" in held(found, now=NOW + timedelta(days=300))[0]
    assert "holds from" in held(found, now=NOW - timedelta(days=3))[0]
    assert "void: camera, light" in held(found, changed=("light", "camera"))[0]
    assert held(certificate(void_if=("light",)), changed=("camera",)) == ()
    assert len(held(found, model_sha256="ef" * 32, now=NOW + timedelta(days=300))) == 2


@pytest.mark.parametrize(
    ("changes", "families", "simulated", "said"),
    [
        ({}, {"hex_nut"}, True, None),
        ({}, {"hex_nut"}, False, "covers simulated scans"),
        ({"simulated": False}, {"hex_nut"}, True, "covers real scans"),
        ({}, {"gearbox"}, True, "does not cover gearbox"),
        ({}, set(), True, "a product without parts"),
        ({"rules": {"min_reading_probability": 0.8}}, {"hex_nut"}, True, "the product has 0.6"),
        ({"rules": {"min_surface_score": 5.0}}, {"hex_nut"}, True, "the product has None"),
        ({"rules": {"min_reading_probability": 0.5}}, {"hex_nut"}, True, None),
    ],
)
def test_what_it_does_not_name_is_not_covered(changes, families, simulated, said):
    found = uncovered(certificate(**changes), NUT, families, simulated)
    assert found is None if said is None else said in (found or "")


def test_a_check_that_nobody_certified_is_not_covered():
    found = certificate()
    (one,) = found.claims
    one = dataclasses.replace(one, checks=("workpiece",))
    fewer = dataclasses.replace(
        found, claims=(one,), families={"workpiece": ("hex_nut",)}, temperatures={"workpiece": 1.0}
    )
    assert "surface" in (uncovered(fewer, NUT, {"hex_nut"}, True) or "")
    batch = Product("B", "batch", ("workpiece",), {"hex_nut M8": 3}, rules=Rules(0.6))
    assert uncovered(fewer, batch, {"hex_nut"}, True) is None


def test_the_line_for_people_names_claim_parts_and_date():
    text = certificate().text
    for words in ("escape <= 1 % (95 %)", "700 defective parts", "simulated", "2027-05-29"):
        assert words in text
