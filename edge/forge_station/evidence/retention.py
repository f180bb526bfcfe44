"""What goes first when the room ends, in words that an index can sort by. It deletes nothing.

Rank 0 goes first: PASS parts that no audit drew. Then the pattern images of all others (the part
stays, and can be judged again), then ERROR (nothing was judged), PASS drawn for an audit, and last
what is not PASS or has a label. Of one rank the oldest goes first. What is marked for review, or
held, stays.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forge_station.config import EvidenceConfig
from forge_station.contract.verdict import Outcome

Label = Literal["none", "review", "held", "labelled"]
LABELS: tuple[Label, ...] = ("none", "review", "held", "labelled")
"""What people said of a part's evidence: a person is to look; never delete; it has a label."""
PROTECTED: tuple[Label, ...] = ("review", "held")

PASSED, FAILED_TO_JUDGE, AUDIT, NOT_PASSED, KEPT = 0, 1, 2, 3, 9


def rank_of(outcome: str, audit: bool, label: str) -> int:
    """How long evidence stays: the smaller goes first, `KEPT` never."""
    if label in PROTECTED:
        return KEPT
    if label == "labelled" or outcome in (Outcome.FAIL, Outcome.UNSURE):
        return NOT_PASSED
    if outcome == Outcome.ERROR:
        return FAILED_TO_JUDGE
    return AUDIT if audit else PASSED


def drawn(result_id: str, share: float) -> bool:
    """Whether a part is drawn for audits: at random, but the same whenever it is asked."""
    digest = hashlib.sha256(result_id.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2.0**64


@dataclass(frozen=True)
class Room:
    """Limits of a folder in bytes."""

    quota: int
    min_free: int

    @classmethod
    def of(cls, settings: EvidenceConfig) -> Room:
        return cls(int(settings.quota_gb * 1e9), int(settings.min_free_gb * 1e9))

    def short(self, folder: Path, used: int, need: int) -> int:
        """Bytes that must go before `need` more fit; 0: they fit. Raises OSError."""
        disk = os.statvfs(folder)
        free = disk.f_bavail * disk.f_frsize
        floor = min(self.min_free, disk.f_blocks * disk.f_frsize // 16)
        return max(0, used + need - self.quota, floor + need - free)
