"""The ledger of looks: which parts were used to prove what, and so how much risk is left.

Every bundle or claim tried on the same parts is a chance to be right by luck, so each look may
spend less (contract/binomial.look_delta). A look counts when it shares any part with an earlier
one: a set that is a little larger or smaller is no new set. The file is one JSON object a line,
kept beside the parts' data, and only ever grows. `training.calibrate` and `forge-station audit`
write the same file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from forge_station.assurance.error import AssuranceError
from forge_station.contract import binomial, record
from forge_station.contract.error import ContractError


@dataclass(frozen=True)
class Look:
    """One use of a set of parts. `key` names all that went in, `parts` are digests of their ids."""

    number: int
    key: str
    time: str
    bundle: str
    claim: str
    parts: tuple[str, ...]


def names(ids: Iterable[str]) -> tuple[str, ...]:
    """What stands for parts in the ledger."""
    return tuple(sorted(hashlib.sha256(name.encode()).hexdigest()[:12] for name in ids))


def key(lines: Iterable[str]) -> str:
    """Digest of a look, of all that went in."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def read(path: Path) -> list[Look]:
    """All looks; none when the file does not exist. Raises AssuranceError for a damaged one."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise AssuranceError("the ledger of looks cannot be read", which=path, got=error) from None
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(record.read(Look, json.loads(line)))
        except (ValueError, RecursionError, ContractError) as error:
            raise AssuranceError(
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


def refusal(parts: int, rate: float, delta: float, look: int) -> str | None:
    """Why look number `look` at `parts` defective parts cannot prove `rate`, whatever is found;
    None: it can. Such a look is not taken: it would only spend risk."""
    needed = binomial.needed(rate, binomial.look_delta(delta, look))
    if parts >= needed:
        return None
    again = "" if look == 1 else f" at look {look} of these parts"
    return (
        f"{parts} defective parts cannot prove an escape rate of {100 * rate:g} %{again}: "
        f"{needed} without an escape are needed; use new parts"
    )
