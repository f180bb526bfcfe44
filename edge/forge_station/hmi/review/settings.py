"""How the review is set (station file: `hmi.review`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from forge_station.contract import record
from forge_station.contract.record import Limit, Probability

Days = Annotated[float, Limit(0.1, 3650.0)]


@dataclass(frozen=True)
class ReviewSettings:
    """What is drawn into the queue, and how it is mixed."""

    audit_share: Probability | None = None
    """Of all PASS parts, drawn at random. At most `evidence.pass_share`, since the others are not
    kept; None: as many as that."""
    second_share: Probability = 0.15
    """Of all drawn parts, judged by a second person who knows nothing of the first."""
    gold_share: Probability = 0.10
    """Of all looks, at a part whose truth is known; nobody is told which."""
    defect_share: Probability = 0.40
    """So many of the looks are to be at defective parts, as far as the queue has them."""
    gold_again_days: Days = 14.0
    """A person is not shown the same known part again before."""
    rest_minutes: Annotated[float, Limit(0.0, 1440.0)] = 15.0
    """A part is not shown before: nobody is to remember it from the live screen."""
    max_age_days: Days = 30.0
    """Older parts are not drawn and no longer shown."""
    challenge: Mapping[str, Literal["OK", "NG"]] = field(default_factory=dict)
    """Serial -> truth of parts that are sent through the line with a known fault, or known good."""

    def __post_init__(self) -> None:
        record.check(self)


__all__ = ["ReviewSettings"]
