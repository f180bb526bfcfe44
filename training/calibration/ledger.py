"""The ledger of looks: which parts were used to certify what, and so how much risk is left.

Every bundle or claim tried on the same parts is a chance to be right by luck, so each look may
spend less (contract/binomial.look_delta). A look counts when it shares any part with an earlier
one: a set that is a little larger or smaller is no new set. The file is one JSON object a line,
kept beside the parts' data, and only ever grows.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from forge_station.contract import record
from forge_station.contract.error import ContractError
from training.calibration.error import CalibrationError
from training.calibration.parts import Part


@dataclass(frozen=True)
class Look:
    """One use of a set of parts. `key` names all that went in, `parts` are digests of their ids."""

    number: int
    key: str
    time: str
    bundle: str
    claim: str
    parts: tuple[str, ...]


def names(parts: Iterable[Part]) -> tuple[str, ...]:
    return tuple(sorted(hashlib.sha256(part.id.encode()).hexdigest()[:12] for part in parts))


def key(words: Sequence[str], parts: Iterable[Part]) -> str:
    """Digest of a look: `words` of bundle and claim, and every part with its truth and scores."""
    lines = sorted(f"{p.id} {p.defective} {p.passed} {sorted(p.log_odds.items())}" for p in parts)
    return hashlib.sha256("\n".join([*words, *lines]).encode()).hexdigest()


def read(path: Path) -> list[Look]:
    """All looks; none when the file does not exist. Raises CalibrationError for a damaged one."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(
            "the ledger of looks cannot be read", which=path, got=error
        ) from None
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(record.read(Look, json.loads(line)))
        except (ValueError, ContractError) as error:
            raise CalibrationError(
                "the ledger of looks is damaged, so nobody knows how often its parts were used",
                which=f"{path}, line {number}",
                got=" ".join(str(error).split()),
                action="restore it from a backup, or certify on new parts with a new ledger",
            ) from error
    return found


def number(looks: Sequence[Look], own_key: str, parts: Sequence[str]) -> int:
    """Which look at these parts this is, from 1. The same look again is no further one."""
    for look in looks:
        if look.key == own_key:
            return look.number
    used = set(parts)
    return 1 + len({look.key for look in looks if used & set(look.parts)})


def append(path: Path, look: Look) -> None:
    """Write the look to disk before anybody sees what it shows."""
    if any(known.key == look.key for known in read(path)):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record.write(look)) + "\n")
        file.flush()
        os.fsync(file.fileno())
