"""PASS only with a certificate that holds, a score below its limit, and every gate and check ok."""

from __future__ import annotations

import base64
import dataclasses
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_station.checks import Thresholds
from forge_station.contract import CONTRACT_VERSION
from forge_station.contract.certificate import CERTIFICATE_NAME, uncovered
from forge_station.contract.error import ContractError
from forge_station.contract.manifest import FileEntry, Manifest
from forge_station.contract.spec import Product
from forge_station.contract.verdict import (
    CheckResult,
    Outcome,
    Reason,
    ScanSummary,
    Verdict,
    combine,
    decide,
    unknown_reasons,
)
from forge_station.errors import ConfigError
from forge_station.permit import CHECKS_ALONE, Permit, part_score, read_permit
from forge_station.signing import PublicKey, public_key, read_public_key
from tests.station.certificates import (
    KEY,
    MODEL,
    NOW,
    OTHER_KEY,
    certificate,
    certified,
    public,
    signed,
    write,
)

NUT = Product("NUT", "single", ("workpiece", "surface"), {"hex_nut M8": 1})
MANIFEST = Manifest("m", "1.0.0", 1, CONTRACT_VERSION, "fp32", {"a.onnx": FileEntry.of(b"a")})


def results(
    scan: Outcome = Outcome.PASS, log_odds: float | None = -9.0, **outcomes: Outcome
) -> list[CheckResult]:
    """The gate and both checks of `NUT`, PASS with the same log-odds unless told otherwise."""
    found = [_result("scan", scan, None)]
    for check in NUT.checks:
        found.append(_result(check, outcomes.get(check, Outcome.PASS), log_odds))
    return found


def _result(check: Any, outcome: Outcome, log_odds: float | None) -> CheckResult:
    reasons = () if outcome is Outcome.PASS else (Reason("MODEL_OVERRUN", "too long"),)
    return CheckResult(check, outcome, reasons, log_odds=log_odds)


def verdict(
    permit: Permit, found: list[CheckResult], product: Product | None = NUT, simulated: bool = True
) -> Verdict:
    """As the pipeline makes it."""
    families = {"hex_nut"}
    said, last = permit.judge(product, families, simulated, found)
    required = product.checks if product is not None else ("workpiece",)
    return decide(
        required=required,
        checks=[*found, *([] if last is None else [last])],
        scan=ScanSummary(points=1),
        result_id="1",
        serial="1",
        product="NUT",
        certification=said,
    )


def codes(found: Verdict) -> list[str]:
    assert unknown_reasons(found.reasons) == ()
    return [reason.code for reason in found.reasons]


# ---------------------------------------------------------------- the decision


def test_a_part_below_the_limit_passes_with_its_score_and_limits_in_the_verdict():
    found = verdict(certified(-2.0), results(log_odds=-5.0))
    assert found.outcome is Outcome.PASS
    said = found.certification
    assert said is not None and said.mode == "certified"
    assert (said.score, said.limit_pass, said.limit_fail) == (-5.0, -2.0, 0.0)
    assert Verdict.from_dict(json.loads(json.dumps(found.to_dict()))) == found


@pytest.mark.parametrize("score", [-2.0, -1.0, 0.0, 7.0, 1000.0])
def test_at_the_limit_and_above_it_is_unsure_and_never_fail(score):
    found = verdict(certified(-2.0), results(log_odds=score))
    assert (found.outcome, codes(found)) == (Outcome.UNSURE, ["ABOVE_LIMIT"])
    assert ("yet no check found a fault" in found.reasons[0].text) == (score >= 0.0)


def test_the_largest_of_the_scaled_log_odds_counts():
    assert (
        part_score({"workpiece": -8.0, "surface": -6.0}, {"workpiece": 4.0, "surface": 1.0}) == -2
    )
    assert part_score({}, {}) is None
    heat = {"workpiece": 4.0, "surface": 1.0, "assembly": 1.0}
    found = verdict(certified(-3.0, temperatures=heat), results(log_odds=-8.0))
    assert (found.outcome, codes(found)) == (Outcome.UNSURE, ["ABOVE_LIMIT"])


def test_without_a_certificate_a_pass_becomes_unsure_and_a_fail_stays_a_fail():
    advisory = Permit(refusal="the bundle has no certificate.json")
    found = verdict(advisory, results())
    assert (found.outcome, codes(found)) == (Outcome.UNSURE, ["NO_CERTIFICATE"])
    assert "no certificate.json" in found.reasons[0].text
    assert found.certification is not None and found.certification.mode == "advisory"
    assert advisory.text.startswith("ADVISORY")
    failed = verdict(advisory, results(surface=Outcome.FAIL))
    assert (failed.outcome, codes(failed)) == (Outcome.FAIL, ["MODEL_OVERRUN"])
    assert failed.certification is not None and failed.certification.mode == "advisory"


def test_the_default_of_an_inspector_permits_nothing():
    assert verdict(Permit(), results()).outcome is Outcome.UNSURE


