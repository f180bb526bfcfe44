"""What may happen to a stream's rows when the outbox has no room, and which go first.

It knows no row and no file; `outbox_writer` keeps these rules, `backlog` the order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

WhenFull = Literal["refuse", "overwrite", "drop"]


@dataclass(frozen=True)
class Policy:
    """`urgency`: lower is sent first. `when_full`, said of rows that were not delivered:

    * `refuse`: they stay, the new row is refused, and the line stops;
    * `overwrite`: the oldest of them make room for the new;
    * `drop`: they go before any other stream's.
    """

    urgency: int
    when_full: WhenFull = "refuse"


POLICIES: Mapping[str, Policy] = {
    "alarm": Policy(0),
    "audit": Policy(1),
    "verdict": Policy(2),
    "grid": Policy(3),
    "image": Policy(9, "drop"),
}
"""A stream that is not named here is kept as verdicts are, and sent after grids.

Status (health, state, last) is no stream: only the newest is worth sending, so it never waits here.
"""
OTHER = Policy(4)


def policies(results: Literal["refuse", "overwrite"] = "refuse") -> Mapping[str, Policy]:
    """The table, with what becomes of verdicts and their grids chosen by the site."""
    chosen = {name: replace(POLICIES[name], when_full=results) for name in ("verdict", "grid")}
    return {**POLICIES, **chosen}


def policy_of(table: Mapping[str, Policy], stream: str) -> Policy:
    """The stream's policy, `OTHER` for one that the table does not name."""
    return table.get(stream, OTHER)
