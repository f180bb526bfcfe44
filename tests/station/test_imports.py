"""Import rules that the station's size and safety rest on."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

BLOCKED = ("torch", "transformers", "optimum", "trl", "peft", "export", "training")
IMPORT_ALL = """
import importlib, importlib.abc, pkgutil, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Block())
try:
    import torch
except ImportError as error:
    assert str(error) == "blocked: torch"
else:
    raise SystemExit("the block does not work")
import forge_station
names = [item.name for item in pkgutil.walk_packages(forge_station.__path__, "forge_station.")]
for name in names:
    importlib.import_module(name)
assert not set({blocked!r}) & set(sys.modules)
print(len(names))
"""


def modules(repository: Path) -> list[Path]:
    return sorted((repository / "edge/forge_station").rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Top-level names of everything the file imports, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def test_every_module_imports_without_training_frameworks(repository):
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL.format(blocked=BLOCKED)],
        capture_output=True,
        text=True,
        timeout=110,
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(repository / "edge")},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(modules(repository)) - 1  # all but the top package itself


def test_no_module_names_a_training_framework(repository):
    for path in modules(repository):
        assert not imported(path) & set(BLOCKED), path


def test_the_contract_imports_the_standard_library_and_numpy_only(repository):
    allowed = set(sys.stdlib_module_names) | {"numpy", "forge_station"}
    for path in modules(repository):
        if path.parent.name == "contract":
            assert imported(path) <= allowed, path
            source = path.read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                    "forge_station"
                ):
                    assert node.module.startswith("forge_station.contract"), path


def test_the_contract_does_no_io(repository):
    for path in modules(repository):
        if path.parent.name == "contract":
            names = {
                node.id
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Name)
            }
            assert not names & {"open", "print", "input", "exec", "eval"}, path
            assert not imported(path) & {"os", "pathlib", "io", "socket", "subprocess"}, path


COMMANDS = {"calibrate_command.py", "calibrate_poses.py", "capture_command.py"}
"""They read and write pictures."""


@pytest.mark.parametrize(
    ("package", "home"),
    [
        ("onnxruntime", {"vlm", "doctor"}),
        ("tokenizers", {"vlm"}),
        ("paho", {"mes", "doctor"}),
        ("iotcore", {"mes"}),
        ("numba", {"sim"}),
        ("scipy", {"sim"}),
        ("cv2", {"capture", "geometry", "hmi", "sim", "mes", *COMMANDS}),
        ("starlette", {"hmi"}),
        ("uvicorn", {"hmi"}),
        ("pymodbus", {"triggers"}),
        ("cryptography", {"signing.py", "private_key.py", "bundle_command.py", "mes"}),
    ],
)
def test_a_third_party_package_is_imported_in_its_home_only(repository, package, home):
    root = repository / "edge/forge_station"
    users = {path.relative_to(root) for path in modules(repository) if package in imported(path)}
    assert users, f"nothing imports {package}: is it still a dependency?"
    assert {path.parts[0] for path in users} <= home
    if package in ("onnxruntime", "paho", "iotcore", "tokenizers"):
        assert len(users) <= 5
