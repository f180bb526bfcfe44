"""The wheelhouse: the right tags are asked for, the hashes are right, and it installs offline."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """The smallest wheel of that name: one module, no requirements."""
    path = tmp_path / "forge_station-9.9.9-py3-none-any.whl"
    info = "forge_station-9.9.9.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("forge_station.py", "ANSWER = 42\n")
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: forge-station\n"
                      "Version: 9.9.9\nProvides-Extra: plc\n")  # fmt: skip
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\n"
                      "Root-Is-Purelib: true\nTag: py3-none-any\n")  # fmt: skip
        file.writestr(f"{info}/RECORD", "")
    return path


def run(repository: Path, *words: object, python: Path = Path(sys.executable), **env: str):
    return subprocess.run(
        ["bash", repository / "deploy/wheelhouse.sh", *map(str, words)],
        env={**os.environ, "PYTHON": str(python), "PIP_NO_INDEX": "1", **env},
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_every_wheel_has_its_hash_and_extras_and_the_folder_installs_offline(
    repository, wheel, tmp_path
):
    folder = tmp_path / "house"
    done = run(repository, "--wheel", wheel, "--extras", "plc", folder)
    assert done.returncode == 0, done.stderr
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    requirements = folder / "requirements.txt"
    assert requirements.read_text() == f"forge-station[plc]==9.9.9 --hash=sha256:{digest}\n"

    site = tmp_path / "site"
    install = [
        sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", folder,
        "--require-hashes", "--target", site, "-r", requirements,
    ]  # fmt: skip
    assert subprocess.run(install, timeout=60).returncode == 0
    assert (site / "forge_station.py").read_text() == "ANSWER = 42\n"

    with zipfile.ZipFile(folder / wheel.name, "a") as file:
        file.writestr("more.py", "print('tampered')\n")
    refused = subprocess.run([*install, "--upgrade"], capture_output=True, text=True, timeout=60)
    assert refused.returncode != 0 and "DO NOT MATCH THE HASHES" in refused.stderr


def test_another_target_is_asked_for_with_every_tag_that_would_do(repository, wheel, tmp_path):
    log, python = tmp_path / "pip.log", tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nif [ "$2" = pip ]; then shift 2; printf \'%s\\n\' "$@" > {log}; exit 0; fi\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    done = run(
        repository, "--wheel", wheel, "--python", "3.10", "--arch", "aarch64", "--glibc", "2.35",
        tmp_path / "house", python=python,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    asked = log.read_text().split()
    pairs = set(itertools.pairwise(asked))
    assert ("--python-version", "3.10") in pairs and ("--abi", "cp310") in pairs
    for number in range(17, 36):
        assert ("--platform", f"manylinux_2_{number}_aarch64") in pairs
    assert "manylinux_2_36_aarch64" not in asked and "manylinux1_x86_64" not in asked
    assert ("--only-binary", ":all:") in pairs


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "usage:"),
        (["--nonsense", "x"], "unknown option --nonsense"),
        (["one", "two"], "one DIR"),
        (["--wheel", "nowhere.whl", "house"], "no wheel nowhere.whl"),
    ],
)
def test_wrong_usage_is_told(repository, tmp_path, words, told):
    folder = {"house": str(tmp_path / "house")}
    done = run(repository, *(folder.get(word, word) for word in words))
    assert done.returncode == 64 and told in done.stderr


def test_a_folder_with_something_in_it_is_left_alone(repository, wheel, tmp_path):
    done = run(repository, "--wheel", wheel, tmp_path)
    assert done.returncode == 64 and "is not empty" in done.stderr
    assert not list(tmp_path.parent.glob(".wheelhouse-*"))
