"""Node.js and the packages of examples/mes/node, where this machine can have them."""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "mes" / "node"
NODE, NPM = shutil.which("node"), shutil.which("npm")


@cache
def why_not() -> str | None:
    """Why its packages cannot be had; None: they are installed now."""
    if NODE is None or NPM is None:
        return "no Node.js on this machine (apt-get install nodejs npm)"
    wanted = json.loads((FOLDER / "package.json").read_text())
    pins = {**wanted["dependencies"], **wanted["devDependencies"]}
    if all(_installed(name) == version for name, version in pins.items()):
        return None
    done = subprocess.run(
        [NPM, "install", "--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts"],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    if done.returncode:
        return f"npm install does not work here: {done.stderr.strip()[-300:]}"
    return None


def require_packages() -> str:
    """The path of node. Skips the test where node or its packages cannot be had."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    assert NODE
    return NODE


def _installed(name: str) -> str | None:
    file = FOLDER / "node_modules" / name / "package.json"
    return str(json.loads(file.read_text())["version"]) if file.exists() else None
