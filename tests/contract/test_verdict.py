"""Verdicts: how checks combine, what a verdict cannot claim, its dict and its JSON Schema."""

from __future__ import annotations

import json
from importlib import resources

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_station.contract.error import ContractError
from forge_station.contract.verdict import (
    CHECKS,
    REASONS,
    Alternative,
    Certification,
    CheckResult,
    GridReading,
    ModelUsed,
    Outcome,
    PartReading,
    Reason,
    ScanSummary,
    SurfaceReading,
    Verdict,
    combine,
    decide,
    unknown_reasons,
    worst,
)

PASS, FAIL, UNSURE, ERROR = Outcome.PASS, Outcome.FAIL, Outcome.UNSURE, Outcome.ERROR


def result(check: str, outcome: Outcome, code: str = "STATION_ERROR") -> CheckResult:
    reasons = () if outcome is PASS else (Reason(code, f"{check} {outcome}"),)
    return CheckResult(check, outcome, reasons)


def full_verdict() -> Verdict:
    return decide(
        required=("workpiece", "surface"),
        checks=(
            result("scan", PASS),
            CheckResult("workpiece", PASS, confidence=0.97, threshold=0.6, answer="none"),
            CheckResult("surface", FAIL, (Reason("SURFACE_DENT", "a dent", "A", 0.8),), score=4.0),
        ),
        scan=ScanSummary(
            81234,
            {"valid_share": 0.61, "reprojection_px": None},
            flags=("LOW_COVERAGE",),
            source="sim",
            poses=4,
            camera_pixel_mm=0.12,
            calibration="ab12",
        ),
        result_id="0190-1",
        serial="S-000001",
        product="BOLT-M10x50",
        parts=(
            PartReading(
                "A",
                "hex_bolt",
                "M10x50",
                0.97,
                (Alternative("hex_bolt M10x25", 0.02),),
                (56.4, 18.5, 16.1),
                40000,
            ),
        ),
        surface=(SurfaceReading("A", "dent", 0.8, {"normal": 0.1, "dent": 0.8}, 4.0, "a dent"),),
        grids=(
            GridReading("A", "front", "artifact:\nr5: 8,9", ((4, 7), (4, 8)), 3.9, (-31.2, 40.0)),
        ),
        notes=(Reason("MODEL_MALFORMED", "SPACING in line 2"),),
        model=ModelUsed("nano", "1.0.0", 3, "ff" * 32, "int8", "CPUExecutionProvider"),
        certification=Certification("certified", "escape <= 1 %", -1.5, -2.0, 0.5, "ee" * 32),
        line="fasteners",
        station="station-1",
        simulated=True,
        begin_time="2026-11-30T10:00:00.000Z",
        end_time="2026-11-30T10:00:00.512Z",
        timings_ms={"decode": 120.5, "total": 512.0},
    )


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([], ERROR),
        ([PASS], PASS),
        ([PASS, UNSURE], UNSURE),
        ([UNSURE, FAIL, PASS], FAIL),
        ([FAIL, ERROR, UNSURE], ERROR),
    ],
)
def test_worst(outcomes, expected):
    assert worst(outcomes) is expected


