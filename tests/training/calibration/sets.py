"""Rows with scores drawn from known distributions, as an evaluation would write them."""

from __future__ import annotations

from typing import Any

import numpy as np

from training.evaluation.rows import Row


def row(name: str, check: str, odds: float, defective: bool, **changes: Any) -> Row:
    """PASS below log-odds 0, else FAIL."""
    given: dict[str, Any] = {
        "outcome": "PASS" if odds < 0 else "FAIL",
        "expected": "FAIL" if defective else "PASS",
        "log_odds": {check: odds},
        "families": ("hex_nut",),
        "rules": {"min_reading_probability": 0.6},
        "provenance": "simulated",
    }
    given.update(changes)
    return Row(name, check, "zero-shot", **given)


def rows(
    good: int, bad: int, check: str = "surface", *, gap: float = 6.0, seed: int = 0, **changes: Any
) -> list[Row]:
    """Honest log-odds: two normal distributions of variance `gap` at -gap/2 and +gap/2."""
    rng = np.random.default_rng([seed, good, bad])
    made = []
    for count, defective in ((good, False), (bad, True)):
        middle = gap / 2 if defective else -gap / 2
        for number, value in enumerate(rng.normal(middle, np.sqrt(gap), count)):
            name = f"{check}-{seed}-{'bad' if defective else 'good'}-{number}"
            made.append(row(name, check, float(value), defective, **changes))
    return made
