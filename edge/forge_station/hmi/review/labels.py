"""Answers of people, and the rows of the labels file that they become.

A row is a `contract.label.Label`, as `training.load evidence` and `forge-station audit` read it;
what only the review knows stands in its `more`:

    origin, chance      how the part was chosen, and with which chance
    role, sure, ms      of the reviewer; whether they were sure; from picture to answer
    second, gold        a second person's look; a look at a part whose truth is known
    cells               asked, given, skipped (NG alone)
    viewDigest          view -> SHA-256 of the picture that was seen
    bundleDigest        of the bundle that judged the part
    look, key, time     opaque id of the look; key of the request; RFC 3339, UTC
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from forge_station.contract import record
from forge_station.contract.grid import SIDE
from forge_station.contract.label import Label
from forge_station.contract.record import Limit
from forge_station.contract.views import MARKS, VIEWS
from forge_station.hmi.review.log import ReviewError

Said = Literal["OK", "NG", "cannot_tell"]
Key = Annotated[str, Limit(pattern=r"[0-9a-zA-Z-]{16,64}", meaning="16 to 64 letters and digits")]
Millis = Annotated[int, Limit(0, 86_400_000)]
Cell = tuple[Annotated[int, Limit(0, SIDE - 1)], Annotated[int, Limit(0, SIDE - 1)]]
ClassName = Annotated[str, Limit(pattern="[a-z][a-z_]{0,31}", meaning="a class name")]


@dataclass(frozen=True)
class Answer:
    """What a person said at a look, or, at `change`, after it. `key` is the same when repeated."""

    label: Said
    key: Key
    sure: bool = True
    ms: Millis = 0


@dataclass(frozen=True)
class Painted:
    """Where the defect is, after an NG was saved; no class: skipped."""

    key: Key
    defect: ClassName | None = None
    mark: str | None = None
    cells: Mapping[str, tuple[Cell, ...]] = field(default_factory=dict)
    """View -> (row, column), 0-based."""

    def __post_init__(self) -> None:
        if self.cells and self.defect is None:
            raise ReviewError("cells without a class", which="defect", expected="its class")
        if self.mark is not None and self.mark not in MARKS:
            raise ReviewError("no such mark", which="mark", expected=MARKS, got=self.mark)
        unknown = sorted(set(self.cells) - set(VIEWS))
        if unknown:
            raise ReviewError("no such view", expected=", ".join(VIEWS), got=", ".join(unknown))

    @property
    def skipped(self) -> bool:
        return self.defect is None


def row(label: Label) -> dict[str, Any]:
    """A line of the labels file; what is not said is left out."""
    data: dict[str, Any] = record.write(label)
    return {name: value for name, value in data.items() if value not in (None, {}, False)} | {
        "blind": label.blind
    }


def contested(labels: list[Label]) -> bool:
    """Whether the lead has to decide: of the last words of everybody, two differ, somebody could
    not tell, or somebody took an answer back after the reveal."""
    blind: dict[str, Label] = {}
    took_back = False
    for label in labels:
        if label.adjudicates or label.more.get("gold"):
            continue
        if label.blind:
            blind[label.reviewer] = label
        elif label.reviewer in blind:
            took_back |= label.label != blind[label.reviewer].label
    words = {label.label for label in blind.values()}
    classes = {label.defect for label in blind.values() if label.defect is not None}
    return took_back or len(words) > 1 or "cannot_tell" in words or len(classes) > 1


def truth(labels: list[Label]) -> Literal["OK", "NG"] | None:
    """What a part is beyond doubt: as adjudicated, or as two people said blind."""
    words: dict[str, str] = {}
    judged: str | None = None
    for label in labels:
        if not label.blind or label.more.get("gold"):
            continue
        if label.adjudicates:
            judged = label.label
        else:
            words[label.reviewer] = label.label
    if judged is None and len(words) > 1 and not contested(labels):
        judged = next(iter(words.values()))
    return judged if judged in ("OK", "NG") else None  # type: ignore[return-value]


__all__ = ["Answer", "Painted", "contested", "row", "truth"]
