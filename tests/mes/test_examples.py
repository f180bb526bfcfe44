"""The consumers that integrators start from, run as they would run them: against a real broker."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from forge_station.mes import interface, payloads
from forge_station.mes.command_store import CommandStore
from forge_station.mes.commands import CommandServer
from forge_station.mes.outbox import Outbox
from forge_station.mes.publisher import Publisher, Timing
from forge_station.mes.report import put_verdict
from forge_station.mes.topics import MqttConfig, topic_of
from tests.mes import golden, node_rig, signing_rig
from tests.mes.rig import MOSQUITTO, Mosquitto, verdict

EXAMPLES = Path(__file__).parents[2] / "examples" / "mes"
QUICK = Timing(reconnect_s=(0.05, 0.2), settle_s=0.0, no_consumer_s=(0.1, 0.2))
EVERY_CELL = [(row, column) for row in range(16) for column in range(16)]
needs_mosquitto = pytest.mark.skipif(MOSQUITTO is None, reason="no mosquitto on this machine")


@contextmanager
def started(*command: object) -> Iterator[subprocess.Popen[str]]:
    """A program with its output in pipes; killed at the end if it has not ended."""
    process = subprocess.Popen(
        [str(item) for item in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def station(tmp_path: Path) -> Iterator[tuple[MqttConfig, Outbox, Publisher]]:
    with Mosquitto(tmp_path) as broker, Outbox(tmp_path / "o.db", ballast_bytes=0) as outbox:
        config = MqttConfig(port=broker.port, keepalive_s=5)
        with Publisher(outbox, config, timing=QUICK) as publisher:
            yield config, outbox, publisher


def three(outbox: Outbox, config: MqttConfig) -> None:
    """PASS, FAIL with cells in the verdict, FAIL with its cells in the grid message."""
    put_verdict(outbox, config, verdict(result_id="r-1").to_dict())
    put_verdict(outbox, config, verdict(golden.BLOB, result_id="r-2").to_dict())
    put_verdict(outbox, config, verdict(EVERY_CELL, EVERY_CELL, result_id="r-3").to_dict())


@needs_mosquitto
def test_node_consumer_written_against_the_document_alone(
    station: tuple[MqttConfig, Outbox, Publisher], tmp_path: Path
) -> None:
    node = node_rig.require_packages()
    config, outbox, _ = station
    document = tmp_path / "interface.json"
    document.write_text(json.dumps(interface.asyncapi(config)))
    pictures = tmp_path / "pictures"
    program = node_rig.FOLDER / "consumer.mjs"
    with started(node, program, document, "--count", 3, "--out", pictures) as process:
        assert process.stderr is not None
        assert "is ONLINE" in process.stderr.readline()  # subscribed, and validated a message
        three(outbox, config)
        out, complaints = process.communicate(timeout=60)
    assert process.returncode == 0, complaints
    found = [json.loads(line) for line in out.splitlines()]
    assert [item["good"] for item in found] == [True, False, False]
    assert [item["cells"] for item in found] == [0, 6, 512]
    assert found[1]["reasons"] == ["SURFACE_DENT"]
    assert "INVALID" not in complaints
    drawn = "\n".join(line for line in complaints.splitlines() if set(line) <= set("#. "))
    assert drawn.count("#") == 6 + 512
    assert "...###.........." in drawn
    svg = (pictures / "r-2.svg").read_text()
    assert svg.count("#dc322f") == 6
    assert "0.5123 mm a cell" in svg


@needs_mosquitto
def test_node_consumer_refuses_what_breaks_the_schema_and_counts_what_is_missing(
    station: tuple[MqttConfig, Outbox, Publisher], tmp_path: Path
) -> None:
    node = node_rig.require_packages()
    config, _, publisher = station
    document = tmp_path / "interface.json"
    document.write_text(json.dumps(interface.asyncapi(config)))
    good = golden.read()["verdict"]
    later = {**good, "id": "r-9", "resultId": "r-9", "seq": 1050, "streamSeq": 980}
    bad = {**good, "id": "r-8", "verdict": "OK"}
    with started(node, node_rig.FOLDER / "consumer.mjs", document, "--count", 2) as process:
        assert process.stderr is not None
        process.stderr.readline()
        for message in (bad, good, good, later):  # wrong, new, a repeat, a hole before it
            publisher.set_retained(topic_of(config, "verdict"), payloads.encode(message))
            time.sleep(0.2)
        out, complaints = process.communicate(timeout=60)
    assert [json.loads(line)["seq"] for line in out.splitlines()] == [1042, 1050]
    assert complaints.count("INVALID") == 1
    assert "GAP verdict 978 to 979" in complaints


@needs_mosquitto
def test_python_consumer_stores_each_verdict_once(
    station: tuple[MqttConfig, Outbox, Publisher], tmp_path: Path
) -> None:
    config, outbox, publisher = station
    program = EXAMPLES / "python" / "store_verdicts.py"
    arguments = [config.root, tmp_path / "verdicts.db", "--port", config.port]
    with started(sys.executable, program, *arguments, "--count", 3) as process:
        assert process.stderr is not None
        assert "connected" in process.stderr.readline()
        three(outbox, config)
        out, _ = process.communicate(timeout=30)
    assert [line.split()[0] for line in out.splitlines()] == ["PASS", "FAIL", "FAIL"]
    assert publisher.drain(5.0)
    put_verdict(outbox, config, verdict(result_id="r-4").to_dict())  # while it is away
    first = outbox.span()[0]
    publisher.replay(from_seq=first, to_seq=outbox.span()[1] - 1, epoch=outbox.epoch)  # repeats
    with started(sys.executable, program, *arguments, "--count", 1) as process:
        out, _ = process.communicate(timeout=30)
    assert out.splitlines() == ["PASS    part 000123  #4"]


ARGS = {"name": "d\u00e9fect \u20ac", "value": 0.45000000000000001}
"""Not ASCII, and a number that every language must write the same way before it signs."""


@needs_mosquitto
@pytest.mark.parametrize("language", ["python", "node"])
def test_command_signed_without_anything_of_ours_is_carried_out(
    station: tuple[MqttConfig, Outbox, Publisher], tmp_path: Path, language: str
) -> None:
    pytest.importorskip("rfc8785", reason="commands need the extra commands")
    config, outbox, publisher = station
    key = tmp_path / "mes.pem"
    key.write_bytes(
        signing_rig.KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    if language == "node":
        program: list[object] = [node_rig.require_packages(), node_rig.FOLDER / "command.mjs"]
        broker = ["--url", f"mqtt://127.0.0.1:{config.port}"]
    else:
        program = [sys.executable, EXAMPLES / "python" / "send_command.py"]
        broker = ["--port", str(config.port)]
    asked = ["setThreshold", "--args", json.dumps(ARGS), "--key", key, *broker]
    done: list[Any] = []

    def handler(args: Any) -> Any:
        done.append(args)
        return {"value": args["value"]}

    settings = signing_rig.settings()
    handlers: dict[str, Callable[..., Any]] = {"setThreshold": handler}
    with (
        CommandStore(tmp_path / "c.db") as store,
        CommandServer(config, settings, handlers, publisher, outbox, store),
        started(*program, config.root, *asked) as process,
    ):
        out, complaints = process.communicate(timeout=40)
    assert process.returncode == 0, complaints + out
    assert json.loads(out)["result"] == {"value": 0.45}
    assert done == [ARGS]


FLOW: list[dict[str, Any]] = json.loads((EXAMPLES / "node-red" / "flow.json").read_text())


def test_flow_is_wired_and_uses_core_nodes_only() -> None:
    known = {item["id"]: item for item in FLOW}
    assert len(known) == len(FLOW)
    core = {"tab", "mqtt in", "mqtt-broker", "function", "switch", "debug"}
    assert {item["type"] for item in FLOW} <= core
    for item in FLOW:
        assert item.get("z", "forge.tab") in known
        for output in item.get("wires", ()):
            assert set(output) <= set(known)
        if item["type"] == "mqtt in":
            assert known[item["broker"]]["protocolVersion"] == "5"
            kind = item["topic"].rsplit("/", 1)[-1]
            assert item["topic"] == topic_of(MqttConfig(root_template="X/{station}"), kind).replace(
                "X/station", "+/+/+/+/+"
            )
        if item["type"] == "function":
            assert item["outputs"] == len(item["wires"])


def flow_output(node: str, *messages: object) -> Any:
    if node_rig.NODE is None:
        pytest.skip("no Node.js on this machine (apt-get install nodejs)")
    done = subprocess.run(
        [node_rig.NODE, Path(__file__).with_name("run_flow.mjs")],
        input=json.dumps({"flow": FLOW, "node": node, "messages": messages}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_flow_takes_each_message_once_and_tells_of_holes() -> None:
    good = golden.read()["verdict"]
    later = {**good, "id": "r-9", "streamSeq": 980, "verdict": "PASS"}
    first, repeat, third = flow_output("forge.once", good, good, later)
    assert first[0]["good"] is False
    assert first[1] is None
    assert repeat is None
    assert third[0]["good"] is True
    assert (third[1]["payload"]["first"], third[1]["payload"]["last"]) == (978, 979)


def test_flow_draws_the_grid() -> None:
    (found,) = flow_output("forge.grid", golden.read()["verdict"])
    lines = found["payload"].splitlines()
    assert lines[0] == "A front"
    assert lines[7] == lines[8] == "...###.........."
    assert found["payload"].count("#") == 8
