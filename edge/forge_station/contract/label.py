"""What a person said about an inspected part, and which of several words about it counts.

One JSON object a line of a labels file; `training.load evidence` learns from them, `forge-station
audit` counts with them. It knows no verdict and no file.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

SINGLE_BLIND, CONFIRMED = 0.9, 0.98
"""Weight of one blind label, and of two that say the same or an adjudicated one."""


@dataclass(frozen=True)
class Label:
    """What one person said about one part (`mark`) or a whole tray (None)."""

    result_id: str
    label: Literal["OK", "NG", "cannot_tell"]
    reviewer: str
    blind: bool
    mark: str | None = None
    defect: str | None = None
    cells: Mapping[str, tuple[tuple[int, int], ...]] | None = None
    """View -> (row, column), 0-based, as in the verdict."""
    readings: Mapping[str, str] | None = None
    adjudicates: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def said(self) -> tuple[object, ...]:
        """What two people have to agree on: cells differ between any two hands."""
        return self.label, self.defect, tuple(sorted((self.readings or {}).items()))


def settle(labels: Sequence[Label]) -> tuple[list[tuple[Label, float]], Counter[str]]:
    """One label and weight for each part, and how many were left out and why.

    The last word of each reviewer counts. Blind ones only, also when they adjudicate: whoever has
    seen the verdict agrees with it. Looks at gold (`more.gold`) test the reviewer, not the part.
    Who names no class or reading does not contradict who does; cells of those who agree are joined.
    """
    counted: Counter[str] = Counter(cannot_tell=0, informed=0, disagree=0)
    by_part: dict[tuple[str, str | None], dict[str, Label]] = defaultdict(dict)
    judged: dict[tuple[str, str | None], Label] = {}
    for label in labels:
        key = (label.result_id, label.mark)
        if label.more.get("gold") is True:
            counted["gold"] += 1
        elif label.label == "cannot_tell":
            counted["cannot_tell"] += 1
        elif not label.blind:
            counted["informed"] += 1
        elif label.adjudicates:
            judged[key] = label
        else:
            by_part[key][label.reviewer] = label
    settled = [(label, CONFIRMED) for label in judged.values()]
    for key, own in by_part.items():
        if key in judged:
            continue
        said = list(own.values())
        if not _agree(said):
            counted["disagree"] += len(own)
            continue
        same = len(said) > 1 and len({label.said for label in said}) == 1
        settled.append((_joined(said), CONFIRMED if same else SINGLE_BLIND))
    return settled, counted


def _agree(labels: Sequence[Label]) -> bool:
    """Whether the words are equal, and nobody names another class or reading than another."""
    words, classes, readings = zip(*(label.said for label in labels), strict=True)
    named = ({item for item in found if item} for found in (classes, readings))
    return len(set(words)) == 1 and all(len(found) <= 1 for found in named)


def _joined(labels: Sequence[Label]) -> Label:
    """What people who agree say together."""
    drawn: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for label in labels:
        for view, cells in (label.cells or {}).items():
            drawn[view].update(cells)
    return replace(
        labels[0],
        defect=next((label.defect for label in labels if label.defect), None),
        readings=next((label.readings for label in labels if label.readings), None),
        cells={view: tuple(sorted(cells)) for view, cells in drawn.items()} or None,
    )
