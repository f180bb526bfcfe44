"""The wheel is what a station installs: it must be complete, hold nothing else, and run alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

from forge_station.capture import replay
from forge_station.capture.base import Trigger


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the checkout without an index and without build isolation."""
    repository = Path(__file__).resolve().parents[2]
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (file,) = out.glob("*.whl")
    return file


@pytest.fixture
def wheel(wheel_file: Path) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(wheel_file) as opened:
        yield opened


@pytest.fixture(scope="module")
def installed(wheel_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that holds the wheel, what it requires, and nothing else."""
    folder = tmp_path_factory.mktemp("station")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel_file) as opened:
        opened.extractall(site)
        (name,) = [item for item in opened.namelist() if item.endswith(".dist-info/METADATA")]
        lines = opened.read(name).decode().splitlines()
    wanted = [line.split(": ", 1)[1] for line in lines if line.startswith("Requires-Dist: ")]
    linked: set[str] = set()
    while wanted:
        requirement = Requirement(wanted.pop())
        needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if not needed or requirement.name in linked:
            continue
        linked.add(requirement.name)
        found = metadata.distribution(requirement.name)
        wanted += found.requires or []
        for top in {path.parts[0] for path in found.files or [] if path.parts[0] != ".."}:
            if not (site / top).exists():
                (site / top).symlink_to(found.locate_file(top))
    return folder / "bin/python"


def station(python: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`forge-station ...` as a new user has it: no checkout near, no compiler, no PYTHONPATH."""
    return subprocess.run(
        [python, "-I", "-m", "forge_station.cli", *arguments],
        cwd=folder,
        env={"PATH": "/nonexistent", "HOME": str(folder), "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_has_every_module_and_every_schema(wheel, repository):
    root = repository / "edge"
    expected = {
        path.relative_to(root).as_posix()
        for path in (root / "forge_station").rglob("*")
        if path.suffix in (".py", ".json")
    }
    assert expected <= set(wheel.namelist())
    assert any(name.endswith("verdict.schema.json") for name in expected)


def test_has_no_other_top_level_package(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"forge_station"}


def test_the_station_requires_no_training_framework(wheel):
    (metadata,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    lines = wheel.read(metadata).decode().splitlines()
    required = [line.split(": ")[1] for line in lines if line.startswith("Requires-Dist: ")]
    base = {re.split(r"[<>=;, ]", line)[0] for line in required if "extra ==" not in line}
    assert base == {
        "cryptography", "numpy", "onnxruntime", "opencv-python-headless", "paho-mqtt", "pyyaml",
        "tokenizers",
    }  # fmt: skip
    demo = [line for line in required if "extra == 'demo'" in line]
    assert demo and not any(line.startswith(("torch", "transformers")) for line in demo)


def test_names_the_command(wheel):
    (entry_points,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "forge-station = forge_station.__main__:main" in wheel.read(entry_points).decode()


def test_the_demo_station_comes_along_byte_for_byte(wheel, repository):
    folder = repository / "station_config/demo"
    expected = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    prefix = "forge_station/demo_station/"
    found = {
        name.removeprefix(prefix): wheel.read(name)
        for name in wheel.namelist()
        if name.startswith(prefix)
    }
    assert found == expected and "bundle/manifest.json" in found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_wheel_alone_checks_itself_inspects_a_recorded_scan_and_replays_it(installed, tmp_path):
    pytest.importorskip("numba", reason="the simulator needs the extra demo")
    recorded_scan(tmp_path / "scan")
    helped = station(installed, tmp_path, "demo", "--help")
    assert helped.returncode == 0 and "--unpack" in helped.stdout, helped.stderr
    assert station(installed, tmp_path, "demo", "--unpack").returncode == 0
    again = station(installed, tmp_path, "demo", "--unpack")
    assert again.returncode == 64 and "is not empty" in again.stderr
    refused = station(installed, tmp_path, "demo", "--parts", "1")
    assert "forge-station[demo]" in refused.stderr, "says which extra is missing"

    file = tmp_path / "station_config/demo/station.yaml"
    text = re.sub(r"scanner:\n(  .*\n)+", REPLAYED, file.read_text())
    file.write_text(text.replace("broker: embedded", "broker: none"))
    doctor = station(installed, tmp_path, "doctor", "--station", str(file), "--json")
    lines = {item["topic"]: item for item in json.loads(doctor.stdout)["lines"]}
    assert lines["bundle"]["level"] == lines["provider"]["level"] == "pass", doctor.stdout
    bundle, key = file.with_name("bundle"), file.with_name("certificate_key.pem")
    verify = ["bundle", "verify", str(bundle), "--public", str(key), "--self-test"]
    verified = station(installed, tmp_path, *verify)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "golden parts, 0 differences" in verified.stdout

    inspected = station(installed, tmp_path, "demo", "--parts", "1")
    assert inspected.returncode == 0, inspected.stderr
    summary = json.loads(inspected.stdout.splitlines()[-1])
    # Five right nuts; a recorded scan is not what the demo's certificate was made on.
    assert summary["outcomes"]["UNSURE"] == 1, inspected.stdout
    assert "UNSURE NOT_COVERED\n" in inspected.stdout
    replayed = station(installed, tmp_path, "replay", "--last", "1")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


REPLAYED = "scanner: {driver: replay, folder: ../../scan}\n"


def recorded_scan(folder: Path) -> Path:
    """Five right nuts under the simulated head, written as a recording."""
    from forge_station import demo_files
    from forge_station import line as lines
    from forge_station.config import load_station
    from forge_station.sim import trays

    config = load_station(demo_files.source() / "station.yaml")
    product = config.line.product("NUT-M8-5")
    line = lines.open_line(config)
    line.trays["1"] = trays.make(product, np.random.default_rng(3), wrong=False)
    trigger = Trigger("1", product.part_number)
    scanner = line.scanner_of(trigger)
    replay.write(folder, scanner.capture(trigger), scanner.calibrations)
    return folder
