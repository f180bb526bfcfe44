"""A station with a scan head on a line: its camera is pulled and comes back, the station stays."""

from __future__ import annotations

import os
import queue
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from forge_station.capture import patterns, replay
from forge_station.capture.base import PatternStack, Scanner
from forge_station.capture.calibration import Calibration, Optics, PatternSpec
from forge_station.capture.lifecycle import State
from forge_station.capture.supervisor import Change
from forge_station.config import HeadScanner, load_station
from forge_station.line import Heads, open_line

WAIT_S = 90.0


@pytest.fixture
def station_file(repository: Path, tmp_path: Path) -> Path:
    """The demo's bundle and line, with a head whose camera replays a blank board."""
    matrix = np.array([[50.0, 0, 15.5], [0, 50, 11.5], [0, 0, 1]])
    pose = np.diag([1.0, -1.0, -1.0, 1.0])
    pose[2, 3] = 300.0
    optics, spec = Optics((32, 24), matrix), PatternSpec(column_bits=2, steps=3)
    known = Calibration("front", optics, optics, np.eye(4), pose, spec)
    images = patterns.images(spec, (32, 24)) // 2
    images += np.random.default_rng(1).integers(0, 3, images.shape, np.uint8)
    stack = PatternStack(images[None], (1.0,), spec, known.digest, "front")
    replay.write(tmp_path / "scan", [stack], {known.digest: known})
    demo = repository / "station_config" / "demo"
    content = yaml.safe_load((demo / "station.yaml").read_text())
    content |= {
        "line": str(demo / "line.yaml"),
        "bundle": str(demo / "bundle"),
        "broker": "none",
        "outbox": str(tmp_path / "outbox.sqlite"),
        "evidence": str(tmp_path / "parts"),
        "trusted_keys": [str(demo / "certificate_key.pem")],
        "trigger": {"source": "stdin"},
        "runtime": {"threads": 1},
    }
    content["scanner"] = {
        "driver": "head",
        "heads": [
            {
                "name": "front",
                "camera": {
                    "driver": "replay",
                    "address": str(tmp_path / "scan"),
                    "open_timeout_s": 60,
                    "options": {"unplug_file": str(tmp_path / "unplugged")},
                },
                "projector": {"driver": "sim", "settle_frames": 0},
                "calibration": str(tmp_path / "scan" / "front" / "calibration.yaml"),
                "frame_timeout_s": 30,
                "recover_s": 0,
            }
        ],
    }
    file = tmp_path / "station.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def test_the_heads_of_the_station_file_are_opened_and_watched(station_file: Path) -> None:
    config = load_station(station_file)
    changes: list[Change] = []
    line = open_line(config, changes.append)
    assert isinstance(line, Heads)
    (trigger,) = line.triggers(1, first=7)
    assert trigger.serial.endswith("-000007")
    scanner = line.scanner_of(trigger)
    try:
        assert isinstance(scanner, Scanner) and scanner is line.scanner_of(trigger)
        line.warm_up()
        assert line.camera.describe().driver == "replay"
        (stack,) = scanner.capture(trigger)
        assert stack.meta["serial"] == trigger.serial
    finally:
        scanner.close()
    assert changes[-1].state is State.CLOSED


def test_a_head_that_sees_simulated_parts_says_so_to_mes(station_file: Path) -> None:
    assert not load_station(station_file).simulated
    content = yaml.safe_load(station_file.read_text())
    content["scanner"]["heads"][0]["camera"] = {"driver": "sim", "address": "projector"}
    station_file.write_text(yaml.safe_dump(content))
    assert load_station(station_file).simulated


def test_the_practice_station_of_the_document_is_read(repository: Path, tmp_path: Path) -> None:
    text = (repository / "docs" / "CAMERAS.md").read_text(encoding="utf-8")
    found = text.split("# /tmp/practice/station.yaml\n")[1].split("```")[0]
    file = tmp_path / "station.yaml"
    file.write_text(found.replace("/path/to/", f"{repository}/"))
    config = load_station(file)
    assert isinstance(config.scanner, HeadScanner)
    (head,) = config.scanner.heads
    assert head.camera.driver == "sim" and head.camera.address == head.projector.address
    assert head.calibration == tmp_path / "sim.yaml"


class Run:
    """`forge-station run`, and what it prints as it comes."""

    def __init__(self, station_file: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "forge_station.cli", "run", "--station", str(station_file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )
        self.lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)

    def close(self) -> None:
        """Also when the test failed."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stdin.close()
        self.process.stdout.close()

    def part(self, serial: str, product: str) -> str:
        """Send a trigger; returns the line of its verdict."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{serial} {product}\n")
        self.process.stdin.flush()
        return self.until(serial)

    def until(self, text: str) -> str:
        """The next line with the text."""
        while True:
            line = self.lines.get(timeout=WAIT_S)
            if text in line:
                return line


@pytest.fixture
def run(station_file: Path) -> Iterator[Run]:
    running = Run(station_file)
    yield running
    running.close()


@pytest.mark.timeout(400)
def test_a_pulled_camera_is_told_at_once_and_parts_go_on_when_it_is_back(
    run: Run, station_file: Path
) -> None:
    product = load_station(station_file).line.products[0].part_number
    run.until("camera front is there")
    run.until("ready")
    assert "CAMERA_LOST" not in run.part("A1", product)
    (station_file.parent / "unplugged").touch()
    assert "unplugged" in run.until("camera front is lost")
    verdict = run.part("A2", product)
    assert "ERROR" in verdict and "CAMERA_" in verdict  # lost, or not found by the next try
    (station_file.parent / "unplugged").unlink()
    run.until("camera front is there")
    assert "CAMERA_" not in run.part("A3", product)
    assert run.process.stdin is not None
    run.process.stdin.close()
    assert run.process.wait(WAIT_S) == 0
    with sqlite3.connect(station_file.parent / "outbox.sqlite") as outbox:
        alarms = [
            bytes(row[0]).decode()
            for row in outbox.execute("select body from outbox where stream = 'alarm'")
        ]
    outbox.close()
    assert sum("CAMERA_LOST" in alarm for alarm in alarms) == 2, "raised once, cleared once"