class TestCombine:
    @pytest.mark.parametrize(
        ("required", "results", "outcome", "codes"),
        [
            (["workpiece"], [result("scan", PASS), result("workpiece", PASS)], PASS, []),
            # a missing check is never a PASS, whichever it is
            (["workpiece"], [], ERROR, ["CHECK_MISSING", "CHECK_MISSING"]),
            (["workpiece"], [result("scan", PASS)], ERROR, ["CHECK_MISSING"]),
            (["workpiece"], [result("workpiece", PASS)], ERROR, ["CHECK_MISSING"]),
            (
                ["workpiece", "surface"],
                [result("scan", PASS), result("workpiece", PASS)],
                ERROR,
                ["CHECK_MISSING"],
            ),
            (
                ["workpiece", "surface"],
                [result("scan", PASS), result("surface", FAIL, "SURFACE_CUT")],
                ERROR,
                ["SURFACE_CUT", "CHECK_MISSING"],
            ),
            # a gate that did not pass explains why checks were not made
            (["workpiece"], [result("scan", UNSURE, "EMPTY_SCENE")], UNSURE, ["EMPTY_SCENE"]),
            (["workpiece"], [result("scan", ERROR, "NO_DATA")], ERROR, ["NO_DATA"]),
            (
                ["workpiece", "surface"],
                [result("scan", UNSURE, "SATURATED"), result("workpiece", FAIL, "WRONG_MODEL")],
                FAIL,
                ["WRONG_MODEL", "SATURATED"],
            ),
            (
                ["workpiece"],
                [result("scan", UNSURE, "SATURATED"), result("workpiece", PASS)],
                UNSURE,
                ["SATURATED"],
            ),
            # a check nobody required counts all the same
            (
                ["workpiece"],
                [
                    result("scan", PASS),
                    result("workpiece", PASS),
                    result("surface", UNSURE, "SURFACE_CUT"),
                ],
                UNSURE,
                ["SURFACE_CUT"],
            ),
            (["scan", "workpiece"], [result("scan", PASS), result("workpiece", PASS)], PASS, []),
        ],
    )
    def test_table(self, required, results, outcome, codes):
        found, reasons = combine(required, results)
        assert found is outcome
        assert [reason.code for reason in reasons] == codes

    @pytest.mark.parametrize("required", [[], ["scan"]])
    def test_a_verdict_without_any_check_is_refused(self, required):
        with pytest.raises(ContractError, match="nothing to check"):
            combine(required, [result("scan", PASS)])

    def test_two_results_of_one_check_are_refused(self):
        with pytest.raises(ContractError, match="two results"):
            combine(["surface"], [result("surface", PASS), result("surface", FAIL)])

    @given(
        st.lists(st.sampled_from(CHECKS), min_size=1, unique=True),
        st.dictionaries(st.sampled_from(("scan", *CHECKS)), st.sampled_from(list(Outcome))),
    )
    def test_pass_only_when_every_required_check_passed(self, required, outcomes):
        results = [result(check, outcome) for check, outcome in outcomes.items()]
        found, reasons = combine(required, results)
        complete = {"scan", *required} <= set(outcomes)
        all_pass = all(outcome is PASS for outcome in outcomes.values())
        assert (found is PASS) == (complete and all_pass)
        assert (found is PASS) == (not reasons)


class TestCheckResult:
    @pytest.mark.parametrize("outcome", [FAIL, UNSURE, ERROR])
    def test_needs_a_reason_unless_it_passes(self, outcome):
        with pytest.raises(ContractError, match="at least one"):
            CheckResult("surface", outcome)

    def test_a_pass_has_no_reason(self):
        with pytest.raises(ContractError, match="a PASS has no reasons"):
            CheckResult("surface", PASS, (Reason("SURFACE_CUT", "x"),))

    @pytest.mark.parametrize(
        "changes",
        [{"score": 10.5}, {"score": -1.0}, {"confidence": 1.01}, {"confidence": float("nan")}],
    )
    def test_figures_are_limited(self, changes):
        with pytest.raises(ContractError):
            CheckResult("surface", PASS, **changes)


