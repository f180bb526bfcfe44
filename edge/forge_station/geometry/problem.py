"""A problem with what was seen, found before any model runs. It does not know who acts on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["UNSURE", "ERROR"]


@dataclass(frozen=True)
class Problem:
    """`level` ERROR: there is nothing to inspect. UNSURE: it can be read but not be trusted.

    `code` is the reason code of the verdict; `text` says what, got, limit and what to do.
    `part` is the index of the part it is about, from 0 in the scene's order; None: the tray.
    """

    code: str
    text: str
    level: Level
    part: int | None = None