def test_a_certificate_that_expires_while_the_station_runs_ends_the_passes():
    later = dataclasses.replace(certified(), clock=lambda: NOW + timedelta(days=400))
    found = verdict(later, results())
    assert (found.outcome, codes(found)) == (Outcome.UNSURE, ["NO_CERTIFICATE"])
    assert "expired" in found.reasons[0].text and "expired" in later.text


@pytest.mark.parametrize(
    ("permit", "simulated", "found", "said"),
    [
        (certified(), False, results(), "simulated scans"),
        (certified(families=dict.fromkeys(("assembly", "surface", "workpiece"), ("pin",))), True,
         results(), "does not cover hex_nut"),
        (certified(), True, results(log_odds=None), "has no score"),
    ],
)  # fmt: skip
def test_what_the_certificate_does_not_cover_is_unsure(permit, simulated, found, said):
    made = verdict(permit, found, simulated=simulated)
    assert (made.outcome, codes(made)) == (Outcome.UNSURE, ["NOT_COVERED"])
    assert said in made.reasons[0].text


def test_an_evaluation_sees_the_checks_alone():
    found = verdict(CHECKS_ALONE, results(log_odds=5.0))
    assert found.outcome is Outcome.PASS
    assert found.certification is not None and found.certification.mode == "checks_alone"


def test_a_score_that_is_no_number_cannot_be_stored_and_would_not_pass():
    with pytest.raises(ContractError, match="log_odds"):
        results(log_odds=float("nan"))
    for place in (1, 2):
        found = results()
        object.__setattr__(found[place], "log_odds", float("nan"))
        assert verdict(certified(), found).outcome is Outcome.UNSURE


OUTCOMES = st.sampled_from([Outcome.PASS, Outcome.PASS, *Outcome])
SCORES = st.one_of(
    st.none(), st.floats(-1000, 1000), st.floats(-3, -1), st.sampled_from([-1000.0, -2.0, 1000.0])
)


@settings(max_examples=400, deadline=None)
@given(
    outcomes=st.tuples(OUTCOMES, OUTCOMES, OUTCOMES),
    scores=st.tuples(SCORES, SCORES),
    nan=st.sampled_from([None, None, 1, 2]),
    missing=st.booleans(),
    limit=st.sampled_from([-3.0, -2.0, 0.0, 1000.0]),
    simulated=st.booleans(),
    covers=st.booleans(),
    days=st.sampled_from([-30, 0, 0, 0, 400]),
    model=st.sampled_from([MODEL, MODEL, "ef" * 32]),
    changed=st.sampled_from([(), (), ("light",)]),
    has_certificate=st.booleans(),
)
def test_pass_means_certificate_gates_checks_and_score(
    outcomes, scores, nan, missing, limit, simulated, covers, days, model, changed, has_certificate
):
    """Whatever comes together: PASS => all of it holds; and no outcome but PASS is ever changed."""
    scan, workpiece, surface = outcomes
    found = [
        _result("scan", scan, None),
        _result("workpiece", workpiece, scores[0]),
        _result("surface", surface, scores[1]),
    ]
    if nan is not None:
        object.__setattr__(found[nan], "log_odds", float("nan"))
    if missing:
        del found[2]
    changes = (
        {} if covers else {"families": dict.fromkeys(("assembly", "surface", "workpiece"), ())}
    )
    one = certificate(limit, **changes) if has_certificate else None
    permit = Permit(
        one, "none", model_sha256=model, changed=changed, clock=lambda: NOW + timedelta(days=days)
    )
    before = combine(NUT.checks, found)[0]
    made = verdict(permit, found, simulated=simulated)
    if before is not Outcome.PASS:
        assert made.outcome is before
        return
    assert made.outcome in (Outcome.PASS, Outcome.UNSURE)
    valid = one is not None and days == 0 and model == MODEL and not changed
    assert (permit.objection is None) == valid
    if made.outcome is Outcome.PASS:
        assert valid and not missing and nan is None and scan is Outcome.PASS
        assert one is not None and uncovered(one, NUT, {"hex_nut"}, simulated) is None
        assert all(score is not None and score < limit for score in scores)
    else:
        complete = nan is None and None not in scores
        below = complete and all(score < limit for score in scores)
        assert not (valid and covers and simulated and below)


# ---------------------------------------------------------------- the file in the bundle


def read(folder: Path, **changes: Any) -> Permit:
    given = {"keys": [public()], "released": Thresholds(), "used": Thresholds(), **changes}
    return read_permit(folder, MANIFEST, **given)


def good(**changes: Any) -> Any:
    window = {"valid_from": "2020-01-01T00:00:00Z", "expires": "2999-01-01T00:00:00Z"}
    return certificate(**{"model_sha256": MANIFEST.model_sha256, **window, **changes})


