"""Which parts are looked at, and which look comes next: chance, every bit of it from one seed.

With the seed, the evidence and the log every draw can be made again. A look is drawn without regard
to the looks before it, so that an answer tells nothing of the next part. Pure computation.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from forge_station.contract.verdict import Outcome
from forge_station.evidence.index import Row
from forge_station.hmi.review.settings import ReviewSettings

T = TypeVar("T")
Kind = Literal["suspect", "calm", "gold"]
PRIOR_SUSPECT, PRIOR_CALM = (2.0, 1.0), (0.2, 20.0)
"""Defective and good parts among what the station stopped, and among what it passed, as taken
before anybody has looked."""


@dataclass(frozen=True)
class Draw:
    """A part that people are to look at, and how it was chosen."""

    result_id: str
    serial: str
    product: str
    outcome: str
    time: str
    """Of the verdict, RFC 3339, UTC."""
    bundle: str
    """Digest of the bundle that judged."""
    origin: str
    """As `assurance.audit` names it: audit, harvested, challenge."""
    chance: float
    """With which a part of this outcome was drawn."""
    second: bool
    """A second person judges it, too."""


def uniform(seed: str, *words: object) -> float:
    """A number in [0, 1) that only who has the seed can foresee."""
    return int(token(seed, *words)[:13], 16) / 16.0**13


def token(seed: str, *words: object) -> str:
    """64 hexadecimal digits that say nothing of `words`."""
    text = "\x1f".join(str(word) for word in words)
    return hmac.new(seed.encode(), text.encode(), hashlib.sha256).hexdigest()


def draw(
    row: Row, settings: ReviewSettings, seed: str, pass_share: float, masters: Mapping[str, str]
) -> Draw | None:
    """The part as an item of the queue; None when it is not drawn.

    `pass_share`: share of PASS parts of which evidence is kept, drawn before (`row.audit`). Masters
    are parts whose truth everybody knows: they come as gold only. An ERROR judged nothing.
    """
    if row.outcome == Outcome.ERROR or row.serial in masters:
        return None
    origin, chance = "harvested", 1.0
    if row.serial in settings.challenge:
        origin = "challenge"
    elif row.outcome == Outcome.PASS:
        asked = settings.audit_share
        origin, chance = "audit", pass_share if asked is None else min(asked, pass_share)
        share = chance / pass_share if pass_share > 0.0 else 0.0
        if not row.audit or uniform(seed, "audit", row.result_id) >= share:
            return None
    second = uniform(seed, "second", row.result_id) < settings.second_share
    return Draw(
        row.result_id, row.serial, row.product, row.outcome, row.time, row.bundle, origin, chance,
        second,
    )  # fmt: skip


def suspect_share(
    target: float, suspect: tuple[int, int], calm: tuple[int, int], gold_share: float
) -> float:
    """How often to look at a stopped part, so that a share `target` of all looks is at a defect.

    `suspect`, `calm`: (defective, good) as people found so far. Half of the gold is defective.
    """
    bad = _mean(suspect, PRIOR_SUSPECT)
    rare = _mean(calm, PRIOR_CALM)
    rest = max(1e-9, 1.0 - gold_share)
    wanted = (target - gold_share * 0.5) / rest
    if bad <= rare:
        return 0.5
    return min(1.0, max(0.0, (wanted - rare) / (bad - rare)))


def _mean(found: tuple[int, int], prior: tuple[float, float]) -> float:
    bad, good = found[0] + prior[0], found[1] + prior[1]
    return bad / (bad + good)


def kind_of(seed: str, number: int, gold_share: float, suspects: float) -> Kind:
    """Of look `number`; `suspects` from `suspect_share`."""
    if uniform(seed, "gold", number) < gold_share:
        return "gold"
    return "suspect" if uniform(seed, "kind", number) < suspects else "calm"


def pick(seed: str, number: int, items: Sequence[T], word: str = "item") -> T:
    """One of `items`, each as likely as any other."""
    return items[int(uniform(seed, word, number) * len(items))]


__all__ = ["Draw", "Kind", "draw", "kind_of", "pick", "suspect_share", "token", "uniform"]
