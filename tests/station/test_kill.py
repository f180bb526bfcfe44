"""kill -9 of broker and station in the middle of a demo: every inspected part arrives."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from forge_station.config import load_station
from forge_station.mes.listen import Listener, Received
from tests.mes.rig import Mosquitto


@pytest.fixture
def station_file(repository: Path, tmp_path: Path) -> Path:
    demo = repository / "station_config" / "demo"
    content = yaml.safe_load((demo / "station.yaml").read_text())
    content |= {
        "line": str(demo / "line.yaml"),
        "bundle": str(demo / "bundle"),
        "broker": "external",
        "outbox": str(tmp_path / "outbox.sqlite"),
        "evidence": str(tmp_path / "parts"),
        "trusted_keys": [str(demo / "certificate_key.pem")],
    }
    content["scanner"] |= {"image_size": [320, 240], "poses": "front_side", "exposures": [1.0]}
    content["runtime"] = {"threads": 1}
    content["mqtt"] |= {"port": 1, "keepalive_s": 2}
    file = tmp_path / "station.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def parts_of(process: subprocess.Popen[str]) -> Iterator[str]:
    """Serial numbers as the demo prints them."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("station-1-"):
            yield line.split()[0]


def start(station_file: Path, repository: Path, parts: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable, "-m", "forge_station.cli", "demo",
            "--station", str(station_file), "--parts", str(parts),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(repository / "edge"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
def test_every_inspected_part_arrives_though_broker_and_station_are_killed(
    mosquitto: str, repository: Path, station_file: Path, tmp_path: Path
) -> None:
    with Mosquitto(tmp_path) as broker:
        content = yaml.safe_load(station_file.read_text())
        content["mqtt"]["port"] = broker.port
        station_file.write_text(yaml.safe_dump(content))
        config = load_station(station_file)
        received: list[Received] = []
        stop = threading.Event()

        def collect(listener: Listener) -> None:
            while not stop.is_set():
                if (message := listener.next(0.2)) is not None:
                    received.append(message)

        with Listener(config.mqtt, client_id="mes", statuses=False, repeats=True) as listener:
            thread = threading.Thread(target=collect, args=(listener,))
            thread.start()
            serials = []
            with start(station_file, repository, 20) as first:
                for serial in parts_of(first):
                    serials.append(serial)
                    if len(serials) == 2:
                        broker.close()
                    if len(serials) == 3:
                        broker.start()
                    if len(serials) == 4:
                        first.send_signal(signal.SIGKILL)
                        break
            with start(station_file, repository, 2) as second:
                again, _ = second.communicate(timeout=90)
            assert second.returncode == 0, again
            stop.set()
            thread.join()

    summary = json.loads(again.splitlines()[-1])
    assert summary["parts"] == 2
    with sqlite3.connect(config.outbox) as database:
        rows = database.execute("select id, body from outbox where stream = 'verdict'").fetchall()
    committed = {row[0]: json.loads(row[1])["partId"] for row in rows}
    assert set(serials) <= set(committed.values())
    arrived = [item.message for item in received if item.kind == "verdict"]
    assert {message["id"] for message in arrived} == set(committed)
    by_part: dict[str, set[str]] = {}
    for message in arrived:
        by_part.setdefault(message["partId"], set()).add(message["id"])
    assert all(len(ids) == 1 for ids in by_part.values()), "a duplicate has another id"
    assert len(by_part) == len(committed)
