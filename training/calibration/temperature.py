"""Temperature of each check: what its log-odds are divided by so that they are honest odds.

One number a check, found on parts of its own. It changes no decision of a check alone (it is
monotone), but makes the scores of different checks comparable, so that their maximum means
something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from forge_station.checks import CERTAIN
from training.calibration.parts import Part

Array = NDArray[np.float64]
BOUNDS = (0.05, 20.0)
LEAST = 20
"""Parts of each kind below which no temperature is fitted."""


@dataclass(frozen=True)
class Fit:
    """`temperature` with the negative log-likelihood a part at temperature 1 and at this one.

    `note` says why it is 1 where it could not be fitted.
    """

    temperature: float
    parts: int
    nll_before: float | None = None
    nll_after: float | None = None
    note: str = ""


def nll(log_odds: Array, defective: NDArray[np.bool_], temperature: float) -> float:
    """Mean negative log-likelihood of the truths; [n] log-odds and truths."""
    scaled = np.where(defective, -log_odds, log_odds) / temperature
    return float(np.logaddexp(0.0, scaled).mean())


def fit(parts: Sequence[Part], check: str) -> Fit:
    """The temperature of one check from parts whose truth is about that check.

    What is certain by count (a missing piece) tells nothing about probabilities and is left out.
    Where the score separates good from defective, the likelihood has no maximum: temperature 1.
    """
    own = [
        (part.log_odds[check], part.defective)
        for part in parts
        if part.check == check and abs(part.log_odds.get(check, CERTAIN)) < CERTAIN
    ]
    odds = np.array([value for value, _ in own], float)
    defective = np.array([truth for _, truth in own], bool)
    if min(defective.sum(), (~defective).sum(), len(own)) < LEAST:
        return Fit(1.0, len(own), note=f"fewer than {LEAST} good or defective parts: 1")
    low, high = np.log(BOUNDS)
    found = minimize_scalar(
        lambda log_t: nll(odds, defective, float(np.exp(log_t))),
        bounds=(low, high),
        method="bounded",
        options={"xatol": 1e-6},
    )
    before, after = nll(odds, defective, 1.0), float(found.fun)
    if found.x - low < 1e-3 or high - found.x < 1e-3 or after > before:
        note = "no maximum of the likelihood within the bounds (good and defective separate): 1"
        return Fit(1.0, len(own), before, before, note)
    return Fit(float(np.exp(found.x)), len(own), before, after)
