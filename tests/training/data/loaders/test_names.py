"""Labels in file names -> what is at each mark; nobody else's names get through."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.data.pictures import Run, picture
from training.data import examples
from training.data.loaders import names
from training.data.loaders.sample import LoadError

PATTERN = r"^[0-9]+_(?P<A>[01])(?P<B>[01])(?P<C>[01])(?P<D>[01])$"
VALUES = "1=screw,0=none"


def test_a_name_says_what_is_at_each_mark(tmp_path, run: Run):
    picture(tmp_path / "screws" / "images" / "7_1001.jpg", 0)
    picture(tmp_path / "screws" / "images" / "8_1111.jpg", 1)
    folder = tmp_path / "screws" / "images"
    report = run("names", folder, "--pattern", PATTERN, "--values", VALUES)
    one, two = examples.read(tmp_path / "out" / examples.FILE)
    assert one.messages[1].content == "<image>positions\nA B C D"
    assert one.messages[2].content == "A: screw\nB: none\nC: none\nD: screw"
    assert two.messages[2].content == "A: screw\nB: screw\nC: screw\nD: screw"
    assert report["source"] == one.source == "screws"


@pytest.mark.parametrize(
    ("file", "pattern", "values", "said"),
    [
        ("7_10.jpg", PATTERN, VALUES, "7_10.jpg: name: name has no label, got 7_10"),
        ("7_1001.jpg", PATTERN, "1=screw", "7_1001.jpg: B: unknown value, got 0; allowed: 1"),
        ("7_1001.jpg", "(", VALUES, "not a regular expression (--pattern)"),
        ("7_1001.jpg", "(?P<id>[0-9]+)", VALUES, "no position (--pattern)"),
        ("7_1001.jpg", PATTERN, "screw", "not a value (--values)"),
        ("7_1001.jpg", PATTERN, "1=screw: yes,0=none", "not a name (part)"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, run: Run, file, pattern, values, said):
    picture(tmp_path / "in" / file, 0)
    report = run("names", tmp_path / "in", "--pattern", pattern, "--values", values)
    assert report["code"] == 2 and said in report["error"]


@settings(deadline=None)
@given(st.text(alphabet="01A_.-:\n", max_size=12))
def test_any_name_is_read_or_refused(stem):
    pattern = names.parse_pattern(PATTERN)
    try:
        found = names.positions(stem, pattern, {"1": "screw", "0": "none"})
    except LoadError:
        assert not re.search(r"^[0-9]+_[01]{4}$", stem)
        return
    assert list(found) == ["A", "B", "C", "D"] and set(found.values()) <= {"screw", "none"}
