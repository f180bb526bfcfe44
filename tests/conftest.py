"""Fixtures of every test: where the repository is, and what the machine must have."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def mosquitto() -> str:
    """Path of the mosquitto broker. Without it the test is skipped, in CI it fails."""
    found = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")
    if found is None:
        message = "mosquitto is not installed (Debian: apt install mosquitto)"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return found
