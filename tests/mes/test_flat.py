"""Fields of a verdict under names of the site's choice."""

from __future__ import annotations

import pytest

from forge_station.mes import flat, payloads
from tests.mes.rig import verdict

FAILED = payloads.verdict_body(verdict(front=[(4, 5), (4, 6)]).to_dict(), "e/s/a/l/st")
PASSED = payloads.verdict_body({**verdict().to_dict(), "grids": [], "reasons": []}, "e/s/a/l/st")


@pytest.mark.parametrize(
    ("path", "kind", "failed", "passed"),
    [
        ("partId", "string", "000123", "000123"),
        ("verdict", "string", "FAIL", "PASS"),
        ("reasons.0.code", "string", "SURFACE_DENT", None),
        ("parts.0.sizeMm.1", "number", 13.02, 13.02),
        ("checks.surface", "string", "FAIL", "PASS"),
        ("model.releaseCounter", "integer", 3, 3),
        ("isSimulated", "boolean", True, True),
        ("timings.totalMs", "number", 700.2, 700.2),
        ("orderId", "string", None, None),
        ("cells", "integer", 2, None),
    ],
)
def test_value_and_its_type(path: str, kind: str, failed: object, passed: object) -> None:
    assert flat.kind(path) == kind
    assert flat.value(FAILED, path) == failed
    assert flat.value(PASSED, path) == passed


def test_every_name_is_there_each_time() -> None:
    fields = {"Serial": "partId", "Why": "reasons.0.code"}
    assert flat.values(PASSED, fields) == {"Serial": "000123", "Why": None}


@pytest.mark.parametrize(
    ("found", "text"), [(True, "true"), (None, ""), (13.02, "13.02"), ("FAIL", "FAIL"), (2, "2")]
)
def test_bare_text_of_a_value(found: flat.Scalar, text: str) -> None:
    assert flat.text(found) == text
