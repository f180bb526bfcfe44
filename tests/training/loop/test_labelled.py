"""Labels and evidence -> pictures to learn from: what each label teaches, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_station import evidence as station
from forge_station.contract.verdict import (
    CheckResult,
    ModelUsed,
    Outcome,
    PartReading,
    Reason,
    ScanSummary,
    decide,
)
from forge_station.contract.views import NANO_LAYOUT, VIEWS
from forge_station.geometry.sheet import Sheet
from forge_station.geometry.surface import CloserLook
from forge_station.pipeline import Inspection
from training.data import shards
from training.data.loaders.sample import LoadError
from training.loop import labelled
from training.loop.error import LineError

MODEL = "a" * 64


def store(
    folder: Path,
    name: str,
    *,
    layout: tuple[int, int] = NANO_LAYOUT.surface_size,
    failed: bool = False,
) -> None:
    """What a station keeps of a pin that it looked at twice."""
    reasons = (Reason("SURFACE_DENT", "A: a dent", "A"),) if failed else ()
    found_out = CheckResult("surface", Outcome.FAIL if failed else Outcome.PASS, reasons)
    picture = np.full((*layout, 3), (200, 30, 90), np.uint8)
    verdict = decide(
        required=("surface",),
        checks=[CheckResult("scan", Outcome.PASS), found_out],
        scan=ScanSummary(points=60_000),
        result_id=f"r-{name}",
        serial=name,
        serial_source="scanner",
        product="P",
        parts=(PartReading("A", "pin", "3x12", 0.97, size_mm=(12.0, 3.0, 3.0)),),
        model=ModelUsed("m", "1", 1, MODEL, "fp32", "CPU"),
    )
    near = CloserLook(Sheet(picture // 2, 0.1), {"front": (4, 4), "side": (0, 8), "top": (8, 0)})
    found = Inspection(verdict, (), {"A": Sheet(picture, 0.2)}, None, {"A": near})
    files = station.inputs_of(found, name)
    assert not station.store_files(folder, name, verdict, b"png", files).warnings


@pytest.fixture
def said(tmp_path: Path):
    """Labels about stored parts; (Labels, folder)."""

    def call(*labels: dict[str, Any]):
        file = tmp_path / "labels.jsonl"
        usual = {"reviewer": "anna", "blind": True}
        file.write_text("".join(f"{json.dumps({**usual, **one})}\n" for one in labels))
        return labelled.read(tmp_path / "evidence", [file])

    return call


def pool(folder: Path, name: str) -> tuple[np.ndarray, dict[str, Any]]:
    return np.asarray(shards.images_of(folder / name, 0)), shards.read_meta(folder / name, 0)


def test_an_ok_is_clean_in_both_looks(tmp_path, said):
    store(tmp_path / "evidence", "s1")
    found = said({"result_id": "r-s1", "label": "OK"})
    counts = labelled.write(found.told, tmp_path / "data")
    assert counts == {"parts": 1, "OK": 1, "surface-labels": 2, "surface-classes": 0}
    images, meta = pool(tmp_path / "data", labelled.POOL)
    assert images.shape == (2, *NANO_LAYOUT.surface_size, 5)
    assert images[0, 0, 0].tolist() == [200, 30, 0, 90, 0]  # shade, relief, -, difference, -
    assert images[1, 0, 0].tolist() == [100, 15, 0, 45, 0]
    assert meta["closer"].tolist() == [False, True]
    assert not meta["grid"].any() and not meta["defect"].any() and meta["labelled"].all()
    assert meta["score"].tolist() == [10, 10]


def test_drawn_cells_are_learned_in_the_windows_of_the_second_look_too(tmp_path, said):
    store(tmp_path / "evidence", "s1")
    cells = {"front": [[5, 6], [5, 7]]}
    found = said({"result_id": "r-s1", "label": "NG", "defect": "dent", "cells": cells})
    labelled.write(found.told, tmp_path / "data")
    _, meta = pool(tmp_path / "data", labelled.POOL)
    assert np.argwhere(meta["grid"][0]).tolist() == [[0, 5, 6], [0, 5, 7]]
    # the window of the front begins at cell (4, 4) and shows each cell as four
    assert np.argwhere(meta["grid"][1, 0]).min(0).tolist() == [2, 4]
    assert np.argwhere(meta["grid"][1, 0]).max(0).tolist() == [3, 7]
    assert meta["defect"].tolist() == [4, 4] and not meta["unmarked"].any()


def test_a_defect_outside_the_windows_teaches_the_second_look_nothing(tmp_path, said):
    store(tmp_path / "evidence", "s1")
    cells = {"front": [[15, 15], [15, 14]]}
    found = said({"result_id": "r-s1", "label": "NG", "defect": "cut", "cells": cells})
    assert labelled.write(found.told, tmp_path / "data")[labelled.POOL] == 1


def test_a_class_without_cells_has_a_pool_of_its_own(tmp_path, said):
    store(tmp_path / "evidence", "s1")
    found = said({"result_id": "r-s1", "label": "NG", "defect": "crack"})
    counts = labelled.write(found.told, tmp_path / "data")
    assert (counts[labelled.POOL], counts[labelled.CLASSES]) == (0, 1)
    _, meta = pool(tmp_path / "data", labelled.CLASSES)
    assert meta["unmarked"].tolist() == [True]


@pytest.mark.parametrize(
    ("labels", "why"),
    [
        ([{"label": "OK", "blind": False}], "1 informed"),
        ([{"label": "OK"}, {"label": "NG", "defect": "dent", "reviewer": "bert"}], "2 disagree"),
        ([{"label": "OK", "more": {"bundleDigest": "b" * 64}}], "another bundle"),
        ([{"label": "OK", "more": {"gold": True}}], "1 gold"),
        ([{"label": "cannot_tell"}], "1 cannot_tell"),
        ([{"label": "OK", "result_id": "elsewhere"}], "1 no evidence"),
    ],
)
def test_labels_that_do_not_count_are_told(tmp_path, said, labels, why):
    store(tmp_path / "evidence", "s1")
    with pytest.raises(LineError, match=why):
        said(*({"result_id": "r-s1", **one} for one in labels))


def test_an_adjudicated_disagreement_counts(tmp_path, said):
    store(tmp_path / "evidence", "s1")
    own = {"result_id": "r-s1"}
    found = said(
        {**own, "label": "OK"},
        {**own, "label": "NG", "defect": "dent", "reviewer": "bert"},
        {**own, "label": "OK", "reviewer": "cleo", "adjudicates": True},
    )
    assert [one.label.label for one in found.told] == ["OK"] and found.left_out == {}


def test_a_picture_of_another_layout_is_refused(tmp_path, said):
    store(tmp_path / "evidence", "s1", layout=(96, 288))
    found = said({"result_id": "r-s1", "label": "OK"})
    with pytest.raises(LoadError, match="another layout"):
        labelled.write(found.told, tmp_path / "data")


@pytest.mark.parametrize(
    "closer",
    [
        None, 5, ["x"], [5], [{}], [{"mark": "A", "file": "../x.png"}],
        [{"mark": "A", "file": "x.png", "windows": {"front": [4, 4]}}],
        [{"mark": "A", "file": "x.png", "windows": {view: [9, -1] for view in VIEWS}}],
        [{"mark": "A", "file": "x.png", "windows": dict.fromkeys(VIEWS, "ab")}],
        [{"mark": "A", "file": "../../x.png", "windows": {view: [0, 0] for view in VIEWS}}],
    ],
)  # fmt: skip
def test_damaged_second_looks_are_named(tmp_path, said, closer):
    store(tmp_path / "evidence", "s1")
    (path,) = (tmp_path / "evidence").glob("*.input.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "closer": closer}))
    found = said({"result_id": "r-s1", "label": "OK"})
    with pytest.raises(LoadError, match="closer"):
        labelled.write(found.told, tmp_path / "data")


def test_a_verdict_that_lost_its_part_is_named(tmp_path, said):
    store(tmp_path / "evidence", "s1")
    (path,) = (tmp_path / "evidence").glob("*.verdict.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "parts": []}))
    found = said({"result_id": "r-s1", "label": "OK"})
    with pytest.raises(LoadError, match="does not name"):
        labelled.write(found.told, tmp_path / "data")


@pytest.mark.parametrize("break_", ["\u2028", "\u0085", "\x1c", "\x0b"])
def test_a_line_of_labels_ends_at_its_line_feed_alone(tmp_path, break_):
    store(tmp_path / "evidence", "s1")
    line = {"result_id": "r-s1", "label": "OK", "reviewer": "an", "blind": True}
    text = json.dumps({**line, "more": {"note": f"a{break_}b"}}, ensure_ascii=False)
    (tmp_path / "l.jsonl").write_text(f"{text}\n")
    (one,) = labelled.read(tmp_path / "evidence", [tmp_path / "l.jsonl"]).told
    assert one.label.more["note"] == f"a{break_}b"


def test_an_ng_without_a_defect_teaches_no_surface(tmp_path, said):
    store(tmp_path / "evidence", "s1")
    found = said({"result_id": "r-s1", "label": "NG"})
    with pytest.raises(LineError, match="no label says anything of a surface"):
        labelled.write(found.told, tmp_path / "data")


def test_parts_are_held_back_for_good_and_about_as_many_as_asked():
    held = [labelled.held_back(f"serial {n}", 0.25) for n in range(2000)]
    assert held == [labelled.held_back(f"serial {n}", 0.25) for n in range(2000)]
    assert 0.2 < np.mean(held) < 0.3
    more = [labelled.held_back(f"serial {n}", 0.5) for n in range(2000)]
    assert all(after for before, after in zip(held, more, strict=True) if before)


def test_a_stopped_part_without_an_origin_is_harvested(tmp_path, said):
    store(tmp_path / "evidence", "s1")
    store(tmp_path / "evidence", "s2", failed=True)
    first, second = said(*({"result_id": f"r-{name}", "label": "OK"} for name in ("s1", "s2"))).told
    assert (first.origin, second.origin) == ("", "harvested")
    assert (first.part, second.part) == ("s1", "s2")
