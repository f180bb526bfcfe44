"""The wheel is what a station installs: it must be complete, and hold nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from the checkout without an index and without build isolation."""
    repository = Path(__file__).resolve().parents[2]
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (file,) = out.glob("*.whl")
    with zipfile.ZipFile(file) as opened:
        yield opened


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
    assert "forge-station = forge_station.cli:main" in wheel.read(entry_points).decode()
