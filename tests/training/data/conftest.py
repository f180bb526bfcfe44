"""A run of `training.load` in one call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.training.data.pictures import Run
from training import load


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `training.load`; the JSON of its last line, or {"code", "error"} when it refuses."""

    def call(*words: object, out: bool = True) -> dict:
        target = ["--out", tmp_path / "out"] if out else []
        code = load.main([str(word) for word in (*words, *target, "--quiet")])
        said = capsys.readouterr()
        if code == 2:
            return {"code": code, "error": said.err}
        lines = said.out.strip().split("\n")
        return {"code": code, "lines": lines[:-1], **json.loads(lines[-1])}

    return call
