"""Folders of the MES tests: in memory where there is one, so that no test waits for a busy disk.

What the tests hold against kill -9 does not depend on the disk; only a power cut does.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

IN_MEMORY = Path("/dev/shm")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In place of pytest's own: it is gone after the test."""
    usable = IN_MEMORY.is_dir() and os.access(IN_MEMORY, os.W_OK)
    with tempfile.TemporaryDirectory(
        prefix="forge-mes-", dir=IN_MEMORY if usable else None
    ) as folder:
        yield Path(folder)
