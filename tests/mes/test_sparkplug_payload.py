"""What the Sparkplug mirror writes: every type over the wire, and read by a decoder of others."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.protobuf", reason="the mirror needs the extra sparkplug")

from forge_station.errors import InputError
from forge_station.mes.sparkplug_node import ALIASES, Node, result_of
from forge_station.mes.sparkplug_payload import DataSet, DataType, Metric, Payload, decode, encode
from tests.mes.rig import verdict

NAMES = {alias: name for name, alias in ALIASES.items()}


# The encoder


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (DataType.INT32, -5), (DataType.INT32, 2**31 - 1), (DataType.INT64, -(2**63)),
        (DataType.UINT64, 2**64 - 1), (DataType.DOUBLE, 0.1), (DataType.FLOAT, 0.5),
        (DataType.BOOLEAN, False), (DataType.STRING, "Prüfling"), (DataType.STRING, ""),
        (DataType.BYTES, b"\x00\xff"), (DataType.DATETIME, 1_796_000_000_000), (DataType.INT32, 0),
        (DataType.STRING, None),
        (DataType.DATASET, DataSet(("a", "b"), (DataType.STRING, DataType.INT32),
                                   (("x", -1), ("y", 2)))),
        (DataType.DATASET, DataSet(("a",), (DataType.STRING,))),
    ],
)  # fmt: skip
def test_values_survive_the_wire(kind: DataType, value: Any) -> None:
    metric = Metric("m", value, kind, 1, 2, True, {"engUnit": "mm", "Quality": 192})
    assert decode(encode(Payload((metric,), 3, 255))) == Payload((metric,), 3, 255)


def test_bytes_on_the_wire_are_those_of_the_specification() -> None:
    """Field numbers and wire types, written out by hand."""
    metric = Metric("a", 7, DataType.INT64, 5, 1, properties={})
    body = encode(Payload((metric,), 3, 2))
    assert body.hex() == "0803" + "120b" + "0a0161" + "1001" + "1805" + "2004" + "5807" + "1802"


@pytest.mark.parametrize(
    "body",
    [b"\xff\xff", b"\x12\x05ab", b"\x08", b"\x12\x03\x0a\x01\xff",
     bytes.fromhex("12078a0104080118fa0b")],
)  # fmt: skip
def test_bytes_that_are_no_payload(body: bytes) -> None:
    with pytest.raises(InputError, match="not a Sparkplug B payload"):
        decode(body)


def test_a_metric_that_the_birth_does_not_have_is_a_mistake_of_the_programmer() -> None:
    with pytest.raises(KeyError):
        Node("g", "n", 0, {"Verdict/Colour": "red"})


# A decoder that others wrote


DECODER = """
const sparkplug = require('sparkplug-payload').get('spBv1.0');
for (const line of require('fs').readFileSync(0, 'utf8').trim().split('\\n')) {
  const found = sparkplug.decodePayload(Buffer.from(line, 'base64'));
  console.log(JSON.stringify(found, (_, v) => typeof v === 'bigint' ? Number(v) :
    v && v.low !== undefined && v.high !== undefined ? v.high * 4294967296 + (v.low >>> 0) : v));
}
"""


@pytest.fixture(scope="module")
def npm_package(request: pytest.FixtureRequest) -> Path:
    """Where sparkplug-payload is installed; once, in pytest's own cache."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("no node and npm here")
    assert request.config.cache is not None
    folder = Path(request.config.cache.mkdir("sparkplug-payload"))
    if not (folder / "node_modules" / ".package-lock.json").exists():  # npm's last word
        got = subprocess.run(
            ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", folder,
             "sparkplug-payload@1.0.3"],
            cwd=folder, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        if got.returncode:
            pytest.skip(f"npm cannot get sparkplug-payload: {got.stderr.strip()[-200:]}")
    return folder


def test_the_npm_package_decodes_births_and_data(npm_package: Path) -> None:
    """Its decoder takes the type of a value from the same message: `sparkplug.datatypes`."""
    node = Node("plant", "s1", 200, {"Model/Name": "nano", "Counters/Total": 3}, types=True)
    birth = node.birth()
    result = result_of(verdict(front=[(4, 5), (0, 0)], result_id="r1").to_dict())
    data = node.data(node.update(result.values, result.timestamp))
    lines = [base64.b64encode(body).decode() for body in (birth, data, node.history(result))]
    got = subprocess.run(
        ["node", "-e", DECODER], cwd=npm_package, input="\n".join(lines),
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    born, live, old = map(json.loads, got.stdout.splitlines())
    values = {item["name"]: item for item in born["metrics"]}
    assert born["seq"] == 0 and values["bdSeq"]["value"] == 200
    assert values["bdSeq"]["type"] == "Int64" and values["Node Control/Rebirth"]["value"] is False
    assert values["Model/Name"]["value"] == "nano" and values["Counters/Total"]["value"] == 3
    assert values["Verdict/Code"]["value"] is None and values["Verdict/Grids"]["type"] == "DataSet"
    assert values["Verdict/Duration"]["properties"]["engUnit"]["value"] == "ms"
    assert (live["seq"], old["seq"]) == (1, 2)
    told = {NAMES[item["alias"]]: item["value"] for item in live["metrics"]}
    assert told["Verdict/Code"] == "FAIL" and told["Verdict/Defective Cells"] == 2
    assert told["Verdict/Grids"]["rows"] == [["A", "front", "r1: 1; r5: 6"]]
    assert set(told) == {name for name, value in result.values.items() if value is not None}
    assert all(item.get("isHistorical") for item in old["metrics"])