class TestVerdict:
    def test_cannot_contradict_its_checks(self):
        good = full_verdict().to_dict()
        for changes in (
            {"outcome": "PASS"},
            {"outcome": "PASS", "reasons": []},
            {"reasons": []},
            {"checks": good["checks"][:1], "outcome": "PASS", "reasons": []},
        ):
            with pytest.raises(ContractError, match="contradicts its checks"):
                Verdict.from_dict({**good, **changes})

    def test_of_another_schema_is_refused(self):
        data = {**full_verdict().to_dict(), "schema": "forge-station.verdict/2.0"}
        with pytest.raises(ContractError, match="another schema"):
            Verdict.from_dict(data)

    def test_of_a_later_minor_version_with_known_fields_is_read(self):
        data = {**full_verdict().to_dict(), "schema": "forge-station.verdict/1.7"}
        assert Verdict.from_dict(data).outcome is FAIL

    def test_comes_back_from_json(self):
        verdict = full_verdict()
        assert Verdict.from_dict(json.loads(json.dumps(verdict.to_dict()))) == verdict

    def test_carries_what_an_offline_inspection_prints(self):
        data = full_verdict().to_dict()
        assert {"outcome", "reasons", "parts", "surface", "grids", "scan"} <= set(data)
        assert data["outcome"] == "FAIL"
        assert data["scan"]["points"] == 81234 and data["scan"]["quality"]["valid_share"] == 0.61
        part = data["parts"][0]
        assert (part["mark"], part["workpiece"], part["model_number"]) == (
            "A",
            "hex_bolt",
            "M10x50",
        )

    def test_finds_a_check_by_name(self):
        assert full_verdict().check("surface").score == 4.0
        assert full_verdict().check("assembly") is None

    @pytest.mark.parametrize(
        ("path", "value", "message"),
        [
            (("outcome",), "OK", "PASS, FAIL, UNSURE, ERROR"),
            (("outcome",), None, "PASS, FAIL, UNSURE, ERROR"),
            (("serial",), 5, "a text"),
            (("scan", "points"), -1, "at least 0"),
            (("scan", "points"), 1.5, "a whole number"),
            (("scan", "quality", "valid_share"), "0.6", "a number"),
            (("parts", 0, "probability"), 1.2, "0.0 to 1.0"),
            (("parts", 0, "size_mm"), [1, 2], "3 items"),
            (("surface", 0, "defect_class"), "Scratch!", "a class name"),
            (("grids", 0, "view"), "back", "front, side, top, photo"),
            (("grids", 0, "cells"), [[16, 0]], "cell outside the grid"),
            (("reasons", 0, "code"), "dent", "a code like EMPTY_SCENE"),
            (("simulated",), "yes", "true, false"),
            (("timings_ms",), [], "a table of keys and values"),
            (("colour",), "red", "unknown key"),
        ],
    )
    def test_a_malformed_dict_is_refused_with_its_path(self, path, value, message):
        data = json.loads(json.dumps(full_verdict().to_dict()))
        place = data
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        with pytest.raises(ContractError) as caught:
            Verdict.from_dict(data)
        assert message in str(caught.value)

    @pytest.mark.parametrize(
        "key", ["result_id", "outcome", "required", "checks", "scan", "serial"]
    )
    def test_a_missing_field_is_named(self, key):
        data = full_verdict().to_dict()
        del data[key]
        with pytest.raises(ContractError, match=rf"{key}: missing"):
            Verdict.from_dict(data)


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    file = resources.files("forge_station.contract") / "verdict.schema.json"
    schema = json.loads(file.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


class TestSchema:
    def test_accepts_a_full_and_a_minimal_verdict(self, validator):
        minimal = decide(
            required=["workpiece"],
            checks=[result("scan", ERROR, "NO_DATA")],
            scan=ScanSummary(0),
            result_id="1",
            serial="",
            product="P",
        )
        for verdict in (full_verdict(), minimal):
            validator.validate(json.loads(json.dumps(verdict.to_dict())))

    def test_describes_every_field_of_every_record(self, validator):
        schema = validator.schema
        data = full_verdict().to_dict()
        pairs = {
            "check": data["checks"][0],
            "reason": data["reasons"][0],
            "part": data["parts"][0],
            "surface": data["surface"][0],
            "grid": data["grids"][0],
            "scan": data["scan"],
            "model": data["model"],
            "certification": data["certification"],
        }
        assert set(schema["properties"]) == set(data)
        for name, fields in pairs.items():
            assert set(schema["$defs"][name]["properties"]) == set(fields), name

    @pytest.mark.parametrize(
        ("path", "value"),
        [
            (("outcome",), "OK"),
            (("scan", "points"), -1),
            (("parts", 0, "probability"), 2),
            (("surface", 0, "defect_class"), "Scratch!"),
            (("grids", 0, "cells"), [[16, 0]]),
            (("reasons", 0, "code"), "dent"),
            (("reasons",), []),
            (("schema",), "forge-station.verdict/2.0"),
        ],
    )
    def test_refuses(self, validator, path, value):
        data = json.loads(json.dumps(full_verdict().to_dict()))
        place = data
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        assert not validator.is_valid(data)

    def test_refuses_a_pass_with_reasons(self, validator):
        data = {**full_verdict().to_dict(), "outcome": "PASS"}
        assert not validator.is_valid(json.loads(json.dumps(data)))

    @pytest.mark.parametrize("key", ["outcome", "reasons", "parts", "surface", "grids", "scan"])
    def test_requires(self, validator, key):
        data = json.loads(json.dumps(full_verdict().to_dict()))
        del data[key]
        assert not validator.is_valid(data)


def test_published_reason_codes_are_well_formed():
    for code, text in REASONS.items():
        assert Reason(code, text).code == code
        assert text and not text.endswith(".")


def test_unpublished_reason_codes_are_found():
    assert unknown_reasons([Reason("EMPTY_SCENE", "x")]) == ()
    assert unknown_reasons([Reason("NEW_CODE", "x")])[0].path == "reason NEW_CODE"