def test_a_certificate_of_a_trusted_key_counts(tmp_path):
    write(tmp_path, good())
    permit = read(tmp_path)
    assert permit.objection is None and permit.text.startswith("certified, escape <= 1 %")
    assert verdict(permit, results()).outcome is Outcome.PASS
    assert read(tmp_path, keys=[public(OTHER_KEY), public()]).objection is None


def altered(folder: Path) -> None:
    data = json.loads((folder / CERTIFICATE_NAME).read_text())
    data["certificate"]["limit_pass"] -= 1.0
    (folder / CERTIFICATE_NAME).write_text(json.dumps(data))


def resigned_by_another_under_the_trusted_name(folder: Path) -> None:
    made = signed(good(), OTHER_KEY)
    made = dataclasses.replace(made, key_id=public().id)
    (folder / CERTIFICATE_NAME).write_bytes(made.to_json())


@pytest.mark.parametrize(
    ("prepare", "changes", "said"),
    [
        (lambda f: None, {}, "no certificate.json"),
        (lambda f: (f / CERTIFICATE_NAME).mkdir(), {}, "cannot be read"),
        (lambda f: (f / CERTIFICATE_NAME).write_bytes(b"{"), {}, "not JSON"),
        (lambda f: write(f, good()), {"keys": []}, "trusts no key"),
        (lambda f: write(f, good(), OTHER_KEY), {}, "does not trust"),
        (resigned_by_another_under_the_trusted_name, {}, "signature is wrong"),
        (lambda f: (write(f, good()), altered(f)), {}, "signature is wrong"),
        (lambda f: write(f, good(model_sha256="ef" * 32)), {}, "other model files"),
        (lambda f: write(f, good(expires="2021-01-01T00:00:00Z")), {}, "expired"),
        (lambda f: write(f, good(score_version=99)), {}, "score version"),
        (lambda f: write(f, good()), {"changed": ["camera"]}, "void: camera"),
        (lambda f: write(f, good()), {"used": Thresholds(defect_unsure=0.4)}, "defect_unsure 0.4"),
        (lambda f: write(f, good()), {"used": Thresholds(grid_row=0.4)}, "grid_row"),
    ],
)
def test_any_other_certificate_leaves_the_station_advisory_and_says_why(
    tmp_path, prepare, changes, said
):
    prepare(tmp_path)
    permit = read(tmp_path, **changes)
    assert said in (permit.objection or "")
    made = verdict(permit, results())
    assert (made.outcome, codes(made)) == (Outcome.UNSURE, ["NO_CERTIFICATE"])


def test_stricter_thresholds_of_the_station_keep_the_certificate(tmp_path):
    write(tmp_path, good())
    stricter = Thresholds(
        defect_fail=0.4,
        defect_unsure=0.2,
        size_tolerance=0.8,
        answer_disagree=0.7,
        token_budget=20.0,
    )
    assert read(tmp_path, used=stricter).objection is None


@pytest.mark.parametrize("name", ["look_again", "closer_weight", "grid_row"])
def test_what_changes_the_score_voids_the_certificate(tmp_path, name):
    """Another weight is neither stricter nor looser: the certificate's score is another one."""
    write(tmp_path, good())
    objection = read(tmp_path, used=Thresholds(**{name: 0.3})).objection
    assert objection is not None and name in objection


def test_the_digest_names_what_decides_and_not_the_card():
    def digest(**changes: Any) -> str:
        return dataclasses.replace(MANIFEST, **changes).model_sha256

    card = {**MANIFEST.files, "MODEL_CARD.md": FileEntry.of(b"x"), "line.yaml": FileEntry.of(b"y")}
    assert (
        digest(files=card, name="n", version="2.0.0", created="now", training={"a": 1}) == digest()
    )
    for changes in (
        {"files": {"a.onnx": FileEntry.of(b"b")}},
        {"files": {**MANIFEST.files, "b.onnx": FileEntry.of(b"")}},
        {"thresholds": {"defect_fail": 0.4}},
        {"model": {"heads": 2}},
        {"precision": "int8"},
    ):
        assert digest(**changes) != digest(), changes


# ---------------------------------------------------------------- keys


def test_a_key_is_read_from_pem_and_from_base64(tmp_path):
    pem = KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "k.pem").write_bytes(pem)
    text = base64.b64encode(public().raw).decode()
    assert public_key("k.pem", tmp_path) == public_key(text, tmp_path) == public()
    assert len(public().id) == 16 and public().id != public(OTHER_KEY).id
    assert not PublicKey(b"\0" * 32).verifies(b"", b"x")


def test_a_file_that_is_no_key_is_one_clear_error(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.pem.*No such file"):
        public_key("none.pem", tmp_path)
    (tmp_path / "text.pem").write_text("hello")
    with pytest.raises(ConfigError, match="not a public key"):
        read_public_key(tmp_path / "text.pem")
    other = generate_private_key(SECP256R1()).public_key()
    pem = other.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "ec.pem").write_bytes(pem)
    with pytest.raises(ConfigError, match="expected Ed25519"):
        read_public_key(tmp_path / "ec.pem")
