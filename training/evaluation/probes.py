"""Grounding: does an answer belong to the mark that was asked for?

Of a station's model, which answers mark by mark, honestly askable is this: draw the same tray again
with its letters passed on by one place, and again with its parts in other columns. The readings
must move with the letters and must not care for the columns. Only marks where this can be seen
count: another part lies there than before, so a reader that looks at places instead of letters, or
that says the same of every mark, answers wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from forge_station import checks
from forge_station.contract.views import MARKS
from forge_station.geometry import sheet
from forge_station.geometry.pose import PartCloud
from forge_station.pipeline import Inspector
from training.evaluation.rows import MarkRow, Probe

MOVED_LETTERS, MOVED_COLUMNS = "moved_letters", "moved_columns"


def of_station(
    inspector: Inspector, parts: Sequence[PartCloud], marks: Sequence[MarkRow]
) -> tuple[Probe, ...]:
    """Two more readings of the tray. `true` of a probe: what was read of that part before."""
    if len(marks) != len(parts):
        return ()
    columns = checks.columns_of(len(parts), inspector.layout)
    before = _read(inspector, parts, columns)
    names = [mark.true for mark in marks]
    passed_on = [*range(1, len(parts)), 0]
    letters = _read(inspector, [parts[i] for i in passed_on], columns)
    found = [
        Probe(MOVED_LETTERS, MARKS[new], before[old], letters[new])
        for new, old in enumerate(passed_on)
        if names[new] != names[old]
    ]
    turned = [columns[i] for i in passed_on]
    places = _read(inspector, parts, turned)
    found += [
        Probe(MOVED_COLUMNS, MARKS[i], before[i], places[i])
        for i, before_there in enumerate(passed_on)
        if names[i] != names[before_there]
    ]
    return tuple(found)


def _read(inspector: Inspector, parts: Sequence[PartCloud], columns: Sequence[int]) -> list[str]:
    """What the model reads of each part, without weighing in the size."""
    picture = sheet.marks_sheet([part.points for part in parts], columns, inspector.layout)
    read = checks.read_marks(inspector.model, picture, checks.measured(parts), {})
    return [max(odds, key=lambda part: odds[part]) for _, odds in sorted(read.seen.items())]
