"""A station file, and folders in memory: no test waits for a busy disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.mes.conftest import tmp_path

__all__ = ["station_file", "tmp_path"]


@pytest.fixture
def station_file(tmp_path: Path) -> Path:
    (tmp_path / "line.yaml").write_text(
        "line: l1\nproducts:\n"
        "  - {part_number: N, kind: batch, checks: [workpiece], parts: {hex_nut M8: 4}}\n"
    )
    content = {
        "line": "line.yaml",
        "bundle": "store",
        "scanner": {"driver": "sim"},
        "outbox": "outbox.sqlite",
        "evidence": "parts",
        "mqtt": {"line": "l1"},
        "release": {"keys": ["release.pub.pem"]},
    }
    file = tmp_path / "station.yaml"
    file.write_text(yaml.safe_dump(content))
    return file
