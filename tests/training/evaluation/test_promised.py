"""From which size on a defect counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge_station.errors import InputError
from training.evaluation import promised
from training.evaluation.rows import Row


def row(defect: str | None, mm: float | None = None, px: float | None = None) -> Row:
    return Row(
        "one", "surface", "", "FAIL", defect_true=defect, defect_size_mm=mm, defect_size_px=px
    )


def test_plain_sizes_are_millimetres(tmp_path: Path) -> None:
    path = tmp_path / "promised.json"
    path.write_text(json.dumps({"crack": 2.0}))
    read = promised.read(path)
    assert read.unit == "mm"
    covered = [row("crack", 2.0), row("dent", 0.1), row("normal"), row(None)]
    assert all(map(read.covers, covered))
    assert not any(map(read.covers, [row("crack", 1.9, 99.0), row("crack")]))


def test_the_file_of_pod_names_its_unit(tmp_path: Path) -> None:
    path = tmp_path / "pod_px.json"
    curves = {"crack": {"a90": 5.0, "a90_95": 8.0}, "dent": 12, "all": {"a90_95": 1.0}}
    path.write_text(json.dumps({"unit": "px", "curves": curves}))
    read = promised.read(path)
    assert (read.unit, dict(read.sizes)) == ("px", {"crack": 8.0, "dent": 12.0})
    assert read.covers(row("crack", 0.1, 8.0)) and not read.covers(row("dent", 9.0, 11.9))


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"crack": "large"}', '{"curves": {"crack": {"a90_95": null}}}', '{"curves": 3}'],
)
def test_a_file_without_sizes_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "promised.json"
    path.write_text(text)
    with pytest.raises(InputError, match="promised sizes cannot be read"):
        promised.read(path)
